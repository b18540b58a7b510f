"""The examples of README.md and docs/api.md run, one after the other, and do what the page says."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import vlmdistill
from examples.shared_store import shared_store
from tests.api.conftest import ROOT, SHORT, as_a_user
from tests.stores.web import serving
from vlmdistill.cli.main import main

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "api.md"
COMMANDS: dict[Path, dict[str, list[str]]] = {
    README: {"generate": []},
    ROOT / "docs" / "vllm.md": {"export": []},
    ROOT / "docs" / "flow.md": {
        "train": SHORT,
        "eval": ["--limit", "1", "--max-new-tokens", "24"],
        "store": [],
    },
    ROOT / "docs" / "traffic.md": {"forget": []},
}
"""By page: the commands that need neither a hub nor an engine, each with the options of a small budget."""


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `vlmdistill` of each command of a page."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("vlmdistill "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_written_after_make_demo(
    page: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_a_user(monkeypatch, demo_folder)
    used = dict.fromkeys(COMMANDS[page], 0)
    for verb, *words in commands(page):
        if verb in used:
            used[verb] += 1
            assert main([verb, *words, *COMMANDS[page][verb]]) == 0, words
    assert all(used.values())


@pytest.mark.slow
def test_the_server_of_the_page_runs_as_written_after_make_demo(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_a_user(monkeypatch, demo_folder)
    (words,) = commands(ROOT / "docs" / "serve.md")
    command = [sys.executable, "-m", "vlmdistill", *words, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout
        line = next(line for line in server.stdout if line.startswith("serving"))
        server.terminate()
        server.communicate()
    assert line.startswith("serving demo with sparrow at http://127.0.0.1:")


@pytest.fixture(scope="module")
def after(demo_folder: Path) -> dict[str, Any]:
    """The variables that the examples leave."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        as_a_user(patch, demo_folder)
        for page in (README, PAGE):
            for block in re.finditer(
                r"```python\n(.*?)```", page.read_text(), re.DOTALL
            ):
                line = page.read_text()[: block.start()].count("\n") + 1
                exec(compile("\n" * line + block[1], page, "exec"), names)
    return names


def test_the_page_uses_every_public_function(after: dict[str, Any]) -> None:
    functions = [
        name for name in vlmdistill.__all__ if name.islower() or name == "StoreDataset"
    ]
    assert [
        name for name in functions if f"vlmdistill.{name}(" not in PAGE.read_text()
    ] == []


def test_the_flow_in_python_is_that_of_the_commands(
    after: dict[str, Any], demo_folder: Path
) -> None:
    imported, captured, trained = after["imported"], after["captured"], after["trained"]
    assert imported.added == 6
    assert 0 < imported.eval < 6
    store = vlmdistill.open_store(demo_folder / "flow/demo/features")
    assert captured.samples == imported.train == len(store)
    assert (trained.name, trained.steps, (demo_folder / trained.folder).is_dir()) == (
        "wren",
        4,
        True,
    )
    (result,) = after["results"]
    assert (result.name, result.temperature, result.failures) == ("wren", 0.0, [])
    assert result.evaluation.lossless
    assert len(result.evaluation.keys) == imported.eval
    assert (demo_folder / after["page"]).is_file()
    assert after["served"].drafter == "wren"
    with pytest.MonkeyPatch.context() as patch:
        as_a_user(patch, demo_folder)
        state = vlmdistill.status(runs="flow")
        assert (state.prompts, state.held_out, state.next) == (
            imported.train,
            imported.eval,
            "",
        )
        assert vlmdistill.features(["wren"], runs="flow").captured == 0
        steps: list[tuple[str, int, int]] = []
        shorter = {"steps": 2}
        done = vlmdistill.train(
            "wren", runs="flow", name="other", settings=shorter, progress=note(steps)
        )
    assert done.steps == 2
    assert steps[-1] == ("train", 2, 2)


def note(steps: list[tuple[str, int, int]]) -> Callable[..., None]:
    """A callback that notes how far a stage has come."""
    return lambda stage, done, total, remark="": steps.append((stage, done, total))


def test_the_drafter_leaves_the_response_as_it_is(after: dict[str, Any]) -> None:
    assert after["marked"].replace("[", "").replace("]", "") == after["response"].text
    assert len(after["response"].ids) > 10


def test_a_sample_is_read_as_it_was_captured(
    after: dict[str, Any], demo_folder: Path
) -> None:
    (captured,), features = after["samples"], after["features"]
    stored = vlmdistill.open_store(demo_folder / "mine")["scene-0"]
    assert stored.ids_T.tolist() == captured.ids_T.tolist()
    assert stored.spans == captured.spans != ()
    assert all(
        (stored.feature(name) == captured.feature(name)).all() for name in features
    )


def test_states_of_another_program_are_stored(
    after: dict[str, Any], demo_folder: Path
) -> None:
    others = vlmdistill.open_store(demo_folder / "others")
    assert [*others] == ["other-0"]
    assert others.index["response_tokens"].to_list() == [8]


def test_the_last_batch_holds_whole_samples(after: dict[str, Any]) -> None:
    batch = after["batch"]
    assert {feature.name for feature in batch.features} == {"hidden.text"}
    assert batch.feature("hidden", "text").shape == (after["rows"], after["D"])


def test_a_shared_store_is_read_over_the_web(demo_folder: Path) -> None:
    store = demo_folder / "runs" / "demo" / "features"
    handler = partial(SimpleHTTPRequestHandler, directory=store)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        found = shared_store(f"http://127.0.0.1:{server.server_port}")
    index = vlmdistill.open_store(store).index
    tokens = index["response_tokens"].sum()
    assert (found["target"], found["samples"], found["response tokens"]) == (
        "demo",
        f"{len(index)} of {len(index)}",
        tokens,
    )
    assert "hidden.text" in str(found["features"])
