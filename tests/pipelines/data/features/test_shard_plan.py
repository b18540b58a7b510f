"""The plan of a capture: every sample once, shards of one size, and early ones of all lengths."""

import numpy as np
import polars as pl
import pytest

from vlmdistill.pipelines.data.features.shard_plan import (
    SHARD_SAMPLES,
    CaptureFacts,
    plan,
)

FACTS = CaptureFacts("", (), text_bytes=100, visual_bytes=10)


def items(count: int) -> pl.DataFrame:
    """Facts of responses, from 10 to 1,000 tokens long."""
    generator = np.random.default_rng(0)
    prompt, tokens = (
        generator.integers(5, 500, count),
        generator.integers(5, 500, count),
    )
    return pl.DataFrame(
        {
            "prompt": np.arange(count, dtype=np.uint32),
            "key": [f"k{number}" for number in range(count)],
            "row": np.arange(count, dtype=np.uint32)[::-1],
            "prompt_tokens": prompt,
            "visual_tokens": prompt // 2,
            "tokens": tokens,
        }
    )


@pytest.mark.parametrize("count", [1, 2, 700])
@pytest.mark.parametrize("shard_bytes", [1, 500_000, 10**9])
def test_every_sample_is_in_one_shard_of_bounded_size(
    count: int, shard_bytes: int
) -> None:
    asked = items(count)
    shards = [*plan(asked, FACTS, shard_bytes)]
    planned = [pair for shard in shards for pair in shard]
    assert sorted(planned) == [*asked.select("prompt", "row").iter_rows()]
    size = {
        row["prompt"]: FACTS.sample_bytes(
            row["prompt_tokens"] + row["tokens"], row["visual_tokens"]
        )
        for row in asked.iter_rows(named=True)
    }
    for shard in shards:
        assert len(shard) <= SHARD_SAMPLES
        assert (
            len(shard) == 1 or sum(size[prompt] for prompt, _ in shard) <= shard_bytes
        )


def test_the_first_shard_is_the_longest_and_the_first_few_have_all_lengths() -> None:
    asked = items(700)
    length = (asked["prompt_tokens"] + asked["tokens"]).to_list()
    means = [
        np.mean([length[prompt] for prompt, _ in shard])
        for shard in plan(asked, FACTS, 500_000)
    ]
    assert len(means) > 32
    assert means[0] == max(means)
    for first in (8, 16, 32):
        assert np.mean(means[:first]) == pytest.approx(np.mean(means), rel=0.15)
        assert (
            min(means[:first])
            < np.quantile(means, 0.25)
            < np.quantile(means, 0.75)
            < max(means[:first])
        )
