"""Drafters as models of vLLM: EAGLE's block; vLLM's EAGLE-3 with image embeddings, its DSpark with a mask.

`BesideAnyTarget` loads them: vLLM does not find the parts of some targets, and takes the embeddings of others
without their scale.

Shapes: N rows of a step, U visual tokens among them, D hidden, S the last state and the depths side by
side, V vocabulary, K draft vocabulary.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    maybe_prefix,
)

from vlmdistill.drafters.core.serving import DRAFT_IDS, KEY
from vlmdistill.pipelines.vllm.plugin.layer_input import LayerInput
from vlmdistill.pipelines.vllm.plugin.limits import drafter_of, feeding_of

PLACEHOLDERS = ("image_token_index", "media_placeholder_token_id")
"""Attributes that vLLM reads from the config of a target that is not in its list.

See `load_model` in llm_base_proposer.py.
"""


IDENTITY_ROWS = 64
"""Rows of the identity that are multiplied by the LM head at a time."""


class ServedEagleBlock(LayerInput):
    """A drafter whose decoder layer is vLLM's. The inputs of the layer are computed by the drafter's code."""

    guesses = False
    """The next passes are not the first of a draft. Graphs of those and of first passes are others."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.speculative_config.draft_model_config.hf_config
        feeding = feeding_of(vllm_config)
        assert feeding is not None, "vLLM builds this class only for exported drafters"
        longest_step = vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(
            drafter_of(feeding), longest_step, config.max_position_embeddings
        )
        # The proposer replaces it with the target's table (llm_base_proposer.py `_maybe_share_embeddings`).
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            prefix=maybe_prefix(prefix, "embed_tokens"),
        )
        # Numbered after the target's layers: vLLM distinguishes KV caches by this number.
        number = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.layer = LlamaDecoderLayer(
            vllm_config,
            disable_input_layernorm=self.drafter.block.layer.input_norm is None,
            prefix=maybe_prefix(prefix, f"layers.{number}"),
            config=config,
        )
        del self.drafter.block.layer
        vocabulary_K = self.drafter.vocabulary_K
        if vocabulary_K is not None:
            draft_ids_K = nn.Parameter(vocabulary_K, requires_grad=False)
            self.register_parameter(DRAFT_IDS, draft_ids_K)

    def forward(
        self, positions_N: Tensor, hidden_ND: Tensor, embed_ND: Tensor
    ) -> Tensor:
        """The drafter's states, [N, D]."""
        if self.guesses and self.drafter.has_cell:
            return self.drafter.cell(embed_ND, hidden_ND)
        rotary_N, x_ND = self.entries(positions_N, hidden_ND, embed_ND)
        state_ND, residual_ND = self.layer(rotary_N, x_ND, None)
        sum_ND: Tensor = state_ND + residual_ND
        return sum_ND


class ImageEmbeddings:
    """Gives a drafter the visual embeddings that it was trained with, where vLLM has placeholders."""

    model: Any

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Sequence[Tensor] | None = None,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings, visual ones instead of those of the placeholders, [N, D]."""
        embed_ND: Tensor = self.model.embed_tokens(input_ids)
        return with_images(embed_ND, multimodal_embeddings, is_multimodal)


class EagleVlmdistill(ImageEmbeddings, nn.Module):
    """A drafter that is one `EagleBlock` on the target's last state, with the target's tables.

    vLLM calls it as it calls models/llama_eagle.py `EagleLlamaForCausalLM`.
    """

    has_own_embed_tokens = False
    has_own_lm_head = False
    _draft_head_KD: Tensor | None = None
    """The rows of the target's LM head for a draft vocabulary, once they are used."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        feeding = feeding_of(vllm_config)
        assert feeding is not None, "vLLM builds this class only for exported drafters"
        self.supports_multimodal_embeddings = feeding.visual != "dropped"
        self.model = ServedEagleBlock(vllm_config, maybe_prefix(prefix, "model"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The drafter's states twice, [N, D]: vLLM scores the first, and the next step reads the second."""
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        state_ND = self.model(positions, hidden_states, inputs_embeds)
        return state_ND, state_ND

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Scores of the next token by the target's LM head, which the proposer sets, [N, V].

        Tokens outside of a draft vocabulary score -inf.
        """
        draft_ids_K = getattr(self.model, DRAFT_IDS, None)
        if draft_ids_K is None:
            logits_NV: Tensor = self.logits_processor(self.lm_head, hidden_states)
            return logits_NV
        if self._draft_head_KD is None:
            self._draft_head_KD = self._rows(draft_ids_K, hidden_states)
        logits_NK = F.linear(hidden_states, self._draft_head_KD)
        shape = (len(hidden_states), self.config.vocab_size)
        logits_NV = logits_NK.new_full(shape, -torch.inf)
        logits_NV[:, draft_ids_K] = logits_NK
        return logits_NV

    def _rows(self, draft_ids_K: Tensor, like: Tensor) -> Tensor:
        """The target's LM head for the draft vocabulary, [K, D].

        It is read off products with the identity: vLLM may have packed the head, or split it over ranks.
        """
        columns = list[Tensor]()
        identity_DD = torch.eye(like.shape[1]).to(like)
        for first in range(0, len(identity_DD), IDENTITY_ROWS):
            identity_XD = identity_DD[first : first + IDENTITY_ROWS]
            logits_XV = self.logits_processor(self.lm_head, identity_XD)
            columns.append(logits_XV[:, draft_ids_K].to(like))
        return torch.cat(columns).t().contiguous()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load an exported folder; ValueError when it lacks a weight."""
        self._draft_head_KD = None
        stacked: dict[str, tuple[str, int | str]] = {
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
        load_all(self.model, weights, WeightsMapper(orig_to_new_stacked=stacked))


class Eagle3BlockVlmdistill(EagleVlmdistill, Eagle3LlamaForCausalLM):
    """An `EagleVlmdistill` on states of several layers, which vLLM keeps for classes of EAGLE-3 alone."""

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """The states from `with_last_state`, [N, S], as the entries read them, [N, D]."""
        combined_ND: Tensor = self.model.drafter.combine(hidden_states)
        return combined_ND


def with_last_state(
    target: nn.Module, given: Any, output: tuple[Tensor, list[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """A forward hook of a target that returns its last state and those of some layers: the last is first.

    ValueError if it returns the last state alone, as vLLM's class around a model of transformers may.
    """
    if not isinstance(output, tuple):
        raise ValueError(
            f"{type(target).__name__} of vLLM keeps no states of this target's layers: serve a drafter that "
            "reads the last state alone, such as hivis"
        )
    last_ND, depths = output
    return last_ND, [last_ND, *depths]


class Eagle3Vlmdistill(ImageEmbeddings, Eagle3LlamaForCausalLM):
    """vLLM's EAGLE-3 with image embeddings.

    A folder of other origin runs as in vLLM, with the embedding of the placeholder.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.supports_multimodal_embeddings = feeding_of(vllm_config) is not None


class DSparkVlmdistill(Qwen3DSparkForCausalLM):
    """vLLM's DSpark, with the learned mask of an exported drafter; other folders run as in vLLM."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a folder; ours may have a mask, which is empty where the masks have a token's embedding."""
        by_name = dict(weights)
        mask_D = by_name.pop(KEY, None)
        super().load_weights(by_name.items())
        if mask_D is not None and len(mask_D):
            mask = self.model.mask_embedding
            load = getattr(mask, "weight_loader", default_weight_loader)
            load(mask, mask_D)
            self.model.has_separate_mask_embedding = True


def load_all(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], mapper: WeightsMapper
) -> None:
    """Load an exported folder; ValueError when it lacks a weight."""
    loaded = AutoWeightsLoader(model).load_weights(weights, mapper=mapper)
    expected = {
        name for name, _ in model.named_parameters() if "embed_tokens" not in name
    }
    lacking = sorted(expected - loaded)
    if lacking:
        raise ValueError(
            f"the drafter's folder lacks {', '.join(lacking)}: export it again"
        )


def with_images(
    embed_ND: Tensor, visual_UD: Sequence[Tensor] | None, is_visual_N: Tensor | None
) -> Tensor:
    """Visual embeddings in their rows: the first D columns, since Qwen3-VL has deep features after them."""
    if visual_UD and is_visual_N is not None:
        width = embed_ND.shape[-1]
        narrow_UD = torch.cat([image_UD[:, :width] for image_UD in visual_UD])
        embed_ND[is_visual_N.to(embed_ND.device)] = narrow_UD.to(embed_ND)
    return embed_ND


class BesideAnyTarget:
    """Loads a drafter of vLLM beside more targets, if it is exported; comes before vLLM's class."""

    model: Any
    vllm_config: Any

    def load_model(self, target_model: Any) -> None:
        """Load the drafter, which reads embeddings as layer 0 of the target does."""
        is_exported = feeding_of(self.vllm_config) is not None
        if is_exported:
            name_parts(target_model)
        super().load_model(target_model)  # type: ignore[misc]
        if is_exported:
            scale_embeddings(self.model, target_model)


def name_parts(target: Any) -> None:
    """Name the parts of a multimodal target as vLLM looks for them.

    A config may have transformers' `image_token_id` alone; Idefics3's text model has no `model` within, and
    the LM head beside it; Cohere's has its table as LM head.
    """
    if not hasattr(target, "get_language_model"):
        return
    image_id = getattr(target.config, "image_token_id", None)
    if image_id is not None:
        for name in PLACEHOLDERS:
            if not hasattr(target.config, name):
                setattr(target.config, name, image_id)
    text = target.get_language_model()
    if not hasattr(text, "model"):
        named = SimpleNamespace(
            model=text, lm_head=target.lm_head, embed_input_ids=text.embed_input_ids
        )
        target.get_language_model = lambda: named
    elif not hasattr(text, "lm_head"):
        text.lm_head = text.model.embed_tokens


class ScaledTable(nn.Module):
    """A table whose embeddings are multiplied by a constant."""

    def __init__(self, table: nn.Module, scale: float) -> None:
        super().__init__()
        self.table, self.scale = table, scale

    def forward(self, ids_N: Tensor) -> Tensor:
        """Token embeddings, [N, D]."""
        embed_ND: Tensor = self.table(ids_N) * self.scale
        return embed_ND


def scale_embeddings(drafter: Any, target: Any) -> None:
    """Multiply the embeddings of a drafter as the target does, whose bare table vLLM shares (Gemma)."""
    text = target
    if hasattr(target, "get_language_model"):
        text = target.get_language_model()
    table = getattr(text.model, "embed_tokens", text)
    if getattr(drafter.model, "embed_tokens", drafter) is not table:
        return
    # The scale is read from an embedding that is all ones, which is exact in any dtype.
    hook = table.register_forward_hook(lambda *called: torch.ones_like(called[-1]))
    id_1 = torch.zeros(1, dtype=torch.long, device=table.weight.device)
    embed_1D = text.embed_input_ids(id_1)
    hook.remove()
    scale = float(embed_1D[0, 0])
    if scale != 1:
        drafter.model.embed_tokens = ScaledTable(table, scale)
