"""Made-up evaluations with given numbers, and the evaluation that was made last."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlmdistill.pipelines.bench.records import (
    FORMAT,
    Agreement,
    Check,
    Decoding,
    Evaluation,
    Leak,
    Measurement,
    Phases,
    PromptResult,
    ShownResponse,
    StageTaken,
    TargetId,
    TrainedSettings,
    TrainedStage,
    Training,
)
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.streaming.pieces import Piece

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
        key=key, prompt=f"What is {key}?", files=(), pieces=RESPONSE, tau=3.1
    )
    return dataclasses.replace(fields, **changes)


def plain(**changes: Any) -> Decoding:
    fields = Decoding(
        tokens=105,
        calls=104,
        accepted=0,
        seconds=1.5,
        prefill_seconds=0.1,
        decode_seconds=1.4,
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
    prompts = [
        PromptResult(
            key=f"k{number}",
            dataset="made up",
            kind="image",
            plain=plain(check=(base or own or greedy)[number]),
            drafted=drafted(
                **{
                    "check": (own or greedy)[number],
                    "seconds": 1.5 / speedup * float(factor_P[number]),
                    "decode_seconds": 1.5 / speedup * float(factor_P[number]) - 0.1,
                    "phases": phases(1.5 / speedup * float(factor_P[number]) - 0.1),
                    **changes,
                }
            ),
        )
        for number in range(len(own) if own else count)
    ]
    return Measurement(temperature=temperature, prompts=tuple(prompts), shown=shown)


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
        "target": TargetId(name="demo", family="qwen2_5_vl", fingerprint="f00d"),
        "hardware": "CPU Some Processor",
        "dtype": "float32",
        "threads": 1,
        "max_new_tokens": 256,
        "seed": 0,
        "measured": "2026-01-02 03:04:05",
        "temperatures": temperatures or (measured(0.0), measured(1.0)),
        "leak": Leak(samples=4200),
    }
    return Evaluation(**{**fields, **changes})


def newest(reports: Path, name: str) -> Evaluation:
    """The latest evaluation of a name."""
    return next(
        one.evaluation
        for one in selection.read(reports).own
        if one.evaluation.name == name
    )
