"""The notebook that trains a first drafter, and its script."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.notebook import NOTEBOOK, SCRIPT, notebook
from vlmdistill.pipelines.demo import files


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert isinstance(found, list)
    return found


def test_the_notebook_is_its_script() -> None:
    """Else: `python -m examples.notebook`."""
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook(
        SCRIPT.read_text(encoding="utf-8")
    )
    assert {cell["cell_type"] for cell in cells()} == {"markdown", "code"}


@pytest.mark.slow
def test_its_cells_train_a_drafter_and_show_what_it_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = files.write(tmp_path / "photos", images=4, dialogues=0, seed=6)
    photos = (
        f'vlmdistill.prompts({str(made.images)!r}, eval_share=0.3, ask="Describe it.",'
    )
    small = {
        "LIMIT, STEPS = 1000, 600": "LIMIT, STEPS = 4, 2",
        'vlmdistill.prompts("demo",': photos,
        "max_new_tokens=128": "max_new_tokens=16",
        "limit=LIMIT, progress=progress\n": "limit=LIMIT, workers=0\n",
        '/ "demo-data" / "eval" / "images"': '/ ".." / ".." / "photos" / "images"',
    }
    code = "\n".join(
        "".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"
    )
    for today, smaller in small.items():
        assert code.count(today) == 1, today
        code = code.replace(today, smaller)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "first_drafter.ipynb", "exec"), names)
    assert names["page"].is_file()
    assert "T=0" in capsys.readouterr().out
    assert (
        names["results"][0].figures.lossless.identical
        == names["results"][0].figures.prompts
    )
