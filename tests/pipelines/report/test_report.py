"""The report of evaluations: its numbers and structure, its groups, and that it loads nothing."""

import base64
import dataclasses
import hashlib
import html
import io
import json
import os
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import (
    PLAIN,
    RESPONSE,
    SOFTWARE,
    TIMED,
    measured,
    shown,
)
from tests.pipelines.report.html_page import Page, make
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.description import WEIGHTS
from vlmdistill.pipelines.bench.records import (
    FORMAT,
    Calibration,
    Check,
    Measurement,
    ResponseSection,
    TargetId,
    TrainedSettings,
    TrainedStage,
    Training,
    write,
)
from vlmdistill.pipelines.bench.served_records import (
    ServedEvaluation,
    ServedLoad,
    ServerCounts,
    ServerRun,
    TimedRequest,
)
from vlmdistill.pipelines.bench.statistics import FEWEST
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.report.answer import answers
from vlmdistill.pipelines.report.documents import csv, markdown
from vlmdistill.pipelines.report.latex import latex
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError


def run(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["report", *arguments]) == 0
    return out.getvalue()


def test_page_shows_what_was_measured(workspace: Workspace, save: Save) -> None:
    save("sparrow")
    save(
        "eagle2",
        measured(0.0, speedup=1.2, calls=40, accepted=64),
        measured(1.0, speedup=0.9),
    )
    made = make(workspace)
    page = Page(made.page)
    (group,) = made.groups
    for text in (group.verdict.text, *(ranking.text for ranking in group.rankings)):
        assert text in page.text
    assert "Some Processor" in page.text
    for paper in ("ViSpec", "MSD", "Sparrow", "HiViS", "HASS", "SpecFLASH", "SpecVLM"):
        assert paper in page.text
    assert "300" in page.text
    assert "4,200" in page.text
    drawings = [label for label in page.attributes("aria-label", "svg") if label]
    assert any("eagle2: 1.20 1.22" in label for label in drawings)
    assert any("sparrow: 90% 67% 75%" in label for label in drawings)
    assert any("token 1: 50% 60% 70%" in label for label in drawings)
    assert page.text.count("0.90\u20130.90") == 1  # the interval of a speedup
    assert "alert" not in page.attributes("role")


def test_charts_of_time_and_of_trees(workspace: Workspace, save: Save) -> None:
    save("sparrow@chain-4", measured(0.0))  # 0.9 s in 32 cycles, after 0.1 s
    more = measured(0.0, calls=26, passes=26, accepted=78)
    save("sparrow@30-3-8", more, tree="30-3-8")
    labels = Page(make(workspace).page).attributes("aria-label", "svg")
    (cycle,) = [
        label for label in labels if label.startswith("Milliseconds of a cycle")
    ]
    assert (
        "sparrow@chain-4: 8.44 14.06 2.81 2.81" in cycle
    )  # draft, verify, accept, other
    (prefill,) = [
        label for label in labels if label.startswith("Milliseconds of the prefill")
    ]
    assert "sparrow@chain-4: 20.00 70.00 10.00" in prefill
    (against,) = [
        label for label in labels if label.startswith("Decode speedup against tau")
    ]
    assert (
        "sparrow@chain-4: 3.25 1.56 2.00" in against
    )  # the last: 3.25 * 13.46 / (13.46 + 8.44)
    (trees,) = [label for label in labels if "by tree" in label]
    assert re.findall(r"@(\S+): [\d.]+ ([\d]\.\d\d)", trees) == [
        ("chain-4", "3.25"),
        ("30-3-8", "4.00"),
    ]


def test_points_of_training_are_points(workspace: Workspace, save: Save) -> None:
    save("sparrow", measured(0.0))
    page = Page(make(workspace).page)
    drawn = page.source[page.source.index("Agreement of sparrow") :]
    drawn = drawn[: drawn.index("</svg>")]
    assert (
        drawn.count('class="mark"') == 2 * 3
    )  # tokens ahead, times that they were measured
    assert 'class="line"' not in drawn


def test_seconds_that_no_cycle_accounts_for_are_a_warning(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(
        "sparrow", measured(0.0, decode_seconds=0.8)
    )  # of 1 second, 0.1 in the prefill
    save("eagle2", measured(0.0))
    made = make(workspace)
    (warning,) = made.groups[0].warnings
    assert warning.startswith("sparrow at temperature 0: ")
    assert "90.0%" in warning
    page = Page(made.page)
    assert warning in page.text
    assert "alert" in page.attributes("role")


def test_evaluations_of_separate_runs_are_a_warning(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    save("eagle2")
    assert make(workspace).groups[0].warnings == []
    save("eagle2", measured="2026-05-05 05:05")
    made = make(workspace)
    (group,) = made.groups
    (warning,) = group.warnings
    page = Page(made.page).text
    assert warning in page
    printed = run("--runs", str(workspace.root.parent))
    for answer in answers(group):
        assert answer.headline.startswith("Perhaps ")
        assert answer.headline.lower() in page.lower()
        assert answer.text in printed


def test_runs_that_end_in_one_second_are_two(workspace: Workspace, save: Save) -> None:
    speed = Calibration(
        plain_step=1.0,
        bare_step=1.0,
        step_ratio=1.0,
        step_bytes=1,
        small_product=1.0,
        large_product=1.0,
        bandwidth=1.0,
    )
    other = dataclasses.replace(speed, bandwidth=1.1)
    save("eagle2", measured(speedup=1.4, noise=0.1), calibrations=(speed,))
    save("sparrow", measured(speedup=1.5, noise=0.2), calibrations=(other,))
    (group,) = make(workspace).groups
    assert [result.beside for result in group.results] == [(), ()]
    assert any("2 separate runs" in text for text in group.warnings)


def test_page_loads_nothing(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    image = workspace.root / "scene.png"
    workspace.root.mkdir(parents=True)
    Image.new("RGB", (84, 84), "navy").save(image)
    save("sparrow", measured(shown=(shown(files=(str(image),)),)))
    page = Page(make(workspace).page)
    assert {tag for tag, _ in page.elements}.isdisjoint(
        {"iframe", "object", "embed", "base"}
    )
    for link in [*page.attributes("src"), *page.attributes("href")]:
        assert link.startswith(("data:", "#"))
    assert not re.search(
        r"https?:|//|@import|url\(", re.sub(r'"data:[^"]*"', "", page.source)
    )
    assert "default-src 'none'" in page.source
    assert str(tmp_path) not in page.source


def test_the_same_target_in_another_folder_compares(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    save(
        "eagle2",
        target=TargetId(
            name="/somewhere/a-target", family="qwen2_5_vl", fingerprint="f00d"
        ),
    )
    assert len(read(workspace).groups) == 1
    assert "/somewhere" not in make(workspace).page.read_text()


@pytest.mark.parametrize("name", ["demo", "qwen2.5-vl-7b"])
def test_the_page_says_what_an_embedded_target_does_not_know(
    name: str, workspace: Workspace, save: Save
) -> None:
    save("wren", target=TargetId(name=name, family="qwen2_5_vl", fingerprint="f00d"))
    text = f"{name} knows pictures of coloured shapes alone"
    assert (text in make(workspace).page.read_text()) == (name == "demo")


def test_hostile_text_is_only_text(workspace: Workspace, save: Save) -> None:
    evil = (
        "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>"
    )
    file = f"/nowhere/{evil.replace('/', '')}.png"
    pieces = (Piece(evil, True, 0.5),)
    response = shown(prompt=evil, files=(file,), pieces=pieces, plain=pieces)
    save(
        evil,
        measured(shown=(response,)),
        stem="hostile",
        hardware=evil,
        tree=evil,
        measured=evil,
        target=TargetId(name=evil, family=evil, fingerprint=evil),
        training=Training(view=evil),
        config=TrainedSettings(
            tree=evil, stages=(TrainedStage(name=evil, epochs=1, hops=1),)
        ),
    )
    page = Page(make(workspace).page)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == len(page.scripts) == 1
    assert evil not in page.scripts[0]
    assert "img" not in tags
    assert not [
        name for _, attrs in page.elements for name in attrs if name.startswith("on")
    ]
    assert "{{ 7 * 7 }}" in page.text


def test_the_page_says_what_was_trained_and_not_what_the_settings_planned(
    workspace: Workspace, save: Save
) -> None:
    """Where a run counts steps, the epochs of its settings are only the shares of the stages."""
    save("sparrow")
    text = Page(make(workspace).page).text.partition("How the drafters were trained")[2]
    assert "3.6 passes" in text
    assert "epoch" not in text.partition("Conventions of the papers")[0]


def test_responses_are_complete_and_drafted_text_is_marked(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow", measured(shown=(shown(),)))
    page = Page(make(workspace).page)
    parts = [
        (tags[-1], text)
        for tags, text in page.texts
        if "article" in tags and "p" in tags
    ]
    assert "".join(text for _, text in parts) == "What is k0?" + "".join(
        piece.text for piece in RESPONSE
    )
    assert [text for tag, text in parts if tag == "mark"] == ["board\nis", "& large"]


def test_the_policy_of_the_page_allows_its_script_and_no_other(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    page = Page(make(workspace).page)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [
        one for one in page.attributes("content", "meta") if "default-src" in one
    ]
    assert f"script-src 'sha256-{digest}';" in policy


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_script_runs_under_the_policy(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    for name in ("sparrow", "eagle2"):
        save(name, measured(shown=(shown(pieces=TIMED, plain=PLAIN),)), measured(1.0))
    before = make(workspace).page
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = [*browser, "--dump-dom", "--virtual-time-budget=1000", before.as_uri()]
    after = tmp_path / "after.html"
    after.write_bytes(
        subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    )
    hidden = [
        [
            attrs["class"]
            for _, attrs in Page(path).elements
            if {"hidden", "class"} <= attrs.keys()
        ]
        for path in (before, after)
    ]
    assert {"tools", "replay", "player"} <= {*hidden[0]}
    assert {"tools", "replay"}.isdisjoint(hidden[1])
    assert "player" in hidden[1]  # nothing plays by itself


def test_a_replay_has_the_time_of_every_piece(workspace: Workspace, save: Save) -> None:
    timed = measured(shown=(shown(pieces=TIMED, plain=PLAIN),))
    save("sparrow", timed)
    save("eagle2", timed)
    source = Page(make(workspace).page).source
    runs = re.findall(
        r'class="run (\w+)".*?data-total="([\d.]+)".*?class="text"[^>]*>(.*?)</p>',
        source,
        re.DOTALL,
    )
    assert [run[0] for run in runs] == [
        "plainly",
        "drafted",
        "drafted",
    ]  # plain decoding once for both
    for (_, total, text), pieces in zip(runs, [PLAIN, TIMED, TIMED], strict=True):
        times = [float(at) for at in re.findall(r'data-at="([\d.]+)"', text)]
        assert times == [pytest.approx(1000 * (piece.seconds or 0)) for piece in pieces]
        assert times == sorted(times)
        assert times[-1] <= float(total)
        assert html.unescape(re.sub("<[^>]*>", "", text)) == "".join(
            piece.text for piece in pieces
        )


@pytest.mark.parametrize(
    "change", [{"plain": PLAIN}, {"pieces": TIMED}, {"key": "k99", "pieces": TIMED}]
)
def test_a_response_without_times_has_no_replay(
    change: dict[str, Any], workspace: Workspace, save: Save
) -> None:
    save("sparrow", measured(shown=(shown(**change),)))
    page = Page(make(workspace).page)
    assert "replay" not in page.attributes("class")
    assert "board" in page.text


@pytest.mark.parametrize("label", ["kind", "dataset"])
def test_rows_of_each_kind_and_dataset_add_up(
    label: str, workspace: Workspace, save: Save
) -> None:
    groups: list[dict[str, Any]] = [
        {label: ["image", "text", "video"][(at + 6) // 10]} for at in range(24)
    ]

    def mixed(at: Measurement) -> Measurement:
        prompts = zip(at.prompts, groups, strict=True)
        return dataclasses.replace(
            at, prompts=tuple(dataclasses.replace(one, **to) for one, to in prompts)
        )

    save("sparrow", mixed(measured(0.0)), mixed(measured(1.0, calls=40)))
    save("eagle2", mixed(measured(0.0, calls=50)), mixed(measured(1.0)))
    made = make(workspace)
    rows = [row for row in Page(made.page).rows if label in row and "calls" in row]
    assert len(rows) == 3 * 2 * 2
    for one in made.groups[0].results:
        mine = [
            row
            for row in rows
            if row[""].strip() == one.label and row["T"] == f"{one.temperature:g}"
        ]
        assert (
            sum(int(row["prompts"].replace(",", "")) for row in mine)
            == one.figures.prompts
        )
        assert (
            sum(int(row["calls"].replace(",", "")) for row in mine) == one.figures.calls
        )
        for row in mine:
            assert row["tau"].startswith(f"{one.figures.tau:.2f}")
            assert ("\u2013" in row["tau"]) == (int(row["prompts"]) >= FEWEST)
    save("eagle2")
    save("sparrow")
    assert not [row for row in Page(make(workspace).page).rows if label in row]


def test_parts_of_the_responses_have_rows(workspace: Workspace, save: Save) -> None:
    early = ResponseSection(context=0, thinking=True, calls=20, tokens=80, accepted=60)
    late = ResponseSection(
        context=512, thinking=False, calls=12, tokens=24, accepted=12
    )
    save("sparrow", measured(count=8, sections=(early, late)))
    rows = {
        row["part"]: row for row in Page(make(workspace).page).rows if "part" in row
    }
    assert list(rows) == ["context from 0", "context from 512", "thinking", "answer"]
    assert {row["tau"].strip() for row in rows.values()} == {"4.00", "2.00"}
    assert rows["answer"]["calls"].strip() == "96"


def test_a_shown_response_has_the_tau_of_its_counts(
    workspace: Workspace, save: Save
) -> None:
    """Whatever the record says beside its text."""
    save("sparrow", measured(shown=(shown("k0", tau=9.9),)))
    page = Page(make(workspace).page)
    assert "tau 3.25" in page.text
    assert "9.90" not in page.text


def test_a_prompt_is_shown_once_with_all_its_responses(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow")
    save("eagle2")
    page = Page(make(workspace).page)
    assert page.text.count("What is k0?") == 1
    assert page.text.count("board is") == 2 * 2 * 2  # prompts, drafters, temperatures


def test_images_are_small_copies(workspace: Workspace, save: Save) -> None:
    folder = workspace.root
    folder.mkdir(parents=True)
    noise = Image.effect_noise((1200, 800), 60).convert("RGB")
    noise.save(folder / "photo.jpg")
    Image.new("RGBA", (84, 42), (0, 0, 255, 128)).save(folder / "drawing.png")
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "frames").mkdir()
    names = ("photo.jpg", "drawing.png", "broken.png", "gone.png", "clip.mp4", "frames")
    save(
        "sparrow",
        measured(shown=(shown(files=tuple(str(folder / name) for name in names)),)),
    )
    page = Page(make(workspace).page)
    sizes = []
    for uri in page.attributes("src", "img"):
        data = base64.b64decode(uri.partition(",")[2])
        sizes.append((Image.open(io.BytesIO(data)).size, uri.partition(";")[0]))
    assert sizes == [((320, 213), "data:image/jpeg"), ((84, 42), "data:image/png")]
    assert all(page.attributes("alt", "img"))
    for name in ("broken.png", "gone.png", "clip.mp4"):
        assert name in page.text
    for name in ("clip.mp4", "frames"):
        assert f"Video: {name}" in page.text


@pytest.mark.parametrize(
    "outside", ["passport.png", "s3://bucket/passport.png", "link.png"]
)
def test_a_record_shows_no_file_that_is_not_the_workspaces(
    workspace: Workspace,
    save: Save,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outside: str,
) -> None:
    workspace.root.mkdir(parents=True)
    secret = tmp_path / "passport.png"
    Image.new("RGB", (84, 84), "navy").save(secret)
    (workspace.root / "link.png").symlink_to(secret)
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/s3/bucket").mkdir(parents=True)
    Image.new("RGB", (84, 84), "navy").save(tmp_path / "cache/s3/bucket/passport.png")
    file = {"link.png": str(workspace.root / "link.png")}.get(outside, outside)
    file = file if "/" in file else str(tmp_path / file)
    save("sparrow", measured(shown=(shown(files=(file,)),)))
    page = Page(make(workspace).page)
    assert page.attributes("src", "img") == []


def test_a_record_shows_the_images_that_the_held_out_prompts_name(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    image = tmp_path / "photo.png"
    Image.new("RGB", (84, 84), "navy").save(image)
    part = {"type": "image", "path": str(image), "digest": "0"}
    question = {"type": "text", "text": "What is it?"}
    message: Any = {"role": "user", "content": [part, question]}
    workspace.root.mkdir(parents=True)
    prompt = Prompt("k0", "photos", "eval", [message], "none", "", None, "photos", 0, 1)
    prompt_table.write(workspace.prompts, [prompt])
    save("sparrow", measured(shown=(shown(files=(str(image),)),)))
    assert len(Page(make(workspace).page).attributes("src", "img")) == 1


def test_a_copied_workspace_shows_its_own_images(
    workspace: Workspace, save: Save
) -> None:
    images = workspace.root / "data/images"
    images.mkdir(parents=True)
    Image.new("RGB", (84, 84), "navy").save(images / "photo.png")
    file = "/another/machine/runs/demo/data/images/photo.png"
    save("sparrow", measured(shown=(shown(files=(file,)),)))
    assert len(Page(make(workspace).page).attributes("src", "img")) == 1


def test_pipes_among_records_and_files_end_no_report(
    workspace: Workspace, save: Save
) -> None:
    workspace.root.mkdir(parents=True)
    os.mkfifo(workspace.root / "pipe.png")
    save("sparrow", measured(shown=(shown(files=(str(workspace.root / "pipe.png"),)),)))
    assert "pipe.png" in Page(make(workspace).page).text
    os.mkfifo(workspace.reports / "pipe.json")
    with pytest.raises(DataError, match=r"pipe\.json"):
        make(workspace)


def test_a_record_of_absurdly_long_chains_is_refused(
    workspace: Workspace, save: Save
) -> None:
    file = save("sparrow")
    record = json.loads(file.read_text())
    chain = record["temperatures"][0]["prompts"][0]["drafted"]
    chain["chain_tried"] = chain["chain_accepted"] = [1] * 200_000
    file.write_text(json.dumps(record))
    with pytest.raises(DataError, match="200000"):
        make(workspace)


def test_csv_has_no_formulas(workspace: Workspace, save: Save) -> None:
    save("sparrow", hardware="=HYPERLINK(1)", dtype="@SUM(1)")
    row = pl.read_csv(io.StringIO(csv(read(workspace)))).row(0, named=True)
    assert (row["hardware"], row["dtype"]) == ("'=HYPERLINK(1)", "'@SUM(1)")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"temperatures": (measured(0.0, count=8), measured(1.0, count=8))}, "prompts"),
        ({"max_new_tokens": 64}, "max new tokens"),
        ({"hardware": "Other"}, "hardware"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"threads": 2}, "threads"),
        ({"attention": "eager"}, "attention"),
        ({"compiled": True}, "compiled"),
        (
            {
                "target": TargetId(
                    name="a-target", family="qwen2_5_vl", fingerprint="beef"
                )
            },
            "target",
        ),
    ],
)
def test_evaluations_that_cannot_be_compared_are_in_separate_groups(
    workspace: Workspace,
    save: Save,
    tmp_path: Path,
    change: dict[str, Any],
    expected: str,
) -> None:
    save("sparrow")
    save("eagle2", measured="2026-05-05 05:05", **change)
    save("hivis")
    groups = read(workspace).groups
    assert [[one.name for one in group.rankings[0].results] for group in groups] == [
        ["eagle2"],
        ["hivis", "sparrow"],
    ]
    page = Page(make(workspace).page)
    warning = page.text[: page.text.index("Group 1 of 2")]
    assert expected in warning
    printed = run("--runs", str(tmp_path / "runs"))
    assert re.search(rf"^2 .*{expected}$", printed, re.MULTILINE)
    facts = json.loads(run("--runs", str(tmp_path / "runs"), "--json"))
    assert facts["differing"] == [expected]
    assert {(row["name"], row["group"]) for row in facts["rows"]} == {
        ("eagle2", 1),
        ("hivis", 2),
        ("sparrow", 2),
    }


def test_targets_of_an_earlier_version_count_as_the_only_one_that_agrees(
    workspace: Workspace, save: Save
) -> None:
    former = "0123456789abcdef"

    def of(fingerprint: str) -> TargetId:
        return TargetId(name="a-target", family="llava", fingerprint=fingerprint)

    save("sparrow", target=of(former))
    save("hivis", target=of(f"{former}00000000"))
    (alike,) = read(workspace).groups
    assert {result.name for result in alike.results} == {"hivis", "sparrow"}
    save("eagle2", target=of(f"{former}11111111"))
    assert len(read(workspace).groups) == 3


def test_prints_the_table(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    save("sparrow")
    save("eagle2", measured(speedup=1.625, count=24, noise=0.1), measured(1.0))
    lines = run("--runs", str(tmp_path / "runs")).splitlines()
    assert lines[0].startswith("target a-target (f00d), hardware CPU Some Processor")
    header, *cells = [re.split(r"  +", line) for line in lines[1:6]]
    assert header[:5] == ["drafter", "T", "tau", "accepted", "speedup"]
    assert [line[:4] for line in cells[:2]] == [
        ["eagle2", "0", "3.25 (3.25-3.25)", "2.25 (2.25-2.25)"],
        ["sparrow", "0", "3.25 (3.25-3.25)", "2.25 (2.25-2.25)"],
    ]
    assert cells[1][4] == "1.50 (1.50-1.50)"
    speedup, low, high = map(float, re.findall(r"[\d.]+", cells[0][4]))
    assert 1.5 < low < speedup < high < 1.8
    assert "24/24 identical" in lines[2]
    assert lines[-1] == f"page  {workspace.reports / 'index.html'}"


def test_json_rows_hold_every_figure(save: Save, tmp_path: Path) -> None:
    save(not_again="out of memory")
    elsewhere = tmp_path / "page.html"
    facts = json.loads(
        run("--runs", str(tmp_path / "runs"), "--json", "--out", str(elsewhere))
    )
    assert facts["page"] == str(elsewhere)
    assert elsewhere.is_file()
    assert any("out of memory" in text for text in facts["warnings"])
    row = facts["rows"][0]
    assert {
        name: row[name]
        for name in ("name", "temperature", "tau", "calls", "tree", "accounted")
    } == {
        "name": "sparrow",
        "temperature": 0,
        "tau": 3.25,
        "calls": 24 * 32,
        "tree": "chain-4",
        "accounted": 1,
    }
    assert row["intervals"]["speedup"] == pytest.approx({"low": 1.5, "high": 1.5})
    assert row["conditions"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("own", "base", "level", "expected"),
    [
        (["identical"] * 3, ["identical"] * 3, "lossless", "3"),
        (["identical"], ["identical"], "lossless", ""),
        (
            ["identical", "identical", "near_tie"],
            ["identical"] * 3,
            "near-ties",
            "sparrow: 1 of 3",
        ),
        (
            ["identical", "near_tie", "different"],
            ["identical"] * 3,
            "broken",
            "sparrow: 1 of 3",
        ),
        (
            ["identical"] * 3,
            ["identical", "different", "different"],
            "broken",
            "plain decoding: 2 of 3",
        ),
    ],
)
def test_verdict(
    workspace: Workspace,
    save: Save,
    own: list[Check],
    base: list[Check],
    level: str,
    expected: str,
) -> None:
    save("sparrow", measured(own=own, base=base))
    verdict = read(workspace).groups[0].verdict
    assert verdict.level == level
    assert expected in verdict.text
    page = Page(make(workspace).page)
    assert verdict.text in page.text
    assert ("alert" in page.attributes("role")) == (level == "broken")


def test_the_verdict_names_drafters_that_were_not_checked(
    workspace: Workspace, save: Save
) -> None:
    save("sparrow", measured(1.0))
    assert read(workspace).groups[0].verdict.level == "unchecked"
    save("eagle2")
    verdict = read(workspace).groups[0].verdict
    assert verdict.level == "lossless"
    assert "sparrow" in verdict.text
    assert "eagle2" not in verdict.text


def test_a_drafter_that_drafted_nothing_has_no_charts(
    workspace: Workspace, save: Save
) -> None:
    empty: dict[str, Any] = {
        "calls": 0,
        "tokens": 1,
        "accepted": 0,
        "chain_tried": (),
        "chain_accepted": (),
    }
    save(
        "sparrow",
        measured(shown=(), **empty),
        training=Training(),
        config=TrainedSettings(tree="chain-4"),
    )
    made = make(workspace)
    page = Page(made.page)
    assert (
        len([label for label in page.attributes("aria-label", "svg") if label]) == 1
    )  # of the speedup
    assert "mark" not in {tags[-1] for tags, _ in page.texts if "article" in tags}


def test_extreme_numbers(workspace: Workspace, save: Save) -> None:
    extreme: dict[str, Any] = {
        "seconds": 1e-300,
        "calls": 10**15,
        "chain_tried": (1, 0),
        "chain_accepted": (7, 0),
    }
    save("sparrow", measured(**extreme))
    page = Page(make(workspace).page)
    assert "nan" not in page.source
    assert "inf" not in re.sub("inform|infer", "", page.source)


def test_a_report_without_evaluations_names_the_command_to_run(
    workspace: Workspace,
) -> None:
    with pytest.raises(
        DataError, match=r"`vlmdistill eval DRAFTER\.\.\. --model demo-small`"
    ):
        make(workspace)
    assert not workspace.root.exists()


def test_a_drafter_that_was_trained_again_is_said(
    workspace: Workspace, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a later evaluation under the same conditions is of the present weights."""
    folder = workspace.drafter("sparrow")
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(b"new")
    present = hashlib.sha256(b"new").hexdigest()
    save("sparrow", title="before", measured="2026-01-01 00:00:00", weights="old")

    def said() -> list[bool]:
        return [
            any("other weights" in text for text in found.warnings)
            for found in read(workspace).groups
        ]

    assert said() == [True]
    row = pl.read_csv(io.StringIO(csv(read(workspace)))).row(0, named=True)
    assert "other weights" in row["warnings"]
    capsys.readouterr()
    assert main(["eval", "--list", "--runs", str(workspace.root.parent)]) == 0
    assert "other weights" in capsys.readouterr().out
    later = {"measured": "2026-01-02 00:00:00", "weights": present}
    save("sparrow", measured_on_others(), stem="other prompts", **later)
    assert said() == [False, True]
    save("sparrow", stem="after", title="after", **later)
    assert not any(said())


def measured_on_others() -> Measurement:
    """On prompts that no other evaluation has."""
    at = measured()
    others = [
        dataclasses.replace(prompt, key=f"other {prompt.key}") for prompt in at.prompts
    ]
    return dataclasses.replace(at, prompts=tuple(others), shown=())


def test_evaluations_of_servers_are_a_section_of_their_own(
    workspace: Workspace, save: Save
) -> None:
    def run(seconds: float, **more: Any) -> ServerRun:
        asked = [
            TimedRequest(
                key=f"k{one}",
                tokens=10,
                seconds=seconds,
                first_seconds=0.1,
                finish="stop",
                response="r",
            )
            for one in range(8)
        ]
        return ServerRun(seconds=8 * seconds, requests=tuple(asked), failed=(), **more)

    counts = ServerCounts(
        generated=80,
        drafts=24,
        accepted=48,
        chain_tried=(24, 18, 16),
        chain_accepted=(18, 16, 14),
    )
    load = ServedLoad(
        temperature=0,
        concurrency=4,
        server=run(1.0, counts=counts),
        baseline=run(2.5, counts=ServerCounts()),
    )
    made_up = ServedEvaluation(
        format=FORMAT,
        software=SOFTWARE,
        name="in-vllm",
        url="http://127.0.0.1:8000",
        model="demo",
        drafter=None,
        baseline="http://127.0.0.1:8001",
        prompt_set="hash",
        max_new_tokens=64,
        seed=0,
        measured="2026-01-01 00:00:00",
        loads=(load,),
    )
    write(made_up, workspace.reports / "served" / "in-vllm.json")
    alone = make(workspace)
    assert (alone.groups, [(one.evaluation, one.load) for one in alone.served]) == (
        [],
        [(made_up, load)],
    )
    save("sparrow")
    both = make(workspace)
    text = " ".join(text for _, text in Page(both.page).texts)
    for cell in (
        "in-vllm",
        "3.00",
        "2.00",
        "2.50 (2.50\u20132.50)",
        "8/8",
    ):  # tau to identical responses
        assert cell in text
    formats = (
        (markdown, "2.50 (2.50-2.50)"),
        (latex, "2.50 (2.50--2.50)"),
        (csv, "concurrency 4"),
    )
    for form, number in formats:
        (line,) = [
            line
            for line in form(both).splitlines()
            if "in-vllm" in line and line[0] != "%"
        ]
        assert number in line
    other = dataclasses.replace(counts, generated=99)
    mixed = dataclasses.replace(load, concurrency=8, server=run(1.0, counts=other))
    write(
        dataclasses.replace(made_up, loads=(load, mixed)),
        workspace.reports / "served" / "in-vllm.json",
    )
    warned = "in-vllm at temperature 0: the server at concurrency 8 counted 99 generated tokens"
    found = make(workspace)
    for text in (Page(found.page).text, markdown(found), latex(found)):
        assert text.count(warned) == 1
    timeless = dataclasses.replace(
        load, server=dataclasses.replace(load.server, seconds=0.0)
    )
    file = workspace.reports / "served" / "odd.json"
    write(dataclasses.replace(made_up, name="timeless", loads=(timeless,)), file)
    assert "timeless" in Page(make(workspace).page).text
    unequal = json.loads(file.read_text())
    unequal["loads"][0]["server"]["counts"]["chain_tried"] = [24, 18]
    for content in ("{}", json.dumps(unequal)):
        file.write_text(content)
        with pytest.raises(
            DataError, match=r"odd\.json is not an evaluation of a server"
        ):
            make(workspace)
