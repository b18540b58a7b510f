"""Responses: every prompt gets one, also after a kill; settings are not mixed; every drop has a reason."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.thorough import THOROUGH
from vlmdistill.pipelines.cluster.pool import WorkerOptions, weight_bytes
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read
from vlmdistill.pipelines.data.responses import dataset, responder
from vlmdistill.pipelines.data.responses.dataset import ResponseRow, SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters, repetition
from vlmdistill.pipelines.data.responses.responder import Responder, ResponseTask, plan
from vlmdistill.pipelines.data.responses.responder import respond as respond_by_any
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.views.text_stats import words_of

pytestmark = pytest.mark.slow

BRIEF = SamplingSettings(max_new_tokens=12)
ANY = Filters(min_words=0)
respond = partial(respond_by_any, options=WorkerOptions(workers=0))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("qwen2_5_vl", layers=1))


@pytest.fixture(scope="module")
def prompts(prompts_file: Path) -> list[Prompt]:
    return read(prompts_file)


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory, model: str, prompts: list[Prompt]
) -> Path:
    """A folder with the responses to the first five prompts; copy it before changing it."""
    out = tmp_path_factory.mktemp("begun") / "responses"
    summary = respond(prompts[:5], out, model, BRIEF, ANY, batch=2, task_size=4)
    assert (summary.prompts, summary.generated, summary.failed) == (5, 5, {})
    return out


def texts(out: Path) -> dict[str, str]:
    """The text of each response, by its key."""
    return {row.key: row.text for row in dataset.read(out, kept=False)}


def keys(out: Path) -> Counter[str]:
    return Counter(dataset.table(out, ["key"])["key"].to_pylist())


@pytest.mark.parametrize(
    ("text", "ids", "reason"),
    [
        ("", [], "empty"),
        ("\n ", [7], "empty"),
        ("one two three four five", range(5), "short"),
        ("one two three four five six", range(6), ""),
        ("round and round and round and round", [1, 2, 3] * 40, "repetition"),
        ("some words are said again, as one does", [*range(60), *range(20)], ""),
        ("图中是一只红色的苹果。放在桌子上。", range(9), ""),
        ("苹果。", range(3), "short"),
        ("赤いリンゴがテーブルの上にあります。", range(9), ""),
        ("แอปเปิลสีแดงวางอยู่บนโต๊ะไม้", range(20), ""),
        ("ใช่", range(2), "short"),
        ("a very long tale of many more words", range(100), "over length"),
    ],
)
def test_filters_say_why(text: str, ids: Any, reason: str) -> None:
    limit = 130 if reason != "over length" else 99
    assert (
        Filters().reason(
            len(words_of(text)), repetition(list(ids)), 5 + len(ids), limit
        )
        == reason
    )


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        (SamplingSettings(temperature=-1), "--temperature -1"),
        (SamplingSettings(temperature=math.nan), "--temperature nan"),
        (SamplingSettings(temperature=math.inf), "--temperature inf"),
        (SamplingSettings(top_p=0), "--top-p 0"),
        (SamplingSettings(max_new_tokens=0), "--max-new-tokens 0"),
        (Filters(min_words=-1), "--min-words -1"),
        (Filters(max_repetition=0), "--max-repetition 0"),
        (Filters(max_length=0), "--max-length 0"),
    ],
)
def test_a_setting_out_of_range_is_named(
    settings: SamplingSettings | Filters, option: str
) -> None:
    with pytest.raises(DataError, match=option):
        settings.check()


def test_a_plan_holds_every_prompt_once_and_is_the_same_in_any_order(
    prompts: list[Prompt],
) -> None:
    tasks = list(plan(prompts, 5, seed=3))
    assert sorted(prompt.key for task in tasks for prompt in task.prompts) == sorted(
        p.key for p in prompts
    )
    shuffled = random.Random(0).sample(prompts, len(prompts))
    assert list(plan(shuffled, 5, seed=3)) == tasks
    assert len({task.seed for task in tasks}) == len(tasks)
    assert [task.seed for task in plan(prompts, 5, seed=4)] != [
        task.seed for task in tasks
    ]


def test_a_run_does_what_is_missing_and_only_that(
    tmp_path: Path, begun: Path, model: str, prompts: list[Prompt]
) -> None:
    out = shutil.copytree(begun, tmp_path / "responses")
    parts = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    second = respond(prompts, out, model, BRIEF, ANY, batch=2, task_size=4)
    assert second.generated == 7
    assert keys(out) == Counter(prompt.key for prompt in prompts)
    assert {name: (out / name).stat().st_mtime_ns for name in parts} == parts
    third = respond(prompts, out, model, BRIEF, ANY)
    assert third.generated == 0
    assert third.kept + third.dropped.total() == len(prompts)
    fingerprint = json.loads((out / dataset.SETTINGS).read_text())["target"]
    for response in dataset.read(out, kept=False):
        assert len(response.ids) <= 12
        assert response.finish == "stop" or len(response.ids) == 12
        assert (response.temperature, response.max_new_tokens) == (1.0, 12)
        assert response.keep == (not response.reason)
        assert response.prompt_tokens > response.visual_tokens >= 0
        assert response.target == fingerprint


def test_other_settings_or_another_target_are_refused_by_name(
    begun: Path,
    model: str,
    prompts: list[Prompt],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "PACKED", 1)  # and nothing is packed
    before = sorted(begun.iterdir())
    with pytest.raises(DataError, match=r"temperature 1\.0, not 0\.5"):
        respond(
            prompts,
            begun,
            model,
            SamplingSettings(max_new_tokens=12, temperature=0.5),
            ANY,
        )
    with pytest.raises(DataError, match="min_words 0, not 6"):
        respond(prompts, begun, model, BRIEF, Filters())
    with pytest.raises(DataError, match="checkpoint"):
        respond(
            prompts, begun, str(checkpoint("qwen2_5_vl", layers=1, seed=1)), BRIEF, ANY
        )
    assert sorted(begun.iterdir()) == before


def test_two_runs_in_one_folder_are_refused(
    begun: Path, model: str, prompts: list[Prompt]
) -> None:
    with only_writer(begun), pytest.raises(DataError, match=str(begun)):
        respond(prompts, begun, model, BRIEF, ANY)


def test_the_same_seed_gives_the_same_responses(
    model: str, prompts: list[Prompt]
) -> None:
    def generated(seed: int) -> dict[str, list[int]]:
        worker = Responder(
            model, SamplingSettings(max_new_tokens=8, seed=seed), ANY, batch=2
        )
        (task,) = plan(prompts[:4], 4, seed)
        return {row.key: list(row.ids) for row in worker.work(task).rows}

    assert generated(5) == generated(5) != generated(6)


def test_a_worker_hands_over_what_has_ended_and_goes_on_with_the_rest(
    model: str, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = plan(prompts[:6], 6, 0)
    whole = Responder(model, BRIEF, ANY, batch=2).work(task)
    assert not whole.left
    monkeypatch.setattr(responder, "PART_SECONDS", 0.0)
    worker = Responder(model, BRIEF, ANY, batch=2)
    rows, left = list[ResponseRow](), task
    while left.prompts:
        part = worker.work(left)
        assert len(part.rows) == 1
        rows += part.rows
        left = left.only(part.left)
    assert rows == whole.rows


def test_a_run_that_is_stopped_in_a_task_keeps_what_has_ended(
    tmp_path: Path,
    model: str,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responder, "PART_SECONDS", 0.0)
    out, reports = tmp_path / "responses", list[int]()

    def stop(done: int, total: int, note: str = "") -> None:
        reports.append(done)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        respond(prompts, out, model, BRIEF, ANY, batch=4, task_size=12, report=stop)
    assert reports == [0, 1, 2, 3, 4, 5]
    begun = texts(out)
    assert len(begun) == 5
    respond(prompts, out, model, BRIEF, ANY, batch=4, task_size=12)
    assert keys(out) == Counter(prompt.key for prompt in prompts)
    assert begun.items() <= texts(out).items()


def test_dropped_responses_are_kept_with_their_reason(
    model: str, prompts: list[Prompt], tmp_path: Path
) -> None:
    worker = Responder(
        model, SamplingSettings(max_new_tokens=4), Filters(min_words=50), batch=2
    )
    (task,) = plan(prompts[:3], 4, 0)
    dataset.write_part(tmp_path, task.name, worker.work(task).rows)
    assert list(dataset.read(tmp_path)) == []
    dropped = list(dataset.read(tmp_path, kept=False))
    assert {row.reason for row in dropped} <= {"short", "empty"}
    assert (
        {row.key for row in dropped}
        == dataset.keys(tmp_path)
        == {p.key for p in prompts[:3]}
    )


def test_a_prompt_too_long_for_the_target_is_dropped_with_its_reason(
    model: str, prompts: list[Prompt]
) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "word " * 1000}]}]
    endless = dataclasses.replace(prompts[0], key="endless", messages=text)
    (row,) = (
        Responder(model, BRIEF, ANY, batch=2).work(ResponseTask.of([endless], 0)).rows
    )
    assert (row.keep, row.reason) == (False, "refused")
    assert "1024" in row.detail


def test_a_prompt_over_the_length_is_not_generated_and_one_too_large_fails_alone(
    model: str, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    say = [
        {"role": "user", "content": [{"type": "text", "text": "word " * number}]}
        for number in (90, 60)
    ]
    long, large = (
        dataclasses.replace(prompts[0], key=str(at), messages=[one])
        for at, one in enumerate(say)
    )
    worker = Responder(model, BRIEF, ANY, batch=8)
    size = worker.target.encode(large.messages).length
    worker.limit = size + 1
    run, asked = worker.target._generate, list[int]()

    def tight(part: Any, *more: Any) -> Any:
        asked.extend(prompt.length for prompt in part)
        if any(prompt.length == size for prompt in part):
            raise torch.OutOfMemoryError
        return run(part, *more)

    monkeypatch.setattr(worker.target, "_generate", tight)
    result = worker.work(ResponseTask.of([prompts[0], long, large, prompts[1]], 0))
    assert list(result.failed) == [large.key]
    rows = {row.key: row for row in result.rows}
    assert rows.keys() == {prompts[0].key, prompts[1].key, long.key}
    assert (rows[long.key].reason, rows[long.key].prompt_tokens > size) == (
        "over length",
        True,
    )
    assert max(asked) == size


def test_a_prompt_without_its_image_is_listed_and_retried(
    tmp_path: Path, model: str
) -> None:
    tiny.picture(28, 28).save(tmp_path / "1.png")
    row = {
        "image": "1.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}],
    }
    other = {"conversations": [{"from": "human", "value": "Hello"}]}
    (tmp_path / "mix.json").write_text(json.dumps([row, other]))
    import_prompts([str(tmp_path / "mix.json")], tmp_path / "prompts.parquet")
    asked, out = read(tmp_path / "prompts.parquet"), tmp_path / "responses"
    (tmp_path / "1.png").rename(tmp_path / "away.png")
    for generated in (1, 0):  # the other response is kept
        if not generated:  # an image, but another one
            tiny.picture(28, 28, 1).save(tmp_path / "1.png")
        summary = respond(asked, out, model, BRIEF, ANY)
        assert (summary.generated, list(summary.failed)) == (generated, [asked[0].key])
    (entry,) = map(json.loads, (out / dataset.FAILED).read_text().splitlines())
    assert entry["key"] == asked[0].key
    assert "1.png" in entry["reason"]
    (tmp_path / "away.png").rename(tmp_path / "1.png")
    assert respond(asked, out, model, BRIEF, ANY).failed == {}
    assert keys(out) == Counter(prompt.key for prompt in asked)
    assert not (out / dataset.FAILED).exists()


def test_a_passing_problem_is_no_refusal(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-copied image and a machine without PyAV can be fixed, so no response is recorded."""
    tiny.film(tmp_path / "clip.mp4", tiny.clip(4, 28, 28))
    tiny.picture(56, 56).save(tmp_path / "1.png")
    (tmp_path / "frames").mkdir()
    tiny.picture(28, 28).save(tmp_path / "frames" / "0.png")
    shown: list[dict[str, Any]] = [
        {
            "image": "1.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}],
        },
        {
            "video": "clip.mp4",
            "conversations": [{"from": "human", "value": "<video>\nWhat moves?"}],
        },
        {
            "video": "frames",
            "conversations": [{"from": "human", "value": "<video>\nWhat moves?"}],
        },
        {"conversations": [{"from": "human", "value": "Hello"}]},
    ]
    (tmp_path / "mix.json").write_text(json.dumps(shown))
    import_prompts([str(tmp_path / "mix.json")], tmp_path / "prompts.parquet")
    asked, whole = read(tmp_path / "prompts.parquet"), (tmp_path / "1.png").read_bytes()
    worker = Responder(model, BRIEF, ANY, batch=2)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "av", None)
        (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "frames" / "0.png").unlink()
        result = worker.work(ResponseTask.of(asked, 0))
    assert [row.key for row in result.rows] == [asked[3].key]
    failed = [result.failed[prompt.key] for prompt in asked[:3]]
    assert ["1.png" in failed[0], "PyAV" in failed[1], "frames" in failed[2]] == [
        True
    ] * 3
    (tmp_path / "1.png").write_bytes(whole)
    tiny.picture(28, 28).save(tmp_path / "frames" / "0.png")
    assert worker.work(ResponseTask.of(asked, 0)).failed == {}


def test_weights_are_counted_in_the_dtype_in_which_they_are_loaded(model: str) -> None:
    stored = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    half, full = (
        weight_bytes(model, Options(dtype=dtype)) for dtype in ("bfloat16", "float32")
    )
    assert weight_bytes(model, Options()) == stored
    assert 0 < 2 * half == full == pytest.approx(stored, rel=0.1)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=r"part-1\.parquet"):
        dataset.keys(tmp_path)


RUN = """
import sys
from pathlib import Path
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset, quality, responder
from vlmdistill.pipelines.cluster.pool import WorkerOptions
responder.respond(
    prompt_table.read(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3],
    dataset.SamplingSettings(max_new_tokens=12), quality.Filters(min_words=0),
    WorkerOptions(workers=1), batch=1, task_size=1,
)
"""


def test_killed_at_any_moment_every_prompt_gets_one_response(
    tmp_path: Path, model: str, prompts: list[Prompt], prompts_file: Path
) -> None:
    out = tmp_path / "responses"
    command = [sys.executable, "-c", RUN, str(prompts_file), str(out), model]
    dice = random.Random(1)
    for goal in (
        (1, 5) if THOROUGH else (3,)
    ):  # killed after so many parts, at some moment of the next
        run = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while len(list(out.glob("part-*"))) < goal and run.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL  # it had not ended
        assert set(keys(out).values()) == {1}
    respond(prompts, out, model, BRIEF, ANY, batch=1, task_size=1)
    assert keys(out) == Counter(prompt.key for prompt in prompts)
    assert not list(out.glob(".*.tmp"))
