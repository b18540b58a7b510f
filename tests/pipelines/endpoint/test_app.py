"""The server under the `openai` client: what it generates, what it refuses, and who waits for whom."""

import asyncio
import base64
import hashlib
import json
import random
import re
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from pydantic import ValidationError

from tests import tiny
from tests.drafters import synthetic
from tests.pipelines.targets.test_thinking import with_switch
from tests.served_app import Served, serving
from tests.tiny import data_url
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.demo import scenes
from vlmdistill.pipelines.endpoint import chat, connections, gate, hosting
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.decoder_queue import DecoderQueue
from vlmdistill.pipelines.endpoint.served_decoder import (
    ServedDecoder,
    ServedResponse,
    decoder_thread,
    open_decoder,
    until_stop,
)
from vlmdistill.pipelines.report.templates import source
from vlmdistill.pipelines.streaming.pieces import Piece
from vlmdistill.pipelines.streaming.response import generate, open_pair
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

QUESTION = "Describe the scene."
KEY = "a key"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The demo target's, with a sparrow of random weights."""
    here = Workspace.of("demo-small", tmp_path_factory.mktemp("runs"))
    synthetic.save("sparrow", here.drafter("sparrow"), target=load("demo-small"))
    return here


@pytest.fixture(scope="module")
def decoder(workspace: Workspace) -> ServedDecoder:
    return open_decoder(workspace, "sparrow")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scene.png, a link that leads out of it, and a file next to it."""
    folder = tmp_path_factory.mktemp("shown") / "media"
    folder.mkdir()
    image = scenes.draw(scenes.random_scene(random.Random(0)))
    image.save(folder / "scene.png")
    image.save(folder.parent / "secret.png")
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    return folder


@pytest.fixture(scope="module")
def server(decoder: ServedDecoder, media: Path) -> Iterator[Served]:
    with serving(decoder, media=media) as served:
        yield served


def ask(client: openai.OpenAI, content: Any = QUESTION, **options: Any) -> Any:
    """A chat completion at temperature 0, of at most 48 tokens."""
    messages: Any = [{"role": "user", "content": content}]
    options = {"model": "demo-small", "temperature": 0, "max_tokens": 48, **options}
    return client.chat.completions.create(messages=messages, **options)


def shown(url: str) -> list[dict[str, Any]]:
    """A message content with an image."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]


def streamed(chunks: Any) -> str:
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )


def test_a_stream_equals_generate_with_and_without_the_drafter(
    server: Served, workspace: Workspace, media: Path
) -> None:
    url = data_url(Image.open(media / "scene.png"))
    expected = generate(
        workspace, QUESTION, images=[media / "scene.png"], max_new_tokens=400
    )
    text = "".join(piece.text for piece in expected.pieces())
    assert len(text) > 100
    for extra in ({}, {"speculate": False}):
        chunks = list(
            ask(
                server.client(),
                shown(url),
                max_tokens=400,
                stream=True,
                extra_body=extra,
            )
        )
        assert streamed(chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].decoding["drafter"] == (None if extra else "sparrow")
    assert (
        ask(server.client(), shown(url), max_tokens=400).choices[0].message.content
        == text
    )


def test_requests_are_read_with_the_thinking_of_the_drafters_training(
    tmp_path: Path,
) -> None:
    plain = tiny.checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    model = str(with_switch(plain, tmp_path / "target"))
    workspace = Workspace.of(model, tmp_path / "runs")
    trained_on = load(model, thinking="off")
    synthetic.save("wren", workspace.drafter("wren"), target=trained_on)
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    length = trained_on.encode([message]).length
    target, _, _ = open_pair(workspace, "wren")
    assert target.encode([message]).length == length
    with serving(open_decoder(workspace, "wren")) as served:
        client = served.client()
        for extra in ({}, {"enable_thinking": False}, {"thinking": False}):
            answer = ask(
                client,
                model="target",
                max_tokens=4,
                extra_body={"chat_template_kwargs": extra},
            )
            assert answer.usage.prompt_tokens == length
        other = ask(
            client,
            model="target",
            max_tokens=4,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        assert other.usage.prompt_tokens == trained_on.encode([message], "on").length
        assert other.usage.prompt_tokens != length


def test_a_drafter_of_both_modes_is_served_in_the_default_one(tmp_path: Path) -> None:
    """And an untrained one beside another has no mode."""
    plain = tiny.checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    model = str(with_switch(plain, tmp_path / "target"))
    workspace = Workspace.of(model, tmp_path / "runs")
    both, off = load(model, thinking="mixed"), load(model, thinking="off")
    synthetic.save("wren", workspace.drafter("both"), target=both)
    synthetic.save("wren", workspace.drafter("wren"), target=off)
    target, _, _ = open_pair(workspace, "both")
    assert target.thinking == ""
    served = open_decoder(workspace, "lookahead", compared=["wren"])
    assert served.target.thinking == "off"


def test_accepted_tokens_are_marked_and_counted(
    decoder: ServedDecoder, media: Path
) -> None:
    drafter = synthetic.untrained("lookahead", decoder.target)
    with serving(
        replace(decoder, drafter=drafter, drafter_name="lookahead"), media=media
    ) as served:
        url = f"file://{media}/scene.png"
        options = {"include_usage": True}
        chunks = list(
            ask(
                served.client(),
                shown(url),
                stream=True,
                stream_options=options,
                max_tokens=400,
            )
        )
        pieces = [chunk.piece for chunk in chunks if hasattr(chunk, "piece")]
        (decoding,) = [chunk.decoding for chunk in chunks if hasattr(chunk, "decoding")]
        usage = chunks[-1].usage
        assert sum(piece["drafted"] for piece in pieces) == decoding["accepted"] > 10
        assert (
            usage.completion_tokens == decoding["tokens"] == len(pieces) + 1
        )  # the EOS has no text
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert decoding["tokens_per_call"] == pytest.approx(
            (decoding["tokens"] - 1) / decoding["calls"]
        )
        times = [piece["seconds"] for piece in pieces]
        assert times == sorted(times)
        assert {"check", "phases", "missed"}.isdisjoint(decoding)  # of evaluations
        assert (
            decoding["prefill_seconds"] == times[0] < times[-1] <= decoding["seconds"]
        )
        assert served.metric("vlmdistill_accepted_tokens_total") == decoding["accepted"]
        assert served.metric('vlmdistill_requests_total{outcome="stop"}') == 1
        assert served.metric("vlmdistill_first_text_seconds_count") == 1
        plain = ask(
            served.client(), shown(url), max_tokens=400, extra_body={"speculate": False}
        )
        assert plain.choices[0].message.content == streamed(chunks)
        assert (plain.decoding["accepted"], plain.decoding["calls"]) == (
            0,
            plain.decoding["tokens"] - 1,
        )


def test_an_image_decides_the_response(server: Served, media: Path) -> None:
    client, texts = server.client(), set()
    for seed in range(2):
        image = scenes.draw(scenes.random_scene(random.Random(seed)))
        texts.add(ask(client, shown(data_url(image))).choices[0].message.content)
    assert len(texts) == 2
    assert (
        ask(client, shown(f"file://{media}/scene.png")).choices[0].message.content
        in texts
    )


def test_sampling_follows_the_seed(server: Served) -> None:
    def sample(seed: int | None) -> str:
        return str(
            ask(server.client(), temperature=2.0, seed=seed).choices[0].message.content
        )

    assert sample(1) == sample(1) != sample(2)
    assert sample(None) != sample(None)


def test_a_response_ends_before_a_stop_string(server: Served) -> None:
    whole = ask(server.client()).choices[0].message.content
    word = whole[20:31]
    for options in ({"stop": word}, {"stop": ["no such words", word], "stream": True}):
        given = ask(server.client(), **options)
        if "stream" in options:
            chunks = list(given)
            text, finish = streamed(chunks), chunks[-1].choices[0].finish_reason
        else:
            text, finish = (
                given.choices[0].message.content,
                given.choices[0].finish_reason,
            )
        assert (text, finish) == (whole[: whole.index(word)], "stop")


@pytest.mark.parametrize(
    "stop", [["b"], ["abc", "c"], ["aab", "ba"], ["cab", "zz"], ["a" * 5], []]
)
def test_until_stop_is_the_text_before_the_first_stop_string(stop: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(200):
        texts = ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(6)]
        text, source = "".join(texts), iter([Piece(one, False, 0.0) for one in texts])
        kept = "".join(piece.text for piece in until_stop(source, stop))
        found = [text.index(word) for word in stop if word in text]
        if not found:
            assert kept == text
            continue
        # With several stop strings, the one that is complete first ends the response.
        assert text.startswith(kept)
        assert any(text.startswith(word, len(kept)) for word in stop)
        assert len(kept) <= min(
            text.index(word) + len(word) for word in stop if word in text
        )


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "a" * (decoder.target.max_characters + 1)
    request = ChatRequest.model_validate(
        {"model": "demo-small", "messages": [{"role": "user", "content": content}]}
    )
    encoded: list[object] = []
    monkeypatch.setattr(
        decoder.target.processor,
        "apply_chat_template",
        lambda *given, **named: encoded.append(given),
    )
    with pytest.raises(DataError, match=str(len(content))):
        decoder.decode(request, None)
    assert not encoded


def test_a_conversation_of_several_turns_is_one_prompt(server: Served) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "A circle.", "refusal": None},
        {"role": "user", "content": "What else?"},
    ]
    client = server.client()
    given = client.chat.completions.create(
        model="demo-small",
        messages=turns,  # type: ignore[arg-type]
        max_completion_tokens=4,
    )
    assert given.usage is not None
    assert given.usage.completion_tokens == 4
    assert given.usage.prompt_tokens > ask(client, max_tokens=1).usage.prompt_tokens


def test_models_and_health(server: Served) -> None:
    (model,) = server.client().models.list().data
    of_server = {
        "drafter": "sparrow",
        "drafters": ["sparrow"],
        "dtype": "float32",
        "thinking": "",
    }
    assert (model.id, model.model_extra) == ("demo-small", of_server)
    assert server.request("GET", "/health") == (200, b'{"status":"ok"}')
    status, body = server.request("GET", "/nothing")
    assert status == 404
    assert "POST /v1/chat/completions" in json.loads(body)["error"]["message"]


def test_a_stop_string_ends_the_count_of_tokens_with_and_without_a_drafter_alike(
    decoder: ServedDecoder, media: Path
) -> None:
    drafter = synthetic.untrained("lookahead", decoder.target)
    eager, plain = (
        replace(decoder, drafter=drafter, drafter_name="lookahead"),
        replace(decoder, drafter=None),
    )
    body = {
        "model": "demo-small",
        "messages": [{"role": "user", "content": shown(f"file://{media}/scene.png")}],
    }

    def respond(served: ServedDecoder, **more: Any) -> ServedResponse:
        response = ServedResponse(
            served, ChatRequest.model_validate({**body, **more}), media
        )
        for _ in response.pieces():
            pass
        return response

    whole = respond(eager)
    first = next(one for one in whole.cycles if one.accepted > 2)
    before = [
        token for one in whole.cycles[: whole.cycles.index(first)] for token in one.ids
    ]
    decode = decoder.target.tokenizer.decode
    stop = decode([*before, *first.ids[:2]])[
        len(decode(before)) - 12 :
    ]  # ends within an accepted draft
    stopped, expected = respond(eager, stop=stop), respond(plain, stop=stop)
    assert (stopped.text, stopped.finish) == (expected.text, "stop")
    ids = [
        [token for one in response.cycles for token in one.ids]
        for response in (stopped, expected)
    ]
    assert ids[0] == ids[1]
    assert (
        stopped.decoding.tokens
        == expected.decoding.tokens
        == len(ids[0])
        < whole.decoding.tokens
    )
    assert stopped.cycles[-1].accepted == 2


def test_the_page_loads_nothing_from_elsewhere(server: Served) -> None:
    status, body, headers = server.exchange("GET", "/")
    page, policy = body.decode(), headers["content-security-policy"]
    assert status == 200
    assert "http:" not in page
    assert "https:" not in page
    assert "innerHTML" not in page
    (script,) = re.findall("<script>(.*)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; connect-src 'self'" in policy


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_script_of_the_page_reaches_the_server(
    server: Served, tmp_path: Path
) -> None:
    command = [
        *(
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
        ),
        *(
            "--dump-dom",
            "--virtual-time-budget=3000",
            f"http://127.0.0.1:{server.port}/",
        ),
    ]
    page = subprocess.run(
        command, check=True, capture_output=True, timeout=60, text=True
    ).stdout
    assert re.search("<h1[^>]*>demo-small with sparrow</h1>", page)
    assert "demo-small knows pictures of coloured shapes alone" in page
    assert re.search('<section id="results"[^>]* hidden', page)


def test_drafters_that_are_compared_give_one_text_each_by_itself(
    workspace: Workspace, decoder: ServedDecoder
) -> None:
    other = synthetic.save("hivis", workspace.drafter("hivis"), target=decoder.target)
    both = replace(decoder, compared={"hivis": decoder.target.drafter(other)})
    with serving(both) as served:
        client = served.client()
        (model,) = client.models.list().data
        assert model.to_dict()["drafters"] == ["sparrow", "hivis"]
        asked = [{}, {"drafter": "hivis"}, {"speculate": False}]
        answers = [ask(client, extra_body=one) for one in asked]
        used = [answer.to_dict()["decoding"]["drafter"] for answer in answers]
        assert used == ["sparrow", "hivis", None]
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        with pytest.raises(openai.BadRequestError, match="this server has sparrow, h"):
            ask(client, extra_body={"drafter": "wren"})


VERDICT = """
const turns = JSON.parse(process.argv[1]), names = JSON.parse(process.argv[2]);
const run = (seconds) => ({ text: "x", facts: { seconds, tokens: 10 } });
const runs = turns.map((turn) => turn.map(run));
console.log(JSON.stringify(verdict(runs, runs, false, names)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("seconds", "names", "answer", "said"),
    [
        ([[4, 2]] * 6, ["a"], "2.00x as fast", "identical in every run"),
        ([[4, 2]], ["a"], "2.00x so far", "2.00x in one run of each"),
        ([[2, 4]] * 6, ["a"], "0.50x: slower", ""),
        ([[4, 4], [4, 3]] * 3, ["a"], "No clear difference", ""),
        ([[4, 2, 1]] * 6, ["a", "b"], "b: 4.00x as fast", "b over a: 2.00x"),
        ([[4, 1, 2], [4, 2, 1]] * 3, ["a", "b"], "The drafters do not differ", ""),
    ],
)
def test_the_page_says_which_is_faster(
    seconds: list[list[float]], names: list[str], answer: str, said: str
) -> None:
    script = source("endpoint/page.js")
    start, end = script.index("/* Seconds a token"), script.index("function tell")
    program = f"const FEWEST = 6;\n{script[start:end]}\n{VERDICT}"
    command = ["node", "-e", program, json.dumps(seconds), json.dumps(names)]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=60)
    found = json.loads(printed.stdout.decode().replace("\u00d7", "x"))
    assert found[0].startswith(answer)
    assert said in found[1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_p": 0.5}, "top_p"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"best_of": 2}, "best_of"),
        ({"top_k": 5}, "top_k"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": "a" * 1_000_000}, "stop.0"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "messages"),
    ],
)
def test_a_bad_parameter_is_named(
    server: Served, options: dict[str, Any], param: str
) -> None:
    body = {
        "model": "demo-small",
        "messages": [{"role": "user", "content": QUESTION}],
        **options.pop("extra_body", {}),
    }
    raw = json.dumps({**body, **options}).encode()
    status, given = server.request(
        "POST", "/v1/chat/completions", raw, Content_Type="application/json"
    )
    error = json.loads(given)["error"]
    assert (status, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    )
    assert "Traceback" not in error["message"]


def test_the_openai_client_raises_what_it_raises_for_openai(server: Served) -> None:
    with pytest.raises(
        openai.BadRequestError, match="'n' is not supported: leave it out, or send 1"
    ) as bad:
        ask(server.client(), n=2)
    assert (bad.value.param, bad.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(
        openai.NotFoundError,
        match="there is no model 'other': this server has 'demo-small'",
    ):
        ask(server.client(), model="other")
    neutral = {
        "n": 1,
        "top_p": 1.0,
        "frequency_penalty": 0,
        "logprobs": False,
        "tools": [],
        "user": "me",
    }
    assert ask(server.client(), max_tokens=1, **neutral).usage.completion_tokens == 1


@pytest.mark.parametrize(
    "options",
    [
        {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "ignore_eos": False,
        },
        {
            "store": False,
            "metadata": {},
            "service_tier": "auto",
            "modalities": ["text"],
            "top_logprobs": 0,
        },
        {
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "functions": [],
        },
        {
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": True},
        },
    ],
)
def test_what_changes_nothing_is_taken(server: Served, options: dict[str, Any]) -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "Hi.",
            "annotations": [],
            "tool_calls": [],
            "refusal": None,
        },
        {"role": "user", "content": QUESTION},
    ]
    body = json.dumps(
        {"model": "demo-small", "messages": turns, "max_tokens": 1, **options}
    ).encode()
    status, given = server.request(
        "POST", "/v1/chat/completions", body, Content_Type="application/json"
    )
    assert status == 200, given


def test_an_image_may_have_broken_lines_and_ask_for_detail(server: Served) -> None:
    header, data = data_url(Image.new("RGB", (84, 84), "blue")).split(",")
    broken = "\n".join(data[start : start + 76] for start in range(0, len(data), 76))
    images = [
        {"url": f"{header},{broken}\n", "detail": "high"},
        {"url": f"{header},{data}"},
    ]
    lengths = []
    for image in images:
        content = [
            {"type": "image_url", "image_url": image},
            {"type": "text", "text": "What is this?"},
        ]
        turns = [{"role": "user", "content": content}]
        body = json.dumps(
            {"model": "demo-small", "messages": turns, "max_tokens": 1}
        ).encode()
        status, given = server.request(
            "POST", "/v1/chat/completions", body, Content_Type="application/json"
        )
        assert status == 200, given
        lengths.append(json.loads(given)["usage"]["prompt_tokens"])
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"[" * 100_000, b"\xff", b'{"\\ud800": 1}']
)
def test_a_body_that_is_no_request_is_refused(server: Served, body: bytes) -> None:
    for kind in ("application/json", "text/plain"):
        status, given = server.request(
            "POST", "/v1/chat/completions", body, Content_Type=kind
        )
        assert (status, json.loads(given)["error"]["type"]) == (
            400,
            "invalid_request_error",
        )


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"{}", "application/x-www-form-urlencoded", "-H 'Content-Type: application"),
        (b"{", "application/json", "the body is not JSON: Expecting"),
        (b"[]", "application/json", "the body is an array, not a JSON object"),
        (b"", "application/json", "the body is empty"),
    ],
)
def test_the_error_says_whether_the_body_or_its_header_is_wrong(
    server: Served, body: bytes, kind: str, words: str
) -> None:
    _, given = server.request("POST", "/v1/chat/completions", body, Content_Type=kind)
    assert words in json.loads(given)["error"]["message"]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": 3}, "decimal_above_max_value"),
        ({"temperature": -1.5}, "decimal_below_min_value"),
        ({"max_tokens": 0}, "integer_below_min_value"),
        ({"max_tokens": 1.5}, "invalid_type"),
        ({"seed": 2**70}, "integer_above_max_value"),
        ({"stop": list("abcde")}, "array_above_max_length"),
        ({"stop": [""]}, "string_below_min_length"),
        ({"messages": "hi"}, "invalid_type"),
        ({"messages": []}, "array_below_min_length"),
        ({"messages": [5]}, "invalid_type"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_value",
        ),
        ({"model": None}, "missing_required_parameter"),
        ({"stream_options": 5}, "invalid_type"),
        ({"foo": 1}, "unsupported_parameter"),
        ({"top_k": 5}, "unsupported_parameter"),
    ],
)
def test_a_refusal_has_the_codes_of_the_api_and_no_words_of_the_library(
    server: Served, given: dict[str, Any], code: str
) -> None:
    body = {
        "model": "demo-small",
        "messages": [{"role": "user", "content": QUESTION}],
        **given,
    }
    raw = json.dumps(body)
    status, answer = server.request(
        "POST", "/v1/chat/completions", raw, Content_Type="application/json"
    )
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, code)
    assert all(
        words not in error["message"]
        for words in ("Input should", "Value error", "validation")
    )
    assert next(iter(given)) in (error["param"] or "")


def _bomb() -> str:
    return data_url(Image.new("1", (9000, 9000)))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (lambda _: "http://127.0.0.1/scene.png", "images are not downloaded"),
        (lambda _: "https://example.com/scene.png", "images are not downloaded"),
        (lambda _: "scene.png", "images are not downloaded"),
        (lambda _: "http://[", "Invalid IPv6 URL"),
        (lambda _: "data:image/png,abc", "a data URL looks like"),
        (lambda _: "data:image/png;base64,*", "base64"),
        (
            lambda _: data_url(b"no image"),
            "url: this is no PNG, JPEG, WebP or GIF, or it is damaged",
        ),
        (
            lambda _: data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
            "this is no PNG",
        ),
        (lambda _: _bomb(), "9000 x 9000 pixels are too many"),
        (
            lambda media: f"file://{media}/absent.png",
            "no such file in the server's media folder",
        ),
        (
            lambda media: f"file://{media}/../secret.png",
            "no such file in the server's media folder",
        ),
        (
            lambda media: f"file://{media}/%2e%2e/secret.png",
            "no such file in the server's media folder",
        ),
        (
            lambda media: f"file://{media}/link.png",
            "no such file in the server's media folder",
        ),
        (lambda media: f"file://{media}", "no such file in the server's media folder"),
        (lambda media: f"file://{media}/%00.png", "null "),
        (lambda media: f"file://{media}/{'x' * 300}.png", "File name too long"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(
    server: Served, media: Path, url: Callable[[Path], str], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as bad:
        ask(server.client(), shown(url(media)))
    assert bad.value.param == "messages.0.content.0.image_url.url"


def test_many_images_share_one_limit_of_pixels(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {
        "type": "image_url",
        "image_url": {"url": data_url(Image.new("RGB", (84, 84)))},
    }
    monkeypatch.setattr(chat, "MAX_PIXELS", 2 * 84 * 84)
    monkeypatch.setattr(chat, "MIN_PIXELS", 84 * 84)
    assert ask(server.client(), [part, part], max_tokens=1).usage.completion_tokens == 1
    with pytest.raises(
        openai.BadRequestError, match="84 x 84 pixels are too many"
    ) as bad:
        ask(server.client(), [part, part, part])
    assert bad.value.param == "messages.0.content.2.image_url.url"
    part["image_url"] = {
        "url": data_url(Image.new("RGB", (1, 1)))
    }  # which a processor enlarges
    with pytest.raises(openai.BadRequestError, match="1 x 1 pixels are too many"):
        ask(server.client(), [part, part, part])


@pytest.mark.parametrize("field", ["messages", "content", "stream_options", "unknown"])
def test_a_body_of_many_faults_is_refused_for_the_first(
    server: Served, field: str
) -> None:
    """An error for each would take a thousand times the memory of the body."""
    turn = {"role": "user", "content": [0] * 2000 if field == "content" else QUESTION}
    body: dict[str, Any] = {
        "model": "demo-small",
        "messages": [0] * 2000 if field == "messages" else [turn],
    }
    many = {f"field{number}": 0 for number in range(2000)}
    body |= (
        many
        if field == "unknown"
        else {"stream_options": many}
        if field == "stream_options"
        else {}
    )
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(body)
    assert len(found.value.errors()) == 1
    status, _ = server.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body).encode(),
        Content_Type="application/json",
    )
    assert status == 400


def test_without_a_media_folder_no_file_is_read(
    decoder: ServedDecoder, media: Path
) -> None:
    with (
        serving(decoder) as served,
        pytest.raises(openai.BadRequestError, match="runs without --media"),
    ):
        ask(served.client(), shown(f"file://{media}/scene.png"))


def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_BODY", 10_000)
    with pytest.raises(openai.APIStatusError, match="larger than 10000 bytes") as large:
        ask(server.client(), 20_000 * "x")
    assert large.value.status_code == 413
    body, kind = iter([b"x" * 6000] * 2), "application/json"
    status, _ = server.request(
        "POST", "/v1/chat/completions", body, chunked=True, Content_Type=kind
    )
    assert status == 413


@pytest.mark.parametrize(
    ("limit", "sent", "status"),
    [
        ((connections, "HEADER_SECONDS"), b"", b""),
        (
            (connections, "HEADER_SECONDS"),
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
            b"",
        ),
        (
            (gate, "BODY_SECONDS"),
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9\r\n\r\n{",
            b"HTTP/1.1 408 ",
        ),
    ],
)
def test_a_client_that_sends_no_more_does_not_keep_its_connection(
    decoder: ServedDecoder,
    monkeypatch: pytest.MonkeyPatch,
    limit: tuple[Any, str],
    sent: bytes,
    status: bytes,
) -> None:
    monkeypatch.setattr(*limit, 0.2)
    with (
        serving(decoder) as served,
        socket.create_connection(("127.0.0.1", served.port), 60) as client,
    ):
        client.sendall(sent)
        assert client.recv(1000).startswith(status)


def test_a_key_is_needed_for_all_but_the_page_and_health(
    decoder: ServedDecoder,
) -> None:
    with serving(decoder, key=KEY) as served:
        for wrong in ("a", "a keys", "A KEY"):
            with pytest.raises(
                openai.AuthenticationError, match="the key is missing or wrong"
            ):
                served.client(wrong).models.list()
        assert served.client(KEY).models.list().data[0].id == "demo-small"
        status = {
            path: served.request("GET", path)[0]
            for path in ("/", "/health", "/metrics", "/openapi.json")
        }
        assert status == {
            "/": 200,
            "/health": 200,
            "/metrics": 401,
            "/openapi.json": 401,
        }
        assert (
            served.request("GET", "/metrics", Authorization=f"Bearer {KEY}")[0] == 200
        )
        assert served.request("GET", "/metrics", Authorization=f"Basic {KEY}")[0] == 401
        # The key is checked before the body is read.
        assert served.request("POST", "/v1/chat/completions", b"{")[0] == 401


def test_another_host_name_is_refused(decoder: ServedDecoder) -> None:
    with serving(decoder, hosts=["127.0.0.1", "[::1]"]) as served:
        for host in ("127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"):
            assert served.request("GET", "/health", Host=host)[0] == 200
        for host in ("rebound.example", "127.0.0.1.example", "x@127.0.0.1", "[::1", ""):
            status, body = served.request("GET", "/health", Host=host)
            assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_host")


def test_a_fault_of_the_server_shows_no_detail(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a detail")

    monkeypatch.setattr(ServedDecoder, "decode", fail)
    with serving(decoder) as served:
        with pytest.raises(openai.InternalServerError) as error:
            ask(served.client())
        assert "a detail" not in str(error.value)
        assert served.metric('vlmdistill_requests_total{outcome="error"}') == 1
        monkeypatch.undo()
        assert ask(served.client(), max_tokens=1).usage.completion_tokens == 1


def test_a_fault_within_a_stream_is_its_last_event(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ServedDecoder.decode

    def failing(*given: Any) -> tuple[int, Iterator[Cycle]]:
        length, cycles = decode(*given)

        def some() -> Iterator[Cycle]:
            yield from (next(cycles), next(cycles))
            raise RuntimeError("a detail")

        return length, some()

    monkeypatch.setattr(ServedDecoder, "decode", failing)
    with serving(decoder) as served:
        with pytest.raises(
            openai.APIError, match="the server failed; its log has the error"
        ):
            list(ask(served.client(), stream=True))
        assert served.metric('vlmdistill_requests_total{outcome="error"}') == 1
        monkeypatch.undo()
        assert ask(served.client(), max_tokens=1).usage.completion_tokens == 1


@dataclass(frozen=True)
class Braked(ServedDecoder):
    """Waits for a permit before each cycle."""

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    begun: list[int] = field(default_factory=list)

    def decode(
        self, request: ChatRequest, media: Path | None
    ) -> tuple[int, Iterator[Cycle]]:
        length, cycles = super().decode(request, media)

        def braked() -> Iterator[Cycle]:
            self.begun.append(0)
            while self.permits.acquire(timeout=400) and (cycle := next(cycles, None)):
                self.begun[-1] += 1
                yield cycle

        return length, braked()


@pytest.fixture
def braked(decoder: ServedDecoder) -> Braked:
    return Braked(decoder.model, decoder.target)


def open_stream(served: Served, **options: Any) -> AbstractContextManager[Any]:
    client = served.client()
    stream = ask(client, stream=True, **options)
    assert isinstance(stream, openai.Stream)
    return stream


def test_a_client_that_disconnects_stops_its_response(braked: Braked) -> None:
    with serving(braked) as served:
        braked.permits.release(2)
        with open_stream(served) as stream:
            while not next(iter(stream)).choices[0].delta.content:
                pass
        served.wait_for('requests_total{outcome="disconnected"}', 1)
        braked.permits.release(1)  # the step that was under way
        served.wait_for("requests_running", 0)
        assert braked.begun[0] <= 3
        braked.permits.release(100)
        assert ask(served.client(), max_tokens=5).usage.completion_tokens == 5


def test_an_abandoned_response_is_not_decoded_on_for_its_next_text(
    decoder: ServedDecoder,
) -> None:
    turn = {"role": "user", "content": QUESTION}
    request = ChatRequest.model_validate(
        {"model": "demo-small", "messages": [turn], "speculate": False}
    )
    response = ServedResponse(decoder, request)
    response.abandoned.set()
    list(response.pieces())
    assert len(response.cycles) == 1


def test_a_client_that_disconnects_before_its_response_frees_its_position(
    braked: Braked,
) -> None:
    with serving(braked) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, served.client(), max_tokens=3)
        served.wait_for("requests_running", 1)
        for stream in (True, False):
            with pytest.raises(openai.APITimeoutError):
                ask(served.client().with_options(timeout=0.3), stream=stream)
            served.wait_for("requests_waiting", 0)
        assert served.metric('vlmdistill_requests_total{outcome="disconnected"}') == 2
        braked.permits.release(100)
        assert first.result(60).usage.completion_tokens == 3
        assert len(braked.begun) == 1


def test_clients_wait_for_their_turn_and_more_than_the_limit_are_refused(
    braked: Braked, server: Served
) -> None:
    expected = ask(server.client()).choices[0].message.content
    with serving(braked, queue_limit=1) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, served.client())
        served.wait_for("requests_running", 1)
        second = pool.submit(ask, served.client())
        served.wait_for("requests_waiting", 1)
        with pytest.raises(
            openai.RateLimitError, match="1 requests are waiting: try again later"
        ):
            ask(served.client())
        braked.permits.release(200)
        assert [
            one.result(60).choices[0].message.content for one in (first, second)
        ] == [expected] * 2
        assert braked.begun == [48, 48]
        assert served.metric('vlmdistill_requests_total{outcome="refused"}') == 1


def test_requests_share_one_limit_of_bytes(
    braked: Braked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_BODIES", 5000)
    with serving(braked) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, served.client(), "x" * 400, max_tokens=1)
        served.wait_for("requests_running", 1)
        with pytest.raises(openai.RateLimitError):
            ask(served.client(), "x" * 4800)
        braked.permits.release(100)
        assert first.result(60).usage.completion_tokens == 1
        assert (
            ask(served.client(), "x" * 400, max_tokens=1).usage.completion_tokens == 1
        )


def test_the_target_answers_in_the_thread_that_warmed_it_up(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    prefill = VisionLanguageTarget.prefill

    def noted(self: VisionLanguageTarget, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return prefill(self, *args, **options)

    monkeypatch.setattr(VisionLanguageTarget, "prefill", noted)
    decoder = open_decoder(workspace, "sparrow")
    warm_ups = len(threads)
    for used in (decoder, replace(decoder, drafter=None)):
        with serving(used) as served:
            ask(served.client(), max_tokens=2)
    assert len(threads) == warm_ups + 2 > 2
    assert len(set(threads)) == 1  # a CUDA graph is replayed where it was recorded


def test_a_slow_reader_blocks_no_one() -> None:
    async def read() -> None:
        queue = DecoderQueue(1, decoder_thread())
        slow = queue.stream(one for one in range(1000))
        assert await anext(slow) == 0
        assert [one async for one in queue.stream(one for one in "abc")] == [
            "a",
            "b",
            "c",
        ]
        assert [one async for one in slow] == list(range(1, 1000))

    asyncio.run(asyncio.wait_for(read(), 30))


def server_of(served: Served) -> hosting.Server:
    assert served.running is not None
    return served.running


def outlives(client: socket.socket, byte: bytes) -> bool:
    """Whether a connection stays open for a client that sends a byte now and then."""
    client.settimeout(0.02)
    for _ in range(250):
        try:
            client.sendall(byte)
            if client.recv(1000) == b"":
                return False
        except TimeoutError:
            pass
        except OSError:
            return False
    return True


REQUEST = b"%s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("key", "sent", "byte"),
    [
        (KEY, REQUEST % (b"GET /health", 0), b"G"),
        (KEY, REQUEST % (b"GET /health", 0), b"\r\n"),
        (KEY, REQUEST % (b"GET /health", 10**6), b"x"),
        (KEY, 2 * (REQUEST % (b"GET /health", 0)), b"G"),
        (KEY, REQUEST % (b"POST /v1/chat/completions", 10**6), b"x"),
        (None, REQUEST % (b"POST /v1/chat/completions", 10**6), b"x"),
    ],
)
def test_a_client_that_sends_a_byte_now_and_then_does_not_keep_its_connection(
    decoder: ServedDecoder,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    sent: bytes,
    byte: bytes,
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    with (
        serving(decoder, key=key) as served,
        socket.create_connection(("127.0.0.1", served.port)) as client,
    ):
        client.sendall(sent)
        assert not outlives(client, byte)


def test_a_client_that_reads_nothing_does_not_keep_its_connection(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.3)
    with serving(decoder) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.sendall(200 * (REQUEST % (b"GET /", 0)))
        end = time.monotonic() + 60
        while server_of(served).server_state.connections:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_idle_connections_give_way_and_busy_ones_do_not(
    braked: Braked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.Capacity, "now", lambda: connections.Capacity(3, 2))
    with (
        ExitStack() as opened,
        serving(braked) as served,
        ThreadPoolExecutor(3) as pool,
    ):
        at = ("127.0.0.1", served.port)
        for _ in range(9):
            opened.enter_context(socket.create_connection(at)).sendall(b"GET")
        answers = [pool.submit(ask, served.client(), max_tokens=1) for _ in range(3)]
        end = time.monotonic() + 60
        while len(server_of(served).server_state.tasks) < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
        with pytest.raises(openai.InternalServerError) as refused:
            ask(served.client())
        assert (refused.value.status_code, refused.value.code) == (503, "busy")
        assert int(refused.value.response.headers["Retry-After"])
        braked.permits.release(100)
        assert [one.result(60).usage.completion_tokens for one in answers] == [1, 1, 1]
        assert served.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("allowed", [20, 96, 1024, 10**6])
def test_a_server_leaves_descriptors_for_files(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_open_descriptors", lambda: 15)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    capacity = connections.Capacity.now()
    assert capacity.connections >= 1
    assert capacity.at_once >= 1
    assert capacity.connections + 3 * capacity.at_once <= allowed - 15


def test_a_server_that_ends_answers_all_requests_in_the_form_of_the_api(
    braked: Braked, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(braked, queue_limit=9) as served, ThreadPoolExecutor(4) as pool:
        braked.permits.release(3)
        events = iter(ask(served.client(), stream=True))
        while not next(events).choices[0].delta.content:
            pass
        waiting = [
            pool.submit(ask, served.client(), stream=bool(one)) for one in (0, 1, 0, 1)
        ]
        served.wait_for("requests_waiting", 4)
        monkeypatch.setattr(hosting, "GRACE_SECONDS", 0.5)
        server_of(served).should_exit = True
        for one in waiting:
            with pytest.raises(openai.InternalServerError) as refused:
                one.result(60)
            assert (refused.value.status_code, refused.value.code) == (
                503,
                "server_stopped",
            )
            assert int(refused.value.response.headers["Retry-After"])
        with pytest.raises(openai.APIError) as cut:
            list(events)
        assert cut.value.code == "server_stopped"
        braked.permits.release(100)


def test_a_request_on_which_the_tokenizer_panics_is_refused_in_the_form_of_the_api(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = load(
        str(tiny.panicking(tiny.checkpoint("qwen2_5_vl", tmp_path / "target")))
    )
    with serving(ServedDecoder("demo-small", target)) as served:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                ask(served.client(), tiny.PANIC, stream=stream)
        assert ask(served.client(), "hello", max_tokens=1).usage.completion_tokens == 1
    capfd.readouterr()


def test_a_server_that_ends_answers_whoever_still_sends(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "GRACE_SECONDS", 0)
    monkeypatch.setattr(hosting, "ANSWER_SECONDS", 1)
    with (
        serving(decoder) as served,
        socket.create_connection(("127.0.0.1", served.port), 60) as client,
    ):
        client.sendall(REQUEST % (b"POST /v1/chat/completions", 10**6) + b"{")
        end = time.monotonic() + 60
        while not server_of(served).server_state.tasks:
            assert time.monotonic() < end
            time.sleep(0.02)
        server_of(served).should_exit = True
        answer = b""
        while part := client.recv(1000):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "server_stopped"
