"""A session of Ray on this machine."""

import os
from pathlib import Path

import pytest
import torch

from vlmdistill.pipelines.cluster import pool
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


@pytest.mark.parametrize(
    ("prompts", "cores", "gpus", "workers"),
    [
        (pool.FEW - 1, 8, 0, 0),
        (pool.FEW, 8, 0, None),
        (10**6, 1, 0, 0),
        (pool.FEW - 1, 8, 4, 0),
        (pool.FEW, 8, 4, None),
        (10**6, 8, 1, 0),
    ],
)
def test_few_prompts_or_one_device_need_no_ray(
    prompts: int,
    cores: int,
    gpus: int,
    workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pool.WorkerOptions().for_prompts(prompts).workers == workers
    for asked in (0, 1, 3):
        options = pool.WorkerOptions(workers=asked)
        assert options.for_prompts(prompts) is options
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert pool.WorkerOptions().for_prompts(prompts).workers is None
