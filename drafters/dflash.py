"""DFlash -- DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036; DSpark is arXiv
2607.05147.

Idea: a drafter that guesses a whole block in one pass may be several layers deep. Each layer
projects the target's fused states to keys and values of its own; a block is the last token
and masks, which see each other.
Differs from EAGLE by: no own states are fed back; context states that pass through no layer;
several layers of Qwen3's shape; the loss on some positions of each sample (`anchors`).
DSpark's switches: a Markov head, which adds to the scores of a token an embedding of the
token before it (`markov`, its rank), and a confidence head, which estimates the chance of
acceptance (`tells`).
On images: `context=text` leaves visual positions out, so that drafting costs the same for
any number of them and the features are those of `wren`; `context=all` reads the states at
all positions, as served VLMs do.

Shapes: N entries, R rows, J slots of a block, Q = R * J, G guesses of a block, D hidden,
V vocabulary, K draft vocabulary, S the states of several layers side by side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import msgspec
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from vlmdistill.drafters.core import (
    Batch,
    Drafter,
    Entries,
    Head,
    KVCache,
    RMSNorm,
    Tree,
)
from vlmdistill.drafters.core.batch import TokenIndex
from vlmdistill.drafters.core.config import (
    Count,
    ModelConfig,
    Positions,
    Range,
    Stage,
    TrainConfig,
    at_least,
    depths,
    features,
    states_of,
)
from vlmdistill.drafters.core.layers import DecoderLayer, layer_names
from vlmdistill.drafters.core.serving import (
    KEY,
    Feeding,
    ServedDrafter,
    Visual,
    layer_settings,
    layer_weights,
    unserved,
)
from vlmdistill.drafters.core.vocabulary import FrequentTokens
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo

MASK = "mask_embedding.pt"
"""The file of a learned mask, in published drafters."""

LAYOUTS = {
    "DFlashDraftModel": False,
    "DSparkDraftModel": True,
    "Qwen3DSparkModel": True,
    "dflash": False,
    "dspark": True,
}
"""Architectures of z-lab, SpecForge, DeepSpec and speculators -> `from_anchor` by default."""

NEUTRAL: dict[str, Any] = {
    "causal": False,
    "is_causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}
"""Switches of vLLM's drafters -> the value that drafters here have."""

DSPARK_NAMES = {
    "markov_head.markov_w1": "markov_in",
    "markov_head.markov_w2": "markov_out",
    "confidence_head.proj": "tell",
}
PUBLISHED_NAMES = {
    **{name: name for name in ("fc", "hidden_norm", "norm", "d2t")},
    **layer_names("layers.*", "layers.*"),
    "layers.*.input_layernorm": "input_norms.*",
    "layers.*.self_attn.q_norm": "layers.*.q_norm",
    "layers.*.self_attn.k_norm": "layers.*.k_norm",
    **DSPARK_NAMES,
    f"{MASK}:embedding": "mask_D",
}

PROJECTORS = (None, "dflash", "dspark")
"""Values of `projector_type` that are read."""


class PublishedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the `config.json` of a published drafter."""

    architectures: tuple[str, ...] = ()
    speculators_model_type: str | None = None
    num_hidden_layers: int
    block_size: int
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] = ()
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    sample_from_anchor: bool | None = None
    projector_type: str | None = None

    @property
    def layout(self) -> str:
        """The name that `LAYOUTS` has it by."""
        return self.speculators_model_type or ", ".join(self.architectures)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that the states enter.

        speculators names those, all others the layers that the states leave.
        """
        if self.speculators_model_type:
            return self.aux_hidden_state_layer_ids
        return tuple(layer + 1 for layer in self.target_layer_ids)


class DFlash(FrequentTokens, Drafter):
    """Some decoder layers over a block of masks, with the target's states as their context."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """DFlash's; a block of 8."""

        layers: Annotated[int, Range(1, 64)] = 5
        """Decoder layers."""
        block: Annotated[int, Range(1, 64)] = 8
        """Positions of one pass: the last token and masks; at least 2, or 1 with `from_anchor`."""
        from_anchor: bool = False
        """The next token is guessed at the last token's own position (DSpark); else at the
        first mask's."""
        taps: tuple[int, ...] = ()
        """Layers of the target whose inputs are read; none: EAGLE-3's three."""
        mask: Annotated[int, Range(-1)] = -1
        """The token whose embedding a mask has, as in released drafters; -1: a learned
        vector."""
        context: Literal["text", "all"] = "text"
        """Positions whose states are read: those of text, or visual ones too."""
        markov: Count = 0
        """Rank of the Markov head (DSpark: 256); 0: none."""
        tells: bool = False
        """A head for the chance that a guess is accepted, trained by the loss `confidence`."""
        draft_vocab: Count = 0
        """Tokens of the draft vocabulary, the most frequent ones of the training responses;
        0: all tokens."""
        kv_heads: Literal["all", "target"] = "target"
        positions: Positions = "compact"

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 1 if self.from_anchor else 2, "block", most=64)
            if self.context == "all" and self.positions == "compact":
                raise DataError(
                    "context=all requires positions=expanded or target: "
                    "compact positions count text tokens alone"
                )

        @property
        def max_hops(self) -> int:
            """The guesses of a block."""
            return self.block if self.from_anchor else self.block - 1

        @property
        def own_losses(self) -> frozenset[str]:
            """The confidence head learns by `confidence`."""
            return frozenset(["confidence"] if self.tells else [])

        def sources(self, info: TargetInfo) -> tuple[str, ...]:
            """The states that are fused; DataError for a layer that the target lacks."""
            if not all(0 <= tap < info.num_layers for tap in self.taps):
                taps = [*self.taps]
                last = info.num_layers - 1
                raise DataError(f"taps={taps}: the target has layers 0 to {last}")
            if not self.taps:
                return depths(info.num_layers)
            return tuple(f"layer{tap}" for tap in self.taps)

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """The fused states of the context; last states to learn from."""
            where = ["text"]
            if self.context == "all":
                where.append("visual")
            taps = states_of(self.sources(info), *where)
            return taps if decoding else taps | features("hidden.text")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Learning rate, warm-up, clipping, epochs, anchors and weights of the released code."""

        noise: float = 0.0
        warmup: float = 0.04
        clip: float = 1.0
        stages: tuple[Stage, ...] = (
            Stage(
                name="blocks",
                epochs=10,
                visual=(0.5, 0.5),
                hop_decay=0.7788,  # exp(-1/4)
                learning_rate=6e-4,
                anchors=512,
                losses={"cross_entropy": 1.0},
            ),
        )

    tree = Tree.parse("chain-7")
    published_names: ClassVar[Mapping[str, str]] = PUBLISHED_NAMES
    published_settings: ClassVar[Mapping[str, str]] = {"d2t": "draft_vocab"}
    published_files: ClassVar[tuple[str, ...]] = (MASK,)
    config: Config

    @classmethod
    def published_config(
        cls, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Any]:
        """The settings of a drafter in one of the `LAYOUTS`; DataError if unsupported."""
        try:
            flat = {
                **(raw.get("transformer_layer_config") or {}),
                **raw,
                **(raw.get("dflash_config") or {}),
            }
            block = msgspec.convert(flat, PublishedBlock)
        except (msgspec.ValidationError, TypeError) as error:
            raise DataError(f"it does not describe a block drafter: {error}") from None
        _check_layout(block, flat)
        if not block.taps:
            raise DataError("it has no target layer ids")
        learned = f"{MASK}:embedding" in tensors
        if not learned and block.mask_token_id is None:
            raise DataError("it has no mask_token_id")
        from_anchor = block.sample_from_anchor
        if from_anchor is None:
            from_anchor = LAYOUTS[block.layout]
        markov_VX = tensors.get("markov_head.markov_w1.weight")
        return {
            "layers": block.num_hidden_layers,
            "block": block.block_size,
            "from_anchor": from_anchor,
            "taps": block.taps,
            "mask": -1 if learned else block.mask_token_id,
            "context": "all",
            "positions": "expanded",
            "markov": 0 if markov_VX is None else markov_VX.shape[-1],
            "tells": "confidence_head.proj.weight" in tensors,
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """The fused states of the context."""
        return self.config.sources(self.info)

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width = info.hidden_size
        eps = info.rms_norm_eps
        inputs = len(self.sources) * width
        self.fc = nn.Linear(inputs, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        unbiased = replace(info, attention_bias=False)
        self.layers = nn.ModuleList()
        self.input_norms = nn.ModuleList()
        for _ in range(config.layers):
            layer = DecoderLayer(unbiased, kv_heads=config.kv_heads, head_norms=True)
            self.layers.append(layer)
            self.input_norms.append(RMSNorm(width, eps))
        self.norm = RMSNorm(width, eps)
        if config.mask < 0:
            mask_D = torch.randn(width) * width**-0.5
            self.mask_D = nn.Parameter(mask_D)
        elif config.mask >= info.vocab_size:
            last = info.vocab_size - 1
            raise DataError(f"mask={config.mask}: the target has tokens 0 to {last}")
        self.register_vocabulary(config.draft_vocab)
        if config.markov:
            size = info.vocab_size if self.d2t is None else len(self.d2t)
            self.markov_in = nn.Embedding(info.vocab_size, config.markov)
            self.markov_out = nn.Linear(config.markov, size, bias=False)
            nn.init.zeros_(self.markov_out.weight)
        if config.tells:
            self.tell = nn.Linear(width + config.markov, 1)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """With `context=all`, the fused states before visual tokens are context, too."""
        if self.config.context == "text":
            return
        token_N, states_NS = batch.predecessors(self.sources, "visual")
        tokens = batch.visual_tokens.only(token_N)
        self._write_context(states_NS, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """One pass makes the states of a block, [R, G * D]; later hops return them."""
        if entries.hop:
            return entries.hidden_ND
        tokens = entries.tokens
        self._write_context(entries.hidden_ND, entries.rotary_N, tokens, cache)
        ids_R = tokens.wanted(entries.ids_N)
        rotary_R = tokens.wanted(entries.rotary_N)

        # Each row is a block: its token, then masks, at consecutive positions.
        slots = self.config.block
        embed_RD = self.embed(ids_R)
        masks_RJD = self._mask_D.expand(len(ids_R), slots - 1, -1)
        block_RJD = torch.cat([embed_RD[:, None], masks_RJD], dim=1)
        x_QD = block_RJD.flatten(0, 1)
        offset_J = torch.arange(1, slots + 1, device=x_QD.device)
        rotary_Q = (rotary_R[:, None] + offset_J).flatten()
        for number, layer in self._layers():
            normed_QD = self.input_norms[number](x_QD)
            query_QHd, key_QKd, value_QKd = layer.qkv(normed_QD, rotary_Q)
            mixed_QHd = cache.layer(number).attend_block(
                query_QHd, key_QKd, value_QKd, tokens
            )
            x_QD = layer.finish(x_QD, mixed_QHd)
        state_QD: Tensor = self.norm(x_QD)
        state_RJD = state_QD.view(len(ids_R), slots, self.info.hidden_size)
        first_guess = slots - self.config.max_hops
        return state_RJD[:, first_guess:].flatten(1)

    @property
    def _mask_D(self) -> Tensor:
        """The embedding of a mask."""
        if self.config.mask < 0:
            return self.mask_D
        return self.embed_VD[self.config.mask]

    def _write_context(
        self, states_NS: Tensor, rotary_N: Tensor, tokens: TokenIndex, cache: KVCache
    ) -> None:
        """Write fused states as keys and values of every layer."""
        context_ND = self.hidden_norm(self.fc(states_NS))
        for number, layer in self._layers():
            layer.write_kv(context_ND, rotary_N, tokens, cache.layer(number))

    def _layers(self) -> Iterator[tuple[int, DecoderLayer]]:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield number, layer

    def estimate(self, state_NX: Tensor, hop: int) -> Tensor:
        """The state [N, D] of a guess among those of its block, [N, G * D]."""
        width = self.info.hidden_size
        first = hop * width
        return state_NX[:, first : first + width]

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """The target's LM head, and what the Markov head adds after a token (DSpark)."""
        logits_NK = F.linear(estimate_ND, self.head_KD).float()
        if not self.config.markov:
            return logits_NK
        added_NK: Tensor = self.markov_out(self.markov_in(last_N))
        return logits_NK + added_NK.float()

    def confidence(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor | None:
        """DSpark's head on the state of a guess and the Markov vector of the token before it.

        The logit [N] of the chance of acceptance; None without `tells`.
        """
        if not self.config.tells:
            return None
        read_NX = estimate_ND
        if self.config.markov:
            markov_NX = self.markov_in(last_N)
            read_NX = torch.cat([estimate_ND, markov_NX], dim=-1)
        logit_N1: Tensor = self.tell(read_NX)
        return logit_N1[:, 0]

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """The weights of the Markov head and of the confidence head."""
        parameters: list[Tensor] = []
        for name in ("markov_in", "markov_out", "tell"):
            if hasattr(self, name):
                parameters += getattr(self, name).parameters()
        return tuple(parameters)

    def published(self) -> ServedDrafter:
        """As vLLM's own DFlash and DSpark read it.

        `context=text` and DSpark's learned mask need the plugin. TrainingError when neither
        feeds it as it was trained.
        """
        self._check_served()
        config = self.config
        info = self.info
        settings = self._published_settings()
        weights = self._published_weights()
        files: dict[str, dict[str, Any]] = {}
        name: Literal["dspark", "dflash"] = "dspark" if config.markov else "dflash"
        if config.markov:
            settings |= self._dspark_settings()
            weights |= self._dspark_weights()
        else:
            settings |= self._dflash_settings()
            if config.mask < 0:
                mask = self._published_mask
                files[MASK] = {"embedding": self.mask_D, "mask_token_id": mask}
        visual: Visual = "states" if config.context == "all" else "dropped"
        feeding = Feeding(drafter=name, visual=visual, draft_tokens=config.max_hops)
        return ServedDrafter(
            settings,
            weights,
            feeding,
            name,
            draft_vocabulary=info.vocab_size,
            layers=self.taps,
            files=files,
            whole_block=True,
        )

    def _check_served(self) -> None:
        """TrainingError for a setting that vLLM would not run as it was trained."""
        positions = "expanded" if self.config.context == "all" else "compact"
        served: dict[str, object] = {"positions": positions, "draft_vocab": 0}
        if not self.config.markov:
            served["from_anchor"] = False
        for setting, value in served.items():
            own = getattr(self.config, setting)
            if own != value:
                raise unserved(setting, own, value)
        # vLLM keeps states in the order of the layers.
        taps = [*self.taps]
        ascending = sorted({*self.taps})
        if taps != ascending:
            raise unserved("taps", taps, ascending)

    @property
    def _published_mask(self) -> int:
        """The id of the mask; if it is learned, of a token that the target never generates."""
        if self.config.mask < 0:
            return self.info.visual_ids[0]
        return self.config.mask

    def _published_inputs(self) -> dict[str, Any]:
        """The mask, and the layers that the fused states leave, not those that they enter."""
        left = [tap - 1 for tap in self.taps]
        return {"mask_token_id": self._published_mask, "target_layer_ids": left}

    def _published_settings(self) -> dict[str, Any]:
        """The settings that DFlash and DSpark have in common."""
        config = self.config
        _, first_layer = next(self._layers())
        return {
            **layer_settings(self, first_layer),
            "model_type": "qwen3",
            "num_hidden_layers": config.layers,
            "layer_types": ["full_attention"] * config.layers,
            "rope_scaling": None,
            "num_target_layers": self.info.num_layers,
            "block_size": config.block,
        }

    def _published_weights(self) -> dict[str, Tensor]:
        """The weights that DFlash and DSpark have in common."""
        weights: dict[str, Tensor] = {}
        for name in ("fc", "hidden_norm", "norm"):
            weights[f"{name}.weight"] = getattr(self, name).weight
        for number, layer in self._layers():
            prefix = f"layers.{number}"
            norm = self.input_norms[number]
            assert isinstance(norm, RMSNorm)
            weights[f"{prefix}.input_layernorm.weight"] = norm.weight
            weights |= layer_weights(layer, prefix)
        return weights

    def _dflash_settings(self) -> dict[str, Any]:
        architecture = "DFlashDraftModel"
        if self.config.context == "text":
            architecture = "DFlashVlmdistill"  # of the plugin
        dflash_config = {**self._published_inputs(), "causal": False}
        return {"architectures": [architecture], "dflash_config": dflash_config}

    def _dspark_settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["Qwen3DSparkModel"],
            **self._published_inputs(),
            "is_causal": False,
            "sample_from_anchor": config.from_anchor,
            "markov_rank": config.markov,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.tells,
            "confidence_head_with_markov": config.tells,
        }

    def _dspark_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {
            "markov_head.markov_w1.weight": self.markov_in.weight,
            "markov_head.markov_w2.weight": self.markov_out.weight,
        }
        if self.config.tells:
            for key, weight in self.tell.named_parameters():
                weights[f"confidence_head.proj.{key}"] = weight
        learned = self.config.mask < 0
        if learned or self.config.context == "text":
            # vLLM without the plugin refuses a tensor that it does not know. Without this
            # one it would load the drafter and draft other tokens.
            weights[KEY] = self.mask_D if learned else torch.empty(0)
        return weights


def _check_layout(block: PublishedBlock, raw: Mapping[str, Any]) -> None:
    """DataError for an architecture or a switch that drafters here do not have."""
    if block.layout not in LAYOUTS:
        _refuse_architecture(block.layout or "not named")
    if block.projector_type not in PROJECTORS:
        _refuse_architecture(block.projector_type)
    for switch, neutral in NEUTRAL.items():
        value = raw.get(switch)
        if value not in (None, neutral):
            raise DataError(
                f"it has {switch}={value}, and drafters here have {neutral}"
            )


def _refuse_architecture(name: str | None) -> NoReturn:
    choice = ", ".join(LAYOUTS)
    raise DataError(f"its architecture is {name}, and read are {choice}")
