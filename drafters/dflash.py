"""DFlash -- DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036; DSpark is arXiv
2607.05147.

Idea: a drafter that guesses a whole block in one pass may be several layers deep. Each layer reads the
target's fused states as keys and values of its own; a block is the last token and masks, which see each
other.
Differs from EAGLE by: no own states are fed back; context states that pass through no layer; several layers
of Qwen3's shape; the loss on some positions of each sample (`anchors`).
DSpark's switches: a Markov head, which adds to the scores of a token what the token before it says (`markov`,
its rank), and a head that tells the chance of acceptance (`tells`).
On images: `context=text` leaves visual positions out, so that drafting costs the same for any number of them
and the features are those of `wren`; `context=all` reads the states at all positions, as served VLMs do.

Shapes: N entries, R rows, J slots of a block, Q = R * J, G guesses of a block, D hidden, V vocabulary,
K draft vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
    ModelConfig,
    Positions,
    Stage,
    TrainConfig,
    at_least,
    depths,
    features,
)
from vlmdistill.drafters.core.layers import DecoderLayer, layer_names
from vlmdistill.drafters.core.serving import (
    KEY,
    Feeding,
    ServedDrafter,
    layer_settings,
    layer_weights,
    unserved,
)
from vlmdistill.drafters.core.vocabulary import FrequentTokens
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature, TargetInfo

MASK = "mask_embedding.pt"
"""The file of a mask that is learned, in published drafters."""


LAYOUTS = {
    "DFlashDraftModel": False,
    "DSparkDraftModel": True,
    "Qwen3DSparkModel": True,
    "dflash": False,
    "dspark": True,
}
"""What z-lab, SpecForge, DeepSpec and speculators call theirs -> whether the anchor guesses unless said."""


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
"""Switches that vLLM knows -> the value that those have which are read."""


class PublishedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` of a published drafter says of it."""

    architectures: tuple[str, ...] = ()
    speculators_model_type: str | None = None
    num_hidden_layers: int
    block_size: int
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] = ()
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    sample_from_anchor: bool | None = None
    projector_type: str | None = None


class DFlash(FrequentTokens, Drafter):
    """Some decoder layers over a block of masks, with the target's states as their context."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """DFlash's; a block of 8."""

        layers: int = 5
        """Decoder layers."""
        block: int = 8
        """Positions of one pass: the last token and masks."""
        from_anchor: bool = False
        """The last token's own position guesses the next token (DSpark); else the first mask's does."""
        taps: tuple[int, ...] = ()
        """Layers of the target whose inputs are read; none named: EAGLE-3's three."""
        mask: int = -1
        """The token whose embedding a mask has, as in released drafters; -1: a vector that is learned."""
        context: Literal["text", "all"] = "text"
        """Positions whose states are read: those of text, or visual ones too."""
        markov: int = 0
        """Rank of what the token before adds to the scores; 0: nothing (DSpark: 256)."""
        tells: bool = False
        """A head for the chance that a guess is accepted; train it with the loss `confidence`."""
        draft_vocab: int = 0
        """Size of the draft vocabulary: the most frequent tokens of the training responses; 0: all tokens."""
        kv_heads: Literal["all", "target"] = "target"
        positions: Positions = "compact"

        def __post_init__(self) -> None:
            at_least(self, 1, "layers", most=64)
            at_least(self, 1 if self.from_anchor else 2, "block", most=64)
            at_least(self, 0, "markov", "draft_vocab")
            at_least(self, -1, "mask")
            if self.context == "all" and self.positions == "compact":
                raise DataError(
                    "with context=all, set positions=expanded: compact ones count text alone"
                )

        @property
        def max_hops(self) -> int:
            """The guesses of a block."""
            return self.block if self.from_anchor else self.block - 1

        @property
        def tells_confidence(self) -> bool:
            """As set."""
            return self.tells

        def sources(self, info: TargetInfo) -> tuple[str, ...]:
            """The states that are fused; DataError for a layer that the target lacks."""
            if any(not 0 <= tap < info.num_layers for tap in self.taps):
                raise DataError(
                    f"taps={[*self.taps]}: the target has layers 0 to {info.num_layers - 1}"
                )
            return tuple(f"layer{tap}" for tap in self.taps) or depths(info.num_layers)

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """The fused states of the context; last states to learn from."""
            where = ("text", "visual") if self.context == "all" else ("text",)
            taps = features(
                *(f"{source}.{rows}" for source in self.sources(info) for rows in where)
            )
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
    published_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("fc", "hidden_norm", "norm", "d2t")},
        **layer_names("layers.*", "layers.*"),
        "layers.*.input_layernorm": "input_norms.*",
        "layers.*.self_attn.q_norm": "layers.*.q_norm",
        "layers.*.self_attn.k_norm": "layers.*.k_norm",
        "markov_head.markov_w1": "markov_in",
        "markov_head.markov_w2": "markov_out",
        "confidence_head.proj": "tell",
        f"{MASK}:embedding": "mask_D",
    }
    published_settings: ClassVar[Mapping[str, str]] = {"d2t": "draft_vocab"}
    published_files: ClassVar[tuple[str, ...]] = (MASK,)
    config: Config

    @classmethod
    def published_config(
        cls, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Any]:
        """Those of the layouts in `LAYOUTS`, which read the states of all positions."""
        nested = (
            raw.get(key) or {} for key in ("transformer_layer_config", "dflash_config")
        )
        try:
            layers, block = nested
            every = {**layers, **raw, **block}
            found = msgspec.convert(every, PublishedBlock)
        except (msgspec.ValidationError, TypeError) as error:
            raise DataError(f"it does not describe a block drafter: {error}") from None
        name = found.speculators_model_type or ", ".join(found.architectures)
        if name not in LAYOUTS or found.projector_type not in (
            None,
            "dflash",
            "dspark",
        ):
            odd = found.projector_type if name in LAYOUTS else name or "not named"
            raise DataError(
                f"its architecture is {odd}, and read are {', '.join(LAYOUTS)}"
            )
        for switch, neutral in NEUTRAL.items():
            if (value := every.get(switch)) not in (None, neutral):
                raise DataError(
                    f"it has {switch}={value}, and drafters here have {neutral}"
                )
        # An id is the layer that a state leaves; for speculators, as here, the one that it enters.
        left, entered = found.target_layer_ids, found.aux_hidden_state_layer_ids
        taps = (
            entered if found.speculators_model_type else tuple(one + 1 for one in left)
        )
        learned = f"{MASK}:embedding" in tensors
        for key, there in {
            "target layer ids": taps,
            "mask_token_id": learned or found.mask_token_id,
        }.items():
            if there in (None, ()):
                raise DataError(f"it has no {key}")
        markov = tensors.get("markov_head.markov_w1.weight")
        anchored = found.sample_from_anchor
        return {
            "layers": found.num_hidden_layers,
            "block": found.block_size,
            "from_anchor": LAYOUTS[name] if anchored is None else anchored,
            "taps": taps,
            "mask": -1 if learned else found.mask_token_id,
            "context": "all",
            "positions": "expanded",
            "markov": 0 if markov is None else markov.shape[-1],
            "tells": "confidence_head.proj.weight" in tensors,
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """Those of the configuration."""
        return self.config.sources(self.info)

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width, eps = info.hidden_size, info.rms_norm_eps
        self.fc = nn.Linear(len(self.sources) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        unbiased = replace(info, attention_bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(unbiased, kv_heads=config.kv_heads, head_norms=True)
            for _ in range(config.layers)
        )
        self.input_norms = nn.ModuleList(
            RMSNorm(width, eps) for _ in range(config.layers)
        )
        self.norm = RMSNorm(width, eps)
        if config.mask < 0:
            self.mask_D = nn.Parameter(torch.randn(width) * width**-0.5)
        elif config.mask >= info.vocab_size:
            raise DataError(
                f"mask={config.mask}: the target has tokens 0 to {info.vocab_size - 1}"
            )
        size = min(config.draft_vocab or info.vocab_size, info.vocab_size)
        self.register_buffer(
            "d2t", torch.zeros(size, dtype=torch.long) if config.draft_vocab else None
        )
        if config.markov:
            self.markov_in = nn.Embedding(info.vocab_size, config.markov)
            self.markov_out = nn.Linear(config.markov, size, bias=False)
            nn.init.zeros_(self.markov_out.weight)
        if config.tells:
            self.tell = nn.Linear(width + config.markov, 1)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """With `context=all`, the fused states before visual tokens are context, at expanded positions."""
        if self.config.context == "text":
            return
        seen_N, states_NS = batch.predecessors(self.sources, "visual")
        tokens = batch.visual_tokens.only(seen_N)
        self._read(states_NS, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """One pass makes the states of a block, [R, G * D]; later hops return them."""
        if entries.hop:
            return entries.hidden_ND
        tokens, rows_R = entries.tokens, entries.tokens.rows_R
        self._read(entries.hidden_ND, entries.rotary_N, tokens, cache)
        ids_R, rotary_R = entries.ids_N, entries.rotary_N
        if rows_R is not None:
            ids_R, rotary_R = ids_R[rows_R], rotary_R[rows_R]
        slots = self.config.block
        mask_D = (
            self.mask_D if self.config.mask < 0 else self.embed_VD[self.config.mask]
        )
        mask_RJD = mask_D.expand(len(ids_R), slots - 1, -1)
        x_QD = torch.cat([self.embed(ids_R)[:, None], mask_RJD], dim=1).flatten(0, 1)
        rotary_Q = (
            rotary_R[:, None] + torch.arange(1, slots + 1, device=x_QD.device)
        ).flatten()
        for number, layer in self._layers():
            query_QHd, key_QKd, value_QKd = layer.qkv(
                self.input_norms[number](x_QD), rotary_Q
            )
            mixed_QHd = cache.layer(number).attend_block(
                query_QHd, key_QKd, value_QKd, tokens
            )
            x_QD = layer.finish(x_QD, mixed_QHd)
        x_RJD: Tensor = self.norm(x_QD).view(len(ids_R), slots, self.info.hidden_size)
        return x_RJD[:, slots - self.config.max_hops :].flatten(1)

    def _read(
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
        return state_NX[:, hop * width : (hop + 1) * width]

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """The target's LM head, and what the Markov head adds after a token (DSpark)."""
        columns_K = self.vocabulary_K
        head_KD = self.lm_head_VD if columns_K is None else self.lm_head_VD[columns_K]
        logits_NK = F.linear(estimate_ND, head_KD).float()
        if not self.config.markov:
            return logits_NK
        added_NK: Tensor = self.markov_out(self.markov_in(last_N))
        return logits_NK + added_NK.float()

    def confidence(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor | None:
        """DSpark's head: of the state of a guess and the Markov vector of the token before it."""
        if not self.config.tells:
            return None
        parts = (
            [estimate_ND, self.markov_in(last_N)]
            if self.config.markov
            else [estimate_ND]
        )
        told_N1: Tensor = self.tell(torch.cat(parts, dim=-1))
        return told_N1[:, 0]

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """The Markov and the confidence head."""
        names = ("markov_in", "markov_out", "tell")
        return tuple(
            one
            for name in names
            if hasattr(self, name)
            for one in getattr(self, name).parameters()
        )

    def published(self) -> ServedDrafter:
        """As vLLM's own DFlash and DSpark read it; `context=text` and DSpark's learned mask need the plugin.

        TrainingError when neither feeds it as it was trained.
        """
        config, info, taps = self.config, self.info, self.taps
        whole, spark, learned = (
            config.context == "all",
            config.markov > 0,
            config.mask < 0,
        )
        served = {"positions": "expanded" if whole else "compact", "draft_vocab": 0}
        for setting, value in (
            served if spark else {**served, "from_anchor": False}
        ).items():
            if (trained := getattr(config, setting)) != value:
                raise unserved(setting, trained, value)
        if [*taps] != sorted({*taps}):  # vLLM keeps states in the order of the layers
            raise unserved("taps", [*taps], sorted({*taps}))
        weights = {
            f"{name}.weight": getattr(self, name).weight
            for name in ("fc", "hidden_norm", "norm")
        }
        for number, layer in self._layers():
            prefix = f"layers.{number}"
            weights[f"{prefix}.input_layernorm.weight"] = self.input_norms[
                number
            ].weight
            weights |= layer_weights(layer, prefix)
        # A learned mask replaces the embedding of a token that the target does not generate.
        mask = info.visual_ids[0] if learned else config.mask
        left = [
            tap - 1 for tap in taps
        ]  # of the layers that states leave, not of those that they enter
        settings: dict[str, Any] = {
            **layer_settings(self, next(self._layers())[1]),
            "model_type": "qwen3",
            "num_hidden_layers": config.layers,
            "layer_types": ["full_attention"] * config.layers,
            "rope_scaling": None,
            "num_target_layers": info.num_layers,
            "block_size": config.block,
        }
        files: dict[str, dict[str, Any]] = {}
        if spark:
            settings |= {
                "architectures": ["Qwen3DSparkModel"],
                "mask_token_id": mask,
                "target_layer_ids": left,
                "is_causal": False,
                "sample_from_anchor": config.from_anchor,
                "markov_rank": config.markov,
                "markov_head_type": "vanilla",
                "enable_confidence_head": config.tells,
                "confidence_head_with_markov": config.tells,
            }
            weights["markov_head.markov_w1.weight"] = self.markov_in.weight
            weights["markov_head.markov_w2.weight"] = self.markov_out.weight
            if config.tells:
                weights |= {
                    f"confidence_head.proj.{key}": one
                    for key, one in self.tell.named_parameters()
                }
            if learned or not whole:
                # Without the plugin, vLLM refuses a tensor that it does not know, instead of other drafts.
                weights[KEY] = self.mask_D if learned else torch.empty(0)
        else:
            settings["architectures"] = [
                "DFlashDraftModel" if whole else "DFlashVlmdistill"
            ]
            settings["dflash_config"] = {
                "mask_token_id": mask,
                "target_layer_ids": left,
                "causal": False,
            }
            if learned:
                files[MASK] = {"embedding": self.mask_D, "mask_token_id": mask}
        name: Literal["dspark", "dflash"] = "dspark" if spark else "dflash"
        return ServedDrafter(
            settings,
            weights,
            Feeding(
                drafter=name,
                visual="states" if whole else "dropped",
                draft_tokens=config.max_hops,
            ),
            name,
            draft_vocabulary=info.vocab_size,
            layers=taps,
            files=files,
            whole_block=True,
        )
