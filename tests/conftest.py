"""Fixtures for all tests."""

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vlmdistill.cli.main import main

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

# What takes long to import is imported in fixtures: the process that deals the tests out loads this file too.

GPU = os.environ.get("VLMDISTILL_GPU", "") not in ("", "0")
"""Run the tests that are marked `gpu`, and them alone."""

# What is compared exactly runs in float32 on a CPU; a GPU would be taken by itself, in bfloat16.
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# No workspace at a URL is copied into the user's cache.
os.environ["VLMDISTILL_CACHE"] = tempfile.mkdtemp(prefix="vlmdistill-cache-")
atexit.register(shutil.rmtree, os.environ["VLMDISTILL_CACHE"], ignore_errors=True)
# The default target of the tests: a token of it takes an eighth of the products of one of `demo`.
os.environ["VLMDISTILL_MODEL"] = "demo-small"
# Ray gives its workers a niceness of 15, with which the other test process starves them.
os.environ |= {"RAY_worker_niceness": "0", "RAY_worker_register_timeout_seconds": "300"}
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # the processes that tests start do not wait for one another
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell starts what runs behind it without one


def pytest_addoption(parser: pytest.Parser) -> None:
    """A machine with a GPU may lack the plugin that reads this setting of ours."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds of a test")


def pytest_configure(config: pytest.Config) -> None:
    """A machine with a GPU has versions of its own, whose warnings are not our errors."""
    if GPU:
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_finish() -> None:
    """Search for garbage among objects of tests alone: modules and tests are none."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Choose between the tests that need a GPU and all others."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not GPU:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and VLMDISTILL_GPU=1"))
        return
    config.hook.pytest_deselected(items=[item for item in items if item not in marked])
    items[:] = marked
    import torch

    if items and not torch.cuda.is_available():
        raise pytest.UsageError("VLMDISTILL_GPU=1, and torch finds no GPU")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models run slower on several threads, and far slower when the machine is shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _decoded_once() -> Iterator[None]:
    """An evaluation starts no second process, which takes seconds, but in the tests of that."""
    from vlmdistill.pipelines.bench import again

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "PROMPTS", 0)
        yield


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """One Ray session for all tests of a module, whose commands use it; its daemons end with them."""
    from vlmdistill.pipelines.cluster.session import session

    with session():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny checkpoints, each once per session: checkpoint("llava", vocabulary=24, layers=2)."""
    from tests import tiny

    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        name = "-".join(
            [family, *(f"{key}={value}" for key, value in sorted(options.items()))]
        )
        if name not in made:
            made[name] = tiny.checkpoint(
                family, tmp_path_factory.mktemp("tiny") / name, **options
            )
        return made[name]

    return make


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> "VisionLanguageTarget":
    """A tiny target of the Qwen2.5-VL family."""
    from vlmdistill.pipelines.targets.loading import load

    return load(str(checkpoint("qwen2_5_vl")))


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that fails; the one line on stderr."""

    def fail(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.strip().splitlines()
        assert line.startswith("error: ")
        return line

    return fail
