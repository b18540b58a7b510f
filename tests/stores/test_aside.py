"""Behind fsspec lie file systems that show a file while it is being written: a store shows whole ones."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.stores.samples import make, same, sample, write
from vlmdistill.stores.collect import collect
from vlmdistill.stores.filters import filter_store
from vlmdistill.stores.place import place_of
from vlmdistill.stores.remote import Remote
from vlmdistill.stores.store import Store
from vlmdistill.stores.verify import verify

ROOT = Path(__file__).parents[2]
DIES = """
import sys
from pathlib import Path
from tests.stores.faults import Kill, struck
from vlmdistill.stores.remote import Remote
place, act, file = Remote(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
given = (file.parent, "shards/u") if act == "publish" else ("shards/u/x", file.read_bytes())
with struck(Kill(frozenset({"write", "sendfile"}), 1)):
    getattr(place, act)(*given)
"""


class Refusing(LocalFileSystem):  # type: ignore[misc]
    """A file system that renames no file to the name of another, as SMB does."""

    protocol = ("refusing", "file")

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2):
            raise OSError("there is one already")
        super().mv(path1, path2, **options)


@pytest.fixture(params=["dir", "refusing"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder `there`, by way of file systems that rename over a file and that refuse to."""
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    return f"dir://there::file://{tmp_path}" if request.param == "dir" else f"refusing://{tmp_path}/there"


def test_a_store_lives_there(url: str, tmp_path: Path) -> None:
    store = make(url, [range(3), range(3, 6)])
    filter_store(store, "v", expressions=["words > 1"])
    filter_store(store, "v", expressions=["words > 3"])
    again = Store.open(url)
    assert all(same(again.read(f"k{number:04}"), sample(number)) for number in range(6))
    assert again.view("v")["words"].to_list() == [4, 5]
    assert len(collect(again, grace=0)) == 1
    write(again, "u0", range(3))
    assert not verify(url).findings
    assert not any((tmp_path / "there" / "staging").iterdir())


def test_the_first_of_two_records_stands(url: str) -> None:
    place = Remote(url)
    assert place.create("commits/u.json", b"first")
    assert not place.create("commits/u.json", b"second")
    assert place.read("commits/u.json") == b"first"
    assert place.names("staging") == []


@pytest.mark.parametrize("act", ["create", "replace", "publish"])
def test_what_a_killed_writer_had_begun_to_write_is_not_there(tmp_path: Path, act: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_bytes(b"record")
    make(tmp_path / "there")
    url = f"dir://there::file://{tmp_path}"
    command = [sys.executable, "-c", DIES, url, act, str(tmp_path / "mine" / "x")]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == -signal.SIGKILL
    store = Store.open(url)
    assert store.place.files("shards") == {}
    assert [item.name.split("/")[0] for item in collect(store, grace=0)] == ["staging"]
    assert store.place.create("shards/u/x", b"record")


def test_a_local_url_is_a_folder_of_this_machine(tmp_path: Path) -> None:
    assert place_of(f"local://{tmp_path}/a").url == f"{tmp_path}/a"
