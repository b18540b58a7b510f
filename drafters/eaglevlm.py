"""EagleVLM -- SpecVLM: Fast Speculative Decoding in Vision-Language Models, 2025 (arXiv 2509.11815).

Idea: EAGLE-2's drafter with an input norm (EagleVLM), and fewer visual tokens: a gate chooses
one of four cheap compressors for each question, or none where text is enough (section 3.4,
variant c).
Differs from EAGLE by: the norm, and compressed visual embeddings instead of visual tokens.
Its ablations are switches: each compressor alone (table 4), all of them side by side (variant
b), a weighted sum (variant a), and visual tokens as they are (`compressor=none`).

Shapes: T text tokens, A response tokens and an end mark, U visual tokens, M visual spans, C
entries of a span, B branches of the gate, D hidden.
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
    EagleConfig,
    Number,
    Stage,
    TrainConfig,
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
    """One decoder layer over text and images compressed by what the question needs."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EagleConfig):
        """Sections 3.3 and 3.4, tables 3 and 4."""

        compressor: Choice = "select"
        """select: a gate chooses one of the four or none for each sample; weigh: it weighs
        prune, pool and convolve, all of `kernel`; concat: all four; none: visual tokens are
        entries, as for EAGLE-2."""
        ratio: Number = 20
        """Visual tokens for each entry of pruning or pooling."""
        kernel: Number = 3
        """Visual tokens for each entry of the convolution; the paper advises at most 5."""
        queries: Number = 2
        """Entries of the resampler for a span."""

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
        branches = len(self.compressors)
        if config.compressor == "select":
            branches += 1  # none of them
        if config.compressor in ("select", "weigh"):
            self.gate = nn.Linear(info.hidden_size, branches)

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
        return torch.cat(self._compressed(read_UD, span_U, spans), dim=1)

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The positions of the entries of all compressors, each spread over its span, [M, C]."""
        return torch.cat(self._places(start_M, length_M), dim=1)

    def _compressed(self, read_UD: Tensor, span_U: Tensor, spans: int) -> list[Tensor]:
        """The entries of each compressor, [M, C, D]."""
        return [
            compressor(read_UD, span_U, spans) for compressor in self._each_compressor()
        ]

    def _places(self, start_M: Tensor, length_M: Tensor) -> list[Tensor]:
        """The positions of the entries of each compressor, [M, C]."""
        return [
            compressor.places(start_M, length_M)
            for compressor in self._each_compressor()
        ]

    def _each_compressor(self) -> list[Compressor]:
        return cast("list[Compressor]", [*self.compressors])

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Write the entries that the gate chooses; without a gate, those of `compress`."""
        if self.gate is None:
            super().condition(batch, cache)
            return
        read_UD = batch.feature("embed", "visual")
        readable = batch.readable
        start_M = readable.start_M
        length_M = readable.length_M
        span_U = readable.visual_tokens.span_N
        entries = self._compressed(read_UD, span_U, len(start_M))
        places = self._places(start_M, length_M)
        question_M = place(_question_end(readable), read_UD.device)
        question_MD = batch.feature("hidden", "text")[question_M]
        score_MB = self.gate(question_MD).float()
        if self.config.compressor == "weigh":
            weight_MB = score_MB.softmax(-1).to(read_UD.dtype)
            entry_MCDB = torch.stack(entries, dim=-1)
            mixed_MCD = (weight_MB[:, None, None] * entry_MCDB).sum(-1)
            self.write_compressed(mixed_MCD, places[0], batch, cache)
            return
        if cache.generator is not None:
            noise_TB = _gumbel(score_MB, batch, cache.generator)
            score_MB = score_MB + noise_TB[question_M]
        self._write_chosen(score_MB, entries, places, batch, cache)

    def _write_chosen(
        self,
        score_MB: Tensor,
        entries: list[Tensor],
        places: list[Tensor],
        batch: Batch,
        cache: KVCache,
    ) -> None:
        """Write the entries of the branch with the best score of each span."""
        chance_MB = score_MB.softmax(-1)
        chosen_M1 = score_MB.argmax(-1)[:, None]
        # Straight-through estimator: a factor of one, with the gradient of the chance.
        factor_MB = 1 + (chance_MB - chance_MB.detach())
        factor_MB = factor_MB.to(entries[0].dtype)
        # A wait for the GPU: how many entries there are depends on its choice.
        chosen_M1 = place(chosen_M1, places[0].device)
        chosen_entries, chosen_places = [], []
        for branch, entry_MCD in enumerate(entries):
            chosen_entries.append(entry_MCD * factor_MB[:, branch, None, None])
            place_MC = torch.where(chosen_M1 == branch, places[branch], -1)
            chosen_places.append(place_MC)
        entry_MCD = torch.cat(chosen_entries, dim=1)
        place_MC = torch.cat(chosen_places, dim=1)
        self.write_compressed(entry_MCD, place_MC, batch, cache)

    def published(self) -> ServedDrafter:
        """As vLLM runs it; TrainingError with a gate: it reads the question after the image."""
        if self.gate is not None:
            raise unserved("compressor", self.config.compressor, "pool")
        return super().published()


def _compressors(config: EagleVLM.Config, info: TargetInfo) -> list[Compressor]:
    """The compressors of the setting, in the order of the gate."""
    width = info.hidden_size
    choice = config.compressor
    # A weighted sum needs the same groups of all.
    ratio = config.kernel if choice == "weigh" else config.ratio
    # All four are built, so that random weights do not depend on the choice.
    prune = GroupCompressor(width, ratio, "prune")
    pool = GroupCompressor(width, ratio, "pool")
    convolve = GroupCompressor(width, config.kernel, "convolve")
    resample = QueryCompressor(info, config.queries)
    if choice in ("select", "concat"):
        return [prune, pool, convolve, resample]
    if choice == "weigh":
        return [prune, pool, convolve]
    if choice == "none":
        return []
    compressors: dict[str, Compressor] = {
        "prune": prune,
        "pool": pool,
        "convolve": convolve,
        "resample": resample,
    }
    return [compressors[choice]]


def _gumbel(score_MB: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """Gumbel noise for every branch: one draw for each text token, [T, B].

    All images of a sample read the draw of the same token.
    """
    branches = score_MB.shape[1]
    draw_TB = score_MB.new_empty(len(batch.ids_T), branches)
    draw_TB.exponential_(generator=generator)
    return -draw_TB.clamp(min=TINY).log()


def _question_end(batch: Batch) -> Tensor:
    """The last token of the prompt of each span's sample, as a text index: [M]."""
    first_M = torch.searchsorted(batch.segment_T, batch.segment_M)
    end_M = torch.searchsorted(batch.segment_T, batch.segment_M, right=True)
    response_A = batch.response_T.nonzero()[:, 0]
    end_mark_1 = end_M.new_full((1,), len(batch.ids_T))
    response_A = torch.cat([response_A, end_mark_1])
    response_M = response_A[torch.searchsorted(response_A, first_M)]
    return torch.minimum(response_M, end_M).sub(1).maximum(first_M)
