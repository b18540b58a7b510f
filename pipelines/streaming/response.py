"""Stream one response, in pieces that know whether the drafter drafted them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from vlmdistill.drafters.checkpoints.description import trained_thinking
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.target import room
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding import tree_search
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.streaming.pieces import Piece, pieces
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

logger = logging.getLogger(__name__)


def recorded(
    cycles: Iterable[Cycle],
    done: list[Cycle],
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[Cycle]:
    """The cycles, one token of each at a time, until `ended`.

    `done` gets the cycles as far as they were consumed: the last one ends with the last token, as if that
    were the limit.
    """
    for cycle in cycles:
        done.append(cycle)
        for end, token in enumerate(cycle.ids, start=1):
            accepted = min(cycle.accepted, end)
            done[-1] = replace(cycle, ids=cycle.ids[:end], accepted=accepted)
            yield replace(
                cycle,
                ids=[token],
                accepted=int(end <= cycle.accepted),
                seconds=cycle.seconds if end == 1 else 0.0,
            )
            if ended():
                return


class StreamedResponse:
    """A response in progress: iterate over `pieces`, then call `summary`."""

    def __init__(self, cycles: Iterator[Cycle], tokenizer: Any) -> None:
        self._cycles, self._tokenizer = cycles, tokenizer
        self._done: list[Cycle] = []

    def pieces(self) -> Iterator[Piece]:
        """Decode, and yield the text piece by piece."""
        return pieces(recorded(self._cycles, self._done), self._tokenizer)

    def summary(self) -> str:
        """Tokens, speed, and the number of drafted tokens, in one line."""
        tokens = sum(len(cycle.ids) for cycle in self._done)
        seconds = sum(cycle.seconds for cycle in self._done)
        drafted = sum(cycle.accepted for cycle in self._done)
        calls = len(self._done) - 1
        rate = f"{tokens / max(seconds, 1e-9):.0f} tokens/s, prefill included"
        line = f"{tokens} tokens in {seconds:.2f} s ({rate})"
        if drafted:
            per_call = (tokens - 1) / max(1, calls)
            line += f", {drafted} drafted; {per_call:.2f} tokens per target call"
        return line


def open_pair(
    workspace: Workspace,
    drafter: str | None,
    tree: str | None = None,
    how: Options | None = None,
    temperature: float = 0.0,
) -> tuple[VisionLanguageTarget, Proposer | None, Tree | None]:
    """Load a target, and a drafter by its name in the workspace or by its folder; the tree to draft.

    The target reasons as in the drafter's training, unless `how` has `thinking`.
    The tree is None for the drafter's own. `auto` is the tree that `eval` found for it under these
    conditions; if there is none, its own, and a line of the log says so. DataError, TargetError and
    TrainingError say what cannot be used.
    """
    how = how or Options()
    shape = None
    if tree is not None and tree != "auto":
        shape = Tree.parse(tree)
    if drafter is None:
        if tree is not None:
            raise DataError(f"--tree {tree} requires --drafter")
        return load(workspace.model, **how), None, None
    folder = workspace.trained(drafter)
    # It fails before the target is loaded.
    thinking = thinking_of([folder])
    target = load(workspace.model, **(Options(thinking=thinking) | how))
    loaded = target.drafter(folder)
    if tree == "auto":
        conditions = tree_search.conditions(
            target, how.get("compiled", False), temperature
        )
        shape = _searched_tree(folder, conditions, loaded)
    return target, loaded, shape


def thinking_of(folders: Iterable[Path]) -> Thinking:
    """The mode of thinking in which the first of these drafters that was trained is to decode.

    Empty, as by default, of one that was trained in both. TrainingError if a drafter cannot be read.
    """
    for folder in folders:
        mode = trained_thinking(folder)
        if mode is not None:
            return "" if mode == "mixed" else cast("Thinking", mode)
    return ""


def _searched_tree(folder: Path, conditions: str, drafter: Proposer) -> Tree | None:
    """The tree that `eval` found for a drafter under these conditions; None if there is none."""
    best = tree_search.kept(folder, conditions, any_threads=True)
    shape = Tree.parse(best.tree) if best else None
    source = best.conditions if best else f"none, so its own, under {conditions}"
    logger.info(
        "%s drafts %s, found by `eval --tree auto`: %s",
        folder.name,
        shape or drafter.tree,
        source,
    )
    return shape


def generate(
    workspace: Workspace,
    text: str,
    *,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    sampling: Mapping[str, float] | None = None,
    drafter: str | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    tree: str | None = None,
    seed: int = 0,
    load_options: Options | None = None,
) -> StreamedResponse:
    """Start to generate one response. `drafter` and `tree` are as in `open_pair`.

    `sampling` holds "fps" or "frames" for all videos; without it the target's own sampling applies. The
    response ends at the target's last position at the latest. DataError if an image or video cannot be read
    or the prompt is too long, TrainingError if the drafter cannot be used.
    """
    if not text.strip():
        raise DataError("TEXT is empty: give a question, such as 'Describe the image.'")
    SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens).check()
    for name, value in (sampling or {}).items():
        if not videos:
            raise DataError(f"--{name} {value} requires --video")
    target, proposer, shape = open_pair(
        workspace, drafter, tree, load_options, temperature
    )
    content = list[dict[str, Any]]()
    for image in images:
        content.append({"type": "image", "path": str(image)})
    for video in videos:
        content.append({"type": "video", "path": str(video), **(sampling or {})})
    content.append({"type": "text", "text": text})
    prompt = target.encode([{"role": "user", "content": content}])
    generator = torch.Generator(target.device).manual_seed(seed)
    cycles = decode(
        target,
        proposer,
        prompt,
        tree=shape,
        max_new_tokens=min(max_new_tokens, room(target.info, prompt.length)),
        temperature=temperature,
        generator=generator,
    )
    return StreamedResponse(cycles, target.tokenizer)
