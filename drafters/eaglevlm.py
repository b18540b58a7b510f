"""EagleVLM -- SpecVLM: Fast Speculative Decoding in Vision-Language Models, 2025 (arXiv 2509.11815).

Idea: EAGLE-2's drafter with an input norm (EagleVLM), and fewer visual tokens: a gate chooses one of four
cheap compressors for each question, or none of them where text is enough (section 3.4, variant c).
Differs from EAGLE by: the norm, and compressed visual embeddings instead of visual tokens.
Its ablations are switches: each compressor alone (table 4), all of them side by side (variant b), a weighted
sum (variant a), and visual tokens as they are (`compressor=none`).

Shapes: T text tokens, A of them of responses and one, U visual tokens, M visual spans, C entries of a span,
B branches of the gate, D hidden.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core import (
    Batch,
    EagleDrafter,
    Head,
    KVCache,
    RMSNorm,
    Tree,
    Visual,
)
from vlmdistill.drafters.core.compressors import (
    Compressor,
    GroupCompressor,
    QueryCompressor,
)
from vlmdistill.drafters.core.config import (
    ModelConfig,
    Stage,
    TrainConfig,
    at_least,
    features,
)
from vlmdistill.drafters.core.serving import ServedDrafter, unserved
from vlmdistill.drafters.core.transfer import place
from vlmdistill.stores.schema import Feature, TargetInfo

TINY = 1e-30  # keeps the logarithm of a draw finite

Choice = Literal[
    "select", "weigh", "concat", "prune", "pool", "convolve", "resample", "none"
]


class EagleVLM(EagleDrafter):
    """One decoder layer over text entries and what a compressor, chosen by the question, leaves of images."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        """Sections 3.3 and 3.4, tables 3 and 4."""

        compressor: Choice = "select"
        """Select: a gate chooses one of the four or none for each sample; weigh: it weighs prune, pool and
        convolve, all of `kernel`; concat: all four; none: visual tokens are entries, as for EAGLE-2."""
        ratio: int = 20
        """Visual tokens for each one that pruning or pooling leaves."""
        kernel: int = 3
        """Visual tokens for each convolved one; the paper advises at most 5."""
        queries: int = 2
        """Tokens that the resampler makes of a span."""

        def __post_init__(self) -> None:
            at_least(self, 1, "ratio", "kernel", "queries")

        def needs(
            self, info: TargetInfo, *, decoding: bool = False
        ) -> frozenset[Feature]:
            """Text states, the last visual state of each span, and the visual embeddings."""
            last = "hidden.visual" if self.compressor == "none" else "hidden.span"
            return features("hidden.text", last, "embed.visual")

    @dataclass(frozen=True, kw_only=True)
    class Training(TrainConfig):
        """Section 4.1 and eq. 3; the five epochs of the abstract."""

        stages: tuple[Stage, ...] = (
            Stage(name="multimodal", epochs=5, visual=(1, 1), learning_rate=8e-5),
        )

    tree = Tree(60, 7, 10)
    config: Config

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block.layer.input_norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        self.compressors = nn.ModuleList(_compressors(config, info))
        self.gate: nn.Linear | None = None
        if config.compressor in ("select", "weigh"):
            self.gate = nn.Linear(
                info.hidden_size,
                len(self.compressors) + (config.compressor == "select"),
            )

    @property
    def visual(self) -> Visual:
        """Without a compressor visual tokens enter as for EAGLE-2."""
        return "dropped" if len(self.compressors) else "fused"

    @property
    def compresses(self) -> Literal["embed"] | None:
        """Visual embeddings."""
        return "embed" if len(self.compressors) else None

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """Section 3.4: the entries of all compressors, one after the other, [M, C, D]."""
        return torch.cat([one(read_UD, span_U, spans) for one in self._all()], dim=1)

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The positions of the entries of all compressors, each spread over its span, [M, C]."""
        return torch.cat([one.places(start_M, length_M) for one in self._all()], dim=1)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Write what the gate leaves of visual tokens; without a gate, what `compress` makes of them."""
        if self.gate is None:
            super().condition(batch, cache)
            return
        read_UD, known = batch.feature("embed", "visual"), batch.readable
        span_U, spans = known.visual_tokens.span_N, len(known.start_M)
        entries = [one(read_UD, span_U, spans) for one in self._all()]
        places = [one.places(known.start_M, known.length_M) for one in self._all()]
        asked_M = place(_asked(known), read_UD.device)
        score_MB = self.gate(batch.feature("hidden", "text")[asked_M]).float()
        if self.config.compressor == "weigh":
            weight_MB = score_MB.softmax(-1).to(read_UD.dtype)
            mixed_MCD = (weight_MB[:, None, None] * torch.stack(entries, dim=-1)).sum(
                -1
            )
            self.write_compressed(mixed_MCD, places[0], batch, cache)
            return
        if (
            cache.generator is not None
        ):  # Gumbel noise, one draw for all images of a sample
            draw_TB = score_MB.new_empty(len(batch.ids_T), score_MB.shape[1])
            draw_TB.exponential_(generator=cache.generator)
            score_MB = score_MB - draw_TB.clamp(min=TINY).log()[asked_M]
        chance_MB, chosen_M1 = score_MB.softmax(-1), score_MB.argmax(-1)[:, None]
        # Straight through: one, with the gradient of the chance.
        through_MB = (1 + (chance_MB - chance_MB.detach())).to(read_UD.dtype)
        entries = [
            part_MCD * through_MB[:, one, None, None]
            for one, part_MCD in enumerate(entries)
        ]
        chosen_M1 = place(
            chosen_M1, span_U.device
        )  # a wait for the GPU: it has chosen how many entries
        places = [
            torch.where(chosen_M1 == one, place_MC, -1)
            for one, place_MC in enumerate(places)
        ]
        self.write_compressed(torch.cat(entries, 1), torch.cat(places, 1), batch, cache)

    def _all(self) -> list[Compressor]:
        return cast("list[Compressor]", [*self.compressors])

    def published(self) -> ServedDrafter:
        """As vLLM runs it; TrainingError with a gate, which reads the question after the image."""
        if self.gate is not None:
            raise unserved("compressor", self.config.compressor, "pool")
        return super().published()


def _compressors(config: EagleVLM.Config, info: TargetInfo) -> list[Compressor]:
    """Those that the setting names, in the order of the gate."""
    width, chosen = info.hidden_size, config.compressor
    ratio = (
        config.kernel if chosen == "weigh" else config.ratio
    )  # what is summed has the same groups
    every: dict[str, Compressor] = {
        "prune": GroupCompressor(width, ratio, "prune"),
        "pool": GroupCompressor(width, ratio, "pool"),
        "convolve": GroupCompressor(width, config.kernel, "convolve"),
        "resample": QueryCompressor(info, config.queries),
    }
    groups = {
        "select": [*every],
        "concat": [*every],
        "weigh": ["prune", "pool", "convolve"],
        "none": [],
    }
    return [every[name] for name in groups.get(chosen, [chosen])]


def _asked(batch: Batch) -> Tensor:
    """The last token of the prompt of each span's sample, as a text index: [M]."""
    text = len(batch.ids_T)
    first_M, end_M = (
        torch.searchsorted(batch.segment_T, batch.segment_M, right=right)
        for right in (False, True)
    )
    answer_A = torch.cat([batch.response_T.nonzero()[:, 0], end_M.new_full((1,), text)])
    answer_M = answer_A[torch.searchsorted(answer_A, first_M)]
    return torch.minimum(answer_M, end_M).sub(1).maximum(first_M)
