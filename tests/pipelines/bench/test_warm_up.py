"""The first prompt of each kind warms every decoder up, before its time counts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.drafters.synthetic import untrained
from tests.pipelines.bench.test_compiled_samples import ASKED
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.bench.side_by_side import PLAIN, SHOWN, SideBySide
from vlmdistill.pipelines.targets.loading import load

PICTURES = tiny.picture(28, 28), tiny.picture(56, 28, seed=1)
KINDS: dict[str, tuple[Any, ...]] = {
    "text": (),
    "image": PICTURES[:1],
    "images": PICTURES,
    "video": (tiny.clip(4, 56, 56),),
}


def test_each_kind_of_prompt_is_warmed_up_once(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    decoders = {"medusa": (untrained("medusa", target), Tree.parse("chain-2"))}
    bench = SideBySide(target, decoders, temperature=0.0, max_new_tokens=2, seed=0)
    begun = list[str]()

    def noted(target: Any, drafter: Any, *given: Any, **named: Any) -> Iterator[Cycle]:
        begun.append("medusa" if drafter else PLAIN)
        return decode(target, drafter, *given, **named)

    monkeypatch.setattr(f"{SideBySide.__module__}.decode", noted)
    for number, kind in enumerate([*KINDS, *reversed(KINDS)], start=SHOWN):
        begun.clear()
        messages = tiny.message("What is it?", *KINDS[kind])
        result = bench.decode(number, replace(ASKED, messages=messages)).results[
            "medusa"
        ]
        assert result.kind == kind
        times = 2 if number < SHOWN + len(KINDS) else 1
        assert sorted(begun) == sorted([PLAIN, "medusa"] * times)
