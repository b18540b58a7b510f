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
TOKEN_COLUMNS = "ids,position,rope,response"
TOKENS = ArraySpec(
    "tokens", "text", "int32", width=4, attributes=(("columns", TOKEN_COLUMNS),)
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
        """The layout that a store declares; StoreError where that makes no sense."""
        if provenance.dtype not in STORAGE:
            raise StoreError(
                f"dtype '{provenance.dtype}' cannot be stored: use one of {', '.join(STORAGE)}"
            )
        for name, value in encoding.items():
            if value not in ENCODINGS:
                raise StoreError(
                    f"{name} has the encoding '{value}', which this version does not read or write: it "
                    f"knows {', '.join(ENCODINGS)}. Capture the features again"
                )
            if name not in provenance.features:
                raise StoreError(
                    f"an encoding is given for {name}, which is not among the captured features"
                )
        features = tuple(Feature.parse(name) for name in provenance.features)
        if len(set(features)) < len(features):
            raise StoreError("a feature is named twice")
        return cls(
            features=features,
            dtype=provenance.dtype,
            width=info.hidden_size,
            vocabulary=info.vocab_size,
            encoding=dict(encoding),
        )

    @property
    def storage(self) -> str:
        """The numpy dtype that a feature is read in: bfloat16 as the bits of uint16."""
        return STORAGE[self.dtype]

    @functools.cached_property
    def arrays_of(self) -> Mapping[Feature, tuple[ArraySpec, ...]]:
        """The arrays that together hold each feature."""
        return {feature: self._specs(feature) for feature in self.features}

    def _specs(self, feature: Feature) -> tuple[ArraySpec, ...]:
        name = feature.name
        encoding = self.encoding.get(name, "raw")
        attributes = (("dtype", self.dtype), ("encoding", encoding))
        if encoding == "raw":
            return (
                ArraySpec(name, feature.where, self.storage, self.width, attributes),
            )
        quantized = ArraySpec(name, feature.where, "int8", self.width, attributes)
        # One scale per token times one per channel of the sample.
        of_scale = (("dtype", "float32"),)
        token_scale = ArraySpec(
            f"{name}.{TOKEN_SCALE}", feature.where, "float32", 1, of_scale
        )
        channel_scale = ArraySpec(
            f"{name}.{CHANNEL_SCALE}", "sample", "float32", self.width, of_scale
        )
        return quantized, token_scale, channel_scale

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """Every array, `tokens` first."""
        specs = [TOKENS]
        for feature in self.features:
            specs += self.arrays_of[feature]
        return tuple(specs)

    def misfit(self, rows: Mapping[Rows, int], files: Files) -> str | None:
        """Why a shard of so many rows cannot have these files; None when it can."""
        expected = {INDEX, GROUP}
        for spec in self.arrays:
            expected.add(f"{spec.name}/{GROUP}")
            count = rows[spec.rows]
            if not count:
                continue
            chunks = f"{spec.name}/{CHUNK_FILE}"
            expected.add(chunks)
            size = files[chunks][0] if chunks in files else 0
            right_size = file_bytes(spec, count)
            if size != right_size:
                return f"{chunks} has {size} bytes, {count} rows have {right_size}"
        differing = sorted(expected ^ files.keys())
        if not differing:
            return None
        missing = differing[0] in expected
        return f"{differing[0]} is {'missing' if missing else 'no file of this store'}"

    def check(self, sample: Sample) -> None:
        """Refuse a sample that does not fit, naming the sample and the field."""
        tokens = len(sample.ids_T)
        for name in ("response_T", "position_T", "rope_T"):
            count = len(getattr(sample, name))
            if count != tokens:
                raise StoreError(
                    f"sample {sample.key}: {name} has {count} rows, ids_T has {tokens}"
                )
        self._check_features(sample)
        spans = [(span.start, span.length) for span in sample.spans]
        why = self.impossible_tokens(sample.ids_T, sample.rope_T)
        why = why or untiled(sample.position_T, spans)
        if why:
            raise StoreError(f"sample {sample.key}: {why}")

    def _check_features(self, sample: Sample) -> None:
        for name in sample.features:
            if not isinstance(name, Feature):
                raise StoreError(
                    f"sample {sample.key}: make a Feature of {name!r}: Feature.parse({name!r})"
                )
        if set(sample.features) != set(self.features):
            present = sorted(feature.name for feature in sample.features)
            wanted = sorted(feature.name for feature in self.features)
            raise StoreError(
                f"sample {sample.key} has {', '.join(present) or 'no features'}; this store holds "
                f"{', '.join(wanted)}"
            )
        for feature, rows in sample.features.items():
            shape = (sample.rows(feature.where), self.width)
            if rows.shape != shape or rows.dtype != self.storage:
                raise StoreError(
                    f"sample {sample.key}: {feature.name} is {rows.dtype}{list(rows.shape)}, "
                    f"not {self.storage}{list(shape)}"
                )

    def impossible_tokens(self, ids_T: Array, rope_T: Array) -> str | None:
        """Why a target cannot have such tokens: an id outside its vocabulary, an absurd rotary position."""
        outside = _outside(ids_T, self.vocabulary)
        if outside is not None:
            return (
                f"a token has the id {outside}, not one of 0 to {self.vocabulary - 1}"
            )
        outside = _outside(rope_T, MOST_ROPE)
        if outside is not None:
            return f"a token has the rotary position {outside}, not one of 0 to {MOST_ROPE - 1}"
        return None

    def split(
        self, sample: Sample, losses: dict[str, list[float]]
    ) -> Iterator[tuple[ArraySpec, Array]]:
        """The rows of each array for one sample.

        `losses` gains, per 8-bit feature, the summed squared error and the squares it compares to.
        """
        columns = (sample.ids_T, sample.position_T, sample.rope_T, sample.response_T)
        as_int32 = [np.asarray(column, np.int32) for column in columns]
        yield TOKENS, np.stack(as_int32, axis=1)
        for feature in self.features:
            rows_ND = sample.features[feature]
            specs = self.arrays_of[feature]
            if len(specs) == 1:
                yield specs[0], rows_ND
                continue
            quantized = quantize(rows_ND, self.dtype)
            yield from zip(specs, quantized, strict=True)
            true_ND = widen(rows_ND, self.dtype)
            kept_ND = widen(dequantize(quantized, self.dtype), self.dtype)
            error = np.square(true_ND - kept_ND, dtype=np.float64).sum()
            squares = np.square(true_ND, dtype=np.float64).sum()
            losses[feature.name] = [float(error), float(squares)]


def _outside(values_T: Array, end: int) -> int | None:
    """The first value that is not in 0 to `end` - 1, if there is one."""
    wrong = values_T[(values_T < 0) | (values_T >= end)]
    return int(wrong[0]) if len(wrong) else None


def untiled(position_T: Array, spans: Sequence[tuple[int, int]]) -> str | None:
    """Why text tokens and spans (start, length) of visual tokens do not fill a sequence, None when they do.

    Each in its own order, the two together must take every position from 0 on, each once.
    """
    start_M, length_M = np.array(spans, np.int64).reshape(-1, 2).T
    text_in_order = (np.diff(position_T) >= 1).all()
    spans_in_order = (np.diff(start_M) >= 1).all() and (length_M >= 1).all()
    if not (text_in_order and spans_in_order):
        return "its text tokens or visual spans are not in the order of their positions, or a span is empty"
    # A text token is a run of one position; sorted by start, each run must begin where the last one ends.
    start_R = np.concatenate([np.asarray(position_T, np.int64), start_M])
    length_R = np.concatenate([np.ones(len(position_T), np.int64), length_M])
    order_R = np.argsort(start_R, kind="stable")
    start_R, length_R = start_R[order_R], length_R[order_R]
    free_R = np.cumsum(length_R) - length_R
    wrong = np.flatnonzero(start_R != free_R)
    if not len(wrong):
        return None
    start, free = int(start_R[wrong[0]]), int(free_R[wrong[0]])
    problem = f"position {start} is taken twice"
    if start > free:
        problem = f"position {free} is empty"
    return f"its text tokens and visual spans do not fill the sequence: {problem}"


def rows_of(rows: Rows, counts: Mapping[str, Any]) -> int:
    """How many rows a sample has in an array of this kind; `counts` is its line in the index."""
    if rows == "sample":
        return 1
    if rows == "span":
        return len(counts["spans"])
    return int(counts[f"{rows}_tokens"])


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
    scale_D = _channel_scale(x_ND)
    y_ND = x_ND / scale_D
    scale_N1 = np.abs(y_ND).max(axis=1, keepdims=True, initial=0) / 127
    scale_N1[scale_N1 == 0] = 1
    q_ND = np.rint(y_ND / scale_N1).astype(np.int8)
    return q_ND, scale_N1.astype(np.float32), scale_D[None]


def _channel_scale(x_ND: Array) -> Array:
    """The scale [D] of each channel of a sample: its mean, of a power below 1, over the tokens.

    With the plain mean a single massive token would set the scale.
    """
    if not len(x_ND):
        return np.ones(x_ND.shape[1], np.float32)
    scale_D = np.square(np.sqrt(np.abs(x_ND)).mean(axis=0))
    least = max(float(scale_D.max()) * 1e-6, 1e-30)
    least_D: Array = np.maximum(scale_D, least).astype(np.float32)
    return least_D


def dequantize(quantized: tuple[Array, ...], dtype: str) -> Array:
    """The rows [n, D] that `quantize` was given, as 8 bits keep them, in the storage dtype."""
    q_ND, scale_N1, scale_1D = quantized
    return narrow(q_ND.astype(np.float32) * scale_N1 * scale_1D, dtype)
