"""Stream one response, in pieces that know whether the drafter drafted them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import Cycle, decode
from vlmdistill.pipelines.evaluation.records import Piece
from vlmdistill.pipelines.responses.dataset import SamplingSettings
from vlmdistill.pipelines.targets.checkpoints.loading import load
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError


def pieces(cycles: Iterable[Cycle], tokenizer: Any) -> Iterator[Piece]:
    """The text of each cycle; a character of several tokens is held back until its last token."""
    ids: list[int] = []
    shown, seconds = "", 0.0
    for cycle in cycles:
        seconds += cycle.seconds
        for index, token in enumerate(cycle.ids):
            ids.append(token)
            text: str = tokenizer.decode(ids, skip_special_tokens=True)
            if len(text) > len(shown) and not text.endswith("\ufffd"):
                yield Piece(text[len(shown) :], index < cycle.accepted, seconds)
                shown = text


class StreamedResponse:
    """A response in progress: iterate over `pieces`, then call `summary`."""

    def __init__(self, cycles: Iterator[Cycle], tokenizer: Any) -> None:
        self._cycles, self._tokenizer = cycles, tokenizer
        self._done: list[Cycle] = []

    def pieces(self) -> Iterator[Piece]:
        """Decode, and yield the text piece by piece."""
        return pieces(self._record(), self._tokenizer)

    def _record(self) -> Iterator[Cycle]:
        for cycle in self._cycles:
            self._done.append(cycle)
            yield cycle

    def summary(self) -> str:
        """Tokens, speed, and the number of drafted tokens, in one line."""
        tokens = sum(len(cycle.ids) for cycle in self._done)
        seconds = sum(cycle.seconds for cycle in self._done)
        drafted = sum(cycle.accepted for cycle in self._done)
        calls = len(self._done) - 1
        rate = f"{tokens / max(seconds, 1e-9):.0f} tokens/s, prefill included"
        line = f"{tokens} tokens in {seconds:.2f} s ({rate})"
        if drafted:
            line += f", {drafted} drafted; {(tokens - 1) / max(1, calls):.2f} tokens per target call"
        return line


def generate(
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
    load_options: Options | None = None,
) -> StreamedResponse:
    """Start to generate one response. `drafter` is a name in the workspace or a folder; None: plain decoding.

    `sampling` holds "fps" or "frames" for all videos; without it the target's own sampling applies. DataError
    if an image or video cannot be read, TrainingError if the drafter cannot be used.
    """
    if not text.strip():
        raise DataError("TEXT is empty: give a question, such as 'Describe the image.'")
    SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens).check()
    for name, value in (sampling or {}).items():
        if not videos:
            raise DataError(f"--{name} {value}: it needs a --video")
    folder = None
    if drafter is not None:
        folder = workspace.trained(drafter)
        checkpoint.describe(folder)
    target = load(workspace.model, **(load_options or Options()))
    content: list[dict[str, Any]] = [{"type": "image", "path": str(image)} for image in images]
    content += [{"type": "video", "path": str(video), **(sampling or {})} for video in videos]
    content.append({"type": "text", "text": text})
    prompt = target.encode([{"role": "user", "content": content}])
    generator = torch.Generator(target.device).manual_seed(seed)
    guess = None
    if folder is not None:
        guess = checkpoint.load(folder, target.head, target.info, provenance=target.provenance((), "float32"))
    cycles = decode(
        target,
        guess,
        prompt,
        tree=tree,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    )
    return StreamedResponse(cycles, target.tokenizer)
