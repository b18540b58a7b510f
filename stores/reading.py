"""Samples, read row by row from the arrays of shards; each array is compared with its checksum.

A sample is given as its line of the index. Every call raises StoreError, with shard, array and sample, when
data is damaged or missing.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vlmdistill.stores.arrays import ArraySpec, byte_range, read_rows
from vlmdistill.stores.backends.backend import Backend
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import XXH3
from vlmdistill.stores.layout import TOKENS, Layout, dequantize, rows_of
from vlmdistill.stores.manifest import KINDS, Commit, damaged
from vlmdistill.stores.schema import Array, Feature, PackedSamples, Rows, Sample, Span

Line = Mapping[str, Any]  # a row of the index


class ShardRows:
    """The arrays of all shards of a store."""

    def __init__(
        self, backend: Backend, layout: Layout, commit: Callable[[str], Commit]
    ) -> None:
        self.url = backend.url
        self._backend, self._layout, self._commit = backend, layout, commit

    def span(self, kind: Rows, row: Line) -> range:
        """The rows of one kind that a sample has, as the index says."""
        start, count, total = (
            row[f"{kind}_row"],
            rows_of(kind, row),
            self._commit(row["shard"]).rows[kind],
        )
        if start + count > total:  # neither is negative, see `check_values`
            where = f"{self._backend.url}: the index of sample {row['key']}"
            raise damaged(
                where,
                f"it names {kind} rows up to {start + count}, and there are {total}",
            )
        return range(start, start + count)

    def read(self, spec: ArraySpec, row: Line, out: Array | None = None) -> Array:
        """The rows of one array, as stored, in `out` if given."""
        backend, shard, span = (
            self._backend,
            self._commit(row["shard"]).named,
            self.span(spec.rows, row),
        )
        try:
            rows, checksum = read_rows(backend, shard, spec, span, out)
            if checksum != row[XXH3 + spec.name] and backend.forget(
                *byte_range(shard, spec, span)
            ):
                rows, checksum = read_rows(backend, shard, spec, span, out)
        except FileNotFoundError as error:
            raise damaged(self._where(spec, row), "it is missing") from error
        except OSError as error:
            raise StoreError(
                f"{self._where(spec, row)} cannot be read: {error}"
            ) from error
        if checksum != row[XXH3 + spec.name]:
            raise damaged(self._where(spec, row))
        return rows

    def tokens(self, row: Line, out: Array | None = None) -> Array:
        """The tokens [T, 4], in `out` if given; StoreError also when no target can have them."""
        tokens_T4 = self.read(TOKENS, row, out)
        if why := self._layout.unknown(tokens_T4[:, 0], tokens_T4[:, 2]):
            raise damaged(self._where(TOKENS, row), why)
        return tokens_T4

    def feature(self, feature: Feature, row: Line, out: Array | None = None) -> Array:
        """The rows [n, D] of a feature, in `out` if given."""
        specs = self._layout.parts[feature]
        if len(specs) == 1:
            return self.read(specs[0], row, out)
        rows = dequantize(
            tuple(self.read(spec, row) for spec in specs), self._layout.dtype
        )
        if out is None:
            return rows
        out[:] = rows
        return out

    def prefetch(self, row: Line, feature: Feature | None = None) -> None:
        """Let the disk start on the arrays of a feature, or the tokens if None."""
        with contextlib.suppress(OSError):  # reading reports what is missing
            for spec in self._layout.parts[feature] if feature else (TOKENS,):
                if span := self.span(spec.rows, row):
                    self._backend.prefetch(
                        *byte_range(self._commit(row["shard"]).named, spec, span)
                    )

    def buffer(
        self, feature: Feature, rows: int, buffers: dict[Feature, Array]
    ) -> Array:
        """Room for the rows [rows, D] of a feature, in its buffer (uint8), replaced when too small."""
        size = rows * self._layout.width * np.dtype(self._layout.storage).itemsize
        if feature not in buffers or len(buffers[feature]) < size:
            buffers[feature] = np.empty(size + size // 4, np.uint8)
        return (
            buffers[feature][:size]
            .view(self._layout.storage)
            .reshape(rows, self._layout.width)
        )

    def _where(self, spec: ArraySpec, row: Line) -> str:
        return f"{self._backend.url}/{self._commit(row['shard']).named}: {spec.name} of sample {row['key']}"


class SampleReader:
    """Samples with features that may lie in several stores.

    `held` finds the shards that have a feature of a sample, and its line in their index; None if none have.
    """

    def __init__(
        self,
        tokens: ShardRows,
        held: Callable[[Feature, Line], tuple[ShardRows, Line] | None],
    ) -> None:
        self._tokens, self._held = tokens, held

    def one(
        self, row: Line, features: Collection[Feature], meta: Collection[str]
    ) -> Sample:
        """A sample with these features, and with the columns `meta` of its line."""
        self._prefetch(row, features)
        ids_T, position_T, rope_T, response_T = np.ascontiguousarray(
            self._tokens.tokens(row).T
        )
        return Sample(
            key=row["key"],
            ids_T=ids_T,
            response_T=response_T.astype(np.bool_),
            position_T=position_T,
            rope_T=rope_T,
            spans=tuple(Span(span["start"], span["length"]) for span in row["spans"]),
            features={feature: self._feature(feature, row) for feature in features},
            meta={
                name: value
                for name, value in row.items()
                if value is not None and (name in meta or (name == "dataset" and value))
            },
        )

    def batch(
        self,
        rows: Sequence[Line],
        features: Sequence[Feature],
        buffers: dict[Feature, Array],
    ) -> PackedSamples:
        """Several samples, one after the other; their features are in `buffers`, replaced when too small."""
        ends = {
            where: [0, *np.cumsum([rows_of(where, row) for row in rows])]
            for where in KINDS
        }
        for row in rows:
            for where in KINDS:
                self._tokens.span(where, row)  # before memory is allocated for it
            self._prefetch(row, features)
        tokens_T4 = np.empty((ends["text"][-1], TOKENS.width), TOKENS.dtype)
        blocks = {
            feature: self._tokens.buffer(feature, ends[feature.where][-1], buffers)
            for feature in features
        }
        spans = list[tuple[int, int, int]]()
        for at, row in enumerate(rows):
            self._tokens.tokens(row, tokens_T4[ends["text"][at] : ends["text"][at + 1]])
            spans += [(at, span["start"], span["length"]) for span in row["spans"]]
            for feature, block in blocks.items():
                self._feature(
                    feature,
                    row,
                    block[ends[feature.where][at] : ends[feature.where][at + 1]],
                )
        return PackedSamples(
            keys=tuple(row["key"] for row in rows),
            text_tokens_B=np.diff(ends["text"]),
            tokens_T4=tokens_T4,
            span_M3=np.array(spans, np.int64).reshape(-1, 3),
            features=blocks,
        )

    def _feature(self, feature: Feature, row: Line, out: Array | None = None) -> Array:
        if (held := self._held(feature, row)) is None:
            what = (
                f"sample {row['key']} has no {feature.name} in {self._tokens.url} yet"
            )
            raise StoreError(
                f"{what}: run the `vlmdistill features` that adds it again"
            )
        shards, line = held
        return shards.feature(feature, line, out)

    def _prefetch(self, row: Line, features: Collection[Feature]) -> None:
        """Let the disk start on all arrays of a sample at once, in the order of reading."""
        self._tokens.prefetch(row)
        for feature in features:
            if held := self._held(feature, row):
                shards, line = held
                shards.prefetch(line, feature)
