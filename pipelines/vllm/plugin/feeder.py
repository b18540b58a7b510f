"""What a step feeds an exported drafter, which rows and states; the same for both runners of vLLM.

Shapes: B requests of a batch, N rows of a step, K rows that are kept, L visual tokens, D hidden.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmdistill.pipelines.vllm.plugin.entry_map import EntryMap, Fed, Shown, StepRows


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
    """A request of the batch, and what is known of its prompt."""

    features: Sequence[Any]
    entries: EntryMap | None
    """None: it has no visual tokens."""
    sources: list[tuple[str, int]] = field(default_factory=list)
    """Of each image: the key of its embeddings, and the first of them."""
    joined: dict[int, Tensor] = field(default_factory=dict)
    """What each image joins to later states, once it is known."""


@dataclass(frozen=True)
class Feed:
    """The rows of all requests of a step that a drafter has entries for."""

    steps: list[StepRows]
    kept_K: Tensor
    index_K: Tensor
    """Of each entry, in the drafter's KV cache."""
    turned_K: Tensor
    """Its rotary position less its index."""
    request_K: Tensor
    lengths_B: np.ndarray[Any, Any]
    dropped_B: Tensor
    """Entries of each sequence that are dropped, up to the end of this step."""
    row_N: Tensor
    """Where each row is moved to."""

    @property
    def starts(self) -> Tensor:
        """The first row of each request, and the number of all, on the CPU."""
        return torch.from_numpy(
            np.append(0, np.cumsum(self.lengths_B)).astype(np.int32)
        )


class Feeder:
    """Drops the entries of visual tokens, compresses images, and pairs entries with states."""

    def __init__(self, drafter: Fed, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self._known: dict[str, _Request] = {}
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

        `block` is the drafter's model, which is given what images are compressed to; `embeds` holds the
        visual embeddings by key. `alive` are the requests that are not ended.
        """
        steps = self._steps(read, starts, alive)
        if self.drafter.compresses is not None:
            self._compress(read, steps, starts, hidden_ND, block, embeds)
        if (
            self.drafter.after_image == "text"
        ):  # a step of text alone has the state for an image after it
            self._pair_with_text(read, steps, starts, hidden_ND, alive)
        if not any(step.changed for step in steps):
            return None
        kept_N = np.concatenate([step.kept_N for step in steps])
        lengths_B = np.array([int(step.kept_N.sum()) for step in steps])
        kept_K = self.tensor(np.flatnonzero(kept_N))
        dropped_K = self.tensor(np.concatenate([step.dropped_N for step in steps]))[
            kept_K
        ]
        turned_K = self.tensor(np.concatenate([step.turned_N for step in steps]))[
            kept_K
        ]
        compact = self.drafter.config.positions == "compact"
        return Feed(
            steps=steps,
            kept_K=kept_K,
            index_K=position_N[kept_K] - dropped_K,
            turned_K=torch.zeros_like(dropped_K) if compact else dropped_K + turned_K,
            request_K=self.tensor(np.repeat(np.arange(len(steps)), lengths_B)),
            lengths_B=lengths_B,
            dropped_B=self.tensor(np.array([step.dropped for step in steps])),
            row_N=self.tensor(np.cumsum(kept_N) - 1),
        )

    def tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        """The same on the device."""
        return torch.from_numpy(values).to(self.device)

    def _steps(
        self, read: Mapping[str, Reading], starts: list[int], alive: Collection[str]
    ) -> list[StepRows]:
        """The rows of each request of the batch, [B]; what is known of one that is not in it is kept."""
        self._known = {name: one for name, one in self._known.items() if name in alive}
        for name, reading in read.items():
            if (
                name not in self._known
                or self._known[name].features is not reading.features
            ):
                self._known[name] = self._request(reading)
        everything = EntryMap.of(np.zeros(0, dtype=bool), self.drafter)
        return [
            (self._known[name].entries or everything).step(one.first, end - start)
            for (start, end), (name, one) in zip(
                pairwise(starts), read.items(), strict=True
            )
        ]

    def _request(self, read: Reading) -> _Request:
        """The entries of one request's prompt."""
        if not read.features:
            return _Request(read.features, None)
        visual_P = np.zeros(read.prompt, dtype=bool)
        images, sources = list[Shown](), list[tuple[str, int]]()
        for feature in read.features:
            shown = feature.mm_position
            own_L = (
                np.ones(shown.length, bool)
                if shown.is_embed is None
                else shown.is_embed.cpu().numpy()
            )
            visual_P[shown.offset : shown.offset + shown.length] |= own_L
            edges = np.flatnonzero(
                np.diff(np.concatenate([[False], own_L, [False]]))
            ).tolist()
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                images.append(Shown(shown.offset + start, end - start))
                sources.append((feature.identifier, int(own_L[:start].sum())))
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
        first = 0
        rows, carried = list[int](), list[Tensor]()
        for (start, end), step, (name, reading) in zip(
            pairwise(starts), steps, read.items(), strict=True
        ):
            one, rows_ND = self._known[name], hidden_ND[start:end]
            kept_K = np.flatnonzero(step.kept_N)
            image_K, query_K = step.image_N[kept_K], step.query_N[kept_K]
            here = slice(first, first + len(kept_K))
            if self.drafter.joins:
                block.joined_ND[here] = 0
            for image in np.unique(image_K[image_K >= 0]).tolist():
                of_K = image_K == image
                carries_K = np.flatnonzero(of_K & (query_K >= 0))
                if len(carries_K) or (self.drafter.joins and image not in one.joined):
                    visual_LD = self._visual(one, image, reading.first, rows_ND, embeds)
                    if visual_LD is None:
                        # The row before an image carries an entry if the image has no more tokens than it
                        # has entries. Where a step ends at that row, it stays as it is.
                        continue
                    span_L = torch.zeros(
                        len(visual_LD), dtype=torch.long, device=self.device
                    )
                    (out_QD,) = self.drafter.compress(visual_LD, span_L, 1)
                    rows += (first + carries_K).tolist()
                    carried.append(out_QD[query_K[carries_K].tolist()])
                    if self.drafter.joins:
                        one.joined[image] = out_QD[-1]
                if self.drafter.joins:
                    block.joined_ND[here][self.tensor(of_K)] = one.joined[image]
            first += len(kept_K)
        if rows:
            block.compressed = (
                torch.tensor(rows, device=self.device),
                torch.cat(carried),
            )

    def _visual(
        self,
        one: _Request,
        image: int,
        first: int,
        hidden_ND: Tensor,
        embeds: Mapping[str, Tensor],
    ) -> Tensor | None:
        """The visual tokens of an image as the drafter reads them, [L, D]; None: not known in this step.

        `hidden_ND` are the states of the request's tokens from `first` on.
        """
        assert one.entries is not None
        shown, read_ND = one.entries.images[image], hidden_ND
        if self.drafter.compresses == "hidden":
            at = shown.start - first
            if at < 0 or at + shown.length > len(hidden_ND):
                return None
        else:
            key, at = one.sources[image]
            if key not in embeds:
                return None
            read_ND = embeds[key]
        # The first D columns, since Qwen3-VL has deep features after its embeddings.
        return read_ND[at : at + shown.length, : hidden_ND.shape[1]].to(hidden_ND.dtype)

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
            name: held for name, held in self._text_states.items() if name in alive
        }
        given_ND = (
            hidden_ND.clone() if any(_moves(step) for step in steps) else hidden_ND
        )
        for (start, end), step, (name, one) in zip(
            pairwise(starts), steps, read.items(), strict=True
        ):
            held_1D = self._text_states.pop(name, None)
            row_N, source_N = np.arange(end - start), step.source_N
            for row in np.flatnonzero(step.kept_N & (source_N != row_N)):
                paired_1D = (
                    held_1D if source_N[row] < 0 else given_ND[start + source_N[row]]
                )
                if (
                    paired_1D is not None
                ):  # no text before: the row is there only because a step needs one
                    hidden_ND[start + row] = paired_1D
            if one.first + end - start < one.prompt:
                last = source_N[-1]
                if last >= 0:
                    held_1D = given_ND[start + last].clone()
                if held_1D is not None:
                    self._text_states[name] = held_1D


def _moves(step: StepRows) -> bool:
    """Some entry is paired with the state of another row."""
    return bool((step.kept_N & (step.source_N != np.arange(len(step.kept_N)))).any())
