"""The search of the campaign on deletion finds a mark in files of all kinds."""

import base64
import io
import json
import lzma
import tarfile
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
OTHERS = (
    "json",
    "zip",
    "zip of tar.bz2",
    "xz",
    "base64",
    "lines of base64",
    "data URL",
)


def packed(text: str, ids: list[int], kind: str) -> bytes:
    """A text and tokens in a file of some kind."""
    if kind in TABLES:
        return table(text, ids, kind)
    plain = json.dumps({"turns": [text], "ids": ids}).encode()
    if kind == "zip":
        return zipped(plain)
    if kind == "zip of tar.bz2":
        return zipped(tarred(plain))
    if kind == "xz":
        return b"before" + lzma.compress(plain)
    if kind == "base64":
        return b"before " + base64.urlsafe_b64encode(plain)
    if kind == "lines of base64":
        return base64.encodebytes(plain)
    if kind == "data URL":
        encoded = base64.b64encode(zipped(plain)).decode()
        url = json.dumps({"url": f"data:application/zip;base64,{encoded}"})
        return url.replace("/", "\\/").encode()
    if kind in STREAMS:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, kind) as stream:
            stream.write(plain)
        return b"before" + bytes(sink.getvalue())
    return plain


def zipped(content: bytes) -> bytes:
    """A ZIP archive with a file of this content."""
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("turns", content)
    return archived.getvalue()


def tarred(content: bytes) -> bytes:
    """The same as a compressed tar archive."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w:bz2") as archive:
        member = tarfile.TarInfo("turns")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return archived.getvalue()


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


@pytest.mark.parametrize("kind", [*OTHERS, *TABLES, *STREAMS])
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
