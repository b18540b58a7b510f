"""Decodes each prompt with plain decoding and every drafter in alternation, checks and counts the results."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.decoding.clock import Cycle, Timed, clocked, timed
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.greedy import GreedyCheck, finish_of
from vlmdistill.pipelines.bench.parts import parts, reasoning
from vlmdistill.pipelines.bench.records import (
    GENERATED,
    Decoding,
    Phases,
    PromptKind,
    PromptResult,
    RankCount,
    ShownResponse,
    Stock,
    Turn,
    chain_counts,
    told_chances,
)
from vlmdistill.pipelines.bench.sampled import RANKS, prompt_seed, ranks, surprise
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.streaming.pieces import Piece, pieces
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

PLAIN, STOCK = "", "/generate"  # instead of a drafter's name
CHUNK = 64  # tokens of a response in one forward pass, to measure its surprise
SHOWN = 6  # prompts whose responses are kept for the report
REPLAYED = 1024  # tokens of a plain response that is kept for a replay, at most: each has its time


class SideBySide:
    """All decoders on all prompts at one temperature."""

    def __init__(
        self,
        target: VisionLanguageTarget,
        drafters: Mapping[str, tuple[Proposer, Tree]],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.target, self.drafters = target, drafters
        self.temperature, self.max_new_tokens, self.seed = (
            temperature,
            max_new_tokens,
            seed,
        )
        self._warm = set[PromptKind]()  # images and videos have kernels of their own

    def decode(self, number: int, prompt: Prompt) -> Decoded:
        """Decode a prompt with every decoder, in an order that rotates with `number`.

        The first prompt of each kind is decoded twice, and only its second time counts: the first allocates,
        compiles and loads kernels.
        """
        kind = kind_of(prompt)
        rounds = 1 if kind in self._warm else 2
        encoded = self.target.encode(prompt.messages)
        names, greedy = [PLAIN, *self.drafters], self.temperature == 0
        room = self.target.info.max_position - encoded.length
        limit = max(1, min(self.max_new_tokens, room))
        order = [*names, STOCK] if greedy and number < GENERATED else names
        turn = number % len(order)
        decoded: dict[str, Timed] = {}
        passes: dict[str, int] = {}
        seed_of: dict[str, int] = {}
        stock: tuple[Stock, list[int]] | None = None
        places: dict[str, int] = {}
        seconds: list[float] = []
        started = time.time()
        for name in [*order[turn:], *order[:turn]]:
            for _ in range(rounds):
                places[name] = len(seconds)
                if name == STOCK:
                    stock, spent = self._generate(encoded, limit)
                    seconds.append(spent)
                else:
                    before = self.target.passes
                    decoded[name], seed_of[name] = self._decode(
                        name, encoded, number, limit
                    )
                    passes[name] = self.target.passes - before
                    seconds.append(decoded[name].seconds)
        ended = time.time()
        self._warm.add(kind)
        counted = {}
        check = GreedyCheck(self.target, encoded, limit, stock and stock[1])
        for name in names:
            ids = decoded[name].ids
            one = replace(
                _counted(decoded[name], on_cpu=self._on_cpu),
                passes=passes[name],
                finish=finish_of(ids, self.target.info.eos_ids, limit),
            )
            if name != PLAIN:
                thought = reasoning(
                    self.target.tokenizer, encoded.ids_L.tolist(), decoded[name].ids
                )
                one = replace(
                    one, parts=parts(decoded[name].cycles, encoded.length, thought)
                )
            if greedy:
                counted[name] = replace(one, check=check.check(ids))
            else:
                sampled = self._sampled(one, encoded, ids)
                counted[name] = replace(sampled, seed=seed_of[name])
        results = {
            name: PromptResult(
                key=prompt.key,
                dataset=prompt.dataset,
                kind=kind,
                plain=counted[PLAIN],
                drafted=counted[name],
                stock=stock[0] if stock else None,
                turn=Turn(
                    started=started,
                    ended=ended,
                    seconds=tuple(seconds),
                    plain=places[PLAIN],
                    drafted=places[name],
                ),
            )
            for name in self.drafters
        }
        shown = self._show(prompt, decoded) if number < SHOWN else {}
        return Decoded(
            number=number,
            temperature=self.temperature,
            threads=torch.get_num_threads(),
            results=results,
            shown=shown,
        )

    def _decode(
        self, name: str, encoded: Any, number: int, limit: int
    ) -> tuple[Timed, int]:
        """The response of a decoder, and the seed of its sampling as the generator tells it."""
        seed = prompt_seed(self.seed, number)
        generator = torch.Generator(self.target.device).manual_seed(seed)

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

        return timed(decoder, self.target.device), generator.initial_seed()

    @property
    def _on_cpu(self) -> bool:
        return self.target.device.type == "cpu"

    def _generate(
        self, encoded: Any, limit: int
    ) -> tuple[tuple[Stock, list[int]] | None, float]:
        """The stock model's own response and its tokens, None if it cannot read the prompt; the seconds."""
        made, seconds, cpu_seconds = clocked(
            lambda: self.target.reference(encoded, max_new_tokens=limit),
            self.target.device,
        )
        if made is None:
            return None, seconds
        spent = cpu_seconds if self._on_cpu else None
        stock = Stock(tokens=len(made.ids), seconds=seconds, cpu_seconds=spent)
        return (stock, list(made.ids)), seconds

    @torch.inference_mode()
    def _sampled(self, decoding: Decoding, encoded: Any, ids: list[int]) -> Decoding:
        """With what a sampled response tells of the distribution that it is from; see `sampled.py`."""
        target = self.target
        surprise_2 = torch.zeros(2, dtype=torch.float64)
        ranks_R3 = torch.zeros(len(RANKS), 3, dtype=torch.float64)
        last_1D = target.prefill(encoded, ()).feature("hidden", "text")[-1:]
        for ids_N in torch.split(torch.tensor(ids, device=last_1D.device), CHUNK):
            row_N = torch.arange(len(ids_N), device=ids_N.device)
            state_ND = target.extend(ids_N, row_N + 1, None, ("hidden",))["hidden"]
            target.commit(range(len(ids_N)))
            logits_NV = target.logits(torch.cat([last_1D, state_ND[:-1]])).double()
            log_NV = (logits_NV / self.temperature).log_softmax(-1)
            last_1D = state_ND[
                -1:
            ].clone()  # a compiled step writes its next states to the same memory
            surprise_2 += surprise(log_NV, ids_N).cpu()
            ranks_R3 += ranks(log_NV, ids_N).cpu()
        counts = [
            RankCount(
                rank=rank, tokens=int(tokens), expected=expected, variance=variance
            )
            for rank, (tokens, expected, variance) in zip(
                RANKS, ranks_R3.tolist(), strict=True
            )
        ]
        nats, variance = surprise_2.tolist()
        return replace(
            decoding, surprise=nats, surprise_variance=variance, ranks=tuple(counts)
        )

    def _show(
        self, prompt: Prompt, decoded: Mapping[str, Timed]
    ) -> dict[str, ShownResponse]:
        """The response of each drafter in pieces, and of plain decoding beside it."""
        asked = [
            part
            for turn in prompt.messages
            if turn["role"] == "user"
            for part in turn["content"]
        ]
        prompts = [part["text"] for part in asked if part["type"] == "text"]
        plain = self._pieces(decoded[PLAIN].cycles)
        return {
            name: ShownResponse(
                key=prompt.key,
                prompt="\n".join(prompts),
                files=tuple(prompt.files),
                pieces=self._pieces(cycles := decoded[name].cycles),
                tau=sum(len(cycle.ids) for cycle in cycles[1:])
                / max(1, len(cycles) - 1),
                plain=plain if len(plain) <= REPLAYED else (),
            )
            for name in self.drafters
        }

    def _pieces(self, cycles: list[Cycle]) -> tuple[Piece, ...]:
        """The text of each cycle: what it drafted in one piece, and the target's own token."""
        runs = groupby(
            pieces(cycles, self.target.tokenizer),
            key=lambda one: (one.drafted, one.seconds),
        )
        return tuple(Piece("".join(one.text for one in run), *key) for key, run in runs)


def _counted(decoded: Timed, *, on_cpu: bool) -> Decoding:
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
        told=told_chances(chains, [cycle.chances for cycle in cycles]),
        missed=_missed(decoded),
        phases=Phases(**decoded.phases),
        cpu_seconds=decoded.cpu_seconds if on_cpu else None,
    )


def _missed(decoded: Timed) -> int:
    """Drafted tokens that match the response but were not accepted; 0 unless acceptance is broken."""
    ids, start, missed = decoded.ids, 0, 0
    for cycle in decoded.cycles:
        if cycle.tree is not None:
            missed += max(0, _matching(cycle.tree, ids[start:]) - cycle.accepted)
        start += len(cycle.ids)
    return missed


def _matching(tree: DraftTree, following: list[int]) -> int:
    """The most tokens that a path of the tree has in common with what followed; see `verify`."""
    token_N, parent_N = tree.ids_N.tolist(), tree.parent_N.tolist()
    depth_N, visible_NN = tree.depth_N.tolist(), tree.visible_NN.tolist()
    chosen_N = [True] * len(
        token_N
    )  # by the target, which is the root's choice by definition
    for node in range(1, len(token_N)):
        place = depth_N[parent_N[node]] - 1
        chosen_N[node] = place < len(following) and following[place] == token_N[node]
    matching: list[int] = [
        depth - 1
        for depth, visible_N in zip(depth_N, visible_NN, strict=True)
        if all(
            chosen for chosen, is_on in zip(chosen_N, visible_N, strict=True) if is_on
        )
    ]
    return max(matching)


def kind_of(prompt: Prompt) -> PromptKind:
    """What a prompt shows."""
    types = [part["type"] for message in prompt.messages for part in message["content"]]
    if "video" in types:
        return "video"
    images = types.count("image")
    return "images" if images > 1 else "image" if images else "text"
