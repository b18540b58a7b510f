"""Images and videos of prompts: at URLs, and in workspaces that are moved or behind a link."""

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from tests import tiny
from tests.pipelines.workspace.disks import On
from vlmdistill.pipelines.cluster.shared import some_media
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.media.frames import check_unchanged, media_file
from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.media.urls import address, at_hand, copy_of
from vlmdistill.pipelines.workspace.workspace import Workspace


def rows(folder: Path, image: str = "") -> str:
    """A row with an image: a file's name, or else its data."""
    shown = tiny.picture(28, 28, 1)
    shown.save(folder / "1.png")
    talk = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A house."},
    ]
    (folder / "rows.json").write_text(
        json.dumps([{"image": image or tiny.data_url(shown), "conversations": talk}])
    )
    return str(folder / "rows.json")


def test_images_of_a_workspace_are_fetched_when_they_are_read(
    runs: str, on: On, tmp_path: Path
) -> None:
    a = on("a")
    import_prompts([rows(tmp_path)], a.prompts)
    a.close()
    b = on("b")
    (prompt,) = prompt_table.load(b.prompts, "demo-small")
    (file,) = prompt.files
    assert file.startswith(f"{runs}/demo-small/images/")
    assert not (b.root / "images").exists()
    assert at_hand(file).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert at_hand(file).is_relative_to(b.root)
    assert prompt_table.read(b.prompts)[0] == prompt
    again = import_prompts([rows(tmp_path)], b.prompts)
    assert (again.present, again.added) == (1, 0)


def test_a_local_workspace_can_be_moved_with_its_images(tmp_path: Path) -> None:
    here = tmp_path / "here"
    import_prompts([rows(tmp_path)], here / "prompts.parquet")
    here.rename(tmp_path / "moved")
    (prompt,) = prompt_table.load(tmp_path / "moved/prompts.parquet")
    assert Path(prompt.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()


def test_prompts_are_found_behind_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    source, out = rows(tmp_path), tmp_path / "link/prompts.parquet"
    import_prompts([source], out)
    assert prompt_table.read(out) == prompt_table.read(
        tmp_path / "real/prompts.parquet"
    )
    (row,) = pq.read_table(out).to_pylist()
    paths = [
        part["path"]
        for turn in row["messages"]
        for part in turn["content"]
        if part["type"] == "image"
    ]
    assert [Path(path).parts[0] for path in paths] == ["images"]


def test_a_cache_behind_a_symbolic_link_is_the_same_cache(
    runs: str, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    linked = on("link")
    assert linked.root == a.root
    import_prompts([rows(tmp_path)], linked.prompts)
    ((file,),) = (prompt.files for prompt in prompt_table.read(linked.prompts))
    assert file.startswith(f"{runs}/demo-small/images/")


@pytest.mark.parametrize(
    ("name", "others"), [("s3", ["s3a"]), ("gs", ["gcs"]), ("az", ["abfs", "abfss"])]
)
def test_a_bucket_has_one_copy_under_all_its_protocols(
    name: str, others: list[str]
) -> None:
    for other in others:
        copy = copy_of(f"{other}://bucket/runs/demo")
        assert copy == copy_of(f"{name}://bucket/runs/demo")
        assert address(copy) == f"{name}://bucket/runs/demo"


def test_a_workspace_is_the_same_under_all_protocols_of_its_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path))
    first, second = (
        Workspace.of("demo-small", f"{protocol}://bucket/runs")
        for protocol in ("s3", "s3a")
    )
    assert first == second


def test_the_check_of_machines_keeps_files_that_the_driver_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_prompts([rows(tmp_path, "1.png")], tmp_path / "prompts.parquet")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all
    assert some_media(prompt_table.read(tmp_path / "prompts.parquet")) == (
        str(tmp_path / "1.png"),
    )


def test_images_and_videos_may_be_in_an_object_store(
    runs: str, on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("a")
    files = fsspec.filesystem("memory")
    tiny.picture(28, 28, 1).save(tmp_path / "1.png")
    for name in ("1.png", "film/1.png", "film/2.png"):
        files.pipe_file(f"{runs}/data/{name}", (tmp_path / "1.png").read_bytes())
    talk: list[dict[str, Any]] = [{"from": "human", "value": "What?"}]
    made = [
        {"image": f"{runs}/data/1.png", "conversations": talk},
        {"video": f"{runs}/data/film", "conversations": talk},
        {"image": f"{runs}/data/2.png", "conversations": talk},
        {"image": f"{runs}/../2.png", "conversations": talk},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(made))
    files.pipe_file(f"{runs}/data/1.png", b"an older image")
    stale = at_hand(f"{runs}/data/1.png")
    files.pipe_file(f"{runs}/data/1.png", (tmp_path / "1.png").read_bytes())
    assert stale.read_bytes() == b"an older image"
    summary = import_prompts(
        [str(tmp_path / "rows.json")], tmp_path / "prompts.parquet"
    )
    assert summary.added == 2
    assert sum(summary.skipped.values()) == 2
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "another"))
    image, video = prompt_table.read(tmp_path / "prompts.parquet")
    assert image.files == [f"{runs}/data/1.png"]
    assert at_hand(image.files[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    assert sorted(path.name for path in at_hand(video.files[0]).iterdir()) == [
        "1.png",
        "2.png",
    ]
    copy = at_hand(image.files[0])
    copy.write_bytes(b"of another time")
    assert media_file(image.media[0]).read_bytes() == (tmp_path / "1.png").read_bytes()
    files.pipe_file(f"{runs}/data/1.png", b"changed")
    media_file(image.media[0])  # as it was imported
    copy.unlink()
    media_file(image.media[0])
    with pytest.raises(MediaError, match=f"{runs}/data/1.png has changed"):
        check_unchanged(image.media[0])
