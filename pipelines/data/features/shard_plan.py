"""Which samples a capture lacks, and how they are put into shards."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from vlmdistill.pipelines.cluster.queue import scattered
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, facts_of
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.data.responses.dataset import ResponseRow
from vlmdistill.stores.schema import TIME, content_hash
from vlmdistill.stores.views.text_stats import text_stats

SHARD_SAMPLES = 256  # at most


@dataclass(frozen=True)
class CaptureItem:
    """One sample to capture."""

    prompt: Prompt
    response: ResponseRow

    @property
    def tokens(self) -> int:
        """The length of prompt and response, visual tokens included."""
        return self.response.prompt_tokens + len(self.response.ids)

    @property
    def meta(self) -> dict[str, str | int | float]:
        """Columns of the store's index, to filter by."""
        return {
            "dataset": self.prompt.dataset,
            "split": self.prompt.split,
            "augmentation": self.prompt.augmentation,
            "finish": self.response.finish,
            **({} if self.prompt.time is None else {TIME: self.prompt.time}),
            **text_stats(self.response.text),  # the named filters of views read these
        }


@dataclass(frozen=True)
class CaptureTask:
    """Samples of similar length that become one shard."""

    items: tuple[CaptureItem, ...]
    name: str  # follows from the samples: a shard that is captured twice counts once

    @classmethod
    def of(cls, items: Iterable[CaptureItem]) -> "CaptureTask":
        """The task of these samples."""
        items = tuple(items)
        return cls(items, content_hash(sorted(item.prompt.key for item in items)))

    @property
    def keys(self) -> list[str]:
        """The keys of the samples."""
        return [item.prompt.key for item in self.items]

    def only(self, keys: Collection[str]) -> "CaptureTask":
        """The task of these samples only."""
        return CaptureTask.of(item for item in self.items if item.prompt.key in keys)


@dataclass(frozen=True)
class CaptureFacts:
    """What the driver plans shards with; equal for all workers."""

    target: str  # fingerprint
    features: tuple[str, ...]
    text_bytes: int  # of one text token
    visual_bytes: int  # of one visual token

    def sample_bytes(self, tokens: int, visual: int) -> int:
        """The size of a sample of so many tokens, `visual` of them visual."""
        return (tokens - visual) * self.text_bytes + visual * self.visual_bytes


def missing_of(
    prompts: Sequence[Prompt], generated: dataset.Responses, there: Collection[str]
) -> pl.DataFrame:
    """The facts of the responses to `prompts` whose keys are not `there`, and the number of the `prompt`."""
    asked = facts_of(prompts).select("key").with_row_index("prompt")
    found = asked.join(generated.facts, on="key", how="inner")
    if not there:
        return found
    return found.filter(
        ~pl.col("key").is_in(pl.Series(list(there), dtype=pl.String).implode())
    )


def tasks(
    prompts: Sequence[Prompt],
    generated: dataset.Responses,
    items: pl.DataFrame,
    facts: CaptureFacts,
    shard_bytes: int,
) -> Iterator[CaptureTask]:
    """The tasks of a plan, each made when it is asked for: all together take much memory."""
    for shard in plan(items, facts, shard_bytes):
        made = [
            CaptureItem(prompts[prompt], generated.row(row)) for prompt, row in shard
        ]
        assert all(item.prompt.key == item.response.key for item in made)
        yield CaptureTask.of(made)


def plan(
    items: pl.DataFrame, facts: CaptureFacts, shard_bytes: int
) -> Iterator[list[tuple[int, int]]]:
    """Shards of about `shard_bytes` with samples of similar length.

    `items` are facts of responses and the number of the `prompt` of each; of a shard, (`prompt`, `row`). The
    longest come first, which need most memory, and then `scattered` ones: where a run is
    stopped, what is captured so far is of all lengths.
    """
    visual = pl.col("visual_tokens").cast(pl.Int64)
    tokens = (pl.col("prompt_tokens") + pl.col("tokens")).alias("all")
    weight = (tokens - visual) * facts.text_bytes + visual * facts.visual_bytes
    ordered = items.select("key", "prompt", "row", tokens, weight.alias("weight"))
    ordered = ordered.sort("all", "key", descending=[True, False])
    starts, size = [0], 0
    for at, weight in enumerate(ordered["weight"]):
        if at > starts[-1] and (
            size + weight > shard_bytes or at - starts[-1] >= SHARD_SAMPLES
        ):
            starts.append(at)
            size = 0
        size += weight
    ends = [*starts[1:], len(ordered)]
    for shard in scattered(len(starts)):
        start = starts[shard]
        yield ordered[start : ends[shard]].select("prompt", "row").rows()
