"""A store from a stranger is data: whatever it says, it ends in one line or a right answer."""

import json
import os
import re
import resource
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stores.samples import head, info, make, provenance, same, sample
from tests.thorough import count
from vlmdistill.stores.backends.opening import open_backend
from vlmdistill.stores.errors import StoreError, VlmdistillError
from vlmdistill.stores.index.arrow import read_arrow
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.manifest import (
    INDEX,
    Commit,
    Record,
    StoreRecord,
    ViewRecord,
    digest,
    read_record,
    seal,
    shard_folder,
)
from vlmdistill.stores.schema import Feature
from vlmdistill.stores.sharing.merge import merge, send
from vlmdistill.stores.store import Store
from vlmdistill.stores.summary import info as about
from vlmdistill.stores.views.expressions import where
from vlmdistill.stores.views.filters import filter_store

FEATURE = Feature.parse("hidden.text")
EXAMPLES = count(60, 500)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + EXAMPLES)]
MEMORY = 64 << 20  # bytes: the store has some kilobytes
ROOM = (
    1 << 30
)  # bytes of address space that threads and allocators may reserve in advance
Content = dict[str, Any]
RECORDS = ("store.json", "commits/u0.json", "views/v.json", "stats/r.json")


@contextmanager
def little_memory() -> Iterator[None]:
    """Python allocates little in here; Arrow and polars are refused more than `ROOM`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard)
    )
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert peak < MEMORY


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make(tmp_path_factory.mktemp("honest") / "s", [range(4)])
    filter_store(store, "v", expressions=["words > 1"])
    store.write_stats("r", {"key": ["k0001"], "kept": [0.5]})
    return Path(store.path)


@pytest.fixture
def evil(honest: Path, tmp_path: Path) -> Path:
    """A copy to be changed, deep enough that `..` stays in the test's folder."""
    return Path(shutil.copytree(honest, tmp_path / "a/b/c/d/s"))


def content(path: Path, name: str) -> Content:
    held: Content = json.loads((path / name).read_bytes())
    del held["blake3"]
    return held


def reseal(path: Path, name: str, change: Callable[[Content], Any]) -> None:
    """Change a record and seal it again; a shard's folder gets the name that its files make."""
    held = content(path, name)
    change(held)
    if (
        name == "commits/u0.json"
        and isinstance(held.get("files"), dict)
        and "folder" in held
    ):
        old, held["folder"] = held["folder"], shard_folder("u0", held["files"])
        if old != held["folder"] and (path / "shards" / str(old)).is_dir():
            (path / "shards" / old).rename(path / "shards" / held["folder"])
    (path / name).write_bytes(seal(held))


def replace(path: Path, file: str, data: bytes) -> None:
    """Put another file into the shard, with its right size and checksum."""
    shard = content(path, "commits/u0.json")["folder"]
    (path / "shards" / shard / file).write_bytes(data)
    reseal(
        path,
        "commits/u0.json",
        lambda held: held["files"].update({file: [len(data), digest(data)]}),
    )


def index(path: Path) -> pa.Table:
    shard = content(path, "commits/u0.json")["folder"]
    return pa.ipc.open_file((path / "shards" / shard / INDEX).read_bytes()).read_all()


def arrow(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def use(path: Path, into: Path) -> None:
    """Everything that a command does with a store."""
    store = Store.open(path)
    store.head()
    about(store)
    store.view("v")
    filter_store(store, "w", expressions=["words > 1"])
    for samples in Epoch(store, token_budget=64):
        rows = [sample(int(key[1:])).features[FEATURE] for key in samples.keys]
        assert np.array_equal(samples.features[FEATURE], np.concatenate(rows))
    send(path, into)


def refused(path: Path, tmp_path: Path) -> None:
    """Every use of the store ends in one line, writes nothing outside the target, and takes little memory."""
    before = {file for file in tmp_path.rglob("*") if not file.is_relative_to(path)}
    with little_memory():
        with pytest.raises(StoreError) as raised:
            use(path, tmp_path / "into")
        assert "\n" not in str(raised.value)
        with pytest.raises(StoreError):
            merge(tmp_path / "into", [path])
        assert verify(path).damage
    new = {
        file for file in tmp_path.rglob("*") if not file.is_relative_to(path)
    } - before
    assert all(file.is_relative_to(tmp_path / "into") for file in new)


def test_an_honest_store_passes(evil: Path, tmp_path: Path) -> None:
    use(evil, tmp_path / "into")
    assert not verify(evil).findings


PAYLOAD = "tokens/../../../../pwned.sh"
COMMITS: dict[str, Callable[[Content], Any]] = {
    "a file outside": lambda held: held["files"].update(
        {PAYLOAD: [3, digest(b"hi\n")]}
    ),
    "an absolute file": lambda held: held["files"].update(
        {"/tmp/pwned": [3, digest(b"hi\n")]}
    ),
    "a file of no array": lambda held: held["files"].update(
        {"layer9.text/zarr.json": [3, digest(b"hi\n")]}
    ),
    "no index": lambda held: held["files"].pop(INDEX),
    "no array": lambda held: held["files"].pop("tokens/c/0/0"),
    "a size": lambda held: held["files"]["tokens/c/0/0"].__setitem__(0, 1 << 60),
    "a negative size": lambda held: held["files"]["tokens/c/0/0"].__setitem__(0, -1),
    "another name": lambda held: held.update(shard="../../../escaped"),
    "a version that is a text": lambda held: held.update(schema="1"),
    "a version that is true": lambda held: held.update(schema=True),
    "version 0": lambda held: held.update(schema=0),
    "more rows": lambda held: held["rows"].update(text=1 << 40),
    "fewer samples": lambda held: held["rows"].update(sample=3),
    "no kind of rows": lambda held: held["rows"].pop("span"),
    "an unknown member": lambda held: held.update(more=1),
    "a column that is not there": lambda held: held.update(meta=["nothing"]),
    "files that are a list": lambda held: held.update(files=[]),
}
for member in ("files", "rows", "schema", "origin", "shard", "folder"):
    COMMITS[f"no {member}"] = methodcaller("pop", member)


@pytest.mark.parametrize("what", COMMITS)
def test_a_lying_record_of_a_shard_is_refused(
    evil: Path, tmp_path: Path, what: str
) -> None:
    (evil.parent / "pwned.sh").write_bytes(b"hi\n")
    reseal(evil, "commits/u0.json", COMMITS[what])
    refused(evil, tmp_path)
    assert (
        not list((tmp_path / "into").rglob("pwned*"))
        if (tmp_path / "into").exists()
        else True
    )


def test_a_shard_elsewhere_is_not_read(evil: Path, tmp_path: Path) -> None:
    held = content(evil, "commits/u0.json")
    (evil / "shards" / held["folder"]).rename(evil.parent / "outside")
    (evil / "commits/u0.json").write_bytes(seal({**held, "folder": "../../outside"}))
    refused(evil, tmp_path)


STORES: dict[str, Callable[[Content], Any]] = {
    "a head outside": lambda held: held["head"].update(file="../../../../etc/hostname"),
    "no head": lambda held: held.pop("head"),
    "no info": lambda held: held.pop("info"),
    "no provenance": lambda held: held.pop("provenance"),
    "another format": lambda held: held.update(format="other"),
    "a huge width": lambda held: held["info"].update(hidden_size=1 << 40),
    "another width": lambda held: held["info"].update(hidden_size=16),
    "a negative width": lambda held: held["info"].update(hidden_size=-8),
    "a width that is a text": lambda held: held["info"].update(hidden_size="8"),
    "encodings that are a list": lambda held: held.update(encoding=[]),
    "a feature with a path": lambda held: held["provenance"].update(
        features=["../../x.text"]
    ),
    "a feature twice": lambda held: held["provenance"].update(
        features=["hidden.text", "hidden.text"]
    ),
    "a later fact": lambda held: held["info"].update(news=1),
}


@pytest.mark.parametrize("what", STORES)
def test_a_lying_record_of_a_store_is_refused(
    evil: Path, tmp_path: Path, what: str
) -> None:
    reseal(evil, "store.json", STORES[what])
    with pytest.raises(VlmdistillError) as raised:
        use(evil, tmp_path / "into")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("name", RECORDS)
def test_deep_and_large_records_are_refused_before_they_are_parsed(
    evil: Path, name: str, depth: int
) -> None:
    kinds: dict[str, type[Record]] = {
        "store.json": StoreRecord,
        "commits/u0.json": Commit,
        "views/v.json": ViewRecord,
    }
    bare = b'{"more":' + b"[" * depth + b"]" * depth + b',"schema":2}'
    (evil / name).write_bytes(b'{"blake3":"' + digest(bare).encode() + b'",' + bare[1:])
    assert name in {finding.name for finding in verify(evil).damage}
    if name in kinds:
        with pytest.raises(StoreError, match="brackets"):
            read_record(open_backend(evil), name, kinds[name])
    (evil / name).write_bytes(b" " * (1 << 25))
    assert name in {finding.name for finding in verify(evil).damage}


def test_one_view_is_never_read_for_another(evil: Path) -> None:
    shutil.copy(evil / "views/v.json", evil / "views/w.json")
    with pytest.raises(StoreError, match=r"views/w\.json.*\bv\b"):
        Store.open(evil).view("w")
    shutil.copy(evil / "stats/r.json", evil / "stats/q.json")
    assert {"views/w.json", "stats/q.json"} <= {
        finding.name for finding in verify(evil).damage
    }


def test_a_folder_with_the_name_of_a_record_is_damage(evil: Path) -> None:
    (evil / "commits/u0.json").unlink()
    (evil / "commits/u0.json").mkdir()
    with pytest.raises(StoreError, match=r"commits/u0\.json"):
        assert Store.open(evil).index.is_empty()


FIFOS = [
    "store.json",
    "commits/u0.json",
    "commits/extra.json",
    "views/v.json",
    "stats/r.json",
    "cache/index.json",
    "ledger/commits/u0.json",
    "heads/*/head.safetensors",
    "shards/*/index.arrow",
    "shards/*/zarr.json",
    "shards/*/tokens/zarr.json",
    "shards/*/hidden.text/c/0/0",
    "staging/0123456789abcdef",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", FIFOS)
def test_a_fifo_hangs_nothing_and_is_named(
    evil: Path, tmp_path: Path, place: str
) -> None:
    path = next(evil.glob(place), evil / place)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    name = path.relative_to(evil).as_posix()
    assert "staging" in name or name in {
        finding.name for finding in verify(evil).damage
    }
    for act in (use, lambda path, _: collect(Store.open(path), grace=0)):
        try:
            act(evil, tmp_path / "into")
        except StoreError as error:
            one_line(error)


def _set(name: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        column = pa.array([value] * len(table), table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


INDEXES: dict[str, Callable[[pa.Table], bytes]] = {
    "compressed": lambda table: arrow(table, compression="zstd"),
    "no Arrow file": lambda table: b"ARROW1" * 9,
    "cut": lambda table: arrow(table)[:-20],
    "an offset of 2^62": lambda table: arrow(_set("text_row", 1 << 62)(table)),
    "a negative offset": lambda table: arrow(_set("sample_row", -1)(table)),
    "2^31 rows": lambda table: arrow(_set("text_tokens", (1 << 31) - 1)(table)),
    "other visual tokens": lambda table: arrow(_set("visual_tokens", 7)(table)),
    "no key": lambda table: arrow(_set("key", None)(table)),
    "no spans": lambda table: arrow(_set("spans", None)(table)),
    "spans without a length": lambda table: arrow(
        _set("spans", [{"start": 0, "length": None}])(table)
    ),
    "a lacking column": lambda table: arrow(table.drop_columns(["text_row"])),
    "a column of another type": lambda table: arrow(
        table.set_column(3, "visual_tokens", pa.array(["1"] * len(table)))
    ),
    "a column twice": lambda table: arrow(table.append_column("words", table["words"])),
    "a run of nulls in a list": lambda table: arrow(
        table.append_column(
            "n", pa.array([[None] * 100_000] * len(table), pa.list_(pa.null()))
        )
    ),
    "runs": lambda table: arrow(
        table.append_column("n", pa.RunEndEncodedArray.from_arrays([len(table)], [1]))
    ),
}


@pytest.mark.parametrize("what", INDEXES)
def test_a_lying_index_is_refused(evil: Path, tmp_path: Path, what: str) -> None:
    replace(evil, INDEX, INDEXES[what](index(evil)))
    refused(evil, tmp_path)


def test_a_compressed_index_takes_no_memory(evil: Path) -> None:
    zeros = pa.table(
        {
            "key": pa.array(["k"]),
            "n": pa.array([[0] * 10_000_000], pa.list_(pa.int64())),
        }
    )
    data = arrow(zeros, compression="zstd")
    (evil / "bomb").write_bytes(data)
    before = pa.total_allocated_bytes()
    del zeros
    with pytest.raises(StoreError, match="compressed"):
        read_arrow(open_backend(evil), "bomb", (len(data), digest(data)))
    assert pa.total_allocated_bytes() <= before


def test_columns_that_share_memory_are_refused(evil: Path) -> None:
    table = pa.table({name: pa.array(["k" * 1000] * 10) for name in ("key", "a")})
    data = bytearray(arrow(table))
    wide = struct.pack(
        "<q", 10_000
    )  # of the text of each column: in the node, in the buffer
    ends = [at for at in range(len(data) - 8) if data[at : at + 8] == wide]
    assert len(ends) > 1
    for at in ends:
        data[at : at + 8] = struct.pack("<q", 20_000)  # each reaches over the other
    (evil / "shared").write_bytes(data)
    with pytest.raises(StoreError, match="share memory"):
        read_arrow(open_backend(evil), "shared", (len(data), digest(bytes(data))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 90)
        + b'{"embed":{"dtype":"BF16","shape":[32,8],"data_offsets":[0,9999999]}}'.ljust(
            90
        ),
        struct.pack("<Q", 90)
        + b'{"embed":{"dtype":"BF16","shape":[-32,-8],"data_offsets":[0,512]}}'.ljust(
            90
        ),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
    ids=range(7),
)
def test_a_lying_head_is_refused(evil: Path, data: bytes) -> None:
    name = digest(data)
    (evil / "heads" / name[:16]).mkdir()
    (evil / "heads" / name[:16] / "head.safetensors").write_bytes(data)
    file = f"heads/{name[:16]}/head.safetensors"
    reseal(
        evil,
        "store.json",
        lambda held: held["head"].update(file=file, entry=[len(data), name]),
    )
    with pytest.raises(StoreError, match=file):
        Store.open(evil).head()


@pytest.mark.parametrize(
    "text",
    [
        "exists (select * from read_parquet('http://127.0.0.1:1/ping'))",
        "words in (select words from read_csv('/etc/passwd'))",
        "words in (table self)",
        "\"read_csv\"('/etc/passwd') > 1",
        "words > 1 -- more",
        "e'\\'' = dataset",
        "greatest() > 1",
        "lpad('x', 2000000000, 'y') = 'x'",
        "repeat('x', 2000000000) = 'x'",
        " or ".join(["words = 1"] * 3000),
        "(" * 5000 + "1" + ")" * 5000 + " > words",
        "not " * 5000 + "words > 1",
        "- " * 5000 + "words > 1",
        "[" * 20000,
        "'" * 19999,
        "words > \x00",
    ],
    ids=range(16),
)
def test_a_filter_opens_no_file_and_ends_in_one_line(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StoreError) as raised:
        where(text, ["words", "dataset"])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert capfd.readouterr().err == ""  # where Rust tells of a panic


PIECES = re.findall(
    r"\S+",
    "words dataset and or not ( ) 1 'a' > = + , round( substr( in between case when then end is null like "
    "greatest( cast( as int [",
)


@settings(max_examples=EXAMPLES // 5, deadline=None)
@given(
    st.text("abw(),'\" 01.<>=|~[]:*/-\n")
    | st.lists(st.sampled_from(PIECES)).map(" ".join)
)
def test_any_text_is_a_filter_or_one_line(text: str) -> None:
    rows = pl.DataFrame({"words": [1, 2], "dataset": ["a", "b"]})
    try:
        assert len(where(text, rows.columns).keep(rows)) == 2
    except StoreError as error:
        one_line(error)


# Any record, changed anywhere

SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 7, 1 << 31, 1 << 48, 1 << 62, 1 << 64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [
            "",
            "..",
            "../../x",
            "/etc/hostname",
            "u0",
            "raw",
            "int8",
            "x" * 5000,
            "\x00",
            "ä",
            "\n",
        ]
    ),
    st.text(max_size=4),
)
VALUE: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        SCALAR
        | st.lists(VALUE, max_size=3)
        | st.dictionaries(st.text(max_size=3), VALUE, max_size=3)
    )
)


def spots(held: Any) -> Iterator[tuple[Any, Any]]:
    """Every member and item of a record, at any depth: what has it, and its name there."""
    items = (
        held.items()
        if isinstance(held, dict)
        else enumerate(held)
        if isinstance(held, list)
        else ()
    )
    for name, value in list(items):
        yield held, name
        yield from spots(value)


@pytest.mark.parametrize("names", [[], ["words", "note"]])
def test_the_columns_of_meta_are_those_that_the_record_names(
    evil: Path, names: list[str]
) -> None:
    held = content(evil, "commits/u0.json")
    assert sorted(held["meta"]) != sorted(names)
    (evil / "commits/u0.json").write_bytes(seal({**held, "meta": names}))
    with pytest.raises(StoreError):
        _ = Store.open(evil).index
    assert verify(evil).damage


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_record_ends_in_one_line_or_a_right_answer(
    honest: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(RECORDS))
    held = content(honest, name)
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(list(spots(held))))
        how = data.draw(st.sampled_from(["set", "drop", "add", "nest"]))
        if how == "set":
            holder[key] = data.draw(VALUE)
        elif how == "drop":
            del holder[key]
        elif how == "nest":
            holder[key] = [holder[key]]
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=8))] = data.draw(VALUE)
        if not any(True for _ in spots(held)):
            break
    sealed = seal(held)
    if data.draw(st.integers(0, 9)) == 0:  # a byte that no seal covers any more
        at = data.draw(st.integers(0, len(sealed) - 1))
        sealed = (
            sealed[:at] + bytes([data.draw(st.integers(0, 255))]) + sealed[at + 1 :]
        )
    root = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(root, ignore_errors=True)
    path = root / "a/b/c/s"
    shutil.copytree(honest, path, copy_function=os.link)
    (path / name).unlink()
    (path / name).write_bytes(sealed)
    with little_memory():
        try:
            store = Store.open(path)
            store.head()
            assert set(store.view("v")["key"]) <= {
                f"k{number:04}" for number in range(4)
            }
            for key in store.index["key"]:
                assert same(store.read(key), sample(int(key[1:])))
            send(path, root / "into")
        except VlmdistillError as error:
            one_line(error)
    assert {file.name for file in root.iterdir()} <= {"a", "into"}
    assert {
        file.name for file in (root / "a").rglob("*") if not file.is_relative_to(path)
    } <= {"b", "c", "s"}
    verify_ends(path)


def one_line(error: Exception) -> None:
    assert str(error)
    assert "\n" not in str(error)


def verify_ends(path: Path) -> None:
    try:
        verify(path)
    except VlmdistillError as error:
        one_line(error)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        Store.create(tmp_path, provenance(sampling="x" * 5000), info(), head())
