"""New versions of a drafter take over while requests come, and a recorded server's log can be harvested."""

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import thorough, tiny
from tests.drafters import synthetic
from tests.served_app import serving
from vlmdistill.drafters.decoding.clock import Cycle, Laps
from vlmdistill.pipelines import request_log
from vlmdistill.pipelines.endpoint import switch as switches
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.served_decoder import (
    ServedDecoder,
    ServedResponse,
    open_decoder,
)
from vlmdistill.pipelines.endpoint.switch import Switch
from vlmdistill.pipelines.endpoint.trial import FEWEST
from vlmdistill.pipelines.request_log import Recorder
from vlmdistill.pipelines.streaming.response import generate
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace import versions
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError

SEEDS, REQUESTS = 3, thorough.count(60, 200)
JSON: dict[str, Any] = {"Content_Type": "application/json"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A tiny target's, with a drafter `hawk` and versions of it, each with random weights of its own."""
    root = tmp_path_factory.mktemp("switch")
    folder = tiny.checkpoint("qwen2_5_vl", root / "target")
    here, target = Workspace.of(str(folder), root / "runs"), load(str(folder))
    for seed in range(SEEDS):
        name, drafter = (
            f"hawk.r{seed}" if seed else "hawk",
            synthetic.untrained("eagle2", target, seed),
        )
        synthetic.save("eagle2", here.drafter(name), drafter, target=target)
    return here


@pytest.fixture(scope="module")
def decoder(workspace: Workspace) -> ServedDecoder:
    return open_decoder(workspace, "hawk", tree="chain-3", max_new_tokens=12)


@pytest.fixture
def fresh(workspace: Workspace) -> Workspace:
    """Without any round."""
    shutil.rmtree(workspace.rounds("hawk"), ignore_errors=True)
    return workspace


def publish(workspace: Workspace, drafter: str) -> None:
    base = versions.current(workspace, "hawk")
    assert versions.record(
        workspace, "hawk", drafter, base=base, published=True, why="test"
    ).published


def body(decoder: ServedDecoder, number: int, **more: object) -> str:
    messages = [{"role": "user", "content": f"Number {number} of them, please."}]
    return json.dumps(
        {"model": decoder.model, "messages": messages, "temperature": 0, **more}
    )


def test_requests_while_drafters_are_swapped_ten_times_all_equal_plain_decoding(
    fresh: Workspace, decoder: ServedDecoder
) -> None:
    switch = Switch(decoder, fresh, "hawk", trial=10**6)
    with serving(switch, queue_limit=300) as served:

        def ask(number: int, **more: object) -> tuple[str, str | None]:
            status, said = served.request(
                "POST", "/v1/chat/completions", body(decoder, number, **more), **JSON
            )
            assert status == 200, said
            found = json.loads(said)
            return found["choices"][0]["message"]["content"], found["decoding"][
                "drafter"
            ]

        plain = [ask(number, speculate=False)[0] for number in range(20)]
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(ask, number % 20) for number in range(REQUESTS)]
            for swap in range(10):
                asked[(swap + 1) * REQUESTS // 11].result()
                publish(fresh, f"hawk.r{1 + swap % 2}")
                switch.look()
            answers = [one.result() for one in asked]
        assert [text for text, _ in answers] == plain * (REQUESTS // 20)
        assert {name for _, name in answers} == {"hawk", "hawk.r1", "hawk.r2"}
        assert served.metric("vlmdistill_drafter_swaps") == switch.trials.swaps == 10
        assert served.metric('vlmdistill_drafter{version="hawk.r2"}') == 1
        assert len(versions.rounds(fresh, "hawk")) == 10


def responded(decoder: ServedDecoder, tokens: int) -> ServedResponse:
    """A response that gained so many tokens with each call."""
    response = ServedResponse(
        decoder, ChatRequest.model_validate_json(body(decoder, tokens))
    )
    response.cycles += [
        Cycle([1] * tokens, 2, (2, 3), [], 0.1, Laps(torch.device("cpu")))
        for _ in range(4)
    ]
    return response


def test_a_version_that_accepts_less_is_withdrawn_for_all(
    fresh: Workspace, decoder: ServedDecoder
) -> None:
    switch = Switch(decoder, fresh, "hawk", trial=64)
    with serving(switch) as served:

        def ask(number: int) -> str:
            said = served.request(
                "POST", "/v1/chat/completions", body(decoder, number), **JSON
            )[1]
            return str(json.loads(said)["decoding"]["drafter"])

        for number in range(FEWEST):  # of a good one, unlike that of random weights
            switch.ended(responded(decoder, 3 + number % 2))
        publish(fresh, "hawk.r1")
        switch.look()
        drafted = [ask(number) for number in range(FEWEST + 2)]
        assert drafted == ["hawk.r1"] * FEWEST + ["hawk"] * 2
        assert served.metric("vlmdistill_drafter_rollbacks") == 1
        with only_writer(fresh.rounds("hawk")):  # another process records a round
            switch.look()
        assert versions.current(fresh, "hawk") == "hawk.r1"
        switch.look()
        assert versions.current(fresh, "hawk") == "hawk"
        assert "tokens for each call" in versions.rounds(fresh, "hawk")[-1].why
        switch.look()
        assert (ask(0), len(versions.rounds(fresh, "hawk"))) == ("hawk", 2)


def test_a_version_that_comes_during_a_trial_is_compared_with_the_last_that_was_not_on_trial(
    fresh: Workspace, decoder: ServedDecoder
) -> None:
    switch = Switch(decoder, fresh, "hawk")
    for number in range(FEWEST):
        switch.ended(responded(switch.current, 3 + number % 2))
    for name in ("hawk.r1", "hawk.r2"):
        publish(fresh, name)
        switch.look()
        assert switch.current.drafter_name == name
        switch.ended(responded(switch.current, 1))
    for number in range(FEWEST):
        switch.ended(responded(switch.current, 1 + number % 2))
    assert switch.current is decoder
    assert switch.trials.refused == {"hawk.r2"}


def test_a_version_that_comes_back_during_a_trial_keeps_what_it_has_gained(
    fresh: Workspace, decoder: ServedDecoder
) -> None:
    switch = Switch(decoder, fresh, "hawk")
    switch.ended(responded(switch.current, 3))
    for name in ("hawk.r1", "hawk"):
        publish(fresh, name)
        switch.look()
    assert not switch.trials.running
    assert switch.trials.means()["hawk"] == pytest.approx(11 / 3)


def test_a_version_whose_base_is_no_longer_in_use_is_recorded_and_not_published(
    fresh: Workspace,
) -> None:
    publish(fresh, "hawk.r1")
    late = versions.record(
        fresh, "hawk", "hawk.r2", base="hawk", published=True, why="better"
    )
    assert not late.published
    assert versions.current(fresh, "hawk") == "hawk.r1"
    assert "hawk.rounds" not in fresh.drafters()
    (fresh.rounds("hawk") / "000000000009.json").write_text("{")
    with pytest.raises(DataError, match="000000000009"):
        versions.current(fresh, "hawk")


def test_a_damaged_version_leaves_the_one_in_use(
    fresh: Workspace, decoder: ServedDecoder
) -> None:
    switch = Switch(decoder, fresh, "hawk")
    publish(fresh, "hawk.r9")
    switch.look()
    assert (switch.current, switch.trials.swaps) == (decoder, 0)
    publish(fresh, "hawk.r1")
    switch.look()
    assert switch.current.drafter_name == "hawk.r1"


def test_a_response_ends_at_the_targets_last_position(
    workspace: Workspace, decoder: ServedDecoder
) -> None:
    def length(text: str) -> int:
        return decoder.target.encode([{"role": "user", "content": text}]).length

    positions = decoder.target.info.max_position
    text = "a" + " a" * ((positions - length("a") - 5) // (length("a a") - length("a")))
    room = positions - length(text)
    stream = generate(workspace, text, max_new_tokens=12)
    assert "".join(piece.text for piece in stream.pieces())
    assert stream.summary().startswith(f"{room} tokens")
    messages = [{"role": "user", "content": text}]
    request = ChatRequest.model_validate(
        {"model": decoder.model, "messages": messages, "max_tokens": 12}
    )
    response = ServedResponse(decoder, request)
    assert "".join(piece.text for piece in response.pieces())
    assert (response.decoding.tokens, response.finish) == (room, "length")


def test_a_record_has_the_tokens_and_the_images_by_hash_and_no_key(
    decoder: ServedDecoder, tmp_path: Path
) -> None:
    url = tiny.data_url(tiny.picture(56, 56))
    shown = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": ""},
    ]
    asked = {
        "model": decoder.model,
        "messages": [{"role": "user", "content": shown}],
        "user": "ann",
    }
    headers: dict[str, Any] = {**JSON, "Authorization": "Bearer word", "X_Team": "red"}
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "policy.toml").write_text('[allow]\nX-Team = "red"\n')
    recorder = Recorder(tmp_path / "log")
    with serving(decoder, recorder=recorder, key="word") as served:
        said = served.request(
            "POST", "/v1/chat/completions", json.dumps(asked), **headers
        )[1]
    recorder.close()
    text = json.loads(said)["choices"][0]["message"]["content"]
    (file,) = (tmp_path / "log").glob("*.jsonl")
    (line,) = map(json.loads, file.read_text().splitlines())
    choice = line["response"]["choices"][0]
    assert choice["message"]["content"] == text
    tokens = choice["token_ids"]
    assert (
        decoder.target.tokenizer.decode(tokens, skip_special_tokens=True).rstrip(
            "\ufffd"
        )
        == text
    )
    assert line["response"]["usage"]["completion_tokens"] == len(tokens)
    (stored,) = (tmp_path / "log" / "media").iterdir()
    assert tiny.data_url(stored.read_bytes()) == url
    assert (
        line["request"]["messages"][0]["content"][0]["image_url"]["url"]
        == f"media/{stored.name}"
    )
    assert line["request"]["user"] == "ann"
    assert line["request"]["temperature"] == 0  # the default here, and 1 elsewhere
    assert line["request"]["messages"][0]["content"][1] == {"type": "text", "text": ""}
    assert line["headers"] == {"x-team": ["red"]}
    assert "word" not in file.read_text()


def test_a_request_with_a_key_twice_is_answered_and_not_recorded(
    decoder: ServedDecoder, tmp_path: Path
) -> None:
    turns = '"messages": [{"role": "user", "content": "Where?"}]'
    asked = f'{{"model": "{decoder.model}", {turns}, "user": "ann", "user": "bob"}}'
    recorder = Recorder(tmp_path / "log")
    with serving(decoder, recorder=recorder) as served:
        status, _ = served.request("POST", "/v1/chat/completions", asked, **JSON)[:2]
    recorder.close()
    assert status == 200
    assert (recorder.recorded, recorder.lost) == (0, 1)
    assert not list((tmp_path / "log").glob("*.jsonl"))


def test_recorded_days_are_removed_with_their_images(
    decoder: ServedDecoder, tmp_path: Path
) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "1999-01-01.jsonl").write_text("{}\n")
    for name in ("old", "new"):
        (tmp_path / "media" / name).write_bytes(b"x")
    os.utime(tmp_path / "media" / "old", (9e8, 9e8))
    recorder = Recorder(tmp_path, keep_seconds=86400.0)
    with serving(decoder, recorder=recorder) as served:
        served.request("POST", "/v1/chat/completions", body(decoder, 1), **JSON)
    recorder.close()
    assert [file.name for file in (tmp_path / "media").iterdir()] == ["new"]
    assert not (tmp_path / "1999-01-01.jsonl").exists()
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_recorded_days_of_the_future_stay_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = time.time() + 3 * 86400
    day = time.strftime("%Y-%m-%d", time.gmtime(later))
    (tmp_path / "media").mkdir()
    for name in (f"{day}.jsonl", "media/image"):
        (tmp_path / name).write_text("{}\n")
    os.utime(tmp_path / "media" / "image", (later, later))
    with Recorder(tmp_path, keep_seconds=86400.0):
        pass
    assert {file.name for file in tmp_path.rglob("*")} >= {f"{day}.jsonl", "image"}
    (line,) = caplog.messages
    assert f"2 files of the future stay, such as {tmp_path}/{day}.jsonl" in line


def test_a_clock_that_is_far_ahead_removes_no_recorded_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    today = time.strftime("%Y-%m-%d", time.gmtime(now))
    (tmp_path / "media").mkdir()
    for name in (f"{today}.jsonl", "media/image"):
        (tmp_path / name).write_text("{}\n")
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: now + 400 * 86400)
        with Recorder(tmp_path, keep_seconds=86400.0) as recorder:
            recorder.add(lambda _: {})
    assert {file.name for file in tmp_path.rglob("*")} >= {f"{today}.jsonl", "image"}
    assert len([*tmp_path.glob("*.jsonl")]) == 2


def test_a_clock_that_jumps_ahead_removes_no_recorded_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "HOUR", 0.01)
    now = time.time()
    with Recorder(tmp_path, keep_seconds=86400.0) as recorder:
        recorder.add(lambda keep: {"image": keep(b"x")})
        while not recorder.recorded:  # and so the clock was looked at
            time.sleep(0.01)
        monkeypatch.setattr(time, "time", lambda: now + 400 * 86400)
        while not any("jumped ahead by 400 days" in line for line in caplog.messages):
            time.sleep(0.01)
    assert len([*tmp_path.glob("*.jsonl")]) == 1
    assert len([*(tmp_path / "media").iterdir()]) == 1


class Stalled(Switch):
    """Looks on a disk that does not answer."""

    began, answers = threading.Event(), threading.Event()

    def look(self) -> None:
        self.began.set()
        self.answers.wait(400)


def test_a_disk_that_does_not_answer_holds_up_no_end(
    fresh: Workspace, decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "WAITED", 0.1)
    stalled = Stalled(decoder, fresh, "hawk")
    with stalled.following(0.01):
        assert stalled.began.wait(60)
    assert not stalled.answers.is_set()
    stalled.answers.set()
