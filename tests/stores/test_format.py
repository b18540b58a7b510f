"""The format as documented: stock zarr, pyarrow, polars and safetensors read a store without this code."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import safetensors.torch
import torch
import zarr

from tests.stores.samples import FEATURES, head, make, sample, write
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.layout import ENCODINGS
from vlmdistill.stores.loader.tensors import as_numpy, as_torch
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

BIG = 3  # a sample of more rows than a chunk


def fill(path: Path, encoding: str) -> None:
    store = make(path, encoding=dict.fromkeys(FEATURES, encoding))
    write(
        store,
        "u",
        (sample(number, tokens=700 if number == BIG else None) for number in range(6)),
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stock_readers_read_every_field_of_every_sample(
    tmp_path: Path, encoding: str
) -> None:
    fill(tmp_path, encoding)
    commit = json.loads((tmp_path / "commits/u.json").read_text())
    shard = tmp_path / "shards" / commit["folder"]
    for name, (size, checksum) in commit["files"].items():
        data = (shard / name).read_bytes()
        assert (len(data), blake3.blake3(data).hexdigest()) == (size, checksum)
    index = pl.read_ipc(shard / "index.arrow")
    assert (
        pa.ipc.open_file(shard / "index.arrow").read_all().num_rows == len(index) == 6
    )
    group: Any = zarr.open_group(shard, mode="r")
    for row in index.iter_rows(named=True):
        number = int(row["key"][1:])
        given = sample(number, tokens=700 if number == BIG else None)
        tokens = group["tokens"][row["text_row"] : row["text_row"] + row["text_tokens"]]
        assert np.array_equal(
            tokens,
            np.stack(
                [given.ids_T, given.position_T, given.rope_T, given.response_T], 1
            ),
        )
        assert [(span["start"], span["length"]) for span in row["spans"]] == [
            (span.start, span.length) for span in given.spans
        ]
        for feature, rows in given.features.items():
            start = row[f"{feature.where}_row"]
            stored = group[feature.name][start : start + len(rows)]
            if encoding == "int8":
                tokens = group[f"{feature.name}.token_scale"][start : start + len(rows)]
                channels = group[f"{feature.name}.channel_scale"][row["sample_row"]]
                back = stored.astype(np.float32) * tokens * channels
                true = (
                    torch.from_numpy(rows.view(np.int16))
                    .view(torch.bfloat16)
                    .float()
                    .numpy()
                )
                assert np.abs(back - true).max(initial=0) < 0.05 * np.abs(true).max(
                    initial=1
                )
            else:
                assert np.array_equal(stored, rows)


@pytest.mark.parametrize("url", ["{tmp}", "memory://{tmp}"])
def test_a_feature_opens_as_an_array_of_zarr_that_is_not_written_to(
    tmp_path: Path, url: str
) -> None:
    store = make(url.format(tmp=tmp_path), [range(6)], encoding={"embed.span": "int8"})
    array: Any = Store.open(store.path).array("hidden.text", "u0")
    for row in store.index.iter_rows(named=True):
        rows = array[row["text_row"] : row["text_row"] + row["text_tokens"]]
        assert np.array_equal(
            rows, store.read(row["key"]).features[Feature.parse("hidden.text")]
        )
    assert store.array("embed.span.channel_scale", "u0").shape == (6, 8)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(StoreError, match=r"hidden\.txt.*did you mean 'hidden\.text'"):
        store.array("hidden.txt", "u0")
    with pytest.raises(StoreError, match="u7"):
        store.array("hidden.text", "u7")


READS = """
import sys
from vlmdistill import open_store
from vlmdistill.stores.integrity.verify import verify
store = open_store(sys.argv[1])
store[next(iter(store))]
store.view(None)
assert not verify(sys.argv[1]).damage
heavy = {"ray", "deepspeed", "transformers", "torch"} & set(sys.modules)
assert not heavy, heavy
from vlmdistill.stores.loader.epoch import Epoch
next(Epoch(store, token_budget=100))
assert not {"ray", "deepspeed", "transformers"} & set(sys.modules)
"""


def test_reading_a_store_loads_no_library_that_trains_or_captures(
    tmp_path: Path,
) -> None:
    make(tmp_path, [range(3)])
    subprocess.run(
        [sys.executable, "-c", READS, str(tmp_path)],
        check=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_stock_reader_finds_the_frozen_head(tmp_path: Path) -> None:
    fill(tmp_path, "raw")
    record = json.loads((tmp_path / "store.json").read_text())
    tables = safetensors.torch.load_file(tmp_path / record["head"]["file"])
    assert torch.equal(tables["embed"], as_torch(head().embed_VD, "bfloat16"))


def test_a_seal_is_checked_on_the_bytes_alone(tmp_path: Path) -> None:
    fill(tmp_path, "int8")
    store = Store.open(tmp_path)
    store.write_stats("run", {"key": ["k0001"], "kept": [0.5]})
    filter_store(store, "some", expressions=["words > 1e-06"])
    records = [
        *tmp_path.glob("*.json"),
        *tmp_path.glob("[!s]*/*.json"),
        *tmp_path.glob("stats/*.json"),
    ]
    assert len(records) == 4
    for path in records:
        sealed = path.read_bytes()
        (member,) = re.findall(rb'"blake3":"[0-9a-f]{64}"', sealed)
        left = sealed.replace(member + b",", b"")
        assert (
            blake3.blake3(left).hexdigest()
            == json.loads(sealed)["blake3"]
            == member[10:-1].decode()
        )
    assert (
        b"1e-06" in (tmp_path / "store.json").read_bytes()
    )  # a number that other languages write otherwise


def test_hardly_a_row_is_padding(tmp_path: Path) -> None:
    fill(tmp_path, "raw")
    rows = sum(
        700 if number == BIG else len(sample(number).ids_T) for number in range(6)
    )
    file = next(tmp_path.glob("shards/*/hidden.text/c/0/0"))
    assert file.stat().st_size <= (rows + 3) * 8 * 2 + 3 * 16 + 4


def test_torch_shares_the_memory_of_what_is_read(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store, "u", [sample(1, tokens=8000)])
    rows = store.read("k0001").features[Feature.parse("hidden.text")]
    tensor = as_torch(rows, "bfloat16")
    assert (tensor.dtype, tensor.data_ptr()) == (torch.bfloat16, rows.ctypes.data)
    assert np.shares_memory(as_numpy(tensor), rows)
    tensor.zero_()  # private to this process: the file does not change
    again = store.read("k0001").features[Feature.parse("hidden.text")]
    assert np.array_equal(
        again, sample(1, tokens=8000).features[Feature.parse("hidden.text")]
    )
