"""One finished workspace, for the tests of the whole flow and of the examples."""

from pathlib import Path
from typing import Any

import pytest

from vlmdistill.cli.main import main
from vlmdistill.pipelines.demo import files

SMALL = [
    "--set",
    "steps=30",
    "--set",
    "batch_tokens=512",
    "--max-new-tokens",
    "96",
    "--limit",
    "2",
]
"""Few prompts, for which no worker is started."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of workspaces after one `run` on a few scenes."""
    folder = tmp_path_factory.mktemp("flow")
    sides: tuple[tuple[Any, int], ...] = (("drafter", 6), ("evaluation", 2))
    where = ["--model", "demo-small", "--runs", str(folder)]
    for split, images in sides:
        made = files.write(
            folder / split, images=images, dialogues=4, seed=5, split=split
        )
        side = "train" if split == "drafter" else "eval"
        asked = [str(made.llava), *([str(made.sharegpt)] if side == "train" else [])]
        assert (
            main(
                [
                    "prompts",
                    *asked,
                    "--images",
                    str(made.images),
                    "--split",
                    side,
                    *where,
                ]
            )
            == 0
        )
    assert main(["run", "--drafters", "sparrow,eagle2", *SMALL, *where]) == 0
    return folder
