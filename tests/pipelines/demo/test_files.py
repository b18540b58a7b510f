import dataclasses
import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

from vlmdistill.pipelines.data.prompts.prompt_table import read as read_prompts
from vlmdistill.pipelines.demo import narration
from vlmdistill.pipelines.demo.clips import frames, random_clip
from vlmdistill.pipelines.demo.files import write, write_videos
from vlmdistill.pipelines.demo.prompts import DemoSize, import_demo
from vlmdistill.pipelines.media.frames import Footage, read


def test_the_files_are_like_a_users(tmp_path: Path) -> None:
    made = write(tmp_path, images=6, dialogues=5, seed=1)
    records = json.loads(made.llava.read_text())
    assert len(records) == 6
    assert len({record["id"] for record in records}) == 6
    for record in records:
        with Image.open(made.images / record["image"]) as image:
            assert image.size == (84, 84)
        turns = record["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert turns[0]["value"].startswith("<image>\n")
        assert not any("<image>" in turn["value"] for turn in turns[1:])
    talks = json.loads(made.sharegpt.read_text())
    assert len(talks) == 5
    assert all(set(talk) == {"id", "conversations"} for talk in talks)


def test_no_question_is_written_twice(tmp_path: Path) -> None:
    made = write(tmp_path, images=0, dialogues=240, seed=0)
    asked = [
        talk["conversations"][0]["value"]
        for talk in json.loads(made.sharegpt.read_text())
    ]
    assert len(set(asked)) == len(asked) > 200
    amount = DemoSize(images=1, dialogues=240, held_out=(1, 1, 0))
    assert (
        import_demo(tmp_path / "demo", tmp_path / "prompts.parquet", amount).skipped
        == {}
    )


def test_a_seed_fixes_every_byte_and_splits_share_no_image(tmp_path: Path) -> None:
    one = write(tmp_path / "one", images=20, dialogues=3, seed=1)
    two = write(tmp_path / "two", images=20, dialogues=3, seed=1)
    other = write(
        tmp_path / "other", images=20, dialogues=3, seed=1, split="evaluation"
    )
    assert one.llava.read_bytes() == two.llava.read_bytes()
    assert one.sharegpt.read_bytes() == two.sharegpt.read_bytes()

    def drawn(folder: Path) -> set[bytes]:
        return {path.read_bytes() for path in folder.iterdir()}

    assert drawn(one.images) == drawn(two.images)
    assert not drawn(one.images) & drawn(other.images)


def test_videos_are_written_without_loss(tmp_path: Path) -> None:
    made = write_videos(tmp_path, videos=3, seed=1, tokens=108, split="evaluation")
    records = json.loads(made.llava.read_text())
    rng = random.Random("demo videos evaluation 1")
    for record in records:
        clip = random_clip(rng, "evaluation")
        wording = narration.rounds(clip, rng)
        shown = read(
            made.videos / record["video"], lambda footage: range(footage.total)
        )
        assert shown.footage == Footage(24, 3.0)
        assert (
            shown.frames_FHWC
            == np.stack([np.asarray(image) for image in frames(clip, 24)])
        ).all()
        turns = record["conversations"]
        assert turns[0]["value"] == f"<video>\n{wording[0][0]}"
        assert [turn["value"] for turn in turns[1::2]] == [
            response for _, response in wording
        ]


def test_the_demo_has_videos_if_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "prompts.parquet"
    few = DemoSize(images=2, dialogues=1, held_out=(2, 1, 0))
    without = import_demo(tmp_path / "one", out, few, seed=3)
    films = dataclasses.replace(few, videos=4, held_out=(2, 1, 3), video_tokens=108)
    both = import_demo(tmp_path / "one", out, films, seed=3)
    assert both.added == 4 + 3
    assert both.total == without.total + both.added
    parts = [
        part
        for prompt in read_prompts(out)
        for m in prompt.messages
        for part in m["content"]
    ]
    videos = [part for part in parts if part["type"] == "video"]
    assert {part["frames"] for part in videos} == {24}
    assert len({Path(part["path"]).read_bytes() for part in videos}) == len(videos) == 7


def test_datasets_of_the_demo_have_names_of_their_own(tmp_path: Path) -> None:
    amount = DemoSize(2, 2, videos=1, held_out=(1, 1, 1))
    found = import_demo(
        tmp_path / "demo", tmp_path / "prompts.parquet", amount
    ).datasets
    assert found.keys() == {"demo-scenes", "demo-chats", "demo-videos"}
