"""Features: the store holds every kept response once, from this target, with what the drafters need."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests import tiny
from tests.pipelines.targets.test_thinking import with_switch
from vlmdistill.cli.main import main
from vlmdistill.pipelines import flow
from vlmdistill.pipelines.cluster.engine_environment import VARIABLE
from vlmdistill.pipelines.cluster.pool import WorkerOptions
from vlmdistill.pipelines.data.features import capture_store as capture_store
from vlmdistill.pipelines.data.features import capturer
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.features.capturer import (
    CaptureJob,
    Capturer,
    CaptureSettings,
    CaptureSummary,
    capture,
)
from vlmdistill.pipelines.data.features.shard_plan import CaptureItem, CaptureTask
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.data.responses.quality import Filters
from vlmdistill.pipelines.data.responses.responder import ResponseSummary, respond
from vlmdistill.pipelines.flow import capture_features
from vlmdistill.pipelines.targets.checkpoints.fingerprint import (
    checkpoint as checkpoint_of,
)
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace import rates
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, StoreError, TargetError
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info

pytestmark = pytest.mark.slow

ANY = Filters(min_words=0)
HERE = WorkerOptions(workers=0)


@dataclass(frozen=True)
class Given:
    """A target, prompts and its responses."""

    model: str
    file: Path
    responses: Path

    @property
    def prompts(self) -> list[Prompt]:
        return read(self.file)

    @property
    def kept(self) -> set[str]:
        return {row.key for row in dataset.read(self.responses)}

    def job(self, store: Path, settings: CaptureSettings, tokens: int) -> CaptureJob:
        return CaptureJob(
            workspace=Workspace(self.model, store.parent),
            prompts=self.prompts,
            responses=self.responses,
            store=CaptureStore(store),
            settings=settings,
            workers=HERE,
            sampling=SamplingSettings(max_new_tokens=tokens),
        )


@pytest.fixture(scope="module")
def given(
    prompts_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[..., Path],
) -> Given:
    folder = tmp_path_factory.mktemp("features")
    made = Given(
        str(checkpoint("qwen2_5_vl", layers=2)), prompts_file, folder / "responses"
    )
    respond(
        made.prompts,
        made.responses,
        made.model,
        SamplingSettings(max_new_tokens=10),
        ANY,
        HERE,
    )
    assert len(made.kept) >= 8
    return made


@pytest.fixture(scope="module")
def stored(given: Given) -> Path:
    """The features of all kept responses for sparrow, in several shards."""
    store = given.responses.parent / "stored"
    summary = run(
        given, store, ["sparrow"], dtype="float32", batch_tokens=64, shard_bytes=20_000
    )
    assert summary.features == ("hidden.span", "hidden.text", "layer1.visual")
    assert summary.captured == summary.samples == len(given.kept)
    return store


def run(
    given: Given,
    store: Path,
    drafters: list[str] | None = None,
    *,
    prompts: list[Prompt] | None = None,
    responses: Path | None = None,
    options: WorkerOptions = HERE,
    report: Progress = silent,
    **settings: Any,
) -> CaptureSummary:
    return capture(
        prompts or given.prompts,
        responses or given.responses,
        CaptureStore(store),
        given.model,
        CaptureSettings(drafters=drafters, **settings),
        options,
        report,
    )


def test_the_store_holds_every_kept_response_with_what_the_drafters_need(
    given: Given, stored: Path
) -> None:
    store = Store.open(stored)
    assert store.keys() == given.kept
    assert len(set(store.index["shard"])) > 1
    by_key = {prompt.key: prompt for prompt in given.prompts}
    for row in dataset.read(given.responses):
        sample = store.read(row.key)
        assert sample.ids_T[sample.response_T].tolist() == list(row.ids)
        assert len(sample.ids_T) + sample.visual_tokens == row.prompt_tokens + len(
            row.ids
        )
        assert len(sample.spans) == len(by_key[row.key].files)
        assert sample.features[Feature("hidden", "text")].shape == (
            len(sample.ids_T),
            tiny.HIDDEN,
        )
        assert (sample.meta["split"], sample.meta["dataset"]) == (
            by_key[row.key].split,
            "mix",
        )


def test_features_follow_the_reasoning_of_the_responses(
    given: Given, tmp_path: Path
) -> None:
    target, responses = (
        with_switch(Path(given.model), tmp_path / "target"),
        tmp_path / "responses",
    )
    thinking = SamplingSettings(max_new_tokens=6, thinking="mixed")
    respond(given.prompts, responses, str(target), thinking, ANY, HERE)
    summary = run(
        replace(given, model=str(target)),
        tmp_path / "store",
        ["wren"],
        responses=responses,
    )
    assert summary.captured == len(given.prompts)
    assert Store.open(tmp_path / "store").provenance.thinking == "mixed"
    loaded = load(str(target), thinking="mixed")
    lengths = {one.key: loaded.encode(one.messages).length for one in given.prompts}
    assert {row.key: row.prompt_tokens for row in dataset.read(responses)} == lengths
    before = {row.key: row.prompt_tokens for row in dataset.read(given.responses)}
    assert len({lengths[key] - before[key] for key in before}) == 2


def test_a_response_of_another_mode_of_thinking_is_told(
    given: Given, tmp_path: Path
) -> None:
    target = with_switch(Path(given.model), tmp_path / "target")
    responses = tmp_path / "responses"
    thinking = SamplingSettings(max_new_tokens=6, thinking="off")
    respond(given.prompts[:3], responses, str(target), thinking, ANY, HERE)
    settings = responses / dataset.SETTINGS
    settings.write_text(settings.read_text().replace('"off"', '"on"'))
    with pytest.raises(TargetError, match=r"with thinking off, .* with thinking on"):
        run(replace(given, model=str(target)), tmp_path / "store", responses=responses)


def test_responses_of_another_mode_than_the_stores_are_refused(
    given: Given, tmp_path: Path
) -> None:
    """Also if the store has samples of all prompts, so that nothing is captured."""
    target = str(with_switch(Path(given.model), tmp_path / "target"))
    prompts, of_target = given.prompts[:3], replace(given, model=target)
    off = SamplingSettings(max_new_tokens=6, thinking="off")
    on = replace(off, thinking="on")
    old, new, store = (tmp_path / name for name in ("old", "new", "store"))
    respond(prompts, old, target, off, ANY, HERE)
    respond(prompts, new, target, on, ANY, HERE)
    run(of_target, store, prompts=prompts, responses=old)
    with pytest.raises(StoreError, match=r"thinking off, .* with thinking on"):
        run(of_target, store, prompts=prompts, responses=new)


def test_the_index_holds_the_media_of_a_sample(given: Given, stored: Path) -> None:
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
    first = run(given, tmp_path / "store", ["eagle2"], prompts=some)
    assert first.captured == len(given.kept & {prompt.key for prompt in some})
    second = run(given, tmp_path / "store", ["eagle2"])
    assert second.captured == len(given.kept) - first.captured
    third = run(given, tmp_path / "store")
    assert (third.captured, third.samples) == (0, len(given.kept))


def test_responses_or_a_store_of_another_target_are_refused_by_name(
    given: Given, stored: Path, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    before = Store.open(stored).keys()
    other = str(checkpoint("qwen2_5_vl", layers=2, seed=1))
    with pytest.raises(DataError, match="checkpoint"):
        capture(given.prompts, given.responses, CaptureStore(stored), other)
    theirs = shutil.copytree(given.responses, tmp_path / "theirs")
    settings = json.loads((theirs / dataset.SETTINGS).read_text())
    (theirs / dataset.SETTINGS).write_text(
        json.dumps({**settings, "checkpoint": str(checkpoint_of(other))})
    )
    with pytest.raises(StoreError, match="weights_hash"):
        capture(given.prompts, theirs, CaptureStore(stored), other)
    assert Store.open(stored).keys() == before


def test_a_store_and_responses_of_an_earlier_version_take_more(
    given: Given, stored: Path, tmp_path: Path
) -> None:
    """Their hashes have fewer digits, with which those of today begin."""
    made = Store.open(stored)
    hashes = ("config_hash", "weights_hash", "processor_hash")
    former = {name: getattr(made.provenance, name)[:16] for name in hashes}
    assert former["processor_hash"] != made.provenance.processor_hash
    path = tmp_path / "store"
    origin = msgspec.structs.replace(made.provenance, **former)
    Store.create(path, origin, made.info, made.head(), made.layout.encoding)
    responses = shutil.copytree(given.responses, tmp_path / "responses")
    settings = json.loads((responses / dataset.SETTINGS).read_text())
    for name in ("checkpoint", "target"):
        assert len(settings[name]) > 16
        settings[name] = settings[name][:16]
    (responses / dataset.SETTINGS).write_text(json.dumps(settings))
    capture(given.prompts, responses, CaptureStore(path), given.model)
    assert Store.open(path).keys() == made.keys()
    assert Store.open(path).provenance.processor_hash == former["processor_hash"]


def test_features_are_kept_in_the_encodings_of_the_command_line(
    given: Given, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "store")
    command = [
        "features",
        "-m",
        given.model,
        "--prompts",
        str(given.file),
        "--responses",
        str(given.responses),
    ]
    command += [
        "--store",
        path,
        "--for",
        "sparrow",
        "--dtype",
        "float32",
        "--workers",
        "0",
        "--json",
    ]
    ways = ["--encoding", "hidden.text=int8", "--encoding", "layer1.visual=raw"]

    assert main([*command, "--encoding", "layer0.visual=int8"]) == 1
    error = capsys.readouterr().err
    assert "--encoding layer0.visual=int8" in error
    assert "hidden.span, hidden.text, layer1.visual" in error
    assert main([*command, *ways]) == 0
    held, raw = Store.open(path), Store.open(stored)
    assert held.keys() == given.kept
    about = info(held)["fields"]
    assert {name: one.get("encoding") for name, one in about.items()} == {
        "tokens": None,
        "hidden.span": "raw",
        "hidden.text": "int8",
        "layer1.visual": "raw",
    }
    assert 0 < about["hidden.text"]["relative_error"] < 0.02
    assert about["hidden.text"]["bytes"] < info(raw)["fields"]["hidden.text"]["bytes"]
    for key in given.kept:
        mine, theirs = held.read(key).features, raw.read(key).features
        for feature in map(Feature.parse, ("layer1.visual", "hidden.span")):
            np.testing.assert_allclose(mine[feature], theirs[feature], atol=1e-5)

    capsys.readouterr()
    assert main([*command, *ways[:2]]) == main(command) == 0  # named again or not
    assert main([*command, "--encoding", "hidden.text=raw"]) == 1
    error = capsys.readouterr().err
    assert path in error
    assert "hidden.text as int8, not raw" in error


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["hidden.text"], r"--encoding hidden.text: .*raw\|int8"),
        (["hidden.text=zip"], "--encoding hidden.text=zip"),
        (["hiden.text=int8"], "'hiden.text'"),
        (["hidden.text=raw", "hidden.text=int8"], "hidden.text as raw and as int8"),
    ],
)
def test_a_malformed_encoding_is_refused(texts: list[str], values: str) -> None:
    with pytest.raises(DataError, match=values):
        capture_store.encodings(texts)


def test_features_of_a_target_in_another_dtype_are_not_mixed(
    given: Given, tmp_path: Path
) -> None:
    half = WorkerOptions(workers=0, load=Options(dtype="bfloat16"))
    run(given, tmp_path / "store", ["sparrow"], prompts=given.prompts[:4])
    with pytest.raises(StoreError, match=r"float32.*bfloat16.*--target-dtype float32"):
        run(given, tmp_path / "store", ["sparrow"], options=half)
    theirs = shutil.copytree(given.responses, tmp_path / "theirs")
    next(theirs.glob("part-*")).unlink()
    with pytest.raises(DataError, match="target_dtype float32, not bfloat16"):
        respond(
            given.prompts,
            theirs,
            given.model,
            SamplingSettings(max_new_tokens=10),
            ANY,
            half,
        )


def test_states_of_another_engine_are_not_mixed_in(
    given: Given, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))
    with pytest.raises(StoreError, match="--engine transformers"):
        run(given, stored, options=dataclasses.replace(HERE, engine="vllm"))
    assert Store.open(stored).provenance.engine == "transformers"


def test_features_that_a_store_lacks_are_added_to_its_samples(
    given: Given, tmp_path: Path
) -> None:
    mine, once = tmp_path / "mine", tmp_path / "once"
    run(given, mine, ["sparrow"], prompts=given.prompts[:5], dtype="float32")
    before = {
        file: file.read_bytes()
        for file in (mine / "shards").rglob("*")
        if file.is_file()
    }
    some = run(given, mine, ["eagle2"], prompts=given.prompts[:3])
    assert some.captured == len(
        given.kept & {prompt.key for prompt in given.prompts[:3]}
    )
    added = run(given, mine, ["eagle2"])
    run(given, once, ["sparrow", "eagle2"], dtype="float32")
    assert added.features == Store.open(once).provenance.features
    assert (added.samples, added.captured, added.failed) == (
        len(given.kept),
        len(given.kept) - some.captured,
        {},
    )
    assert all(file.read_bytes() == data for file, data in before.items())
    stores = [Store.open(path) for path in (mine, once)]
    assert len(stores[0].annexes) == 1
    for key in sorted(given.kept):
        one, other = (store[key] for store in stores)
        assert np.array_equal(one.ids_T, other.ids_T)
        assert one.meta == other.meta
        assert one.features.keys() == other.features.keys()
        for (
            feature,
            rows,
        ) in one.features.items():  # captured in batches of other samples
            np.testing.assert_allclose(
                rows, other.features[feature], rtol=1e-4, atol=1e-5
            )
    assert not verify(mine).findings
    again = run(given, mine, ["eagle2", "sparrow"])
    assert (again.captured, again.seconds < 1) == (0, True)
    assert (
        run(given, mine, None).captured == 0
    )  # all methods: of those that there are features for


def test_added_features_have_an_encoding_of_their_own_and_the_dtype_of_the_store(
    given: Given, tmp_path: Path
) -> None:
    store, two = tmp_path / "store", given.prompts[:2]
    run(given, store, ["sparrow"], prompts=two)
    with pytest.raises(
        StoreError, match=r"layer0\.text=int8: choose from .*hidden\.visual"
    ):
        run(given, store, ["eagle2"], prompts=two, encoding={"layer0.text": "int8"})
    with pytest.raises(StoreError, match="keeps features in bfloat16, not float32"):
        run(given, store, ["eagle2"], prompts=two, dtype="float32")
    assert not Store.open(store).annexes
    run(given, store, ["eagle2"], prompts=two, encoding={"hidden.visual": "int8"})
    (annex,) = Store.open(store).annexes
    assert annex.provenance.features == ("embed.visual", "hidden.visual")
    assert annex.layout.encoding == {"hidden.visual": "int8"}
    with pytest.raises(StoreError, match=r"keeps hidden\.visual as int8, not raw"):
        run(given, store, ["eagle2"], encoding={"hidden.visual": "raw"})
    run(given, store, ["eagle2"])
    assert Store.open(store).annexes[0].keys() == given.kept


def test_features_of_another_response_are_not_added_to_a_sample(
    given: Given, tmp_path: Path
) -> None:
    rows = [row for row in dataset.read(given.responses, kept=False) if row.keep][:2]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copy(given.responses / dataset.SETTINGS, theirs)
    other = [int(token) for token in rows[0].ids]
    other[0] ^= 1
    dataset.write_part(
        theirs,
        "0",
        [dataclasses.replace(rows[0], ids=np.array(other, np.int32)), rows[1]],
    )
    store = tmp_path / "store"
    run(given, store, ["sparrow"])
    two = [
        prompt for prompt in given.prompts if prompt.key in {row.key for row in rows}
    ]
    done = run(given, store, ["eagle2"], prompts=two, responses=theirs)
    assert done.failed.keys() == {rows[0].key}
    assert "has other tokens of it" in done.failed[rows[0].key]
    assert Store.open(store).annexes[0].keys() == {rows[1].key}


def test_a_response_whose_prompt_has_changed_fails_and_is_not_stored(
    given: Given, tmp_path: Path
) -> None:
    by_key = {prompt.key: prompt for prompt in given.prompts}
    items = [CaptureItem(by_key[row.key], row) for row in dataset.read(given.responses)]
    shown = next(item for item in items if item.prompt.files)
    first, second = [item for item in items if item is not shown][:2]
    parts = [
        part | {"digest": "0" * 32} for part in shown.prompt.messages[0]["content"]
    ]  # of another image
    stale = dataclasses.replace(
        shown.prompt, messages=[{"role": "user", "content": parts}]
    )
    words = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Quite another question than before"}],
        }
    ]
    changed = CaptureItem(
        dataclasses.replace(first.prompt, messages=words), first.response
    )
    settings = CaptureSettings(drafters=["sparrow"], batch_tokens=1024)
    result = Capturer(given.model, CaptureStore(tmp_path / "store"), "", settings).work(
        CaptureTask((changed, CaptureItem(stale, shown.response), second), "task")
    )
    assert result.failed.keys() == {first.prompt.key, shown.prompt.key}
    assert shown.prompt.files[0] in result.failed[shown.prompt.key]
    assert f"had {first.response.prompt_tokens}" in result.failed[first.prompt.key]
    assert Store.open(tmp_path / "store").keys() == {second.prompt.key}


def test_a_sample_too_large_for_the_device_fails_alone(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_key = {prompt.key: prompt for prompt in given.prompts}
    items = [CaptureItem(by_key[row.key], row) for row in dataset.read(given.responses)]
    largest = max(items, key=lambda item: item.tokens)
    worker = Capturer(
        given.model,
        CaptureStore(tmp_path / "store"),
        "",
        CaptureSettings(drafters=["sparrow"]),
    )
    run = worker.target._states

    def tight(prompts: Any, *more: Any) -> Any:
        if any(prompt.length == largest.response.prompt_tokens for prompt in prompts):
            raise torch.OutOfMemoryError
        return run(prompts, *more)

    monkeypatch.setattr(worker.target, "_states", tight)
    failed = {
        i.prompt.key
        for i in items
        if i.response.prompt_tokens == largest.response.prompt_tokens
    }
    result = worker.work(CaptureTask.of(items))
    assert result.failed.keys() == failed
    assert all(key in why for key, why in result.failed.items())
    assert (
        Store.open(tmp_path / "store").keys()
        == {item.prompt.key for item in items} - failed
    )
    assert worker.work(CaptureTask.of([largest])).failed.keys() == {largest.prompt.key}


def test_without_responses_the_error_names_the_folder(
    given: Given, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"{tmp_path / 'nothing'}.* 12 prompts"):
        capture(
            given.prompts,
            tmp_path / "nothing",
            CaptureStore(tmp_path / "store"),
            given.model,
        )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("reason", "option"),
    [("short", "--min-words 0"), ("repetition", "--max-repetition 1"), ("empty", "")],
)
def test_without_kept_responses_the_error_says_why_they_were_dropped(
    given: Given, tmp_path: Path, reason: str, option: str
) -> None:
    out = tmp_path / "responses"
    rows = list(dataset.read(given.responses))
    dataset.write_part(
        out, "0", [dataclasses.replace(row, keep=False, reason=reason) for row in rows]
    )
    with pytest.raises(DataError, match=rf"{reason} {len(rows)}\b") as error:
        capture(given.prompts, out, CaptureStore(tmp_path / "store"), given.model)
    assert [
        other in str(error.value) for other in ("--min-words 0", "--max-repetition 1")
    ] == [option == other for other in ("--min-words 0", "--max-repetition 1")]


def test_settings_that_are_stated_are_checked_though_nothing_is_missing(
    given: Given, stored: Path
) -> None:
    with pytest.raises(StoreError, match="float32, not bfloat16"):
        run(given, stored, ["sparrow"], dtype="bfloat16")
    assert run(given, stored, ["sparrow"]).captured == 0
    with pytest.raises(DataError, match="max_new_tokens 10, not 11"):
        capture_features(given.job(stored, CaptureSettings(drafters=["sparrow"]), 11))


def test_the_time_of_one_pass_is_in_one_rate(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = given.job(tmp_path / "store", CaptureSettings(drafters=["sparrow"]), 10)
    job = replace(job, workers=WorkerOptions(workers=0, engine="vllm"))
    tokens = sum(
        row.prompt_tokens + len(row.ids) for row in dataset.read(given.responses)
    )
    generated = ResponseSummary(
        out=given.responses,
        prompts=12,
        generated=12,
        kept=12,
        dropped=Counter(),
        failed={},
        mean_tokens=10.0,
        tokens_per_second=3.0,
        seconds=40.0,
    )
    captured = CaptureSummary(
        store=job.store.path,
        features=("hidden.text",),
        samples=12,
        captured=0,
        no_response=0,
        dropped=Counter(),
        failed={},
        samples_per_second=0.0,
        tokens_per_second=0.0,
        seconds=0.0,
    )
    monkeypatch.setattr(CaptureJob, "missing", lambda job: job.prompts)
    monkeypatch.setattr(flow, "_generate", lambda job, work, bar: generated)
    monkeypatch.setattr(flow, "_capture", lambda job, bar: captured)
    summary = capture_features(job, anyway=True).features
    rated = [rates.known(tmp_path, name, "vllm") for name in ("responses", "features")]
    assert [rate and rate.tokens for rate in rated] == [120.0, None]
    assert (summary.captured, summary.seconds) == (12, 40.0)
    assert summary.tokens_per_second == tokens / 40


@pytest.mark.parametrize(
    ("names", "value"), [("sparrow,foo", "'foo'"), (" , ", "--for ' , '")]
)
def test_unknown_drafters_are_named(names: str, value: str) -> None:
    with pytest.raises(DataError, match=value):
        capture_store.drafters(names)


RUN = """
import sys
from pathlib import Path
from vlmdistill.pipelines.cluster.engine_environment import VARIABLE
from vlmdistill.pipelines.data.features import capturer
from vlmdistill.pipelines.data.features.capture_store import CaptureStore
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.cluster.pool import WorkerOptions
capturer.capture(
    prompt_table.read(Path(sys.argv[1])), Path(sys.argv[2]), CaptureStore(sys.argv[3]), sys.argv[4],
    capturer.CaptureSettings(shard_bytes=1), WorkerOptions(workers=1),
)
"""


def test_killed_at_any_moment_every_sample_is_stored_once(
    given: Given, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    command = [
        sys.executable,
        "-c",
        RUN,
        str(given.file),
        str(given.responses),
        str(store),
        given.model,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while len(list(store.glob("commits/*"))) < 3 and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert Store.open(store).keys() < given.kept
    run(given, store, shard_bytes=1)
    index = Store.open(store).index
    assert sorted(index["key"]) == sorted(given.kept)
    assert len(list(store.glob("commits/*"))) == len(given.kept)


def test_a_run_that_is_stopped_in_a_task_keeps_its_shards(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturer, "PART_SECONDS", 0.0)
    store = CaptureStore(tmp_path / "features")
    one_by_one = CaptureSettings(drafters=["sparrow"], batch_tokens=1)

    def stop(done: int, total: int, note: str = "") -> None:
        if done == 3:
            raise KeyboardInterrupt

    def run(progress: Progress) -> CaptureSummary:
        return capture(
            given.prompts,
            given.responses,
            store,
            given.model,
            one_by_one,
            HERE,
            progress,
        )

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    assert len(store.keys()) == 3
    assert run(silent).captured == len(given.kept) - 3
    assert store.keys() == given.kept
    assert info(Store.open(store.path))["shards"] == len(given.kept)


def test_a_terminated_run_reports_what_is_kept_in_one_line(
    given: Given, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    command = [
        sys.executable,
        "-m",
        "vlmdistill",
        "features",
        "-m",
        given.model,
        "--store",
        str(store),
    ]
    command += [
        "--prompts",
        str(given.file),
        "--responses",
        str(given.responses),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while (
        not list(store.glob("staging/probe-*")) and process.poll() is None
    ):  # workers are about to start
        time.sleep(0.01)
    process.terminate()
    out, err = process.communicate(timeout=400)
    assert (process.returncode, out) == (143, "")
    assert err.startswith(
        f"stopped: 0 of {len(given.kept)} samples are done and kept in {store};"
    )
    assert len(err.splitlines()) == 1
    assert not list(store.glob("staging/probe-*"))


def test_dropped_responses_are_counted(given: Given, tmp_path: Path) -> None:
    theirs = shutil.copytree(given.responses, tmp_path / "theirs")
    rows = list(dataset.read(theirs, kept=False))
    for part in theirs.glob("part-*"):
        part.unlink()
    first, second, _, *others = rows
    dropped = [
        dataclasses.replace(row, keep=False, reason=reason)
        for row, reason in ((first, "empty"), (second, "refused"))
    ]
    dataset.write_part(
        theirs, "edited", [*dropped, *others]
    )  # the third has no response any more
    summary = run(given, tmp_path / "store", ["sparrow"], responses=theirs)
    assert summary.no_response == 1
    assert summary.dropped == {"empty": 1, "refused": 1} | Counter(
        row.reason for row in others if row.reason
    )
    assert summary.captured == sum(row.keep for row in others)


def test_samples_that_fail_make_the_command_fail_unless_they_are_allowed(
    given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = shutil.copytree(given.responses, tmp_path / "theirs")
    rows = list(dataset.read(theirs, kept=False))
    changed = next(row for row in rows if row.keep)
    longer = dataclasses.replace(
        changed, prompt_tokens=changed.prompt_tokens + 1
    )  # as if its image had changed
    for part in theirs.glob("part-*"):
        part.unlink()
    dataset.write_part(
        theirs, "edited", [longer if row is changed else row for row in rows]
    )
    command = [
        "features",
        "-m",
        given.model,
        "--prompts",
        str(given.file),
        "--responses",
        str(theirs),
    ]
    command += [
        "--store",
        str(tmp_path / "store"),
        "--for",
        "sparrow",
        "--workers",
        "0",
        "--json",
    ]
    assert main(command) == 1
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["captured"], list(facts["failed"])) == (
        len(given.kept) - 1,
        [changed.key],
    )
    assert "error: 1 of 12 prompts failed: " in err
    assert "--allow-failed 0.084" in err
    assert main([*command, "--allow-failed", "0.084"]) == 0
