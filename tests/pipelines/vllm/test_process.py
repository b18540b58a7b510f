"""The engine's process: what is wrong with it is one line, and what it says decides whether parity holds."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny
from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.bench import parity
from vlmdistill.pipelines.bench.parity import DraftCounts, Parity, questions
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.vllm import process
from vlmdistill.pipelines.vllm.messages import EngineJob, EngineOutcome, Question
from vlmdistill.pipelines.vllm.process import EngineError

JOB = EngineJob(target="target", questions=(Question(text="What?"),))
WRITTEN = Exported(
    drafter="eagle3",
    target="demo",
    out="served",
    dtype="float32",
    parameters=1,
    draft_vocabulary=9,
    target_vocabulary=9,
    layers=(1, 2, 3),
    engines=("sglang", "vllm"),
    method="eagle3",
    drops_visual=False,
    whole_images=False,
    draft_tokens=4,
)


def prompt(*parts: dict[str, str]) -> Prompt:
    return Prompt(
        key="one",
        dataset="",
        split="eval",
        messages=[{"role": "user", "content": list(parts)}],
        augmentation="",
        augmentation_text="",
        reference=None,
        source="",
        row=0,
        turn=1,
    )


def outcome(*responses: list[int], drafts: int = 0, accepted: int = 0) -> EngineOutcome:
    read = [[5, 6] for _ in responses]
    return EngineOutcome(
        prompts=read, responses=[*responses], drafts=drafts, accepted=accepted, accepted_at=[], versions={}
    )


def test_a_failure_of_the_engine_is_its_own_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "engine_python", lambda: Path(sys.executable))
    with pytest.raises(EngineError, match=r"^vLLM has failed: ModuleNotFoundError: No module named 'vllm'$"):
        process.run(JOB)


@pytest.mark.parametrize(
    ("identical", "accepted", "holds"), [(4, 200, True), (4, 201, True), (4, 203, False), (3, 200, False)]
)
def test_parity_is_identical_output_and_acceptance_within_a_hundredth(
    identical: int, accepted: int, holds: bool
) -> None:
    found = Parity(4, identical, DraftCounts(100, 200), DraftCounts(100, accepted), {})
    assert found.holds is holds


def test_the_engine_is_compared_with_itself_and_with_our_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[EngineJob] = []

    def run(job: EngineJob) -> EngineOutcome:
        jobs.append(job)
        return outcome([1, 2, 3], [1, 4], drafts=7, accepted=9) if job.drafter else outcome([1, 2, 3], [1, 2])

    def speculate(*_: Any, tree: Any, **__: Any) -> Iterator[Any]:
        accepted = {"chain-4": (0, 3, 4), "30-3-8": (0, 5, 6)}[str(tree)]
        yield from (SimpleNamespace(accepted=count) for count in accepted)

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(parity, "speculate", speculate)
    target: Any = SimpleNamespace(
        drafter=lambda folder: SimpleNamespace(tree=Tree(30, 3, 8)),
        encode=lambda messages: SimpleNamespace(ids_L=torch.tensor([5, 6])),
    )
    asked = [prompt({"type": "text", "text": "What?"})] * 2
    found = parity.check(target, Path("eagle3"), WRITTEN, asked, JOB)
    assert [(job.drafter, job.method) for job in jobs] == [
        ("", "eagle"),
        (str(Path("served").absolute()), "eagle3"),
    ]
    assert found == Parity(2, 1, DraftCounts(4, 14), DraftCounts(7, 9), {})
    found = parity.check(target, Path("eagle3"), WRITTEN, asked, JOB, own_tree=True)
    assert (found.tree, found.own) == ("30-3-8", DraftCounts(4, 22))

    target.encode = lambda messages: SimpleNamespace(ids_L=torch.tensor([5, 7]))
    with pytest.raises(EngineError, match="vLLM reads prompt one as other tokens"):
        parity.check(target, Path("eagle3"), WRITTEN, asked, JOB)


def test_a_video_is_asked_for_with_our_frames_and_positions(tmp_path: Path) -> None:
    for number in range(6):
        tiny.picture(56, 84, number).save(tmp_path / f"{number}.png")
    target, shown = load("demo-video", device="cpu"), prompt({"type": "video", "path": str(tmp_path)})
    (question,) = questions(target, [shown])
    encoded, (clip,) = target.encode(shown.messages), question.videos
    assert (clip.path, clip.indices, clip.total) == (str(tmp_path), tuple(range(6)), 6)
    assert question.rope == encoded.rope_AL.tolist()
    assert question.text.count(target.processor.video_token) == 1
