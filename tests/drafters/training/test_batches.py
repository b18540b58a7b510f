"""Which samples are trained on."""

from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from vlmdistill.drafters.core.config import TrainConfig
from vlmdistill.drafters.training.batches import split
from vlmdistill.stores.errors import DataError


def kept(config: TrainConfig) -> list[str]:
    """The samples of a table of lengths, half of each visual, that a run takes."""
    lengths = [1000, 4096, 4098, 16384, 16386]
    table = pl.DataFrame(
        {
            "key": [str(length) for length in lengths],
            "text_tokens": [length // 2 for length in lengths],
            "visual_tokens": [length // 2 for length in lengths],
            "response_tokens": [20] * len(lengths),
        }
    )
    store: Any = SimpleNamespace(view=lambda name: table)
    return list(split(store, None, config, held_out=0).visual)


def test_a_sample_is_as_long_as_a_step_at_most() -> None:
    assert kept(TrainConfig()) == ["1000", "4096", "4098", "16384"]
    assert kept(TrainConfig(batch_tokens=2048)) == ["1000", "4096"]
    assert kept(TrainConfig(max_length=1000)) == ["1000"]
    with pytest.raises(DataError, match="max_length=-1"):
        TrainConfig(max_length=-1)
