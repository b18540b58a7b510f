"""Which arrays a shard has, and how a sample becomes their rows and returns from them.

Every shard has `tokens`; every captured feature has one array, or three when it is kept in
8 bits. Encodings of a feature:

- `raw`: as captured, bit for bit. The default: it is read by mapping the file.
- `int8`: half the bytes and not the same bits: one scale per token times one per channel of the
  sample. With a scale per token alone, a few massive channels would leave the others no precision.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmdistill.stores.arrays import ArraySpec, file_bytes
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.manifest import GROUP, INDEX, Files
from vlmdistill.stores.schema import (
    CHUNK_FILE,
    Array,
    Feature,
    Provenance,
    Rows,
    Sample,
    TargetInfo,
)

STORAGE = {"bfloat16": "uint16", "float16": "float16", "float32": "float32"}
ENCODINGS = ("raw", "int8")
TOKENS = ArraySpec(
    "tokens",
    "text",
    "int32",
    4,
    attributes=(("columns", "ids,position,rope,response"),),
)
MOST_ROPE = 1 << 24  # beyond, positions in float32 are not distinct
TOKEN_SCALE, CHANNEL_SCALE = "token_scale", "channel_scale"


@dataclass(frozen=True)
class Layout:
    """The arrays of every shard of a store."""

    features: tuple[Feature, ...]
    dtype: str
    width: int
    vocabulary: int
    encoding: Mapping[str, str]  # feature name -> raw | int8; raw when not named

    @classmethod
    def of(
        cls, provenance: Provenance, info: TargetInfo, encoding: Mapping[str, str]
    ) -> "Layout":
        """From what a store declares; StoreError where that makes no sense."""
        if provenance.dtype not in STORAGE:
            raise StoreError(
                f"dtype '{provenance.dtype}' cannot be stored: use one of {', '.join(STORAGE)}"
            )
        for name, value in encoding.items():
            if value not in ENCODINGS:
                what = f"{name} has the encoding '{value}', which this version does not read or write"
                raise StoreError(
                    f"{what}: it knows {', '.join(ENCODINGS)}. Capture the features again"
                )
            if name not in provenance.features:
                raise StoreError(
                    f"an encoding is given for {name}, which is not among the captured features"
                )
        features = tuple(Feature.parse(name) for name in provenance.features)
        if len(set(features)) < len(features):
            raise StoreError("a feature is named twice")
        return cls(
            features,
            provenance.dtype,
            info.hidden_size,
            info.vocab_size,
            dict(encoding),
        )

    @property
    def storage(self) -> str:
        """The numpy dtype that a feature is read in: bfloat16 as the bits of uint16."""
        return STORAGE[self.dtype]

    @functools.cached_property
    def parts(self) -> Mapping[Feature, tuple[ArraySpec, ...]]:
        """The arrays that together hold each feature."""
        return {feature: self._specs(feature) for feature in self.features}

    def _specs(self, feature: Feature) -> tuple[ArraySpec, ...]:
        name, encoding = feature.name, self.encoding.get(feature.name, "raw")
        about = (("dtype", self.dtype), ("encoding", encoding))
        if encoding != "int8":
            return (ArraySpec(name, feature.where, self.storage, self.width, about),)
        scale = (("dtype", "float32"),)
        return (
            ArraySpec(name, feature.where, "int8", self.width, about),
            ArraySpec(f"{name}.{TOKEN_SCALE}", feature.where, "float32", 1, scale),
            ArraySpec(
                f"{name}.{CHANNEL_SCALE}", "sample", "float32", self.width, scale
            ),
        )

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """Every array, `tokens` first."""
        return (
            TOKENS,
            *(part for feature in self.features for part in self.parts[feature]),
        )

    def misfit(self, rows: Mapping[Rows, int], files: Files) -> str | None:
        """Why a shard of so many rows cannot have these files; None when it can."""
        names = {INDEX, GROUP}
        for spec in self.arrays:
            count, name = rows[spec.rows], f"{spec.name}/{CHUNK_FILE}"
            names |= (
                {f"{spec.name}/{GROUP}", name} if count else {f"{spec.name}/{GROUP}"}
            )
            size = files[name][0] if name in files else 0
            if count and size != file_bytes(spec, count):
                return f"{name} has {size} bytes, {count} rows have {file_bytes(spec, count)}"
        odd = sorted(names ^ files.keys())
        return (
            f"{odd[0]} is {'missing' if odd[0] in names else 'no file of this store'}"
            if odd
            else None
        )

    def check(self, sample: Sample) -> None:
        """Refuse a sample that does not fit, naming the sample and the field."""
        tokens = len(sample.ids_T)
        for name in ("response_T", "position_T", "rope_T"):
            if len(getattr(sample, name)) != tokens:
                found = len(getattr(sample, name))
                raise StoreError(
                    f"sample {sample.key}: {name} has {found} rows, ids_T has {tokens}"
                )
        if odd := [name for name in sample.features if not isinstance(name, Feature)]:
            raise StoreError(
                f"sample {sample.key}: make a Feature of {odd[0]!r}: Feature.parse({odd[0]!r})"
            )
        if set(sample.features) != set(self.features):
            have = (
                ", ".join(sorted(feature.name for feature in sample.features))
                or "no features"
            )
            want = ", ".join(sorted(feature.name for feature in self.features))
            raise StoreError(f"sample {sample.key} has {have}; this store holds {want}")
        for feature, rows in sample.features.items():
            shape = (sample.rows(feature.where), self.width)
            if rows.shape != shape or rows.dtype != self.storage:
                raise StoreError(
                    f"sample {sample.key}: {feature.name} is {rows.dtype}{list(rows.shape)}, "
                    f"not {self.storage}{list(shape)}"
                )
        spans = [(span.start, span.length) for span in sample.spans]
        why = self.unknown(sample.ids_T, sample.rope_T) or untiled(
            sample.position_T, spans
        )
        if why:
            raise StoreError(f"sample {sample.key}: {why}")

    def unknown(self, ids_T: Array, rope_T: Array) -> str | None:
        """Why a target cannot have such tokens: an id outside its vocabulary, an absurd rotary position."""
        for what, values_T, end in (
            ("id", ids_T, self.vocabulary),
            ("rotary position", rope_T, MOST_ROPE),
        ):
            odd = values_T[(values_T < 0) | (values_T >= end)]
            if len(odd):
                return f"a token has the {what} {odd[0]}, not one of 0 to {end - 1}"
        return None

    def split(
        self, sample: Sample, losses: dict[str, list[float]]
    ) -> Iterator[tuple[ArraySpec, Array]]:
        """The rows of each array for one sample.

        `losses` gains, per 8-bit feature, the summed squared error and the squares it compares to.
        """
        columns = (sample.ids_T, sample.position_T, sample.rope_T, sample.response_T)
        yield (
            TOKENS,
            np.stack([np.asarray(column, np.int32) for column in columns], axis=1),
        )
        for feature in self.features:
            rows = sample.features[feature]
            if self.encoding.get(feature.name) != "int8":
                yield self.parts[feature][0], rows
                continue
            kept = quantize(rows, self.dtype)
            yield from zip(self.parts[feature], kept, strict=True)
            true_ND, back_ND = (
                widen(rows, self.dtype),
                widen(dequantize(kept, self.dtype), self.dtype),
            )
            sums = losses.setdefault(feature.name, [0.0, 0.0])
            sums[0] += float(np.square(true_ND - back_ND, dtype=np.float64).sum())
            sums[1] += float(np.square(true_ND, dtype=np.float64).sum())


def untiled(position_T: Array, spans: Sequence[tuple[int, int]]) -> str | None:
    """Why text tokens and spans (start, length) of visual tokens do not fill a sequence, None when they do.

    Each in its own order, the two together must take every position from 0 on, each once.
    """
    start_M, length_M = np.array(spans, np.int64).reshape(-1, 2).T
    if (
        (np.diff(position_T) < 1).any()
        or (np.diff(start_M) < 1).any()
        or (length_M < 1).any()
    ):
        return "its text tokens or visual spans are not in the order of their positions, or a span is empty"
    starts = np.concatenate([np.asarray(position_T, np.int64), start_M])
    lengths = np.concatenate([np.ones(len(position_T), np.int64), length_M])
    order = np.argsort(starts, kind="stable")
    free = np.cumsum(lengths[order]) - lengths[order]  # where the next must start
    wrong = np.flatnonzero(starts[order] != free)
    if not len(wrong):
        return None
    at, want = int(starts[order][wrong[0]]), int(free[wrong[0]])
    what = f"position {want} is empty" if at > want else f"position {at} is taken twice"
    return f"its text tokens and visual spans do not fill the sequence: {what}"


def rows_of(rows: Rows, counts: Mapping[str, Any]) -> int:
    """How many rows a sample has in an array of this kind; `counts` is its line in the index."""
    if rows == "sample":
        return 1
    return len(counts["spans"]) if rows == "span" else int(counts[f"{rows}_tokens"])


def widen(rows: Array, dtype: str) -> Array:
    """Storage dtype -> float32."""
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


def narrow(rows: Array, dtype: str) -> Array:
    """Float32 -> storage dtype, to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = rows.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rows.astype(STORAGE[dtype])


def quantize(rows_ND: Array, dtype: str) -> tuple[Array, Array, Array]:
    """Int8 [n, D], scale of each token [n, 1], scale of each channel [1, D]."""
    x_ND = widen(rows_ND, dtype)
    if not np.isfinite(x_ND).all():
        raise StoreError(
            "a feature holds infinities or NaN, which 8 bits cannot keep: use the raw encoding"
        )
    # A power mean below the plain one: a single massive token must not set a channel's scale.
    scale_D = (
        np.square(np.sqrt(np.abs(x_ND)).mean(axis=0))
        if len(x_ND)
        else np.ones(x_ND.shape[1])
    )
    scale_D = np.maximum(scale_D, max(float(scale_D.max()) * 1e-6, 1e-30)).astype(
        np.float32
    )
    y_ND = x_ND / scale_D
    scale_N1 = np.abs(y_ND).max(axis=1, keepdims=True, initial=0) / 127
    scale_N1[scale_N1 == 0] = 1
    return (
        np.rint(y_ND / scale_N1).astype(np.int8),
        scale_N1.astype(np.float32),
        scale_D[None],
    )


def dequantize(parts: tuple[Array, ...], dtype: str) -> Array:
    """What `quantize` kept, back in the storage dtype."""
    q_ND, scale_N1, scale_1D = parts
    return narrow(q_ND.astype(np.float32) * scale_N1 * scale_1D, dtype)
