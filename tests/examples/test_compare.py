"""The example that compares two methods over seeds."""

from pathlib import Path
from statistics import mean, stdev

import pytest

from examples.compare import compare
from tests.pipelines.bench.made_up import newest
from vlmdistill.pipelines.bench.statistics import figures

pytestmark = pytest.mark.slow


def test_two_methods_are_compared_on_the_same_prompts(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", "steps=1", "--set", "batch_tokens=512", "--limit", "2"]
    words = ["sparrow", "text_only", "--seeds", "2", "--runs", str(runs), *few]
    assert compare(words) == 0
    printed = capsys.readouterr().out.splitlines()
    for method in ("sparrow", "text_only"):
        taus = []
        for seed in (0, 1):
            evaluation = newest(runs / "demo-small" / "reports", f"{method}.s{seed}")
            assert evaluation.training.seed == seed
            taus.append(figures(evaluation.temperatures[0]).tau)
        (row,) = [line for line in printed if line.startswith(f"| {method} | 0 | 2 |")]
        assert f"| {mean(taus):.2f} ± {stdev(taus):.2f} |" in row


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
