"""The server of a page that follows its workspace."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.bench.conftest import Save, save, workspace
from tests.served_app import Served, running_app
from vlmdistill.pipelines.endpoint.following import build_page_app
from vlmdistill.pipelines.report.live import LiveReport, PageVersion
from vlmdistill.pipelines.workspace.workspace import Workspace

__all__ = ["save", "workspace"]
HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture
def served(workspace: Workspace) -> Iterator[Served]:
    with running_app(build_page_app(LiveReport(workspace), HOSTS)) as served:
        yield served


def test_the_page_is_sent_again_only_when_it_has_changed(
    served: Served, save: Save
) -> None:
    status, body, headers = served.exchange("GET", "/")
    assert (status, b"no evaluations" in body) == (200, True)
    assert served.request("GET", "/", If_None_Match=headers["etag"]) == (304, b"")
    save("sparrow")
    status, body = served.request("GET", "/", If_None_Match=headers["etag"])
    assert (status, b"Use sparrow" in body) == (200, True)


def test_the_page_may_reach_its_server_and_nothing_else(served: Served) -> None:
    _, body, headers = served.exchange("GET", "/")
    (meta,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', body.decode())
    for policy in (headers["content-security-policy"], meta):
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
    (allowed,) = set(
        re.findall(
            "script-src '(sha256-[^']*)'", headers["content-security-policy"] + meta
        )
    )
    assert allowed
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    ["/index.html", "/../../etc/passwd", "/%2e%2e/prompts.parquet", "//etc/passwd"],
)
def test_no_file_is_served_by_its_name(served: Served, path: str) -> None:
    assert served.request("GET", path)[0] == 404


def test_only_this_machine_may_read_the_page(served: Served) -> None:
    assert served.request("GET", "/", Host="evil.example")[0] == 400
    assert served.request("GET", "/", Host="localhost:1")[0] == 200
    assert served.request("POST", "/", b"x")[0] == 405


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_an_open_page_follows_without_being_loaded_again(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    class Changing(LiveReport):
        """An evaluation ends between the first and the second request."""

        asked = 0

        def version(self) -> PageVersion:
            self.asked += 1
            if self.asked == 2:
                save("sparrow")
            return super().version()

    report = Changing(workspace)
    with running_app(build_page_app(report, HOSTS)) as served:
        command = [
            *(
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path}/chromium",
            ),
            *(
                "--dump-dom",
                "--virtual-time-budget=5000",
                f"http://127.0.0.1:{served.port}/",
            ),
        ]
        page = subprocess.run(
            command, check=True, capture_output=True, timeout=60, text=True
        ).stdout
    assert report.asked > 1
    assert "Use sparrow" in page
    assert "no evaluations" not in page
