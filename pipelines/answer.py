"""One answer as it comes, in pieces that know whether they were drafted."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters import checkpoint
from vlmdistill.drafters.base import Tree
from vlmdistill.drafters.decoding.generate import Cycle, plain, speculate
from vlmdistill.pipelines.answers import Sampling
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError


@dataclass(frozen=True)
class Piece:
    """A run of text: drafted and accepted, or said by the target itself."""

    text: str
    drafted: bool


def pieces(cycles: Iterable[Cycle], tokenizer: Any) -> Iterator[Piece]:
    """The text of each cycle as it comes; a character of several tokens waits for its last one."""
    ids: list[int] = []
    told = ""
    for cycle in cycles:
        for place, token in enumerate(cycle.ids):
            ids.append(token)
            text: str = tokenizer.decode(ids, skip_special_tokens=True)
            if len(text) > len(told) and not text.endswith("\ufffd"):
                yield Piece(text[len(told) :], place < cycle.accepted)
                told = text


class Answer:
    """A running answer: iterate over `pieces`, then ask for the `summary`."""

    def __init__(self, cycles: Iterator[Cycle], tokenizer: Any) -> None:
        self._cycles, self._tokenizer = cycles, tokenizer
        self._done: list[Cycle] = []

    def pieces(self) -> Iterator[Piece]:
        """Decode, and yield the text as it comes."""
        return pieces(self._record(), self._tokenizer)

    def _record(self) -> Iterator[Cycle]:
        for cycle in self._cycles:
            self._done.append(cycle)
            yield cycle

    def summary(self) -> str:
        """How much was said, how fast, and how much of it was drafted."""
        tokens = sum(len(cycle.ids) for cycle in self._done)
        seconds = sum(cycle.seconds for cycle in self._done)
        drafted = sum(cycle.accepted for cycle in self._done)
        calls = len(self._done) - 1
        rate = f"{tokens / max(seconds, 1e-9):.0f} tokens/s, prefill included"
        said = f"{tokens} tokens in {seconds:.2f} s ({rate})"
        if drafted:
            said += f", {drafted} drafted; {(tokens - 1) / max(1, calls):.2f} tokens per call of the target"
        return said


def answer(
    workspace: Workspace,
    text: str,
    *,
    images: Sequence[Path] = (),
    videos: Sequence[Path] = (),
    sampling: Mapping[str, float] | None = None,
    drafter: str | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    tree: Tree | None = None,
    seed: int = 0,
    how: Options | None = None,
) -> Answer:
    """Ask a target one question. `drafter` is a name in the workspace or a folder; None decodes plainly.

    `sampling` holds "fps" or "frames" for all videos; without it they are sampled as the target does.
    DataError when an image or video cannot be read, TrainingError when the drafter cannot be used.
    """
    Sampling(temperature=temperature, max_new_tokens=max_new_tokens).check()
    for name, value in (sampling or {}).items():
        if not videos:
            raise DataError(f"--{name} {value}: there is no --video to sample")
    folder = None
    if drafter is not None:
        folder = workspace.trained(drafter)
        checkpoint.describe(folder)
    target = load(workspace.model, **(how or Options()))
    content: list[dict[str, Any]] = [{"type": "image", "path": str(image)} for image in images]
    content += [{"type": "video", "path": str(video), **(sampling or {})} for video in videos]
    content.append({"type": "text", "text": text})
    prompt = target.encode([{"role": "user", "content": content}])
    generator = torch.Generator(target.device).manual_seed(seed)
    if folder is None:
        cycles = plain(
            target, prompt, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator
        )
        return Answer(cycles, target.tokenizer)
    guess = checkpoint.load(folder, target.head, target.info, provenance=target.provenance((), "float32"))
    cycles = speculate(
        target,
        guess,
        prompt,
        tree=tree or guess.config.tree,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    )
    return Answer(cycles, target.tokenizer)
