"""Importing prompts: every format; every broken row is listed; the same content has the same key."""

import base64
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import tiny
from tests.pipelines.data.prompts.rows import said
from vlmdistill.pipelines.data.prompts.importing import (
    Choices,
    ImportSummary,
    import_prompts,
)
from vlmdistill.pipelines.data.prompts.prompt_table import load, read
from vlmdistill.pipelines.data.prompts.splitting import resplit
from vlmdistill.stores.errors import DataError


def picture(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (30, 20), (colour, 90, 160)).save(path)
    return path


def write(path: Path, rows: Any) -> str:
    path.write_text(
        "\n".join(map(json.dumps, rows))
        if path.suffix == ".jsonl"
        else json.dumps(rows, indent=1)
    )
    return str(path)


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def skipped(summary: ImportSummary) -> list[dict[str, Any]]:
    return [json.loads(line) for line in summary.skipped_file.read_text().splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "workspace" / "prompts.parquet"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("img\\sub\\a.png", "img/sub/a.png"),
        ("img/sub/B.JPG", "img/sub/b.jpg"),
        ("IMG/Sub/b.jpg", "img/sub/b.jpg"),
        ("img/c%20d.png", "img/c d.png"),
        ("img/caf\u00e9.png", "img/cafe\u0301.png"),  # NFC, and NFD as macOS writes it
    ],
)
def test_an_image_whose_name_is_spelled_otherwise_is_named(
    tmp_path: Path, out: Path, name: str, file: str
) -> None:
    picture(tmp_path / file)
    rows = [said("<image>\nWhat?", "x", image=name), said("Hello?", "x")]
    (entry,) = skipped(import_prompts([write(tmp_path / "rows.json", rows)], out))
    assert str(tmp_path / file) in entry["detail"]
    with pytest.raises(DataError) as caught:
        import_prompts(
            [write(tmp_path / "rows.json", rows[:1])], out.with_name("other.parquet")
        )
    assert "--images" not in str(caught.value)


def test_llava_rows_keep_their_image_where_its_tag_stood(
    tmp_path: Path, out: Path
) -> None:
    picture(tmp_path / "coco" / "1.jpg", 1)
    rows = [
        said("<image>\nWhat is this?", "A wall.", image="coco/1.jpg"),
        said("And this?\n<image>", "The wall.", image="coco/1.jpg"),
        said("No tag at all", "Yes.", image="coco/1.jpg"),
    ]
    import_prompts([write(tmp_path / "mix.json", rows)], out)
    parts = [
        [part["type"] for part in prompt.messages[0]["content"]] for prompt in read(out)
    ]
    assert parts == [["image", "text"], ["text", "image"], ["image", "text"]]
    first = read(out)[0]
    assert first.messages[0]["content"][1] == {"type": "text", "text": "What is this?"}
    assert first.messages[0]["content"][0]["path"] == str(tmp_path / "coco" / "1.jpg")
    assert (first.reference, first.dataset, first.row) == ("A wall.", "mix", 1)


def test_what_is_no_question_and_a_still_under_video_are_skipped_with_the_reason(
    tmp_path: Path, out: Path
) -> None:
    picture(tmp_path / "1.jpg", 1)
    request = {"custom_id": "1", "body": {"input": "a text"}}
    rows = [
        said("<video>\nWhat happens?", "Nothing.", video="1.jpg"),
        {**request, "url": "/v1/embeddings"},
        {
            **request,
            "url": "/v1/responses",
            "body": {"input": [{"role": "user", "content": "Hello?"}]},
        },
    ]
    summary = import_prompts([write(tmp_path / "mix.json", rows)], out)
    assert (summary.added, summary.skipped) == (
        1,
        {"an image as a video": 1, "no conversation": 1},
    )
    assert (
        "/v1/embeddings"
        in skipped(summary)[0]["detail"] + skipped(summary)[1]["detail"]
    )


def test_images_are_found_in_the_folder_that_is_given(
    tmp_path: Path, out: Path
) -> None:
    picture(tmp_path / "elsewhere" / "1.png")
    source = write(
        tmp_path / "mix.json", [said("<image>\nWhat?", "That.", image="1.png")]
    )
    import_prompts([source], out, choices=Choices(images=tmp_path / "elsewhere"))
    assert read(out)[0].files == [str(tmp_path / "elsewhere" / "1.png")]


def test_sharegpt_takes_tags_in_text_for_text(tmp_path: Path, out: Path) -> None:
    rows = [
        said("What does <image> mean in SVG?", "It embeds one."),
        said("Hello", "Hi", "And?", "Well"),
    ]
    import_prompts([write(tmp_path / "share.json", rows)], out)
    assert read(out)[-1].messages[0]["content"] == [
        {"type": "text", "text": "What does <image> mean in SVG?"}
    ]


def test_every_turn_becomes_a_prompt_with_its_history(
    tmp_path: Path, out: Path
) -> None:
    source = write(tmp_path / "share.json", [said("a", "b", "c", "d")])
    import_prompts([source], out, choices=Choices(turns="all"))
    prompts = read(out)
    assert [
        [m["content"][0]["text"] for m in prompt.messages] for prompt in prompts
    ] == [
        ["a"],
        ["a", "b", "c"],
    ]
    assert [(prompt.reference, prompt.turn) for prompt in prompts] == [
        ("b", 1),
        ("d", 2),
    ]


def test_what_an_assistant_says_first_is_left_out_and_counted(
    tmp_path: Path, out: Path
) -> None:
    row = said("a", "b")
    row["conversations"].insert(0, {"from": "gpt", "value": "Earlier I said"})
    summary = import_prompts([write(tmp_path / "share.json", [row])], out)
    assert summary.trimmed == 1
    assert [message["role"] for message in read(out)[0].messages] == ["user"]


def test_chat_parts_of_every_spelling(tmp_path: Path, out: Path) -> None:
    image = picture(tmp_path / "1.png")
    tiny.film(tmp_path / "clip.mp4", tiny.clip(6, 32, 32))
    data = tiny.data_url(image.read_bytes())
    rows = [
        [
            {"type": "text", "text": "1"},
            {"type": "image_url", "image_url": {"url": f"file://{image}"}},
        ],
        [
            {"type": "text", "text": "2"},
            {"type": "image_url", "image_url": {"url": data}},
        ],
        [
            {"type": "input_text", "text": "3"},
            {"type": "input_image", "image_url": "1.png"},
        ],
        [{"type": "text", "text": "4"}, {"type": "image", "image": "1.png"}],
        [{"type": "text", "text": "5"}, {"type": "video", "video": "clip.mp4"}],
        "6, plain",
    ]
    lines = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": content},
            ]
        }
        for content in rows
    ]
    summary = import_prompts([write(tmp_path / "chat.jsonl", lines)], out)
    assert summary.added == 6
    prompts = read(out)
    kinds = [
        [part["type"] for part in prompt.messages[1]["content"]] for prompt in prompts
    ]
    assert kinds == [["text", "image"]] * 4 + [["text", "video"], ["text"]]
    assert Path(prompts[1].files[0]).read_bytes() == image.read_bytes()
    assert len({prompt.split for prompt in prompts[:4]}) == 1  # one image, one side


def shows(**part: Any) -> dict[str, Any]:
    """A chat row that asks about one video."""
    return {
        "messages": [
            {"role": "user", "content": [{"type": "video", **part}, "What moves?"]}
        ]
    }


def test_videos_are_files_folders_and_bytes(tmp_path: Path, out: Path) -> None:
    film = tiny.film(tmp_path / "clip.mp4", tiny.clip(6, 32, 32))
    for number in range(3):
        picture(tmp_path / "frames" / f"{number}.png", number)
    data = "data:video/mp4;base64," + base64.b64encode(film.read_bytes()).decode()
    rows = [
        shows(video="clip.mp4"),
        shows(path="frames"),
        shows(video_url={"url": data}, fps=3),
    ]
    llava = said("<video>\nWhat moves?", "That.", video="clip.mp4")
    import_prompts(
        [write(tmp_path / "chat.jsonl", rows), write(tmp_path / "mix.json", [llava])],
        out,
    )
    file, folder, given = read(out)  # the LLaVA row asks what the first one asks
    assert [file.files, folder.files] == [[str(film)], [str(tmp_path / "frames")]]
    assert Path(given.files[0]).read_bytes() == film.read_bytes()


def test_how_a_video_is_sampled_is_part_of_the_prompt(
    tmp_path: Path, out: Path
) -> None:
    tiny.film(tmp_path / "clip.mp4", tiny.clip(6, 32, 32))
    ways: list[dict[str, Any]] = [
        {},
        {"fps": 1},
        {"fps": 1.0},
        {"frames": 4},
        {"nframes": 2},
    ]
    source = write(
        tmp_path / "chat.jsonl", [shows(video="clip.mp4", **way) for way in ways]
    )
    summary = import_prompts([source], out)
    videos = [prompt.messages[0]["content"][0] for prompt in read(out)]
    assert [
        {k: v for k, v in part.items() if k in ("fps", "frames")} for part in videos
    ] == [
        {},
        {"fps": 1.0},
        {"frames": 4},
        {"frames": 2},
    ]
    assert summary.skipped == {"duplicate": 1}
    assert len({prompt.split for prompt in read(out)}) == 1  # one video, one side
    for choices, sampling in (
        (Choices(fps=0.5), {"fps": 0.5}),
        (Choices(frames=3), {"frames": 3}),
    ):
        again = import_prompts(
            [source], tmp_path / f"{sampling}.parquet", choices=choices
        )
        part = read(again.out)[0].messages[0]["content"][0]
        assert part.pop("digest")
        assert part == {"type": "video", "path": str(tmp_path / "clip.mp4"), **sampling}


@pytest.mark.parametrize(
    "way",
    [
        {"fps": math.inf},
        {"frames": math.inf},
        {"fps": -1},
        {"fps": True},
        {"frames": "many"},
        {"nframes": 5_000_000_000},
    ],
)
def test_a_video_sampled_by_nonsense_is_skipped(
    tmp_path: Path, out: Path, way: dict[str, Any]
) -> None:
    rows = [shows(video="clip.mp4", **way), said("fine", "yes")]
    source = write(tmp_path / "mix.json", rows)
    assert import_prompts([source], out).skipped == {"video sampling": 1}


def test_a_missing_pyav_is_an_error_before_the_import(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.film(tmp_path / "clip.mp4", tiny.clip(6, 32, 32))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"vlmdistill\[video\]"):
        import_prompts([write(tmp_path / "chat.jsonl", [shows(video="clip.mp4")])], out)


def test_datasets_from_a_folder(tmp_path: Path, out: Path) -> None:
    image = {"path": None, "bytes": picture(tmp_path / "1.png").read_bytes()}
    rows = {
        "question": ["What?", "Which?"],
        "image": [image, None],
        "answer": ["That", "This"],
    }
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "image": datasets.Image(),
            "answer": datasets.Value("string"),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(
        str(tmp_path / "saved")
    )
    summary = import_prompts([str(tmp_path / "saved")], out)
    first, second = read(out)
    assert summary.added == 2
    assert Path(first.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert first.messages[0]["content"][-1]["text"] == "What?"
    assert (second.files, second.reference) == ([], "This")


def test_a_file_whose_name_is_not_utf8_is_skipped(tmp_path: Path, out: Path) -> None:
    os.rename(picture(tmp_path / "1.png"), os.fsencode(tmp_path) + b"/\xff.png")
    rows = [said("<image>\nWhat?", "x", image="\udcff.png"), said("fine", "yes")]
    assert import_prompts(
        [write(tmp_path / "mix.json", rows)], out, "llava"
    ).skipped == {"name not UTF-8": 1}
    os.rename(tmp_path / "mix.json", os.fsencode(tmp_path) + b"/\xff.json")
    with pytest.raises(DataError, match="UTF-8"):
        import_prompts([str(tmp_path / "\udcff.json")], out)


BROKEN: dict[str, Any] = {
    "missing image": said("<image>\nWhat?", "x", image="nowhere.png"),
    "unreadable image": said("<image>\nWhat?", "x", image="broken.png"),
    "missing video": said("<video>\nWhat?", "x", video="nowhere.mp4"),
    "unreadable video": said("<video>\nWhat?", "x", video="broken.mp4"),
    "video sampling": shows(video="broken.mp4", fps=2, frames=4),
    "image is a URL": said("<image>\nWhat?", "x", image="https://example.org/1.png"),
    "image count": said("<image>\n<image>\nWhat?", "x", image="1.png"),
    "empty turn": turns(("human", "  "), ("gpt", "a")),
    "unknown role": {"messages": [{"role": ["user"], "content": "a"}]},
    "no user turn": turns(("gpt", "a")),
    "roles do not alternate": turns(("human", "a"), ("user", "b")),
    "late system turn": turns(("human", "a"), ("system", "b")),
    "no conversation": {"text": "a book"},
    "not an object": 7,
    "text is not a string": turns(("human", 5)),
    "text is not Unicode": said("half \ud83d of an emoji", "x"),
    "unknown part": {
        "messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]
    },
    "duplicate": said("fine", "yes"),
}


def test_prompts_with_responses_stay_in_their_split_also_if_they_share_a_question(
    tmp_path: Path, out: Path
) -> None:
    talk = said("What?", "A sign.", "Why?", "So.")
    source = write(tmp_path / "talk.json", [talk])
    import_prompts([source], out, choices=Choices(split="eval"))
    import_prompts([source], out, choices=Choices(split="train", turns="all"))
    splits = {prompt.key: prompt.split for prompt in read(out)}
    assert sorted(splits.values()) == ["eval", "train"]
    for share in (0.0, 0.5, 0.9):
        assert resplit(out, share, fixed=splits).moved == 0
        assert {prompt.key: prompt.split for prompt in read(out)} == splits


def test_a_file_is_not_called_as_harvested_traffic_is(
    tmp_path: Path, out: Path
) -> None:
    file = write(tmp_path / "traffic-signs.json", [said("What?", "A sign.")])
    with pytest.raises(DataError, match="name of traffic"):
        import_prompts([file], out)


@pytest.mark.parametrize("lines", [False, True], ids=["array", "lines"])
def test_broken_rows_are_listed_with_reason_and_line(
    tmp_path: Path, out: Path, lines: bool
) -> None:
    picture(tmp_path / "1.png")
    whole = picture(tmp_path / "whole.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "broken.mp4").write_bytes(b"\0" * 100)
    rows = [said("fine", "yes"), *BROKEN.values()]
    path = tmp_path / ("rows.jsonl" if lines else "rows.json")
    text = (
        "\n".join(map(json.dumps, rows))
        if lines
        else "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
    )
    path.write_text(text + ("\n{nonsense\n" if lines else "\n"))
    summary = import_prompts([str(path)], out, "llava")
    listed = {entry["reason"]: entry for entry in skipped(summary)}
    assert set(listed) == {*BROKEN, *(["invalid JSON"] if lines else [])}
    assert summary.skipped == dict.fromkeys(listed, 1)
    for reason, entry in listed.items():
        row = [*BROKEN, "invalid JSON"].index(reason) + 2
        assert (entry["row"], entry["line"]) == (row, row if lines else row + 1)
    assert "nowhere.png" in listed["missing image"]["detail"]
    assert len(read(out)) == 1


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("none.json", "[]", "none.json"),
        ("cut.json", '[\n{"conversations": []},\n{"conv', "cut.json .* line 3"),
        ("odd.json", '[{"a": 1}]', "columns a"),
        ("binary.json", b"\xff\xfe\x00", "binary.json .* byte 0"),
        ("empty.jsonl", '{"messages": []}', r"no user turn \(1\)"),
    ],
)
def test_an_unusable_file_is_named_with_the_problem(
    tmp_path: Path, out: Path, name: str, content: str | bytes, value: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=value):
        import_prompts([str(path)], out)
    assert not out.exists()


def test_a_missing_source_stops_before_anything_is_written(
    tmp_path: Path, out: Path
) -> None:
    source = write(tmp_path / "share.json", [said("a", "b")])
    with pytest.raises(DataError, match=r"absent\.json"):
        import_prompts([source, str(tmp_path / "absent.json")], out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("choices", "option"),
    [
        (Choices(limit=0), "--limit 0"),
        (Choices(limit=-3), "--limit -3"),
        (Choices(eval_share=1.0), "--eval-share"),
        (Choices(fps=0), "--fps 0"),
        (Choices(fps=math.inf), "--fps inf"),
        (Choices(frames=-1), "--frames -1"),
        (Choices(frames=3_000_000_000), "--frames 3000000000: .* 2147483647"),
        (Choices(fps=1, frames=8), "--fps 1 .*--frames 8"),
        (Choices(augment=["loud"]), "'loud'.* none, long"),
        (Choices(augment_text=["describe"]), "describe.* none, long, explain, reason"),
        (Choices(images=Path("/nowhere")), "--images /nowhere"),
    ],
)
def test_an_option_out_of_range_is_named(
    tmp_path: Path, out: Path, choices: Choices, option: str
) -> None:
    with pytest.raises(DataError, match=option):
        import_prompts(
            [write(tmp_path / "share.json", [said("a", "b")])], out, choices=choices
        )


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.text(min_size=1).filter(str.strip),
        min_size=1,
        max_size=6,
        unique_by=str.strip,
    )
)
def test_importing_twice_gives_the_same_keys(tmp_path: Path, texts: list[str]) -> None:
    out = tmp_path / "prompts.parquet"
    out.unlink(missing_ok=True)
    source = write(tmp_path / "share.json", [said(text, "ok") for text in texts])
    import_prompts([source], out)
    first = read(out)
    again = import_prompts([source], out)
    assert read(out) == first
    assert (again.added, again.present) == (0, len(first))
    assert len({prompt.key for prompt in first}) == len(first)


def test_keys_follow_content_wherever_the_images_lie(tmp_path: Path, out: Path) -> None:
    picture(tmp_path / "here" / "1.png")
    here = write(
        tmp_path / "here" / "mix.json", [said("<image>\nWhat?", "That.", image="1.png")]
    )
    import_prompts([here], out)
    first = read(out)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    summary = import_prompts([str(tmp_path / "there" / "mix.json")], out)
    assert (summary.added, summary.present) == (0, 1)
    assert read(out)[0].key == first[0].key
    assert read(out)[0].files == [str(tmp_path / "there" / "1.png")]


def test_a_second_import_adds_and_never_moves_what_is_held_out(
    tmp_path: Path, out: Path
) -> None:
    one = write(tmp_path / "one.json", [said(f"question {i}", "x") for i in range(200)])
    two = write(
        tmp_path / "two.json", [said(f"question {i}", "x") for i in range(100, 300)]
    )
    import_prompts([one], out, choices=Choices(eval_share=0.3))
    held = {prompt.key for prompt in read(out) if prompt.split == "eval"}
    summary = import_prompts([two], out, choices=Choices(eval_share=0))
    assert (summary.added, summary.present, summary.total) == (100, 100, 300)
    assert {prompt.key for prompt in read(out) if prompt.split == "eval"} == held
    assert 30 <= len(held) <= 90


def sides_of_images(out: Path) -> dict[str, set[str]]:
    """The splits of the prompts of each image."""
    sides: dict[str, set[str]] = {}
    for prompt in read(out):
        for path in prompt.files:
            sides.setdefault(path, set()).add(prompt.split)
    return sides


def test_images_that_are_shown_together_are_on_one_side(
    tmp_path: Path, out: Path
) -> None:
    rows = []
    for i in range(40):
        pair = [
            picture(tmp_path / f"{i}{which}.png", 2 * i + n).name
            for n, which in enumerate("ab")
        ]
        for shown in (pair[:1], pair[1:], pair, pair[::-1]):
            rows.append(said("<image>\n" * len(shown) + "What?", "x", images=shown))
    import_prompts(
        [write(tmp_path / "mix.json", rows)], out, choices=Choices(eval_share=0.4)
    )
    sides = sides_of_images(out)
    assert (len(sides), {len(side) for side in sides.values()}) == (80, {1})
    assert {"train", "eval"} == set().union(*sides.values())


def test_a_later_import_keeps_the_side_of_each_image(tmp_path: Path, out: Path) -> None:
    names = [picture(tmp_path / f"{i}.png", i).name for i in range(30)]

    def ask(text: str, **choices: Any) -> ImportSummary:
        rows = [said(f"<image>\n{text}", "x", image=name) for name in names]
        return import_prompts(
            [write(tmp_path / "mix.json", rows)], out, choices=Choices(**choices)
        )

    ask("What?", eval_share=0.4)
    held = {path for path, side in sides_of_images(out).items() if side == {"eval"}}
    assert ask("Where?", eval_share=0).added == 30
    summary = ask("Who?", split="eval")
    assert (summary.added, summary.skipped["images of the other split"]) == (
        len(held),
        30 - len(held),
    )
    assert ask("What?", split="eval").present == 30
    left = next(name for name in names if str(tmp_path / name) not in held)
    right = Path(next(iter(held))).name
    both = write(
        tmp_path / "both.json",
        [said("Compare.", "x", images=[left, right]), said("Fine", "yes")],
    )
    assert import_prompts([both], out).skipped == {"images of the other split": 1}
    sides = sides_of_images(out)
    assert {path for path, side in sides.items() if side == {"eval"}} == held
    assert {len(side) for side in sides.values()} == {1}


def test_two_imports_at_once_are_refused(tmp_path: Path, out: Path) -> None:
    one, two = (
        write(tmp_path / f"{name}.json", [said(name, "x")]) for name in ("one", "two")
    )

    def meanwhile(done: int, total: int, remark: str = "") -> None:
        with pytest.raises(DataError, match="another run"):
            import_prompts([two], out)

    import_prompts([one], out, progress=meanwhile)
    import_prompts([two], out)
    assert [prompt.messages[0]["content"][0]["text"] for prompt in read(out)] == [
        "one",
        "two",
    ]


def test_augmentations_are_added_and_recorded(tmp_path: Path, out: Path) -> None:
    picture(tmp_path / "1.png")
    rows = [said("<image>\nWhat?", "x", image="1.png"), said("Hello", "x")]
    choices = Choices(augment=["none", "long", "reason", "describe"])
    summary = import_prompts([write(tmp_path / "mix.json", rows)], out, choices=choices)
    made = {prompt.augmentation: prompt for prompt in read(out) if prompt.files}
    texts = {
        name: prompt.messages[0]["content"][-1]["text"] for name, prompt in made.items()
    }
    assert texts["none"] == "What?"
    assert texts["long"] == "What? Please answer with at least 1000 words."
    assert texts["reason"].startswith("What?\nFor the following question")
    assert (
        texts["describe"] == "Please provide a detailed description of the given image."
    )
    assert made["long"].augmentation_text == "Please answer with at least 1000 words."
    assert [prompt.augmentation for prompt in read(out) if not prompt.files] == ["none"]
    assert summary.added == 5


def test_the_limit_counts_prompts(tmp_path: Path, out: Path) -> None:
    source = write(
        tmp_path / "share.json", [said(f"question {i}", "x") for i in range(50)]
    )
    assert import_prompts([source], out, choices=Choices(limit=7)).added == 7
    assert [prompt.row for prompt in read(out)] == list(range(1, 8))


def test_nothing_is_read_beyond_the_limit(tmp_path: Path, out: Path) -> None:
    one = write(tmp_path / "one.json", [said("a", "x"), said("b", "x"), said("", "x")])
    two = write(tmp_path / "two.jsonl", [said("", "x"), said("c", "x")])
    assert import_prompts([one, two], out, choices=Choices(limit=2)).skipped == {}


def test_the_side_file_forgets_what_was_repaired(tmp_path: Path, out: Path) -> None:
    other = write(tmp_path / "other.json", [said("a", "b"), said("", "b")])
    repaired = tmp_path / "repaired.json"
    write(repaired, [said("c", "d"), said("", "d")])
    assert import_prompts([other, str(repaired)], out).skipped == {"empty turn": 2}
    write(repaired, [said("c", "d"), said("e", "d")])
    summary = import_prompts([str(repaired)], out)
    assert [Path(entry["source"]).name for entry in skipped(summary)] == ["other.json"]


def test_another_file_is_refused_as_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=str(path)):
        read(path)


def test_a_full_disk_is_not_taken_for_a_broken_file(tmp_path: Path, out: Path) -> None:
    import_prompts([write(tmp_path / "share.json", [said("a", "b")])], out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match="copied to"):
            load(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_prompts_of_a_changed_image_replace_the_old_ones(
    tmp_path: Path, out: Path
) -> None:
    first, moved = picture(tmp_path / "1.png", 1), picture(tmp_path / "2.png", 2)
    rows = [
        said(f"<image>\nWhat is {name}?", "x", image=name)
        for name in ("1.png", "2.png")
    ]
    asked = write(tmp_path / "mix.json", [*rows, said("Hello", "x")])
    import_prompts([asked], out)
    _, same, text = read(out)
    moved.rename(tmp_path / "3.png")
    picture(first, 4)
    only = write(
        tmp_path / "more.json",
        [rows[0], said("<image>\nWhat is 2.png?", "x", image="3.png")],
    )
    summary = import_prompts([only], out)
    assert (summary.added, summary.outdated, summary.present, summary.total) == (
        1,
        1,
        1,
        3,
    )
    new = {prompt.key: prompt.files for prompt in read(out)}
    assert [new.pop(same.key), new.pop(text.key)] == [[str(tmp_path / "3.png")], []]
    assert [*new.values()] == [[str(first)]]
