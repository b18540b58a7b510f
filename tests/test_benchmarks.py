"""The benchmark of the store runs on what it makes, and its accounts are whole."""

from pathlib import Path

import pytest

from benchmarks.store import GOALS, measure, samples

pytestmark = pytest.mark.slow


def test_the_store_is_measured_against_the_disk_and_one_file_per_sample(tmp_path: Path) -> None:
    found = measure(3, 16, 2, tmp_path)
    rows = sum(len(sample.ids_T) for sample in samples(3, 16))
    assert (found["samples"], found["bytes"]) == (3, 2 * 16 * rows)
    assert all(one["bytes"] >= found["bytes"] for one in found["rates"].values())
    for ratio in GOALS:
        low, middle, high = found["quartiles of ratios"][ratio]
        assert 0 < low <= middle <= high
