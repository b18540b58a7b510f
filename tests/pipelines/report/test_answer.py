"""What the page says first, and when it says that there is no winner."""

from dataclasses import replace
from typing import Any

import pytest

from tests.pipelines.bench.conftest import Save
from tests.pipelines.bench.made_up import (
    in_sequence,
    measured,
    on_shared_cpu,
    shown,
    with_cpu_share,
)
from tests.pipelines.bench.test_plants import changed
from tests.pipelines.report.html_page import Page, make
from vlmdistill.pipelines.bench.records import Measurement, PromptResult
from vlmdistill.pipelines.report.answer import Recommendation, answers
from vlmdistill.pipelines.report.latex import latex
from vlmdistill.pipelines.report.page import read
from vlmdistill.pipelines.workspace.workspace import Workspace


def mixed(image: float, text: float, **changes: Any) -> Measurement:
    """Sixteen prompts with images and eight without, of these speedups."""
    images, texts = (
        measured(speedup=speedup, count=count, noise=0.05, **changes)
        for speedup, count in ((image, 16), (text, 8))
    )
    others = (
        replace(one, key=f"t{at}", kind="text") for at, one in enumerate(texts.prompts)
    )
    return in_sequence(replace(images, prompts=(*images.prompts, *others)))


def first(workspace: Workspace) -> Recommendation:
    return answers(read(workspace).groups[0])[0]


@pytest.mark.parametrize(
    ("speedups", "headline", "level"),
    [
        ({"wren": (1.8, 1.5), "msd": (1.3, 1.2)}, "Use wren", "sure"),
        ({"wren": (1.8, 1.5)}, "Use wren", "sure"),
        ({"wren": (1.8, 1.5), "msd": (1.8, 1.5)}, "Use msd or wren", "sure"),
        (
            {"wren": (1.8, 0.7), "msd": (1.3, 0.6)},
            "Use wren, but plain decoding for text",
            "sure",
        ),
        (
            {"wren": (1.2, 0.5)},
            "Use wren for images, but plain decoding for text",
            "sure",
        ),
        ({"wren": (1.0, 1.0)}, "No drafter is clearly faster", "none"),
        ({"wren": (0.7, 0.6), "msd": (0.6, 0.5)}, "Plain decoding is faster", "none"),
    ],
)
def test_the_answer_tells_images_from_text(
    workspace: Workspace,
    save: Save,
    speedups: dict[str, tuple[float, float]],
    headline: str,
    level: str,
) -> None:
    for name, (image, text) in speedups.items():
        save(name, mixed(image, text))
    answer = first(workspace)
    assert (answer.headline, answer.level) == (headline, level)
    page = Page(make(workspace).page)
    assert headline in page.text
    gains = [
        row for row in page.rows if {"all prompts", "images", "text"} <= row.keys()
    ]
    assert len(gains) == len(answer.columns["all prompts"])
    for column, results in answer.columns.items():
        for row, one in zip(gains, results.values(), strict=True):
            assert row[column].split()[0] == f"{one.figures.speedup:.2f}\u00d7"
            words = {"faster": "faster than plain", "slower": "slower than plain"}
            assert (
                words.get(one.against_plain("speedup"), "no clear difference")
                in row[column]
            )


@pytest.mark.parametrize(
    ("change", "headline"),
    [
        ({"count": 3}, "Too few prompts to tell"),
        (
            {"own": ["identical"] * 23 + ["different"]},
            "No verdict: do not rely on these numbers",
        ),
        (
            {"tokens": 106},
            "No verdict: do not rely on these numbers",
        ),  # than the target's identical response
    ],
)
def test_no_answer_without_what_it_needs(
    workspace: Workspace, save: Save, change: dict[str, Any], headline: str
) -> None:
    save("wren", measured(**change))
    answer = first(workspace)
    assert (answer.headline, answer.level) == (headline, "none")
    assert "Use wren" not in Page(make(workspace).page).text


def test_no_answer_without_the_cpu(workspace: Workspace, save: Save) -> None:
    save("wren", with_cpu_share(measured(speedup=3.0), 0.1))
    answer = first(workspace)
    assert (answer.headline, answer.columns) == (
        "No verdict: other programs had the CPU",
        {},
    )


@pytest.mark.parametrize(
    ("speedups", "headline"),
    [((1.8, 0.7), "Perhaps wren"), ((0.8, 1.8), "Plain decoding is faster")],
)
def test_no_answer_for_a_kind_without_the_cpu(
    workspace: Workspace, save: Save, speedups: tuple[float, float], headline: str
) -> None:
    def with_shares(one: PromptResult) -> PromptResult:
        share = 0.3 if one.kind == "text" else 0.98
        plain = on_shared_cpu(one.plain, share)
        own = on_shared_cpu(one.drafted, share)
        return replace(one, plain=plain, drafted=own)

    save("wren", changed(mixed(*speedups), with_shares))
    answer = first(workspace)
    assert answer.headline == headline
    if answer.columns:
        assert not answer.columns["text"]
        assert "text (8)" in Page(make(workspace).page).text


def test_an_answer_beside_a_warning_is_a_guess(
    workspace: Workspace, save: Save
) -> None:
    save("wren", measured(speedup=1.8))
    save("msd", measured(speedup=1.2), measured="2026-05-05 05:05")
    answer = first(workspace)
    assert (answer.headline, answer.level) == ("Perhaps wren", "unsure")


def test_the_page_goes_from_the_answer_over_examples_to_tables(
    workspace: Workspace, save: Save
) -> None:
    save("wren", measured(shown=(shown(),)), measured(1.0, speedup=0.8))
    text = Page(make(workspace).page).text
    parts = [
        "Use wren",
        "At temperature 1: plain decoding is faster",
        "What is k0?",
        "One row per drafter",
    ]
    places = [
        text.index(part)
        for part in [*parts, "How the drafters were trained", "How often the n-th"][:4]
    ]
    assert places == sorted(places)
    assert "CPU Some Processor" in text[: places[2]]


def test_no_speedup_is_bold_below_1(workspace: Workspace, save: Save) -> None:
    save("wren", measured(speedup=1.2), measured(1.0, speedup=0.8))
    save("msd", measured(speedup=1.1), measured(1.0, speedup=0.6))
    page = Page(make(workspace).page)
    bold = [
        attrs["data-label"]
        for _, attrs in page.elements
        if "best" in attrs.get("class", "").split()
    ]
    assert bold == ["tau", "speedup", "tau", "tau", "tau"]
    rows = latex(read(workspace))
    assert r"\textbf{1.20}" in rows
    assert r"\textbf{0.80}" not in rows
