"""Features: every kept answer is in the store once, from this target, with what the drafters need."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines import answers, fields
from vlmdistill.pipelines.answers import Sampling
from vlmdistill.pipelines.features import Capturer, Item, Summary, Unit, capture
from vlmdistill.pipelines.filters import Filters
from vlmdistill.pipelines.prompts import Prompt, read
from vlmdistill.pipelines.responses import checkpoint as checkpoint_of
from vlmdistill.pipelines.responses import respond
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.stores.errors import DataError, StoreError
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info

ANY = Filters(min_words=0)


@dataclass(frozen=True)
class Given:
    """A target with prompts that it has answered."""

    model: str
    file: Path
    answers: Path

    @property
    def prompts(self) -> list[Prompt]:
        return read(self.file)

    @property
    def kept(self) -> set[str]:
        return {answer.key for answer in answers.read(self.answers)}


@pytest.fixture(scope="module")
def given(
    ray: int, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]
) -> Given:
    folder = tmp_path_factory.mktemp("features")
    made = Given(str(checkpoint("qwen2_5_vl", layers=2)), prompts_file, folder / "responses")
    respond(made.prompts, made.answers, made.model, Sampling(max_new_tokens=10), ANY, workers=1)
    assert len(made.kept) >= 8
    return made


@pytest.fixture(scope="module")
def stored(given: Given) -> Path:
    """The features of all kept answers for sparrow, in several shards."""
    store = given.answers.parent / "stored"
    summary = run(given, store, ["sparrow"], dtype="float32", budget=64, shard_bytes=20_000)
    assert summary.features == ("hidden.span", "hidden.text", "layer1.visual")
    assert summary.captured == summary.samples == len(given.kept)
    return store


def run(given: Given, store: Path, drafters: list[str] | None = None, **options: Any) -> Summary:
    return capture(given.prompts, given.answers, str(store), given.model, drafters, workers=1, **options)


def test_the_store_holds_every_kept_answer_with_what_the_drafters_need(given: Given, stored: Path) -> None:
    store = Store.open(stored)
    assert store.keys() == given.kept
    assert len(set(store.index["unit"])) > 1
    by_key = {prompt.key: prompt for prompt in given.prompts}
    for answer in answers.read(given.answers):
        sample = store.read(answer.key)
        assert sample.ids_T[sample.response_T].tolist() == answer.ids.tolist()
        assert len(sample.ids_T) + sample.visual_tokens == answer.prompt_tokens + len(answer.ids)
        assert len(sample.spans) == len(by_key[answer.key].files)
        assert sample.features[Feature("hidden", "text")].shape == (len(sample.ids_T), tiny.HIDDEN)
        assert (sample.meta["split"], sample.meta["dataset"]) == (by_key[answer.key].split, "mix")


def test_a_sample_knows_what_it_was_shown(given: Given, stored: Path) -> None:
    store, counts = Store.open(stored), set()
    for prompt in given.prompts:
        if prompt.key not in given.kept:
            continue
        meta = store.read(prompt.key).meta
        media = json.loads(str(meta["media"]))
        assert [one.get("image") or one["video"] for one in media] == prompt.files
        counts.add((meta["images"], meta["videos"]))
        assert meta["frames"] == sum(len(one.get("seconds", ())) for one in media)
        for one in media:
            if "video" in one:  # ten frames a second; two are shown, four at least
                total = 2 * int(Path(one["video"]).stem)
                assert (one["of"], one["fps"]) == (total, 10.0)
                assert len(one["seconds"]) == 4
                assert one["seconds"][1] == int(total / 4) / 10
    assert counts == {(0, 0), (1, 0), (0, 1)}


def test_a_rerun_captures_only_what_is_missing(given: Given, tmp_path: Path) -> None:
    some = given.prompts[:4]
    first = capture(some, given.answers, str(tmp_path / "store"), given.model, ["eagle2"], workers=1)
    assert first.captured == len(given.kept & {prompt.key for prompt in some})
    second = run(given, tmp_path / "store", ["eagle2"])
    assert second.captured == len(given.kept) - first.captured
    third = run(given, tmp_path / "store")
    assert (third.captured, third.samples) == (0, len(given.kept))


def test_answers_or_a_store_of_another_target_are_refused_by_name(
    given: Given, stored: Path, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    before = Store.open(stored).keys()
    other = str(checkpoint("qwen2_5_vl", layers=2, seed=1))
    with pytest.raises(DataError, match="was made with checkpoint"):
        capture(given.prompts, given.answers, str(stored), other)
    theirs = shutil.copytree(given.answers, tmp_path / "theirs")
    settings = json.loads((theirs / answers.SETTINGS).read_text())
    (theirs / answers.SETTINGS).write_text(json.dumps({**settings, "checkpoint": str(checkpoint_of(other))}))
    with pytest.raises(StoreError, match=r"of another target \(weights_hash"):
        capture(given.prompts, theirs, str(stored), other)
    assert Store.open(stored).keys() == before


def test_fields_are_kept_as_the_command_line_asks(
    given: Given, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "store")
    command = ["features", "-m", given.model, "--prompts", str(given.file), "--responses", str(given.answers)]
    command += ["--store", place, "--for", "sparrow", "--dtype", "float32", "--workers", "1", "--json"]
    ways = ["--encoding", "hidden.text=int8", "--encoding", "layer1.visual=zstd"]

    assert main([*command, "--encoding", "layer0.visual=int8"]) == 1
    said = "--encoding layer0.visual=int8: captured are only hidden.span, hidden.text, layer1.visual"
    assert said in capsys.readouterr().err
    assert main([*command, *ways]) == 0
    held, raw = Store.open(place), Store.open(stored)
    assert held.keys() == given.kept
    told = info(held)["fields"]
    assert {name: about.get("encoding") for name, about in told.items()} == {
        "tokens": None,
        "hidden.span": "raw",
        "hidden.text": "int8",
        "layer1.visual": "zstd",
    }
    assert 0 < told["hidden.text"]["relative_error"] < 0.02
    assert told["hidden.text"]["bytes"] < info(raw)["fields"]["hidden.text"]["bytes"]
    for key in given.kept:
        mine, theirs = held.read(key).features, raw.read(key).features
        for feature in map(Feature.parse, ("layer1.visual", "hidden.span")):
            np.testing.assert_allclose(mine[feature], theirs[feature], atol=1e-5)

    capsys.readouterr()
    assert main([*command, *ways[:2]]) == main(command) == 0  # named again or not: the store is what it is
    assert main([*command, "--encoding", "hidden.text=raw"]) == 1
    assert f"the store {place} keeps hidden.text as int8, not raw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["hidden.text"], r"--encoding hidden.text: write FIELD=raw\|zstd\|int8"),
        (["hidden.text=zip"], "--encoding hidden.text=zip: write FIELD="),
        (["hiden.text=zstd"], "'hiden.text' is not a feature"),
        (["hidden.text=zstd", "hidden.text=int8"], "gives hidden.text as zstd and as int8"),
    ],
)
def test_an_encoding_that_is_none_is_told_what_to_write(texts: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        fields.encodings(texts, str(tmp_path))


def test_states_of_a_target_in_another_dtype_are_not_mixed_in(given: Given, tmp_path: Path) -> None:
    half, store = Options(dtype="bfloat16"), str(tmp_path / "store")
    capture(given.prompts[:4], given.answers, store, given.model, ["sparrow"], workers=1)
    with pytest.raises(StoreError, match="ran in float32, and this one runs in bfloat16: give --target-"):
        run(given, tmp_path / "store", ["sparrow"], how=half)
    theirs = shutil.copytree(given.answers, tmp_path / "theirs")
    next(theirs.glob("part-*")).unlink()
    with pytest.raises(DataError, match="was made with target_dtype float32, not bfloat16"):
        respond(given.prompts, theirs, given.model, Sampling(max_new_tokens=10), ANY, workers=1, how=half)


def test_a_store_without_what_a_drafter_needs_is_refused_by_name(given: Given, stored: Path) -> None:
    with pytest.raises(StoreError, match=r"lacks .*hidden\.visual.*, which eagle2 needs"):
        run(given, stored, ["eagle2"])


def test_an_answer_whose_prompt_has_changed_is_told_and_not_stored(given: Given, tmp_path: Path) -> None:
    by_key = {prompt.key: prompt for prompt in given.prompts}
    first, second = (Item(by_key[answer.key], answer) for answer in list(answers.read(given.answers))[:2])
    words = [{"role": "user", "content": [{"type": "text", "text": "Quite another question than before"}]}]
    changed = Item(dataclasses.replace(first.prompt, messages=words), first.answer)
    with closing(Capturer(given.model, str(tmp_path / "store"), ["sparrow"], "bfloat16", "", 1024)) as worker:
        result = worker.work(Unit((changed, second), "unit"))
    assert list(result.failed) == [first.prompt.key]
    assert "when it was answered" in result.failed[first.prompt.key]
    assert Store.open(tmp_path / "store").keys() == {second.prompt.key}


def test_without_answers_the_error_says_so(given: Given, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no kept answer to any of the 12 prompts"):
        capture(given.prompts, tmp_path / "nothing", str(tmp_path / "store"), given.model)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("names", "words"), [("sparrow,foo", "no drafter 'foo'"), (" , ", "names no drafter")]
)
def test_unknown_drafters_are_named(names: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fields.drafters(names)


RUN = """
import sys
from pathlib import Path
from vlmdistill.pipelines import features, prompts
features.capture(
    prompts.read(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], sys.argv[4], shard_bytes=1, workers=1
)
"""


def test_killed_at_any_moment_every_sample_is_stored_once(given: Given, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-c", RUN, str(given.file), str(given.answers), str(store), given.model]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list(store.glob("commits/*"))) < 3 and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert Store.open(store).keys() < given.kept
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    index = Store.open(store).index
    assert sorted(index["key"]) == sorted(given.kept)
    assert len(list(store.glob("commits/*"))) == len(given.kept)
