"""The train/eval split: a hash of an image, or of the first question if that has none.

Prompts that share an image or such a question are on one side, whatever imported them, and so are those that
share one with any of these: the later turns of a conversation are on the side of the first, as its requests
in a log are.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.data.prompts.augment import Message
from vlmdistill.pipelines.data.prompts.prompt_table import (
    Prompt,
    Split,
    media_parts,
    read,
    write,
)
from vlmdistill.pipelines.media.frames import SAMPLING
from vlmdistill.pipelines.workspace.workspace import only_writer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash

TRAIN, EVAL = "!train", "!eval"  # which sort before all hashes


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """How prompts are split."""

    out: Path
    moved: int
    kept: int  # of the prompts in `fixed`, and those that share an image or a question with one
    train: int
    eval: int


def require_share(eval_share: float) -> None:
    """DataError if a share of prompts to hold out is out of range."""
    if not 0 <= eval_share < 1:
        raise DataError(f"--eval-share {eval_share}: give a share from 0 to below 1")


def resplit(out: Path, eval_share: float, fixed: Collection[str] = ()) -> SplitSummary:
    """Split the prompts of a file anew; those with a key in `fixed` stay on their side.

    DataError if there are no prompts, or if the share is out of range.
    """
    require_share(eval_share)
    with only_writer(out):
        prompts = read(out)
        sides = Sides()
        ties = [ties_of_prompt(prompt) for prompt in prompts]
        for prompt, prompt_ties in zip(prompts, ties, strict=True):
            is_fixed = prompt.key in fixed
            sides.join(prompt_ties, prompt.split if is_fixed else None)
        new_prompts = []
        for prompt, prompt_ties in zip(prompts, ties, strict=True):
            split = prompt.split
            if prompt.key not in fixed:
                split = sides.of(prompt_ties[0], eval_share)
            new_prompts.append(dataclasses.replace(prompt, split=split))
        write(out, new_prompts)
    pairs = zip(prompts, new_prompts, strict=True)
    splits = Counter(prompt.split for prompt in new_prompts)
    return SplitSummary(
        out=out,
        moved=sum(before.split != after.split for before, after in pairs),
        kept=sum(sides.is_given(prompt_ties[0]) for prompt_ties in ties),
        train=splits["train"],
        eval=splits["eval"],
    )


def ties_of_prompt(prompt: Prompt) -> list[str]:
    """What a prompt shares with others that must be on its side."""
    digests = [part["digest"] for part in prompt.media if "digest" in part]
    return ties_of(digests or prompt.files, prompt.messages)


def ties_of(digests: Sequence[str], messages: Sequence[Message]) -> list[str]:
    """The media of a conversation, and the hash of its first question if that shows none."""
    first = next(message for message in messages if message["role"] == "user")
    if any(media_parts([first])):
        return [*digests]
    return [*digests, content_hash(content_of([first]))]


def content_of(messages: Iterable[Message]) -> list[Any]:
    """The content that identifies a prompt, without the paths of its files."""
    return [
        [message["role"], [_content_of_part(part) for part in message["content"]]]
        for message in messages
    ]


def _content_of_part(part: Mapping[str, Any]) -> list[Any]:
    sampling = [(name, part[name]) for name in SAMPLING if name in part]
    return [part["type"], part.get("digest") or part["text"], *sampling]


class Sides:
    """The split of each image, and of each first question without one: a forest of what belongs together.

    A tree with a known split has it as its root, `TRAIN` or `EVAL`.
    """

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._above: dict[str, str] = {}
        for prompt in prompts:
            self.join(ties_of_prompt(prompt), prompt.split)

    def join(self, ties: Iterable[str], split: Split | None = None) -> bool:
        """Put these on one side; False, and nothing is done, if they are on both."""
        roots = {self._root(tie) for tie in ties}
        if split:
            roots.add(f"!{split}")
        if roots >= {TRAIN, EVAL}:
            return False
        lowest = min(roots)
        self._above |= dict.fromkeys(roots - {lowest}, lowest)
        return True

    def is_given(self, tie: str) -> bool:
        """Whether the side of an image or a question is given."""
        return self._root(tie) in (TRAIN, EVAL)

    def of(self, tie: str, eval_share: float) -> Split:
        """The side of an image or a question: the given one, else by its hash."""
        root = self._root(tie)
        if root in (TRAIN, EVAL):
            return "eval" if root == EVAL else "train"
        is_held_out = int(content_hash([root]), 16) < eval_share * 2**64
        return "eval" if is_held_out else "train"

    def _root(self, tie: str) -> str:
        # Each step shortens the path for the next call (path halving).
        while above := self._above.get(tie):
            self._above[tie] = self._above.get(above, above)
            tie = above
        return tie
