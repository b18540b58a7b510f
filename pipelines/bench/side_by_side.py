"""Decodes each prompt with plain decoding and every drafter in alternation, checks and counts the results."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle, Timed, clocked, timed
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.parts import parts, reasoning
from vlmdistill.pipelines.bench.records import (
    Check,
    Decoding,
    Phases,
    PromptKind,
    PromptResult,
    ShownResponse,
    Stock,
    chain_counts,
    told_chances,
)
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses.pieces import Piece, pieces
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

PLAIN, STOCK = "", "/generate"  # instead of a drafter's name
CHUNK = 64  # tokens of a response in one forward pass, to measure its surprise
SHOWN = 6  # prompts whose responses are kept for the report
REPLAYED = 1024  # tokens of a plain response that is kept for a replay, at most: each has its time
NEAR_TIE = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 8}
"""In units of the dtype's rounding error at the largest logit.

Passes over one token and over several differed by at most 30 in float32 and 4.6 in half precision, in 24
layers of random weights.
"""


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
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self._warm = False

    def decode(self, number: int, prompt: Prompt) -> Decoded:
        """Decode a prompt with every decoder, in an order that rotates with `number`."""
        encoded = self.target.encode(prompt.messages)
        names, greedy = [PLAIN, *self.drafters], self.temperature == 0
        order = [*names, STOCK] if greedy else names
        turn = number % len(order)
        decoded: dict[str, Timed] = {}
        passes: dict[str, int] = {}
        stock: tuple[Stock, list[int]] | None = None
        for name in [*order[turn:], *order[:turn]]:
            for _ in range(1 if self._warm else 2):
                if name == STOCK:
                    stock = self._generate(encoded)
                else:
                    before = self.target.passes
                    decoded[name] = self._decode(name, encoded, number)
                    passes[name] = self.target.passes - before
        self._warm = True
        counted = {}
        for name in names:
            one = replace(
                _counted(decoded[name], on_cpu=self.target.device.type == "cpu"), passes=passes[name]
            )
            if name != PLAIN:
                thought = reasoning(self.target.tokenizer, encoded.ids_L.tolist(), decoded[name].ids)
                one = replace(one, parts=parts(decoded[name].cycles, encoded.length, thought))
            if not greedy:
                nats, variance = self._surprise(encoded, decoded[name].ids)
                one = replace(one, surprise=nats, surprise_variance=variance)
            elif stock:
                one = replace(one, check=self._check(encoded, stock[1], decoded[name].ids))
            counted[name] = one
        results = {
            name: PromptResult(
                key=prompt.key,
                dataset=prompt.dataset,
                kind=kind_of(prompt),
                plain=counted[PLAIN],
                drafted=counted[name],
                stock=stock[0] if stock else None,
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

    def _decode(self, name: str, encoded: Any, number: int) -> Timed:
        seed = self.seed * 1_000_003 + number
        generator = torch.Generator(self.target.device).manual_seed(seed)

        drafter, tree = (None, None) if name == PLAIN else self.drafters[name]

        def decoder() -> Iterator[Cycle]:
            return decode(
                self.target,
                drafter,
                encoded,
                tree=tree,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                generator=generator,
            )

        return timed(decoder, self.target.device)

    def _generate(self, encoded: Any) -> tuple[Stock, list[int]] | None:
        """The stock model's own response and its tokens; None if it cannot read the prompt."""
        made, seconds, _ = clocked(
            lambda: self.target.reference(encoded, max_new_tokens=self.max_new_tokens), self.target.device
        )
        return (Stock(tokens=len(made.ids), seconds=seconds), list(made.ids)) if made else None

    @torch.inference_mode()
    def _surprise(self, encoded: Any, ids: list[int]) -> tuple[float, float]:
        """The surprise of a sampled response less its mean, and its variance; see `audit.py`."""
        target, total = self.target, torch.zeros(2, dtype=torch.float64)
        last_1D = target.prefill(encoded, ()).feature("hidden", "text")[-1:]
        for ids_N in torch.split(torch.tensor(ids, device=last_1D.device), CHUNK):
            row_N = torch.arange(len(ids_N), device=ids_N.device)
            state_ND = target.extend(ids_N, row_N + 1, None, ("hidden",))["hidden"]
            target.commit(range(len(ids_N)))
            logits_NV = target.logits(torch.cat([last_1D, state_ND[:-1]])).double() / self.temperature
            # A copy: a compiled step writes its next states to the same memory.
            last_1D, log_NV = state_ND[-1:].clone(), logits_NV.log_softmax(-1)
            share_NV = log_NV.exp()
            entropy_N = -torch.special.xlogy(share_NV, share_NV).sum(-1)
            variance_N = (share_NV * log_NV.clamp(min=-1e3).square()).sum(-1) - entropy_N.square()
            surprise_N = -log_NV[row_N, ids_N] - entropy_N
            total += torch.stack([surprise_N.sum(), variance_N.clamp(min=0).sum()]).cpu()
        return float(total[0]), float(total[1])

    def _check(self, encoded: Any, reference: list[int], got: list[int]) -> Check:
        """Compare with the reference; `near_tie`: where they first differ, the two logits round alike."""
        if got == reference:
            return "identical"
        pairs = zip(reference, got, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(got)))
        if first >= min(len(reference), len(got)):
            return "different"
        with torch.inference_mode():
            prefix = self.target.prefill(encoded, ())
            hidden_1D = prefix.feature("hidden", "text")[-1:]
            device = hidden_1D.device
            one = torch.ones(1, dtype=torch.long, device=device)
            for token in reference[:first]:
                hidden_1D = self.target.extend(one * token, one, None, ("hidden",))["hidden"]
                self.target.commit([0])
            logits_V = self.target.logits(hidden_1D)[0]
        rounding = torch.finfo(hidden_1D.dtype).eps * float(logits_V.abs().max())
        gap = abs(float(logits_V[reference[first]] - logits_V[got[first]]))
        return "near_tie" if gap <= NEAR_TIE[hidden_1D.dtype] * rounding else "different"

    def _show(self, prompt: Prompt, decoded: Mapping[str, Timed]) -> dict[str, ShownResponse]:
        """The response of each drafter in pieces, and of plain decoding beside it."""
        asked = [part for turn in prompt.messages if turn["role"] == "user" for part in turn["content"]]
        prompts = [part["text"] for part in asked if part["type"] == "text"]
        plain = self._pieces(decoded[PLAIN].cycles)
        return {
            name: ShownResponse(
                key=prompt.key,
                prompt="\n".join(prompts),
                files=tuple(prompt.files),
                pieces=self._pieces(cycles := decoded[name].cycles),
                tau=sum(len(cycle.ids) for cycle in cycles[1:]) / max(1, len(cycles) - 1),
                plain=plain if len(plain) <= REPLAYED else (),
            )
            for name in self.drafters
        }

    def _pieces(self, cycles: list[Cycle]) -> tuple[Piece, ...]:
        """The text of each cycle: what it drafted in one piece, and the target's own token."""
        runs = groupby(pieces(cycles, self.target.tokenizer), key=lambda one: (one.drafted, one.seconds))
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
    """Drafted chain tokens that match the response but were not accepted; 0 unless acceptance is broken."""
    ids, start, missed = decoded.ids, 0, 0
    for cycle in decoded.cycles:
        pairs = zip(cycle.guesses, ids[start:], strict=False)
        agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        missed += max(0, agreeing - cycle.accepted)
        start += len(cycle.ids)
    return missed


def kind_of(prompt: Prompt) -> PromptKind:
    """What a prompt shows."""
    types = [part["type"] for message in prompt.messages for part in message["content"]]
    if "video" in types:
        return "video"
    images = types.count("image")
    return "images" if images > 1 else "image" if images else "text"
