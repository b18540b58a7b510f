"""The prompts that the tests of pipelines run on."""

import json
from pathlib import Path

import pytest

from tests import tiny
from vlmdistill.pipelines.data.prompts.importing import import_prompts


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve imported prompts, every other one with an image or a video."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = []
    for i in range(12):
        question = "What is it? " * (1 + i % 4) + str(i)
        row: dict[str, object] = {
            "conversations": [{"from": "human", "value": question}]
        }
        if i % 4 == 3:
            tiny.film(folder / f"{i}.mp4", tiny.clip(2 * i, 56, 28, i))
            row["video"] = f"{i}.mp4"
        elif i % 2:
            tiny.picture(28 * (1 + i % 3), 56, i).save(folder / f"{i}.png")
            row["image"] = f"{i}.png"
        rows.append(row)
    (folder / "mix.json").write_text(json.dumps(rows))
    import_prompts([str(folder / "mix.json")], folder / "prompts.parquet")
    return folder / "prompts.parquet"
