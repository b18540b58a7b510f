"""What the pages of benchmarks say of made-up measurements."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from research import methods, pretrained, video
from research.trial import Cost, Measured, Run
from tests.pipelines.bench.made_up import measured
from vlmdistill.drafters.decoding.clock import Cycle, Laps, Spent, Timed


def decoded(
    prefill: float, draft: float, step: float, tokens: int, cycles: int
) -> video.Decoded:
    """A response of so many tokens after a prefill, in equal cycles, on half of a CPU."""
    ids = [Cycle([1] * tokens, 0, (0, 0), [], 0.0, Laps(torch.device("cpu")))]
    cpu = prefill + cycles * (draft + step)
    return video.Decoded(
        Timed(ids, Spent(2 * cpu, cpu, None)),
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


def pretrained_row(drafter: str, **values: Any) -> pretrained.Row:
    """A row of the page of the pretrained target, with some values."""
    row: dict[str, Any] = {
        "dtype": "float32",
        "temperature": 0.0,
        "steps": 150,
        "samples": 190,
        "parameters": 1000,
        "cpu_seconds": 320.0,
        "tau": 1.75,
        "tau_by_kind": {"text": 1.75},
        "intervals": {"tau": {"low": 1.5, "high": 2.0}},
        "alpha": [0.5, 0.25, 0.125],
        "cycle": 1.25,
        "draft": 20.0,
        "verify": 60.0,
        "plain": 64.0,
        "speedup": 1.5,
        "cpu_share": 0.5,
        "identical": 8,
        "near_tie": 1,
        "compared": 9,
        "warnings": (),
        **values,
    }
    return pretrained.Row(drafter=drafter, **row)


def pretrained_page(
    *rows: pretrained.Row, counts: Sequence[pretrained.Count] = ()
) -> list[str]:
    """The lines of a page."""
    facts = pretrained.Facts(
        hardware="CPU",
        threads=1,
        tree="chain-3",
        prompts=9,
        responses=190,
        response_tokens=19_000,
        rows=rows,
        counts=counts,
    )
    return pretrained.page(facts).splitlines()


def test_the_page_of_the_pretrained_target_shows_both_dtypes_and_names_the_load() -> (
    None
):
    lines = pretrained_page(
        pretrained_row("wren.s0"), pretrained_row("wren.s0", dtype="bfloat16", tau=1.5)
    )
    row = (
        "| `wren.s0` | float32 | 0 | 150 | 320 | 1.75 (1.50-2.00) | 1.75 | - | .50 .25 .12 | 1.25 "
        "| 20 + 60 | 64 | 1.50 |"
    )
    assert row in lines
    page = " ".join(lines)
    assert "16 of 18 (2 of the others" in page
    assert "had 50% of a CPU" in page


def test_growth_with_data_is_a_line_over_the_logarithm_of_the_tokens() -> None:
    amounts = {"wren-2samples": 2, "wren-20samples": 20, "wren.s0": 200}
    rows = [
        pretrained_row(name, samples=samples, tau=1 + number / 4)
        for number, (name, samples) in enumerate(amounts.items())
    ]
    other = pretrained_row("eagle2.s0", samples=200)
    whole = pretrained_row("wren-whole", samples=200, tau=9.0)
    lines = pretrained_page(*rows, other, whole)
    assert "| `wren-20samples` | 20 | 2,000 | 150 | 1.25 |" in lines
    page = " ".join(lines)
    assert "adds 0.25 for ten times the tokens" in page
    assert "1.92 at a million tokens and 2.17 at ten million" in page


def test_counted_tau_is_shown_for_every_training_also_where_nothing_was_decoded() -> (
    None
):
    values: dict[str, Any] = {"low": 1.25, "high": 1.75, "tau_by_kind": {"text": 1.5}}
    counts = [
        pretrained.Count(drafter="eagle2.s0", tau=1.25, **values),
        pretrained.Count(drafter="eagle2.s1", tau=1.5, **values),
    ]
    lines = pretrained_page(counts=counts)
    best = lines.index("| `eagle2.s1` | 1.50 (1.25-1.75) | 1.50 | - |")
    assert lines[best + 1] == "| `eagle2.s0` | 1.25 (1.25-1.75) | 1.50 | - |"
    assert not any("held-out prompts:" in line for line in lines)
