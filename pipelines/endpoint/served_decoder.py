"""The decoder of a server: one loaded target and at most one drafter."""

import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import room
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.records import DecodingCounts, chain_counts
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.gate import ApiError
from vlmdistill.pipelines.streaming.pieces import Piece, pieces
from vlmdistill.pipelines.streaming.response import open_pair, recorded, thinking_of
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace, checkpoint_folder


def decoder_thread() -> Executor:
    """A thread that a target is warmed up and decodes in.

    CUDA graphs of compiled steps can only be replayed in the thread that has recorded them.
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
    compared: Mapping[str, Proposer] = field(default_factory=dict)
    """Drafters that requests may name besides `drafter`, by their names."""

    @property
    def drafters(self) -> list[str]:
        """The names that requests may give; the first drafts for those that give none."""
        return [*([self.drafter_name] if self.drafter_name else []), *self.compared]

    def proposer(self, request: ChatRequest) -> Proposer | None:
        """The drafter of a request; ApiError if it names another."""
        if not request.speculate:
            return None
        name = request.drafter
        if name is None or name == self.drafter_name:
            return self.drafter
        if name not in self.compared:
            names = ", ".join(self.drafters) or "none"
            message = f"there is no drafter '{name}': this server has {names}"
            raise ApiError(400, message, param="drafter", code="drafter_not_found")
        return self.compared[name]

    def decode(
        self, request: ChatRequest, media: Path | None
    ) -> tuple[int, Iterator[Cycle]]:
        """The length of the prompt and the cycles; DataError or ApiError when the prompt cannot be used."""
        messages = request.conversation(media)
        prompt = self.target.encode(messages, request.thinking)
        requested = request.max_completion_tokens or request.max_tokens
        limit = requested or self.max_new_tokens
        free_positions = room(self.target.info, prompt.length)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        generator = torch.Generator(self.target.device).manual_seed(seed)
        cycles = decode(
            self.target,
            self.proposer(request),
            prompt,
            tree=self.tree,
            max_new_tokens=min(limit, free_positions),
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
    finish: str = "length"
    """Or "stop": the target ended the response, or a stop string occurred."""

    @property
    def decoding(self) -> DecodingCounts:
        """Its counts and times so far; the EOS counts as a token."""
        cycles, after_prefill = self.cycles, self.cycles[1:]
        seconds = sum(cycle.seconds for cycle in cycles)
        prefill = cycles[0].seconds if cycles else 0
        tried, accepted = chain_counts([cycle.chain for cycle in after_prefill])
        tokens = sum(len(cycle.ids) for cycle in cycles)
        accepted_tokens = sum(cycle.accepted for cycle in cycles)
        return DecodingCounts(
            tokens=tokens,
            calls=len(after_prefill),
            accepted=accepted_tokens,
            seconds=seconds,
            prefill_seconds=prefill,
            decode_seconds=seconds - prefill,
            chain_tried=tried,
            chain_accepted=accepted,
        )

    @property
    def drafter_name(self) -> str | None:
        """The drafter that this request is decoded with; None for plain decoding."""
        if not self.request.speculate:
            return None
        return self.request.drafter or self.decoder.drafter_name

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
    held_back: list[Piece] = []
    for piece in pieces:
        held_back.append(piece)
        text = "".join(waiting.text for waiting in held_back)
        starts = [text.find(word) for word in stop if word in text]
        if starts:
            yield from _cut(held_back, min(starts))
            return True
        decided = len(text) - _undecided(text, stop)
        while held_back and len(held_back[0].text) <= decided:
            first = held_back.pop(0)
            if decided > 0:
                yield first
            decided -= len(first.text)
    yield from held_back
    return False


def _undecided(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may begin a stop string."""
    longest = 0
    for word in stop:
        for count in range(1, min(len(word), len(text) + 1)):
            if text.endswith(word[:count]):
                longest = max(longest, count)
    return longest


def _cut(pieces: Iterable[Piece], length: int) -> Iterator[Piece]:
    """The pieces of so many first characters."""
    for piece in pieces:
        if length <= 0:
            return
        yield replace(piece, text=piece.text[:length])
        length -= len(piece.text)


def open_decoder(
    workspace: Workspace,
    drafter: str | None = None,
    *,
    compared: Sequence[str] = (),
    tree: str | None = None,
    max_new_tokens: int = 512,
    how: Options | None = None,
) -> ServedDecoder:
    """Load a target and drafters, see `open_pair`, and decode a few tokens in the decoder's thread.

    These tokens compile steps and allocate memory, for which the first request would wait otherwise.
    """
    folders = [workspace.trained(name) for name in (drafter, *compared) if name]
    how = Options(thinking=thinking_of(folders)) | (how or Options())
    target, proposer, shape = open_pair(workspace, drafter, tree, how)
    local = checkpoint_folder(workspace.model)
    decoder = ServedDecoder(
        local.name if local else workspace.model,
        target,
        proposer,
        workspace.trained(drafter).name if drafter else None,
        shape,
        max_new_tokens,
        compared={
            folder.name: target.drafter(folder)
            for folder in map(workspace.trained, compared)
        },
    )
    message = {"role": "user", "content": "Hello"}
    hello = {"model": decoder.model, "messages": [message], "max_tokens": 8}
    abandoned = Event()

    def warm_up() -> None:
        requests: list[dict[str, Any]] = [{"speculate": False}]
        requests += [{"drafter": name} for name in decoder.drafters]
        for facts in requests:
            request = ChatRequest.model_validate({**hello, **facts})
            response = ServedResponse(decoder, request, abandoned=abandoned)
            for _ in response.pieces():
                pass

    try:
        decoder.thread.submit(warm_up).result()
    finally:
        abandoned.set()  # after Ctrl-C, the thread ends with its step
    return decoder
