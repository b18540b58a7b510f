"""The forms of rows and files that prompts are imported from, in the layouts that are published."""

import base64
import bz2
import gzip
import io
import json
import lzma
import math
import mimetypes
import os
import random
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import tiny
from vlmdistill.cli.prompts import prompts as command
from vlmdistill.pipelines.prompts.formats import Format, conversation
from vlmdistill.pipelines.prompts.importing import Choices, ImportSummary, import_prompts
from vlmdistill.pipelines.prompts.prompt_table import Prompt, read
from vlmdistill.pipelines.prompts.sources import BadRowError, Row
from vlmdistill.stores.errors import DataError

MANY = "".join(f"\n{letter.upper()}. {letter}" for letter in "abcdefghijkl")
PAGE = Path(__file__).parents[3] / "docs" / "inputs.md"
TALK = {"conversations": [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": "A wall."}]}
ALPACA = {"instruction": "Summarise the text.", "input": "Once upon a time.", "output": "A tale."}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image and a video."""
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (30, 20), (7, 90, 160)).save(folder / "1.jpg")
    tiny.film(folder / "1.mp4", tiny.clip(6, 32, 32))
    return folder


@pytest.fixture
def out(tmp_path: Path, media: Path) -> Path:
    """Where prompts go; two folders above lie an image and a video that rows can name."""
    shutil.copytree(media, tmp_path, dirs_exist_ok=True)
    return tmp_path / "workspace" / "prompts.parquet"


def imported(out: Path, *rows: Any, kind: Format = "auto", **choices: Any) -> ImportSummary:
    """Import rows as a JSON file beside the media."""
    source = out.parents[1] / "rows.json"
    source.write_text(json.dumps(rows))
    return import_prompts([str(source)], out, kind, Choices(**choices))


def one(out: Path, row: Any, **choices: Any) -> Prompt:
    """The only prompt of a row that is imported whole."""
    summary = imported(out, row, **choices)
    assert (summary.added, summary.skipped, summary.unread_columns) == (1, {}, {})
    (prompt,) = read(out)
    return prompt


def refused(out: Path, row: Any) -> tuple[str, str]:
    """Reason and detail of a row that is skipped."""
    summary = imported(out, row, TALK)
    assert (summary.added + summary.present, sum(summary.skipped.values())) == (1, 1)
    (entry,) = map(json.loads, out.with_suffix(".skipped.jsonl").read_text().splitlines())
    return entry["reason"], entry["detail"]


def said(*turns: str, **more: Any) -> dict[str, Any]:
    """A row in from/value style, beginning with the human."""
    named = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"conversations": named, **more}


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    """Roles and texts of a prompt of text alone."""
    return [(message["role"], message["content"][0]["text"]) for message in prompt.messages]


def examples(text: str) -> list[Any]:
    """The JSON objects that begin a line of a page or a help text."""
    starts = [match.start(1) for match in re.finditer(r"^ *(\{)(?=\")", text, re.MULTILINE)]
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
    row = said("<image>\nWhat moves?", "A ball.", id="0", video="1.mp4", data_source="0_30_s_academic")
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
@pytest.mark.parametrize("text", ["<video>\nWhat moves?", "<image>\nWhat moves?", "What moves?"])
def test_a_row_says_how_its_videos_are_sampled(
    out: Path, keys: dict[str, Any], sampling: dict[str, Any], text: str
) -> None:
    part = one(out, said(text, "A ball.", video="1.mp4", **keys)).messages[0]["content"][0]
    assert {name: part[name] for name in part if name in ("fps", "frames")} == sampling
    part = one(out.with_name("chosen"), said(text, "A ball.", video="1.mp4", **keys), fps=0.5).messages[0]
    assert part["content"][0]["fps"] == 0.5
    assert "frames" not in part["content"][0]


def test_sampling_of_a_row_that_is_overruled_need_not_make_sense(out: Path) -> None:
    row = said("<video>\nWhat moves?", "A ball.", video="1.mp4", fps=30, num_frames=300)  # facts of the file
    assert refused(out, row)[0] == "video sampling"
    assert one(out.with_name("chosen"), row, frames=4).messages[0]["content"][0]["frames"] == 4


@pytest.mark.parametrize("keys", [{"video_start": 1.5}, {"video_end": 3}, {"start": 1, "end": 3}])
def test_a_part_of_a_video_is_refused(out: Path, keys: dict[str, Any]) -> None:
    # video_start and video_end are those of qwen-vl-utils.
    reason, detail = refused(out, said("<video>\nWhat moves?", "A ball.", video="1.mp4", **keys))
    assert reason == "part of a video"
    assert next(iter(keys)) in detail
    content = [{"type": "video", "video": "1.mp4", **keys}, {"type": "text", "text": "What moves?"}]
    assert refused(out, {"messages": [{"role": "user", "content": content}]})[0] == "part of a video"


def test_a_list_of_frames_is_refused_and_a_size_is_counted(out: Path) -> None:
    content = [{"type": "video", "video": ["1.jpg", "1.jpg"], "sample_fps": 1}, "What moves?"]
    assert refused(out, {"messages": [{"role": "user", "content": content}]})[0] == "list of frames"
    image = {"type": "image", "image": "1.jpg", "max_pixels": 50176}
    summary = imported(out, {"messages": [{"role": "user", "content": [image, "What?"]}]})
    assert summary.unread_columns == {"image.max_pixels": 1}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (ALPACA, "Summarise the text.\nOnce upon a time."),
        ({**ALPACA, "input": ""}, "Summarise the text."),
        ({"input": "Who are you?", "output": "Me."}, "Who are you?"),
        ({"question": "Who?", "context": "A king.", "answer": "He."}, "Who?\nA king."),
        ({"question": "Which?", "choices": ["1", "2"], "hint": "Odd."}, "Which?\nOdd.\nA. 1\nB. 2"),
        ({"question": "Which?", "A": "one", "B": "two", "answer": "B"}, "Which?\nA. one\nB. two"),
        ({"question": "Is it (A) one or (B) two?", "options": ["one", "two"]}, "Is it (A) one or (B) two?"),
        ({"question": "Who?", "query": "Answer shortly: Who?"}, "Answer shortly: Who?"),
    ],
)  # fmt: skip
def test_all_columns_of_a_question_are_asked(out: Path, row: dict[str, Any], asked: str) -> None:
    assert texts(one(out, row)) == [("user", asked)]


def test_columns_before_the_question_are_asked(out: Path) -> None:
    row = {**ALPACA, "system": "Be brief.", "history": [["Hello", "Hi"], ["Well?", "Yes"]]}
    assert imported(out, row, turns="all").added == 3
    roles = [role for role, _ in texts(read(out)[-1])]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert texts(read(out)[-1])[-1][1] == "Summarise the text.\nOnce upon a time."


def test_a_system_column_is_the_system_prompt_unless_there_is_one(out: Path) -> None:
    row = said("What is this?", "A wall.", system="Be brief.")
    assert texts(one(out, row)) == [("system", "Be brief."), ("user", "What is this?")]
    row["conversations"].insert(0, {"from": "system", "value": "Be kind."})
    assert imported(out, row).unread_columns == {"system": 1}


def test_columns_that_are_filled_with_null_are_none_at_all(out: Path) -> None:
    turn = {"role": None, "from": "human", "content": None, "value": "What is this?", "tool_calls": None}
    assert texts(one(out, {"conversations": [turn], "system": None, "image": None})) == [
        ("user", "What is this?")
    ]
    assert refused(out, said("What?", "x", system="half \ud83d"))[0] == "text is not Unicode"


def test_two_different_questions_are_refused(out: Path) -> None:
    reason, detail = refused(out, {"question": "Who?", "prompt": "Where?"})
    assert reason == "several questions"
    assert "question, prompt" in detail


def test_columns_that_no_prompt_holds_are_counted(out: Path) -> None:
    rows = [said(f"{n}?", "Yes.", id=str(n), note="keep", width=640, empty="") for n in range(3)]
    rows[0] |= {"images": [], "tools": "[search]"}
    assert imported(out, *rows).unread_columns == {"note": 3, "tools": 1}


def test_pairs_of_user_and_assistant_are_turns(out: Path) -> None:
    pairs = [{"user": "What?", "assistant": "A wall.", "source": "x"}, {"user": "Red?", "assistant": "No."}]
    assert imported(out, {"images": ["1.jpg"], "texts": pairs}, turns="all").added == 2
    last = read(out)[-1]
    assert [part["type"] for part in last.messages[0]["content"]] == ["image", "text"]
    assert [message["role"] for message in last.messages] == ["user", "assistant", "user"]
    human = [{"human": "What?", "assistant": "A wall."}]  # ms-swift
    assert texts(one(out.with_name("swift"), {"conversation": human})) == [("user", "What?")]


def test_roles_are_known_in_any_case(out: Path) -> None:
    turns = [{"from": "Human", "value": "What is this?"}, {"from": "GPT", "value": "A wall."}]
    assert one(out, {"conversations": turns}).reference == "A wall."


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search"}}]},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "search"}}]},
        {"role": "tool", "content": "42"},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "42"},
    ],
)
def test_a_tool_call_is_refused_as_one(out: Path, turn: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": "What?"}, turn, {"role": "user", "content": "So?"}]}
    assert refused(out, row)[0] == "tool call"


def test_bytes_in_json_are_base64(out: Path) -> None:
    data = (out.parents[1] / "1.jpg").read_bytes()
    row = said(
        "<image>\nWhat?", "A wall.", image={"bytes": base64.encodebytes(data).decode(), "path": "x.jpg"}
    )
    assert Path(one(out, row).files[0]).read_bytes() == data
    part = {"type": "image", "bytes": base64.b64encode(data).decode()}
    assert imported(out, {"messages": [{"role": "user", "content": [part, "What?"]}]}).present == 1
    bare = said("<image>\nWhat?", "A wall.", image=base64.b64encode(data * 9).decode())
    reason, detail = refused(out, bare)
    assert (reason, "data URL" in detail) == ("missing image", True)
    assert refused(out, said("<image>\nWhat?", "x", image={"bytes": "no base64!"}))[0] == "no media file"


def packed(folder: Path, name: str, rows: list[Any]) -> Path:
    """A file of rows in the form that its name tells."""
    path = folder / name
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = ".jsonl" in name
        path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    path.write_bytes(packers.get(path.suffix, bytes)(path.read_bytes()))
    return path


@pytest.mark.parametrize("kind", ["auto", "hf"])
@pytest.mark.parametrize(
    "name", ["a.parquet", "a.json", "a.json.gz", "a.jsonl.gz", "a.jsonl.bz2", "a.json.xz", "a.parquet.gz"]
)
def test_one_file_is_read_by_what_it_holds(
    tmp_path: Path, out: Path, name: str, kind: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # neither the package nor the hub is needed
    rows = [ALPACA, {**ALPACA, "input": "A second one."}]
    summary = import_prompts([str(packed(tmp_path, name, rows))], out, kind)
    assert (summary.added, summary.skipped, summary.datasets) == (2, {}, {"a": 2})
    assert texts(read(out)[1]) == [("user", "Summarise the text.\nA second one.")]


def test_parquet_holds_images_as_bytes_and_tells_its_form(tmp_path: Path, out: Path) -> None:
    image = {"bytes": (tmp_path / "1.jpg").read_bytes(), "path": "1.jpg"}
    rows = [{**said(f"<image>\nWhat {n}?", "A wall."), "image": image} for n in range(20)]
    assert import_prompts([str(packed(tmp_path, "train-00000.parquet", rows))], out).added == 20
    assert Path(read(out)[-1].files[0]).read_bytes() == image["bytes"]
    assert read(out)[-1].row == 20


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl.gz"])
def test_a_folder_of_files_is_a_dataset(tmp_path: Path, out: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "1.jpg", tmp_path / "data" / "beside.jpg")
    packed(tmp_path / "data", name, [said("<image>\nWhat is this?", "A wall.", image="beside.jpg")])
    assert import_prompts([str(tmp_path / "data")], out).added == 1
    assert read(out)[0].files == [str(tmp_path / "data" / "beside.jpg")]


def test_a_path_is_never_asked_of_the_hub(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("absent.parquet", "./absent", "~/absent", "absent.jsonl.gz"):
        with pytest.raises(DataError, match=re.escape(source)):
            import_prompts([source], out, "hf")
    with pytest.raises(DataError, match="datasets"):
        import_prompts(["someone/data"], out, "hf")


def test_a_zip_archive_is_refused_by_name(tmp_path: Path, out: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.writestr("a.json", json.dumps([TALK]))
    with pytest.raises(DataError, match="a zip archive"):
        import_prompts([str(tmp_path / "a.zip")], out)
    assert not out.exists()


def tar(path: Path, *members: tuple[str, Any], mode: str = "w") -> str:
    """A tar archive of these contents; None: a symbolic link to /etc/passwd."""
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
                made.addfile(entry)
                continue
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return str(path)


def test_a_folder_of_images_and_videos_needs_only_a_question(out: Path, media: Path) -> None:
    photos = out.parents[1] / "photos"
    (photos / "sub").mkdir(parents=True)
    shutil.copy(media / "1.jpg", photos / "sub" / "a.JPG")
    shutil.copy(media / "1.mp4", photos / "b.mp4")
    (photos / ".hidden.jpg").write_text("no image")
    (photos / "notes.txt").write_text("no image")
    summary = import_prompts([str(photos)], out, choices=Choices(ask="Describe the image.", frames=4))
    assert (summary.added, summary.skipped) == (2, {"neither image nor video": 1})
    video, image = (prompt.messages[0]["content"] for prompt in read(out))
    assert [{name: part[name] for name in part if name != "digest"} for part in image] == [
        {"type": "image", "path": str(photos / "sub" / "a.JPG")},
        {"type": "text", "text": "Describe the image."},
    ]
    assert (video[0]["type"], video[0]["path"], video[0]["frames"]) == ("video", str(photos / "b.mp4"), 4)
    assert {prompt.dataset for prompt in read(out)} == {"photos"}


def test_a_question_is_asked_only_where_there_is_none(out: Path) -> None:
    rows = [{"image": "1.jpg", "caption": "A wall."}, {"image": "1.jpg", "question": "What?"}, TALK]
    assert imported(out, *rows, ask="Describe it.").added == 3
    texts = [prompt.messages[0]["content"][-1]["text"] for prompt in read(out)]
    assert texts == ["Describe it.", "What?", "What is this?"]
    assert [prompt.reference for prompt in read(out)] == ["A wall.", None, "A wall."]
    with pytest.raises(DataError, match="--ask"):
        imported(out, TALK, ask=" ")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz"])
def test_samples_of_a_tar_archive_are_rows(tmp_path: Path, out: Path, media: Path, name: str) -> None:
    image, video = (media / "1.jpg").read_bytes(), (media / "1.mp4").read_bytes()
    talk = said("<image>\nWhat is this?", "A wall.", image="of/another/disk.jpg")
    source = tar(
        tmp_path / name,
        ("./x/000.jpg", image),
        ("./x/000.json", talk),
        ("001.jpg", image),
        ("001.txt", b"A wall."),
        ("002.mp4", video),
        ("002.txt", b"A ball."),
        mode="w:" + name.partition("r.")[2].replace("tar", ""),
    )
    assert import_prompts([source], out, choices=Choices(ask="Describe it.", frames=4)).skipped == {}
    prompts = read(out)
    assert [prompt.reference for prompt in prompts] == ["A wall.", "A wall.", "A ball."]
    assert [prompt.messages[0]["content"][0]["type"] for prompt in prompts] == ["image", "image", "video"]
    assert {Path(path).parent for prompt in prompts for path in prompt.files} == {out.parent / "images"}


def test_no_member_of_a_tar_archive_leads_out_of_it(tmp_path: Path, out: Path, media: Path) -> None:
    image = (media / "1.jpg").read_bytes()
    source = tar(
        tmp_path / "evil.tar",
        ("../../escaped.jpg", image),
        ("/tmp/vlmdistill-escaped.jpg", image),
        ("2.jpg", None),
        ("3.jpg", image),
        ("3.json", [1]),
        ("4.jpg", b"no image"),
    )
    before = set(tmp_path.rglob("*"))
    summary = import_prompts([source], out, choices=Choices(ask="Describe it."))
    assert (summary.added, sum(summary.skipped.values())) == (1, 4)  # the same image twice
    made = set(tmp_path.rglob("*")) - before
    assert not Path("/tmp/vlmdistill-escaped.jpg").exists()
    assert all(path.is_relative_to(out.parent) or path == out.parent for path in made)


def bombs(tmp_path: Path) -> dict[str, bytes]:
    """Archives that are cut, or broken, or ask for more memory than they have bytes."""
    whole = Path(tar(tmp_path / "whole.tar", ("0.json", TALK), ("1.json", TALK))).read_bytes()
    large = tarfile.TarInfo("0.json")
    large.type, large.size = tarfile.XHDTYPE, 2**40
    chain = tarfile.TarInfo("x")
    chain.type = tarfile.GNUTYPE_LONGNAME
    return {
        "cut": whole[:1100],
        "cut in a header": whole[:1300],
        "broken": whole[:1024] + b"?" * 512 + whole[1536:],
        "large name": large.tobuf(),
        "chain": chain.tobuf() * 3000,
    }


@pytest.mark.parametrize("kind", ["cut", "cut in a header", "broken", "large name", "chain"])
def test_a_hostile_tar_archive_ends_in_one_line(tmp_path: Path, out: Path, kind: str) -> None:
    (tmp_path / "a.tar").write_bytes(bombs(tmp_path)[kind])
    with pytest.raises(DataError, match=r"a\.tar .*tar archive") as caught:
        import_prompts([str(tmp_path / "a.tar")], out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_member_that_is_too_large_is_skipped(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdistill.pipelines.prompts.sources.MOST_BYTES", 200)
    source = tar(tmp_path / "a.tar", ("0.json", {**TALK, "id": "0" * 200}), ("1.json", TALK))
    assert import_prompts([source], out).skipped == {"not a file of a sample": 1}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "odd.json: .*no rows"),
        (b"[]", "odd.json: .*no rows"),
        (b'{"data": [1], "version": 2}', "row 1 .*data, version"),
        (b'{\n "data": [1],\n "version": 2\n}', "row 1 .*data, version"),
        (b"[[1], [2]]", "row 1 .*list"),
        (b"id,question\n1,What?\n", "line 1 .*'id,question'"),
        (b"Dear diary,\n", "line 1 .*'Dear diary,'"),
        (b'{"text": "a"}\n{"text": "b"}\n', "row 1 .*text"),
        (b"[" * 100_000, "odd.json .* line 1"),
        (gzip.compress(b"[]" * 90, mtime=0)[:20], "odd.json .*decompress"),
        (b"PAR1 but not really", "odd.json .*Parquet"),
    ],
)  # fmt: skip
def test_an_error_says_what_the_file_holds(tmp_path: Path, out: Path, content: bytes, found: str) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(DataError, match=found) as caught:
        import_prompts([str(tmp_path / "odd.json")], out)
    assert "\n" not in str(caught.value)


def test_one_object_over_several_lines_is_one_row(tmp_path: Path, out: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TALK, indent=2))
    assert import_prompts([str(tmp_path / "one.json")], out).added == 1


def test_a_large_image_is_taken_without_a_word(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30 * 20 - 1)  # above which Pillow warns
    one(out, said("<image>\nWhat?", "A wall.", image="1.jpg"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30 * 20 // 2 - 1)  # above twice which it refuses
    assert refused(out, said("<image>\nWho?", "A wall.", image="1.jpg"))[0] == "unreadable image"


def test_all_of_what_one_file_holds_is_read_or_refused(tmp_path: Path, out: Path, media: Path) -> None:
    image = (media / "1.jpg").read_bytes()
    two = tmp_path / "two.json"
    two.write_text(json.dumps([TALK]) + "\n" + json.dumps([ALPACA]))
    with pytest.raises(DataError, match=r"two\.json .* line 2"):
        import_prompts([str(two)], out)
    first = tar(tmp_path / "1.tar", ("0.json", TALK))
    second = tar(tmp_path / "2.tar", ("1.jpg", image), ("1.json", said("<image>\nWhat?", "x")))
    (tmp_path / "two.tar").write_bytes(Path(first).read_bytes() + Path(second).read_bytes())
    assert import_prompts([str(tmp_path / "two.tar")], out).added == 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "What is this?", "images": ["1.jpg"]}]},
        {"messages": [{"role": "user", "content": [{"image": "1.jpg"}, {"text": "What is this?"}]}]},
        {"texts": [{"user": "What is this?", "assistant": "A wall.", "images": ["1.jpg"]}]},
        {"question": "What is this?", "image": "file:///DIR/a%20b.jpg"},
    ],
)  # fmt: skip
def test_an_image_is_found_in_every_usual_form(out: Path, row: dict[str, Any]) -> None:
    folder = out.parents[1]
    shutil.copy(folder / "1.jpg", folder / "a b.jpg")
    asked = one(out, json.loads(json.dumps(row).replace("/DIR", str(folder)))).messages[0]["content"]
    assert [part["type"] for part in asked] == ["image", "text"]


def test_content_that_is_in_no_prompt_is_counted(tmp_path: Path, out: Path) -> None:
    part = {"type": "text", "text": "What?", "image": "1.jpg"}
    turn = {"role": "user", "content": [part], "audio": "1.wav", "name": ""}
    assert imported(out, {"messages": [turn]}).unread_columns == {"turn.audio": 1, "text.image": 1}
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
        ({"question": "Which?", "choices": list("abcdefghijkl")}, MANY),
        ({"question": "Which is red?", "hint": "red"}, "\nred"),
        ({"question": "Hint: red\nWhich?", "hint": "red"}, ""),
        ({"question": "Which?", "X": "a coordinate"}, ""),
    ],
)  # fmt: skip
def test_choices_and_hints_are_left_out_only_if_the_question_has_them(
    out: Path, row: dict[str, Any], asked: str
) -> None:
    imported(out, row)
    assert texts(read(out)[0])[0][1] == row["question"] + asked
    assert refused(out, {"question": "Who?", "choices": ["x"] * 27})[0] == "too many choices"


def test_a_value_that_cannot_be_read_costs_its_row_alone(tmp_path: Path, out: Path) -> None:
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


def test_damage_ends_in_one_line(tmp_path: Path, out: Path, media: Path) -> None:
    broken = bytearray(bz2.compress(json.dumps([TALK]).encode()))
    broken[20:24] = b"????"
    (tmp_path / "a.json.bz2").write_bytes(broken)
    with pytest.raises(DataError, match=r"a\.json\.bz2 .*decompress"):
        import_prompts([str(tmp_path / "a.json.bz2")], out)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "a.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="saved"):
        import_prompts([str(tmp_path / "saved")], out)
    with Image.open(media / "1.jpg") as image:
        image.save(tmp_path / "whole.avif")
    whole = (tmp_path / "whole.avif").read_bytes()
    (tmp_path / "1.avif").write_bytes(whole[:-40])
    assert refused(out, said("<image>\nWhat?", "x", image="1.avif"))[0] == "unreadable image"
    os.symlink(os.fsencode(tmp_path) + b"/\xff.jpg", tmp_path / "clean.jpg")
    os.rename(shutil.copy(media / "1.jpg", tmp_path / "2.jpg"), os.fsencode(tmp_path) + b"/\xff.jpg")
    assert refused(out, said("<image>\nWhat?", "x", image="clean.jpg"))[0] == "name not UTF-8"


def test_linked_folders_of_images_are_read_once(out: Path, media: Path) -> None:
    photos = out.parents[1] / "photos"
    photos.mkdir()
    (photos / "linked").symlink_to(media)
    (photos / "loop").symlink_to(photos)
    (photos / "gone.jpg").symlink_to(photos / "nowhere.jpg")
    summary = import_prompts([str(photos)], out, choices=Choices(ask="Describe it.", frames=4))
    assert (summary.added, summary.skipped) == (2, {"missing image": 1})


def test_a_split_of_a_saved_dataset_is_chosen_by_its_name(tmp_path: Path, out: Path) -> None:
    splits = {
        name: datasets.Dataset.from_list([{"question": f"{name}?"}]) for name in ("train", "validation")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "coco@2017"))
    import_prompts([f"{tmp_path}/coco@2017@validation"], out)
    import_prompts([f"{tmp_path}/coco@2017"], out)
    assert [texts(prompt)[0][1] for prompt in read(out)] == ["validation?", "train?"]
    with pytest.raises(DataError, match="train, validation"):
        import_prompts([f"{tmp_path}/coco@2017@test"], out)


def test_what_is_an_image_does_not_depend_on_the_machine(
    tmp_path: Path, out: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mimetypes, "guess_type", lambda *_, **__: (None, None))
    with Image.open(media / "1.jpg") as image:
        image.save(tmp_path / "1.webp")
    webp = (tmp_path / "1.webp").read_bytes()
    source = tar(
        tmp_path / "a.tar", ("0.webp", webp), ("0.json", TALK), ("1.json", TALK), ("1.query", b"Who?")
    )
    summary = import_prompts([source], out)
    assert [len(prompt.files) for prompt in read(out)] == [1, 0]
    assert summary.unread_columns == {"query": 1}
    (tmp_path / "frames").mkdir()
    shutil.copy(tmp_path / "1.webp", tmp_path / "frames")
    row = said("<video>\nWhat moves?", "x", video="frames")
    assert imported(out, row).added == 1


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
WORDS = ["user", "human", "gpt", "text", "image", "video_url", "<image>", "a <video>", "1.jpg", "", "\ud83d"]


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
    for _ in range(int(os.environ.get("VLMDISTILL_FUZZ_ROWS", "3000"))):
        part = {"type": rng.choice(["text", "image", "video"]), rng.choice(KEYS): anything(rng, 2)}
        said = {"role": rng.choice(WORDS[:3]), "content": rng.choice([anything(rng, 1), ["hi", part]])}
        row = {
            rng.choice(KEYS): anything(rng, 1),
            rng.choice(KEYS[:4]): [said, anything(rng, 2)][: rng.randrange(3)],
        }
        try:
            talk = conversation(Row("rows.json", "rows", 1, rng.choice([row, row, anything(rng)])), "llava")
        except BadRowError as error:
            reasons.add(error.reason)
        else:
            assert {message["role"] for message in talk.messages} <= {"system", "user", "assistant"}
    assert len(reasons) > 10
