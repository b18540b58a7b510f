"""Tau without decoding: a walk over the tokens after which guesses are right takes the cycles of decoding."""

from pathlib import Path

from research.trial import Trial, counts
from research.walk import walk
from vlmdistill.pipelines.bench import evaluate
from vlmdistill.pipelines.data.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.workspace.workspace import Workspace


def test_a_cycle_takes_the_right_guesses_and_the_token_of_the_target() -> None:
    right = [2, 4, 0, 1, 0]
    plain, own = counts(
        walk(right), len(right)
    )  # of six tokens the first is from the prefill
    assert (plain.tokens, plain.calls, own.tokens) == (6, 5, 6)
    assert (own.calls, own.accepted) == (2, 3)


def test_a_response_that_ends_on_a_guess_has_no_token_of_the_target() -> None:
    _, own = counts(walk([1, 0, 2, 1]), 4)
    assert (own.calls, own.accepted, own.tokens) == (2, 3, 5)


def test_a_trial_has_the_media_of_the_workspace(tmp_path: Path) -> None:
    base = Workspace.of("demo-small", tmp_path)
    made = files.write(
        base.root / "demo-data", images=2, dialogues=1, seed=0, split="evaluation"
    )
    import_prompts(
        [str(made.llava), str(made.sharegpt)],
        base.prompts,
        choices=Choices(images=made.images, split="eval"),
    )
    workspace = Trial(base=base, seeds=1, steps=1, limit=9, jobs=1).at(0)
    prompts = evaluate.held_out(workspace.prompts, 9, "demo")
    parts = [
        part for one in prompts for turn in one.messages for part in turn["content"]
    ]
    paths = [part["path"] for part in parts if part["type"] == "image"]
    assert len(prompts) == 3
    assert len(paths) == 2
    assert all(Path(path).is_file() for path in paths)
