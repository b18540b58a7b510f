"""The decoder of a server: one loaded target and at most one drafter."""

import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import room
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.records import DecodingCounts, chain_counts
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.streaming.pieces import Piece, pieces
from vlmdistill.pipelines.streaming.response import open_pair, recorded
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace, checkpoint_folder


def decoder_thread() -> Executor:
    """A thread that a target is warmed up and decodes in.

    The CUDA graphs of compiled steps can be replayed in the thread alone that has recorded them.
    """
    return ThreadPoolExecutor(1, "decoder")


@dataclass(frozen=True)
class ServedDecoder:
    """A target and a drafter in one process. It decodes one response at a time."""

    model: str  # the name that requests give
    target: VisionLanguageTarget
    drafter: Proposer | None = None
    drafter_name: str | None = None
    tree: Tree | None = None  # None: the drafter's own
    max_new_tokens: int = 512  # of a request that sets no limit
    thread: Executor = field(default_factory=decoder_thread, repr=False, compare=False)

    def decode(
        self, request: ChatRequest, media: Path | None
    ) -> tuple[int, Iterator[Cycle]]:
        """The length of the prompt and the cycles; DataError or ApiError when the prompt cannot be used."""
        prompt = self.target.encode(request.conversation(media))
        limit = (
            request.max_completion_tokens or request.max_tokens or self.max_new_tokens
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        generator = torch.Generator(self.target.device).manual_seed(seed)
        cycles = decode(
            self.target,
            self.drafter if request.speculate else None,
            prompt,
            tree=self.tree,
            max_new_tokens=min(limit, room(self.target.info, prompt.length)),
            temperature=request.temperature,
            generator=generator,
        )
        return prompt.length, cycles


@dataclass
class ServedResponse:
    """The response to one request: iterate over `pieces`; the other facts are complete after that."""

    decoder: ServedDecoder
    request: ChatRequest
    media: Path | None = None
    prompt_tokens: int = 0
    cycles: list[Cycle] = field(default_factory=list)
    text: str = ""
    abandoned: Event = field(default_factory=Event)  # set: decode no further
    finish: str = (
        "length"  # or "stop": the target ended the response, or a stop string occurred
    )

    @property
    def decoding(self) -> DecodingCounts:
        """What it took so far; the EOS counts as a token."""
        seconds = sum(cycle.seconds for cycle in self.cycles)
        prefill = sum(cycle.seconds for cycle in self.cycles[:1])
        tried, accepted = chain_counts([cycle.chain for cycle in self.cycles[1:]])
        return DecodingCounts(
            tokens=sum(len(cycle.ids) for cycle in self.cycles),
            calls=max(0, len(self.cycles) - 1),
            accepted=sum(cycle.accepted for cycle in self.cycles),
            seconds=seconds,
            prefill_seconds=prefill,
            decode_seconds=seconds - prefill,
            chain_tried=tried,
            chain_accepted=accepted,
        )

    @property
    def drafter_name(self) -> str | None:
        """The drafter that this request is decoded with; None for plain decoding."""
        return self.decoder.drafter_name if self.request.speculate else None

    def pieces(self) -> Generator[Piece]:
        """Decode; DataError or ApiError when the prompt cannot be used."""
        self.prompt_tokens, cycles = self.decoder.decode(self.request, self.media)
        target = self.decoder.target
        text = pieces(
            recorded(cycles, self.cycles, self.abandoned.is_set), target.tokenizer
        )
        stopped = yield from self._kept(until_stop(text, self.request.stop))
        if stopped or self.cycles[-1].ids[-1] in target.info.eos_ids:
            self.finish = "stop"

    def _kept(
        self, pieces: Generator[Piece, None, bool]
    ) -> Generator[Piece, None, bool]:
        """The pieces, whose text makes that of the response."""
        while True:
            try:
                piece = next(pieces)
            except StopIteration as ended:
                return bool(ended.value)
            self.text += piece.text
            yield piece


def until_stop(
    pieces: Iterable[Piece], stop: Sequence[str]
) -> Generator[Piece, None, bool]:
    """The pieces before the first stop string; returns whether there was one.

    Pieces whose text may begin a stop string are held back until that is decided.
    """
    held: list[Piece] = []
    for piece in pieces:
        held.append(piece)
        text = "".join(one.text for one in held)
        found = [at for word in stop if (at := text.find(word)) >= 0]
        open_ends = [
            n
            for word in stop
            for n in range(1, min(len(word), len(text) + 1))
            if text.endswith(word[:n])
        ]
        ready = min(found) if found else len(text) - max(open_ends, default=0)
        while held and (len(held[0].text) <= ready or found):
            first = held.pop(0)
            if ready > 0:
                yield replace(first, text=first.text[:ready])
            ready -= len(first.text)
        if found:
            return True
    yield from held
    return False


def open_decoder(
    workspace: Workspace,
    drafter: str | None = None,
    *,
    tree: str | None = None,
    max_new_tokens: int = 512,
    how: Options | None = None,
) -> ServedDecoder:
    """Load a target and a drafter, see `open_pair`, and decode a few tokens in the decoder's thread.

    They compile and allocate what the first request would wait for.
    """
    target, proposer, shape = open_pair(workspace, drafter, tree, how)
    local = checkpoint_folder(workspace.model)
    decoder = ServedDecoder(
        local.name if local else workspace.model,
        target,
        proposer,
        workspace.trained(drafter).name if drafter else None,
        shape,
        max_new_tokens,
    )
    hello = {
        "model": decoder.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
    }
    abandoned = Event()

    def warm_up() -> None:
        for speculative in (False, True) if drafter else (False,):
            request = ChatRequest.model_validate({**hello, "speculate": speculative})
            for _ in ServedResponse(decoder, request, abandoned=abandoned).pieces():
                pass

    try:
        decoder.thread.submit(warm_up).result()
    finally:
        abandoned.set()  # after Ctrl-C, the thread ends with its step
    return decoder
