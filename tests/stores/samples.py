"""Small stores of made-up samples: every test builds its own from a number."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmdistill.stores.schema import (
    Feature,
    FrozenTables,
    Provenance,
    Sample,
    Span,
    TargetInfo,
)
from vlmdistill.stores.store import Store

WIDTH = 8
FEATURES = ("embed.span", "hidden.text", "layer2.visual")
MORE = ("layer1.text", "layer3.text")  # of annexes


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "target": "tiny",
        "config_hash": "c0",
        "weights_hash": "w0",
        "processor_hash": "p0",
        "template_hash": "t0",
        "features": FEATURES,
        "dtype": "bfloat16",
        "revision": "",
        "sampling": "",
        "code_version": "",
        "engine": "transformers",
        "thinking": "",
    }
    return Provenance(**(values | changes))


def info(**changes: Any) -> TargetInfo:
    values: dict[str, Any] = {
        "name": "tiny",
        "family": "qwen2_5_vl",
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "num_layers": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position": 512,
        "eos_ids": (1,),
        "visual_ids": (2, 3),
    }
    return TargetInfo(**(values | changes))


def head(tied: bool = True) -> FrozenTables:
    rng = np.random.default_rng(7)
    embed_VD = rng.integers(0, 1 << 15, (32, WIDTH), dtype=np.uint16)
    lm_head_VD = (
        embed_VD if tied else rng.integers(0, 1 << 15, (32, WIDTH), dtype=np.uint16)
    )
    return FrozenTables(embed_VD, lm_head_VD, "bfloat16", {"temperature": 1.0})


def bf16(values: Any) -> Any:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sample(
    number: int,
    features: Sequence[str] = FEATURES,
    width: int = WIDTH,
    tokens: int | None = None,
    **meta: Any,
) -> Sample:
    """The sample of a number: always the same, of its own length, some without visual tokens."""
    rng = np.random.default_rng(number)
    text = int(rng.integers(3, 40)) if tokens is None else tokens
    lengths = [int(n) for n in rng.integers(1, 20, int(rng.integers(0, 3)))]
    spans, position = [], np.arange(text, dtype=np.int32)
    for before, length in enumerate(lengths, start=1):  # text tokens before the span
        spans.append(Span(int(position[before]), length))
        position[before:] += length
    rows = {"text": text, "visual": sum(lengths), "span": len(lengths)}
    held = {}
    for name in features:
        feature = Feature.parse(name)
        held[feature] = bf16(rng.standard_normal((rows[feature.where], width)))
    ids_T = rng.integers(0, 32, text, dtype=np.int32)
    facts: dict[str, Any] = {"dataset": "ab"[number % 2], "words": number, **meta}
    return Sample(
        f"k{number:04}",
        ids_T,
        np.arange(text) >= text // 2,
        position,
        position.copy(),
        tuple(spans),
        held,
        facts,
    )


def make(
    path: Path | str, shards: Iterable[Iterable[int]] = (), **options: Any
) -> Store:
    """A store with one committed shard of numbered samples after the other."""
    store = Store.create(path, provenance(), info(), head(), **options)
    for at, numbers in enumerate(shards):
        write(store, f"u{at}", numbers)
    return store


def write(store: Store, shard: str, samples: Iterable[int | Sample]) -> None:
    """Commit samples, some by their numbers."""
    with store.writer(shard) as writer:
        for one in samples:
            writer.add(sample(one) if isinstance(one, int) else one)


def more(number: int) -> Sample:
    """The sample of a number, with the features of an annex in place of its own."""
    rng, one = np.random.default_rng([number, 1]), sample(number)
    rows = {
        Feature.parse(name): bf16(rng.standard_normal((len(one.ids_T), WIDTH)))
        for name in MORE
    }
    return replace(one, features=rows)


def whole(number: int) -> Sample:
    """The sample of a number with its own features and those of an annex."""
    one = sample(number)
    return replace(one, features={**one.features, **more(number).features})


def add(store: Store, shard: str, numbers: Iterable[int], **options: Any) -> Store:
    """Write a shard of the annex of a store."""
    annex = store.annex(MORE, **options)
    write(annex, shard, map(more, numbers))
    return annex


def forget(store: Store, *records: str) -> None:
    """Drop what records name on purpose: each from the ledger first."""
    for record in records:
        store.backend.remove(f"ledger/{record}")
        store.backend.remove(record)


def same(mine: Sample, theirs: Sample) -> bool:
    """Equal to the last bit."""
    arrays = ("ids_T", "response_T", "position_T", "rope_T")
    return (
        (mine.key, mine.spans, mine.meta) == (theirs.key, theirs.spans, theirs.meta)
        and all(
            np.array_equal(getattr(mine, name), getattr(theirs, name))
            for name in arrays
        )
        and set(mine.features) == set(theirs.features)
        and all(
            np.array_equal(rows, theirs.features[feature])
            for feature, rows in mine.features.items()
        )
    )
