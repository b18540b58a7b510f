"""The rows and states that a step feeds an exported drafter; the same for both runners of vLLM.

Shapes: B requests of a batch, N rows of a step, K rows that are kept, L visual tokens, D hidden.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmdistill.pipelines.vllm.plugin.entry_map import (
    EntryMap,
    FeedingDrafter,
    ImageSpan,
    StepRows,
)


class Reading(NamedTuple):
    """A request of a step."""

    features: Sequence[Any]
    """Its images and videos, the same object in each step."""
    prompt: int
    """Tokens of its prompt."""
    first: int
    """Tokens that were read before this step."""


@dataclass
class _Request:
    """A request of the batch, and the entries of its prompt."""

    features: Sequence[Any]
    entries: EntryMap | None
    """None: it has no visual tokens."""
    sources: list[tuple[str, int]] = field(default_factory=list)
    """Of each image: the key of its embeddings, and the first of them."""
    joined: dict[int, Tensor] = field(default_factory=dict)
    """By image, the vector that it joins to later states, once that is known."""


@dataclass(frozen=True)
class Feed:
    """The rows of all requests of a step that a drafter has entries for."""

    steps: list[StepRows]
    kept_K: Tensor
    index_K: Tensor
    """Of each entry, in the drafter's KV cache."""
    rotary_shift_K: Tensor
    """Rotary position less the index."""
    request_K: Tensor
    lengths_B: np.ndarray[Any, Any]
    dropped_B: Tensor
    """Entries of each sequence that are dropped, up to the end of this step."""
    row_N: Tensor
    """Where each row is moved to."""

    @property
    def starts(self) -> Tensor:
        """The first row of each request, and the number of all, on the CPU."""
        starts = np.append(0, np.cumsum(self.lengths_B))
        return torch.from_numpy(starts.astype(np.int32))


class Feeder:
    """Drops the entries of visual tokens, compresses images, and pairs entries with states."""

    def __init__(self, drafter: FeedingDrafter, device: torch.device) -> None:
        self.drafter = drafter
        self.device = device
        self._requests: dict[str, _Request] = {}
        self._text_states: dict[str, Tensor] = {}

    def feed(
        self,
        read: Mapping[str, Reading],
        starts: list[int],
        position_N: Tensor,
        hidden_ND: Tensor,
        block: Any,
        embeds: Mapping[str, Tensor],
        alive: Collection[str],
    ) -> Feed | None:
        """The rows of a step, whose states are paired in place; None: all of them, as they are.

        `block` is the drafter's model, which gets the compressed images; `embeds` holds the visual embeddings
        by key. `alive` are the requests that have not ended.
        """
        steps = self._steps(read, starts, alive)
        if self.drafter.compresses is not None:
            self._compress(read, steps, starts, hidden_ND, block, embeds)
        if self.drafter.after_image == "text":
            # Also in a step of text alone, which has the state for an image after it.
            self._pair_with_text(read, steps, starts, hidden_ND, alive)
        if not any(step.changed for step in steps):
            return None
        kept_N = np.concatenate([step.kept_N for step in steps])
        kept_K = self.tensor(np.flatnonzero(kept_N))
        dropped_N = np.concatenate([step.dropped_N for step in steps])
        dropped_K = self.tensor(dropped_N)[kept_K]
        if self.drafter.config.positions == "compact":
            rotary_shift_K = torch.zeros_like(dropped_K)
        else:
            rotary_shift_N = np.concatenate([step.rotary_shift_N for step in steps])
            rotary_shift_K = dropped_K + self.tensor(rotary_shift_N)[kept_K]
        lengths_B = np.array([int(step.kept_N.sum()) for step in steps])
        return Feed(
            steps=steps,
            kept_K=kept_K,
            index_K=position_N[kept_K] - dropped_K,
            rotary_shift_K=rotary_shift_K,
            request_K=self.tensor(np.repeat(np.arange(len(steps)), lengths_B)),
            lengths_B=lengths_B,
            dropped_B=self.tensor(np.array([step.dropped for step in steps])),
            row_N=self.tensor(np.cumsum(kept_N) - 1),
        )

    def tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        """An array as a tensor on the device."""
        return torch.from_numpy(values).to(self.device)

    def _steps(
        self, read: Mapping[str, Reading], starts: list[int], alive: Collection[str]
    ) -> list[StepRows]:
        """The rows of each request of the batch, [B]; a request that waits meanwhile is kept."""
        self._requests = {
            name: request for name, request in self._requests.items() if name in alive
        }
        for name, reading in read.items():
            known = self._requests.get(name)
            # A name may come again, with another prompt.
            if known is None or known.features is not reading.features:
                self._requests[name] = self._request(reading)
        keeps_all = EntryMap.of(np.zeros(0, dtype=bool), self.drafter)
        steps = list[StepRows]()
        for (start, end), (name, reading) in zip(
            pairwise(starts), read.items(), strict=True
        ):
            entries = self._requests[name].entries or keeps_all
            steps.append(entries.step(reading.first, end - start))
        return steps

    def _request(self, read: Reading) -> _Request:
        """The entries of one request's prompt."""
        if not read.features:
            return _Request(read.features, None)
        visual_P = np.zeros(read.prompt, dtype=bool)
        images = list[ImageSpan]()
        sources = list[tuple[str, int]]()
        for feature in read.features:
            place = feature.mm_position
            visual_L = np.ones(place.length, bool)
            if place.is_embed is not None:
                visual_L = place.is_embed.cpu().numpy()
            visual_P[place.offset : place.offset + place.length] |= visual_L
            for start, end in _runs(visual_L):
                images.append(ImageSpan(place.offset + start, end - start))
                sources.append((feature.identifier, int(visual_L[:start].sum())))
        entries = EntryMap.of(visual_P, self.drafter, images)
        return _Request(read.features, entries, sources)

    def _compress(
        self,
        read: Mapping[str, Reading],
        steps: list[StepRows],
        starts: list[int],
        hidden_ND: Tensor,
        block: Any,
        embeds: Mapping[str, Tensor],
    ) -> None:
        """Compress the images that rows of this step carry, or that their states are joined with."""
        first = 0  # row of the request among all that are kept
        rows = list[int]()
        carried = list[Tensor]()
        for (start, end), step, (name, reading) in zip(
            pairwise(starts), steps, read.items(), strict=True
        ):
            count = int(step.kept_N.sum())
            joined_KD = None
            if self.drafter.joins:
                joined_KD = block.joined_ND[first : first + count]
                joined_KD[:] = 0
            for carrying, entry_XD in self._compress_request(
                self._requests[name],
                reading.first,
                step,
                hidden_ND[start:end],
                embeds,
                joined_KD,
            ):
                rows += [first + row for row in carrying]
                carried.append(entry_XD)
            first += count
        if rows:
            row_X = torch.tensor(rows, device=self.device)
            block.compressed = (row_X, torch.cat(carried))

    def _compress_request(
        self,
        request: _Request,
        first: int,
        step: StepRows,
        hidden_ND: Tensor,
        embeds: Mapping[str, Tensor],
        joined_KD: Tensor | None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """For each image that kept rows carry: these rows, and its entries in them, [X, D].

        `hidden_ND` are the states of the request's tokens from `first` on. Into `joined_KD`, if there is one,
        go the vectors that the images join to the states of the kept rows.
        """
        kept_K = np.flatnonzero(step.kept_N)
        image_K = step.image_N[kept_K]
        carried_K = step.carried_N[kept_K]
        for image in np.unique(image_K[image_K >= 0]).tolist():
            of_image_K = image_K == image
            carrying_X = np.flatnonzero(of_image_K & (carried_K >= 0))
            to_join = joined_KD is not None and image not in request.joined
            if len(carrying_X) or to_join:
                visual_LD = self._visual(request, image, first, hidden_ND, embeds)
                if visual_LD is None:
                    # The row before an image carries an entry if the image has no more tokens than it has
                    # entries. Where a step ends at that row, it stays as it is.
                    continue
                entry_QD = self._compressed(visual_LD)
                if joined_KD is not None:
                    request.joined[image] = entry_QD[-1]
                yield carrying_X.tolist(), entry_QD[carried_K[carrying_X].tolist()]
            if joined_KD is not None:
                joined_KD[self.tensor(of_image_K)] = request.joined[image]

    def _compressed(self, visual_LD: Tensor) -> Tensor:
        """The entries of one image, [Q, D]."""
        span_L = torch.zeros(len(visual_LD), dtype=torch.long, device=self.device)
        entry_1QD = self.drafter.compress(visual_LD, span_L, 1)
        return entry_1QD[0]

    def _visual(
        self,
        request: _Request,
        image: int,
        first: int,
        hidden_ND: Tensor,
        embeds: Mapping[str, Tensor],
    ) -> Tensor | None:
        """The visual tokens of an image as the drafter reads them, [L, D]; None: not known in this step.

        `hidden_ND` are the states of the request's tokens from `first` on.
        """
        assert request.entries is not None
        shown = request.entries.images[image]
        if self.drafter.compresses == "hidden":
            source_ND = hidden_ND
            start = shown.start - first
            if start < 0 or start + shown.length > len(hidden_ND):
                return None
        else:
            key, start = request.sources[image]
            if key not in embeds:
                return None
            source_ND = embeds[key]
        # The first D columns, since Qwen3-VL has deep features after its embeddings.
        width = hidden_ND.shape[1]
        visual_LD = source_ND[start : start + shown.length, :width]
        return visual_LD.to(hidden_ND.dtype)

    def _pair_with_text(
        self,
        read: Mapping[str, Reading],
        steps: list[StepRows],
        starts: list[int],
        hidden_ND: Tensor,
        alive: Collection[str],
    ) -> None:
        """Put the state of the last text token into the entries after an image (HiViS eq. 3).

        Where a prompt is read in several steps, that state may come from an earlier one: it is kept until
        the prompt is read.
        """
        # A request that was aborted leaves its state behind.
        self._text_states = {
            name: state for name, state in self._text_states.items() if name in alive
        }
        before_ND = hidden_ND
        if any(_moves(step) for step in steps):
            before_ND = hidden_ND.clone()
        for (start, end), step, (name, reading) in zip(
            pairwise(starts), steps, read.items(), strict=True
        ):
            text_1D = self._text_states.pop(name, None)
            source_N = step.source_N
            moved_N = step.kept_N & (source_N != np.arange(end - start))
            for row in np.flatnonzero(moved_N):
                paired_1D = text_1D
                if source_N[row] >= 0:
                    paired_1D = before_ND[start + source_N[row]]
                # Without text before it, the row is there only because a step needs one.
                if paired_1D is not None:
                    hidden_ND[start + row] = paired_1D
            if reading.first + end - start < reading.prompt:
                last = source_N[-1]
                if last >= 0:
                    text_1D = before_ND[start + last].clone()
                if text_1D is not None:
                    self._text_states[name] = text_1D


def _runs(visual_L: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Start and end of each run of visual tokens."""
    padded = np.concatenate([[False], visual_L, [False]])
    edges = np.flatnonzero(np.diff(padded)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _moves(step: StepRows) -> bool:
    """Some entry is paired with the state of another row."""
    own_N = np.arange(len(step.kept_N))
    return bool((step.kept_N & (step.source_N != own_N)).any())
