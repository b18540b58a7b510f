"""Files that rows come from: formats, folders, archives, damage."""

import bz2
import gzip
import io
import json
import mimetypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tests.pipelines.data.prompts.hub import hub
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
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts.formats import Format
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.data.prompts.sources import read as read_rows
from vlmdistill.stores.errors import DataError


@pytest.mark.parametrize("kind", ["auto", "hf"])
@pytest.mark.parametrize(
    "name",
    [
        "a.parquet",
        "a.json",
        "a.json.gz",
        "a.jsonl.gz",
        "a.jsonl.bz2",
        "a.json.xz",
        "a.parquet.gz",
    ],
)
def test_one_file_is_read_by_what_it_holds(
    tmp_path: Path, out: Path, name: str, kind: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "datasets", None
    )  # neither the package nor the hub is needed
    rows = [ALPACA, {**ALPACA, "input": "A second one."}]
    summary = import_prompts([str(packed(tmp_path, name, rows))], out, kind)
    assert (summary.added, summary.skipped, summary.datasets) == (2, {}, {"a": 2})
    assert texts(read(out)[1]) == [("user", "Summarise the text.\nA second one.")]


def test_parquet_holds_images_as_bytes_and_tells_its_form(
    tmp_path: Path, out: Path
) -> None:
    image = {"bytes": (tmp_path / "1.jpg").read_bytes(), "path": "1.jpg"}
    rows = [
        {**said(f"<image>\nWhat {n}?", "A wall."), "image": image} for n in range(20)
    ]
    assert (
        import_prompts([str(packed(tmp_path, "train-00000.parquet", rows))], out).added
        == 20
    )
    assert Path(read(out)[-1].files[0]).read_bytes() == image["bytes"]
    assert read(out)[-1].row == 20


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl.gz"])
def test_a_folder_of_files_is_a_dataset(tmp_path: Path, out: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "1.jpg", tmp_path / "data" / "beside.jpg")
    packed(
        tmp_path / "data",
        name,
        [said("<image>\nWhat is this?", "A wall.", image="beside.jpg")],
    )
    assert import_prompts([str(tmp_path / "data")], out).added == 1
    assert read(out)[0].files == [str(tmp_path / "data" / "beside.jpg")]


MIXED = [
    {
        "messages": [
            {"role": "user", "content": "5"},
            {"role": "assistant", "content": "A number."},
        ]
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "1.jpg"},
                    {"type": "text", "text": "What is this?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A wall."}]},
        ]
    },
    {"messages": [{"role": "user", "content": "What is a drafter?"}]},
    {**said("<image>\nWho?", "Nobody."), "image": "1.jpg"},
    {**said("<image>\nWhy?", "Because."), "image": ["1.jpg"]},
]


def contents(out: Path) -> list[Any]:
    """What the prompts of a file say and show, and their references."""
    return [
        (
            [
                part.get("text") or Path(part["path"]).name
                for part in prompt.messages[0]["content"]
            ],
            prompt.reference,
        )
        for prompt in read(out)
    ]


@pytest.mark.parametrize("form", ["folder", "saved", "parquet", "folder of Parquet"])
def test_values_of_several_types_in_a_column_are_what_they_are_in_json(
    tmp_path: Path, out: Path, form: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(tmp_path / "1.jpg", folder)
    rows = (
        MIXED if form == "folder" else MIXED[1:]
    )  # `datasets` makes a number of the first one's text
    source = packed(folder, "rows.jsonl", rows)
    import_prompts([str(source)], out)
    expected = contents(out)
    assert len(expected) == len(rows)
    if form != "folder":
        data = datasets.load_dataset(str(folder), data_files="*.jsonl", split="train")
        source.unlink()
    if form == "saved":
        data.save_to_disk(str(folder))
    elif form != "folder":
        data.to_parquet(str(folder / "rows.parquet"))
    again = out.with_name("again.parquet")
    import_prompts(
        [str(folder / "rows.parquet" if form == "parquet" else folder)], again
    )
    assert contents(again) == expected


def test_values_of_several_types_that_datasets_has_read_are_refused(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    packed(folder, "train.jsonl", MIXED)
    # With settings of its own, a folder is read by `datasets`, as names on the hub are.
    config = (
        "configs:\n- config_name: default\n  data_files: '*.jsonl'\n  chunksize: 999999"
    )
    (folder / "README.md").write_text(f"---\n{config}\n---\n")
    with pytest.raises(DataError, match=r"has values of several types.*one by one"):
        import_prompts([str(folder)], out)


@pytest.mark.parametrize("split", ["train", None])
def test_a_saved_dataset_has_no_other_split_than_its_own(
    tmp_path: Path, split: str | None
) -> None:
    folder = str(tmp_path / "saved")
    rows = {"question": ["Why?"]}
    datasets.Dataset.from_dict(rows, split=split).save_to_disk(folder)
    with pytest.raises(DataError, match="no split 'test'"):
        list(read_rows(f"{folder}@test"))
    own = f"@{split}" if split else ""
    assert len([*read_rows(f"{folder}{own}")]) == 1


def test_the_current_folder_is_a_source(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    packed(folder, "train.jsonl", [TALK])
    monkeypatch.chdir(folder)
    assert import_prompts(["."], out).added == 1
    assert read(out)[0].dataset == "data"


@pytest.mark.parametrize("name", ["llava.json", "rows.jsonl", "rows.parquet"])
def test_questions_beside_their_images_are_read(
    tmp_path: Path, out: Path, media: Path, name: str
) -> None:
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    for picture_name in ("1.jpg", "2.jpg", "3.jpg"):
        shutil.copy(media / "1.jpg", folder / "train" / picture_name)
    packed(folder, name, [said("<image>\nWhat?", "A wall.", image="train/2.jpg")])
    assert import_prompts([str(folder)], out).added == 1
    assert contents(out) == [(["2.jpg", "What?"], "A wall.")]


def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(tmp_path / "1.jpg", folder)
    packed(folder, "train.jsonl", [TALK])
    packed(folder, "test.jsonl", [TALK])
    for name in ("notes.txt", "more.csv", "more.tsv", "README.md"):
        (folder / name).write_text("question\nWho?\n")
    command = ["prompts", str(folder), "--runs", str(tmp_path / "runs")]
    assert main(command) == 0
    warned = capsys.readouterr().err
    assert "4 files are not read: more.csv, more.tsv, notes.txt, ..." in warned
    summary = import_prompts([f"{folder}@test"], out)
    assert (summary.added, summary.skipped) == (1, {"file not read": 4})
    assert summary.unread_files[-1] == "train.jsonl"


def test_metadata_of_images_are_read_also_with_a_question(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("1.jpg", "2.jpg"):
        shutil.copy(tmp_path / "1.jpg", folder / name)
    (folder / "metadata.csv").write_text("file_name,caption\n1.jpg,A wall.\n")
    summary = import_prompts([str(folder)], out, choices=Choices(ask="What is this?"))
    assert (summary.added, summary.unread_files) == (1, ["2.jpg"])
    assert contents(out) == [(["1.jpg", "What is this?"], "A wall.")]


def test_archives_of_a_folder_are_read_as_each_of_them(
    tmp_path: Path, out: Path
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    image = (tmp_path / "1.jpg").read_bytes()
    row = {"question": "What is this?"}
    tar(shards / "shard-000.tar", ("000.jpg", image), ("000.json", row))
    assert import_prompts([str(shards)], out).added == 1
    (content,) = [message["content"] for message in read(out)[0].messages]
    assert [part["type"] for part in content] == ["image", "text"]


def test_photos_of_an_archive_that_share_the_first_part_of_their_names_do_not_merge(
    tmp_path: Path, out: Path
) -> None:
    members = [("IMG.001.png", RED), ("IMG.002.png", BLUE), ("other.png", RED)]
    asking = Choices(ask="What is this?")
    summary = import_prompts([tar(tmp_path / "a.tar", *members)], out, choices=asking)
    assert summary.skipped == {"several media files without text": 1}
    for number in (1, 2):
        members.insert(2 * number - 1, (f"IMG.00{number}.txt", b"A photo."))
    summary = import_prompts([tar(tmp_path / "b.tar", *members)], out, choices=asking)
    assert summary.skipped == {"two files of one sample": 1}
    assert [len(prompt.files) for prompt in read(out)] == [1]


def test_a_table_beside_images_is_named(tmp_path: Path, out: Path, media: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("1.jpg", "2.jpg"):
        shutil.copy(media / "1.jpg", tmp_path / "data" / name)
    (tmp_path / "data" / "rows.csv").write_text("image,question\n1.jpg,What is this?\n")
    with pytest.raises(DataError, match=r"rows\.csv") as caught:
        import_prompts([str(tmp_path / "data")], out)
    assert "--ask" not in str(caught.value)


def test_a_path_is_never_asked_of_the_hub(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("absent.parquet", "./absent", "~/absent", "absent.jsonl.gz"):
        with pytest.raises(DataError, match=re.escape(source)):
            import_prompts([source], out, "hf")
    with pytest.raises(DataError, match="datasets"):
        import_prompts(["someone/data"], out, "hf")


def test_only_parquet_is_read_from_the_hub(tmp_path: Path) -> None:
    """Of JSON and CSV, `datasets` changes values: a quoted text loses its quotes, and 007 is a number."""
    root = tmp_path / "hub"
    rows = [{"question": '"Who?"'}, {"question": "007"}]
    for name in ("rows.parquet", "rows.jsonl"):
        folder = root / "owner" / name.partition(".")[2]
        folder.mkdir(parents=True)
        packed(folder, name, rows)
    with hub(root) as address:
        environment = os.environ | {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        outputs = {}
        for name in ("parquet", "jsonl"):
            command = ["prompts", f"owner/{name}", "--format", "hf", "--runs", "runs"]
            outputs[name] = subprocess.run(
                [sys.executable, "-m", "vlmdistill", *command],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
    assert outputs["parquet"].returncode == 0, outputs["parquet"].stderr
    assert [
        texts(prompt)[0][1]
        for prompt in read(tmp_path / "runs/demo-small/prompts.parquet")
    ] == [
        '"Who?"',
        "007",
    ]
    assert outputs["jsonl"].returncode == 1
    assert "hf download owner/jsonl" in outputs["jsonl"].stderr


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
            data = (
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return str(path)


def test_a_folder_of_images_and_videos_needs_only_a_question(
    out: Path, media: Path
) -> None:
    photos = out.parents[1] / "photos"
    (photos / "sub").mkdir(parents=True)
    shutil.copy(media / "1.jpg", photos / "sub" / "a.JPG")
    shutil.copy(media / "1.mp4", photos / "b.mp4")
    (photos / ".hidden.jpg").write_text("no image")
    (photos / "notes.txt").write_text("no image")
    summary = import_prompts(
        [str(photos)], out, choices=Choices(ask="Describe the image.", frames=4)
    )
    assert (summary.added, summary.skipped) == (2, {"neither image nor video": 1})
    video, image = (prompt.messages[0]["content"] for prompt in read(out))
    assert [
        {name: part[name] for name in part if name != "digest"} for part in image
    ] == [
        {"type": "image", "path": str(photos / "sub" / "a.JPG")},
        {"type": "text", "text": "Describe the image."},
    ]
    assert (video[0]["type"], video[0]["path"], video[0]["frames"]) == (
        "video",
        str(photos / "b.mp4"),
        4,
    )
    assert {prompt.dataset for prompt in read(out)} == {"photos"}


def test_photos_that_are_called_like_a_split_are_photos(out: Path, media: Path) -> None:
    photos = out.parents[1] / "photos"
    photos.mkdir()
    shutil.copy(media / "1.jpg", photos / "other.jpg")
    for name, content in (("evaluation-1.png", RED), ("evaluation-2.png", BLUE)):
        (photos / name).write_bytes(content)
    with pytest.raises(DataError, match="images without a question need one: --ask"):
        import_prompts([str(photos)], out)
    summary = import_prompts([str(photos)], out, choices=Choices(ask="What is this?"))
    assert summary.added == 3


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz"])
def test_samples_of_a_tar_archive_are_rows(
    tmp_path: Path, out: Path, media: Path, name: str
) -> None:
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
    assert (
        import_prompts(
            [source], out, choices=Choices(ask="Describe it.", frames=4)
        ).skipped
        == {}
    )
    prompts = read(out)
    assert [prompt.reference for prompt in prompts] == ["A wall.", "A wall.", "A ball."]
    assert [prompt.messages[0]["content"][0]["type"] for prompt in prompts] == [
        "image",
        "image",
        "video",
    ]
    assert {Path(path).parent for prompt in prompts for path in prompt.files} == {
        out.parent / "images"
    }


def picture(color: tuple[int, int, int]) -> bytes:
    """A PNG file."""
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), color).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))


def asked(number: int) -> dict[str, Any]:
    """A row without a tag, which would also do without an image."""
    return said(f"What is in picture {number}?", "A wall.")


@pytest.mark.parametrize(
    "names",
    [
        ("0.png", "1.png", "0.json", "1.json"),
        ("0.json", "1.json", "0.png", "1.png"),
        ("images/0.png", "images/1.png", "rows/0.json", "rows/1.json"),
        ("rows/0.json", "rows/1.json", "images/0.png", "images/1.png"),
    ],
)
def test_no_question_loses_the_image_that_is_packed_apart_from_it(
    tmp_path: Path, out: Path, names: Sequence[str]
) -> None:
    members = [
        (name, RED if "png" in name else asked(int(Path(name).stem))) for name in names
    ]
    with pytest.raises(DataError, match=r"a\.tar.* 0\..*0\.|a\.tar.* rows/0\.json"):
        import_prompts(
            [tar(tmp_path / "a.tar", *members)], out, choices=Choices(limit=1)
        )
    assert not out.exists()


def test_hidden_files_of_an_archive_part_no_sample(tmp_path: Path, out: Path) -> None:
    apple = b"\0\5\x16\7" + bytes(200)
    members = [
        ("._0.png", apple),
        ("0.png", RED),
        ("x/.y/0.json", apple),
        ("._0.json", apple),
        ("0.json", asked(0)),
    ]
    summary = import_prompts([tar(tmp_path / "a.tar", *members)], out)
    assert (summary.added, summary.skipped, summary.unread_columns) == (1, {}, {})
    assert len(read(out)[0].files) == 1


def test_archives_that_begin_to_count_anew_may_follow_each_other(
    tmp_path: Path, out: Path
) -> None:
    first = Path(
        tar(tmp_path / "1.tar", ("0.png", RED), ("0.json", asked(1)))
    ).read_bytes()
    second = Path(
        tar(tmp_path / "2.tar", ("0.png", BLUE), ("0.json", asked(2)))
    ).read_bytes()
    (tmp_path / "a.tar").write_bytes(first + second)
    import_prompts([str(tmp_path / "a.tar")], out)
    assert [len(prompt.files) for prompt in read(out)] == [1, 1]


def test_two_files_of_a_sample_do_not_replace_each_other(
    tmp_path: Path, out: Path
) -> None:
    source = tar(
        tmp_path / "a.tar",
        ("0.a.json", asked(1)),
        ("0.b.json", asked(2)),
        ("1.json", {**asked(3), "caption": "A wall."}),
        ("1.txt", b"A wall."),
        ("1.more.json", {"id": "7"}),
        ("2.1.json", asked(4)),  # of two photos, 2.1.jpg and 2.2.jpg
        ("2.2.json", asked(4)),
    )
    summary = import_prompts([source], out)
    assert (summary.added, sum(summary.skipped.values())) == (1, 2)


@pytest.mark.parametrize(
    ("names", "named", "shown"),
    [
        (("0.png", "0.seg.png"), None, [RED]),  # a mask
        (("0.png", "0.seg_1.png"), None, [RED]),
        (("0.depth.png", "0.png"), None, [BLUE]),
        (("0.image.png", "0.json"), None, [RED]),
        (("0.1.png", "0.0.png"), None, [BLUE, RED]),
        (("0.10.png", "0.2.png"), None, [BLUE, RED]),
        (("0.0.5.png", "0.0.25.png"), None, [BLUE, RED]),  # seconds of frames
        (("0.t_0.png", "0.t_-1.png"), None, [BLUE, RED]),
        (("0.before.png", "0.after.png"), ["x/before.png", "x/after.png"], [RED, BLUE]),
        (("0.after.png", "0.before.png"), ["0.before.png", "0.after.png"], [BLUE, RED]),
        (("0.before.png", "0.after.png"), ["x/after.png", "x/before.png"], [BLUE, RED]),
        (("0.before.png", "0.after.png"), ["x/b.png", "x/a.png"], None),
        (("0.png", "0.jpg.png"), ["x/b.png", "x/a.png"], None),
        (("0.rgb.png", "0.seg.png"), None, None),
    ],
)
def test_of_several_images_of_a_sample_those_are_shown_that_belong_to_it(
    tmp_path: Path,
    out: Path,
    names: Sequence[str],
    named: list[str] | None,
    shown: list[bytes] | None,
) -> None:
    pictures = [
        (name, its)
        for name, its in zip(names, (RED, BLUE), strict=True)
        if "png" in name
    ]
    row = {**asked(0), **({"images": named} if named else {})}
    source = tar(tmp_path / "a.tar", *pictures, ("0.json", row), ("1.json", asked(1)))
    summary = import_prompts([source], out)
    first = read(out)[0]
    if shown is None:
        assert (summary.added, sum(summary.skipped.values())) == (1, 1)
    else:
        assert [Path(path).read_bytes() for path in first.files] == shown
        assert sum(summary.unread_columns.values()) == len(pictures) - len(shown)


def test_a_row_of_a_folder_names_images_beside_its_file_first(
    tmp_path: Path, out: Path
) -> None:
    (tmp_path / "set" / "part").mkdir(parents=True)
    files = {"set/0.png": RED, "set/1.png": RED, "set/part/1.png": BLUE}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rows = [{**asked(number), "image": f"{number}.png"} for number in range(2)]
    (tmp_path / "set/part/rows.json").write_text(json.dumps(rows))
    import_prompts([str(tmp_path / "set")], out)
    shown = [Path(prompt.files[0]).read_bytes() for prompt in read(out)]
    assert shown == [RED, BLUE]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": [{"type": "image", "image": "1.jpg"}, "What?"]},
        {"content": [{"type": "image_url", "image_url": {"url": "x/1.jpg"}}, "What?"]},
        {"content": "What?", "images": ["1.jpg"]},
    ],
    ids=str,
)
def test_a_part_of_a_sample_shows_its_image_and_none_of_the_disk(
    tmp_path: Path, out: Path, turn: dict[str, Any]
) -> None:
    (tmp_path / "1.jpg").write_bytes(BLUE)
    row = {"messages": [{"role": "user", **turn}]}
    files = (("1.jpg", RED), ("1.mask.jpg", BLUE), ("1.json", row))
    source = tar(tmp_path / "a.tar", *files)
    summary = import_prompts([source], out)
    (prompt,) = read(out)
    assert [Path(path).read_bytes() for path in prompt.files] == [RED]
    assert summary.unread_columns == {"mask.jpg": 1}
    other_files = (("2.png", BLUE), ("2.json", row), ("3.json", asked(1)))
    other = tar(tmp_path / "b.tar", *other_files)
    summary = import_prompts([other], tmp_path / "other.parquet")
    assert (summary.added, summary.skipped) == (1, {"missing image": 1})


def test_no_member_of_a_tar_archive_leads_out_of_it(
    tmp_path: Path, out: Path, media: Path
) -> None:
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
    assert (summary.added, sum(summary.skipped.values())) == (
        1,
        4,
    )  # the same image twice
    made = set(tmp_path.rglob("*")) - before
    assert not Path("/tmp/vlmdistill-escaped.jpg").exists()
    assert all(path.is_relative_to(out.parent) or path == out.parent for path in made)


def bombs(tmp_path: Path) -> dict[str, bytes]:
    """Archives that are cut, or broken, or ask for more memory than they have bytes."""
    whole = Path(
        tar(tmp_path / "whole.tar", ("0.json", TALK), ("1.json", TALK))
    ).read_bytes()
    large = tarfile.TarInfo("0.json")
    large.type, large.size = tarfile.XHDTYPE, 2**40
    chain = tarfile.TarInfo("x")
    chain.type = tarfile.GNUTYPE_LONGNAME
    return {
        "cut": whole[:1100],
        "cut in a header": whole[:1300],
        "cut behind a member": whole[:2048],
        "broken": whole[:1024] + b"?" * 512 + whole[1536:],
        "large name": large.tobuf(),
        "chain": chain.tobuf() * 3000,
    }


@pytest.mark.parametrize(
    "kind",
    ["cut", "cut in a header", "cut behind a member", "broken", "large name", "chain"],
)
def test_a_hostile_tar_archive_ends_in_one_line(
    tmp_path: Path, out: Path, kind: str
) -> None:
    (tmp_path / "a.tar").write_bytes(bombs(tmp_path)[kind])
    with pytest.raises(DataError, match=r"a\.tar .*tar archive") as caught:
        import_prompts([str(tmp_path / "a.tar")], out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_member_that_is_too_large_is_skipped(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdistill.pipelines.data.prompts.archives.MOST_BYTES", 200)
    source = tar(
        tmp_path / "a.tar", ("0.json", {**TALK, "id": "0" * 200}), ("1.json", TALK)
    )
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
def test_an_error_says_what_the_file_holds(
    tmp_path: Path, out: Path, content: bytes, found: str
) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(DataError, match=found) as caught:
        import_prompts([str(tmp_path / "odd.json")], out)
    assert "\n" not in str(caught.value)


def test_one_object_over_several_lines_is_one_row(tmp_path: Path, out: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TALK, indent=2))
    assert import_prompts([str(tmp_path / "one.json")], out).added == 1


def test_a_large_image_is_taken_without_a_word(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 30 * 20 - 1
    )  # above which Pillow warns
    one(out, said("<image>\nWhat?", "A wall.", image="1.jpg"))
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 30 * 20 // 2 - 1
    )  # above twice which it refuses
    assert (
        refused(out, said("<image>\nWho?", "A wall.", image="1.jpg"))[0]
        == "unreadable image"
    )


def test_all_of_what_one_file_holds_is_read_or_refused(
    tmp_path: Path, out: Path, media: Path
) -> None:
    image = (media / "1.jpg").read_bytes()
    two = tmp_path / "two.json"
    two.write_text(json.dumps([TALK]) + "\n" + json.dumps([ALPACA]))
    with pytest.raises(DataError, match=r"two\.json .* line 2"):
        import_prompts([str(two)], out)
    first = tar(tmp_path / "1.tar", ("0.json", TALK))
    second = tar(
        tmp_path / "2.tar", ("1.jpg", image), ("1.json", said("<image>\nWhat?", "x"))
    )
    (tmp_path / "two.tar").write_bytes(
        Path(first).read_bytes() + Path(second).read_bytes()
    )
    assert import_prompts([str(tmp_path / "two.tar")], out).added == 2


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
    assert (
        refused(out, said("<image>\nWhat?", "x", image="1.avif"))[0]
        == "unreadable image"
    )
    os.symlink(os.fsencode(tmp_path) + b"/\xff.jpg", tmp_path / "clean.jpg")
    os.rename(
        shutil.copy(media / "1.jpg", tmp_path / "2.jpg"),
        os.fsencode(tmp_path) + b"/\xff.jpg",
    )
    assert (
        refused(out, said("<image>\nWhat?", "x", image="clean.jpg"))[0]
        == "name not UTF-8"
    )


def test_linked_folders_of_images_are_read_once(out: Path, media: Path) -> None:
    photos = out.parents[1] / "photos"
    photos.mkdir()
    (photos / "linked").symlink_to(media)
    (photos / "loop").symlink_to(photos)
    (photos / "gone.jpg").symlink_to(photos / "nowhere.jpg")
    summary = import_prompts(
        [str(photos)], out, choices=Choices(ask="Describe it.", frames=4)
    )
    assert (summary.added, summary.skipped) == (2, {"missing image": 1})


def test_a_split_of_a_saved_dataset_is_chosen_by_its_name(
    tmp_path: Path, out: Path
) -> None:
    splits = {
        name: datasets.Dataset.from_list([{"question": f"{name}?"}])
        for name in ("train", "validation")
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
        tmp_path / "a.tar",
        ("0.webp", webp),
        ("0.json", TALK),
        ("1.json", TALK),
        ("1.query", b"Who?"),
    )
    summary = import_prompts([source], out)
    assert [len(prompt.files) for prompt in read(out)] == [1, 0]
    assert summary.unread_columns == {"query": 1}
    (tmp_path / "frames").mkdir()
    shutil.copy(tmp_path / "1.webp", tmp_path / "frames")
    row = said("<video>\nWhat moves?", "x", video="frames")
    assert imported(out, row).added == 1
