"""`vlmdistill train`: stopped and continued, and from a store behind a URL."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.drafters import synthetic
from vlmdistill.cli.main import main
from vlmdistill.stores.sharing.merge import send

pytestmark = pytest.mark.slow

WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
from vlmdistill.cli.entry import main
sys.exit(main())
"""
SHORT = ["--set", "batch_tokens=60", "--set", "stages.*.learning_rate=0.001"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(synthetic.store(tmp_path_factory.mktemp("typed"), 21).path)


def test_a_run_stopped_on_several_ranks_continues_on_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the steps that fit into its CPU seconds, by the length of steps on several ranks."""
    words = [
        "train",
        "sparrow",
        "--store",
        str(store),
        "--runs",
        str(tmp_path),
        "--cpu-seconds",
        "3600",
        *SHORT,
    ]
    state = (
        tmp_path / "demo-small" / "drafters" / "sparrow.training" / "checkpoint.json"
    )
    typed = subprocess.Popen(
        [
            sys.executable,
            "-c",
            WITHOUT_TRANSFORMERS,
            *words,
            "--ranks",
            "2",
            "--save-every",
            "5",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while typed.poll() is None and not state.exists():
        time.sleep(0.05)
    os.killpg(typed.pid, signal.SIGINT)  # as a terminal does
    shown, err = typed.communicate(timeout=400)
    assert (typed.returncode, shown) == (130, ""), err
    stopped = re.fullmatch(
        r"interrupted: (\d+) of (\d+) steps .*", err.strip().splitlines()[-1]
    )
    assert stopped, err
    record = json.loads(state.read_bytes())
    assert (record["position"]["total"], record["ranks"]) == (int(stopped[1]), 2)

    assert main([*words, "--seed", "1", "--save-every", "5"]) == 1
    assert "seed 1, not 0" in capsys.readouterr().err

    def total() -> int:
        count: int = json.loads(state.read_bytes())["position"]["total"]
        return count

    def stop_later() -> None:
        while total() < int(stopped[1]) + 5:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_later, daemon=True).start()
    assert main([*words, "--save-every", "5"]) == 143
    again = total()
    assert again > int(stopped[1])
    assert f"interrupted: {again} of {stopped[2]} steps " in capsys.readouterr().err


def test_a_store_behind_a_url(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{tmp_path.name}/store"
    send(store, url)
    words = [
        "train",
        "sparrow",
        "--runs",
        str(tmp_path),
        "--set",
        "steps=2",
        *SHORT,
        "--json",
        "--store",
    ]
    assert main([*words, url]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["steps"] == 2
    assert "already trained" not in shown.err
    assert main([*words, url]) == 0
    assert "sparrow is already trained (2 steps): --force" in capsys.readouterr().err
    assert main([*words, f"{url}s", "--name", "other"]) == 1
    assert f"{url}s" in capsys.readouterr().err


def test_a_recipe_file_that_validates(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'steps = 9\nvalidate_every = 2\nbatch_tokens = 60\n[sparrow]\ntree = "chain-2"\n'
    )
    words = [
        "train",
        "sparrow",
        "--store",
        str(store),
        "--runs",
        str(tmp_path),
        "--recipe",
        str(recipe),
    ]
    assert main([*words, "--set", "steps=5", "--json"]) == 1
    assert "--validation-share" in capsys.readouterr().err
    assert (
        main([*words, "--set", "steps=5", "--validation-share", "0.3", "--json"]) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    record = json.loads(
        (tmp_path / "demo-small" / "drafters" / "sparrow" / "config.json").read_bytes()
    )
    assert (
        shown["steps"],
        record["config"]["tree"],
        record["config"]["validate_every"],
    ) == (5, "chain-2", 2)
    measured = {
        one["step"]: one["predicted_tau"] for one in record["training"]["history"]
    }
    assert (
        shown["predicted_tau"]
        == measured[shown["saved_step"]]
        == max(measured.values())
    )


def test_a_store_of_another_target_than_the_model_is_warned_of(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs"), "--set", "steps=1"]
    assert main(["train", "medusa", "--store", str(store), *runs]) == 0
    warning = capsys.readouterr().err
    assert str(store) in warning
    assert "not of demo-small" in warning
