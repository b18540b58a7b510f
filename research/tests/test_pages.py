"""What the pages of benchmarks say of made-up measurements."""

import re
from typing import Any

import pytest

from research import methods, video
from vlmdistill.drafters.decoding.clock import Cycle, Laps, Timed


class Spent(Laps):
    """Phases of given seconds."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds

    def add_to(self, spent: Any) -> None:
        for phase, seconds in self._seconds.items():
            spent[phase] += seconds


def decoded(prefill: float, steps: float, tokens: int, calls: int) -> video.Decoded:
    """A response of `tokens` after a prefill, in equal cycles of `steps` seconds in all."""
    each, extra = divmod(tokens - 1, calls)
    cycles = [Cycle([1], 0, (0, 0), [], prefill, Spent(vision=prefill / 2, prefill=prefill / 2))]
    cycles += [
        Cycle([1] * (each + (at < extra)), 0, (0, 0), [], steps / calls, Spent(verify=steps / calls))
        for at in range(calls)
    ]
    return video.Decoded(Timed(cycles, prefill + steps, prefill + steps), 0, 0)


def test_the_noise_of_a_long_prefill_is_in_no_speedup() -> None:
    base, lucky, unlucky = (
        decoded(30.0, 4.0, 101, 100),
        decoded(25.0, 2.0, 101, 50),
        decoded(35.0, 2.0, 101, 50),
    )
    found = [video._facts(base, own, prefill=30.0) for own in (lucky, unlucky)]
    for one in found:
        assert one["speedup"] == pytest.approx(34 / 32)
        assert one["decode speedup"] == pytest.approx(2.0)
        assert one["tau"] == 2.0


def test_results_have_images_and_text_apart() -> None:
    def method(name: str, tau: float, image: float, text: float) -> dict[str, Any]:
        rates = {f"{rate}@{at}": [tau] for rate in ("tau", "accepted", "speedup") for at in (0, 1)}
        return {
            **rates,
            "name": name,
            "parameters": 10,
            "untrained_tau": 1.02,
            **{f"tau@0 image{how}": [image] for how in ("", "-equal", "-paper")},
            **{f"tau@0 text{how}": [text] for how in ("", "-equal", "-paper")},
            "alpha@0": [0.5, 0.25],
            "lossless@0": [{"identical": 3, "near_tie": 0, "different": 0}],
            **{f"accounted@{at}": [0.999] for at in (0, 1)},
            **{
                f"intervals@{at}": [{rate: [tau - 0.1, tau + 0.1] for rate in ("tau", "accepted", "speedup")}]
                for at in (0, 1)
            },
        }

    where = {"prompts": {"count": 3}, "dtype": "float32", "threads": 1, "hardware": "CPU Some Processor"}
    made = [method("low", 2.0, 2.5, 1.25), method("high", 3.0, 3.0, 3.0)]
    text = methods.page({"conditions": where, "seeds": 1, "methods": made})
    rows = [line for line in text.splitlines() if re.match(r"\| `\w+` \|(.*\|){8}$", line)]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == ["`high`", "`low`"]
    assert cells[1][1:5] == ["2.50", "1.25", "2.00 (1.90-2.10)", "2.00 (1.90-2.10)"]
    assert "| `low`, its paper's schedule | 2.50 | 1.25 |" in text
    assert "6 of 6" in text
    assert "CPU Some Processor" in text
    assert "1.02" in text
