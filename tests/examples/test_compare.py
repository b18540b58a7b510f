"""The example that compares two methods over seeds."""

from pathlib import Path

import pytest

from examples.compare import compare
from tests.pipelines.bench.made_up import newest
from vlmdistill.pipelines.bench.statistics import figures

pytestmark = pytest.mark.slow


def test_two_methods_are_compared_on_the_same_prompts(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", "steps=2", "--set", "batch_tokens=512", "--limit", "2"]
    assert (
        compare(["sparrow", "text_only", "--seeds", "1", "--runs", str(runs), *few])
        == 0
    )
    taus = []
    for name in ("sparrow-0", "text_only-0"):
        evaluation = newest(runs / "demo-small" / "reports", name)
        assert evaluation.training.seed == 0
        taus.append(figures(evaluation.temperatures[0]).tau)
    printed = capsys.readouterr().out.splitlines()
    (line,) = [
        line for line in printed if line.startswith("tau, sparrow minus text_only")
    ]
    assert f"{taus[0] - taus[1]:+.2f} (too few seeds)" in line


@pytest.mark.parametrize(
    "words", [["sparrow", "sparrow"], ["sparrow", "msd", "--seed", "3"]]
)
def test_what_cannot_be_compared_is_wrong_usage(
    words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stop:
        compare([*words, "--runs", str(tmp_path)])
    assert stop.value.code == 2
    assert not list(tmp_path.iterdir())


def test_a_method_that_is_unknown_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(["sparrow", "sparow", "--runs", str(tmp_path)]) != 0
    assert "there is no drafter 'sparow'" in capsys.readouterr().err
