import json
from pathlib import Path

from PIL import Image

from vlmdistill.pipelines.demo.data import write


def test_what_is_written_is_what_a_user_would_have(tmp_path: Path) -> None:
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


def test_a_seed_fixes_every_byte_and_splits_share_no_image(tmp_path: Path) -> None:
    one = write(tmp_path / "one", images=20, dialogues=3, seed=1)
    two = write(tmp_path / "two", images=20, dialogues=3, seed=1)
    other = write(tmp_path / "other", images=20, dialogues=3, seed=1, split="evaluation")
    assert one.llava.read_bytes() == two.llava.read_bytes()
    assert one.sharegpt.read_bytes() == two.sharegpt.read_bytes()

    def drawn(folder: Path) -> set[bytes]:
        return {path.read_bytes() for path in folder.iterdir()}

    assert drawn(one.images) == drawn(two.images)
    assert not drawn(one.images) & drawn(other.images)
