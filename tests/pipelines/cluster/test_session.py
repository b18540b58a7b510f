"""A session of Ray on this machine."""

from pathlib import Path

import pytest

from vlmdistill.pipelines.cluster.session import session
from vlmdistill.stores.errors import VlmdistillError

pytestmark = pytest.mark.slow


def test_a_folder_with_too_long_a_name_for_sockets_is_named_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long-name-of-a-batch-job-" * 5)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with pytest.raises(VlmdistillError, match="RAY_TMPDIR=/tmp"), session():
        pass
