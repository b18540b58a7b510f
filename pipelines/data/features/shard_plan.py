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
    def response_ids(self) -> list[int]:
        """The tokens of the response, as Python's integers."""
        return [int(token) for token in self.response.ids]

    @property
    def meta(self) -> dict[str, str | int | float]:
        """Columns of the store's index, to filter by."""
        columns: dict[str, str | int | float] = {
            "dataset": self.prompt.dataset,
            "split": self.prompt.split,
            "augmentation": self.prompt.augmentation,
            "finish": self.response.finish,
        }
        if self.prompt.time is not None:
            columns[TIME] = self.prompt.time
        # The named filters of views read these.
        return columns | text_stats(self.response.text)


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
    """Facts by which the driver plans shards; equal for all workers."""

    target: str  # fingerprint
    features: tuple[str, ...]
    text_bytes: int  # of one text token
    visual_bytes: int  # of one visual token

    def sample_bytes(self, tokens: int, visual: int) -> int:
        """The size of a sample of so many tokens, `visual` of them visual."""
        return (tokens - visual) * self.text_bytes + visual * self.visual_bytes


def has_key(rows: pl.DataFrame, keys: Collection[str]) -> pl.Series:
    """For each of the rows, whether its `key` is one of `keys`."""
    return rows["key"].is_in(pl.Series(list(keys), dtype=pl.String).implode())


def missing_of(
    prompts: Sequence[Prompt], generated: dataset.Responses, stored: Collection[str]
) -> pl.DataFrame:
    """The facts of the responses to `prompts` whose keys are not `stored`.

    The column `prompt` is the number of the prompt that a response answers.
    """
    numbered = facts_of(prompts).select("key").with_row_index("prompt")
    answered = numbered.join(generated.facts, on="key", how="inner")
    if not stored:
        return answered
    return answered.filter(~has_key(answered, stored))


def tasks(
    prompts: Sequence[Prompt],
    generated: dataset.Responses,
    items: pl.DataFrame,
    facts: CaptureFacts,
    shard_bytes: int,
) -> Iterator[CaptureTask]:
    """The tasks of a plan, each made when it is asked for: all together take much memory."""
    for shard in plan(items, facts, shard_bytes):
        samples = list[CaptureItem]()
        for prompt_number, row_number in shard:
            prompt = prompts[prompt_number]
            response = generated.row(row_number)
            assert prompt.key == response.key
            samples.append(CaptureItem(prompt, response))
        yield CaptureTask.of(samples)


def plan(
    items: pl.DataFrame, facts: CaptureFacts, shard_bytes: int
) -> Iterator[list[tuple[int, int]]]:
    """Shards of about `shard_bytes` with samples of similar length, each a list of (`prompt`, `row`).

    `items` are facts of responses with the number of the `prompt` of each. The first shard has the longest
    samples, which need most memory. The others come in `scattered` order, so that an interrupted capture has
    samples of every length.
    """
    visual = pl.col("visual_tokens").cast(pl.Int64)
    tokens = (pl.col("prompt_tokens") + pl.col("tokens")).alias("all")
    weight = (tokens - visual) * facts.text_bytes + visual * facts.visual_bytes
    ordered = items.select("key", "prompt", "row", tokens, weight.alias("weight"))
    ordered = ordered.sort("all", "key", descending=[True, False])
    starts = _shard_starts(ordered["weight"], shard_bytes)
    ends = [*starts[1:], len(ordered)]
    for shard in scattered(len(starts)):
        rows = ordered[starts[shard] : ends[shard]]
        yield rows.select("prompt", "row").rows()


def _shard_starts(weights: Iterable[int], shard_bytes: int) -> list[int]:
    """The first sample of each shard; `weights` are the bytes of the samples in order."""
    starts = [0]
    size = 0
    for sample, weight in enumerate(weights):
        samples = sample - starts[-1]
        full = size + weight > shard_bytes or samples >= SHARD_SAMPLES
        if samples and full:
            starts.append(sample)
            size = 0
        size += weight
    return starts
