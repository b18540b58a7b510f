from pathlib import Path

import pytest
from transformers.utils import logging

from vlmdistill.pipelines.demo.build import Recipe, build
from vlmdistill.pipelines.demo.scoring import FACTS


def test_a_build_writes_a_whole_folder_and_can_be_repeated(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    recipe = Recipe(vision_steps=2, steps=3, tokens=400, first=1, deepen=0.5, polish_steps=1)

    def note(stage: str, step: int, steps: int, loss: float) -> None:
        assert loss > 0
        seen.append((stage, step, steps))

    logging.disable_progress_bar()
    try:
        for name in ("one", "two"):
            scores = build(
                tmp_path / name, layers=2, hidden=64, recipe=recipe, scenes=1, texts=200, progress=note
            )
            assert set(scores["facts"]) == set(FACTS)
    finally:
        logging.enable_progress_bar()
    once = [
        ("vision", 1, 2),
        ("vision", 2, 2),
        *(("language", step, 3) for step in (1, 2, 3)),
        ("polish", 1, 1),
    ]
    assert seen == 2 * once
    for path in (tmp_path / "one").iterdir():
        if path.name != "README.md":  # it tells the time
            assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert "`tokens`: 400" in (tmp_path / "one" / "README.md").read_text()


def test_a_width_that_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        build(tmp_path, hidden=100)
