"""The forms of rows that prompts are imported from, in the layouts that are published."""

import base64
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipelines.data.prompts.rows import (
    ALPACA,
    TALK,
    imported,
    one,
    packed,
    refused,
    said,
    texts,
)
from tests.thorough import count
from vlmdistill.cli.prompts import prompts as command
from vlmdistill.pipelines.data.prompts.formats import conversation
from vlmdistill.pipelines.data.prompts.importing import Choices, Turns, import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError

MANY = "".join(f"\n{letter.upper()}. {letter}" for letter in "abcdefghijkl")


PAGE = Path(__file__).parents[4] / "docs" / "inputs.md"


def examples(text: str) -> list[Any]:
    """The JSON objects that begin a line of a page or a help text."""
    starts = [
        match.start(1) for match in re.finditer(r"^ *(\{)(?=\")", text, re.MULTILINE)
    ]
    rows, end = [], 0
    for start in starts:
        if start >= end:
            row, end = json.JSONDecoder().raw_decode(text, start)
            rows.append(row)
    return rows


SHOWN = [*examples(PAGE.read_text()), *examples(command.__doc__ or "")]


def test_page_and_help_show_a_row_of_each_form() -> None:
    forms = ("image", "video", "messages", "instruction")
    for text in (PAGE.read_text(), command.__doc__ or ""):
        columns = {column for row in examples(text) for column in row}
        assert columns >= {*forms, "conversations"}


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: "-".join(row))
def test_every_row_that_is_shown_is_imported(out: Path, row: Any) -> None:
    for path in re.findall(r'"([\w/]+\.(?:jpg|mp4))"', json.dumps(row)):
        (out.parents[1] / path).parent.mkdir(exist_ok=True)
        if not (out.parents[1] / path).exists():
            shutil.copy(out.parents[1] / f"1{Path(path).suffix}", out.parents[1] / path)
    summary = imported(out, row)
    assert (summary.added, summary.skipped, summary.unread_columns) == (1, {}, {})


def test_an_image_tag_stands_for_the_video_of_a_row_without_images(out: Path) -> None:
    # LLaVA-Video-178K: its reader (LLaVA-NeXT, train.py) knows the tag <image> alone.
    row = said(
        "<image>\nWhat moves?",
        "A ball.",
        id="0",
        video="1.mp4",
        data_source="0_30_s_academic",
    )
    assert imported(out, row).unread_columns == {"data_source": 1}
    (prompt,) = read(out)
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["video", "text"]
    both = said("<image> and <video>: the same?", "No.", image="1.jpg", video="1.mp4")
    assert imported(out, both).skipped == {}
    parts = [part["type"] for part in read(out)[1].messages[0]["content"]]
    assert parts == ["image", "text", "video", "text"]


@pytest.mark.parametrize(
    ("keys", "sampling"),
    [
        ({"fps": 2}, {"fps": 2.0}),
        ({"fps": "2"}, {"fps": 2.0}),
        ({"nframes": 4}, {"frames": 4}),
        ({"num_frames": 3}, {"frames": 3}),
        ({"frames": 5}, {"frames": 5}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize(
    "text", ["<video>\nWhat moves?", "<image>\nWhat moves?", "What moves?"]
)
def test_a_row_says_how_its_videos_are_sampled(
    out: Path, keys: dict[str, Any], sampling: dict[str, Any], text: str
) -> None:
    part = one(out, said(text, "A ball.", video="1.mp4", **keys)).messages[0][
        "content"
    ][0]
    assert {name: part[name] for name in part if name in ("fps", "frames")} == sampling
    part = one(
        out.with_name("chosen"), said(text, "A ball.", video="1.mp4", **keys), fps=0.5
    ).messages[0]
    assert part["content"][0]["fps"] == 0.5
    assert "frames" not in part["content"][0]


def test_a_part_of_a_frame_is_no_number_of_frames(out: Path) -> None:
    row = {"video": "1.mp4", "nframes": 2.5, "question": "What moves?"}
    assert refused(out, row)[0] == "video sampling"
    whole = {"video": "1.mp4", "nframes": 2.0, "question": "What moves?"}
    part = one(out.with_name("whole.parquet"), whole).messages[0]["content"][0]
    assert part["frames"] == 2


def shown(number: int | None, text: str) -> list[dict[str, Any]]:
    """An image by its index and a question, with all keys of parts, as rows of Parquet have them."""
    keys = {"index": None, "text": None, "type": None}
    return [
        {**keys, "type": "image", "index": number},
        {**keys, "type": "text", "text": text},
    ]


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ((0, 1), ["1.jpg", "2.jpg"]),
        ((1, 0), ["2.jpg", "1.jpg"]),
        ((1, 0, 1), ["2.jpg", "1.jpg", "2.jpg"]),
        ((1.0, 0.0), ["2.jpg", "1.jpg"]),
        (("1", "0"), ["2.jpg", "1.jpg"]),
        ((None, None), ["1.jpg", "2.jpg"]),
        ((math.nan, math.nan), ["1.jpg", "2.jpg"]),
    ],
)
def test_a_part_shows_the_image_of_its_index(
    out: Path, indices: Any, names: list[str]
) -> None:
    shutil.copy(out.parents[1] / "1.jpg", out.parents[1] / "2.jpg")
    content = [part for index in indices for part in shown(index, "Is this blue?")]
    row = {
        "images": ["1.jpg", "2.jpg"],
        "messages": [{"role": "user", "content": content}],
    }
    assert [Path(path).name for path in one(out, row).files] == names


@pytest.mark.parametrize(
    "indices",
    [
        (0, 2),
        (0, -1),
        (0, None),
        (None, 1),
        (0,),
        (0, 0),
        (0, "b"),
        (True, False),
        (0.5, 1),
    ],
)
def test_images_that_no_index_or_two_say_are_refused(out: Path, indices: Any) -> None:
    content = [part for index in indices for part in shown(index, "Is this blue?")]
    row = {
        "images": ["1.jpg", "1.jpg"],
        "messages": [{"role": "user", "content": content}],
    }
    assert refused(out, row)[0] == "image count"


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("ask", [None, "Describe the image."])
def test_a_conversation_may_be_json_text(
    tmp_path: Path, out: Path, name: str, ask: str | None
) -> None:
    talk = said("<image>\nWhat is this?", "A wall.")["conversations"]
    rows = [{"image": "1.jpg", "conversations": json.dumps(talk)}]
    summary = import_prompts(
        [str(packed(tmp_path, name, rows))], out, choices=Choices(ask=ask)
    )
    assert (summary.added, summary.unread_columns) == (1, {})
    assert [part.get("text") for part in read(out)[0].messages[0]["content"]] == [
        None,
        "What is this?",
    ]


@pytest.mark.parametrize(
    "text", ['[{"a": 1}]', "[{x} for x in y]: is it Python?", "[{'role': 1}"]
)
def test_a_question_that_looks_like_turns_stays_one(out: Path, text: str) -> None:
    assert texts(one(out, {"prompt": text})) == [("user", text)]


def test_parts_may_be_json_text(out: Path) -> None:
    parts = [
        {"type": "image", "image": "1.jpg"},
        {"type": "text", "text": "What is this?"},
    ]
    row = {"messages": [{"role": "user", "content": json.dumps(parts)}]}
    assert [part.get("text") for part in one(out, row).messages[0]["content"]] == [
        None,
        "What is this?",
    ]
    for text in (
        '[{"type": "point", "x": 1}]: what is it?',
        '[{"type": ["point"]}]',
        "[1, 2]",
        '[{"a',
    ):
        prompt = one(
            out.with_name(str(len(text))),
            {"messages": [{"role": "user", "content": text}]},
        )
        assert texts(prompt) == [("user", text)]


def test_a_conversation_that_is_other_text_is_not_replaced_by_a_question(
    tmp_path: Path, out: Path
) -> None:
    talk = said("<image>\nWhat is this?", "A wall.")["conversations"]
    rows = [{"image": "1.jpg", "conversations": str(talk)}]
    for ask in (None, "Describe the image."):
        with pytest.raises(DataError, match="conversations") as caught:
            import_prompts(
                [str(packed(tmp_path, "a.jsonl", rows))], out, choices=Choices(ask=ask)
            )
        assert "--ask" not in str(caught.value)


@pytest.mark.parametrize("name", ["file_name", "image_path", "picture"])
def test_a_question_does_not_lose_an_image_in_another_column(
    out: Path, name: str
) -> None:
    reason, detail = refused(out, {**said("What is this?", "A wall."), name: "1.jpg"})
    assert (reason, name in detail) == ("image in another column", True)
    assert (
        refused(out, {"question": "What moves?", name: {"path": "a/1.mp4"}})[0]
        == "video in another column"
    )
    assert (
        refused(out, {"question": "Which?", name: ["1.jpg", "1.jpg"]})[0]
        == "image in another column"
    )
    # A name beside the image is a fact about it.
    row = {**said("What is this?", "A wall."), "image": "1.jpg", name: "1.jpg"}
    assert imported(out.with_name("other"), row).unread_columns == {name: 1}


def test_sampling_of_a_row_that_is_overruled_need_not_make_sense(out: Path) -> None:
    row = said(
        "<video>\nWhat moves?", "A ball.", video="1.mp4", fps=30, num_frames=300
    )  # facts of the file
    assert refused(out, row)[0] == "video sampling"
    assert (
        one(out.with_name("chosen"), row, frames=4).messages[0]["content"][0]["frames"]
        == 4
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"video_start": 1.5},
        {"video_end": 3},
        {"start": 1, "end": 3},
        {"start_frame": 0, "end_frame": 30},
        {"bound": [0, 5]},
        {"clip": [0, 5]},
        {"timestamps": [0.5, 1.5]},
        {"startTime": 1.5},
        {"t_start": 1.5},
        {"tstart": 0, "tend": 5},
        {"start_time": 0, "stop_time": 5},
    ],
)
def test_a_part_of_a_video_is_refused(out: Path, keys: dict[str, Any]) -> None:
    # video_start and video_end are those of qwen-vl-utils.
    reason, detail = refused(
        out, said("<video>\nWhat moves?", "A ball.", video="1.mp4", **keys)
    )
    assert reason == "part of a video"
    assert any(key in detail for key in keys)
    content = [
        {"type": "video", "video": "1.mp4", **keys},
        {"type": "text", "text": "What moves?"},
    ]
    assert (
        refused(out, {"messages": [{"role": "user", "content": content}]})[0]
        == "part of a video"
    )


def test_a_list_of_frames_is_refused_and_a_size_is_counted(out: Path) -> None:
    content = [
        {"type": "video", "video": ["1.jpg", "1.jpg"], "sample_fps": 1},
        "What moves?",
    ]
    assert (
        refused(out, {"messages": [{"role": "user", "content": content}]})[0]
        == "list of frames"
    )
    image = {"type": "image", "image": "1.jpg", "max_pixels": 50176}
    summary = imported(
        out, {"messages": [{"role": "user", "content": [image, "What?"]}]}
    )
    assert summary.unread_columns == {"image.max_pixels": 1}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (ALPACA, "Summarise the text.\nOnce upon a time."),
        ({**ALPACA, "input": ""}, "Summarise the text."),
        ({"input": "Who are you?", "output": "Me."}, "Who are you?"),
        ({"question": "Who?", "context": "A king.", "answer": "He."}, "Who?\nA king."),
        ({"question": "Which?", "choices": ["1", "2"], "hint": "Odd."}, "Which?\nOdd.\nA. 1\nB. 2"),
        ({"question": "Which?", "choices": [1, 2.5, False]}, "Which?\nA. 1\nB. 2.5\nC. False"),
        ({"question": "Which?", "A": 1, "B": "two", "C": 3}, "Which?\nA. 1\nB. two\nC. 3"),
        ({"instruction": "Square it.", "input": 12}, "Square it.\n12"),
        ({"question": "Which?", "hint": math.nan}, "Which?"),
        ({"question": "Which?", "A": "one", "B": "two", "answer": "B"}, "Which?\nA. one\nB. two"),
        ({"question": "Is it (A) one or (B) two?", "options": ["one", "two"]}, "Is it (A) one or (B) two?"),
        ({"question": "Who?", "query": "Answer shortly: Who?"}, "Answer shortly: Who?"),
        ({"question": "Who?", "query": "Who?Answer shortly."}, "Who?Answer shortly."),
    ],
)  # fmt: skip
def test_all_columns_of_a_question_are_asked(
    out: Path, row: dict[str, Any], asked: str
) -> None:
    assert texts(one(out, row)) == [("user", asked)]


@pytest.mark.parametrize(
    "history",
    [
        [["Hello", "Hi"], ["Well?", "Yes"]],
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "Yes"},
        ],
    ],
    ids=["pairs", "turns"],
)
def test_columns_before_the_question_are_asked(out: Path, history: Any) -> None:
    row = {**ALPACA, "system": "Be brief.", "history": history}
    assert imported(out, row, turns="all").added == 3
    roles = [role for role, _ in texts(read(out)[-1])]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert texts(read(out)[-1])[-1][1] == "Summarise the text.\nOnce upon a time."


@pytest.mark.parametrize(
    "history",
    [
        [["Hello", "Hi"], ["Well?", None]],
        [{"user": "Hello"}],
        ["Hello"],
        [{"role": "user", "content": "Hello"}, ["Well?", "Yes"]],
    ],
)
def test_earlier_turns_that_are_no_pairs_are_not_left_out(
    out: Path, history: Any
) -> None:
    assert refused(out, {**ALPACA, "history": history})[0] == "history"


def test_a_tag_in_a_response_is_text(out: Path) -> None:
    row = said("<image>\nWhat is this?", "An <image> tag.", image="1.jpg")
    prompt = one(out, row)
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["image", "text"]
    assert prompt.reference == "An <image> tag."
    later = one(
        out.with_name("later"),
        said("One?", "Yes.", "<image> Two?", image="1.jpg"),
        turns="last",
    )
    assert [part["type"] for part in later.messages[-1]["content"]] == ["image", "text"]


def test_a_response_before_the_first_question_does_not_take_an_image_along(
    out: Path,
) -> None:
    shown = {
        "role": "assistant",
        "content": [{"type": "image", "image": "1.jpg"}, "Look!"],
    }
    asked = {"role": "user", "content": "What is this?"}
    assert (
        refused(out, {"messages": [shown, asked]})[0]
        == "image before the first question"
    )


@pytest.mark.parametrize("lost", [{}, {"image": None}])
def test_a_row_that_lost_its_image_is_no_text_row(
    out: Path, lost: dict[str, Any]
) -> None:
    """Whichever row is the first of the file."""
    text, picture = (
        said("Hello?", "Hi."),
        said("<image>\nWhat is this?", "A wall.", image="1.jpg"),
    )
    summary = imported(
        out, text, said("<image>\nWhat is that?", "A door.", **lost), picture
    )
    assert (summary.added, summary.skipped) == (2, {"image count": 1})


@pytest.mark.parametrize("lines", [True, False])
def test_a_key_with_two_values_is_refused(
    tmp_path: Path, out: Path, lines: bool
) -> None:
    rows = [
        '{"question": "Who?", "id": {"a": 1, "a": 2}}',
        '{"question": "Which?", "question": "Which?"}',
    ]
    source = tmp_path / "rows.json"
    source.write_text("\n".join(rows) if lines else f"[{','.join(rows)}]")
    summary = import_prompts([str(source)], out)
    assert (summary.added, summary.skipped) == (1, {"a key twice": 1})


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize(("name", "separator"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_values_of_a_table_stay_as_they_are(
    tmp_path: Path, out: Path, folder: bool, name: str, separator: str
) -> None:
    rows = [["question", "hint", "A", "B", "C"], ["Which?", "N/A", "1", "007", "None"]]
    rows += [["Whose?", "", "1.50", "null", '"two\nlines"']]
    source = tmp_path / "set" / name
    source.parent.mkdir()
    source.write_bytes("\r\n".join(map(separator.join, rows)).encode("utf-8-sig"))
    assert import_prompts([str(source.parent if folder else source)], out).added == 2
    asked = [
        "Which?\nN/A\nA. 1\nB. 007\nC. None",
        "Whose?\nA. 1.50\nB. null\nC. two\nlines",
    ]
    assert [text for prompt in read(out) for _, text in texts(prompt)] == asked


def test_a_row_of_a_table_that_was_cut_is_skipped(tmp_path: Path, out: Path) -> None:
    text = "question,hint\nWho?,a\nWhat col"
    (tmp_path / "rows.csv").write_text(text)
    summary = import_prompts([str(tmp_path / "rows.csv")], out)
    assert (summary.added, sum(summary.skipped.values())) == (1, 1)


def test_the_last_ending_of_a_name_says_what_a_file_is(
    tmp_path: Path, out: Path
) -> None:
    (tmp_path / "rows.csv.jsonl").write_text('{"question": "Who?"}\n')
    assert import_prompts([str(tmp_path / "rows.csv.jsonl")], out).added == 1


@pytest.mark.parametrize(
    "text",
    ["question,question\nWho?,Which?\n", 'question\n"Who?\n', 'question\n"a"b\n'],
)
def test_a_broken_table_is_refused(tmp_path: Path, out: Path, text: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=r"rows\.csv"):
        import_prompts([str(tmp_path / "rows.csv")], out)


@pytest.mark.parametrize("ask", [None, "Describe the image."])
def test_a_conversation_may_be_lists_of_its_keys(
    tmp_path: Path, out: Path, ask: str | None
) -> None:
    talk = {"from": ["human", "gpt"], "value": ["<image>\nWhat is this?", "A wall."]}
    rows = [{"image": "1.jpg", "conversations": talk}]
    summary = import_prompts(
        [str(packed(tmp_path, "a.parquet", rows))], out, choices=Choices(ask=ask)
    )
    assert (summary.added, summary.unread_columns) == (1, {})
    assert [part.get("text") for part in read(out)[0].messages[0]["content"]] == [
        None,
        "What is this?",
    ]
    talk["value"].pop()
    assert refused(out, rows[0])[0] == "conversation of lists"


def test_a_system_column_is_the_system_prompt_unless_there_is_one(out: Path) -> None:
    row = said("What is this?", "A wall.", system="Be brief.")
    assert texts(one(out, row)) == [("system", "Be brief."), ("user", "What is this?")]
    row["conversations"].insert(0, {"from": "system", "value": "Be kind."})
    assert imported(out, row).unread_columns == {"system": 1}


def test_equal_system_columns_are_one_prompt(out: Path) -> None:
    row = {"question": "What?", "system": "Be brief.", "system_prompt": "Be brief."}
    assert texts(one(out, row)) == [("system", "Be brief."), ("user", "What?")]


def test_a_system_prompt_may_be_parts(out: Path) -> None:
    parts = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind."},
    ]
    row = {"messages": [{"role": "user", "content": "Who?"}], "system": parts}
    assert one(out, row).messages[0] == {"role": "system", "content": parts}


def test_columns_that_are_filled_with_null_are_none_at_all(out: Path) -> None:
    turn = {
        "role": None,
        "from": "human",
        "content": None,
        "value": "What is this?",
        "tool_calls": None,
    }
    assert texts(
        one(out, {"conversations": [turn], "system": None, "image": None})
    ) == [("user", "What is this?")]
    assert (
        refused(out, said("What?", "x", system="half \ud83d"))[0]
        == "text is not Unicode"
    )


def test_two_different_questions_are_refused(out: Path) -> None:
    for text, other in (("Who?", "Where?"), ("a", "Banana?"), ("ana?", "Banana?")):
        reason, detail = refused(out, {"question": text, "prompt": other})
        assert reason == "several questions"
        assert "question, prompt" in detail


def test_a_question_that_ends_with_the_response_of_the_row_is_refused(
    out: Path,
) -> None:
    # As in python_code_instructions_18k_alpaca, whose `prompt` has all text of a row.
    row = {"instruction": "Add 2 and 3.", "output": "print(2 + 3)"}
    text = "### Instruction:\nAdd 2 and 3.\n\n### Output:\nprint(2 + 3)"
    for ending in ("", "\n", "</s>"):
        reason, detail = refused(out, row | {"prompt": text + ending})
        assert reason == "answer in the question"
        assert "'prompt'" in detail


def test_a_question_that_ends_with_its_choices_is_read(out: Path) -> None:
    row = {"question": "How many?", "query": "How many?\nA: 3\nB: 4", "answer": "4"}
    prompt = one(out, row | {"choices": ["3", "4"]})
    assert texts(prompt) == [("user", row["query"])]


def test_a_question_that_names_the_answers_is_read(out: Path) -> None:
    row = {"question": "Is it red?", "prompt": "Is it red? Answer yes or no"}
    assert texts(one(out, row | {"answer": "no"})) == [("user", row["prompt"])]


def test_columns_that_no_prompt_holds_are_counted(out: Path) -> None:
    rows = [
        said(f"{n}?", "Yes.", id=str(n), note="keep", width=640, empty="")
        for n in range(3)
    ]
    rows[0] |= {"images": [], "tools": "[search]"}
    assert imported(out, *rows).unread_columns == {"note": 3, "tools": 1}


def test_pairs_of_user_and_assistant_are_turns(out: Path) -> None:
    pairs = [
        {"user": "What?", "assistant": "A wall.", "source": "x"},
        {"user": "Red?", "assistant": "No."},
    ]
    assert imported(out, {"images": ["1.jpg"], "texts": pairs}, turns="all").added == 2
    last = read(out)[-1]
    assert [part["type"] for part in last.messages[0]["content"]] == ["image", "text"]
    assert [message["role"] for message in last.messages] == [
        "user",
        "assistant",
        "user",
    ]
    human = [{"human": "What?", "assistant": "A wall."}]  # ms-swift
    assert texts(one(out.with_name("swift"), {"conversation": human})) == [
        ("user", "What?")
    ]


def test_roles_are_known_in_any_case(out: Path) -> None:
    turns = [
        {"from": "Human", "value": "What is this?"},
        {"from": "GPT", "value": "A wall."},
    ]
    assert one(out, {"conversations": turns}).reference == "A wall."


@pytest.mark.parametrize(
    "turn",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "search"}}],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"function": {"name": "search"}}],
        },
        {"role": "tool", "content": "42"},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "42"},
    ],
)
def test_a_tool_call_is_refused_as_one(out: Path, turn: dict[str, Any]) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "What?"},
            turn,
            {"role": "user", "content": "So?"},
        ]
    }
    assert refused(out, row)[0] == "tool call"


def test_bytes_in_json_are_base64(out: Path) -> None:
    data = (out.parents[1] / "1.jpg").read_bytes()
    row = said(
        "<image>\nWhat?",
        "A wall.",
        image={"bytes": base64.encodebytes(data).decode(), "path": "x.jpg"},
    )
    assert Path(one(out, row).files[0]).read_bytes() == data
    part = {"type": "image", "bytes": base64.b64encode(data).decode()}
    assert (
        imported(
            out, {"messages": [{"role": "user", "content": [part, "What?"]}]}
        ).present
        == 1
    )
    bare = said("<image>\nWhat?", "A wall.", image=base64.b64encode(data * 9).decode())
    reason, detail = refused(out, bare)
    assert (reason, "data URL" in detail) == ("missing image", True)
    assert (
        refused(out, said("<image>\nWhat?", "x", image={"bytes": "no base64!"}))[0]
        == "no media file"
    )


def test_a_question_is_asked_only_where_there_is_none(out: Path) -> None:
    rows = [
        {"image": "1.jpg", "caption": "A wall."},
        {"image": "1.jpg", "question": "What?"},
        TALK,
    ]
    assert imported(out, *rows, ask="Describe it.").added == 3
    texts = [prompt.messages[0]["content"][-1]["text"] for prompt in read(out)]
    assert texts == ["Describe it.", "What?", "What is this?"]
    assert [prompt.reference for prompt in read(out)] == ["A wall.", None, "A wall."]
    with pytest.raises(DataError, match="--ask"):
        imported(out, TALK, ask=" ")


ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/jpeg", "data": "BASE64"},
}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "What is this?", "images": ["1.jpg"]}]},
        {"messages": [{"role": "user", "content": [{"image": "1.jpg"}, {"text": "What is this?"}]}]},
        {"texts": [{"user": "What is this?", "assistant": "A wall.", "images": ["1.jpg"]}]},
        {"question": "What is this?", "image": "file:///DIR/a%20b.jpg"},
        {"question": "What is this?", "image": "DATA:image/jpeg;base64,BASE64"},
        {"messages": [{"role": "user", "content": [ANTHROPIC, {"text": "What is this?"}]}]},
    ],
)  # fmt: skip
def test_an_image_is_found_in_every_usual_form(out: Path, row: dict[str, Any]) -> None:
    folder = out.parents[1]
    shutil.copy(folder / "1.jpg", folder / "a b.jpg")
    content = base64.b64encode((folder / "1.jpg").read_bytes()).decode()
    text = json.dumps(row).replace("/DIR", str(folder)).replace("BASE64", content)
    asked = one(out, json.loads(text)).messages[0]["content"]
    assert [part["type"] for part in asked] == ["image", "text"]


def test_content_that_is_in_no_prompt_is_counted(tmp_path: Path, out: Path) -> None:
    part = {"type": "text", "text": "What?", "style": "bold"}
    turn = {"role": "user", "content": [part], "audio": "1.wav", "name": ""}
    assert imported(out, {"messages": [turn]}).unread_columns == {
        "turn.audio": 1,
        "text.style": 1,
    }
    rows = [{"question": "Who?", "jpg": b"\xff\xd8"}]
    summary = import_prompts([str(packed(tmp_path, "a.parquet", rows))], out)
    assert summary.unread_columns == {"jpg": 1}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"question": "Is it in or on the box?", "choices": ["in", "on", "box"]}, "\nA. in\nB. on\nC. box"),
        ({"question": "Are there 1 or 2?", "choices": ["1", "2"]}, "\nA. 1\nB. 2"),
        ({"question": "Is A cat larger?", "choices": ["cat"]}, "\nA. cat"),
        ({"question": "Which?\nA. one\nB. two", "choices": ["A. one", "B. two"]}, ""),
        ({"question": "Which?\n(A) one\n(B) two", "choices": ["A", "B"]}, ""),
        ({"question": "Which letter is red?", "choices": ["A", "B"]}, "\nA. A\nB. B"),
        ({"question": "Who?", "choices": ["A.J. Ray", "B.B. King"]}, "\nA. A.J. Ray\nB. B.B. King"),
        ({"question": "Who?", "choices": ["A. J. Ray", "B.King"]}, "\nA. J. Ray\nB. King"),
        ({"question": "Which?", "choices": list("abcdefghijkl")}, MANY),
        ({"question": "Which is red?", "hint": "red"}, "\nred"),
        ({"question": "Hint: red\nWhich?", "hint": "red"}, ""),
        ({"question": "Which is red?", "system": "nan"}, ""),
        ({"instruction": "Which is red?", "input": "<noinput>"}, ""),
        ({"question": "Which?", "X": "a coordinate"}, ""),
    ],
)  # fmt: skip
def test_choices_and_hints_are_left_out_only_if_the_question_has_them(
    out: Path, row: dict[str, Any], asked: str
) -> None:
    imported(out, row)
    question = row.get("question", row.get("instruction"))
    assert texts(read(out)[0])[0][1] == f"{question}{asked}"
    assert (
        refused(out, {"question": "Who?", "choices": ["x"] * 27})[0]
        == "too many choices"
    )


def test_a_value_that_cannot_be_read_costs_its_row_alone(
    tmp_path: Path, out: Path
) -> None:
    texts = pa.array([b"Who?", b"\xff", b"Where?"]).cast(pa.binary())
    table = pa.table(
        {
            "question": pa.Array.from_buffers(pa.string(), 3, texts.buffers()),
            "when": pa.array([2**62] * 3, pa.timestamp("us")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    summary = import_prompts([str(tmp_path / "a.parquet")], out)
    assert (summary.added, summary.skipped) == (2, {"unreadable value": 1})


KEYS = [
    "messages",
    "conversations",
    "texts",
    "prompt",
    "role",
    "from",
    "content",
    "value",
    "type",
    "text",
    "user",
    "assistant",
    "tool_calls",
    "image",
    "images",
    "video",
    "url",
    "bytes",
    "path",
    "fps",
    "frames",
    "video_start",
    "question",
    "input",
    "choices",
    "options",
    "history",
    "system",
    "answer",
    "A",
]


WORDS = [
    "user",
    "human",
    "gpt",
    "text",
    "image",
    "video_url",
    "<image>",
    "a <video>",
    "1.jpg",
    "",
    "\ud83d",
]


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of JSON or Parquet, from the words that rows are made of."""
    kind = rng.random()
    if depth > 4 or kind < 0.35:
        return rng.choice([None, True, 3, 2.5, math.inf, b"x", *WORDS])
    if kind < 0.6:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(rng.randrange(6))}


def test_any_row_is_a_conversation_or_has_a_reason() -> None:
    rng, reasons = random.Random(1), set()
    for _ in range(count(300, 3000)):
        part = {
            "type": rng.choice(["text", "image", "video"]),
            rng.choice(KEYS): anything(rng, 2),
        }
        said = {
            "role": rng.choice(WORDS[:3]),
            "content": rng.choice([anything(rng, 1), ["hi", part]]),
        }
        row = {
            rng.choice(KEYS): anything(rng, 1),
            rng.choice(KEYS[:4]): [said, anything(rng, 2)][: rng.randrange(3)],
        }
        try:
            talk = conversation(
                Row("rows.json", "rows", 1, rng.choice([row, row, anything(rng)])),
                "llava",
            )
        except BadRowError as error:
            reasons.add(error.reason)
        else:
            assert {message["role"] for message in talk.messages} <= {
                "system",
                "user",
                "assistant",
            }
    assert len(reasons) > 10


@pytest.mark.parametrize(
    "row",
    [
        said("Who?", ""),
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "model"}]},
        {"texts": [{"user": "Who?", "assistant": None}]},
        {
            "messages": [
                {"role": "user", "content": "Who?"},
                {"role": "assistant", "content": [{"type": "text", "text": ""}]},
            ]
        },
    ],
    ids=["ShareGPT", "chat", "pairs", "parts"],
)
def test_an_empty_response_at_the_end_is_the_one_that_is_asked_for(
    out: Path, row: dict[str, Any]
) -> None:
    prompt = one(out, row)
    assert (texts(prompt), prompt.reference) == ([("user", "Who?")], None)


def test_a_text_beside_the_response_is_no_column_that_was_read(out: Path) -> None:
    row = {"question": "What does the caption claim?", "answer": "Red."}
    beside = {**row, "caption": "Figure 3: red wins.", "label": "Red."}
    assert imported(out, beside).unread_columns == {"caption": 1}
    by_number = {**row, "answer": 1, "caption": "Red."}
    by_number["question"] = "Which is it?"
    assert imported(out, by_number).unread_columns == {"caption": 1}


def test_a_summary_says_how_rows_sample_their_videos(out: Path) -> None:
    rows = [
        {"question": "What moves?", "video": "1.mp4", "fps": 24.0},
        {"question": "What falls?", "video": "1.mp4", "num_frames": 4},
        {"question": "What stays?", "video": "1.mp4"},
    ]
    assert imported(out, *rows).sampled == {"fps 24": 1, "frames 4": 1}
    assert imported(out, *rows, frames=2).sampled == {}


def test_a_request_may_have_earlier_responses(out: Path) -> None:
    earlier = [{"type": "output_text", "text": "A wall."}]
    asked = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": earlier},
        {"role": "user", "content": "Why?"},
    ]
    row = {"custom_id": "1", "url": "/v1/responses", "body": {"input": asked}}
    prompt = one(out, row, turns="last")
    assert texts(prompt)[1] == ("assistant", "A wall.")


def test_instructions_of_a_request_for_a_response_are_the_system_prompt(
    out: Path,
) -> None:
    asked = [{"role": "user", "content": "Who?"}]
    body = {"model": "m", "instructions": "Answer briefly.", "input": asked}
    row = {"custom_id": "1", "url": "/v1/responses", "body": body}
    assert texts(one(out, row)) == [("system", "Answer briefly."), ("user", "Who?")]


def test_text_about_an_image_is_added_where_the_prompt_shows_one(out: Path) -> None:
    row = said("Who?", "A man.", "<image>\nWhat?", "A wall.", image="1.jpg")
    imported(out, row, turns="all", augment=("describe",), augment_text=("explain",))
    assert [prompt.augmentation for prompt in read(out)] == ["explain", "describe"]


def test_a_summary_shows_the_first_prompt_of_each_form_of_rows(out: Path) -> None:
    with_image = {"image": "1.jpg", "question": "Left?", "choices": ["yes", "no"]}
    rows = [{"question": "Who?", "choices": []}, with_image]
    source = out.parents[1] / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    other = out.parents[1] / "other.jsonl"
    others = [{"question": "Who?"}, {"question": "Where?"}]
    other.write_text("\n".join(map(json.dumps, others)))
    summary = import_prompts([str(source), str(other)], out)
    text, image = summary.row_forms
    assert (text.columns, text.prompts, text.first.row) == (("question",), 2, 1)
    assert image.columns == ("choices", "image", "question")
    assert (image.prompts, Path(image.file).name) == (1, "rows.jsonl")
    shown, asked = image.first.messages[0]["content"]
    assert (shown["type"], asked["text"]) == ("image", "Left?\nA. yes\nB. no")
    again = import_prompts([str(source), str(other)], out)
    assert [form.prompts for form in again.row_forms] == [2, 1]


@pytest.mark.parametrize(
    ("turns", "questions"), [("first", ["When?"]), ("all", ["Who?", "When?"])]
)
def test_the_question_of_a_row_with_a_history_is_its_own(
    out: Path, turns: Turns, questions: list[str]
) -> None:
    row = {"question": "When?", "context": "In 1815.", "answer": "1815."}
    imported(out, {**row, "history": [["Who?", "Ada."]]}, turns=turns)
    prompts = read(out)
    assert [texts(prompt)[-1][1].split("\n")[0] for prompt in prompts] == questions
    assert texts(prompts[-1]) == [
        ("user", "Who?"),
        ("assistant", "Ada."),
        ("user", "When?\nIn 1815."),
    ]
    assert prompts[-1].reference == "1815."
