"""The report in every format, and its charts as files: they have the page's numbers."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from PIL import Image

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import evaluation, in_sequence, measured
from vlmdistill.cli.main import main
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Measurement, Phases, PromptResult
from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.comparison import rank
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.targets.software import Software
from vlmdistill.pipelines.workspace.workspace import Workspace

SOFTWARE = Software(
    python="3.11",
    vlmdistill="1",
    torch="2.9",
    transformers="5",
    commit="abc-dirty",
    command="vlmdistill eval x_y",
)
ODD = "50%_of|it & {more} \\ #1 $2 ^3 ~4 <b>*[a]*</b>\n_x_"

Report = Callable[..., str]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace.of("demo-small", tmp_path / "runs")
    changes: dict[str, Any] = {"software": SOFTWARE, "tree": "30-3-8"}
    records.write(
        evaluation(
            "text_only",
            measured(noise=0.1),
            measured(1.0, speedup=0.8, noise=0.2),
            **changes,
        ),
        made.reports / "one.json",
    )
    records.write(
        evaluation(ODD, measured(noise=0.1, seed=3), hardware=ODD),
        made.reports / "two.json",
    )
    return made


@pytest.fixture
def report(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> Report:
    """What `vlmdistill report` prints."""

    def printed(*arguments: str, status: int = 0) -> str:
        assert (
            main(["report", "--runs", str(workspace.root.parent), *arguments]) == status
        )
        return capsys.readouterr().out

    return printed


def sentences(workspace: Workspace) -> list[str]:
    groups = read(workspace).groups
    return [
        text
        for one in groups
        for text in (*(answer.text for answer in answers(one)), one.verdict.text)
    ]


def rates(figures: Any) -> list[str]:
    found = [
        (getattr(figures, name), figures.intervals[name])
        for name in ("tau", "speedup", "decode_speedup")
    ]
    return [
        f"{value:.2f} ({within.low:.2f}-{within.high:.2f})" for value, within in found
    ]


def unescaped(cell: str) -> str:
    return html.unescape(re.sub(r"\\([^\w\s]|_)", r"\1", cell))


def test_markdown_has_the_numbers_the_conditions_and_the_sentences(
    workspace: Workspace, report: Report
) -> None:
    text = report("--format", "md")
    lines = text.splitlines()
    table = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line[:1] == "|"
    ]
    rows = [dict(zip(table[0], map(unescaped, row), strict=True)) for row in table]
    for one in (one for group in read(workspace).groups for one in group.results):
        name = " ".join(one.name.split())
        (row,) = [
            row
            for row in rows
            if (row["drafter"], row["T"]) == (name, f"{one.temperature:g}")
        ]
        assert [row["tau"], row["speedup"], row["decode speedup"]] == rates(one.figures)
    for sentence in (one for one in sentences(workspace) if ODD not in one):
        assert sentence in text
    for fact in (
        "- dtype: float32",
        "- commit: abc-dirty",
        "- command: vlmdistill eval x_y",
    ):
        assert fact in lines
    assert "<b>" not in text


def test_latex_has_only_escaped_names_and_balanced_tables(
    workspace: Workspace, report: Report, tmp_path: Path
) -> None:
    text = report("--format", "latex")
    for sentence in (one for one in sentences(workspace) if ODD not in one):
        assert f"% {sentence}" in text.splitlines()
    for one in (one for group in read(workspace).groups for one in group.results):
        assert any(
            all(cell in line for cell in rates(one.figures))
            for line in text.splitlines()
        )
    code = re.sub(r"(?m)(?<!\\)%.*$", "", text)
    assert r"text\_only" in code
    assert (
        r"50\%\_of\textbar{}it \& \{more\} \textbackslash{} \#1 \$2 \textasciicircum{}3"
        in code
    )
    bare = re.sub(r"\\[\\&%$#_{}]", "", code)
    assert bare.count("{") == bare.count("}")
    assert (
        bare.count("$") == 2 * 2 * 2
    )  # tau in the caption and the header of two tables
    assert not re.search(r"[#^_~|<>]", bare)
    opened = re.findall(r"\\begin{(\w+\*?)}", bare)
    assert opened == ["table", "tabular"] * 2
    assert sorted(opened) == sorted(re.findall(r"\\end{(\w+\*?)}", bare))
    assert [
        bare.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")
    ] == [2, 2, 2]
    if compiler := shutil.which("pdflatex"):
        (tmp_path / "table.tex").write_text(text)
        page = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table}\end{document}"
        (tmp_path / "page.tex").write_text(page)
        command = [compiler, "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout


def on_sets(sets: dict[str, float], **checks: Any) -> Measurement:
    """Prompts of several sets with the speedup of each."""
    parts = [
        (name, measured(speedup=speedup, shown=(), **checks))
        for name, speedup in sets.items()
    ]
    prompts = [
        replace(prompt, dataset=name, key=f"{name}-{prompt.key}")
        for name, at in parts
        for prompt in at.prompts
    ]
    return in_sequence(Measurement(temperature=0.0, prompts=tuple(prompts)))


def test_a_table_for_a_paper_has_no_speedup_that_a_warning_doubts(
    workspace: Workspace, report: Report, save: Save
) -> None:
    save("fair", measured(speedup=1.5))
    save("odd", measured(speedup=2.5, missed=4))
    code = [
        line
        for line in report("--format", "latex").splitlines()
        if not line.startswith("%")
    ]
    (odd,) = (line for line in code if line.startswith("odd"))
    (fair,) = (line for line in code if line.startswith("fair"))
    assert "2.50" not in odd
    assert "--" in odd
    assert r"\textbf{1.50}" in fair


def test_latex_is_a_table_of_methods_and_sets(
    workspace: Workspace, report: Report, save: Save
) -> None:
    for file in workspace.reports.glob("*.json"):
        file.unlink()
    save("wren", on_sets({"a": 2, "b": 1}))
    save("msd", on_sets({"a": 1.5, "b": 3}))
    save("odd", on_sets({"a": 9, "b": 9}, own=["different"] * 24))
    save("wren", on_sets({"c": 1.25}), stem="wren of another day")
    save("msd", on_sets({"c": 1.25}), stem="msd of another day")
    code = [
        line
        for line in report("--format", "latex").splitlines()
        if not line.startswith("%")
    ]
    rows = {
        cells[0]: cells[1:]
        for line in code
        if len(cells := [cell.strip() for cell in line.removesuffix(r"\\").split("&")])
        == 9
    }
    sets = [
        cell
        for line in code
        for cell in re.findall(r"\\multicolumn\{2}\{c}\{(\w+)}", line)
    ]
    at = {name: 2 * sets.index(name) + 1 for name in sets}
    assert sets == ["a", "b", "c", "mean"]
    assert rows["wren"][at["a"]] == r"\textbf{2.00}"
    assert rows["wren"][at["b"]] == "1.00"
    assert rows["msd"][at["b"]] == r"\textbf{3.00}"
    assert [rows[name][at["c"]] for name in ("wren", "msd")] == [r"\textbf{1.25}"] * 2
    assert [rows[name][at["mean"]] for name in ("wren", "msd")] == [
        "1.42",
        r"\textbf{1.92}",
    ]
    (broken,) = [cells for name, cells in rows.items() if name.startswith("odd")]
    assert [broken[at[name]] for name in ("a", "b", "c", "mean")] == [
        "--"
    ] * 4  # not lossless
    (caption,) = [line for line in code if line.startswith(r"\caption")]
    assert "not lossless" in caption
    assert len(caption) < 150


@pytest.mark.parametrize("other", [{"weights": "new"}, {"tree": "chain-7"}])
def test_latex_has_no_mean_over_sets_of_different_drafters(
    workspace: Workspace, report: Report, save: Save, other: dict[str, Any]
) -> None:
    """One was trained again between the sets, or had another tree."""
    for file in workspace.reports.glob("*.json"):
        file.unlink()
    save("wren", on_sets({"a": 2}), weights="old")
    save("wren", on_sets({"b": 3}), stem="later", **{"weights": "old", **other})
    save("msd", on_sets({"a": 2}), weights="same")
    save("msd", on_sets({"b": 3}), stem="msd later", weights="same")
    table = report("--format", "latex").partition(r"\midrule")[2].splitlines()
    rows = [line.split("&") for line in table if line.startswith(("wren", "msd"))]
    means = {cells[0].strip(): cells[-1].strip(" \\") for cells in rows}
    assert len(means) == 3
    (mean,) = (mean for name, mean in means.items() if name == "msd")
    assert "2.50" in mean
    assert [mean for name, mean in means.items() if name != "msd"] == ["--"] * 2


def test_csv_has_raw_numbers_of_all_prompts_and_of_groups(
    workspace: Workspace, report: Report
) -> None:
    table = pl.read_csv(io.StringIO(report("--format", "csv")))
    for one in (one for group in read(workspace).groups for one in group.results):
        rows = table.filter(
            (pl.col("drafter") == one.name) & (pl.col("temperature") == one.temperature)
        )
        assert rows.select("by", "part").rows() == [
            ("all", ""),
            ("kind", "image"),
            ("dataset", "made up"),
        ]
        for row in rows.to_dicts():
            for name, within in one.figures.intervals.items():
                assert row[name] == getattr(one.figures, name)
                assert (row[f"{name}_low"], row[f"{name}_high"]) == (
                    within.low,
                    within.high,
                )
            assert (row["calls"], row["prompts"], row["identical"]) == (
                one.figures.calls,
                24,
                one.figures.lossless.identical,
            )
            assert row["alpha_2"] == pytest.approx(12 / 18)
            assert row["commit"] == one.evaluation.software.commit


def test_json_is_the_same_by_format_and_beside_another(
    report: Report, tmp_path: Path
) -> None:
    by_option = json.loads(report("--json"))
    assert Path(by_option.pop("page")).is_file()
    assert json.loads(report("--format", "json")) == by_option
    assert by_option["rows"][-1]["software"] in (msgspec.to_builtins(SOFTWARE), None)
    file = tmp_path / "new" / "table.md"
    both = json.loads(
        report("--json", "--format", "md", "--out", str(file))
    )  # the file is Markdown
    assert both.pop("md") == str(file)
    assert both == by_option
    assert file.read_text().startswith("# demo")
    printed = report("--format", "csv", "--out", str(tmp_path / "table.csv"))
    assert printed.split() == ["csv", str(tmp_path / "table.csv")]
    assert len(pl.read_csv(tmp_path / "table.csv")) == 3 * 3


@pytest.mark.parametrize("form", ["html", "md", "csv", "latex"])
def test_a_record_sends_no_command_to_the_terminal(
    workspace: Workspace, report: Report, form: str
) -> None:
    odd = "\x1b]0;pwn\x07\u202e"
    records.write(
        evaluation("eagle2", measured(), hardware=odd), workspace.reports / "odd.json"
    )
    assert not {*odd[:1], *odd[-2:]} & {*report("--format", form)}


def test_charts_are_whole_files(
    workspace: Workspace, report: Report, tmp_path: Path
) -> None:
    report("--format", "csv", "--plots", str(tmp_path / "plots"))
    page = report("--json") and (workspace.reports / "index.html").read_text()
    files = sorted((tmp_path / "plots").iterdir())
    assert len(files) == page.count('<svg class="chart"') > 10
    for file in files:
        text = file.read_text()
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"href|url\(|@import|<script|var\(", text)
        assert "#1f5fbf" in text  # a color of the light page
    assert any("text_only" in file.name for file in files)


def of_one_token(one: PromptResult) -> PromptResult:
    """Without a cycle, except for the first prompt."""
    if one.key == "k0":
        return one
    short: dict[str, Any] = {
        "tokens": 1,
        "calls": 0,
        "passes": 0,
        "accepted": 0,
        "decode_seconds": 0.0,
        "chain_tried": (),
        "chain_accepted": (),
    }
    plain, drafted = replace(one.plain, **short), replace(one.drafted, **short)
    return replace(one, plain=plain, drafted=drafted)


def in_no_time(one: PromptResult) -> PromptResult:
    none: dict[str, Any] = {
        "seconds": 0.0,
        "prefill_seconds": 0.0,
        "decode_seconds": 0.0,
        "phases": Phases(),
    }
    plain, drafted = replace(one.plain, **none), replace(one.drafted, **none)
    return replace(one, plain=plain, drafted=drafted)


@pytest.mark.parametrize("change", [of_one_token, in_no_time])
def test_a_rate_without_an_interval_is_drawn(
    workspace: Workspace,
    report: Report,
    tmp_path: Path,
    change: Callable[[PromptResult], PromptResult],
) -> None:
    at = measured(count=12, noise=0.1)
    at = in_sequence(replace(at, prompts=tuple(map(change, at.prompts))))
    records.write(evaluation("short", at), workspace.reports / "short.json")
    report("--plots", str(tmp_path / "plots"))
    assert "short" in (workspace.reports / "index.html").read_text()


def test_without_the_package_that_draws_them_the_extra_is_named(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    plots = ["--plots", str(tmp_path / "plots"), "--plot-format", "pdf"]
    assert main(["report", "--runs", str(workspace.root.parent), *plots]) == 1
    assert "pip install 'vlmdistill[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["pdf", "png"])
def test_charts_are_drawn_for_papers(report: Report, tmp_path: Path, form: str) -> None:
    pytest.importorskip("vl_convert")
    report("--format", "csv", "--plots", str(tmp_path / "svg"))
    report("--format", "csv", "--plots", str(tmp_path / form), "--plot-format", form)
    files = sorted((tmp_path / form).iterdir())
    assert [file.stem for file in files] == sorted(
        file.stem for file in (tmp_path / "svg").iterdir()
    )
    for file in files:
        if form == "png":
            with Image.open(file) as image:
                assert (
                    len(image.convert("RGB").getcolors(1 << 24) or ()) > 3
                )  # more than a blank page
        else:
            fonts = re.findall(rb"/BaseFont /([\w+-]+)", file.read_bytes())
            assert fonts  # all of them embedded, under a prefix
            assert all(b"+" in font for font in fonts)


def test_the_front_has_the_drafters_that_none_beats_in_speed_and_memory() -> None:
    made = {
        "small": evaluation("small", measured(speedup=1.5), parameters=1_000_000),
        "beaten": evaluation("beaten", measured(speedup=1.25), parameters=2_000_000),
        "slow": evaluation("slow", measured(speedup=0.5), parameters=0),
        "broken": evaluation(
            "broken", measured(own=["different"] * 24, speedup=9), parameters=10
        ),
        "large": evaluation("large", measured(speedup=3), parameters=4_000_000),
    }
    (ranking,) = rank([*made.values()])
    chart = charts.pareto(ranking, dict.fromkeys(made, 0), ranking.results)
    assert chart is not None
    at = {one.name.partition(" ")[0]: one.points[0] for one in chart.series}
    assert {one.name: one.values for one in chart.series}["large"] == pytest.approx(
        [16, 3]
    )  # MB of float32
    assert at.keys() == made.keys()
    assert {name for name in made if at[name] in chart.line} == {"small", "large"}
    heights = [y for _, y in chart.line]
    assert heights == sorted(heights, reverse=True)  # upwards: y counts from the top
    few = rank([evaluation(name, measured(count=2, speedup=4)) for name in made])[
        0
    ]  # without intervals
    assert charts.pareto(few, dict.fromkeys(made, 0), few.results)
    alone = rank([made["small"]])[0]
    assert charts.pareto(alone, {"small": 0}, alone.results) is None


def test_the_page_names_versions_commit_and_command(
    workspace: Workspace, report: Report
) -> None:
    report()
    page = (workspace.reports / "index.html").read_text()
    for value in SOFTWARE.facts.values():
        assert f">{value}</dd>" in page


@pytest.mark.parametrize("mixed", [False, True])
def test_images_and_texts_have_rows_of_their_own(
    save: Save, report: Report, *, mixed: bool
) -> None:
    at = measured(0.0, count=24)
    kinds = [
        replace(
            one,
            kind="text" if number < 12 else "image",
            dataset="ab"[number % 2 if mixed else number < 12],
        )
        for number, one in enumerate(at.prompts)
    ]
    save("sparrow", replace(at, prompts=tuple(kinds)))
    rows = [
        line.split() for line in report().splitlines() if line.startswith("sparrow ")
    ]
    parts = [row[2:4] for row in rows[1:]]
    expected = [["image", "12"], ["text", "12"]]
    assert parts == ([*expected, ["a", "12"], ["b", "12"]] if mixed else expected)


def test_wrong_options_are_one_line(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report("--format", "pdf", status=2)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for out in (
        "/dev/null",
        str(tmp_path / "folder"),
        str(tmp_path / "file" / "below"),
    ):
        for form in ("html", "md"):
            assert (
                main(
                    [
                        "report",
                        "--runs",
                        str(tmp_path / "runs"),
                        "--format",
                        form,
                        "--out",
                        out,
                    ]
                )
                == 1
            )
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith("error: ")
            assert captured.err.count("\n") == 1
    assert Path("/dev/null").is_char_device()
