"""What a harvest keeps of logs, what it drops and why, and that nothing else is left of what it dropped."""

import base64
import gzip
import json
import re
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.fifos import fifo
from tests.pipelines.targets.test_thinking import with_switch
from tests.pipelines.traffic.conftest import (
    ANSWER,
    NOW,
    REASONING,
    asked,
    data_url,
    exchange,
    said,
    taken,
    thought,
    workspace_of,
    write,
)
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.loading import load_encoder
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.traffic import harvest as traffic
from vlmdistill.pipelines.traffic.dialects import Exchange
from vlmdistill.pipelines.traffic.harvest import MEDIA, harvest
from vlmdistill.pipelines.traffic.logs import Copies, Log, LogFile
from vlmdistill.pipelines.traffic.policy import Policy
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_prompts_and_responses_of_a_log_are_kept_once(
    workspace: Workspace, encoder: TargetModel
) -> None:
    lines = [exchange(number) for number in range(6)] + [exchange(2)]
    made = taken(workspace, lines)
    assert (made.exchanges, made.kept, made.dropped, made.tokens) == (
        7,
        6,
        {"duplicate": 1},
        {"text": 6},
    )
    prompts = {one.key: one for one in prompt_table.read(workspace.prompts)}
    rows = {row.key: row for row in dataset.read(workspace.responses)}
    assert prompts.keys() == rows.keys()
    assert sorted(one.time or 0 for one in prompts.values()) == [
        NOW + number for number in range(6)
    ]
    assert {one.dataset for one in prompts.values()} == {made.dataset}
    for key, row in rows.items():
        ids = [int(one) for one in row.ids]
        assert ids[-1] in encoder.info.eos_ids
        assert encoder.tokenizer.decode(ids, skip_special_tokens=True) == row.text
        assert encoder.encode(prompts[key].messages).length == row.prompt_tokens
    again = taken(workspace, [*lines, exchange(7)])
    assert (again.kept, again.known) == (1, 7)  # one of them twice
    unchanged = harvest(
        workspace, [str(workspace.root.parents[1] / "log.jsonl")], Policy()
    )
    assert (unchanged.files, unchanged.unchanged, unchanged.exchanges) == (0, 1, 0)
    audit = [
        json.loads(line)
        for line in (workspace.traffic / "audit.jsonl").read_text().splitlines()
    ]
    assert [line["kept"] for line in audit] == [6, 1, 0]


def test_tokens_are_those_of_the_server_or_checked_against_its_text_and_counts(
    workspace: Workspace, encoder: TargetModel
) -> None:
    text = ANSWER.format("no")
    ids = encoder.tokenizer.encode(text, add_special_tokens=False)
    pieces = [encoder.tokenizer.decode([one]) for one in ids]
    usage = {"prompt_tokens": encoder.encode(asked("Q 3?")["messages"]).length}
    responses = {
        "Q 0?": said(text, token_ids=ids),
        "Q 1?": said(
            text, logprobs={"content": [{"token": f"token_id:{one}"} for one in ids]}
        ),
        "Q 2?": said(text, logprobs={"content": [{"token": one} for one in pieces]}),
        "Q 3?": said(text, usage={**usage, "completion_tokens": len(ids) + 1}),
        "Q 4?": said(text, token_ids=ids[:-1]),  # tokens differ from the text
        "Q 5?": said(text, token_ids=[10**6]),
        "Q 6?": said(text, usage={"completion_tokens": len(ids) + 3}),
        "Q 7?": said(text, usage={"prompt_tokens": 3}),
        "Q 8?": said(text, finish="content_filter"),
        "Q 9?": {"choices": []},
    }
    responses["Q 3?"]["prompt_token_ids"] = encoder.encode(
        asked("Q 3?")["messages"]
    ).ids_L.tolist()
    made = taken(
        workspace,
        [
            {"request": asked(question), "response": one, "time": NOW}
            for question, one in responses.items()
        ],
    )
    assert made.kept == 4
    assert sum(made.tokens.values()) == 4
    assert made.tokens["ids"] == made.tokens["text"] == 1
    assert made.dropped == {
        "tokens differ from the text": 1,
        "tokens of another target": 1,
        "another number of tokens": 1,
        "another prompt": 1,
        "not ended": 1,
        "no response": 1,
    }
    eos = {
        tuple(int(one) for one in row.ids) for row in dataset.read(workspace.responses)
    }
    assert {one[:-1] for one in eos} == {tuple(ids)}


def test_what_was_cut_or_read_otherwise_is_dropped_without_counts_too(
    workspace: Workspace, encoder: TargetModel
) -> None:
    cut = "What is ... (litellm_truncated 900 chars) ... in it?"
    counted = {"prompt_tokens": encoder.encode(asked("Q 5?")["messages"]).length}
    lines = [
        exchange(0, request=asked(cut)),
        exchange(
            1, response=said(ANSWER.format("(litellm_truncated skipped 12 chars) "))
        ),
        exchange(2, request=asked("Q 2?", chat_template="{{ messages }}")),
        exchange(3, request=asked("Q 3?", mm_processor_kwargs={"max_pixels": 784})),
        exchange(4, request=asked("Q 4?", chat_template_kwargs={})),
        exchange(
            5,
            request=asked("Q 5?", chat_template_kwargs={"enable_thinking": False}),
            response=said(ANSWER.format("no"), usage=counted),
        ),
        exchange(6, request=asked("Q 6?", previous_response_id="r_5")),
        exchange(7, request=asked("Q 7?", add_generation_prompt=False)),
        exchange(8, request=asked("Q 8?", add_generation_prompt=True)),
        exchange(9, request=asked("Q 9?", media_io_kwargs={"video": {"fps": 1}})),
        exchange(10, request=asked("Q 10?", reasoning={"effort": "high"})),
        exchange(11, request=asked("Q 11?", reasoning={"effort": None})),
        exchange(12, request=asked("Who is this? ASSISTANT:")),
        exchange(13, request=asked("Q 13?", data_sources=[{"type": "azure_search"}])),
        exchange(14, request=asked("Q 14?", enable_thinking=False)),
        exchange(15, request=asked("Q 15?", extra_body={"documents": ["A wall."]})),
        exchange(16, request=asked("Q 16?", extra_body={"top_k": 3})),
        exchange(17, request=asked("Q 17?", instructions=[{"role": "system"}])),
    ]
    for number, role in enumerate(("assistant", "model"), len(lines)):
        request = asked(f"Q {number}?")
        request["messages"].append({"role": role, "content": ""})
        lines.append(exchange(number, request=request))
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (6, {"another prompt": 12, "cut text": 2})


def target_with_switch(thinking: Thinking, folder: Path) -> TargetModel:
    plain = tiny.checkpoint("qwen2_5_vl", folder / "plain", layers=1)
    return load_encoder(str(with_switch(plain, folder / "target")), thinking)


def test_prompts_are_read_with_the_thinking_of_the_responses(tmp_path: Path) -> None:
    workspace = workspace_of(target_with_switch("off", tmp_path))
    lines = []
    modes: tuple[Thinking, ...] = ("off", "on", "off")
    for number, mode in enumerate(modes):
        request = asked(f"Which board is number {number}?")
        encoder = load_encoder(workspace.model, mode)
        ids = encoder.encode(request["messages"]).ids_L.tolist()
        counts = {"prompt_tokens": len(ids)}
        response = said(ANSWER.format(number), usage=counts)
        lines.append(exchange(number, request=request, response=response))
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (2, {"another prompt": 1})


@pytest.mark.parametrize("thinking", ["off", "mixed"])
def test_a_redacted_prompt_was_read_as_it_was_logged(
    tmp_path: Path, thinking: Thinking
) -> None:
    workspace = workspace_of(target_with_switch(thinking, tmp_path))
    own_encoder = load_encoder(workspace.model, thinking)
    lines = []
    kept_questions = set()
    modes: tuple[Thinking, ...] = ("off", "on")
    for number in range(10, 18):
        mode = modes[number % 2]
        encoder = load_encoder(workspace.model, mode)
        question = f"Which board is number {number}?"
        redacted = question.replace("number", "no.")
        messages = asked(redacted)["messages"]
        if encoder.encode(messages).length == own_encoder.encode(messages).length:
            kept_questions.add(redacted)
        request = asked(question)
        ids = encoder.encode(request["messages"]).ids_L.tolist()
        text = ANSWER.format(number)
        count = len(encoder.tokenizer.encode(text, add_special_tokens=False))
        usage = {"prompt_tokens": len(ids), "completion_tokens": count}
        response = said(text, usage=usage)
        response["prompt_token_ids"] = ids
        lines.append(exchange(number, request=request, response=response))
    harvested = taken(workspace, lines, redact=f"{__name__}:redact")
    questions = {
        prompt.messages[0]["content"][0]["text"]
        for prompt in prompt_table.read(workspace.prompts)
    }
    assert questions == kept_questions
    assert harvested.dropped == {"another prompt": 8 - len(kept_questions)}


def test_a_video_without_counts_is_dropped(tmp_path: Path) -> None:
    """Servers choose its frames, and the target's own choice is another."""
    workspace = Workspace.of("demo-video", tmp_path / "runs")
    file = tmp_path / "1.mp4"
    tiny.film(file, tiny.clip(6, 32, 32))
    target = load_encoder("demo-video")
    parts = [{"type": "video", "path": str(file)}, {"type": "text", "text": "What?"}]
    counted = target.encode([{"role": "user", "content": parts}]).length
    content = base64.b64encode(file.read_bytes()).decode()
    part = {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{content}"},
    }
    lines = []
    for number, usage in enumerate((None, {"prompt_tokens": counted})):
        request = asked("What?")
        request["messages"][0]["content"].insert(0, part)
        response = said(ANSWER.format(number), usage=usage)
        lines.append(exchange(number, request=request, response=response))
    harvested = taken(workspace, lines)
    assert (harvested.kept, harvested.dropped) == (1, {"another prompt": 1})


def without_marked_media(given: dict[str, Any]) -> Any:
    """A redaction that takes the first part out of questions of secrets."""
    content = given["messages"][0]["content"]
    if "secret" in content[-1]["text"]:
        content.pop(0)
    content[-1]["text"] = content[-1]["text"].replace("secret", "[WORD]")
    content[-1]["text"] = content[-1]["text"].replace("shapes", "[THINGS]")
    return given


def test_a_redacted_prompt_was_read_with_its_images(
    workspace: Workspace, encoder: TargetModel
) -> None:
    def shown(number: int, question: str, more_tokens: int = 0) -> dict[str, Any]:
        request = asked(question, data_url(number))
        image = {"type": "image", "image": tiny.picture(84, 84, number)}
        text = {"type": "text", "text": question}
        messages = [{"role": "user", "content": [image, text]}]
        count = encoder.encode(messages).length + more_tokens
        response = said(ANSWER.format(number), usage={"prompt_tokens": count})
        return exchange(number, request=request, response=response)

    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with_film = shown(4, "What does the secret film show?")
    with_film["request"]["messages"][0]["content"][0] = film
    without_count = exchange(5, request=asked("Which secret is here?", data_url(5)))
    lines = [
        shown(0, "Which shapes are in the north?"),
        shown(1, "Which shapes are in the south?", more_tokens=1),
        shown(2, "Which secret is on the board?"),
        shown(3, "Which secret is on the wall?", more_tokens=1),
        with_film,
        without_count,
    ]
    harvested = taken(workspace, lines, redact=f"{__name__}:without_marked_media")
    assert (harvested.kept, harvested.media, harvested.dropped) == (
        3,
        1,
        {"another prompt": 2, "redaction removes a video": 1},
    )
    assert b"secret" not in everything(workspace.root)


@pytest.mark.parametrize(
    "sent", ["Is it red?", [{"role": "user", "content": "Is it red?"}]]
)
def test_a_request_of_the_responses_api_is_read_without_counts(
    workspace: Workspace, sent: Any
) -> None:
    text = {"type": "output_text", "text": ANSWER.format("red")}
    message = {"type": "message", "role": "assistant", "content": [text]}
    response = {"object": "response", "status": "completed", "output": [message]}
    made = taken(
        workspace,
        [exchange(0, request={"model": "m", "input": sent}, response=response)],
    )
    assert (made.kept, made.dropped) == (1, {})
    (prompt,) = prompt_table.read(workspace.prompts)
    assert prompt.messages[-1]["content"][0]["text"] == "Is it red?"


def test_a_response_that_a_stop_token_of_its_request_ended_gets_no_eos(
    workspace: Workspace, encoder: TargetModel
) -> None:
    ids = encoder.tokenizer.encode(ANSWER.format("no"), add_special_tokens=False)
    text = encoder.tokenizer.decode(
        ids[:-1]
    )  # vLLM leaves the stop token out of the text
    request = asked("What do you see?", stop_token_ids=[ids[-1]])
    taken(workspace, [exchange(0, request=request, response=said(text, token_ids=ids))])
    (row,) = dataset.read(workspace.responses)
    assert [int(one) for one in row.ids] == ids


def test_the_eos_of_the_tokenizer_ends_a_response_that_has_it(tmp_path: Path) -> None:
    """As vLLM ends it, where `generation_config.json` names another EOS alone."""
    folder = tiny.checkpoint("qwen2_5_vl", tmp_path / "target", layers=1)
    encoder = load_encoder(str(folder))
    (eos_id,) = {encoder.tokenizer.eos_token_id}.intersection(encoder.info.eos_ids)
    settings = {"eos_token_id": encoder.tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert eos_id not in load_encoder(str(folder)).info.eos_ids
    text = ANSWER.format("no")
    ids = [*encoder.tokenizer.encode(text, add_special_tokens=False), eos_id]
    workspace = Workspace.of(str(folder), tmp_path / "runs")
    assert taken(workspace, [exchange(0, response=said(text, token_ids=ids))]).kept == 1
    (row,) = dataset.read(workspace.responses)
    assert list(row.ids) == ids


def test_what_is_unsure_as_it_was_logged_is_not_kept_redacted(
    workspace: Workspace, encoder: TargetModel
) -> None:
    answer = ANSWER.format("no")
    whole = f"{REASONING}\n</think>\n\n{answer}"
    ids = encoder.tokenizer.encode(whole, add_special_tokens=False)
    with_tokens = thought(answer, reasoning_content=REASONING)
    with_tokens["choices"][0]["token_ids"] = ids
    with_special = said(whole, token_ids=[ids[0], special_of(encoder), *ids[1:]])
    responses = [
        with_tokens,
        with_special,
        thought(answer, reasoning_content=REASONING),
        said(answer, usage={"completion_tokens": 500}),
    ]
    lines = [
        exchange(number, request=asked(f"Question {number}?"), response=response)
        for number, response in enumerate(responses)
    ]
    made = taken(workspace, lines, redact=f"{__name__}:redact")
    assert (made.kept, made.redacted, made.dropped) == (
        1,
        1,
        {
            "redaction would remove special tokens": 1,
            "reasoning apart from the text": 1,
            "another number of tokens": 1,
        },
    )
    (row,) = dataset.read(workspace.responses)
    assert row.text == whole.replace("north", "[PLACE]")


def special_of(encoder: TargetModel) -> int:
    """A special token that ends no response."""
    special_ids: list[int] = encoder.tokenizer.all_special_ids
    return next(token for token in special_ids if token not in encoder.info.eos_ids)


def test_text_behind_an_eos_is_dropped(
    workspace: Workspace, encoder: TargetModel
) -> None:
    text = ANSWER.format("no")
    ids = encoder.tokenizer.encode(text, add_special_tokens=False)
    eos = encoder.info.eos_ids[0]
    more = said(text + text, "length", token_ids=[*ids, eos, *ids])
    ignoring = asked("Question 1?", ignore_eos=True)
    lines = [
        exchange(0, response=said(text, token_ids=[*ids, eos])),
        exchange(1, response=more),
        exchange(2, request=ignoring, response=said(text + text, "length")),
    ]
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (1, {"text behind an EOS": 2})


def test_the_policy_drops_by_age_lists_and_share_and_the_same_ones_each_time(
    workspace: Workspace,
) -> None:
    import time

    now = time.time()
    lines = [
        exchange(0, time=now),
        exchange(1, time=now - 40 * 86400),
        {name: one for name, one in exchange(2).items() if name != "time"},
        exchange(3, time=now, headers={"X-Plan": "free"}),
        exchange(4, time=now, request=asked("A question of ann?", user="ann")),
    ]
    made = taken(workspace, lines, max_age="30d", deny={"user": "a*"})
    assert (made.kept, made.dropped) == (2, {"too old": 1, "no time": 1, "denied": 1})
    allowed = taken(workspace, lines, allow={"x-plan": ("paid", "free")})
    assert (allowed.known, allowed.dropped["not allowed"]) == (1, 4)
    many = [exchange(number) for number in range(200)]
    half, again = (
        taken(Workspace.of("demo-small", workspace.root / str(run)), many, share=0.25)
        for run in (0, 1)
    )
    assert half.kept == again.kept
    assert 25 < half.kept < 75


def test_images_are_kept_by_hash_within_the_budget_and_those_of_dropped_rows_are_not(
    workspace: Workspace, tmp_path: Path
) -> None:
    lines = [
        exchange(
            number,
            request=asked(f"Which shapes are in image {number}?", data_url(number % 3)),
        )
        for number in range(6)
    ]
    lines.append(
        exchange(
            9, request=asked("And in this one?", data_url(9)), response=said("", "stop")
        )
    )
    size = max(
        len(json.dumps(line)) for line in lines
    )  # base64 of one takes more than its bytes
    made = taken(workspace, lines, media=f"{2 * size}B")
    assert made.dropped == {"media budget": 2, "no text": 1}
    assert (made.kept, made.media) == (4, 2)
    files = {file.name for file in (workspace.root / MEDIA).iterdir()}
    named = {
        Path(part["path"]).name
        for one in prompt_table.read(workspace.prompts)
        for part in one.media
    }
    assert files == named
    beside = tmp_path / "served"
    (beside / "media").mkdir(parents=True)
    (beside / "media" / "abc").write_bytes(
        (workspace.root / MEDIA / min(files)).read_bytes()
    )
    (tmp_path / "secret.png").write_bytes(b"x")
    lines = [exchange(20, request=asked("Is it the same?", "media/abc")), exchange(21)]
    lines.append(exchange(22, request=asked("And outside?", "../secret.png")))
    write(beside / "2026-01-01.jsonl", lines)
    served = harvest(workspace, [str(beside)])
    assert (served.kept, served.media) == (2, 0)
    assert served.dropped == {"media outside of the log": 1}


def test_no_media_url_leads_out_of_the_folder_of_a_log(workspace: Workspace) -> None:
    folder = "memory://logs/served"
    file = LogFile(f"{folder}/a.jsonl", (0, 0), folder, Copies(workspace))
    for name in ("../secret.png", f"{folder}/../secret.png", f"{folder}/a/../../b.png"):
        with pytest.raises(BadRowError, match="names no object that can be copied"):
            file.media(name, 1000)
    with pytest.raises(BadRowError, match="media outside of the log"):
        file.media("memory://logs/secret.png", 1000)


def test_what_is_dropped_takes_no_room_from_what_is_kept_later(
    workspace: Workspace,
) -> None:
    def shown(number: int) -> dict[str, Any]:
        return exchange(
            number,
            request=asked(f"Which shapes are in image {number}?", data_url(number)),
        )

    lines = [shown(number) for number in range(9)] + [
        exchange(number) for number in range(9, 256)
    ]
    for line in lines:  # as many as are decided on at once
        line["response"]["usage"] = {"completion_tokens": 3}  # of another model
    lines += [shown(number) for number in range(300, 306)]
    size = max(len(json.dumps(line)) for line in lines)
    made = taken(workspace, lines, media=f"{9 * size}B")
    assert made.dropped == {"another number of tokens": 256}
    assert (made.kept, made.media) == (6, 6)
    small = taken(
        workspace, [shown(300), shown(306), exchange(307)], media="1kB"
    )  # than what is kept
    assert (small.known, small.kept, small.dropped) == (1, 1, {"media budget": 1})


def redact(given: dict[str, Any]) -> Any:
    text = given["messages"][0]["content"][0]["text"]
    if "board number 1?" in text:
        raise ValueError(f"no rule for {text}")
    if "board number 4?" in text:
        sys.exit(0)
    if "board number 5?" in text:
        raise BaseException  # as one of a library in Rust
    if "board number 2?" in text:
        return None
    given["messages"][0]["content"][0]["text"] = text.replace("number", "no.")
    return {**given, "response": given["response"].replace("north", "[PLACE]")}


def test_what_redaction_fails_on_is_dropped_and_nothing_of_it_is_on_the_disk(
    workspace: Workspace,
) -> None:
    lines = [exchange(number) for number in range(6)]
    for number in (1, 4, 5):
        lines[number]["request"] = asked(f"Secret: what is on board number {number}?")
    made = taken(workspace, lines, redact=f"{__name__}:redact")
    assert made.dropped == {"redaction failed": 3, "redacted whole": 1}
    assert (made.kept, made.redacted) == (2, 2)
    assert all("[PLACE]" in row.text for row in dataset.read(workspace.responses))
    kept = b"".join(
        str(vars(one)).encode() for one in prompt_table.read(workspace.prompts)
    )
    assert b"board no." in kept
    assert b"number" not in kept
    assert b"Secret" not in everything(workspace.root)
    with pytest.raises(DataError, match="module:function"):
        taken(workspace, lines, redact="nowhere:at_all")


def test_a_redaction_that_ends_as_it_is_imported_is_refused(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match="ending:redact"):
        taken(workspace, [exchange(0)], redact="ending:redact")


@pytest.mark.parametrize(
    ("headers", "pattern", "denied"),
    [
        ({"X-List": ["b", "no"]}, "no", True),
        ({"X-List": "b, no"}, "no", True),
        ({"X-List": "b, no"}, "b, no", True),
        ({"x-list": "b", "X-LIST": "No"}, "no", True),
        ({"x-list": "TRUE"}, "true", True),
        ({"x-list": ""}, "*", True),
        ({"x-list": "b; no=1; no"}, "no", True),
        ({"x-list": "b\nno"}, "no", True),
        ({"x-list": '"no"'}, "no ", True),
        ({"x-list": []}, "*", True),
        ({"x-list": "Jose\u0301"}, "jos\u00e9", True),
        (
            {"x-list": "jos\u00c3\u00a9"},
            "jos\u00e9",
            True,
        ),  # UTF-8 that was read as Latin-1
        ({"x-list": "\uff4e\uff4f"}, "no", True),
        ({"x-list": "n\u200bo\x00"}, "no", True),
        ({"x-list": ["b", "maybe"]}, "no", False),
        ({}, "*", False),
    ],
)
def test_a_deny_list_meets_each_value_in_any_case(
    workspace: Workspace, headers: Any, pattern: str, denied: bool
) -> None:
    made = taken(workspace, [exchange(0, headers=headers)], deny={"x-list": pattern})
    assert (made.kept, made.dropped) == ((0, {"denied": 1}) if denied else (1, {}))


def test_headers_where_none_are_read_hide_nothing(
    workspace: Workspace, tmp_path: Path
) -> None:
    said_no = {"x-list": "no"}
    plain = asked("What?")
    lines = [
        exchange(0, headers={}, Headers=said_no),
        exchange(1, headers={}, request_headers=said_no),
        exchange(2, headers={}, request={**plain, "headers": said_no}),
        exchange(3, headers={}, request={**plain, "Extra-Headers": said_no}),
        exchange(4, headers={}, request={**plain, "User": "ann"}),
        exchange(5, headers={}, request={"headers": said_no, "body": plain}),
        exchange(6, headers={"user": "ann"}),
        exchange(7, headers={}),
    ]
    made = taken(workspace, lines, deny={" X-List": "no", "user": "ann"})
    assert made.kept == 1
    assert sum(made.dropped.values()) == 7
    assert any("Headers" in reason for reason in made.dropped)
    text = json.dumps(exchange(8, headers={"x-list": "yes"}))
    twice = text.replace('{"x-list"', '{"x-list": "no", "x-list"')
    (tmp_path / "twice.jsonl").write_text(twice + "\n")
    made = harvest(workspace, [str(tmp_path / "twice.jsonl")])
    assert made.dropped == {"a key twice": 1}


@pytest.mark.parametrize(
    "headers",
    [
        "x-list: yes",
        0,
        False,
        {"x-list": [["no"]]},
        {"x-list": {"value": "no"}},
        [["x-list", "yes"]],
        [{"name": "x-list", "value": "no"}],
    ],
)
def test_headers_of_another_form_are_not_taken_for_none(
    workspace: Workspace, headers: Any
) -> None:
    made = taken(workspace, [exchange(0, headers=headers)], deny={"x-list": "no"})
    (reason,) = made.dropped
    assert "$.headers" in reason


def test_a_user_that_is_no_text_is_unknown(workspace: Workspace) -> None:
    lines = [
        exchange(0, request=asked("What?", user=user))
        for user in (["ann"], {"id": "ann"})
    ]
    assert taken(workspace, lines, deny={"user": "ann"}).dropped == {
        "unknown headers": 2
    }


def test_what_the_log_does_not_tell_is_dropped(workspace: Workspace) -> None:
    lines = [
        exchange(0),  # no headers at all
        exchange(1, headers={}, header_names=["x-other"]),
        exchange(2, headers={}, header_names=["X-List"]),
        exchange(3, headers={}, header_names="x-list"),
    ]
    made = taken(workspace, lines, deny={"x-list": "no", "user": "ann"})
    unreadable = [reason for reason in made.dropped if "$.header_names" in reason]
    assert made.kept == 1
    assert made.dropped == {"unknown headers": 2, unreadable[0]: 1}
    other = Workspace.of("demo-small", workspace.root / "other")
    assert taken(other, lines, deny={"user": "ann"}).kept == 3


def test_an_allow_list_must_match_every_value(workspace: Workspace) -> None:
    lines = [
        exchange(0, headers={"x-team": ["red", "blue"]}),
        exchange(1, headers={"x-team": ["red"] * 2}),
    ]
    assert taken(workspace, lines, allow={"x-team": "r*"}).dropped == {"not allowed": 1}


def test_the_requests_of_a_conversation_are_on_one_side_though_an_image_comes_late(
    workspace: Workspace,
) -> None:
    lines = []
    for number in range(30):
        first = {"role": "user", "content": f"Question {number}?"}
        then = [
            {"role": "assistant", "content": "Show me."},
            *asked("Here.", data_url(number))["messages"],
        ]
        lines.append(exchange(number, request={"messages": [first]}))
        lines.append(exchange(100 + number, request={"messages": [first, *then]}))
    file = str(write(workspace.root.parents[1] / "log.jsonl", lines))
    assert harvest(workspace, [file], eval_share=0.5).kept == 60
    sides: dict[str, list[str]] = {}
    for one in prompt_table.read(workspace.prompts):
        sides.setdefault(one.messages[0]["content"][0]["text"], []).append(one.split)
    assert {(*side,) for side in sides.values()} == {
        ("train", "train"),
        ("eval", "eval"),
    }


def test_near_duplicates_are_dropped_and_counted(workspace: Workspace) -> None:
    first = exchange(0, request=asked("What do you see?"))
    lines = [first, exchange(1, request=asked("what  do you see ?!")), exchange(2)]
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (2, {"near-duplicate": 1})


def test_batches_folders_and_odd_lines(workspace: Workspace, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    requests = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": asked(f"Q {number}?"),
        }
        for number in range(3)
    ]
    answers = [
        {
            "custom_id": f"r{number}",
            "response": {"status_code": 200, "body": said(ANSWER.format(number))},
        }
        for number in (2, 0, 7)
    ]
    answers.append({"custom_id": "r1", "response": {"status_code": 500, "body": {}}})
    write(folder / "a" / "input.jsonl", requests)
    write(folder / "b" / "output.jsonl", answers)
    (folder / "b" / "rest.jsonl").write_text(
        '{"cut off\n[]\n' + json.dumps({"request": {}}) + "\n"
    )
    (folder / "notes.md").write_text("no log")
    turns = [
        *asked("Q 10?")["messages"],
        {"role": "assistant", "content": "A."},
        *asked("Q 11?")["messages"],
    ]
    write(
        folder / "more.jsonl",
        [
            {
                "request": {**asked(""), "messages": turns},
                "response": said(ANSWER.format("y")),
            },
            {
                "request": asked("Q tools?", tools=[{}]),
                "response": said(ANSWER.format("z")),
            },
        ],
    )
    made = harvest(workspace, [str(folder)], Policy())
    assert made.kept == 3
    (unreadable,) = (reason for reason in made.dropped if "`response`" in reason)
    assert Counter(made.dropped) == {
        "no request": 1,
        "failed request": 1,
        "invalid JSON": 1,
        "not an object": 1,
        unreadable: 1,
        "tools": 1,
    }
    lengths = {len(one.messages) for one in prompt_table.read(workspace.prompts)}
    assert lengths == {1, 3}
    with pytest.raises(DataError, match="no log"):
        harvest(workspace, [str(tmp_path / "nothing")])
    with pytest.raises(DataError, match="s3://"):
        harvest(workspace, ["https://example.org/log.jsonl"])


def batch(name: int) -> tuple[list[Any], list[Any]]:
    """The input and the output of a batch that counts from 1, as the others do."""
    requests = [
        {"custom_id": f"r{at}", "body": asked(f"Q {at} of {name}?")} for at in range(2)
    ]
    bodies = [said(ANSWER.format(f"{at} of {name}")) for at in range(2)]
    answers = [
        {"custom_id": f"r{at}", "response": {"body": body}}
        for at, body in enumerate(bodies)
    ]
    return requests, answers


def test_a_batch_whose_requests_come_later_is_kept_then(
    workspace: Workspace, tmp_path: Path
) -> None:
    requests, answers = batch(1)
    output = str(write(tmp_path / "output.jsonl", answers))
    assert harvest(workspace, [output]).dropped == {"no request": 2}
    made = harvest(workspace, [output, str(write(tmp_path / "input.jsonl", requests))])
    assert (made.kept, made.unchanged) == (2, 0)


def test_an_answer_is_never_that_to_another_batchs_request_of_the_same_id(
    workspace: Workspace, tmp_path: Path
) -> None:
    for name in (1, 2):
        requests, answers = batch(name)
        write(tmp_path / str(name) / "input.jsonl", requests)
        write(tmp_path / str(name) / "output.jsonl", answers)
    assert harvest(workspace, [str(tmp_path / "1"), str(tmp_path / "2")]).dropped == {
        "several requests": 4
    }
    assert [harvest(workspace, [str(tmp_path / name)]).kept for name in "12"] == [2, 2]
    texts = {row.key: row.text for row in dataset.read(workspace.responses)}
    for one in prompt_table.read(workspace.prompts):
        question = one.messages[0]["content"][0]["text"]
        assert question.removeprefix("Q ").removesuffix("?") in texts[one.key]


def test_a_line_whose_image_comes_later_is_kept_then(
    workspace: Workspace, tmp_path: Path
) -> None:
    log = str(
        write(tmp_path / "log.jsonl", [exchange(1, request=asked("Which?", "1.png"))])
    )
    assert harvest(workspace, [log]).dropped == {"missing media": 1}
    tiny.picture(84, 84, 1).save(tmp_path / "1.png")
    assert harvest(workspace, [log]).kept == 1


def litellm(number: int, **changes: Any) -> dict[str, Any]:
    """A standard logging payload of LiteLLM, with some of its many fields."""
    line = exchange(number)
    payload = {
        "id": f"chatcmpl-{number}",
        "call_type": "acompletion",
        "status": "success",
        "startTime": NOW + number,
        "endTime": NOW + number + 0.5,
        "model": "demo-small",
        "messages": line["request"]["messages"],
        "response": line["response"],
        "model_parameters": {"temperature": 0.5},
        "metadata": {"user_api_key_alias": None, "requester_custom_headers": {}},
        "end_user": "",
    }
    return {**payload, **changes}


def test_payloads_of_litellm_are_read(workspace: Workspace) -> None:
    denied = {"requester_custom_headers": {"x-list": "no"}}
    other_user = {"model_parameters": {"user": "bob"}, "end_user": "ann"}
    lines = [
        litellm(0),
        litellm(1, metadata=denied),
        litellm(2, metadata={"requester_custom_headers": None}),
        litellm(3, status="failure", response=None),
        litellm(4, end_user="ann"),
        litellm(5, **other_user),
        litellm(6, messages="redacted-by-litellm"),
        litellm(7, messages=asked("redacted-by-litellm")["messages"]),
        litellm(8, startTime="2025-10-09T08:53:20"),
    ]
    made = taken(workspace, lines, deny={"x-list": "no", "user": "ann"})
    assert (made.kept, sum(made.dropped.values())) == (1, 8)
    assert made.dropped["denied"] == 2
    assert made.dropped["unknown headers"] == 1
    assert made.dropped["cut text"] == 2
    assert any("$.startTime" in reason for reason in made.dropped)
    (prompt,) = prompt_table.read(workspace.prompts)
    (row,) = dataset.read(workspace.responses)
    assert (prompt.time, row.temperature) == (NOW, 0.5)
    other = Workspace.of("demo-small", workspace.root / "other")
    made = taken(other, [litellm(9)], deny={"authorization": "*"})
    assert made.dropped == {"unknown headers": 1}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"time": NOW * 1000}, "$.time"),
        ({"time": str(NOW)}, "$.time"),
        ({"time": 0.35}, "$.time"),
        ({"response": "Hi."}, "$.response"),
        ({"request": json.dumps(asked("Who?"))}, "$.request"),
        ({"timestamp": NOW}, "unknown field"),
        ({"response": {"choices": []}, "custom_id": "1"}, "unknown field"),
    ],
    ids=str,
)
def test_a_line_of_another_form_is_dropped_with_the_place_of_its_field(
    workspace: Workspace, line: dict[str, Any], named: str
) -> None:
    made = taken(workspace, [exchange(0, **line)])
    (reason,) = made.dropped
    assert (made.kept, named in reason) == (0, True)
    assert "board" not in reason


def test_a_key_of_a_line_that_is_private_text_is_not_written(
    workspace: Workspace,
) -> None:
    secret = "Zebedee's ``diary`` in 3.50"
    lines = [exchange(0, **{secret: 1}), {"custom_id": "1", "response": {secret: 1}}]
    made = taken(workspace, lines)
    assert sum(made.dropped.values()) == 2
    assert "diary" not in json.dumps(asdict(made))
    assert b"diary" not in everything(workspace.root)


def test_the_converter_of_the_page_makes_lines_that_are_read(
    workspace: Workspace, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "traffic.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    theirs = {
        "createdAt": "2025-10-09T08:53:20+00:00",
        "req": {"headers": [["X-List", "yes"]], "body": json.dumps(asked("Who?"))},
        "res": {"body": said(ANSWER.format("no"))},
    }
    write(tmp_path / "theirs.jsonl", [theirs])
    (tmp_path / "convert.py").write_text(script)
    command = [sys.executable, "convert.py", "theirs.jsonl", "log.jsonl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    policy = Policy(deny={"x-list": "no"}, max_age="99999d")
    made = harvest(workspace, [str(tmp_path / "log.jsonl")], policy)
    assert (made.kept, made.dropped) == (1, {})
    assert prompt_table.read(workspace.prompts)[0].time == NOW


def test_a_conversation_that_begins_with_a_response_is_dropped(
    workspace: Workspace,
) -> None:
    """The server has read the response, and a prompt without it is another one."""
    request = asked("Q 0?")
    request["messages"].insert(0, {"role": "assistant", "content": "Hello."})
    made = taken(workspace, [exchange(0, request=request), exchange(1)])
    assert (made.kept, made.dropped) == (1, {"no question": 1})


def test_a_line_that_is_nested_deeply_costs_itself_alone(
    workspace: Workspace, tmp_path: Path
) -> None:
    line = json.dumps(exchange(0)).removesuffix("}")
    deep = "[" * 600 + "]" * 600
    text = f'{line}, "metadata": {deep}}}\n{json.dumps(exchange(1))}\n'
    (tmp_path / "log.jsonl").write_text(text)
    made = harvest(workspace, [str(tmp_path / "log.jsonl")])
    assert (made.kept, sum(made.dropped.values())) == (1, 1)


def test_a_damaged_line_costs_itself_alone(
    workspace: Workspace, tmp_path: Path
) -> None:
    lines = [json.dumps(exchange(number)).encode() for number in range(3)]
    lines[1] = lines[1].replace(b"board", b"b\xffard")
    cut = json.dumps(exchange(4, user="\u4e2d"), ensure_ascii=False).encode()
    end = cut[: cut.index("\u4e2d".encode()) + 1]  # which is being written
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*lines, end]))
    made = harvest(workspace, [str(tmp_path / "log.jsonl")])
    assert (made.kept, made.dropped) == (2, {"text is not Unicode": 2})


@pytest.mark.parametrize("wrong", [{"response": "x \ud83d"}, {"\ud83d": 1}], ids=ascii)
def test_half_a_character_in_a_line_of_another_form_costs_it_alone(
    workspace: Workspace, wrong: dict[str, Any]
) -> None:
    made = taken(workspace, [exchange(0, **wrong), exchange(1)])
    assert (made.kept, made.dropped) == (1, {"text is not Unicode": 1})


BAD_FILES: dict[str, bytes] = {
    "an array that ends early": b"[%s, {" % json.dumps(exchange(7)).encode(),
    "not UTF-8": b"\xff\xfe{}",
    "cut gzip": gzip.compress(json.dumps(exchange(7)).encode())[:-20],
    "zip": b"PK\x03\x04",
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_harvested(
    workspace: Workspace, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "logs/a.jsonl", [exchange(0)])
    (tmp_path / "logs/b.jsonl").write_bytes(BAD_FILES[what])
    write(tmp_path / "logs/c.jsonl", [exchange(1)])
    logs = str(tmp_path / "logs")
    assert main(["harvest", logs, "--runs", str(workspace.root.parent)]) == 1
    assert "b.jsonl" in capsys.readouterr().err
    assert len(prompt_table.read(workspace.prompts)) == 2 + what.startswith("an array")
    again = harvest(workspace, [logs])
    assert (again.files, again.unchanged, len(again.unread)) == (1, 2, 1)
    (tmp_path / "logs/b.jsonl").unlink()
    assert main(["harvest", logs, "--runs", str(workspace.root.parent)]) == 0


def test_files_beside_a_log_that_no_one_reads_are_named(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "logs/a.jsonl", [exchange(0)])
    for name in ("a.jsonl.1", "a.jsonl.zst", "policy.toml", "1.png", "media/0123"):
        (tmp_path / "logs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "logs" / name).write_text("{}")
    command = ["harvest", str(tmp_path / "logs"), "--runs", str(workspace.root.parent)]
    assert main(command) == 0
    warned = capsys.readouterr().err
    assert "2 files are not read" in warned
    assert "a.jsonl.1" in warned
    assert "policy" not in warned


def test_a_log_of_bad_files_alone_is_an_error(
    workspace: Workspace, tmp_path: Path
) -> None:
    (folder := tmp_path / "logs").mkdir()
    (folder / "log.jsonl").write_bytes(b"\xff\xfe{}")
    with fifo(folder / "pipe.jsonl"):
        for log in (folder / "log.jsonl", folder):
            with pytest.raises(DataError, match=r"log\.jsonl"):
                harvest(workspace, [str(log)])


def test_an_image_of_a_log_that_memory_cannot_hold_is_not_read(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("holes.png", 2**36), ("a.png", 600), ("b.png", 600)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    monkeypatch.setattr(traffic, "MOST_BYTES", 1000)
    two = asked("And these?", "a.png")
    two["messages"][0]["content"] += asked("Which?", "b.png")["messages"][0]["content"]
    lines = [
        exchange(0, request=asked("Which?", "holes.png")),
        exchange(1, request=two),
        exchange(2),
    ]
    made = harvest(workspace, [str(write(tmp_path / "log.jsonl", lines))])
    assert (made.kept, made.dropped) == (1, {"media too large": 2})


def test_what_a_wrong_clock_puts_into_the_future_was_asked_at_the_harvest(
    workspace: Workspace,
) -> None:
    taken(workspace, [exchange(0, time=4e9)])
    assert (prompt_table.read(workspace.prompts)[0].time or 0) < 4e9


def test_what_would_never_be_too_old_is_dropped_if_there_is_an_age(
    workspace: Workspace,
) -> None:
    now = time.time()
    lines = [exchange(number, time=now + number * 40000) for number in range(4)]
    made = taken(workspace, lines, max_age="30d")
    assert (made.kept, made.dropped) == (3, {"in the future": 1})
    assert (
        taken(workspace, lines, max_age="30d").unchanged == 0
    )  # the clock may be late


def test_a_harvest_that_was_killed_is_completed_by_the_next_one(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    lines = [exchange(number) for number in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(prompt_table, "write", killed)
        patch.setattr("vlmdistill.pipelines.data.prompts.importing.write", killed)
        with pytest.raises(KeyboardInterrupt):
            taken(workspace, lines)
    assert not workspace.prompts.exists()
    assert len(dataset.keys(workspace.responses)) == 5
    made = taken(workspace, lines)
    assert made.kept == 5
    assert len(dataset.table(workspace.responses)) == 5


def test_what_was_there_before_keeps_its_dataset_and_files_of_earlier_versions_are_read(
    workspace: Workspace, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    rows = [
        {
            "messages": [
                {"role": "user", "content": "What do you see on board number 0?"}
            ]
        }
    ]
    import_prompts([str(write(tmp_path / "own.jsonl", rows))], workspace.prompts)
    pq.write_table(
        pq.read_table(workspace.prompts).drop_columns(["time"]), workspace.prompts
    )
    (before,) = prompt_table.read(workspace.prompts)
    assert before.time is None
    assert prompt_table.load(workspace.prompts)[0] == before
    taken(workspace, [exchange(0), exchange(1)])
    after = {one.key: one for one in prompt_table.read(workspace.prompts)}
    assert replace(after[before.key], split=before.split) == before
    assert len(after) == 2
    assert before.key not in dataset.keys(
        workspace.responses
    )  # nothing would say when to delete it


def test_a_policy_is_read_from_toml_and_wrong_ones_say_what(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        'share = 0.5\nmax_age = "12h"\nmedia = "1.5 MB"\n[allow]\nuser = ["a*", "b"]\n'
    )
    policy = Policy.read(file)
    assert (policy.share, policy.seconds, policy.media_bytes) == (
        0.5,
        43200.0,
        1_500_000,
    )
    for wrong in (
        'max_age = "soon"',
        'media = "much"',
        "share = 2",
        "shares = 1",
        "[[",
        'redact = "a:b"',
    ):
        file.write_text(wrong)
        with pytest.raises(DataError, match=r"policy\.toml"):
            Policy.read(file)
    with pytest.raises(DataError, match=r"missing\.toml"):
        Policy.read(tmp_path / "missing.toml")


def test_a_response_on_which_the_tokenizer_panics_costs_itself_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tiny.panicking(tiny.checkpoint("qwen2_5_vl", tmp_path / "target"))
    log = write(
        tmp_path / "log.jsonl", [exchange(0, response=said(tiny.PANIC)), exchange(1)]
    )
    made = harvest(Workspace.of(str(target), tmp_path / "runs"), [str(log)])
    assert (made.kept, sum(made.dropped.values())) == (1, 1)
    capfd.readouterr()


def test_texts_that_cannot_fit_are_dropped_before_they_are_tokenized(
    workspace: Workspace, encoder: TargetModel
) -> None:
    long = "a " * encoder.max_characters
    lines = [
        exchange(0, response=said(long)),
        exchange(1, request=asked(long)),
        exchange(2),
    ]
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (
        1,
        {"over length": 1, "refused by the processor": 1},
    )


def test_the_requests_of_a_batch_are_never_all_in_memory(
    workspace: Workspace, tmp_path: Path
) -> None:
    large = 100_000 * "x"
    requests = [
        {"custom_id": f"r{at}", "body": asked(f"{at}? {large}")} for at in range(100)
    ]
    answers = [
        {"custom_id": f"r{at}", "response": {"body": said("A.")}} for at in range(100)
    ]
    write(tmp_path / "input.jsonl", requests)
    write(tmp_path / "output.jsonl", answers)
    log = Log.open([str(tmp_path)], workspace)
    tracemalloc.start()
    try:
        found = [
            len(str(line.messages))
            for file in log.files
            for line in log.read(file)
            if isinstance(line, Exchange)
        ]
        assert tracemalloc.get_traced_memory()[1] < 30 * len(large)
    finally:
        tracemalloc.stop()
    assert len(found) == 100
    assert min(found) > len(large)


def test_of_what_is_dropped_no_list_has_a_line(workspace: Workspace) -> None:
    broken = "data:image/png;base64,bm8gaW1hZ2U="
    made = taken(
        workspace, [exchange(0), exchange(1, request=asked("What is it?", broken))]
    )
    assert (made.kept, made.dropped) == (1, {"unreadable image": 1})
    assert not workspace.prompts.with_suffix(".skipped.jsonl").read_text()


def test_an_image_of_an_import_keeps_no_harvested_one(
    workspace: Workspace, tmp_path: Path
) -> None:
    shown = data_url(1)
    taken(workspace, [exchange(0, request=asked("What is this?", shown))])
    (harvested,) = (workspace.root / MEDIA).iterdir()
    row = {"image": shown, "question": "Which board is this?"}
    import_prompts([str(write(tmp_path / "mine.jsonl", [row]))], workspace.prompts)
    prompts = prompt_table.read(workspace.prompts)
    imported = [prompt for prompt in prompts if prompt.time is None]
    assert [Path(path).name for path in imported[0].files] == [harvested.name]
    assert traffic.unnamed(workspace, prompts) == {}
    assert [*traffic.unnamed(workspace, imported)] == [harvested.name]
    assert not harvested.exists()
    assert Path(imported[0].files[0]).exists()
