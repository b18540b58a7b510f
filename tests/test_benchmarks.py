"""Benchmarks run on what they make, and their accounts are whole."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.store import GOALS, measure, samples

pytestmark = pytest.mark.slow


def test_the_store_is_measured_against_the_disk_and_one_file_per_sample(
    tmp_path: Path,
) -> None:
    found = measure(3, 16, 2, tmp_path)
    rows = sum(len(sample.ids_T) for sample in samples(3, 16))
    assert (found["samples"], found["bytes"]) == (3, 2 * 16 * rows)
    assert all(one["bytes"] >= found["bytes"] for one in found["rates"].values())
    for ratio in GOALS:
        low, middle, high = found["quartiles of ratios"][ratio]
        assert 0 < low <= middle <= high


def test_the_figures_of_a_gpu_are_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """All parts but those that need a workspace with trained drafters."""
    parts = [name for name in gpu.PARTS if name not in ("exactness", "deepspeed")]
    out = tmp_path / "figures.json"
    options = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--parts",
        ",".join(parts),
        "--out",
        str(out),
    ]
    assert gpu.main(options) == 0
    figures = {
        figure["name"]: figure["value"] for figure in json.loads(out.read_text())
    }
    assert all(f"part {name}, s" in figures for name in parts)
    phases = sum(
        figures[f"chain-3 {phase}, ms"] for phase in ("draft", "verify", "accept")
    )
    assert phases == pytest.approx(figures["chain-3 cycle, ms"], rel=0.5)
    assert figures["eagle2: loss / official"] == pytest.approx(1, abs=1e-3)
