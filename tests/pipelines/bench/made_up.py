"""Made-up evaluations with given numbers, and the evaluation that was made last."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vlmdistill.drafters.decoding.hardware import Hardware, Limits, Processor
from vlmdistill.pipelines.bench.again import repeated_prompts
from vlmdistill.pipelines.bench.records import (
    FORMAT,
    Again,
    Agreement,
    Check,
    Decoding,
    Evaluation,
    Leak,
    Measurement,
    Phases,
    PromptResult,
    RankCount,
    ShownResponse,
    StageTaken,
    Stock,
    TargetId,
    TrainedSettings,
    TrainedStage,
    Training,
    Turn,
)
from vlmdistill.pipelines.bench.sampled import prompt_seed
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.targets.software import Software

Response = TypeVar("Response", Decoding, Stock)
MACHINE = Hardware(processor=Processor(name="Some Processor"), limits=Limits(threads=1))
SOFTWARE = Software(python="3", vlmdistill="0", torch="2.13", transformers="5")
RESPONSE = (
    Piece("The", False),
    Piece(" board\nis", True),
    Piece(" blue", False),
    Piece(" & large", True),
    Piece(".", False),
)
TIMED = tuple(
    dataclasses.replace(piece, seconds=0.1 + at // 2 / 5)
    for at, piece in enumerate(RESPONSE)
)
PLAIN = tuple(
    Piece(piece.text, False, 0.1 + at / 5) for at, piece in enumerate(RESPONSE)
)


def shown(key: str = "k0", **changes: Any) -> ShownResponse:
    fields = ShownResponse(
        key=key, prompt=f"What is {key}?", files=(), pieces=RESPONSE, tau=3.1, plain=()
    )
    return dataclasses.replace(fields, **changes)


def phases(decode_seconds: float = 0.9) -> Phases:
    """Half of the decoding verifies, and a tenth is between the phases."""
    draft, verify, accept = (
        max(0.0, share * decode_seconds) for share in (0.3, 0.5, 0.1)
    )
    return Phases(
        vision=0.02,
        prefill=0.07,
        draft_prefill=0.01,
        draft=draft,
        verify=verify,
        accept=accept,
    )


def plain(**changes: Any) -> Decoding:
    fields = Decoding(
        tokens=105,
        calls=104,
        accepted=0,
        seconds=1.5,
        prefill_seconds=0.1,
        decode_seconds=1.4,
        finish="stop",
        phases=phases(1.4),
        passes=changes.get("calls", 104),
        missed=0,
    )
    return dataclasses.replace(fields, **changes)


def drafted(**changes: Any) -> Decoding:
    """A response in one second instead of one and a half, with a tau of 3.25."""
    fields = Decoding(
        tokens=105,
        calls=32,
        accepted=72,
        seconds=1.0,
        prefill_seconds=0.1,
        decode_seconds=0.9,
        chain_tried=(20, 18, 12),
        chain_accepted=(18, 12, 9),
        finish="stop",
        phases=phases(),
        passes=changes.get("calls", 32),
        missed=0,
    )
    return dataclasses.replace(fields, **changes)


def measured(
    temperature: float = 0.0,
    *,
    count: int = 24,
    speedup: float = 1.5,
    noise: float = 0.0,
    seed: int = 0,
    own: Sequence[Check] | None = None,
    base: Sequence[Check] | None = None,
    shown: tuple[ShownResponse, ...] = (shown("k0"), shown("k1")),
    **changes: Any,
) -> Measurement:
    """`count` prompts, whose seconds vary by a share of `noise`; their checks against the stock model."""
    factor_P = 1 + noise * np.random.default_rng(seed).standard_normal(count)
    greedy: Sequence[Check | None] = ["identical" if temperature == 0 else None] * count
    prompts = []
    for number in range(len(own) if own else count):
        seconds = 1.5 / speedup * float(factor_P[number])
        sampling = sampled(number) if temperature else {}
        fields = {
            "check": (own or greedy)[number],
            "seconds": seconds,
            "decode_seconds": seconds - 0.1,
            "phases": phases(seconds - 0.1),
            **sampling,
            **changes,
        }
        result = PromptResult(
            key=f"k{number}",
            dataset="made up",
            kind="image",
            plain=plain(check=(base or own or greedy)[number], **sampling),
            drafted=drafted(**fields),
            turn=Turn(started=0, ended=0, seconds=(0, 0), plain=0, drafted=1),
        )
        prompts.append(in_turn(result, number))
    return Measurement(temperature=temperature, prompts=tuple(prompts), shown=shown)


def sampled(number: int) -> dict[str, Any]:
    """What a record has of a sampled response to a prompt."""
    first = RankCount(rank="first", tokens=100, expected=100.0, variance=5.0)
    return {
        "seed": prompt_seed(0, number),
        "surprise": 0.0,
        "surprise_variance": 1.0,
        "ranks": (first,),
    }


def responding(response: str, **changes: Any) -> Measurement:
    """Of plain decoding that has this response, by its hash, to every prompt."""
    at = measured(**changes)
    prompts = []
    for prompt in at.prompts:
        plainly = dataclasses.replace(prompt.plain, response=response)
        prompts.append(dataclasses.replace(prompt, plain=plainly))
    return dataclasses.replace(at, prompts=tuple(prompts))


def in_turn(result: PromptResult, number: int) -> PromptResult:
    """The prompt as decoded by both sides one after the other, in an order that rotates."""
    first, second = result.plain.seconds, result.drafted.seconds
    drafted_first = number % 2
    if drafted_first:
        first, second = second, first
    started = 1_700_000_000.0 + 4 * number
    turn = Turn(
        started=started,
        ended=started + first + second,
        seconds=(first, second),
        plain=drafted_first,
        drafted=1 - drafted_first,
    )
    return dataclasses.replace(result, turn=turn)


def in_sequence(at: Measurement) -> Measurement:
    """The prompts as decoded one after the other."""
    prompts = [in_turn(prompt, number) for number, prompt in enumerate(at.prompts)]
    return dataclasses.replace(at, prompts=tuple(prompts))


def with_cpu_share(
    at: Measurement, share: float, own_share: float | None = None
) -> Measurement:
    """Beside other programs: with such a share of the CPU, of which the drafter may have its own.

    They have more of its time on every third prompt alone, as by chance.
    """
    seconds = [prompt.drafted.seconds for prompt in at.prompts]
    lost = 0.0 if own_share is None else (share - own_share) * sum(seconds)
    lost_share = lost / sum(seconds[::3])
    prompts = [
        dataclasses.replace(
            prompt,
            plain=on_shared_cpu(prompt.plain, share),
            stock=prompt.stock and on_shared_cpu(prompt.stock, share),
            drafted=on_shared_cpu(
                prompt.drafted, share - (0 if number % 3 else lost_share)
            ),
        )
        for number, prompt in enumerate(at.prompts)
    ]
    return dataclasses.replace(at, prompts=tuple(prompts))


def on_shared_cpu(decoded: Response, share: float) -> Response:
    """A response in whose seconds other programs had the CPU, but for such a share."""
    return dataclasses.replace(
        decoded,
        cpu_seconds=share * decoded.seconds,
        delayed_seconds=(1 - share) * decoded.seconds,
    )


def that_waits(at: Measurement, share: float, own_share: float) -> Measurement:
    """Beside other programs, a drafter that sleeps on each prompt: it has the CPU for its own share alone."""
    prompts = [
        dataclasses.replace(
            prompt,
            drafted=dataclasses.replace(
                prompt.drafted, cpu_seconds=own_share * prompt.drafted.seconds
            ),
        )
        for prompt in with_cpu_share(at, share).prompts
    ]
    return dataclasses.replace(at, prompts=tuple(prompts))


def without_delays(at: Measurement) -> Measurement:
    """A record of a system that does not tell when other programs had the CPU."""
    prompts = [
        dataclasses.replace(
            prompt,
            plain=dataclasses.replace(prompt.plain, delayed_seconds=None),
            drafted=dataclasses.replace(prompt.drafted, delayed_seconds=None),
        )
        for prompt in at.prompts
    ]
    return dataclasses.replace(at, prompts=tuple(prompts))


def evaluation(
    name: str = "sparrow", /, *temperatures: Measurement, **changes: Any
) -> Evaluation:
    history = [
        Agreement(
            stage="text", step=100 * (1 + n), held_out_agreement=(0.5 + n / 10, 0.4)
        )
        for n in range(3)
    ]
    stages = (TrainedStage(name="text", epochs=2.5, hops=1),)
    temperatures = temperatures or (measured(0.0), measured(1.0))
    fields: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "drafter": name,
        "tree": "chain-4",
        "parameters": 361984,
        "training": Training(
            steps=300,
            samples=4200,
            seed=0,
            stages=(StageTaken(name="text", steps=300, passes=3.6),),
            history=tuple(history),
        ),
        "config": TrainedSettings(tree="chain-4", stages=stages),
        "target": TargetId(name="a-target", family="qwen2_5_vl", fingerprint="f00d"),
        "hardware": "CPU Some Processor",
        "dtype": "float32",
        "threads": 1,
        "max_new_tokens": 256,
        "seed": None,
        "measured": "2026-01-02 03:04:05",
        "temperatures": temperatures,
        "leak": Leak(samples=4200),
        "weights": None,
        "machine": MACHINE,
        "software": SOFTWARE,
        "attention": "sdpa",
        "compiled": False,
        "thinking": "",
        "asked": tuple(prompt.key for prompt in temperatures[0].prompts),
        "calibrations": (),
    }
    made = Evaluation(**{**fields, **changes})
    if made.again or made.not_again:
        return made
    return dataclasses.replace(made, again=decoded_again(made))


def decoded_again(made: Evaluation) -> tuple[Again, ...]:
    """The prompts that an evaluation decodes again, with as many calls."""
    prompt_of = {
        (at.temperature, prompt.key): prompt
        for at in made.temperatures
        for prompt in at.prompts
    }
    return tuple(
        Again(
            key=chosen.key,
            calls=prompt_of[chosen.temperature, chosen.key].drafted.calls,
            temperature=chosen.temperature,
        )
        for chosen in repeated_prompts(made)
    )


def newest(reports: Path, name: str) -> Evaluation:
    """The latest evaluation of a name."""
    return next(
        one.evaluation
        for one in selection.read(reports).drafter_results
        if one.evaluation.name == name
    )
