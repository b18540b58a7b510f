"""The rows and states that a step feeds an exported drafter; the same for both runners of vLLM.

A request that decodes keeps all its rows. Of its prompt, a step needs the number of dropped entries alone, so
only the rows of prompts with images are looked at.

Shapes: B requests of a batch, N rows of a step, K rows that are kept, X those that carry compressed images, L
visual tokens, M images of a request, S vectors that images join to later states, D hidden.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmdistill.pipelines.vllm.plugin.entry_map import (
    EntryMap,
    FeedingDrafter,
    ImageSpan,
    StepRows,
)

Ints = NDArray[np.int64]


class Reading(NamedTuple):
    """The requests of a step, in the order of their rows."""

    names: Sequence[str]
    media: Mapping[str, Sequence[Any]]
    """Images and videos by request, the same object in each step; a request may have none."""
    prompt_B: Ints
    """Tokens of each prompt."""
    first_B: Ints
    """Tokens that were read before this step; after the prompt, any number from its length on."""
    starts: Sequence[int]
    """The first row of each request, and the number of all."""
    alive: Collection[str]
    """The requests that have not ended."""


@dataclass
class _Request:
    """A request with images."""

    features: Sequence[Any]
    entries: EntryMap
    sources: list[tuple[str, int]]
    """Of each image: the key of its embeddings, and the first of them."""
    joined: dict[int, int] = field(default_factory=dict)
    """By image whose vector is known: its row in the feeder's table."""


@dataclass(frozen=True)
class _Prompt:
    """A request with images that reads its prompt in this step."""

    name: str
    request: _Request
    number: int
    """In the batch."""
    first: int
    rows: slice
    step: StepRows
    unfinished: bool


@dataclass(frozen=True)
class KeptRows:
    """The rows that are kept in a step that drops some."""

    kept_K: Tensor
    id_row_K: Tensor
    """The row whose id goes into each, before vLLM shifts the ids by one row."""
    row_N: Tensor
    """Where each row is moved to."""
    lengths_B: Ints
    cpu_starts: Tensor
    """The first row of each request, and the number of all."""
    starts: Tensor
    next_rows: Mapping[int, int]
    """The row after the last one that is kept, by request whose last row is dropped."""


@dataclass(frozen=True)
class Feed:
    """The rows of all requests of a step that a drafter has entries for."""

    hidden_KD: Tensor
    """The states that they are paired with."""
    index_K: Tensor
    """Of each entry, in the drafter's KV cache."""
    shift_K: Tensor | None
    """Rotary position less the index; None: they are equal."""
    request_K: Tensor
    cpu_dropped_B: Tensor
    """Entries of each sequence that are dropped, up to the end of this step."""
    dropped_B: Tensor
    kept: KeptRows | None
    """None: all rows are."""

    @property
    def guess_shift_B(self) -> Tensor | None:
        """The rotary position of each request's guesses less the index; None: they are equal."""
        return None if self.shift_K is None else self.dropped_B


class Feeder:
    """Drops the entries of visual tokens, compresses images, and pairs entries with states."""

    def __init__(self, drafter: FeedingDrafter, device: torch.device) -> None:
        self.drafter = drafter
        self.device = device
        self._requests: dict[str, _Request] = {}
        self._text_states: dict[str, Tensor] = {}
        self._joined_SD: Tensor | None = None
        """Row 0 is for rows before any image."""
        self._free_rows: list[int] = []
        self._carried = False
        """The last step put compressed images into the block."""

    def feed(
        self,
        read: Reading,
        position_N: Tensor,
        hidden_ND: Tensor,
        block: Any,
        embeds: Mapping[str, Tensor],
    ) -> Feed | None:
        """The rows of a step and their states; None: all of them, as they are.

        `block` is the drafter's `LayerInput`, which gets the compressed images; `embeds` holds the visual
        embeddings by key.
        """
        requests = self._with_images(read)
        prompts = _prompts(read, requests)
        if self._carried:
            block.carries_N.zero_()
        self._carried = False
        if self.drafter.compresses is not None:
            self._compress(prompts, hidden_ND, block, embeds)
        if self.drafter.joins:
            self._join(read, requests, prompts, block)
        if self.drafter.after_image == "text":
            hidden_ND = self._paired_with_text(read, prompts, hidden_ND)
        dropped = [0] * len(read.names)  # to write into a list is faster
        for number, request in requests.items():
            dropped[number] = request.entries.dropped
        for prompt in prompts:
            dropped[prompt.number] = prompt.step.dropped
        if not (any(dropped) or self._carried):
            return None
        dropped_B = np.array(dropped, dtype=np.int64)
        return self._fed(read, prompts, dropped_B, position_N, hidden_ND)

    def _fed(
        self,
        read: Reading,
        prompts: Sequence[_Prompt],
        dropped_B: Ints,
        position_N: Tensor,
        hidden_ND: Tensor,
    ) -> Feed:
        """What the device must know of the rows: one copy, and another if some are dropped."""
        count_B = np.diff(read.starts)
        dropped_N = np.repeat(dropped_B, count_B)
        shift_N = np.zeros_like(dropped_N)
        kept_N = np.ones(len(dropped_N), dtype=bool)
        for prompt in prompts:
            kept_N[prompt.rows] = prompt.step.kept_N
            dropped_N[prompt.rows] = prompt.step.dropped_N
            shift_N[prompt.rows] = prompt.step.rotary_shift_N
        request_N = np.repeat(np.arange(len(count_B)), count_B)
        by_row = [dropped_N, dropped_N + shift_N, request_N]
        kept = None
        if not kept_N.all():
            kept = self._kept(read, prompts, kept_N)
            position_N = position_N[kept.kept_K]
            hidden_ND = hidden_ND[kept.kept_K]
            by_row = [value_N[kept_N] for value_N in by_row]
        dropped_K, shift_K, request_K, device_dropped_B = self._send(*by_row, dropped_B)
        expanded = self.drafter.config.positions == "expanded"
        return Feed(
            hidden_KD=hidden_ND,
            index_K=position_N - dropped_K,
            shift_K=shift_K if expanded else None,
            request_K=request_K,
            cpu_dropped_B=torch.from_numpy(dropped_B),
            dropped_B=device_dropped_B,
            kept=kept,
        )

    def _kept(
        self, read: Reading, prompts: Sequence[_Prompt], kept_N: NDArray[np.bool_]
    ) -> KeptRows:
        """Where rows are moved to when some are dropped."""
        kept_K = np.flatnonzero(kept_N)
        kept_before_N = np.append(0, np.cumsum(kept_N))
        starts = kept_before_N[read.starts]
        id_row_K = np.append(0, kept_K[:-1] + 1)
        id_row_K[starts[:-1]] = read.starts[:-1]
        next_rows = {}
        for prompt in prompts:
            next_row = int(kept_K[starts[prompt.number + 1] - 1]) + 1
            if next_row < prompt.rows.stop:
                next_rows[prompt.number] = next_row
        device_kept_K, device_id_row_K, row_N, device_starts = self._send(
            kept_K, id_row_K, kept_before_N[1:] - 1, starts
        )
        return KeptRows(
            kept_K=device_kept_K,
            id_row_K=device_id_row_K,
            row_N=row_N,
            lengths_B=np.diff(starts),
            cpu_starts=torch.from_numpy(starts.astype(np.int32)),
            starts=device_starts.to(torch.int32),
            next_rows=next_rows,
        )

    def _send(self, *arrays: Ints) -> tuple[Tensor, ...]:
        """Arrays on the device, by one copy from pinned memory, for which nothing waits.

        torch gives that memory to nobody before the copy has ended.
        """
        packed = torch.from_numpy(np.concatenate(arrays))
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        sent = packed.to(self.device, non_blocking=True)
        return torch.split(sent, [len(values) for values in arrays])

    def _with_images(self, read: Reading) -> dict[int, _Request]:
        """The requests of the batch that have images, by number; one that waits meanwhile is kept."""
        for name in [name for name in self._requests if name not in read.alive]:
            self._free(self._requests.pop(name))
        requests = {}
        for number, name in enumerate(read.names):
            features = read.media.get(name)
            if not features:
                continue
            request = self._requests.get(name)
            # A name may come again, with another prompt.
            if request is None or request.features is not features:
                if request is not None:
                    self._free(request)
                request = self._request(features, int(read.prompt_B[number]))
                self._requests[name] = request
            requests[number] = request
        return requests

    def _request(self, features: Sequence[Any], prompt: int) -> _Request:
        """The entries of a prompt of this many tokens."""
        visual_P = np.zeros(prompt, dtype=bool)
        images = list[ImageSpan]()
        sources = list[tuple[str, int]]()
        for feature in features:
            place = feature.mm_position
            visual_L = np.ones(place.length, bool)
            if place.is_embed is not None:
                visual_L = place.is_embed.cpu().numpy()
            visual_P[place.offset : place.offset + place.length] |= visual_L
            for start, end in _runs(visual_L):
                images.append(ImageSpan(place.offset + start, end - start))
                sources.append((feature.identifier, int(visual_L[:start].sum())))
        entries = EntryMap.of(visual_P, self.drafter, images)
        return _Request(features, entries, sources)

    def _compress(
        self,
        prompts: Sequence[_Prompt],
        hidden_ND: Tensor,
        block: Any,
        embeds: Mapping[str, Tensor],
    ) -> None:
        """Compress the images that rows of this step carry, or that their states are joined with."""
        dropped = 0  # rows before the request's
        rows = list[int]()
        carried = list[Tensor]()
        for prompt in prompts:
            first = prompt.rows.start - dropped
            for carrying, entry_XD in self._compressed_images(
                prompt, hidden_ND[prompt.rows], embeds
            ):
                rows += [first + row for row in carrying]
                carried.append(entry_XD)
            dropped += int((~prompt.step.kept_N).sum())
        if rows:
            (row_X,) = self._send(np.array(rows))
            block.carry(row_X, torch.cat(carried))
            self._carried = True

    def _compressed_images(
        self, prompt: _Prompt, hidden_ND: Tensor, embeds: Mapping[str, Tensor]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """For each image that kept rows carry: these rows, and its entries in them, [X, D].

        `hidden_ND` are the states of the request's rows.
        """
        step = prompt.step
        request = prompt.request
        kept_K = np.flatnonzero(step.kept_N)
        image_K = step.image_N[kept_K]
        carried_K = step.carried_N[kept_K]
        for image in np.unique(image_K[image_K >= 0]).tolist():
            carrying_X = np.flatnonzero((image_K == image) & (carried_K >= 0))
            to_join = self.drafter.joins and image not in request.joined
            if not (len(carrying_X) or to_join):
                continue
            visual_LD = self._visual(prompt, image, hidden_ND, embeds)
            if visual_LD is None:
                # The row before an image carries an entry if the image has no more tokens than it has
                # entries. Where a step ends at that row, it stays as it is.
                continue
            entry_QD = self._compressed(visual_LD)
            if to_join:
                request.joined[image] = self._keep_joined(entry_QD[-1])
            if len(carrying_X):
                # Where a step ends within an image, some of its entries, which are in order.
                first, last = carried_K[carrying_X[[0, -1]]]
                yield carrying_X.tolist(), entry_QD[first : last + 1]

    def _compressed(self, visual_LD: Tensor) -> Tensor:
        """The entries of one image, [Q, D]."""
        span_L = torch.zeros(len(visual_LD), dtype=torch.long, device=self.device)
        entry_1QD = self.drafter.compress(visual_LD, span_L, 1)
        return entry_1QD[0]

    def _visual(
        self,
        prompt: _Prompt,
        image: int,
        hidden_ND: Tensor,
        embeds: Mapping[str, Tensor],
    ) -> Tensor | None:
        """The visual tokens of an image as the drafter reads them, [L, D]; None: not known in this step."""
        shown = prompt.request.entries.images[image]
        if self.drafter.compresses == "hidden":
            source_ND = hidden_ND
            start = shown.start - prompt.first
            if start < 0 or start + shown.length > len(hidden_ND):
                return None
        else:
            key, start = prompt.request.sources[image]
            if key not in embeds:
                return None
            source_ND = embeds[key]
        # The first D columns, since Qwen3-VL has deep features after its embeddings.
        width = hidden_ND.shape[1]
        visual_LD = source_ND[start : start + shown.length, :width]
        return visual_LD.to(hidden_ND.dtype)

    def _keep_joined(self, joined_D: Tensor) -> int:
        """Keep the vector of an image; its row in the table."""
        if self._joined_SD is None:
            self._joined_SD = joined_D.new_zeros(1, len(joined_D))
        if not self._free_rows:
            rows = len(self._joined_SD)
            self._free_rows = list(range(rows, 2 * rows))
            more_SD = torch.zeros_like(self._joined_SD)
            self._joined_SD = torch.cat([self._joined_SD, more_SD])
        row = self._free_rows.pop()
        self._joined_SD[row] = joined_D
        return row

    def _free(self, request: _Request) -> None:
        """The vectors of a request that has ended are not needed any more."""
        self._free_rows += request.joined.values()

    def _join(
        self,
        read: Reading,
        requests: Mapping[int, _Request],
        prompts: Sequence[_Prompt],
        block: Any,
    ) -> None:
        """Give each row that is kept the vector of the last image before it."""
        if self._joined_SD is None:
            return
        count_B = np.diff(read.starts)
        last_B = np.zeros(len(count_B), dtype=np.int64)
        for number, request in requests.items():
            last_B[number] = request.joined.get(len(request.entries.images) - 1, 0)
        table_row_N = np.repeat(last_B, count_B)
        kept_N = np.ones(len(table_row_N), dtype=bool)
        for prompt in prompts:
            joined = prompt.request.joined
            image_N = prompt.step.image_N.tolist()
            table_row_N[prompt.rows] = [joined.get(image, 0) for image in image_N]
            kept_N[prompt.rows] = prompt.step.kept_N
        (table_row_K,) = self._send(table_row_N[kept_N])
        block.joined_ND[: len(table_row_K)] = self._joined_SD[table_row_K]

    def _paired_with_text(
        self, read: Reading, prompts: Sequence[_Prompt], hidden_ND: Tensor
    ) -> Tensor:
        """States with that of the last text token in the entries after an image (HiViS eq. 3), [N, D].

        Where a prompt is read in several steps, that state may come from an earlier one: it is kept until
        the prompt is read.
        """
        # A request that was aborted leaves its state behind.
        self._text_states = {
            name: state
            for name, state in self._text_states.items()
            if name in read.alive
        }
        paired_ND = hidden_ND
        if any(_moves(prompt.step) for prompt in prompts):
            paired_ND = hidden_ND.clone()
        for prompt in prompts:
            start = prompt.rows.start
            text_1D = self._text_states.pop(prompt.name, None)
            source_N = prompt.step.source_N
            moved_N = prompt.step.kept_N & (source_N != np.arange(len(source_N)))
            for row in np.flatnonzero(moved_N):
                state_1D = text_1D
                if source_N[row] >= 0:
                    state_1D = hidden_ND[start + source_N[row]]
                # Without text before it, the row is there only because a step needs one.
                if state_1D is not None:
                    paired_ND[start + row] = state_1D
            if prompt.unfinished:
                last = source_N[-1]
                if last >= 0:
                    text_1D = hidden_ND[start + last].clone()
                if text_1D is not None:
                    self._text_states[prompt.name] = text_1D
        return paired_ND


def _prompts(read: Reading, requests: Mapping[int, _Request]) -> list[_Prompt]:
    """The requests with images that read their prompts in this step."""
    prompts = []
    first_of = read.first_B.tolist()
    for number, request in requests.items():
        first = first_of[number]
        length = request.entries.length
        if first >= length:
            continue
        start, end = read.starts[number : number + 2]
        prompt = _Prompt(
            name=read.names[number],
            request=request,
            number=number,
            first=first,
            rows=slice(start, end),
            step=request.entries.step(first, end - start),
            unfinished=first + end - start < length,
        )
        prompts.append(prompt)
    return prompts


def _runs(visual_L: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Start and end of each run of visual tokens."""
    padded = np.concatenate([[False], visual_L, [False]])
    edges = np.flatnonzero(np.diff(padded)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _moves(step: StepRows) -> bool:
    """Some entry is paired with the state of another row."""
    own_N = np.arange(len(step.kept_N))
    return bool((step.kept_N & (step.source_N != own_N)).any())
