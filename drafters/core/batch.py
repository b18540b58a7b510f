"""Batches of tokens with the target's states: input of training and result of a prefill.

Shapes: T text tokens of all samples (packed, never padded), U visual tokens, M visual spans, N entries or
tokens, R rows whose output is wanted, A nodes of a draft tree, D hidden width, V vocabulary.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from vlmdistill.drafters.core.transfer import place, place_all
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.loader.tensors import as_torch
from vlmdistill.stores.schema import Feature, FrozenTables, Where, as_features, held


@dataclass(frozen=True)
class Head:
    """The target's frozen tables: token embeddings and the LM head (the same tensor when tied)."""

    embed_VD: Tensor
    lm_head_VD: Tensor

    @classmethod
    def of(
        cls,
        frozen: FrozenTables,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Head":
        """The tables of a store as tensors; one table that serves as both stays one."""
        embed_VD = as_torch(frozen.embed_VD, frozen.dtype).to(device, dtype)
        if frozen.tied:
            return cls(embed_VD, embed_VD)
        return cls(
            embed_VD, as_torch(frozen.lm_head_VD, frozen.dtype).to(device, dtype)
        )


@dataclass(frozen=True)
class TokenIndex:
    """Of each token: its sample, its position in the expanded sequence, and the last span before it."""

    segment_N: Tensor
    position_N: Tensor
    span_N: Tensor  # -1: no image yet
    rows_R: Tensor | None = None  # the entries whose output is wanted; None: all
    visible_NA: Tensor | None = None
    """In a draft tree: the drafted nodes that each entry descends from, itself included."""
    host: "TokenIndex | None" = field(default=None, repr=False, compare=False)
    """The same tokens on the CPU, where they have come from there; see `readable`."""

    @classmethod
    def cat(cls, parts: "Sequence[TokenIndex]") -> "TokenIndex":
        """The tokens of all parts, in order, all of them wanted."""
        hosts = [part.host for part in parts if part.host is not None]
        return cls(
            torch.cat([part.segment_N for part in parts]),
            torch.cat([part.position_N for part in parts]),
            torch.cat([part.span_N for part in parts]),
            host=cls.cat(hosts) if hosts and len(hosts) == len(parts) else None,
        )

    @property
    def readable(self) -> "TokenIndex":
        """The same tokens where their values can be read without waiting for a GPU, if there are such."""
        return self.host or self

    def to(self, device: torch.device) -> "TokenIndex":
        """Without `visible_NA`, on that device; on a GPU they remain readable."""
        if self.segment_N.device == device:
            return self
        rows = [] if self.rows_R is None else [self.rows_R]
        parts = [self.segment_N, self.position_N, self.span_N, *rows]
        segment_N, position_N, span_N, *rows = place_all(parts, device)
        host = self if self.segment_N.is_cpu else None
        rows_R = rows[0] if rows else None
        return TokenIndex(segment_N, position_N, span_N, rows_R, host=host)

    def at_rows(self) -> "TokenIndex":
        """The tokens whose output is wanted."""
        if self.rows_R is None:
            return self
        host = self.host and self.host.at_rows()
        return replace(self._chosen(self.rows_R), host=host)

    def only(self, chosen_N: Tensor) -> "TokenIndex":
        """The chosen ones (a mask or indices), all of them wanted; they stay readable if the choice is."""
        if self.host is not None and chosen_N.is_cpu:
            return self.host.only(chosen_N).to(self.segment_N.device)
        return self._chosen(chosen_N)

    def _chosen(self, chosen_N: Tensor) -> "TokenIndex":
        return TokenIndex(
            self.segment_N[chosen_N], self.position_N[chosen_N], self.span_N[chosen_N]
        )

    def all_rows(self) -> "TokenIndex":
        """The same tokens, all of them wanted."""
        return replace(self, rows_R=None, host=self.host and self.host.all_rows())

    def with_rows(self, rows_R: Tensor) -> "TokenIndex":
        """The same tokens, with the output of `rows_R` alone wanted."""
        host = self.host and self.host.with_rows(
            place(rows_R, self.host.segment_N.device)
        )
        return replace(self, rows_R=place(rows_R, self.segment_N.device), host=host)


@dataclass(frozen=True)
class Batch:
    """Packed samples with the target's states: T text tokens, U visual tokens and M visual spans in all.

    Text and visual tokens are in separate tensors; `position_T` and the spans give their positions in the
    expanded sequence, in which every image is its visual tokens.

    Args:
        ids_T: int64 [T], token ids.
        response_T: bool [T], whether the target generated the token.
        position_T: int64 [T], the index in the expanded sequence of its own sample.
        rope_T: int64 [T], the target's own rotary position.
        segment_T: int64 [T], the number of the sample in the batch.
        start_M: int64 [M], the first expanded position of each visual span.
        length_M: int64 [M], its number of visual tokens.
        segment_M: int64 [M], the number of its sample.
        features: Each feature as [T, U or M, hidden size].
        host: The same tokens on the CPU without features, where they have come from there; see `readable`.
    """

    ids_T: Tensor
    response_T: Tensor
    position_T: Tensor
    rope_T: Tensor
    segment_T: Tensor
    start_M: Tensor
    length_M: Tensor
    segment_M: Tensor
    features: Mapping[Feature, Tensor] = field(default_factory=dict)
    host: "Batch | None" = field(default=None, repr=False, compare=False)

    @property
    def readable(self) -> "Batch":
        """The same tokens where their values can be read without waiting for a GPU, if there are such.

        It need not have the features.
        """
        return self.host or self

    def feature(self, source: str, where: Where | None = None) -> Tensor:
        """Look up a feature by its name, or by the two parts of it.

        Args:
            source: `hidden.text`, or with `where` its source alone: `hidden`, `embed` or `layer<k>`.
            where: `text`, `visual` or `span`; see `Feature`.

        Returns:
            Its states [T, U or M, hidden size].

        Raises:
            DataError: It is not the name of a feature, or the feature was not read: name it in `features`, or
                in `needs` of a drafter.
        """
        wanted = Feature(source, where) if where else Feature.parse(source)
        return held(self.features, wanted, "batch")

    def to(
        self, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> "Batch":
        """Move the batch; to a GPU through pinned memory, without waiting for it.

        Args:
            device: Where to.
            dtype: Of the features; their own when None. Token tensors keep theirs.

        Returns:
            The batch on that device.
        """
        device = torch.device(device)
        names = [
            item.name
            for item in dataclasses.fields(self)
            if item.name not in ("features", "host")
        ]
        moved = dict(
            zip(
                names,
                place_all([getattr(self, name) for name in names], device),
                strict=True,
            )
        )
        # The narrow dtype of a store is moved, and made wider there.
        states = {
            name: (arrived := place(value, device)).to(dtype or arrived.dtype)
            for name, value in self.features.items()
        }
        host = None
        if device.type != "cpu":
            host = self.having({}) if self.ids_T.is_cpu else self.host
        return Batch(**moved, features=states, host=host)

    def having(self, features: Mapping[Feature, Tensor]) -> "Batch":
        """The same tokens with other features."""
        same = dataclasses.replace(self, features=features)
        known = ("visual_tokens", "text_tokens", "_prior")  # of the tokens alone
        vars(same).update(
            {name: vars(self)[name] for name in known if name in vars(self)}
        )
        return same

    def only(self, features: Collection[str | Feature]) -> "Batch":
        """Drop features.

        Args:
            features: Those to keep, or their names.

        Returns:
            The same tokens with these features alone.

        Raises:
            DataError: A name is not a feature.
            DataError: The batch lacks one of them; the error names it.
        """
        kept = as_features(features)
        if lacking := sorted(feature.name for feature in {*kept} - {*self.features}):
            raise DataError(f"the batch lacks {', '.join(lacking)}")
        return self.having({feature: self.features[feature] for feature in kept})

    @cached_property
    def visual_tokens(self) -> TokenIndex:
        """The U visual tokens: every span unrolled, in order."""
        if self.host is not None:
            return self.host.visual_tokens.to(self.ids_T.device)
        span_U = torch.repeat_interleave(
            torch.arange(len(self.length_M), device=self.length_M.device), self.length_M
        )
        first_M = torch.cumsum(self.length_M, 0) - self.length_M
        offset_U = torch.arange(len(span_U), device=span_U.device) - first_M[span_U]
        return TokenIndex(
            self.segment_M[span_U], self.start_M[span_U] + offset_U, span_U
        )

    @cached_property
    def text_tokens(self) -> TokenIndex:
        """The T text tokens, each with the last span before it."""
        if self.host is not None:
            return self.host.text_tokens.to(self.ids_T.device)
        if len(self.start_M) == 0:
            return TokenIndex(
                self.segment_T, self.position_T, torch.full_like(self.segment_T, -1)
            )
        far = self.position_T.max() + self.length_M.sum() + 1  # stays on the device
        key_T = self.segment_T * far + self.position_T
        span_T = (
            torch.searchsorted(self.segment_M * far + self.start_M, key_T, right=True)
            - 1
        )
        own_T = (span_T >= 0) & (self.segment_M[span_T.clamp(min=0)] == self.segment_T)
        return TokenIndex(
            self.segment_T, self.position_T, torch.where(own_T, span_T, -1)
        )

    def before(
        self, source: str, where: Literal["text", "visual"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `source` state of each token's predecessor, text tokens first, then visual ones, or one kind.

        The predecessor is the nearest earlier position whose state the batch has: any position; text and the
        last token of each span; or text alone (then the token after an image is paired with the last text
        token before it, as in HiViS eq. 3). Returns states [N, D] and `found` [N] (bool), where N is T + U if
        the batch has visual states, else T; rows not found are zero.
        """
        rows = slice(None if self._more(source) == "visual" else len(self.segment_T))
        rows = self._rows(where) if where else rows
        prior_N, found_N = place_all(self._link(source), self.ids_T.device)
        return self._states(source)[prior_N[rows]] * found_N[rows, None], found_N[rows]

    def predecessors(
        self, sources: Sequence[str], where: Literal["text", "visual"]
    ) -> tuple[Tensor, Tensor]:
        """The tokens of a kind that have a predecessor, [E], and its states, the sources side by side [E, S].

        As `before` has it, and those that the first source finds; the tokens where they are `readable`.
        """
        links, rows = [self._link(source) for source in sources], self._rows(where)
        token_E = links[0][1][rows].nonzero()[:, 0]
        states = []
        for source, (prior_N, found_N) in zip(sources, links, strict=True):
            parts = [prior_N[rows][token_E], found_N[rows][token_E]]
            prior_E, found_E = place_all(parts, self.ids_T.device)
            state_ED = self._states(source)[prior_E]
            states.append(
                state_ED if found_N is links[0][1] else state_ED * found_E[:, None]
            )
        return token_E, torch.cat(states, dim=-1)

    def _rows(self, where: Literal["text", "visual"]) -> slice:
        """Of the rows of text tokens and of others behind them, those of one kind."""
        text = len(self.segment_T)
        return slice(0, text) if where == "text" else slice(text, None)

    def _more(self, source: str) -> Literal["visual", "span"] | None:
        """What of images there is from a source, besides its states of text."""
        kinds: tuple[Literal["visual", "span"], ...] = ("visual", "span")
        return next(
            (kind for kind in kinds if Feature(source, kind) in self.features), None
        )

    def _states(self, source: str) -> Tensor:
        """The states of text tokens, and behind them what there is of images."""
        more = self._more(source)
        states = [
            self.feature(source, "text"),
            *([self.feature(source, more)] if more else []),
        ]
        return torch.cat(states)

    def _link(self, source: str) -> tuple[Tensor, Tensor]:
        """What `_find_prior` returns for a source, where it is `readable`."""
        more, known = self._more(source), self.readable
        if more not in known._prior:
            known._prior[more] = known._find_prior(more)
        return known._prior[more]

    @cached_property
    def _prior(self) -> dict[str | None, tuple[Tensor, Tensor]]:
        """By the rows that follow those of text tokens: what `_find_prior` returns."""
        return {}

    def _find_prior(
        self, more: Literal["visual", "span"] | None
    ) -> tuple[Tensor, Tensor]:
        """The row of each row's predecessor, and whether it has one."""
        segments, positions = [self.segment_T], [self.position_T]
        if more == "visual":
            segments, positions = (
                [*segments, self.visual_tokens.segment_N],
                [*positions, self.visual_tokens.position_N],
            )
        elif more == "span":
            segments = [*segments, self.segment_M]
            positions = [*positions, self.start_M + self.length_M - 1]
        segment_N, position_N = torch.cat(segments), torch.cat(positions)
        rank_N = torch.argsort(segment_N * (position_N.max() + 1) + position_N)
        last_N = rank_N.roll(1)
        prior_N, found_N = (
            torch.empty_like(rank_N),
            torch.empty_like(rank_N, dtype=torch.bool),
        )
        prior_N[rank_N] = last_N
        found_N[rank_N] = segment_N[rank_N] == segment_N[last_N]
        found_N[rank_N[:1]] = False
        return prior_N, found_N


@dataclass(frozen=True)
class Entries:
    """The input of one `step`: tokens, the hidden states before them, and their positions."""

    ids_N: Tensor
    hidden_ND: Tensor  # hop 0: the target's states; later hops: what `step` returned for the parent
    rotary_N: Tensor  # the drafter's rotary position
    tokens: TokenIndex
    hop: int = (
        0  # 0: committed tokens with the target's states; n: the n-th guess after them
    )
