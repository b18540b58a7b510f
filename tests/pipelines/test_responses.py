"""Responses: each prompt is answered once, whatever happens; nothing is mixed; every drop has a reason."""

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

from tests import tiny
from vlmdistill.pipelines import answers
from vlmdistill.pipelines.answers import Sampling
from vlmdistill.pipelines.filters import Filters
from vlmdistill.pipelines.prompts import Prompt, import_prompts, read
from vlmdistill.pipelines.responses import Responder, Unit, plan, weights_of
from vlmdistill.pipelines.responses import respond as respond_by_any
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.pipelines.workspace import only_writer
from vlmdistill.stores.errors import DataError

BRIEF = Sampling(max_new_tokens=12)
ANY = Filters(min_words=0)
respond = partial(respond_by_any, workers=1)  # one target loads faster than two


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("qwen2_5_vl", layers=1))


@pytest.fixture(scope="module")
def prompts(prompts_file: Path) -> list[Prompt]:
    return read(prompts_file)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, ray: int, model: str, prompts: list[Prompt]) -> Path:
    """A folder with the answers to the first five prompts; copy it before changing it."""
    out = tmp_path_factory.mktemp("begun") / "responses"
    summary = respond(prompts[:5], out, model, BRIEF, ANY, batch=2, unit=4)
    assert (summary.prompts, summary.answered, summary.failed) == (5, 5, 0)
    return out


def keys(out: Path) -> Counter[str]:
    return Counter(answers.table(out, ["key"])["key"].to_pylist())


@pytest.mark.parametrize(
    ("text", "ids", "verdict"),
    [
        ("", [], "empty"),
        ("\n ", [7], "empty"),
        ("one two three four five", range(5), "short"),
        ("one two three four five six", range(6), ""),
        ("round and round and round and round", [1, 2, 3] * 40, "repetition"),
        ("some words are said again, as one does", [*range(60), *range(20)], ""),
        ("a very long tale of many more words", range(100), "over length"),
    ],
)
def test_filters_say_why(text: str, ids: Any, verdict: str) -> None:
    limit = 130 if verdict != "over length" else 99
    assert Filters().verdict(text, list(ids), 5, limit) == verdict


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Sampling(temperature=-1), "--temperature -1"),
        (Sampling(temperature=math.nan), "--temperature nan"),
        (Sampling(temperature=math.inf), "--temperature inf"),
        (Sampling(top_p=0), "--top-p 0"),
        (Sampling(max_new_tokens=0), "--max-new-tokens 0"),
        (Filters(min_words=-1), "--min-words -1"),
        (Filters(max_repetition=0), "--max-repetition 0"),
        (Filters(max_length=0), "--max-length 0"),
    ],
)
def test_senseless_settings_are_named(settings: Sampling | Filters, words: str) -> None:
    with pytest.raises(DataError, match=words):
        settings.check()


def test_a_plan_holds_every_prompt_once_and_is_the_same_in_any_order(prompts: list[Prompt]) -> None:
    units = plan(prompts, 5, seed=3)
    assert sorted(prompt.key for unit in units for prompt in unit.prompts) == sorted(p.key for p in prompts)
    shuffled = random.Random(0).sample(prompts, len(prompts))
    assert plan(shuffled, 5, seed=3) == units
    assert len({unit.seed for unit in units}) == len(units)
    assert [unit.seed for unit in plan(prompts, 5, seed=4)] != [unit.seed for unit in units]


def test_a_run_does_what_is_missing_and_only_that(
    tmp_path: Path, begun: Path, model: str, prompts: list[Prompt]
) -> None:
    out = shutil.copytree(begun, tmp_path / "responses")
    parts = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    second = respond(prompts, out, model, BRIEF, ANY, batch=2, unit=4)
    assert second.answered == 7
    assert keys(out) == Counter(prompt.key for prompt in prompts)
    assert {name: (out / name).stat().st_mtime_ns for name in parts} == parts
    third = respond(prompts, out, model, BRIEF, ANY)
    assert third.answered == 0
    assert third.kept + third.dropped.total() == len(prompts)
    for answer in answers.read(out, kept=False):
        assert len(answer.ids) <= 12
        assert answer.finish == "stop" or len(answer.ids) == 12
        assert (answer.temperature, answer.max_new_tokens) == (1.0, 12)
        assert answer.keep == (not answer.reason)
        assert answer.prompt_tokens > answer.visual_tokens >= 0
        assert len(answer.target) == 16


def test_other_settings_or_another_target_are_refused_by_name(
    begun: Path, model: str, prompts: list[Prompt], checkpoint: Callable[..., Path]
) -> None:
    before = sorted(begun.iterdir())
    with pytest.raises(DataError, match=r"with temperature 1\.0, not 0\.5"):
        respond(prompts, begun, model, Sampling(max_new_tokens=12, temperature=0.5), ANY)
    with pytest.raises(DataError, match="with min_words 0, not 6"):
        respond(prompts, begun, model, BRIEF, Filters())
    with pytest.raises(DataError, match="with checkpoint"):
        respond(prompts, begun, str(checkpoint("qwen2_5_vl", layers=1, seed=1)), BRIEF, ANY)
    assert sorted(begun.iterdir()) == before


def test_two_runs_in_one_folder_are_refused(begun: Path, model: str, prompts: list[Prompt]) -> None:
    with only_writer(begun), pytest.raises(DataError, match="another run is writing"):
        respond(prompts, begun, model, BRIEF, ANY)


def test_the_same_seed_gives_the_same_answers(model: str, prompts: list[Prompt]) -> None:
    def said(seed: int) -> dict[str, list[int]]:
        worker = Responder(model, Sampling(max_new_tokens=8, seed=seed), ANY, batch=2)
        (unit,) = plan(prompts[:4], 4, seed)
        return {row["key"]: row["ids"] for row in worker.work(unit).rows}

    assert said(5) == said(5) != said(6)


def test_dropped_answers_stay_with_their_reason(model: str, prompts: list[Prompt], tmp_path: Path) -> None:
    worker = Responder(model, Sampling(max_new_tokens=4), Filters(min_words=50), batch=2)
    (unit,) = plan(prompts[:3], 4, 0)
    answers.write_part(tmp_path, unit.name, worker.work(unit).rows)
    assert list(answers.read(tmp_path)) == []
    dropped = list(answers.read(tmp_path, kept=False))
    assert {answer.reason for answer in dropped} <= {"short", "empty"}
    assert {answer.key for answer in dropped} == answers.answered(tmp_path) == {p.key for p in prompts[:3]}


def test_a_prompt_too_long_for_the_target_is_dropped_with_its_reason(
    model: str, prompts: list[Prompt]
) -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "word " * 1000}]}]
    endless = dataclasses.replace(prompts[0], key="endless", messages=text)
    (row,) = Responder(model, BRIEF, ANY, batch=2).work(Unit.of([endless], 0)).rows
    assert (row["keep"], row["reason"]) == (False, "refused")
    assert "the target reads at most 1024" in row["detail"]


def test_a_prompt_whose_image_is_gone_is_told_and_tried_again(tmp_path: Path, ray: int, model: str) -> None:
    tiny.picture(28, 28).save(tmp_path / "1.png")
    row = {"image": "1.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]}
    other = {"conversations": [{"from": "human", "value": "Hello"}]}
    (tmp_path / "mix.json").write_text(json.dumps([row, other]))
    import_prompts([str(tmp_path / "mix.json")], tmp_path / "prompts.parquet")
    asked, out = read(tmp_path / "prompts.parquet"), tmp_path / "responses"
    (tmp_path / "1.png").rename(tmp_path / "away.png")
    for answered in (1, 0):  # what the others said is there to go on with
        summary = respond(asked, out, model, BRIEF, ANY)
        assert (summary.answered, summary.failed) == (answered, 1)
    (entry,) = map(json.loads, (out / answers.FAILED).read_text().splitlines())
    assert entry["key"] == asked[0].key
    assert "1.png does not exist" in entry["reason"]
    (tmp_path / "away.png").rename(tmp_path / "1.png")
    assert respond(asked, out, model, BRIEF, ANY).failed == 0
    assert keys(out) == Counter(prompt.key for prompt in asked)
    assert not (out / answers.FAILED).exists()


def test_what_passes_is_no_refusal(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image half copied and a machine without PyAV may be mended: nothing is written down for good."""
    tiny.film(tmp_path / "clip.mp4", tiny.clip(4, 28, 28))
    tiny.picture(56, 56).save(tmp_path / "1.png")
    (tmp_path / "frames").mkdir()
    tiny.picture(28, 28).save(tmp_path / "frames" / "0.png")
    shown: list[dict[str, Any]] = [
        {"image": "1.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]},
        {"video": "clip.mp4", "conversations": [{"from": "human", "value": "<video>\nWhat moves?"}]},
        {"video": "frames", "conversations": [{"from": "human", "value": "<video>\nWhat moves?"}]},
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
        result = worker.work(Unit.of(asked, 0))
    assert [row["key"] for row in result.rows] == [asked[3].key]
    said = [result.failed[prompt.key] for prompt in asked[:3]]
    assert ["1.png cannot be read" in said[0], "needs PyAV" in said[1], "no frames" in said[2]] == [True] * 3
    (tmp_path / "1.png").write_bytes(whole)
    tiny.picture(28, 28).save(tmp_path / "frames" / "0.png")
    assert worker.work(Unit.of(asked, 0)).failed == {}


def test_weights_are_counted_as_they_are_loaded(model: str) -> None:
    stored = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    assert weights_of(model) == stored
    assert 0 < 2 * weights_of(model, Options(dtype="bfloat16")) == weights_of(model, Options(dtype="float32"))
    assert weights_of(model, Options(dtype="float32")) == pytest.approx(stored, rel=0.1)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=r"part-1\.parquet is damaged"):
        answers.answered(tmp_path)


RUN = """
import sys
from pathlib import Path
from vlmdistill.pipelines import answers, filters, prompts, responses
responses.respond(
    prompts.read(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3],
    answers.Sampling(max_new_tokens=12), filters.Filters(min_words=0), batch=1, unit=1, workers=1,
)
"""


def test_killed_at_any_moment_every_prompt_is_answered_once(
    tmp_path: Path, model: str, prompts: list[Prompt], prompts_file: Path
) -> None:
    out = tmp_path / "responses"
    command = [sys.executable, "-c", RUN, str(prompts_file), str(out), model]
    dice = random.Random(1)
    for goal in (1, 5):  # killed after so many parts, at some moment of the next
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while len(list(out.glob("part-*"))) < goal and run.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert set(keys(out).values()) == {1}
    assert len(keys(out)) < len(prompts)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert keys(out) == Counter(prompt.key for prompt in prompts)
    assert not list(out.glob(".*.tmp"))
