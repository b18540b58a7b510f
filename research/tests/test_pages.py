"""What the pages of benchmarks say of made-up measurements."""

import re
from typing import Any

import torch

from research import methods, pretrained, video
from research.trial import Cost, Measured, Run
from tests.pipelines.bench.made_up import measured
from vlmdistill.drafters.decoding.clock import Cycle, Laps, Timed


def decoded(
    prefill: float, draft: float, step: float, tokens: int, cycles: int
) -> video.Decoded:
    """A response of so many tokens after a prefill, in equal cycles, on half of a CPU."""
    ids = [Cycle([1] * tokens, 0, (0, 0), [], 0.0, Laps(torch.device("cpu")))]
    cpu = prefill + cycles * (draft + step)
    return video.Decoded(
        Timed(ids, 2 * cpu, cpu),
        [prefill, *[step] * cycles],
        [1.0, *[draft] * cycles],
        kept=round(prefill),
    )


def test_times_of_long_videos_are_those_of_cycles_whatever_the_prefill_takes() -> None:
    base = decoded(30e3, 0.0, 40.0, 101, 100)
    found = video.timing(
        [base] * 3, [decoded(ms, 20.0, 60.0, 101, 50) for ms in (25e3, 35e3, 31e3)]
    )
    assert (found.draft, found.cycle) == ((20.0, 20.0, 20.0), (80.0, 80.0, 80.0))
    assert (found.verify, found.step, found.target_prefill, found.drafter_prefill) == (
        60.0,
        40.0,
        31e3,
        1.0,
    )
    assert (found.kept, found.identical, found.clips, found.cpu_share) == (
        35000,
        3,
        3,
        0.5,
    )


class Sleepy:
    """Calls of a drafter and a target, in that order."""

    def work(self, loops: int) -> int:
        return sum(range(loops))

    def other(self) -> str:
        return "not clocked"


def test_a_clocked_object_has_a_number_for_the_prefill_and_one_for_each_cycle() -> None:
    spent = [0.0]
    one = video.Clocked(Sleepy(), spent, "work")
    assert one.other() == "not clocked"
    assert (one.work(3), one.work(200_000)) == (3, sum(range(200_000)))
    assert spent[0] == 0.0
    assert len(spent) == 3
    assert spent[2] > spent[1] >= 0
    more = video.Clocked(Sleepy(), spent, "other", "work")
    before = spent[2]
    more.work(200_000)
    assert len(spent) == 3
    assert spent[2] > before


def test_the_page_of_videos_has_a_row_for_each_case_and_tau_over_the_cost_of_a_cycle() -> (
    None
):
    timing = video.timing(
        [decoded(9.0, 0.0, 40.0, 101, 100)], [decoded(2**20, 20.0, 60.0, 101, 50)]
    )
    times = {
        length: video.Timings(
            hardware="Some", threads=1, visual=length + 4, text=90, of={"wren": timing}
        )
        for length in (500, 6000)
    }
    runs = [
        Run(Cost(60.0), Measured(measured(tokens=1 + tau, calls=1), "", ""))
        for tau in (3, 5)
    ]
    results = {
        "wren": video.Result(dict.fromkeys(times, runs), {500: 10**6, 6000: 2 * 10**6})
    }
    text = video.page(results, times, 300)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    of = {
        row[0]: rows[at + 2]
        for at, row in enumerate(rows)
        if row[1:] == ["504", "6,004"]
    }
    assert of["tau"] == ["`wren`", "4.00 (3.00-5.00)", "4.00 (3.00-5.00)"]
    assert of["drafting, CPU ms of a cycle"][1] == "20.00 (20.00-20.00)"
    assert of["speedup after the prefill"][1:] == ["2.00", "2.00"]
    assert of["kept while decoding, MiB"][1:] == ["1.00", "1.00"]
    assert of["stored of a sample, MB"][1:] == ["1.00", "2.00"]
    assert "`wren` 2." in text
    assert "`wren` 60." in text


def test_results_have_images_and_text_apart() -> None:
    def method(name: str, tau: float, image: float, text: float) -> dict[str, Any]:
        rates = {
            f"{rate}@{at}": [tau]
            for rate in ("tau", "accepted", "speedup")
            for at in (0, 1)
        }
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
                f"intervals@{at}": [
                    {
                        rate: [tau - 0.1, tau + 0.1]
                        for rate in ("tau", "accepted", "speedup")
                    }
                ]
                for at in (0, 1)
            },
        }

    where = {
        "prompts": {"count": 3},
        "dtype": "float32",
        "threads": 1,
        "hardware": "CPU Some Processor",
    }
    made = [method("low", 2.0, 2.5, 1.25), method("high", 3.0, 3.0, 3.0)]
    text = methods.page({"conditions": where, "seeds": 1, "methods": made})
    rows = [
        line for line in text.splitlines() if re.match(r"\| `\w+` \|(.*\|){8}$", line)
    ]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == ["`high`", "`low`"]
    assert cells[1][1:5] == ["2.50", "1.25", "2.00 (1.90-2.10)", "2.00 (1.90-2.10)"]
    assert "| `low`, its paper's schedule | 2.50 | 1.25 |" in text
    assert "6 of 6" in text
    assert "CPU Some Processor" in text
    assert "1.02" in text


def test_the_page_of_the_pretrained_target_shows_both_dtypes_and_names_the_load() -> (
    None
):
    def row(dtype: str, tau: float) -> dict[str, Any]:
        return {
            "drafter": "wren",
            "dtype": dtype,
            "temperature": 0.0,
            "steps": 150,
            "cpu_seconds": [320.0],
            "tau": {"text": tau},
            "all": tau,
            "alpha": [0.5, 0.25, 0.125],
            "cycle": 1.25,
            "ms": {"draft": 20.0, "verify": 60.0, "accept": 1.0, "other": 0.0},
            "plain_ms": 64.0,
            "speedup": 1.5,
            "cpu_speedup": None,
            "cpu_share": 0.5,
            "lossless": {"identical": 8, "near_tie": 1, "differs": 0},
        }

    facts = {
        "hardware": "CPU",
        "threads": 1,
        "tree": "chain-3",
        "prompts": 9,
        "responses": 190,
        "response_tokens": 20_000,
        "rows": [row("float32", 1.75), row("bfloat16", 1.5)],
    }
    page = pretrained.page(facts)
    line = "| `wren` | float32 | 0 | 1.75 | - | .50 .25 .12 | 1.25 | 20 + 60 | 64 | 1.50 | - |"
    assert line in page.splitlines()
    assert "`wren` 150 steps, 320 CPU-s" in page
    assert "16 of 18 (2 of the others" in page
    assert "had 50% of a CPU" in page
