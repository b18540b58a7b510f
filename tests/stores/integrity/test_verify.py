"""A store that verifies can be read: what is sealed and yet wrong is named, and what cannot be looked at."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from tests.stores.samples import forget, head, info, make, provenance, sample, write
from vlmdistill.stores import summary
from vlmdistill.stores.backends.local import Local
from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index import merged
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.integrity.verify import verify
from vlmdistill.stores.loader.epoch import Epoch
from vlmdistill.stores.manifest import (
    COMMITS,
    Commit,
    ViewRecord,
    digest,
    read_record,
    seal,
    shard_folder,
)
from vlmdistill.stores.schema import Array, Feature, Sample
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

ROOT = Path(__file__).parents[3]
ENCODING = {"embed.span": "int8"}
NOBODY = 65534
Edit = Callable[[dict[str, bytes]], object]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with every encoding."""
    return make(tmp_path / "store", [range(4)], encoding=ENCODING)


def forge(store: Store, edit: Edit, **facts: Any) -> str:
    """Change the files of shard u0 as a faulty writer would have made them, all sums right; the shard."""
    root, record = Path(store.path), store.commit("u0")
    shard = root / record.path
    files = {name: (shard / name).read_bytes() for name in record.files}
    edit(files)
    entries = {name: (len(data), digest(data)) for name, data in files.items()}
    changed = msgspec.structs.replace(
        record, files=entries, folder=shard_folder("u0", entries), **facts
    )
    for name in record.files:
        (shard / name).unlink()
    shard.rename(root / changed.path)
    for name, data in files.items():
        (root / changed.path / name).write_bytes(data)
    for folder in (COMMITS, f"ledger/{COMMITS}"):
        (root / folder / "u0.json").write_bytes(seal(changed))
    return changed.path


def index(change: Callable[[pa.Table], pa.Table]) -> Edit:
    """Another index."""

    def edit(files: dict[str, bytes]) -> None:
        sink = pa.BufferOutputStream()
        table = change(pa.ipc.open_file(files["index.arrow"]).read_all())
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        files["index.arrow"] = sink.getvalue().to_pybytes()

    return edit


def plus(name: str, row: int, by: int = 1) -> Edit:
    """A number in the index that is greater than it was."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_numpy().copy()
        values[row] += np.array(by).astype(values.dtype)
        return table.set_column(
            table.schema.get_field_index(name), name, pa.array(values)
        )

    return index(change)


def described(array: str, **members: Any) -> Edit:
    """Another description of an array."""

    def edit(files: dict[str, bytes]) -> None:
        name = f"{array}/zarr.json"
        files[name] = json.dumps({**json.loads(files[name]), **members}).encode()

    return edit


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Edit:
    """Other bytes of a file."""

    def edit(files: dict[str, bytes]) -> None:
        files[name] = change(files[name])

    return edit


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]


TEXT, VISUAL, TOKENS = "hidden.text/c/0/0", "layer2.visual/c/0/0", "tokens/c/0/0"
FAULTY: list[tuple[Edit, str]] = [
    (plus("xxh3.hidden.text", 1), TEXT),
    (plus("xxh3.layer2.visual", 2), VISUAL),
    (plus("xxh3.tokens", 0), TOKENS),
    (plus("xxh3.embed.span.token_scale", 2), "embed.span.token_scale/c/0/0"),
    (plus("text_row", 1), "index.arrow"),
    (plus("sample_row", 3, by=-1), "index.arrow"),
    (plus("text_tokens", 3), "index.arrow"),
    (plus("visual_tokens", 2, by=2**30), "index.arrow"),
    (plus("response_tokens", 1), "index.arrow"),
    (index(lambda table: table.drop_columns(["xxh3.hidden.text"])), "index.arrow"),
    (index(lambda table: table.drop_columns(["int8.embed.span"])), "index.arrow"),
    (index(lambda table: table.drop_columns(["words"])), "index.arrow"),
    (index(lambda table: pa.concat_tables([table, table.slice(0, 1)])), "index.arrow"),
    (
        index(lambda table: table.set_column(0, "key", pa.array(["k"] * 4))),
        "index.arrow",
    ),
    (bytes_of(TEXT, flipped(3)), TEXT),
    (bytes_of(TEXT, flipped(-3)), TEXT),
    (bytes_of(TEXT, lambda data: data + b"more"), TEXT),
    (bytes_of(VISUAL, flipped(9)), VISUAL),
    (described("hidden.text", shape=[3, 8]), "hidden.text/"),
    (described("hidden.text", data_type="float16"), "hidden.text/"),
    (described("layer2.visual", codecs=[]), "layer2.visual/"),
    (described("embed.span", attributes={"rows": "text"}), "embed.span/"),
    (bytes_of("tokens/zarr.json", lambda data: b"[" * 5000), "tokens/"),
    (described("tokens", news={"name": "news", "must_understand": True}), "tokens/"),
    (described("tokens", storage_transformers=[{"name": "news"}]), "tokens/"),
    (described("tokens", fill_value="NaN"), "tokens/"),
    (described("tokens", fill_value=1), "tokens/"),
    (bytes_of("zarr.json", lambda data: b"not json"), "zarr.json"),
    (bytes_of("zarr.json", lambda data: data.replace(b"group", b"array")), "zarr.json"),
    (lambda files: files.pop("hidden.text/zarr.json"), ""),
]


@pytest.mark.parametrize(("edit", "name"), FAULTY)
def test_what_a_faulty_writer_sealed_is_found(
    store: Store, edit: Edit, name: str
) -> None:
    assert not verify(store.path).findings
    shard = forge(store, edit)
    reported = verify(store.path)
    assert reported.damage
    assert {finding.kind for finding in reported.findings} == {"damaged"}
    assert all(
        found.name.startswith((f"{shard}/{name}", "commits/"))
        for found in reported.findings
    ), reported.findings


def test_losses_that_the_samples_do_not_have_are_found(store: Store) -> None:
    forge(store, lambda files: None, losses={"embed.span": (1e308, 0.0)})
    assert "8 bits lost" in verify(store.path).damage[0].detail


@pytest.mark.parametrize(
    ("column", "value"), [(0, 2**31 - 1), (0, -1), (0, 32), (2, -(2**31)), (2, 2**30)]
)
def test_a_token_that_the_target_cannot_have_is_found_and_not_read(
    store: Store, tmp_path: Path, column: int, value: int
) -> None:
    """A writer that knew a larger vocabulary, or none, has sealed it."""
    wrong = sample(6)
    (wrong.ids_T if column == 0 else wrong.rope_T)[1] = value
    with (
        store.writer("u1") as writer,
        pytest.raises(StoreError, match=f"k0006.*{value}"),
    ):
        writer.add(wrong)
    copy_unchecked(store, "u1", wrong)
    (found,) = verify(store.path).damage
    assert wrong.key in found.detail
    assert str(value) in found.detail
    with pytest.raises(StoreError, match=f"{wrong.key} is damaged.*{value}"):
        store.read(wrong.key)
    with pytest.raises(StoreError, match=f"{wrong.key} is damaged.*{value}"):
        list(Epoch(store, token_budget=100))


def copy_unchecked(store: Store, shard: str, given: Sample) -> None:
    spans = [{"start": span.start, "length": span.length} for span in given.spans]
    counts = {
        "text_tokens": len(given.ids_T),
        "visual_tokens": given.visual_tokens,
        "response_tokens": int(given.response_T.sum()),
    }
    losses: dict[str, list[float]] = {}
    with store.writer(shard) as writer:
        arrays = store.layout.split(given, losses)
        writer.copy(
            {"key": given.key, "dataset": "", "spans": spans, **counts}, arrays, losses
        )


def test_rows_that_are_not_finite_are_told_by_the_writer_and_by_verify(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    feature, wrong = Feature.parse("hidden.text"), sample(7)
    wrong.features[feature][1, 3] = 0x7FC0  # NaN
    wrong.features[feature][2, :] = 0xFF80  # minus infinity
    write(store, "u1", [sample(5), wrong])
    assert "2 rows of hidden.text of k0007" in caplog.text
    (found,) = verify(store.path).findings
    assert found.kind == "note"
    assert "2 rows of 1 samples, the first k0007" in found.detail
    assert found.name.endswith(TEXT)


def test_samples_that_differ_from_shard_to_shard_are_told(store: Store) -> None:
    write(store, "u1", [3, 4])  # 3 is there already, and is the same
    assert not verify(store.path).findings
    other = sample(4)
    other.features[Feature.parse("hidden.text")][0, 0] ^= 1
    copy_unchecked(store, "0evil", other)
    (found,) = verify(store.path).findings
    assert found.kind == "note"
    assert "1 samples" in found.detail
    assert "k0004 in 0evil and u1" in found.detail


@pytest.mark.parametrize(
    "facts",
    [{"kept": 10**12}, {"rows": 0}, {"dropped": {"x": 5}}, {"rows": 5, "kept": 2}],
)
def test_a_view_whose_numbers_contradict_is_found_and_not_read(
    store: Store, facts: dict[str, Any]
) -> None:
    filter_store(store, "v", expressions=["words > 2"])
    record = msgspec.structs.replace(
        read_record(store.backend, "views/v.json", ViewRecord), **facts
    )
    for name in ("views/v.json", "ledger/views/v.json"):
        store.backend.replace(name, seal(record))
    assert {found.name.split("/")[-2] for found in verify(store.path).damage} == {
        "views"
    }
    with pytest.raises(StoreError, match="damaged"):
        store.view("v")


def test_a_store_that_has_lost_a_shard_is_not_read_as_a_smaller_one(
    store: Store,
) -> None:
    write(store, "u1", range(4, 6))
    Path(store.path, "commits/u1.json").unlink()
    for act in (
        lambda store: Epoch(store, token_budget=9),
        lambda store: store.view(None),
    ):
        with pytest.raises(StoreError, match=r"lost.*ledger/commits/u1\.json"):
            act(Store.open(store.path))
    forget(store, "commits/u1.json")
    assert len(Store.open(store.path).view(None)) == 4


@pytest.mark.parametrize("folder", ["commits", "views", "stats", "ledger/commits"])
def test_a_file_in_the_place_of_a_folder_is_told_in_one_line(
    store: Store, folder: str
) -> None:
    path = Path(store.path, folder)
    shutil.rmtree(path, ignore_errors=True)
    path.touch()
    opened = Store.open(store.path)
    with pytest.raises(StoreError, match=rf"{folder} is damaged: it is no folder"):
        assert len(opened.view(None)) == len(summary.info(opened))
    assert verify(store.path).damage


def test_rows_that_the_record_has_and_no_sample_are_found(store: Store) -> None:
    rows = {**store.commit("u0").rows, "text": store.commit("u0").rows["text"] - 1}
    forge(store, lambda files: None, rows=rows)
    assert verify(store.path).damage


def test_a_store_that_declares_another_width_than_its_files_have_is_found(
    tmp_path: Path,
) -> None:
    make(tmp_path / "one", [range(2)])
    other = Store.create(tmp_path / "two", provenance(), info(hidden_size=16), head())
    (tmp_path / "one" / "store.json").write_bytes(
        (Path(other.path) / "store.json").read_bytes()
    )
    damage = {finding.name.split("/")[0] for finding in verify(tmp_path / "one").damage}
    assert damage == {"heads", "commits"}


def test_a_view_of_samples_that_are_gone_is_found(store: Store) -> None:
    write(store, "u1", range(4, 6))
    filter_store(store, "late", expressions=["words > 2"])
    assert not verify(store.path).findings
    forget(store, "commits/u1.json")
    (found,) = verify(store.path).damage
    assert found.name.startswith("views/late-")
    assert "2 samples" in found.detail


def test_symbolic_links_are_named_and_are_no_damage(
    store: Store, tmp_path: Path
) -> None:
    shard = next(Path(store.path, "shards").iterdir())
    for path in (shard / "hidden.text", shard / "index.arrow"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    reported = verify(store.path)
    assert {
        (found.kind, found.name.rpartition("/")[2]) for found in reported.findings
    } == {
        ("note", "hidden.text"),
        ("note", "index.arrow"),
    }
    (tmp_path / "index.arrow").unlink()
    assert [found.kind for found in verify(store.path).damage] == ["missing"]


def test_a_thousand_nested_folders_are_listed(store: Store) -> None:
    top = Path(store.path, "a")
    try:
        subprocess.run(["mkdir", "-p", top / "/".join("a" * 1_100)], check=True)
        verify(store.path)
    finally:
        subprocess.run(["rm", "-r", top], check=True)  # pytest could not


def test_what_may_not_be_read_is_told_as_that_and_not_as_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    filter_store(store, "v", expressions=["words > 2"])
    denied = [
        f"{store.commit('u0').path}/{TEXT}",
        f"{store.commit('u0').path}/index.arrow",
        "heads/",
        "views/v-",
    ]
    read = Local.read_range

    def extent(backend: Local, name: str, start: int, length: int) -> Array:
        if name.startswith(tuple(denied)):
            raise PermissionError(13, "Permission denied", name)
        return read(backend, name, start, length)

    monkeypatch.setattr(Local, "read_range", extent)
    reported = verify(store.path).damage
    assert len(reported) == 4
    assert {(found.kind, found.detail) for found in reported} == {
        ("unreadable", "it cannot be read: permission denied")
    }


COLLECTS = """
import os, sys
from vlmdistill.stores.integrity.gc import collect
from vlmdistill.stores.store import Store
store = Store.open(sys.argv[1])
collect(store, dry_run=True)  # all modules are read before they may not be any more
os.setgroups([])
os.setgid({0})
os.setuid({0})
collect(store, grace=0)
"""


@pytest.fixture
def public() -> Iterator[Store]:
    """A store where other users may look: folders of tests are their owner's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield make(Path(folder, "store"), [range(4)], encoding=ENCODING)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_gc_does_not_count_what_it_may_not_remove(public: Store) -> None:
    for name in ("staging",):
        Path(public.path, name).mkdir(exist_ok=True)
        Path(public.path, name).chmod(0o777)
    left = Path(public.path, "staging", "0123456789abcdef")
    (left / "inner").mkdir(parents=True)
    (left / "inner" / "file").touch()
    Path(public.path, "staging", "0123456789abcdee").mkdir()
    command = [sys.executable, "-c", COLLECTS.format(NOBODY), public.path]
    reported = subprocess.run(
        command, check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ).stderr
    assert "1 things in" in reported
    assert "Permission denied" in reported
    assert "1 others were" in reported


def test_gc_removes_links_that_look_like_garbage_and_what_they_lead_to_stays(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"mine")
    links = [
        "shards/left-0123456789abcdef",
        "staging/removed-0123456789abcdef",
        "staging/0123456789abcdef",
    ]
    for name, target in zip(links, ("mine", "mine", "nothing"), strict=True):
        Path(store.path, name).symlink_to(tmp_path / target)
    removed = collect(store, grace=0)
    assert sorted((one.name, one.bytes) for one in removed) == sorted(
        (name, 0) for name in links
    )
    assert collect(store, grace=0) == []
    assert (tmp_path / "mine" / "file").read_bytes() == b"mine"
    assert not verify(store.path).findings


def test_gc_counts_only_what_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(store.path, "staging", "0123456789abcdef").mkdir(parents=True)
    monkeypatch.setattr(Local, "remove", lambda backend, name: None)
    assert collect(store, grace=0) == []


def test_what_verifies_reads(store: Store) -> None:
    assert not verify(store.path).findings
    for number in range(4):
        assert store.read(f"k{number:04}").key == sample(number).key
    with pytest.raises(StoreError, match="store/shards"):
        verify(Path(store.path, "shards"))


@pytest.mark.parametrize("folder", ["cache", "shards", "staging", "ledger", "commits"])
def test_nothing_is_written_or_removed_through_a_folder_that_is_a_link(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "WORTH", 1)
    store = make(tmp_path / "store", [range(3)])
    victim = tmp_path / "victim"
    if Path(store.path, folder).exists():
        shutil.move(Path(store.path, folder), victim)
    (victim / "left-0123456789abcdef").mkdir(parents=True)
    (victim / ("index.json" if folder == "cache" else "mine")).write_bytes(b"mine")
    Path(store.path, folder).symlink_to("../victim")
    before = tree(victim)
    opened = Store.open(store.path)
    assert len(opened.index) == 3
    for act in (lambda: collect(opened, grace=0), lambda: write(opened, "u9", [9])):
        with contextlib.suppress(StoreError):
            act()
    assert tree(victim) == before


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def test_a_shard_of_another_origin_is_damage(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [range(3)])
    record = read_record(store.backend, "commits/u0.json", Commit)
    changed = msgspec.structs.replace(record, origin="0" * 16)
    store.backend.replace("commits/u0.json", seal(changed))
    assert [one.name for one in verify(store.path).damage] == ["commits/u0.json"]
