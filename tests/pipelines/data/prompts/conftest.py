"""Fixtures for the tests of imports."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests import tiny


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
