"""What the pages of benchmarks say of made-up measurements."""

import re
from typing import Any

import pytest

from research import methods, video
from research.trial import Cost, Measured, Run
from tests.pipelines.bench.made_up import measured
from vlmdistill.drafters.decoding.clock import Cycle, Laps, Timed


class Spent(Laps):
    """Phases of given seconds."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds

    def add_to(self, spent: Any) -> None:
        for phase, seconds in self._seconds.items():
            spent[phase] += seconds


def decoded(prefill: float, draft: float, step: float, tokens: int, calls: int) -> Timed:
    """A response of `tokens` after a prefill, in equal cycles."""
    each, extra = divmod(tokens - 1, calls)
    cycles = [Cycle([1], 0, (0, 0), [], prefill, Spent(vision=prefill / 2, prefill=prefill / 2))]
    for at in range(calls):
        laps = Spent(draft=draft, verify=step)
        cycles.append(Cycle([1] * (each + (at < extra)), 0, (0, 0), [], draft + step, laps))
    seconds = prefill + calls * (draft + step)
    return Timed(cycles, seconds, seconds)


def test_times_of_long_videos_are_those_of_cycles_whatever_the_prefill_takes() -> None:
    base = decoded(30.0, 0.0, 0.04, 101, 100)
    own = [decoded(prefill, 0.02, 0.06, 101, 50) for prefill in (25.0, 35.0, 31.0)]
    found = video.timing([base] * 3, own, [7, 9, 8])
    assert found.draft == pytest.approx((20.0, 20.0, 20.0))
    assert found.cycle == pytest.approx((80.0, 80.0, 80.0))
    assert (found.verify, found.step, found.target_prefill) == pytest.approx((60.0, 40.0, 31e3))
    assert (found.kept, found.identical, found.clips) == (9, 3, 3)
    assert found.cpu_share == 1.0


def test_the_page_of_videos_has_a_row_for_each_case_and_tau_over_the_cost_of_a_cycle() -> None:
    timing = video.timing([decoded(1.0, 0.0, 0.04, 101, 100)], [decoded(1.0, 0.02, 0.06, 101, 50)], [2**20])
    times = {
        length: video.Timings(hardware="Some", threads=1, visual=length + 4, text=90, of={"wren": timing})
        for length in (500, 6000)
    }
    runs = [Run(Cost(60.0), Measured(measured(tokens=1 + tau, calls=1), "", "")) for tau in (3, 5)]
    results = {"wren": video.Result(dict.fromkeys(times, runs), {500: 10**6, 6000: 2 * 10**6})}
    text = video.page(results, times, 300)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    of = {row[0]: rows[at + 2] for at, row in enumerate(rows) if row[1:] == ["504", "6,004"]}
    assert of["tau"] == ["`wren`", "4.00 (3.00-5.00)", "4.00 (3.00-5.00)"]
    assert of["drafting, ms of a cycle"][1] == "20.00 (20.00-20.00)"
    assert of["speedup after the prefill"][1:] == ["2.00", "2.00"]
    assert of["kept while decoding, MiB"][1:] == ["1.00", "1.00"]
    assert of["stored of a sample, MB"][1:] == ["1.00", "2.00"]
    assert "`wren` 2." in text
    assert "`wren` 60." in text


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
