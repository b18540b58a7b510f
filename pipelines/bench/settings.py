"""How an evaluation decodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.workspace.workspace import NAME
from vlmdistill.stores.errors import DataError

Shape = Tree | Literal["auto"]
"""A draft tree, or the fastest one here, which is searched for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode, the same for all drafters of one evaluation."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512
    limit: int = 100
    trees: tuple[Shape, ...] = ()
    """None: each drafter's own; several: each in turn."""
    seed: int | None = None  # of sampling; see `sampled.prompt_seed`
    threads: int = 0  # 0: one or all, whichever is faster for plain decoding
    how: Options = field(default_factory=Options)  # of loading the target
    concurrencies: tuple[int, ...] = (1,)  # requests at a time; a server only

    @property
    def attention(self) -> str:
        """The kernel of the target's prefill."""
        return self.how.get("attention", "sdpa")

    @property
    def thinking(self) -> Thinking:
        """Whether the target reasons before it answers."""
        return self.how.get("thinking", "")

    @property
    def compiled(self) -> bool:
        """Whether the target's decoding steps are compiled."""
        return self.how.get("compiled", False)

    def trained_as(self, modes: Mapping[str, Thinking]) -> "Settings":
        """With the reasoning that drafters were trained with, unless `how` names another.

        `modes` are by the drafters' names. DataError when they were not all trained with the same.
        """
        if "thinking" in self.how:
            return self
        if len({*modes.values()}) > 1:
            trained = [
                f"{name}: {mode or 'as the template'}" for name, mode in modes.items()
            ]
            raise DataError(
                f"the drafters were trained with different reasoning ({', '.join(trained)}): give "
                "--thinking"
            )
        mode: Thinking = next(iter(modes.values()), "")
        return replace(self, how={**self.how, "thinking": mode})

    def check(self) -> None:
        """DataError on an invalid value."""
        if self.limit < 1:
            raise DataError(f"--limit {self.limit}: give a number of prompts above 0")
        if self.max_new_tokens < 1:
            raise DataError(
                f"--max-new-tokens {self.max_new_tokens}: give a number above 0"
            )
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise DataError(
                    f"--temperature {temperature}: give 0 for greedy decoding, or a number above it"
                )
        if self.threads < 0:
            raise DataError(
                f"--threads {self.threads}: give a number above 0, or 0 to choose by measuring"
            )


def trees_of(shapes: Iterable[str]) -> tuple[Shape, ...]:
    """Draft trees by their shapes, such as `chain-5` or `auto`, each once."""
    trees: list[Shape] = []
    for shape in dict.fromkeys(shapes):
        trees.append("auto" if shape == "auto" else Tree.parse(shape))
    return tuple(trees)


def check_title(title: str) -> None:
    """DataError on what cannot name an evaluation."""
    if title and not NAME.fullmatch(title):
        raise DataError(f"--name {title}: use letters, digits, '_', '.' and '-'")
