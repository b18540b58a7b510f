"""No image, no text and no row is lost or changed without a word."""

import base64
import csv
import gzip
import json
import lzma
import math
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import tiny
from tests.pipelines.data.prompts.rows import (
    TALK,
    imported,
    one,
    packed,
    refused,
    said,
    texts,
)
from tests.pipelines.data.prompts.test_sources import tar
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts import (
    archives,
    formats,
    importing,
    parquet_rows,
    sources,
    unpacking,
)
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError


def parts_of(prompt: Prompt, turn: int = 0) -> list[str]:
    """The texts and the names of the files of a turn, in order."""
    return [
        part.get("text") or Path(part["path"]).name
        for part in prompt.messages[turn]["content"]
    ]


def two_pictures(out: Path) -> None:
    """A second picture, `2.jpg`, beside `1.jpg`."""
    tiny.picture(40, 30, seed=2).save(out.parents[1] / "2.jpg")


def as_text(out: Path) -> str:
    return base64.b64encode((out.parents[1] / "1.jpg").read_bytes()).decode()


def test_an_unknown_format_is_explained_by_the_row_that_is_damaged(
    tmp_path: Path,
) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"note": "nothing asked"}, {"conversations": "[{cut off", "id": "1"}]
    source.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="row 2 has the columns conversations, id"):
        formats.detect(str(source))


def test_an_empty_list_beside_a_question_holds_no_turns() -> None:
    row = Row("rows.json", "rows", 1, {"texts": [], "question": "What is this?"})
    (message,) = formats.conversation(row, "hf").messages
    assert message["content"] == [{"type": "text", "text": "What is this?"}]
    empty = Row("rows.json", "rows", 1, {"messages": [], "question": "What is this?"})
    with pytest.raises(BadRowError, match="no user turn"):
        formats.conversation(empty, "chat")


def test_a_request_with_messages_and_input_loses_neither() -> None:
    messages = [{"role": "user", "content": "What is this?"}]
    body = {"messages": messages, "input": [{"role": "user", "content": "And this?"}]}
    request = {"custom_id": "1", "url": "/v1/chat/completions", "body": body}
    conversation = formats.conversation(Row("rows.json", "rows", 1, request), "chat")
    assert len(conversation.messages) == 1
    assert conversation.unread == ("input",)


def test_columns_beside_the_body_of_a_request_are_read_or_named() -> None:
    body = {"messages": [{"role": "user", "content": "What is this?"}]}
    beside = {"image": "1.jpg", "system": "Be brief.", "note": "a text"}
    request = {"custom_id": "1", "body": body, **beside}
    conversation = formats.conversation(Row("rows.json", "rows", 1, request), "chat")
    system, user = conversation.messages
    assert system["content"][0]["text"] == "Be brief."
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert conversation.unread == ("note",)


@pytest.mark.parametrize(
    "column",
    [
        {"media": [{"url": "1.jpg"}]},
        {"attachments": [{"type": "note"}, {"file": {"name": "1.jpg"}}]},
        {"meta": {"image_file": "1.jpg"}},
        {"photo": "https://example.org/a/1.jpg?size=3"},
        {"picture": "data:image/png;base64,iVBORw0KGgo="},
        {"raw": "BASE64"},
        {"pages": ["first", "second.png"]},
        {"file": {"content_type": "image/png", "url": "s3://bucket/7"}},
        {"input": "1.jpg"},
        {"id": "0.png"},
        {"upload": {"mimeType": "image/png", "url": "blob:7"}},
        {"sent": {"contentType": "image/png", "url": "blob:7"}},
    ],
    ids=lambda column: next(iter(column)),
)
def test_no_question_loses_the_picture_of_an_unknown_column(
    out: Path, column: dict[str, Any]
) -> None:
    row = json.loads(json.dumps(column).replace("BASE64", as_text(out)))
    reason, detail = refused(out, {"question": "What is this?", **row})
    assert reason == "image in another column"
    assert next(iter(column)) in detail


@pytest.mark.parametrize("holder", ["turn", "part"])
def test_no_question_loses_the_picture_of_an_unknown_key(
    out: Path, holder: str
) -> None:
    part: dict[str, Any] = {"type": "text", "text": "What is this?"}
    turn: dict[str, Any] = {"role": "user", "content": [part]}
    named = {"turn": turn, "part": part}[holder]
    named["attachments"] = ["1.jpg"]
    reason, detail = refused(out, {"messages": [turn]})
    assert reason == "image in another column"
    assert "attachments" in detail


@pytest.mark.parametrize(
    "column",
    [
        {"image_id": 458752},
        {"image_index": 0},
        {"video_id": 0.0},
        {"imageId": "n161313"},
        {"image_url": "https://example.org/7"},
        {"Video Name": "clip_7"},
    ],
    ids=lambda column: next(iter(column)),
)
def test_no_question_loses_the_picture_that_a_column_names_by_a_number(
    out: Path, column: dict[str, Any]
) -> None:
    (name,) = column
    reason, detail = refused(out, {"question": "What is this?", **column})
    assert (reason[-17:], name in detail) == ("in another column", True)
    shown = {"question": "What is this?", "image": "1.jpg", **column}
    summary = imported(out.with_name("shown.parquet"), shown)
    assert (summary.hidden_media, summary.unread_columns) == ({}, {name: 1})
    nested = {"question": "What is this?", "doc": [{"image_id": 0}]}
    assert refused(out, nested)[0] == "image in another column"


@pytest.mark.parametrize("value", [None, "", -1, [], float("nan"), False])
def test_a_text_of_a_dataset_of_images_may_name_none(out: Path, value: Any) -> None:
    assert imported(out, {"question": "Who?", "image_id": value}).added == 1
    other = {"question": "Who?", "image_style": "none", "has_image": 3}
    assert imported(out.with_name("other.parquet"), other).added == 1


@pytest.mark.parametrize(
    "text", ["<image>\nWhat?", "What?\n<image>\n", "<video>\r\nA?"]
)
def test_a_line_that_is_a_placeholder_is_no_text(out: Path, text: str) -> None:
    assert refused(out, said(text, "A wall."))[0] == "image count"
    in_code = "Fix this:\n```\n<image>\n</image>\n```"
    assert imported(out.with_name("code.parquet"), said(in_code, "Done.")).added == 1


@pytest.mark.parametrize("columns", [{}, {"image": "1.jpg"}], ids=["alone", "both"])
def test_a_picture_that_a_text_names_is_not_left_out(
    out: Path, columns: dict[str, Any]
) -> None:
    row = said("Picture 1: <img>1.jpg</img>\nWhat?", "A wall.", **columns)
    assert refused(out, row)[0] == "image in the text"


def test_a_part_with_a_picture_under_another_key_is_warned_of(out: Path) -> None:
    file = {"mime_type": "image/jpeg", "data": "/9j/"}
    content = [{"type": "image", "file": file}, {"type": "text", "text": "What?"}]
    turn = {"role": "user", "content": content}
    row = {"images": ["1.jpg"], "messages": [turn]}
    assert imported(out, row).hidden_media == {"image.file": 1}


def test_bytes_of_a_picture_are_known_in_any_column(tmp_path: Path, out: Path) -> None:
    rows = [{"question": "What?", "thumb": (tmp_path / "1.jpg").read_bytes()}]
    with pytest.raises(DataError, match="image in another column"):
        import_prompts([str(packed(tmp_path, "a.parquet", rows))], out)


def test_more_pictures_than_are_shown_are_counted(out: Path) -> None:
    row = {"image": "1.jpg", "image_b": "1.jpg", "question": "Which is larger?"}
    assert imported(out, row).hidden_media == {"image_b": 1}


def test_texts_without_a_picture_stay_prompts(out: Path) -> None:
    row = {
        "question": "What is a JPEG?",
        "topic": "files such as 1.jpg\nand 2.jpg",
        "source": "https://example.org/page",
        "id": "wiki/1.txt",
        "score": "AAAA",
    }
    assert imported(out, row).added == 1


def test_an_image_and_other_images_are_not_silently_one(out: Path) -> None:
    two_pictures(out)
    row = {"image": "1.jpg", "images": ["1.jpg", "2.jpg"], "question": "Which?"}
    assert refused(out, row)[0] == "several media columns"
    same = {"image": "1.jpg", "images": ["1.jpg"], "question": "Which?"}
    assert len(one(out.with_name("same.parquet"), same).files) == 1


def test_numbered_columns_are_the_images_of_numbered_placeholders(out: Path) -> None:
    two_pictures(out)
    row = {  # MMMU, with the options as it writes them
        "question": "Is <image 2> darker than <image 1>?",
        "options": "['Yes', \"No, it isn't\"]",
        "image_1": {"path": "1.jpg"},
        "image_2": {"path": "2.jpg"},
        "image_3": None,
    }
    assert parts_of(one(out, row)) == [
        "Is",
        "2.jpg",
        "darker than",
        "1.jpg",
        "?\nA. Yes\nB. No, it isn't",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<image_1> or <image_2>?", ["1.jpg", "or", "2.jpg", "?"]),
        ("<image2> or <image1>?", ["2.jpg", "or", "1.jpg", "?"]),
        ("<|image_2|>\n<|image_1|>\nWhich?", ["2.jpg", "1.jpg", "Which?"]),
        ("<image 0> or <image 1>?", ["1.jpg", "or", "2.jpg", "?"]),
        ("<Image 1>, <Image 2>?", ["1.jpg", ",", "2.jpg", "?"]),
        ("<IMAGE> or <IMAGE>?", ["1.jpg", "or", "2.jpg", "?"]),
        ("<Image> or <Image>?", ["1.jpg", "or", "2.jpg", "?"]),
        ("<|image|><|image|>Which?", ["1.jpg", "2.jpg", "Which?"]),
        ("<image 1> <image 2> again <image 1>", ["1.jpg", "2.jpg", "again", "1.jpg"]),
    ],
)
def test_placeholders_of_known_datasets_show_the_image_of_their_number(
    out: Path, text: str, shown: list[str]
) -> None:
    two_pictures(out)
    row = said(text, "The first.", images=["1.jpg", "2.jpg"])
    assert parts_of(one(out, row)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "<image 1>?",
        "<image 1> <image 3>?",
        "<image 2> <image 3>?",
        "<image 1> <image>?",
    ],
)
def test_numbers_that_are_not_those_of_the_images_are_refused(
    out: Path, text: str
) -> None:
    two_pictures(out)
    row = said(text, "The first.", images=["1.jpg", "2.jpg"])
    assert refused(out, row)[0] == "image count"


@pytest.mark.parametrize(
    "choices",
    [
        {"choices": ["red", None]},
        {"choices": {"text": ["red", "blue"], "label": ["A", "B"]}},
        {"options": {"A": "red", "B": "blue"}},
        {"options": "A. red\nB. blue"},
        {"option_a": "red", "option_b": "blue"},
        {"Choice 1": "red", "Choice 2": "blue"},
        {"choices": "['red' 'blue']"},  # as numpy writes it
        {"choices": "['red'\n 'blue']"},
    ],
    ids=str,
)
def test_no_question_loses_choices_of_another_form(
    out: Path, choices: dict[str, Any]
) -> None:
    assert refused(out, {"question": "Which colour?", **choices})[0] == "choices"
    asked = {"question": "Which?\nA. red\nB. blue", "options": "A. red\nB. blue"}
    assert imported(out.with_name("asked.parquet"), asked).added == 1


def test_two_lists_of_choices_are_not_silently_one(out: Path) -> None:
    question = {"question": "Which?", "choices": ["red", "blue"]}
    twice = {**question, "options": "['red', 'blue']"}
    assert texts(one(out, twice)) == [("user", "Which?\nA. red\nB. blue")]
    assert refused(out, {**question, "options": ["red", "green"]})[0] == "choices"
    columns = {"A": "old", "B": "older"}
    summary = imported(out.with_name("columns.parquet"), {**question, **columns})
    assert summary.unread_columns == {"A": 1, "B": 1}


def test_an_object_for_a_video_is_read_with_all_its_keys(out: Path) -> None:
    def rows(**keys: Any) -> list[dict[str, Any]]:
        named = {"path": "1.mp4", **keys}
        url = {"type": "video_url", "video_url": {"url": "1.mp4", **keys}}
        parts = [url, {"type": "text", "text": "What moves?"}]
        return [
            said("<video>\nWhat moves?", "A ball.", video=named),
            said("<video 1>\nWhat moves?", "A ball.", video=named),
            {"messages": [{"role": "user", "content": parts}]},
        ]

    for number, row in enumerate(rows(nframes=3)):
        prompt = one(out.with_name(f"{number}.parquet"), row)
        assert prompt.messages[0]["content"][0]["frames"] == 3
    for row in rows(start=1, end=2):
        assert refused(out, row)[0] == "part of a video"
    summary = imported(out, said("What?", "A cat.", image={"path": "1.jpg", "box": 7}))
    assert summary.unread_columns == {"image.box": 1}


def test_turns_in_python_text_are_no_question(out: Path) -> None:
    turns = [{"role": "user", "content": "What?"}]
    assert refused(out, {"prompt": str(turns)})[0] == "conversation is text"


def test_a_question_of_mmmu_may_have_no_choices(out: Path) -> None:
    row = {"question": "How many?", "options": "[]", "answer": "7"}
    assert imported(out, row).added == 1


@pytest.mark.parametrize("quote", ["'", '"'], ids=["Python", "JSON"])
def test_numbers_in_text_stay_as_they_are_written(out: Path, quote: str) -> None:
    choices = f"[1.50, 1e5, -2, 12345678901234567890.125, {quote}007{quote}]"
    lines = ["A. 1.50", "B. 1e5", "C. -2", "D. 12345678901234567890.125", "E. 007"]
    asked = texts(one(out, {"question": "Q?", "choices": choices}))[0][1]
    assert asked.splitlines() == ["Q?", *lines]


def test_a_text_part_whose_text_has_another_key_is_refused(out: Path) -> None:
    image = {"type": "image", "image": "1.jpg"}
    content = [image, {"type": "text", "content": "What is this?"}]
    row = {"messages": [{"role": "user", "content": content}]}
    assert refused(out, row) == ("text part without text", "it has content")


def test_numbers_of_json_stay_as_they_are_written(tmp_path: Path, out: Path) -> None:
    rows = [
        '{"question": "Q?", "hint": 1.50, "choices": [1.50, 1e5, -2, true]}',
        '{"question": "R?", "passage": 0.10, "A": 2.00, "B": 1E400}',
        '{"question": "S?", "options": "[1.50, 2.0]", "fps": 1.50}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    import_prompts([str(tmp_path / "rows.jsonl")], out)
    assert [texts(prompt)[0][1] for prompt in read(out)] == [
        "Q?\n1.50\nA. 1.50\nB. 1e5\nC. -2\nD. True",
        "R?\n0.10\nA. 2.00\nB. 1E400",
        "S?\nA. 1.50\nB. 2.0",
    ]


def test_columns_of_nan_are_none_at_all(out: Path) -> None:
    columns = ("option_a", "option_b", "hint", "image", "A", "choices", "image_id")
    asked = one(out, {"question": "Which?", **dict.fromkeys(columns, math.nan)})
    assert texts(asked) == [("user", "Which?")]


def test_a_numbered_placeholder_without_images_is_no_text(out: Path) -> None:
    assert refused(out, {"question": "What is in <image 1>?"})[0] == "image count"
    typed = {"messages": [{"role": "user", "content": "What does <image 1> mean?"}]}
    assert texts(one(out.with_name("chat.parquet"), typed))[0][1].endswith("mean?")


def test_a_placeholder_of_another_program_is_refused(out: Path) -> None:
    for text in (
        "<ImageHere>What?",
        "<|vision_start|><|image_pad|><|vision_end|>What?",
        "<start_of_image>What?",
        "<|begin_of_image|><|image|><|end_of_image|>What?",
        "<img><IMG_CONTEXT></img>What?",
        "<img>What?",
        "<|media_pad|>What?",
        "<|media_start|>image<|media_content|><|media_end|>What?",
        "<|img|>What?",
        "<VideoHere>What?",
        "<im_start><im_end>What?",
        "<image_token>What?",
        "<image/>What?",
        "<image />What?",
        "[IMG] What?",
        "[image]\nWhat?",
        "[image_1] What?",
        "<image-placeholder>\nWhat?",
        "[<IMG_PLH>]What?",
        "&lt;image&gt;\nWhat?",
        "<image >\nWhat?",
        "<|image:0|>What?",
        "<image: 1.jpg>What?",
        "<img_1>What?",
        "{image}\nWhat?",
        "<picture>\nWhat?",
        "<image>1.jpg</image>What?",
    ):
        row = said(text, "A wall.", image="1.jpg")
        assert refused(out, row)[0] == "foreign placeholder"


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>user<|end_header_id|>What?",
        "<start_of_turn>user\nWhat?<end_of_turn>",
        "<s>[INST] What? [/INST]",
        "What? [/INST] A wall. </s><s>[INST] Why?",
        "What?\n<extra_id_1>Assistant\nA wall.\n<extra_id_1>User\nWhy?",
        "<|user|>\nWhat?<|end|>\n<|assistant|>\n",
        "<\uff5cUser\uff5c>What?<\uff5cAssistant\uff5c>",
        "<|start|>user<|message|>What?<|end|>",
        "\n\nHuman: What?\n\nAssistant:",
        "A chat between a user and an assistant. USER: What? ASSISTANT: ",
        "### Instruction:\nWhat?\n\n### Response:\n",
    ],
)
def test_a_prompt_that_a_chat_template_wrote_is_refused(out: Path, text: str) -> None:
    assert refused(out, {"prompt": text})[0] == "chat template in the text"
    for number, question in enumerate(
        (
            "What do <|im_start|> and [INST] mean?",
            "What is next to the field Medical Assistant:",
        )
    ):
        row = {"prompt": question, "answer": "A template.\n\n### Response:"}
        assert imported(out.with_name(f"{number}.parquet"), row).added == 1


def test_indentation_beside_a_placeholder_stays(out: Path) -> None:
    code = "<image>\n    def f():\n        return 1\n<image>\n\n    # What next?"
    row = said(code, "This.", images=["1.jpg", "1.jpg"])
    assert parts_of(one(out, row)) == [
        "1.jpg",
        "    def f():\n        return 1",
        "1.jpg",
        "\n    # What next?",
    ]


def test_a_text_of_spaces_between_two_texts_stays(out: Path) -> None:
    content = [{"type": "text", "text": text} for text in ("One", "\n\n", "Two", "")]
    row = {"messages": [{"role": "user", "content": content}]}
    assert parts_of(one(out, row)) == ["One", "\n\n", "Two"]
    blank = {"messages": [{"role": "user", "content": " \n"}]}
    assert refused(out.with_name("blank.parquet"), blank)[0] == "empty turn"


@pytest.mark.parametrize("name", ["a.tiff", "a.gif", "a.webp", "a.png"])
def test_an_image_of_several_pages_is_refused(out: Path, name: str) -> None:
    first, second = tiny.picture(30, 20), tiny.picture(30, 20, seed=2)
    first.save(out.parents[1] / name, save_all=True, append_images=[second])
    reason, detail = refused(out, said("<image>\nWhat?", "A wall.", image=name))
    assert (reason, "2 pages" in detail) == ("unreadable image", True)


def test_a_preview_in_an_image_is_no_page(out: Path) -> None:
    picture, small = tiny.picture(30, 20), tiny.picture(15, 10)
    small.encoderinfo = {"tiffinfo": {254: 1}}
    picture.save(out.parents[1] / "a.tiff", save_all=True, append_images=[small])
    picture.save(out.parents[1] / "b.jpg", "MPO", save_all=True, append_images=[small])
    for name in ("a.tiff", "b.jpg"):
        one(out.with_name(name), said("<image>\nWhat?", "A wall.", image=name))


def test_lines_that_quotes_may_join_are_refused(tmp_path: Path, out: Path) -> None:
    lines = ["question\thint", 'Who?\t"a', 'Which?\tb"', "Whose?\tc", '"Two\nlines"\td']
    (tmp_path / "rows.tsv").write_text("\n".join(lines))
    summary = import_prompts([str(tmp_path / "rows.tsv")], out)
    assert (summary.added, summary.skipped) == (2, {"quotes in a TSV file": 1})
    assert [texts(prompt)[0][1] for prompt in read(out)] == [
        "Whose?\nc",
        "Two\nlines\nd",
    ]


@pytest.mark.parametrize("separator", [";", "\t", ","])
def test_a_csv_file_may_have_another_separator(
    tmp_path: Path, out: Path, separator: str
) -> None:
    text = f"\ufeffquestion{separator}hint\nWho?{separator}007\n"
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    import_prompts([str(tmp_path / "rows.csv")], out)
    assert texts(read(out)[0]) == [("user", "Who?\n007")]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.parquet"])
def test_metadata_beside_images_are_rows_and_stay_as_they_are(
    tmp_path: Path, out: Path, name: str
) -> None:
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    rows = [
        {"file_name": "1.jpg", "question": "Which?", "A": "007", "B": "NA"},
        {"file_name": "2.jpg", "question": "Whose?", "A": "1.50", "B": "None"},
    ]
    for row in rows:
        shutil.copy(tmp_path / "1.jpg", folder / row["file_name"])
    if name.endswith(".csv"):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        packed(folder, name, rows)
    import_prompts([str(tmp_path / "data")], out)
    assert [parts_of(prompt) for prompt in read(out)] == [
        ["1.jpg", "Which?\nA. 007\nB. NA"],
        ["2.jpg", "Whose?\nA. 1.50\nB. None"],
    ]


def test_metadata_name_what_is_missing_and_keep_to_their_split(
    tmp_path: Path, out: Path
) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        shutil.copy(tmp_path / "1.jpg", tmp_path / "data" / split / "1.jpg")
    names = ("train/1.jpg", "test/1.jpg", "train/gone.jpg")
    lines = "".join(f"{name},What is {name}?\n" for name in names)
    (tmp_path / "data" / "metadata.csv").write_text("file_name,question\n" + lines)
    summary = import_prompts([str(tmp_path / "data")], out)
    assert summary.skipped == {"missing image": 1, "file not read": 1}
    assert (summary.added, summary.unread_files) == (1, ["test/1.jpg"])
    import_prompts([f"{tmp_path / 'data'}@test"], out)
    assert parts_of(read(out)[1]) == ["1.jpg", "What is test/1.jpg?"]
    with pytest.raises(DataError, match="train"):
        import_prompts([f"{tmp_path / 'data'}@other"], out)


def test_a_table_with_settings_for_datasets_stays_as_it_is(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.csv").write_text(
        "# made by hand\nquestion|hint\nWho?|007\nWhat?|NA\n"
    )
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: rows.csv\n  sep: '|'\n"
        "  comment: '#'\n---\n"
    )
    import_prompts([str(folder)], out)
    asked = [text for prompt in read(out) for _, text in texts(prompt)]
    assert asked == ["Who?\n007", "What?\nNA"]


TWICE = '{"question": "Who?", "id": 1, "id": 2}'


@pytest.mark.parametrize("text", [TWICE, TWICE.replace(", ", ",\n"), f"[{TWICE}]"])
def test_the_only_row_of_a_file_has_no_key_twice(
    tmp_path: Path, out: Path, text: str
) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match="a key twice"):
        import_prompts([str(tmp_path / "rows.json")], out)


@pytest.mark.parametrize("text", ['[{"from": "human", "value": "A", "value": "B"}]'])
def test_a_conversation_in_text_has_no_key_twice(out: Path, text: str) -> None:
    assert refused(out, {"conversations": text})[0] == "a key twice"


def test_columns_of_parquet_have_no_name_twice(tmp_path: Path, out: Path) -> None:
    columns = [pa.array(["Who?"]), pa.array(["Where?"])]
    table = pa.Table.from_arrays(columns, names=["question", "question"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="question"):
        import_prompts([str(tmp_path / "a.parquet")], out)


def xz(content: bytes, dictionary: int) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": dictionary}]
    return lzma.compress(content, filters=filters)


def test_what_needs_too_much_memory_to_unpack_is_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "XZ_MEMORY", 2**22)
    text = json.dumps(TALK).encode()
    (tmp_path / "a.json.xz").write_bytes(xz(text, 2**23))
    with pytest.raises(DataError, match=r"a\.json\.xz.*memory"):
        import_prompts([str(tmp_path / "a.json.xz")], out)
    (tmp_path / "a.json.xz").write_bytes(xz(text, 2**20))
    assert import_prompts([str(tmp_path / "a.json.xz")], out).added == 1


def test_an_xz_file_may_have_several_streams_and_is_read_whole_or_refused(
    tmp_path: Path, out: Path
) -> None:
    lines = [
        json.dumps({"question": f"{n}?" * 500}).encode() + b"\n" for n in range(50)
    ]
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(b"\0\0\0\0".join(map(lzma.compress, lines)) + b"\0\0\0\0")
    assert import_prompts([str(path)], out).added == 50
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"a\.jsonl\.xz"):
        import_prompts([str(path)], out)


def test_a_table_of_one_endless_line_is_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdistill.pipelines.data.prompts.text_tables.MOST_ROW", 10**5)
    for name, text in (
        ("a.csv.gz", "a," * 10**6),
        ("b.csv.gz", 'a,b\n"' + "\n" * 10**6),
    ):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        with pytest.raises(DataError, match=name):
            import_prompts([str(tmp_path / name)], out)


def test_parquet_that_unpacks_to_far_more_than_it_has_is_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "LARGE_CHUNK", 2**20)
    path = tmp_path / "a.parquet"
    question = ["What?", "Who?"]
    for value in ("a" * 2**22, [None] * 2**19):
        table = pa.table({"question": question, "value": pa.array([value, value])})
        pq.write_table(table, path, compression="zstd")
        with pytest.raises(DataError, match=r"a\.parquet.*value"):
            import_prompts([str(path)], out)


def test_many_rows_with_one_long_text_do_not_fill_memory(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "MOST_TEXT", 2**20)
    rows = [{"question": f"{n}?", "context": "a" * 50_000} for n in range(200)]
    for name in ("a.parquet", "a.jsonl.gz"):
        source = packed(tmp_path, name, rows)
        with pytest.raises(DataError, match=f"{name}.*repeat"):
            import_prompts([str(source)], out)
    few = Choices(limit=3)
    assert import_prompts([str(source)], out, choices=few).added == 3
    waiting = [row | {"question": f"{row['question']} <image> here?"} for row in rows]
    source = packed(tmp_path, "b.parquet", waiting)
    with pytest.raises(DataError, match=r"b\.parquet.*repeat"):
        import_prompts([str(source)], out)


def test_long_texts_are_taken_a_few_at_once(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_BYTES", 1000)
    done = list[int]()
    source = packed(
        out.parents[1], "a.jsonl", [said("a" * 600 + str(n)) for n in range(4)]
    )
    import_prompts([str(source)], out, progress=lambda rows, *_: done.append(rows))
    assert done == [2, 4]


def test_large_values_of_parquet_are_read_a_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 2**20)
    taken: list[int] = []
    values = parquet_rows.values

    def counted(batch: Any) -> Any:
        taken.append(len(batch))
        return values(batch)

    monkeypatch.setattr(parquet_rows, "values", counted)
    path = tmp_path / "a.parquet"
    rows = [{"question": f"{n}?", "note": chr(65 + n % 26) * 40_000} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    assert len([*sources.read(str(path))]) == 50
    assert max(taken) == 2


def test_a_sample_of_an_archive_fits_into_memory(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_BYTES", 1000)
    members = [("0.json", TALK), ("0.a.bin", b"0" * 600), ("0.b.bin", b"0" * 600)]
    source = tar(tmp_path / "a.tar", *members, ("1.json", TALK))
    assert import_prompts([source], out).skipped == {"not a file of a sample": 1}


def test_a_sample_of_an_archive_has_no_key_twice(tmp_path: Path, out: Path) -> None:
    source = tar(tmp_path / "a.tar", ("0.json", TWICE.encode()), ("1.json", TALK))
    assert import_prompts([source], out).skipped == {"a key twice": 1}


def test_numbers_that_say_something_about_media_are_counted(out: Path) -> None:
    keys = {"image_id": 7, "duration": 2.5, "timestamp": 1764000000, "min_pixels": 64}
    keys |= {"image_index": 0, "time": 4, "query_time": 4, "realtime": 4.5, "offset": 3}
    keys |= {"from": 1, "to": 5, "stop": 5, "moment": 4, "ts": 4, "seconds": 4}
    others = {"clip_id": "b", "score": 3, "height": 20, "fps_of_camera": 0}
    row = said("<video>\nWhat moves?", "A ball.", video="1.mp4", **keys, **others)
    counted = imported(out, row).unread_columns
    assert counted == dict.fromkeys([*keys, "clip_id"], 1)


def test_the_command_warns_of_images_that_no_prompt_shows(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {"image": "1.jpg", "image_b": "1.jpg", "question": "Which is larger?"}
    lost = {"photo": "1.jpg", "question": "What is this?"}
    source = packed(tmp_path, "rows.jsonl", [shown, lost])
    assert main(["prompts", str(source), "--runs", str(tmp_path / "runs")]) == 0
    warning = capsys.readouterr().err
    assert "image_b (1)" in warning
    assert "photo (1)" in warning
    only = packed(tmp_path, "lost.jsonl", [lost])
    assert main(["prompts", str(only), "--runs", str(tmp_path / "runs")]) == 1
    assert "photo" in capsys.readouterr().err


def chat(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], **columns}


IMAGE = {"type": "image", "image": "1.jpg"}
WHAT = {"type": "text", "text": "What is this?"}


def test_an_image_of_a_part_that_a_column_has_too_is_shown_once(out: Path) -> None:
    turn = {"from": "human", "value": "<image>What is this?", "image": "1.jpg"}
    for row in (
        chat(IMAGE, WHAT, images=["1.jpg"]),
        {"conversations": [turn], "image": "1.jpg"},
    ):
        assert parts_of(one(out, row)) == ["1.jpg", "What is this?"]
        out.unlink()


def test_images_of_parts_and_others_of_a_column_are_refused(out: Path) -> None:
    reason, detail = refused(out, chat(IMAGE, WHAT, images=["2.jpg"]))
    assert reason == "image count"
    assert "1 of their own" in detail


def test_a_line_that_is_a_placeholder_beside_an_image_part_is_refused(
    out: Path,
) -> None:
    tagged = {"type": "text", "text": "<image>\nWhat is this?"}
    assert refused(out, chat(IMAGE, tagged))[0] == "image count"
    inline = {"type": "text", "text": "Does LLaVA write <image> here?"}
    one(out.with_name("inline.parquet"), chat(IMAGE, inline))


def test_empty_bytes_are_a_lost_image(tmp_path: Path, out: Path) -> None:
    rows = [{"image": b"", "question": "What?"}, {"image": None, "question": "Who?"}]
    summary = import_prompts([str(packed(tmp_path, "a.parquet", rows))], out)
    assert (summary.added, summary.skipped) == (1, {"unreadable image": 1})


def test_questions_in_a_file_of_an_archive_are_named(tmp_path: Path, out: Path) -> None:
    image = (tmp_path / "1.jpg").read_bytes()
    for name, content in (
        ("rows.jsonl", json.dumps(said("What is this?", image="1.jpg")).encode()),
        ("rows.json", json.dumps([said("What is this?", image="1.jpg")]).encode()),
    ):
        archive = tar(tmp_path / "a.tar", ("1.jpg", image), (name, content))
        with pytest.raises(DataError, match=name):
            import_prompts([archive], out)
        asked = import_prompts([archive], out, choices=Choices(ask="What?"))
        assert sum(asked.skipped.values()) == 1


@pytest.mark.parametrize(
    "column",
    [
        {"question": ["What?", "Where?"]},
        {"questions": ["What?"]},
        {"Question ": "What?"},
        {"conversations": [["What?", "A wall."]]},
        {"question": '[{"role": "user", "content": "What?"}]'},
        {"instruction": "[{'from': 'human', 'value': 'What?'}]"},
    ],
)
def test_a_question_that_cannot_be_read_is_not_replaced_by_that_of_ask(
    out: Path, column: dict[str, Any]
) -> None:
    row = {"image": "1.jpg", **column}
    name = next(iter(column))
    with pytest.raises(DataError, match=f"another form: '{name}'"):
        imported(out, row)
    summary = imported(out, {"image": "1.jpg", "question": ""}, row, ask="Describe it.")
    assert summary.added == 1
    assert summary.skipped == {"question of another form": 1}


def test_a_text_beside_the_image_of_a_part_is_not_lost(out: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": [{"image": "1.jpg", "text": "What is this?"}]}
        ]
    }
    assert refused(out, row) == (
        "text beside the image of a part",
        "'What is this?': write it as a part of its own",
    )


def test_a_question_about_a_sound_is_not_asked_without_it(out: Path) -> None:
    row = {"question": "<audio> What is said?", "audio": "1.wav"}
    assert refused(out, row) == ("audio", "'audio': prompts have images and videos")
    for name, value, kind in (
        ("audio_id", "./test-mini-audios/3fe64f3d.wav", "audio"),
        ("file_name", "x.FLAC", "audio"),
        ("doc_id", "PH_2016.06.08_Economy-Final.pdf", "document"),
    ):
        reason, detail = refused(out, {"question": "What is said?", name: value})
        assert (reason, detail.startswith(f"'{name}'")) == (kind, True)
    about = [
        {"question": "What is said in a.wav", "source": "report.pdf"},
        {"question": "How?", "answer": "x", "rejected": "sox a.wav b.mp3"},
        {"question": "Why?", "context": "So it was.", "source_file": "report.pdf"},
        {"question": "Who?", "metadata": {"urls": ["https://youtu.be/x1"]}},
    ]
    assert imported(out.with_name("about.parquet"), *about).added == 4
    sample = tar(out.parents[1] / "a.tar", ("0.wav", b"RIFF"), ("0.json", TALK))
    with pytest.raises(DataError, match=r"wav \(1\)"):
        import_prompts([sample], out)


def test_a_source_that_is_a_link_to_itself_does_not_exist(
    tmp_path: Path, out: Path
) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(DataError, match=r"there is no file .*loop\.jsonl"):
        import_prompts([str(loop)], out)


def test_a_response_in_an_object_is_read_and_one_of_another_form_is_counted(
    out: Path,
) -> None:
    question = {"question": "What is this?"}
    vqa = {**question, "answers": [{"answer": "a wall", "answer_id": 1}]}
    assert one(out, vqa).reference == "a wall"
    squad = {**question, "answers": {"text": ["a wall"], "answer_start": [3]}}
    assert one(out.with_name("squad.parquet"), squad).reference == "a wall"
    unanswerable = {**question, "answers": {"text": [], "answer_start": []}}
    assert not one(out.with_name("squad2.parquet"), unanswerable).reference
    nested = {**question, "answers": [["a wall"]]}
    summary = imported(out.with_name("nested.parquet"), nested)
    assert summary.unread_columns == {"answers": 1}


@pytest.mark.parametrize("letters", ["AC", "A", "ABD"])
def test_columns_of_choices_have_no_gap(out: Path, letters: str) -> None:
    row = {"question": "Which?", **dict.fromkeys(letters, "red")}
    reason, detail = refused(out, row)
    assert (reason, ", ".join(letters) in detail) == ("choices", True)


def test_numbers_in_single_precision_are_as_they_were_written(
    tmp_path: Path, out: Path
) -> None:
    for choices in (pa.list_(pa.float32()), pa.list_(pa.float32(), 2)):
        columns = {
            "question": pa.array(["Which?"]),
            "hint": pa.array([0.1], pa.float32()),
            "choices": pa.array([[1.2, 2.5]], choices),
        }
        pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
        import_prompts([str(tmp_path / "rows.parquet")], out)
        (prompt,) = read(out)
        assert texts(prompt) == [("user", "Which?\n0.1\nA. 1.2\nB. 2.5")]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": 0.1}, pa.struct({"a": pa.float32()})),
        ([{"a": [0.1]}], pa.list_(pa.struct({"a": pa.list_(pa.float32(), 1)}))),
        ([("a", 0.1)], pa.map_(pa.string(), pa.float32())),
        ([[0.1]], pa.large_list(pa.list_(pa.float32()))),
    ],
    ids=str,
)
def test_numbers_in_single_precision_are_so_at_any_depth(
    value: Any, kind: pa.DataType
) -> None:
    batch = pa.record_batch({"a": pa.array([value], kind)})
    assert [*parquet_rows.values(batch)] == [({"a": value}, None)]


def test_dates_of_choices_are_asked_and_times_of_a_video_are_noticed(
    tmp_path: Path, out: Path
) -> None:
    day = pa.array([date(1945, 5, 8)])
    columns = {"question": ["When?"], "A": day, "B": day.cast(pa.date64())}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    import_prompts([str(tmp_path / "rows.parquet")], out)
    assert texts(read(out)[0]) == [("user", "When?\nA. 1945-05-08\nB. 1945-05-08")]
    columns = {"question": ["What?"], "video": ["1.mp4"]}
    for kind in (pa.time32("s"), pa.duration("s")):
        part = pa.table({**columns, "start": pa.array([7], kind)})
        pq.write_table(part, tmp_path / "part.parquet")
        with pytest.raises(DataError, match="part of a video"):
            import_prompts([str(tmp_path / "part.parquet")], out)


@pytest.mark.parametrize(
    "text",
    [
        "What is this? ![](1.jpg)",
        "![a cat](https://example.org/1.jpg?x=1)\nWhat is this?",
        "Is ![](data:image/png;base64,iVBORw0KGgo=) a cat?",
        "What is this? ![](<a b.jpg>)",
        "What is this? ![](cat_(1).jpg)",
        "What is this? ![a cat][1]\n\n[1]: 1.jpg 'a title'\n",
        "![1]\nWhat is this?\n[1]: <1.jpg>",
        'What is this? <img alt="a cat" src="1.jpg">',
        "<IMG SRC=1.jpg />\nWhat is this?",
    ],
)
def test_an_image_in_markdown_is_not_left_out(out: Path, text: str) -> None:
    assert refused(out, said(text, "A wall."))[0] == "image in the text"
    for number, image in enumerate(("![a cat](1.jpg)", '<img src="1.jpg">')):
        quoted = f"Fix my page:\n```\n{image}\n```"
        code = out.with_name(f"{number}.parquet")
        assert imported(code, said(quoted, "Done.")).added == 1
    link = "What is behind ![this](page.html)"
    assert imported(out.with_name("link.parquet"), said(link, "A page.")).added == 1


@pytest.mark.parametrize("ask", [None, "Describe the image."])
def test_questions_beside_an_image_are_not_replaced_by_that_of_ask(
    out: Path, ask: str | None
) -> None:
    pair = {"question": "What is this?", "answer": "A wall."}
    for pairs in ([pair], pair):
        with pytest.raises(DataError, match="'qa_pairs': give one text in a column"):
            imported(out, {"image": "1.jpg", "qa_pairs": pairs}, ask=ask)
    with pytest.raises(DataError, match=r"columns image, text.*rename the one"):
        imported(out, {"image": "1.jpg", "text": "What is this?"})


def test_objects_without_a_question_are_no_questions(out: Path) -> None:
    regions = [{"question": None, "name": "a wall"}]
    row = {"image": "1.jpg", "regions": regions, "qa": {"question": [], "answer": []}}
    row |= {"made": {"prompt": "a wall at night"}}
    assert imported(out, row, ask="Describe the image.").added == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "![](data:image/png;base64," + "A" * 10**7,
        "a ![](b.jpg)" * 200_000 + ".",
        "![a" * 300_000,
        "<img src=" * 300_000,
        "![" + "[a]: b\n" * 200_000,
    ],
    ids=range(5),
)
def test_long_texts_in_markdown_are_read_in_time(out: Path, text: str) -> None:
    assert imported(out, said(text, "Done.")).added == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "blanks", [" " * 300_000, "\n" * 300_000], ids=["spaces", "lines"]
)
def test_blanks_in_a_question_are_read_in_time(out: Path, blanks: str) -> None:
    rows = [
        said(f"{blanks}Why?"),
        {"question": f"Which{blanks}of them?", "hint": "H.", "choices": ["x", "y"]},
    ]
    assert imported(out, *rows).added == 2


@pytest.mark.parametrize("form", ["lines", "array", "column"])
def test_a_value_that_is_nested_deeply_costs_its_row_alone(
    tmp_path: Path, out: Path, form: str
) -> None:
    deep = "[" * 600 + "]" * 600
    rows = [f'{{"question": "Why?", "more": {deep}}}', json.dumps(TALK)]
    if form == "column":
        rows[0] = json.dumps({"conversations": f'[{{"from": {deep}}}]'})
    text = f"[{','.join(rows)}]" if form == "array" else "\n".join(rows)
    (tmp_path / "rows.json").write_text(text)
    summary = import_prompts([str(tmp_path / "rows.json")], out)
    assert (summary.added, sum(summary.skipped.values())) == (1, 1)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which value?", "choices": "[{[1, 2]: 'x'}]"},
        {"question": "Which value?", "history": "[{[1]}]"},
        {"prompt": "[{{}}]"},
    ],
    ids=["choices", "history", "prompt"],
)
def test_text_that_python_cannot_evaluate_ends_no_import(
    out: Path, row: dict[str, Any]
) -> None:
    imported(out, row, TALK)
    assert "A wall." in {prompt.reference for prompt in read(out)}


def test_a_source_without_a_usable_row_is_no_success_beside_another(
    tmp_path: Path, out: Path
) -> None:
    good, copy, bad = (tmp_path / f"{name}.json" for name in ("good", "copy", "bad"))
    good.write_text(json.dumps([TALK]))
    copy.write_text(json.dumps([TALK, said("", "A wall.")]))
    bad.write_text(json.dumps([said("", "A wall."), said("Why?", "", "Why?")]))
    sources = [str(good), str(bad), str(copy)]
    problem = r"from \S*bad\.json: empty turn \(2\).*the other sources are imported"
    with pytest.raises(DataError, match=problem):
        import_prompts(sources, out)
    assert len(read(out)) == 1
    out.unlink()
    assert import_prompts(sources, out, choices=Choices(limit=1)).added == 1
    assert import_prompts([str(good), str(copy)], out).present == 1


def test_an_empty_shard_is_told_and_costs_no_other(tmp_path: Path, out: Path) -> None:
    shards = [tmp_path / name for name in ("0.json", "1.json", "2.jsonl")]
    for shard, text in zip(shards, (json.dumps([TALK]), "[]", ""), strict=True):
        shard.write_text(text)
    summary = import_prompts([*map(str, shards)], out)
    assert (summary.added, summary.skipped) == (1, {"no rows": 2})
    with pytest.raises(DataError, match="it has no rows"):
        import_prompts([str(shards[1])], out)
    with pytest.raises(DataError, match="jsonl: no rows"):
        import_prompts([*map(str, shards[1:])], out)


def test_a_link_to_nothing_is_named_with_its_end(tmp_path: Path, out: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(DataError, match=r"no file .*: it is a link to nowhere\.jsonl"):
        import_prompts([str(tmp_path / "rows.jsonl")], out)
    (tmp_path / "a.jpg").symlink_to("nowhere.jpg")
    reason, detail = refused(out, {"image": "a.jpg", "question": "What is this?"})
    assert (reason, detail[-23:]) == ("missing image", "(a link to nowhere.jpg)")


def test_a_prompts_file_is_no_source_since_rows_lose_their_split(
    tmp_path: Path, out: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([TALK]))
    import_prompts([str(tmp_path / "rows.json")], out, choices=Choices(split="eval"))
    copy = tmp_path / "copy" / "prompts.parquet"
    copy.parent.mkdir()
    shutil.copyfile(out, copy)
    for source in (copy, copy.parent):
        with pytest.raises(DataError, match="prompt of a workspace"):
            import_prompts([str(source)], tmp_path / "other.parquet")


@pytest.mark.parametrize(
    "row",
    [
        said("Draw a wall.", "<image>", images=["1.jpg"]),
        said("Draw a wall.", "Look: <image>", video="1.mp4"),
        {"texts": [{"user": "Draw it.", "assistant": "<image>"}], "images": ["1.jpg"]},
        {"question": "Draw a wall.", "answer": "<image 1>", "image_1": "1.jpg"},
        {
            "messages": [
                {"role": "user", "content": "Draw a wall."},
                {"role": "assistant", "content": [{"type": "text", "text": "<image>"}]},
            ],
            "images": ["1.jpg"],
        },
    ],
    ids=["LLaVA", "video", "pairs", "columns", "chat"],
)
def test_an_image_of_a_response_is_not_shown_in_the_question(
    out: Path, row: dict[str, Any]
) -> None:
    reason, detail = refused(out, row)
    assert reason in ("image of a response", "video of a response")
    assert "<image" in detail


ASIDE = "What is in <image> here?"
"""A question that misses its image, if other rows of its source have one."""


@pytest.mark.parametrize(
    ("text_row", "picture"),
    [
        (chat({"type": "text", "text": ASIDE}), chat(WHAT, images=["1.jpg"])),
        ({"question": ASIDE}, {"question": "What is this?", "image": "1.jpg"}),
        (said(ASIDE, "A wall."), said("What is this?", "A wall.", image="1.jpg")),
        ({"question": ASIDE}, said("What is this?", "A wall.", image="1.jpg")),
        (
            said(ASIDE, "A wall."),
            {
                "conversations": [
                    {"from": "human", "value": "<image> What?", "image": "1.jpg"}
                ]
            },
        ),
    ],
    ids=["chat", "columns", "LLaVA", "mixed", "turns"],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_tag_is_no_text_in_a_source_whose_other_rows_have_images(
    out: Path, text_row: dict[str, Any], picture: dict[str, Any], is_last: bool
) -> None:
    rows = [picture, text_row] if is_last else [text_row, picture]
    summary = imported(out, *rows)
    assert (summary.added, summary.skipped) == (1, {"image count": 1})
    alone = imported(out.with_name("alone.parquet"), text_row, TALK)
    assert (alone.added, alone.skipped) == (2, {})


def test_a_tag_is_text_where_other_rows_show_images_by_parts(out: Path) -> None:
    about = chat({"type": "text", "text": "Explain the <image> tag of SVG."})
    assert imported(out, chat(IMAGE, WHAT), about).added == 2


def test_words_like_placeholders_are_text_beside_one_that_shows_the_image(
    out: Path,
) -> None:
    for text in ("<image>\nIs [VIDEO] in it?", "Use <picture> for <image>"):
        assert imported(out, said(text, "Yes.", image="1.jpg")).added == 1
    formula = said("What is d_{image} by \\frac{image}{object}?", "1.", image="1.jpg")
    assert imported(out, formula).added == 1


def test_a_tag_is_no_text_in_a_folder_with_images(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [said(ASIDE, "A wall."), said("What is this?", "A wall.", image="1.jpg")]
    packed(folder, "a.jsonl", rows)
    choices = Choices(images=tmp_path)
    summary = import_prompts([str(folder)], out, choices=choices)
    assert (summary.added, summary.skipped) == (1, {"image count": 1})


def test_the_line_of_a_tag_in_a_chat_is_no_text(out: Path) -> None:
    row = chat({"type": "text", "text": "<image>\nWhat is this?"})
    assert refused(out, row)[0] == "image count"
