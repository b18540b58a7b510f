"""Decodes each prompt with plain decoding and every drafter in alternation, checks and counts the results."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding.clock import Cycle, Timed, clocked, timed
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.calibration import step_beside
from vlmdistill.pipelines.bench.greedy import GreedyCheck, finish_of
from vlmdistill.pipelines.bench.records import (
    GENERATED,
    Decoding,
    Finish,
    Phases,
    PromptKind,
    PromptResult,
    RankCount,
    ShownResponse,
    Stock,
    Turn,
    chain_counts,
    probability_bins,
)
from vlmdistill.pipelines.bench.sampled import RANKS, prompt_seed, ranks, surprise
from vlmdistill.pipelines.bench.sections import reasoning, sections
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.streaming.pieces import Piece, pieces
from vlmdistill.pipelines.targets.vision_language import (
    Arithmetic,
    VisionLanguageTarget,
)
from vlmdistill.stores.errors import TrainingError
from vlmdistill.stores.schema import content_hash

PLAIN, STOCK = "", "/generate"  # instead of a drafter's name
CHUNK = 64  # tokens of a response in one forward pass, to measure its surprise
SHOWN = 6  # prompts whose responses are kept for the report
REPLAYED = 1024
"""Tokens of a plain response that is kept for a replay, at most: each has its time."""


@dataclass
class _Turn:
    """The decodings of a prompt; of each decoder, the last one."""

    started: float
    seed: int
    ended: float = 0.0
    encoding: float = 0.0  # as in the record
    other: float = 0.0  # seconds of all that decodes nothing
    seconds: list[float] = field(default_factory=list)  # of each decoding, in order
    place: dict[str, int] = field(default_factory=dict)  # by decoder, in `seconds`
    decoded: dict[str, Timed] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    sampled_with: dict[str, int] = field(default_factory=dict)  # seeds
    stock: Stock | None = None
    stock_ids: list[int] | None = None
    bare_step: float | None = None

    def record(self, name: str) -> Turn:
        """The turn as the record of a drafter has it."""
        return Turn(
            started=self.started,
            ended=self.ended,
            seconds=tuple(self.seconds),
            plain=self.place[PLAIN],
            drafted=self.place[name],
            encoding=self.encoding,
            other=self.other,
        )


class SideBySide:
    """All decoders on all prompts at one temperature."""

    def __init__(
        self,
        target: VisionLanguageTarget,
        drafters: Mapping[str, tuple[Proposer, Tree]],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int | None,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self._arithmetic = Arithmetic.of(target.device)
        self._warm = set[PromptKind]()  # images and videos have kernels of their own

    def decode(self, number: int, prompt: Prompt) -> Decoded:
        """Decode a prompt with every decoder, in an order that rotates with `number`.

        The first prompt of each kind is decoded twice, and only its second time counts: the first allocates,
        compiles and loads kernels.
        """
        kind = kind_of(prompt)
        turn = _Turn(started=time.time(), seed=prompt_seed(self.seed, number))
        encoded, spent = clocked(
            lambda: self.target.encode(prompt.messages), self.target.device
        )
        turn.other += spent.seconds
        turn.encoding = spent.cpu_seconds
        room = self.target.info.max_position - encoded.length
        limit = max(1, min(self.max_new_tokens, room))
        rounds = 1 if kind in self._warm else 2
        self._take_turn(turn, number, encoded, limit, rounds)
        self._warm.add(kind)
        checks_began = time.perf_counter()
        check = GreedyCheck(self.target, encoded, limit, turn.stock_ids)
        decodings = {
            name: self._decoding(name, turn, encoded, limit, check)
            for name in [PLAIN, *self.drafters]
        }
        turn.other += time.perf_counter() - checks_began
        turn.ended = time.time()
        results = {
            name: PromptResult(
                key=prompt.key,
                dataset=prompt.dataset,
                kind=kind,
                plain=decodings[PLAIN],
                drafted=decodings[name],
                turn=turn.record(name),
                stock=turn.stock,
                room=max(0, room),
                bare_step=turn.bare_step,
            )
            for name in self.drafters
        }
        return Decoded(
            number=number,
            temperature=self.temperature,
            threads=torch.get_num_threads(),
            trees={name: str(tree) for name, (_, tree) in self.drafters.items()},
            results=results,
            shown=self._show(prompt, turn.decoded) if number < SHOWN else {},
        )

    def _take_turn(
        self, turn: _Turn, number: int, encoded: Any, limit: int, rounds: int
    ) -> None:
        """Decode a prompt with every decoder, `rounds` times each."""
        names = [PLAIN, *self.drafters]
        if self.temperature == 0 and number < GENERATED:
            names.append(STOCK)
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            for _ in range(rounds):
                turn.place[name] = len(turn.seconds)
                if name == STOCK:
                    seconds = self._generate(turn, encoded, limit)
                else:
                    seconds = self._decode(name, turn, encoded, limit)
                turn.seconds.append(seconds)
            if name == PLAIN:
                self._step_alone(turn)

    def _step_alone(self, turn: _Turn) -> None:
        """Measure the target's own step, right after the last token of plain decoding."""
        began = time.perf_counter()
        last_token = turn.decoded[PLAIN].ids[-1]
        turn.bare_step = step_beside(self.target, last_token, self.temperature)
        turn.other += time.perf_counter() - began

    def _decode(self, name: str, turn: _Turn, encoded: Any, limit: int) -> float:
        """Decode with plain decoding or a drafter; the seconds."""
        generator = torch.Generator(self.target.device)
        generator.manual_seed(turn.seed)
        drafter, tree = (None, None) if name == PLAIN else self.drafters[name]

        def decoder() -> Iterator[Cycle]:
            return decode(
                self.target,
                drafter,
                encoded,
                tree=tree,
                max_new_tokens=limit,
                temperature=self.temperature,
                generator=generator,
            )

        passes_before = self.target.passes
        self.target.computed_with = computed_with = set[Arithmetic]()
        decoded = timed(decoder, self.target.device)
        self.target.computed_with = None
        self._check_arithmetic(name or "plain decoding", computed_with)
        turn.decoded[name] = decoded
        turn.passes[name] = self.target.passes - passes_before
        turn.sampled_with[name] = generator.initial_seed()
        return decoded.seconds

    def _check_arithmetic(self, name: str, computed_with: set[Arithmetic]) -> None:
        """TrainingError if a decoder let the target compute otherwise: its time would not compare."""
        for other in computed_with - {self._arithmetic}:
            raise TrainingError(
                f"{name} decoded with other settings of torch ({other}) than the evaluation began with "
                f"({self._arithmetic}): a drafter has to leave them as they are"
            )

    def _generate(self, turn: _Turn, encoded: Any, limit: int) -> float:
        """Let the stock model respond, unless it cannot read the prompt; the seconds."""
        generated, spent = clocked(
            lambda: self.target.reference(encoded, max_new_tokens=limit),
            self.target.device,
        )
        if generated is not None:
            turn.stock_ids = list(generated.ids)
            turn.stock = Stock(
                tokens=len(turn.stock_ids),
                seconds=spent.seconds,
                cpu_seconds=spent.cpu_seconds if self._on_cpu else None,
                delayed_seconds=spent.delayed_seconds if self._on_cpu else None,
            )
        return spent.seconds

    @property
    def _on_cpu(self) -> bool:
        return self.target.device.type == "cpu"

    def _decoding(
        self, name: str, turn: _Turn, encoded: Any, limit: int, check: GreedyCheck
    ) -> Decoding:
        """The counts of a response, and what its check or its sampling tells."""
        decoded = turn.decoded[name]
        finish = finish_of(decoded.ids, self.target.info.eos_ids, limit)
        decoding = _counted(decoded, finish, turn.passes[name], on_cpu=self._on_cpu)
        if name != PLAIN:
            prompt_ids = encoded.ids_L.tolist()
            thought = reasoning(self.target.tokenizer, prompt_ids, decoded.ids)
            in_sections = sections(decoded.cycles, encoded.length, thought)
            decoding = replace(decoding, sections=in_sections)
        if self.temperature == 0:
            return replace(decoding, check=check.check(decoded.ids))
        decoding = replace(decoding, seed=turn.sampled_with[name])
        return self._sampled(decoding, encoded, decoded.ids)

    @torch.inference_mode()
    def _sampled(self, decoding: Decoding, encoded: Any, ids: list[int]) -> Decoding:
        """With what a sampled response tells of the distribution that it is from; see `sampled.py`."""
        target = self.target
        surprise_2 = torch.zeros(2, dtype=torch.float64)
        ranks_R3 = torch.zeros(len(RANKS), 3, dtype=torch.float64)
        last_1D = target.prefill(encoded, ()).feature("hidden", "text")[-1:]
        ids_L = torch.tensor(ids, device=last_1D.device)
        for ids_N in torch.split(ids_L, CHUNK):
            row_N = torch.arange(len(ids_N), device=ids_N.device)
            state_ND = target.extend(ids_N, row_N + 1, None, ("hidden",))["hidden"]
            target.commit(range(len(ids_N)))
            before_ND = torch.cat([last_1D, state_ND[:-1]])
            logits_NV = target.logits(before_ND).double()
            log_NV = (logits_NV / self.temperature).log_softmax(-1)
            # A compiled step writes its next states to the same memory.
            last_1D = state_ND[-1:].clone()
            surprise_2 += surprise(log_NV, ids_N).cpu()
            ranks_R3 += ranks(log_NV, ids_N).cpu()
        nats, variance = surprise_2.tolist()
        return replace(
            decoding,
            surprise=nats,
            surprise_variance=variance,
            ranks=_rank_counts(ranks_R3.tolist()),
        )

    def _show(
        self, prompt: Prompt, decoded: Mapping[str, Timed]
    ) -> dict[str, ShownResponse]:
        """The response of each drafter in pieces, and of plain decoding beside it."""
        plain = self._pieces(decoded[PLAIN].cycles)
        if len(plain) > REPLAYED:
            plain = ()
        shown = {}
        for name in self.drafters:
            cycles = decoded[name].cycles
            gained = sum(len(cycle.ids) for cycle in cycles[1:])
            shown[name] = ShownResponse(
                key=prompt.key,
                prompt="\n".join(_user_texts(prompt)),
                files=tuple(prompt.files),
                pieces=self._pieces(cycles),
                tau=gained / max(1, len(cycles) - 1),
                plain=plain,
            )
        return shown

    def _pieces(self, cycles: list[Cycle]) -> tuple[Piece, ...]:
        """The text of each cycle: what it drafted in one piece, and the target's own token."""
        by_token = pieces(cycles, self.target.tokenizer)
        runs = groupby(by_token, key=lambda piece: (piece.drafted, piece.seconds))
        joined = []
        for (drafted, seconds), run in runs:
            text = "".join(piece.text for piece in run)
            joined.append(Piece(text, drafted, seconds))
        return tuple(joined)


def _rank_counts(rows: Sequence[Sequence[float]]) -> tuple[RankCount, ...]:
    """The rows of `sampled.ranks`."""
    counts = []
    for rank, (tokens, expected, variance) in zip(RANKS, rows, strict=True):
        counts.append(
            RankCount(
                rank=rank, tokens=int(tokens), expected=expected, variance=variance
            )
        )
    return tuple(counts)


def _user_texts(prompt: Prompt) -> list[str]:
    """What the user asks, turn by turn."""
    return [
        part["text"]
        for turn in prompt.messages
        if turn["role"] == "user"
        for part in turn["content"]
        if part["type"] == "text"
    ]


def _counted(decoded: Timed, finish: Finish, passes: int, *, on_cpu: bool) -> Decoding:
    """The numbers of a response."""
    cycles = decoded.cycles[1:]
    chains = [cycle.chain for cycle in cycles]
    tried, accepted = chain_counts(chains)
    return Decoding(
        tokens=len(decoded.ids),
        calls=len(cycles),
        accepted=sum(cycle.accepted for cycle in cycles),
        seconds=decoded.seconds,
        prefill_seconds=decoded.prefill_seconds,
        decode_seconds=decoded.decode_seconds,
        chain_tried=tried,
        chain_accepted=accepted,
        probabilities=probability_bins(chains, [cycle.chances for cycle in cycles]),
        missed=_missed(decoded),
        phases=Phases(**decoded.phases),
        cpu_seconds=decoded.spent.cpu_seconds if on_cpu else None,
        delayed_seconds=decoded.spent.delayed_seconds if on_cpu else None,
        finish=finish,
        passes=passes,
        response=content_hash(decoded.ids),
    )


def _missed(decoded: Timed) -> int:
    """Drafted tokens that match the response but were not accepted; 0 unless acceptance is broken."""
    ids = decoded.ids
    start = 0
    missed = 0
    for cycle in decoded.cycles:
        if cycle.tree is not None:
            matching = _matching(cycle.tree, ids[start:])
            missed += max(0, matching - cycle.accepted)
        start += len(cycle.ids)
    return missed


def _matching(tree: DraftTree, following: list[int]) -> int:
    """The most tokens that a path of the tree has in common with what followed; see `verify`."""
    token_N = tree.ids_N.tolist()
    parent_N = tree.parent_N.tolist()
    depth_N = tree.depth_N.tolist()
    # By the target; the root is its choice by definition.
    chosen_N = [True] * len(token_N)
    for node in range(1, len(token_N)):
        place = depth_N[parent_N[node]] - 1
        chosen_N[node] = place < len(following) and following[place] == token_N[node]
    most = 0
    for depth, visible_N in zip(depth_N, tree.visible_NN.tolist(), strict=True):
        path = zip(chosen_N, visible_N, strict=True)
        if all(chosen for chosen, is_on_path in path if is_on_path):
            most = max(most, depth - 1)
    return most


def kind_of(prompt: Prompt) -> PromptKind:
    """What a prompt shows."""
    types = [part["type"] for message in prompt.messages for part in message["content"]]
    if "video" in types:
        return "video"
    images = types.count("image")
    if images > 1:
        return "images"
    return "image" if images else "text"
