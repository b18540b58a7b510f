"""Batches of tokens with the target's states: input of training and result of a prefill.

Shapes: T text tokens of all samples (packed, never padded), U visual tokens, M visual spans,
N entries or tokens, E tokens that have a predecessor, R rows whose output is wanted, A nodes
of a draft tree, S the states of several layers side by side, D hidden width, V vocabulary.
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
    """The target's frozen tables: token embeddings and LM head, one tensor if they are tied."""

    embed_VD: Tensor
    lm_head_VD: Tensor

    @classmethod
    def of(
        cls,
        frozen: FrozenTables,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Head":
        """The tables of a store as tensors; tied tables stay one tensor."""
        embed_VD = as_torch(frozen.embed_VD, frozen.dtype)
        embed_VD = embed_VD.to(device, dtype)
        if frozen.tied:
            return cls(embed_VD, embed_VD)
        lm_head_VD = as_torch(frozen.lm_head_VD, frozen.dtype)
        return cls(embed_VD, lm_head_VD.to(device, dtype))


@dataclass(frozen=True)
class TokenIndex:
    """Of each token: its sample, its position, and the last visual span before it.

    Positions are in the expanded sequence, in which every image is its visual tokens.
    """

    segment_N: Tensor
    position_N: Tensor
    span_N: Tensor  # -1: no image yet
    rows_R: Tensor | None = None  # the entries whose output is wanted; None: all
    visible_NA: Tensor | None = None
    """In a draft tree: the drafted nodes that each entry descends from, itself included."""
    host: "TokenIndex | None" = field(default=None, repr=False, compare=False)
    """The same tokens on the CPU, if they have come from there; see `readable`."""

    @classmethod
    def cat(cls, parts: "Sequence[TokenIndex]") -> "TokenIndex":
        """The tokens of all parts, in order, all of them wanted."""
        hosts = [part.host for part in parts if part.host is not None]
        all_have_host = hosts and len(hosts) == len(parts)
        segment_N = torch.cat([part.segment_N for part in parts])
        position_N = torch.cat([part.position_N for part in parts])
        span_N = torch.cat([part.span_N for part in parts])
        host = cls.cat(hosts) if all_have_host else None
        return cls(segment_N, position_N, span_N, host=host)

    @property
    def readable(self) -> "TokenIndex":
        """The same tokens on the CPU, if they are there: reading a GPU's would wait for it."""
        return self.host or self

    def to(self, device: torch.device) -> "TokenIndex":
        """The tokens on that device, without `visible_NA`; on a GPU they remain readable."""
        if self.segment_N.device == device:
            return self
        tensors = [self.segment_N, self.position_N, self.span_N]
        if self.rows_R is not None:
            tensors.append(self.rows_R)
        segment_N, position_N, span_N, *rows = place_all(tensors, device)
        rows_R = rows[0] if rows else None
        host = self if self.segment_N.is_cpu else None
        return TokenIndex(segment_N, position_N, span_N, rows_R, host=host)

    def wanted(self, state_ND: Tensor) -> Tensor:
        """The rows of `state_ND`, one for each token, whose output is wanted: [R, D]."""
        return state_ND if self.rows_R is None else state_ND[self.rows_R]

    def at_rows(self) -> "TokenIndex":
        """The tokens whose output is wanted."""
        if self.rows_R is None:
            return self
        host = self.host and self.host.at_rows()
        return replace(self._select(self.rows_R), host=host)

    def only(self, chosen_N: Tensor) -> "TokenIndex":
        """The chosen ones (a mask or indices), all of them wanted.

        They are readable if the tokens and the choice are.
        """
        if self.host is not None and chosen_N.is_cpu:
            return self.host.only(chosen_N).to(self.segment_N.device)
        return self._select(chosen_N)

    def _select(self, chosen_N: Tensor) -> "TokenIndex":
        segment_N = self.segment_N[chosen_N]
        position_N = self.position_N[chosen_N]
        return TokenIndex(segment_N, position_N, self.span_N[chosen_N])

    def all_rows(self) -> "TokenIndex":
        """The same tokens, all of them wanted."""
        host = self.host and self.host.all_rows()
        return replace(self, rows_R=None, host=host)

    def with_rows(self, rows_R: Tensor) -> "TokenIndex":
        """The same tokens, of which the output of `rows_R` alone is wanted."""
        host = self.host
        if host is not None:
            host = host.with_rows(place(rows_R, host.segment_N.device))
        return replace(self, rows_R=place(rows_R, self.segment_N.device), host=host)


@dataclass(frozen=True)
class Batch:
    """Packed samples with the target's states: T text tokens, U visual tokens, M visual spans.

    Text and visual tokens are in separate tensors; `position_T` and the spans give their
    positions in the expanded sequence, in which every image is its visual tokens.

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
        host: The same tokens on the CPU without features, if they have come from there; see
            `readable`.
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

    def __repr__(self) -> str:
        readable = self.readable
        samples = len(readable.segment_T.bincount().nonzero())
        visual_tokens = int(readable.length_M.sum())
        features = ", ".join(feature.name for feature in self.features) or "none"
        return (
            f"Batch({samples} samples: {len(self.ids_T)} text tokens; {visual_tokens} visual tokens in "
            f"{len(self.start_M)} spans; features: {features}; on {self.ids_T.device})"
        )

    @property
    def readable(self) -> "Batch":
        """The same tokens on the CPU, if they are there: reading a GPU's would wait for it.

        It need not have the features.
        """
        return self.host or self

    def feature(self, source: str, where: Where | None = None) -> Tensor:
        """Look up a feature by its name, or by the two parts of it.

        Args:
            source: A name such as `hidden.text`; with `where` only `hidden`, `embed` or
                `layer<k>`.
            where: `text`, `visual` or `span`; see `Feature`.

        Returns:
            Its states [T, U or M, hidden size].

        Raises:
            DataError: The name is not that of a feature, or the batch was read without the
                feature: add it to `features`, or to `needs` of a drafter.
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
        tokens = {}
        for item in dataclasses.fields(self):
            if item.name not in ("features", "host"):
                tokens[item.name] = getattr(self, item.name)
        placed = place_all([*tokens.values()], device)
        moved = dict(zip(tokens, placed, strict=True))
        states = {}
        for feature, value in self.features.items():
            # The narrow dtype of a store is moved, and made wider there.
            state = place(value, device)
            states[feature] = state.to(dtype or state.dtype)
        host = None
        if device.type != "cpu":
            host = self.having({}) if self.ids_T.is_cpu else self.host
        return Batch(**moved, features=states, host=host)

    def having(self, features: Mapping[Feature, Tensor]) -> "Batch":
        """The same tokens with other features."""
        same = dataclasses.replace(self, features=features)
        # Cached properties that depend on the tokens alone are not worked out again.
        cached = vars(self)
        for name in ("visual_tokens", "text_tokens", "_prior"):
            if name in cached:
                vars(same)[name] = cached[name]
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
        missing = {*kept} - {*self.features}
        if missing:
            names = sorted(feature.name for feature in missing)
            raise DataError(f"the batch lacks {', '.join(names)}")
        return self.having({feature: self.features[feature] for feature in kept})

    @cached_property
    def visual_tokens(self) -> TokenIndex:
        """The U visual tokens: every span unrolled, in order."""
        if self.host is not None:
            return self.host.visual_tokens.to(self.ids_T.device)
        device = self.length_M.device
        number_M = torch.arange(len(self.length_M), device=device)
        span_U = torch.repeat_interleave(number_M, self.length_M)
        first_M = torch.cumsum(self.length_M, 0) - self.length_M
        number_U = torch.arange(len(span_U), device=device)
        offset_U = number_U - first_M[span_U]
        position_U = self.start_M[span_U] + offset_U
        return TokenIndex(self.segment_M[span_U], position_U, span_U)

    @cached_property
    def text_tokens(self) -> TokenIndex:
        """The T text tokens, each with the last span before it."""
        if self.host is not None:
            return self.host.text_tokens.to(self.ids_T.device)
        if len(self.start_M) == 0:
            no_span_T = torch.full_like(self.segment_T, -1)
            return TokenIndex(self.segment_T, self.position_T, no_span_T)
        far = self.position_T.max() + self.length_M.sum() + 1  # stays on the device
        text_T = self.segment_T * far + self.position_T
        start_M = self.segment_M * far + self.start_M
        span_T = torch.searchsorted(start_M, text_T, right=True) - 1
        sample_T = self.segment_M[span_T.clamp(min=0)]
        is_own_T = (span_T >= 0) & (sample_T == self.segment_T)
        span_T = torch.where(is_own_T, span_T, -1)
        return TokenIndex(self.segment_T, self.position_T, span_T)

    def before(
        self, source: str, where: Literal["text", "visual"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `source` state of each token's predecessor.

        The predecessor is the nearest earlier position whose state the batch has: any
        position, if it has visual states; else text and the last token of each span; or text
        alone. In that case the token after an image is paired with the last text token before
        it, as in HiViS, eq. 3.

        Args:
            source: `hidden`, `embed` or `layer<k>`.
            where: Of text or visual tokens alone; None: of text tokens, then visual ones.

        Returns:
            States [N, D], zero where there is no predecessor, and whether there is one (bool
            [N]). N is T + U if all tokens are asked for and the batch has visual states of
            that source, else T, or as many tokens as there are of the kind.
        """
        if where is not None:
            rows = self._rows(where)
        elif self._image_states(source) == "visual":
            rows = slice(None)
        else:
            rows = self._rows("text")
        prior_N, has_prior_N = place_all(self._link(source), self.ids_T.device)
        state_ND = self._states(source)[prior_N[rows]]
        has_prior_N = has_prior_N[rows]
        return state_ND * has_prior_N[:, None], has_prior_N

    def predecessors(
        self, sources: Sequence[str], where: Literal["text", "visual"]
    ) -> tuple[Tensor, Tensor]:
        """The tokens of a kind that have a predecessor, and the predecessors' states.

        Args:
            sources: As in `before`. A token counts if it has a predecessor with a state of
                the first one; states of others are zero where they are missing.
            where: The kind of tokens.

        Returns:
            Indices among the tokens of that kind, [E], where the batch is `readable`, and the
            states of all sources side by side, [E, S].
        """
        rows = self._rows(where)
        device = self.ids_T.device
        _, has_first_N = self._link(sources[0])
        token_E = has_first_N[rows].nonzero()[:, 0]
        states = []
        for source in sources:
            prior_N, has_prior_N = self._link(source)
            prior_E = prior_N[rows][token_E]
            has_prior_E = has_prior_N[rows][token_E]
            prior_E, has_prior_E = place_all([prior_E, has_prior_E], device)
            state_ED = self._states(source)[prior_E]
            if has_prior_N is not has_first_N:
                state_ED = state_ED * has_prior_E[:, None]
            states.append(state_ED)
        return token_E, torch.cat(states, dim=-1)

    def _rows(self, where: Literal["text", "visual"]) -> slice:
        """The slice of one kind in a tensor of text tokens and, behind them, visual tokens."""
        text = len(self.segment_T)
        return slice(0, text) if where == "text" else slice(text, None)

    def _image_states(self, source: str) -> Literal["visual", "span"] | None:
        """Which states of images the batch has from a source: all, span ends, or none."""
        if Feature(source, "visual") in self.features:
            return "visual"
        if Feature(source, "span") in self.features:
            return "span"
        return None

    def _states(self, source: str) -> Tensor:
        """The states of text tokens, and behind them those of images."""
        states = [self.feature(source, "text")]
        image_states = self._image_states(source)
        if image_states is not None:
            states.append(self.feature(source, image_states))
        return torch.cat(states)

    def _link(self, source: str) -> tuple[Tensor, Tensor]:
        """What `_find_prior` returns for a source, where the batch is `readable`."""
        image_states = self._image_states(source)
        readable = self.readable
        if image_states not in readable._prior:
            readable._prior[image_states] = readable._find_prior(image_states)
        return readable._prior[image_states]

    @cached_property
    def _prior(self) -> dict[str | None, tuple[Tensor, Tensor]]:
        """What `_find_prior` returned, by its argument."""
        return {}

    def _find_prior(
        self, image_states: Literal["visual", "span"] | None
    ) -> tuple[Tensor, Tensor]:
        """The row of each row's predecessor in `_states`, and whether it has one."""
        segments = [self.segment_T]
        positions = [self.position_T]
        if image_states == "visual":
            segments.append(self.visual_tokens.segment_N)
            positions.append(self.visual_tokens.position_N)
        elif image_states == "span":
            segments.append(self.segment_M)
            positions.append(self.start_M + self.length_M - 1)
        segment_N = torch.cat(segments)
        position_N = torch.cat(positions)
        far = position_N.max() + 1
        order_N = torch.argsort(segment_N * far + position_N)
        before_N = order_N.roll(1)
        prior_N = torch.empty_like(order_N)
        prior_N[order_N] = before_N
        has_prior_N = torch.empty_like(order_N, dtype=torch.bool)
        has_prior_N[order_N] = segment_N[order_N] == segment_N[before_N]
        has_prior_N[order_N[:1]] = False
        return prior_N, has_prior_N


@dataclass(frozen=True)
class Entries:
    """The input of one `step`.

    Args:
        ids_N: The tokens.
        hidden_ND: The states before them. At hop 0 the target's, [N, S]; later what `step`
            returned for the token before.
        rotary_N: The drafter's rotary positions.
        tokens: Where the tokens are.
        hop: 0 for committed tokens, n for the n-th guess after them.
    """

    ids_N: Tensor
    hidden_ND: Tensor
    rotary_N: Tensor
    tokens: TokenIndex
    hop: int = 0
