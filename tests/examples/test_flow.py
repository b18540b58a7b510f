"""The whole flow on the embedded target, small, from the command line; and wrong input."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import SMALL
from tests.pipelines.bench.made_up import newest
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.pipelines.bench.statistics import figures
from vlmdistill.pipelines.targets.loading import load

pytestmark = pytest.mark.slow


def command(runs: Path, verb: str, *words: str) -> int:
    return main([verb, *words, "--model", "demo-small", "--runs", str(runs)])


def written(folder: Path) -> dict[Path, int]:
    return {
        file: file.stat().st_mtime_ns
        for file in folder.rglob("*")
        if file.is_file()
        and file.name != "index.html"
        and not file.name.startswith(".")
    }


def test_every_drafter_is_lossless_at_temperature_0(runs: Path) -> None:
    for name in ("sparrow", "eagle2"):
        greedy, sampled = newest(runs / "demo-small" / "reports", name).temperatures
        assert (greedy.temperature, sampled.temperature) == (0, 1)
        for one in greedy.prompts:
            assert one.drafted.check == one.plain.check == "identical"
            assert one.drafted.tokens == one.plain.tokens
        measured = figures(greedy)
        assert measured.lossless.identical == 2
        assert measured.tau == pytest.approx(measured.accepted + 1, abs=0.2)
        assert figures(sampled).calls > 0
    page = (runs / "demo-small" / "reports" / "index.html").read_text()
    assert "sparrow" in page
    assert "data:image/" in page


def test_a_second_run_redoes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(runs)
    assert command(runs, "run", "--drafters", "sparrow,eagle2", *SMALL) == 0
    assert written(runs) == before
    out, err = capsys.readouterr()
    assert "identical" in out
    assert "trained" not in err
    stages = dict(re.findall(r"^(\w+) +(\d+\.\d) min$", err, re.MULTILINE))
    assert [*stages] == ["features", "training", "report", "total"]
    total = float(stages.pop("total"))
    assert sum(map(float, stages.values())) == pytest.approx(total)


def test_a_run_with_a_drafter_that_is_not_lossless_is_status_1(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (runs / "demo-small" / "reports").glob("eagle2.*.json")
    content = file.read_text()
    try:
        file.write_text(content.replace('"check": "identical"', '"check": "different"'))
        assert command(runs, "run", "--drafters", "sparrow,eagle2", *SMALL) == 1
        assert capsys.readouterr().err.splitlines()[-1].endswith(": eagle2")
    finally:
        file.write_text(content)


def test_generate_gives_the_same_response_with_and_without_a_drafter(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (image, *_) = sorted((runs / "evaluation" / "images").glob("*.png"))
    responses = []
    for extra in (
        [],
        ["--drafter", "sparrow"],
        ["--drafter", "eagle2", "--tree", "chain-3"],
    ):
        assert (
            command(
                runs, "generate", "Describe the picture.", "--image", str(image), *extra
            )
            == 0
        )
        out, err = capsys.readouterr()
        responses.append(out)
        assert re.search(r"\d+ tokens in [\d.]+ s", err)
    assert len(set(responses)) == 1
    assert len(responses[0].split()) > 20


def test_an_untrained_drafter_is_lossless_and_takes_more_calls(runs: Path) -> None:
    target = load("demo-small")
    trained = checkpoint.load(
        runs / "demo-small" / "drafters" / "sparrow", target.head, target.info
    )
    torch.manual_seed(1)
    untrained = type(trained)(trained.config, target.info, target.head).eval()
    (image, *_) = sorted((runs / "evaluation" / "images").glob("*.png"))
    question = [
        {"type": "image", "path": str(image)},
        {"type": "text", "text": "Describe the picture."},
    ]
    prompt = target.encode([{"role": "user", "content": question}])
    responses, calls = [], []
    for drafter in (trained, untrained):
        cycles = list(
            speculate(
                target, drafter, prompt, tree=Tree.parse("chain-3"), max_new_tokens=200
            )
        )
        responses.append([token for cycle in cycles for token in cycle.ids])
        calls.append(len(cycles))
    assert responses[0] == responses[1]
    assert calls[1] > calls[0]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["eval", "hawk"], "drafters/hawk"),
        (["train", "hawk"], "'hawk'"),
        (["train", "sparrow", "--set", "ivsb=perhaps"], "'ivsb'"),
        (["train", "sparrow", "--seed", "1"], "--force"),
        (["train", "sparrow", "--recipe", "quick"], "'quick'"),
        (["train", "sparrow", "--view", "long", "--name", "other"], "long"),
        (["eval", "sparrow", "--tree", "wide"], "wide"),
        (["generate", "What?", "--image", "nowhere.png"], "nowhere.png"),
        (["run", "--drafters", "sparrow,hawk"], "'hawk'"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    words: list[str], value: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(runs)
    assert command(runs, *words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert value in errors[0]
    assert "Traceback" not in err
    assert written(runs) == before


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "sparrow", "--limit", "-1"],
        ["eval", "sparrow", "--temperature", "-1"],
        ["run", "--limit", "0"],
        ["fly"],
    ],
)
def test_wrong_usage_is_status_two(words: list[str], runs: Path) -> None:
    assert main(words) == 2


def test_a_corrupted_drafter_is_refused_by_name(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "demo-small" / "drafters" / "eagle2" / "model.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[: len(content) // 3])
        assert command(runs, "eval", "eagle2") == 1
        assert "eagle2/model.safetensors" in capsys.readouterr().err
    finally:
        file.write_bytes(content)


def test_a_drafter_of_another_target_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "demo-small" / "drafters" / "eagle2" / "config.json"
    content = file.read_text()
    try:
        changed = json.loads(content)
        changed["provenance"]["weights_hash"] = "0" * 16
        file.write_text(json.dumps(changed))
        assert command(runs, "eval", "eagle2") == 1
        assert "weights_hash" in capsys.readouterr().err
    finally:
        file.write_text(content)
