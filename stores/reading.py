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
        self._backend = backend
        self._layout = layout
        self._commit = commit  # the record of a shard, by name

    def span(self, kind: Rows, line: Line) -> range:
        """The rows of one kind that a sample has, as the index says."""
        start = line[f"{kind}_row"]
        end = start + rows_of(kind, line)  # neither is negative, see `check_values`
        total = self._commit(line["shard"]).rows[kind]
        if end > total:
            raise damaged(
                f"{self._backend.url}: the index of sample {line['key']}",
                f"it names {kind} rows up to {end}, and there are {total}",
            )
        return range(start, end)

    def read(self, spec: ArraySpec, line: Line, out: Array | None = None) -> Array:
        """The rows of one array, as stored, in `out` if given."""
        folder = self._commit(line["shard"]).path
        span = self.span(spec.rows, line)
        expected = line[XXH3 + spec.name]
        try:
            rows, checksum = read_rows(self._backend, folder, spec, span, out)
            if checksum != expected:
                # A cached copy may be to blame: read the range itself once more.
                cached = byte_range(folder, spec, span)
                if self._backend.forget(*cached):
                    rows, checksum = read_rows(self._backend, folder, spec, span, out)
        except FileNotFoundError as error:
            raise damaged(self._place(spec, line), "it is missing") from error
        except OSError as error:
            place = self._place(spec, line)
            raise StoreError(f"{place} cannot be read: {error}") from error
        if checksum != expected:
            raise damaged(self._place(spec, line))
        return rows

    def tokens(self, line: Line, out: Array | None = None) -> Array:
        """The tokens [T, 4], in `out` if given; StoreError also when no target can have them."""
        tokens_T4 = self.read(TOKENS, line, out)
        ids_T = tokens_T4[:, 0]
        rope_T = tokens_T4[:, 2]
        impossible = self._layout.impossible_tokens(ids_T, rope_T)
        if impossible:
            raise damaged(self._place(TOKENS, line), impossible)
        return tokens_T4

    def feature(self, feature: Feature, line: Line, out: Array | None = None) -> Array:
        """The rows [n, D] of a feature, in `out` if given."""
        specs = self._layout.arrays_of[feature]
        if len(specs) == 1:
            return self.read(specs[0], line, out)
        quantized = tuple(self.read(spec, line) for spec in specs)
        rows_ND = dequantize(quantized, self._layout.dtype)
        if out is None:
            return rows_ND
        out[:] = rows_ND
        return out

    def prefetch(self, line: Line, feature: Feature | None = None) -> None:
        """Let the disk start on the arrays of a feature, or the tokens if None."""
        specs = self._layout.arrays_of[feature] if feature else (TOKENS,)
        with contextlib.suppress(OSError):  # reading reports missing files
            for spec in specs:
                span = self.span(spec.rows, line)
                if span:
                    folder = self._commit(line["shard"]).path
                    self._backend.prefetch(*byte_range(folder, spec, span))

    def buffer(
        self, feature: Feature, rows: int, buffers: dict[Feature, Array]
    ) -> Array:
        """Room for the rows [rows, D] of a feature, in its buffer (uint8), replaced when too small."""
        width = self._layout.width
        storage = self._layout.storage
        size = rows * width * np.dtype(storage).itemsize
        if feature not in buffers or len(buffers[feature]) < size:
            buffers[feature] = np.empty(size + size // 4, np.uint8)
        return buffers[feature][:size].view(storage).reshape(rows, width)

    def _place(self, spec: ArraySpec, line: Line) -> str:
        folder = self._commit(line["shard"]).path
        return f"{self._backend.url}/{folder}: {spec.name} of sample {line['key']}"


class SampleReader:
    """Samples with features that may lie in several stores.

    `find_feature` finds the shards that have a feature of a sample, and its line in their index; None if no
    store has it yet.
    """

    def __init__(
        self,
        tokens: ShardRows,
        find_feature: Callable[[Feature, Line], tuple[ShardRows, Line] | None],
    ) -> None:
        self._tokens = tokens
        self._find_feature = find_feature

    def one(
        self, line: Line, features: Collection[Feature], meta: Collection[str]
    ) -> Sample:
        """A sample with these features, and with the columns `meta` of its line."""
        self._prefetch(line, features)
        tokens_4T = np.ascontiguousarray(self._tokens.tokens(line).T)
        ids_T, position_T, rope_T, response_T = tokens_4T
        spans = [Span(span["start"], span["length"]) for span in line["spans"]]
        values = {"dataset": line["dataset"]} if line["dataset"] else {}
        # A merged index may lack a column: it is read from a cache, without records.
        values |= {name: line[name] for name in meta if line.get(name) is not None}
        return Sample(
            key=line["key"],
            ids_T=ids_T,
            response_T=response_T.astype(np.bool_),
            position_T=position_T,
            rope_T=rope_T,
            spans=tuple(spans),
            features={feature: self._feature(feature, line) for feature in features},
            meta=values,
        )

    def batch(
        self,
        lines: Sequence[Line],
        features: Sequence[Feature],
        buffers: dict[Feature, Array],
    ) -> PackedSamples:
        """Several samples, one after the other; their features are in `buffers`, replaced when too small."""
        # Where the rows of each sample begin and end.
        bounds: dict[Rows, list[int]] = {}
        for kind in KINDS:
            counts = [rows_of(kind, line) for line in lines]
            bounds[kind] = [0, *np.cumsum(counts)]
        # Spans are checked before memory is allocated for them.
        for line in lines:
            for kind in KINDS:
                self._tokens.span(kind, line)
            self._prefetch(line, features)
        tokens_T4 = np.empty((bounds["text"][-1], TOKENS.width), TOKENS.dtype)
        blocks = {
            feature: self._tokens.buffer(feature, bounds[feature.where][-1], buffers)
            for feature in features
        }
        spans = list[tuple[int, int, int]]()
        for number, line in enumerate(lines):
            start, end = bounds["text"][number : number + 2]
            self._tokens.tokens(line, tokens_T4[start:end])
            for span in line["spans"]:
                spans.append((number, span["start"], span["length"]))
            for feature, block in blocks.items():
                start, end = bounds[feature.where][number : number + 2]
                self._feature(feature, line, block[start:end])
        return PackedSamples(
            keys=tuple(line["key"] for line in lines),
            text_tokens_B=np.diff(bounds["text"]),
            tokens_T4=tokens_T4,
            span_M3=np.array(spans, np.int64).reshape(-1, 3),
            features=blocks,
        )

    def _feature(self, feature: Feature, line: Line, out: Array | None = None) -> Array:
        source = self._find_feature(feature, line)
        if source is None:
            raise StoreError(
                f"sample {line['key']} has no {feature.name} in {self._tokens.url} yet: run the "
                "`vlmdistill features` that adds it again"
            )
        shards, line_there = source
        return shards.feature(feature, line_there, out)

    def _prefetch(self, line: Line, features: Collection[Feature]) -> None:
        """Let the disk start on all arrays of a sample at once, in the order of reading."""
        self._tokens.prefetch(line)
        for feature in features:
            source = self._find_feature(feature, line)
            if source:
                shards, line_there = source
                shards.prefetch(line_there, feature)
