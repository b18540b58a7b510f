"""Benchmarks run on what they make, and their accounts are whole."""

import json
from pathlib import Path

import pytest

from benchmarks import feeder, gpu, serve
from benchmarks.store import GOALS, measure, samples
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.served_records import (
    ServedEvaluation,
    ServedLoad,
    ServerCounts,
    ServerRun,
    TimedRequest,
)
from vlmdistill.pipelines.targets.software import of_this_process

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


def test_the_feeder_is_measured_with_images_and_without() -> None:
    found = list(feeder.costs([1, 3], 4))
    assert [(cost.requests, cost.media) for cost in found] == [
        (count, media) for count in (1, 3) for media in ("two images", "text")
    ]
    assert all(cost.quartiles[1] > 0 for cost in found)


def served(decoding: float, drafts: int, accepted: int) -> ServerRun:
    """Four requests of 20 tokens, all but the first of each drafted."""
    requests = tuple(
        TimedRequest(
            key=str(key),
            tokens=20,
            seconds=1 + decoding,
            first_seconds=1.0,
            finish="stop",
            response="hash",
        )
        for key in range(4)
    )
    counts = ServerCounts(drafts=drafts, accepted=accepted)
    return ServerRun(seconds=16.0, requests=requests, failed=(), counts=counts)


def evaluation(name: str, run: ServerRun, plain: ServerRun | None) -> ServedEvaluation:
    return ServedEvaluation(
        format=records.FORMAT,
        name=name,
        url="http://h",
        model="demo",
        drafter=None,
        baseline=None,
        prompt_set="",
        max_new_tokens=20,
        seed=0,
        measured="",
        software=of_this_process(),
        loads=(ServedLoad(temperature=0, concurrency=4, server=run, baseline=plain),),
    )


def test_the_floor_of_a_served_drafter_is_its_tau_over_the_cycle_of_the_engine() -> (
    None
):
    """A cycle takes 1.5 tokens of the plain server, and the drafter gains two tokens in it."""
    plain = served(1.9, 0, 0)
    drafter = evaluation("hawk", served(1.6, 38, 38), plain)
    head = evaluation("head", served(2.85, 76, 0), None)
    (found,) = serve.gains([drafter], head)
    assert found.tau == pytest.approx(2)
    assert found.floor == pytest.approx(2 / 1.5)
    assert found.decode_speedup == pytest.approx(1.9 / 1.6)
    assert found.row().startswith("| hawk | 4 | 84.2 | 100.0 |")
    (unknown,) = serve.gains([drafter], None)
    assert unknown.floor is None
