"""Every family through the whole flow, on tiny checkpoints: `make test-families`, which prints a table.

prompts, responses, features, four drafters trained, each evaluated at temperature 0 and 1, exported where
serving engines have the method. At temperature 1, a trained drafter, with a tree and with a chain, says
what plain decoding says with the same chance. Responses and features are made in this process: Ray has tests
of its own. Processors that need torchvision are left out where it is not there.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny, tiny_families
from tests.drafters.conformance.test_lossless import TOKENS, Fate, said
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.export import exportable
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.acceptance import verify
from vlmdistill.drafters.decoding.decoders import plain, speculate
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.stock.target import StockTarget
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.store import Store

DRAFTERS = ("wren", "eagle3", "sparrow", "dflash")
FAMILIES = (*tiny_families.FAMILIES, *tiny.FAMILIES)
LONG = "16"  # tokens of a response


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, ...]]]:
    """A row for each family; printed in the end."""
    rows: list[tuple[str, ...]] = []
    yield rows
    head = "| family | forward | capture | train | T=0 | T=1 | export |"
    print(f"\n{head}\n|---|---|---|---|---|---|---|")  # noqa: T201
    for row in rows:
        print("| " + " | ".join(row) + " |")  # noqa: T201


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about pictures of several sizes, some about two, one about none; two are held out."""
    folder = tmp_path_factory.mktemp("asked")
    sizes = [
        (60, 40),
        (40, 90),
        (84, 84),
        (120, 60),
        (56, 56),
        (70, 50),
        (64, 64),
        (33, 80),
    ]
    for number, (width, height) in enumerate(sizes):
        tiny.picture(width, height, number).save(folder / f"{number}.png")
    shown: list[tuple[int, ...]] = [(0,), (1,), (2, 3), (), (4,), (5,), (6, 7)]
    rows = []
    for number, pictures in enumerate(shown):
        parts = [{"type": "image", "image": f"{one}.png"} for one in pictures]
        rows.append(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [*parts, f"Question {number}: what is there?"],
                    }
                ]
            }
        )
    for side, some in (("train", rows[:5]), ("eval", rows[5:])):
        (folder / f"{side}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return folder


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # GLM's processor
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_flow(
    family: str,
    asked: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: Any,
) -> None:
    if family in tiny_families.FAMILIES and not tiny_families.runs_here(family):
        pytest.skip("its processor needs torchvision or num2words")
    make: Callable[..., Path] = tiny_families.checkpoint
    if family not in tiny_families.FAMILIES:
        make = tiny.checkpoint
    model = make(family, tmp_path / family)
    where = ("--model", str(model), "--runs", str(tmp_path / "runs"))

    def run(*arguments: str) -> str:
        capsys.readouterr()
        status = main([*arguments, *where])
        shown = capsys.readouterr()
        assert status == 0, shown.err[-2000:]
        return shown.out

    assert main(["target", "check", str(model)]) == 0, capsys.readouterr().out
    for side in ("train", "eval"):
        run(
            "prompts",
            str(asked / f"{side}.jsonl"),
            "--images",
            str(asked),
            "--split",
            side,
        )
    run("responses", "--max-new-tokens", LONG, "--min-words", "0", "--workers", "0")
    run("features", "--for", ",".join(DRAFTERS), "--workers", "0")
    workspace = Workspace.of(str(model), tmp_path / "runs")
    samples = len(Store.open(workspace.features).keys())
    assert samples == 5
    steps = ("--set", "steps=8", "--set", "batch_tokens=512")
    for drafter in DRAFTERS:
        run("train", drafter, *steps)
    how = (
        "--temperature",
        "0",
        "--temperature",
        "1",
        "--tree",
        "8-2-2",
        "--threads",
        "1",
    )
    facts = json.loads(run("eval", *DRAFTERS, *how, "--max-new-tokens", LONG, "--json"))
    verdicts = []
    for drafter in DRAFTERS:
        cold, hot = facts[drafter]["temperatures"]
        assert cold["lossless"]["different"] == 0
        assert cold["lossless"]["identical"] + cold["lossless"]["near_tie"] == 2
        assert hot["calls"] > 0
        verdicts.append(cold["lossless"])
    served = [name for name in DRAFTERS if name in exportable()]
    for drafter in served:
        run("export", drafter, "--out", str(tmp_path / "exported" / drafter))
    target = load(str(model))
    cases = [
        with_the_same_chance(target, target.drafter(workspace.drafter(name)))
        for name in DRAFTERS
    ]
    assert all(same for case in cases for same in case)
    row = (
        "stock" if isinstance(target, StockTarget) else "fused",
        f"{samples} samples",
        f"{len(DRAFTERS)} drafters",
        f"{sum(one['identical'] for one in verdicts)} of {2 * len(DRAFTERS)} identical",
        f"{sum(map(len, cases))} of {sum(map(len, cases))} identical",
        ", ".join(served),
    )
    table.append((family, *row))


def with_the_same_chance(target: VisionLanguageTarget, drafter: Any) -> list[bool]:
    """Whether decoding says what plain decoding says, for two trees and two answers, no close calls."""
    prompt = target.encode(tiny.message("what is there?", tiny.picture(60, 40)))
    same: list[bool] = []
    for seed in range(20):
        answers = []
        for tree in (None, "8-2-2", "chain-4"):
            fate = Fate(seed, target.info.vocab_size)
            with pytest.MonkeyPatch.context() as patch:
                fate.reign(patch, verify)
                if tree is None:
                    cycles = plain(
                        target, prompt, max_new_tokens=TOKENS, temperature=1.0
                    )
                else:
                    chosen = Tree.parse(tree)
                    cycles = speculate(
                        target,
                        drafter,
                        prompt,
                        tree=chosen,
                        max_new_tokens=TOKENS,
                        temperature=1.0,
                    )
                answers.append(said(cycles))
            if fate.closest < 1e-3:
                break
        if len(answers) == 3:
            same += [answer == answers[0] for answer in answers[1:]]
        if len(same) == 4:
            return same
    raise AssertionError("every answer is a close call: try more seeds")
