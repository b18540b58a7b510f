"""The report of evaluations: what it says, what it keeps apart, and that it stands alone."""

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from vlmdistill.cli.report import report as verb
from vlmdistill.pipelines.evaluations import gather
from vlmdistill.pipelines.report import make
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError

ANSWER = [("The", False), (" board\nis", True), (" blue", False), (" & large", True), (".", False)]
VOID = {"meta", "link", "img", "br"}
NONE = {"identical": 0, "near_tie": 0, "different": 0}


def sample(key: str = "k0", **changes: Any) -> dict[str, Any]:
    pieces = [{"text": text, "drafted": drafted} for text, drafted in ANSWER]
    return {"key": key, "prompt": f"What is {key}?", "files": [], "pieces": pieces, "tau": 3.1, **changes}


def measured(temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    checked = {**NONE, "identical": 24} if temperature == 0 else NONE
    return {
        "temperature": temperature,
        "tau": 3.25,
        "accepted": 2.27,
        "alpha": [0.9, 0.8, 0.75],
        "speedup": 1.5,
        "decode_speedup": 1.7,
        "prefill_share": 0.1,
        "tokens": 2400,
        "plain_tokens": 2400,
        "calls": 740,
        "seconds": 10.0,
        "plain_seconds": 15.0,
        "tokens_per_second": 240.0,
        "plain_tokens_per_second": 160.0,
        "lossless": checked,
        "plain_lossless": checked,
        "samples": [sample("k0"), sample("k1")],
        **changes,
    }


def evaluation(stem: str = "sparrow", /, **changes: Any) -> dict[str, Any]:
    history = [
        {"stage": "text", "step": 100 * (1 + n), "held_out_agreement": [0.5 + n / 10, 0.4]} for n in range(3)
    ]
    return {
        "format": 1,
        "target": {"name": "demo", "family": "qwen2_5_vl", "fingerprint": "f00d", "hidden_size": 128},
        "hardware": "CPU Some Processor",
        "dtype": "float32",
        "threads": 1,
        "prompts": {"count": 24, "hash": "beef"},
        "max_new_tokens": 256,
        "seed": 0,
        "name": stem,
        "drafter": stem,
        "tree": "chain-4",
        "parameters": 361984,
        "training": {"steps": 300, "samples": 4200, "view": None, "seed": 0, "history": history},
        "config": {"stages": [{"name": "text", "epochs": 2.5, "hops": 1, "losses": {}}]},
        "measured": "2026-01-02 03:04",
        "temperatures": [measured(0.0), measured(1.0)],
        **changes,
    }


Save = Callable[..., Path]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.of("demo", tmp_path / "runs")


@pytest.fixture
def save(workspace: Workspace) -> Save:
    """Writes an evaluation into the workspace."""

    def write(stem: str = "sparrow", /, **changes: Any) -> Path:
        workspace.reports.mkdir(parents=True, exist_ok=True)
        file = workspace.reports / f"{stem}.json"
        file.write_text(json.dumps(evaluation(stem, **changes), indent=1))
        return file

    return write


class Page(HTMLParser):
    """A page taken apart: its elements, and the text within each kind; unbalanced tags fail."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))

    @property
    def text(self) -> str:
        """All that is read, on one line."""
        return " ".join(" ".join(data for tags, data in self.texts if "style" not in tags).split())

    def attributes(self, name: str, tag: str | None = None) -> list[str]:
        return [attrs[name] for kind, attrs in self.elements if name in attrs and tag in (None, kind)]


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(verb)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_page_tells_what_was_measured(workspace: Workspace, save: Save) -> None:
    save("sparrow")
    save("eagle2", temperatures=[measured(0.0, speedup=1.2, tau=2.5), measured(1.0, speedup=0.9)])
    page = Page(make(workspace).page)
    assert "sparrow is the fastest: 1.50 times the speed of plain decoding at temperature 0" in page.text
    assert "a tau of 3.25 tokens per call" in page.text
    assert "Every answer at temperature 0 is identical to model.generate on all 24 prompts." in page.text
    assert "Some Processor" in page.text
    assert "do not all compare" not in page.text
    assert "How to read these numbers" in page.text
    for paper in ("ViSpec", "MSD", "Sparrow", "HiViS", "HASS", "SpecFLASH", "SpecVLM"):
        assert paper in page.text
    assert "300 steps on 4,200 samples" in page.text
    drawings = [label for label in page.attributes("aria-label", "svg") if label]
    assert any("eagle2: 1.20 end to end, 1.70 without prefill" in label for label in drawings)
    assert any("sparrow: 90% 80% 75%" in label for label in drawings)
    assert any("token 1: 50% 60% 70%" in label for label in drawings)


def test_page_loads_nothing(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    image = tmp_path / "scene.png"
    Image.new("RGB", (84, 84), "navy").save(image)
    save(temperatures=[measured(samples=[sample(files=[str(image)])])])
    page = Page(make(workspace).page)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "iframe", "object", "embed", "base"})
    for link in [*page.attributes("src"), *page.attributes("href")]:
        assert link.startswith(("data:", "#"))
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r'"data:[^"]*"', "", page.source))
    assert "default-src 'none'" in page.source
    assert str(tmp_path) not in page.source


def test_the_same_target_in_another_folder_compares(workspace: Workspace, save: Save) -> None:
    save("sparrow")
    save("eagle2", target={"name": "/somewhere/demo", "family": "qwen2_5_vl", "fingerprint": "f00d"})
    assert len(gather(workspace)) == 1
    assert "/somewhere" not in make(workspace).page.read_text()


def test_hostile_text_is_only_text(workspace: Workspace, save: Save) -> None:
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>"
    file = f"/nowhere/{evil.replace('/', '')}.png"
    answer = sample(prompt=evil, files=[file], pieces=[{"text": evil, "drafted": True}])
    save(
        "hostile",
        name=evil,
        drafter=evil,
        hardware=evil,
        tree=evil,
        measured=evil,
        target={"name": evil, "family": evil, "fingerprint": evil},
        training={"view": evil, "seed": evil, "history": []},
        config={"stages": [{"name": evil, "epochs": 1, "hops": 1}]},
        temperatures=[measured(samples=[answer])],
    )
    page = Page(make(workspace).page)
    tags = [tag for tag, _ in page.elements]
    assert "script" not in tags
    assert "img" not in tags
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "{{ 7 * 7 }}" in page.text


def test_answers_are_whole_and_drafted_text_is_marked(workspace: Workspace, save: Save) -> None:
    save(temperatures=[measured(samples=[sample()])])
    page = Page(make(workspace).page)
    answer = [(tags[-1], text) for tags, text in page.texts if "article" in tags and "p" in tags]
    assert "".join(text for _, text in answer) == "What is k0?" + "".join(text for text, _ in ANSWER)
    assert [text for tag, text in answer if tag == "mark"] == ["board\nis", "& large"]


def test_answers_stand_beside_their_prompt(workspace: Workspace, save: Save) -> None:
    save("sparrow")
    save("eagle2")
    page = Page(make(workspace).page)
    assert page.text.count("What is k0?") == 1
    assert page.text.count("board is") == 2 * 2 * 2  # prompts, drafters, temperatures


def test_images_are_small_copies(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    noise = Image.effect_noise((1200, 800), 60).convert("RGB")
    noise.save(tmp_path / "photo.jpg")
    Image.new("RGBA", (84, 42), (0, 0, 255, 128)).save(tmp_path / "drawing.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    names = ("photo.jpg", "drawing.png", "broken.png", "gone.png", "clip.mp4")
    save(temperatures=[measured(samples=[sample(files=[str(tmp_path / name) for name in names])])])
    page = Page(make(workspace).page)
    sizes = []
    for uri in page.attributes("src", "img"):
        data = base64.b64decode(uri.partition(",")[2])
        sizes.append((Image.open(io.BytesIO(data)).size, uri.partition(";")[0]))
    assert sizes == [((320, 213), "data:image/jpeg"), ((84, 42), "data:image/png")]
    assert all(page.attributes("alt", "img"))
    assert "The image broken.png" in page.text
    assert "The image gone.png" in page.text
    assert "Video: clip.mp4" in page.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompts": {"count": 8, "hash": "cafe"}}, "prompts"),
        ({"max_new_tokens": 64}, "max new tokens"),
        ({"hardware": "Other"}, "hardware"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"threads": 2}, "threads"),
        ({"target": {"name": "demo", "family": "qwen2_5_vl", "fingerprint": "beef"}}, "target"),
    ],
)
def test_what_does_not_compare_stands_apart(
    workspace: Workspace, save: Save, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    save("sparrow")
    save("eagle2", measured="2026-05-05 05:05", **change)
    save("hivis")
    groups = gather(workspace)
    assert [[row["name"] for row in group.rows[:2]] for group in groups] == [
        ["eagle2", "eagle2"],
        ["hivis", "sparrow"],
    ]
    page = Page(make(workspace).page)
    assert f"Between groups differ: {told}." in page.text
    assert page.text.count("is the fastest") == 2
    printed = run("--runs", str(tmp_path / "runs"))
    assert f"2 groups that do not compare; they differ in {told}" in printed
    facts = json.loads(run("--runs", str(tmp_path / "runs"), "--json"))
    assert facts["differing"] == [told]
    assert {(row["name"], row["group"]) for row in facts["rows"]} == {
        ("eagle2", 1),
        ("hivis", 2),
        ("sparrow", 2),
    }


def test_prints_the_table(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    save("sparrow")
    save("eagle2", temperatures=[measured(speedup=1.625), measured(1.0)])
    lines = run("--runs", str(tmp_path / "runs")).splitlines()
    assert lines[0].startswith("target demo (f00d), hardware CPU Some Processor")
    assert lines[1].split()[:4] == ["drafter", "T", "tau", "accepted"]
    assert [line.split()[:5] for line in lines[2:4]] == [
        ["eagle2", "0", "3.25", "2.27", "1.62"],
        ["sparrow", "0", "3.25", "2.27", "1.50"],
    ]
    assert "24/24 identical" in lines[2]
    assert lines[-1] == f"page  {workspace.reports / 'index.html'}"


def test_json_rows_hold_every_figure(save: Save, tmp_path: Path) -> None:
    save()
    elsewhere = tmp_path / "page.html"
    facts = json.loads(run("--runs", str(tmp_path / "runs"), "--json", "--out", str(elsewhere)))
    assert facts["page"] == str(elsewhere)
    assert elsewhere.is_file()
    row = facts["rows"][0]
    assert "samples" not in row
    assert {name: row[name] for name in ("name", "temperature", "tau", "calls", "tree")} == {
        "name": "sparrow",
        "temperature": 0,
        "tau": 3.25,
        "calls": 740,
        "tree": "chain-4",
    }
    assert row["conditions"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("own", "plain", "level", "told"),
    [
        ({"identical": 3}, {"identical": 3}, "lossless", "on all 3 prompts"),
        ({"identical": 1}, {"identical": 1}, "lossless", "on the one prompt"),
        (
            {"identical": 2, "near_tie": 1},
            {"identical": 3},
            "near-ties",
            "the rounding of float32 (sparrow on 1 of 3",
        ),
        (
            {"identical": 1, "near_tie": 1, "different": 1},
            {"identical": 3},
            "broken",
            "NOT LOSSLESS: at temperature 0, answers differ from those of model.generate (sparrow on 1 of 3",
        ),
        ({"identical": 3}, {"identical": 1, "different": 2}, "broken", "(plain decoding on 2 of 3 prompts)"),
    ],
)
def test_verdict(
    workspace: Workspace, save: Save, own: dict[str, int], plain: dict[str, int], level: str, told: str
) -> None:
    save(temperatures=[measured(lossless=NONE | own, plain_lossless=NONE | plain)])
    verdict = gather(workspace)[0].verdict
    assert verdict.level == level
    assert told in verdict.text
    page = Page(make(workspace).page)
    assert told in page.text
    assert ("alert" in page.attributes("role")) == (level == "broken")


def test_what_was_not_checked_is_said(workspace: Workspace, save: Save) -> None:
    save("sparrow", temperatures=[measured(1.0)])
    assert gather(workspace)[0].verdict.level == "unchecked"
    save("eagle2")
    assert gather(workspace)[0].verdict.text.endswith("all 24 prompts. Not checked: sparrow.")


def test_a_drafter_that_helps_nobody_is_said_to_be_slower(workspace: Workspace, save: Save) -> None:
    bare = measured(alpha=[], speedup=0.0, decode_speedup=0.0, tau=0, calls=0, samples=[])
    save(training={}, config={}, temperatures=[bare])
    page = Page(make(workspace).page)
    assert "No drafter is faster than plain decoding at temperature 0" in page.text
    assert "No drafts were verified." in page.text
    assert "Nothing was held out to measure agreement on." in page.text


def test_extreme_numbers_and_half_characters(workspace: Workspace, save: Save) -> None:
    extreme = measured(alpha=[7, 0], speedup=9e14, samples=[sample(prompt="half \ud800")])
    save(temperatures=[extreme])
    page = Page(make(workspace).page)
    assert "half ?" in page.text
    assert "nan" not in page.source


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not readable JSON"),
        (b'{"format": 1, "name": "spa', "is not readable JSON"),
        (b"\xff\xfe", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"[1, 2]", "is not an evaluation of format 1, its format is 'none'"),
        (b'{"name": "a tokenizer"}', "its format is 'none'"),
        (json.dumps({**evaluation(), "format": 2}).encode(), "its format is 2"),
        (b'{"format": 1}', "it has no name"),
        (json.dumps(evaluation(threads="one")).encode(), "threads is not a number"),
        (json.dumps(evaluation(target={"name": "demo"})).encode(), "target has no family"),
        (json.dumps(evaluation(name=None)).encode(), "name is not a text"),
        (json.dumps(evaluation(training=[])).encode(), "training is not an object"),
        (json.dumps(evaluation(temperatures={})).encode(), "temperatures is not a list"),
        (json.dumps(evaluation(temperatures=[])).encode(), "holds no measurements"),
        (
            json.dumps(evaluation(temperatures=[measured(tau=float("nan"))])).encode(),
            "temperatures[0].tau is not a number",
        ),
        (
            json.dumps(evaluation(temperatures=[measured(alpha=[0.5, -1])])).encode(),
            "temperatures[0].alpha[1] is not a number",
        ),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value.replace(" ", "-"),
)
def test_a_file_that_is_no_evaluation_is_one_line(
    workspace: Workspace, save: Save, content: bytes, told: str
) -> None:
    save("good")
    before = make(workspace).page.read_bytes()
    bad = workspace.reports / "bad.json"
    bad.write_bytes(content)
    with pytest.raises(DataError) as caught:
        make(workspace)
    line = str(caught.value)
    assert told in line
    assert str(bad) in line
    assert "vlmdistill eval" in line
    assert "\n" not in line
    assert (workspace.reports / "index.html").read_bytes() == before


def test_nothing_measured_says_which_command_to_run(workspace: Workspace) -> None:
    with pytest.raises(DataError, match=r"`vlmdistill eval DRAFTER\.\.\. --model demo`"):
        make(workspace)
    assert not workspace.root.exists()
