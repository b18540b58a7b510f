"""Which responses a harvest keeps of a target that reasons before it answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.pipelines.traffic.conftest import (
    ANSWER,
    REASONING,
    asked,
    exchange,
    said,
    taken,
    thought,
    workspace_of,
)
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.loading import load_encoder
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.workspace.workspace import Workspace


@pytest.mark.parametrize(
    ("opened", "kept"),
    [
        ("<think>\n", [True, False, False]),
        ("<think>\n\n</think>\n\n", [False, False, True]),
        ("My steps:\n", [True, True, True]),  # as of Apriel
    ],
)
def test_texts_without_counts_have_the_marks_of_reasoning_of_their_prompts(
    opened: str, kept: list[bool], tmp_path: Path
) -> None:
    """Others were read with another mode, or are answers without their reasoning."""
    model = tiny.checkpoint("qwen2_5_vl", tmp_path / "target", layers=1)
    template = model / "chat_template.jinja"
    end = "{% if add_generation_prompt %}" + opened + "{% endif %}"
    template.write_text(template.read_text() + end)
    workspace = Workspace.of(str(model), tmp_path / "runs")
    answer, whole = ANSWER.format("no"), f"{REASONING}\n</think>\n\n"
    texts = [whole + answer, f"<think>\n{whole}{answer}", answer]
    lines = [
        exchange(
            number, request=asked(f"Which is number {number}?"), response=said(text)
        )
        for number, text in enumerate(texts)
    ]
    made = taken(workspace, lines)
    rows = {row.text for row in dataset.read(workspace.responses)}
    assert [text in rows for text in texts] == kept
    assert made.kept == sum(kept)


def test_reasoning_in_a_field_of_its_own_is_kept_if_the_tokens_have_it(
    workspace: Workspace, encoder: TargetModel
) -> None:
    answer = ANSWER.format("no")
    whole = f"<think>\n{REASONING}\n</think>\n\n{answer}"
    other = f"<think>\nI read.\n</think>\n\n{answer}"
    with_tokens, of_answer, of_other = (
        thought(answer, reasoning_content=f"\n{REASONING}\n") for _ in range(3)
    )
    for response, text in (
        (with_tokens, whole),
        (of_answer, answer),
        (of_other, other),
    ):
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        response["choices"][0]["token_ids"] = ids
    blocks = [{"type": "thinking", "thinking": REASONING}]
    parts = [*blocks, {"type": "text", "text": answer}]
    responses = [
        with_tokens,
        of_answer,
        of_other,
        thought(answer, reasoning_content=REASONING),
        thought(answer, reasoning=REASONING),
        thought(answer, thinking=REASONING),
        thought(answer, thinking_blocks=blocks),
        thought(answer, reasoning_details=blocks),
        thought(answer, content=parts),
    ]
    lines = [
        exchange(number, response=response) for number, response in enumerate(responses)
    ]
    made = taken(workspace, lines)
    assert (made.kept, made.dropped) == (
        1,
        {"reasoning apart from the text": 6, "tokens differ from the text": 2},
    )
    (row,) = dataset.read(workspace.responses)
    assert row.text == whole


@pytest.mark.parametrize("answer", [None, ""])
def test_a_response_that_was_cut_in_its_reasoning_is_kept(
    answer: str | None, workspace: Workspace, encoder: TargetModel
) -> None:
    whole = f"<think>\n{REASONING}"
    responses = [
        thought("", content=answer, reasoning_content=f"\n{REASONING}")
        for _ in range(3)
    ]
    for response, text in zip(responses, (whole, whole + " More."), strict=False):
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        response["choices"][0]["token_ids"] = ids
    lines = []
    for number, response in enumerate(responses):
        response["choices"][0]["finish_reason"] = "length"
        lines.append(exchange(number, response=response))
    made = taken(workspace, lines)
    assert made.dropped == {
        "tokens differ from the text": 1,
        "reasoning apart from the text": 1,
    }
    (row,) = dataset.read(workspace.responses)
    assert row.text == whole


def test_reasoning_of_the_responses_api_is_the_reason(workspace: Workspace) -> None:
    text = {"type": "output_text", "text": ANSWER.format("red")}
    message = {"type": "message", "role": "assistant", "content": [text]}
    thoughts = {"type": "reasoning", "summary": []}
    lines = []
    for number, items in enumerate(([thoughts, message], [message, message])):
        request = {"model": "m", "input": f"Is number {number} red?"}
        response = {"object": "response", "status": "completed", "output": items}
        lines.append(exchange(number, request=request, response=response))
    dropped = {"reasoning apart from the text": 1, "no response": 1}
    assert taken(workspace, lines).dropped == dropped


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_content": ""}, {"reasoning_content": "\n\n"}, {"reasoning": None}, {}],
)
@pytest.mark.parametrize("marks", ["</think>\n\n", "<think>\n\n</think>\n\n"])
def test_marks_of_empty_reasoning_are_part_of_a_response(
    marks: str, fields: dict[str, Any], workspace: Workspace, encoder: TargetModel
) -> None:
    """As of hybrid models, which do not reason about each question; parsers leave the marks out."""
    answer = ANSWER.format("no")
    response = thought(answer, **fields)
    ids = encoder.tokenizer.encode(marks + answer, add_special_tokens=False)
    response["choices"][0]["token_ids"] = ids
    assert taken(workspace, [exchange(0, response=response)]).kept == 1
    (row,) = dataset.read(workspace.responses)
    assert row.text == marks + answer


OPEN = "<think>\n"
HYBRID = (
    "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""As of Qwen3: a response opens its reasoning itself, if the prompt does not close it."""
SAME_LENGTH = (
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking "
    "else '</think><think>' }}"
)
AT_ONCE = ANSWER.format("no")
REASONED = f"{REASONING}\n</think>\n\n{AT_ONCE}"
UNSURE = "maybe without its reasoning"
OTHER_PROMPT = "reasoning of another prompt"
STOPS = {"stop": ["User:"]}


def target_that_ends_with(
    end: str, folder: Path, begin: str = "", thinking: Thinking = ""
) -> TargetModel:
    """A target whose template begins and ends the prompt of a response with texts."""
    model = tiny.checkpoint("qwen2_5_vl", folder / "target", layers=1)
    template = model / "chat_template.jinja"
    end = "{% if add_generation_prompt %}" + end + "{% endif %}"
    template.write_text(begin + template.read_text() + end)
    return load_encoder(str(model), thinking)


def tokens(target: TargetModel, text: str) -> list[int]:
    ids: list[int] = target.tokenizer.encode(text, add_special_tokens=False)
    return ids


def usage(target: TargetModel, response_tokens: int) -> dict[str, int]:
    """What a server counts of a response to the question of `taken_from`."""
    prompt = target.encode(asked("Which is number 0?")["messages"])
    return {"prompt_tokens": prompt.length, "completion_tokens": response_tokens}


def taken_from(
    target: TargetModel, responses: Sequence[dict[str, Any]], **more: Any
) -> tuple[list[bool], dict[str, int]]:
    """Which responses of a log are kept, and why others are dropped; `more` is in each request."""
    workspace = workspace_of(target)
    questions = [f"Which is number {number}?" for number in range(len(responses))]
    lines = [
        exchange(number, request=asked(question, **more), response=responses[number])
        for number, question in enumerate(questions)
    ]
    dropped = taken(workspace, lines).dropped
    prompts = prompt_table.read(workspace.prompts) if workspace.prompts.exists() else []
    kept = {prompt.messages[-1]["content"][0]["text"] for prompt in prompts}
    return [question in kept for question in questions], dropped


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("stops", [{}, STOPS])
@pytest.mark.parametrize(
    ("end", "begin"), [(OPEN, ""), (HYBRID, "<think>\n"), (SAME_LENGTH, "")]
)
def test_an_answer_alone_is_kept_if_its_counts_tell_that_it_is_whole(
    end: str, begin: str, stops: dict[str, Any], finish: str, tmp_path: Path
) -> None:
    """Some targets answer at once, although their template lets them reason."""
    target = target_that_ends_with(end, tmp_path)
    ids = tokens(target, AT_ONCE)
    of_prompt = usage(target, 0)
    whole, less = usage(target, len(ids)), usage(target, len(ids) + 9)
    responses = [
        said(begin + REASONED, finish),
        said(AT_ONCE, finish, whole),
        said(AT_ONCE, finish, whole, token_ids=ids),
        said(AT_ONCE, finish),
        said(AT_ONCE, finish, of_prompt),
        said(AT_ONCE, finish, token_ids=ids),
        said(AT_ONCE, finish, less, token_ids=ids),
        said(AT_ONCE, finish, less),
        said(AT_ONCE, finish, dict.fromkeys(whole, 0)),
    ]
    is_mode_counted = end != SAME_LENGTH
    kept, dropped = taken_from(target, responses, **stops)
    assert kept == [True, is_mode_counted, is_mode_counted, *[False] * 6]
    number_unsure = 5 if is_mode_counted else 7
    assert dropped == {UNSURE: number_unsure, "another number of tokens": 1}


def test_a_reasoning_that_was_cut_is_kept(tmp_path: Path) -> None:
    """Without a closing mark, the counts or the opening one tell that it is one."""
    target = target_that_ends_with(OPEN, tmp_path / "open")
    counted = usage(target, len(tokens(target, REASONING)))
    responses = [said(REASONING, "length", counted), said(REASONING, "length")]
    assert taken_from(target, responses) == ([True, False], {UNSURE: 1})
    hybrid = target_that_ends_with(HYBRID, tmp_path / "hybrid")
    assert taken_from(hybrid, [said(OPEN + REASONING, "length")]) == ([True], {})


@pytest.mark.parametrize("behind", ["", "\n</think>", "\n</think>\n\n"])
def test_a_response_that_was_cut_behind_its_reasoning_is_kept(
    behind: str, tmp_path: Path
) -> None:
    target = target_that_ends_with(OPEN, tmp_path)
    ids = tokens(target, REASONING + behind)
    response = thought("", content=None, reasoning_content=REASONING)
    response["choices"][0] |= {"finish_reason": "length", "token_ids": ids}
    response["usage"] = usage(target, len(ids))
    assert taken_from(target, [response]) == ([True], {})


def test_a_stop_word_behind_an_answer_without_its_reasoning_is_kept(
    tmp_path: Path,
) -> None:
    target = target_that_ends_with(OPEN, tmp_path)
    ids = tokens(target, REASONED + " User:")
    assert taken_from(target, [said(AT_ONCE, token_ids=ids)], **STOPS) == ([True], {})


def test_a_count_does_not_tell_modes_of_equal_length(tmp_path: Path) -> None:
    """The prompt of one ends with an opening mark, that of the other with a closing one."""
    target = target_that_ends_with(SAME_LENGTH, tmp_path, thinking="off")
    cut = thought("", reasoning_content=REASONING)
    cut["choices"][0] |= {
        "finish_reason": "length",
        "token_ids": tokens(target, REASONING),
    }
    counted = {"prompt_tokens": usage(target, 0)["prompt_tokens"]}
    responses = [said(AT_ONCE, usage=counted), said(REASONED, usage=counted), cut]
    assert taken_from(target, responses) == ([True, False, False], {OTHER_PROMPT: 2})


@pytest.mark.parametrize(
    ("thinking", "kept"),
    [
        ("", [False, False, True, True]),
        ("off", [False, False, True, True]),
        ("on", [False, True, True, False]),
    ],
)
def test_a_mode_that_leaves_the_end_of_a_prompt_as_it_is_is_judged(
    thinking: Thinking, kept: list[bool], tmp_path: Path
) -> None:
    """As of Gemma 4 E2B, whose system turn asks for reasoning."""
    begin = "{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}"
    target = target_that_ends_with("", tmp_path, begin, thinking)
    apart = thought(AT_ONCE, reasoning_content=REASONING)
    apart["choices"][0]["token_ids"] = tokens(target, REASONED)
    texts = [f"<think>\n{REASONED}", f"<think>\n\n</think>\n\n{AT_ONCE}", AT_ONCE]
    responses = [apart, *map(said, texts)]
    assert taken_from(target, responses)[0] == kept


def test_a_count_of_several_responses_is_none_of_the_first(tmp_path: Path) -> None:
    target = target_that_ends_with(OPEN, tmp_path)
    cut = thought("", content=None, reasoning_content=REASONING)
    ids = tokens(target, REASONING)
    cut["choices"][0] |= {"finish_reason": "length", "token_ids": ids}
    cut["usage"] = usage(target, 3 * len(ids))
    at_once = said(AT_ONCE, usage=usage(target, 99))
    at_once["choices"][0]["token_ids"] = tokens(target, AT_ONCE)
    whole = said(REASONED, usage=usage(target, 99))
    assert taken_from(target, [cut, at_once, whole], n=3) == ([True] * 3, {})


def test_a_cut_reasoning_among_the_tokens_needs_no_counts(tmp_path: Path) -> None:
    target = target_that_ends_with(SAME_LENGTH, tmp_path)
    cut = thought("", content=None, reasoning_content=REASONING)
    ids = tokens(target, REASONING)
    cut["choices"][0] |= {"finish_reason": "length", "token_ids": ids}
    assert taken_from(target, [cut]) == ([True], {})


@pytest.mark.parametrize(
    ("finish", "stops", "kept"),
    [("stop", {}, True), ("length", {}, False), ("stop", STOPS, False)],
)
def test_only_an_eos_may_be_counted_beside_the_logged_tokens(
    finish: str, stops: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    """Another token could be a mark that the log lacks."""
    target = target_that_ends_with(OPEN, tmp_path)
    ids = tokens(target, AT_ONCE)
    counts = usage(target, len(ids) + 1)
    response = said(AT_ONCE, finish, counts, token_ids=ids)
    assert taken_from(target, [response], **stops)[0] == [kept]


def test_reasoning_with_unknown_marks_is_kept_if_the_tokens_have_it(
    tmp_path: Path,
) -> None:
    begin = "{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}"
    target = target_that_ends_with("", tmp_path, begin, "on")
    response = thought(AT_ONCE, reasoning_content=REASONING)
    ids = tokens(target, f"[[{REASONING}]]\n{AT_ONCE}")
    response["choices"][0]["token_ids"] = ids
    assert taken_from(target, [response]) == ([True], {})
