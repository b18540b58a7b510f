"""The search of the campaign on deletion finds a mark in files of all kinds."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipelines.traffic.marks import found, marks
from vlmdistill.pipelines.targets.target_model import TargetModel

TABLES = ("parquet", "arrow")
STREAMS = ("gzip", "bz2", "zstd", "lz4")


def packed(text: str, ids: list[int], kind: str) -> bytes:
    """A text and tokens in a file of some kind."""
    if kind in TABLES:
        return table(text, ids, kind)
    plain = json.dumps({"turns": [text], "ids": ids}).encode()
    if kind == "zip":
        archived = io.BytesIO()
        with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("turns", plain)
        return archived.getvalue()
    if kind in STREAMS:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, kind) as stream:
            stream.write(plain)
        return b"before" + bytes(sink.getvalue())
    return plain


def table(text: str, ids: list[int], kind: str) -> bytes:
    """The same in a table, whose columns are lists."""
    columns = pa.table({"turns": [[{"text": text}]], "ids": [ids]})
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(columns, sink, compression="zstd")
    else:
        with pa.ipc.new_file(sink, columns.schema) as writer:
            writer.write_table(columns)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("kind", ["json", "zip", *TABLES, *STREAMS])
def test_texts_and_tokens_are_found(
    tmp_path: Path, encoder: TargetModel, kind: str
) -> None:
    sought = marks(encoder.tokenizer.encode)
    text = sought["question"].decode()
    ids = np.frombuffer(sought["question as tokens"], np.int32).tolist()
    (tmp_path / "text").write_bytes(packed(text, [], kind))
    (tmp_path / "ids").write_bytes(packed("", ids, kind))
    (tmp_path / "others").write_bytes(packed(text[1:], ids[1:], kind))
    assert found(tmp_path, sought.values()) == ["ids", "text"]


def test_a_text_is_found_in_a_table_without_its_end(
    tmp_path: Path, encoder: TargetModel
) -> None:
    sought = marks(encoder.tokenizer.encode)
    content = packed(sought["question"].decode(), [], "parquet")
    (tmp_path / "cut").write_bytes(content[:-8])
    assert found(tmp_path, sought.values()) == ["cut"]
