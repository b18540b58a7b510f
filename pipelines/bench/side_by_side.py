"""Decodes each prompt with plain decoding and every drafter in alternation, checks and counts the results."""

from collections.abc import Iterator, Mapping
from itertools import groupby, takewhile
from typing import Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle, Timed, timed
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.records import (
    Check,
    Decoding,
    Phases,
    PromptKind,
    PromptResult,
    ShownResponse,
    chain_counts,
)
from vlmdistill.pipelines.bench.unfinished import Decoded
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.data.responses.pieces import Piece, pieces
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

PLAIN = ""  # instead of a drafter's name
SHOWN = 6  # prompts whose responses are kept for the report
REPLAYED = 1024  # tokens of a plain response that is kept for a replay, at most: each has its time
NEAR_TIE = 16  # in units of the dtype's rounding error at the largest logit


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
        names = [PLAIN, *self.drafters]
        turn = number % len(names)
        decoded: dict[str, Timed] = {}
        for name in [*names[turn:], *names[:turn]]:
            if not self._warm:
                self._decode(name, encoded, number)
            decoded[name] = self._decode(name, encoded, number)
        checks: dict[str, Check] = {}
        greedy = self.temperature == 0
        reference = self.target.reference(encoded, max_new_tokens=self.max_new_tokens) if greedy else None
        if reference is not None:
            checks = {name: self._check(encoded, list(reference.ids), decoded[name].ids) for name in names}
        self._warm = True
        on_cpu = self.target.device.type == "cpu"
        base = _counted(decoded[PLAIN], checks.get(PLAIN), on_cpu=on_cpu)
        results = {
            name: PromptResult(
                key=prompt.key,
                dataset=prompt.dataset,
                kind=_kind(prompt),
                plain=base,
                drafted=_counted(decoded[name], checks.get(name), on_cpu=on_cpu),
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
                self.target.commit(one - 1)
            logits_V = self.target.logits(hidden_1D)[0]
        rounding = torch.finfo(hidden_1D.dtype).eps * float(logits_V.abs().max())
        gap = abs(float(logits_V[reference[first]] - logits_V[got[first]]))
        return "near_tie" if gap <= NEAR_TIE * rounding else "different"

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


def _counted(decoded: Timed, check: Check | None, *, on_cpu: bool) -> Decoding:
    """The numbers of a response."""
    cycles = decoded.cycles[1:]
    tried, accepted = chain_counts([cycle.chain for cycle in cycles])
    return Decoding(
        tokens=len(decoded.ids),
        calls=len(cycles),
        accepted=sum(cycle.accepted for cycle in cycles),
        seconds=decoded.seconds,
        prefill_seconds=decoded.prefill_seconds,
        decode_seconds=decoded.decode_seconds,
        chain_tried=tried,
        chain_accepted=accepted,
        missed=_missed(decoded),
        check=check,
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


def _kind(prompt: Prompt) -> PromptKind:
    types = [part["type"] for message in prompt.messages for part in message["content"]]
    if "video" in types:
        return "video"
    images = types.count("image")
    return "images" if images > 1 else "image" if images else "text"
