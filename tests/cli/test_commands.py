"""The command line: one line per error, the right exit status, and no lost work."""

import errno
import inspect
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from typer.models import OptionInfo

import vlmdistill
from tests.cli.conftest import dialogues
from tests.drafters import synthetic
from vlmdistill.cli import console
from vlmdistill.cli.main import GROUPS, VERBS, main
from vlmdistill.drafters.core.settings import flat
from vlmdistill.drafters.training.recipes import resolve
from vlmdistill.pipelines.data.prompts.prompt_table import read
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.targets.loading import load

COMMAND = [sys.executable, "-m", "vlmdistill"]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in (*VERBS, *GROUPS))


@pytest.mark.parametrize("name", [*VERBS, *GROUPS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage: vlmdistill" in capsys.readouterr().out


def test_an_option_is_one_thing_in_all_commands() -> None:
    """A flag, a whole number, a number, a path or a text; its short form is its own.

    `plan` alone has no files: its `--prompts` is their number. A list, `0,1`, is text whatever it holds.
    """
    kinds: dict[str, set[str]] = {}
    verbs: list[Any] = [
        one.callback for group in GROUPS.values() for one in group.registered_commands
    ]
    for verb in [*(VERBS | {"plan": None}).values(), *verbs]:
        if verb is None:
            continue
        hints = get_type_hints(verb, include_extras=True)
        for name in inspect.signature(verb).parameters:
            for option in getattr(hints[name], "__metadata__", ()):
                is_list = "list[" in str(hints[name].__origin__)
                if not isinstance(option, OptionInfo) or is_list:
                    continue
                kind = re.search(
                    r"Literal|bool|int|float|Path", str(hints[name].__origin__)
                )
                # Inside Annotated, Typer takes the first name for a default, and mends that later.
                named = [
                    one
                    for one in (option.default, *(option.param_decls or ()))
                    if isinstance(one, str)
                ]
                for flag in named or [f"--{name.replace('_', '-')}"]:
                    kinds.setdefault(flag, set()).add(
                        kind[0].replace("Literal", "text") if kind else "text"
                    )
    assert {"--model", "-m", "--runs", "--json", "--limit"} <= kinds.keys()
    assert {flag: kind for flag, kind in kinds.items() if len(kind) > 1} == {}


def test_heavy_packages_wait_for_the_command_that_needs_them() -> None:
    heavy = "{'torch', 'transformers', 'ray', 'deepspeed', 'polars', 'pyarrow', 'zarr', 'numpy', 'datasets'}"
    code = (
        f"import sys, vlmdistill.cli.main; print(sorted({heavy} & sys.modules.keys()))"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    )


def test_an_interrupt_while_the_command_loads_is_one_line() -> None:
    code = """if True:
        import os, signal, sys
        from vlmdistill.cli.entry import main
        class Impatient:
            def find_spec(name, *more):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Impatient)
        sys.exit(main())
    """
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (130, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("interrupted: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["prompts"],
        ["prompts", "talks.json", "--limit", "-1"],
        ["prompts", "talks.json", "--format", "csv"],
        ["responses", "--limit", "0"],
        ["responses", "--workers", "-1"],
        ["features", "--dtype", "int8"],
        ["train", "sparrow", "--dtype", "int8"],
        ["features", "--limit", "-5"],
        ["generate", "hi", "--seed", "18446744073709551616"],
        ["export", "sparrow", "--out", "served", "--limit", "5"],
        ["eval", "sparrow", "--seed", "4294967296"],
        ["train", "sparrow", "--seed", "-1"],
        ["responses", "--seed", "4294967296"],
        ["run", "--seed", "4294967296"],
    ],
)
def test_wrong_usage_is_status_two(
    arguments: list[str], workplace: Path, capsys: Any
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Error: " in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["prompts", "absent.json"], "absent.json"),
        (["prompts", "talks.json", "--augment", "loud"], "'loud'"),
        (["prompts", "talks.json", "--images", "nowhere"], "--images nowhere"),
        (["responses", "--model", "no-such-model"], "'no-such-model'"),
        (["features", "--model", "no-such-model"], "'no-such-model'"),
        (["features", "--model", "."], "config.json"),
        (["generate", "hi", "--temperature", "inf"], "--temperature inf"),
        (["generate", "hi", "--fps", "3"], "--fps 3.0"),
        (["generate", "hi", "--frames", "3"], "--frames 3"),
        (["generate", "hi", "--tree", "chain-4"], "--tree chain-4"),
        (["export", "eagle3", "--out", "served"], "drafters/eagle3"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], value: str, workplace: Path, failing: Callable[..., str]
) -> None:
    assert value in failing(*arguments)
    assert not (workplace / "runs").exists()


def test_the_error_for_missing_prompts_has_the_command_that_imports_them(
    workplace: Path, checkpoint: Callable[..., Path], failing: Callable[..., str]
) -> None:
    model = str(checkpoint("qwen2_5_vl", layers=1))
    for verb in ("responses", "features"):
        line = failing(verb, "--model", model)
        assert f"vlmdistill prompts FILE... -m {model}" in line
    line = failing("features", "--model", model, "--for", "sparrow,nonsense")
    assert "'nonsense'" in line


def test_a_corrupted_checkpoint_is_named(
    workplace: Path, checkpoint: Callable[..., Path], failing: Callable[..., str]
) -> None:
    whole = checkpoint("qwen2_5_vl", layers=1)
    broken = workplace / "broken"
    broken.mkdir()
    for file in whole.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(
            data[:-100] if file.suffix == ".safetensors" else data
        )
    assert "model.safetensors" in failing("responses", "--model", str(broken))


def test_debug_shows_the_traceback(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompts", "absent.json", "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.splitlines()[-1].startswith("error: ")


def test_an_error_of_the_system_that_no_path_of_the_user_explains_leaves_its_traceback(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def bug(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["report"]) == 1
    assert main(["report", "absent.json", "/absent.json"]) == 1
    assert not [*tmp_path.glob("*.log")]
    monkeypatch.setattr(selection, "check", bug)
    capsys.readouterr()
    assert main(["report"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    (log,) = tmp_path.glob("*.log")
    assert str(log) in line
    assert "in bug" in log.read_text()


def test_prompts_go_to_the_workspace_of_the_model(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompts", "talks.json"]) == 0
    assert len(read(Path("runs/demo-small/prompts.parquet"))) == 3
    (workplace / "ckpt" / "my-model").mkdir(parents=True)
    assert (
        main(["prompts", "talks.json", "-m", "ckpt/my-model/", "--runs", "elsewhere"])
        == 0
    )
    assert len(read(Path("elsewhere/my-model/prompts.parquet"))) == 3
    monkeypatch.setenv("VLMDISTILL_RUNS", "moved")
    assert main(["prompts", "talks.json", "-m", "org/name"]) == 0
    assert len(read(Path("moved/org--name/prompts.parquet"))) == 3
    monkeypatch.setenv("VLMDISTILL_MODEL", "org/other")
    assert main(["prompts", "talks.json"]) == 0
    assert vlmdistill.status().prompts + vlmdistill.status().held_out == 3
    assert len(read(Path("moved/org--other/prompts.parquet"))) == 3
    monkeypatch.delenv("VLMDISTILL_MODEL")
    assert main(["prompts", "talks.json"]) == 0
    assert len(read(Path("moved/demo/prompts.parquet"))) == 3
    monkeypatch.setenv("HOME", str(workplace / "home"))
    assert main(["prompts", "talks.json", "-m", "org/name", "--runs", "~/runs"]) == 0
    assert len(read(Path("home/runs/org--name/prompts.parquet"))) == 3


def test_an_import_shows_the_first_prompts_before_its_summary(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middle = "very " * 500
    rows = [{"question": f"Which?\nA {middle}big one?", "answer": "Blue."}] + [
        {"question": f"{number}?", f"note{number}": "x"} for number in range(6)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["prompts", "rows.jsonl"]) == 0
    lines = capsys.readouterr().err.splitlines()
    first, user, rest, response = lines[:4]
    assert first.startswith("first of 1 prompts without images or videos")
    assert (user.split(), response.split()) == (
        ["user", "Which?"],
        ["response", "Blue."],
    )
    assert rest.split()[:2] + rest.split()[-3:] == ["A", "very", "very", "big", "one?"]
    assert "[...]" in rest
    assert any("2 prompts of 2 other forms" in line for line in lines)
    assert main(["--quiet", "prompts", "rows.jsonl"]) == 0
    assert "first of" not in capsys.readouterr().err


def test_prompts_that_a_corrected_file_has_no_more_are_told(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"question": f"{number}?"}) for number in range(3)]
    Path("rows.jsonl").write_text("\n".join(rows))
    assert main(["prompts", "rows.jsonl"]) == 0
    assert main(["prompts", "rows.jsonl", "talks.json"]) == 0
    assert "earlier import" not in capsys.readouterr().err
    Path("rows.jsonl").write_text("\n".join(rows[:2]))
    assert main(["prompts", "rows.jsonl"]) == 0
    assert "has not made: rows.jsonl (1)" in capsys.readouterr().err
    assert main(["prompts", "rows.jsonl", "--limit", "1"]) == 0
    assert "earlier import" not in capsys.readouterr().err


def test_unread_columns_do_not_flood_the_summary(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "Who?", "odd\nname": "x"}
    rows = [row, {**row, "question": "Why?", **{f"n{i}": "x" for i in range(50)}}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["prompts", "rows.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (unread,) = (line for line in lines if line.startswith("unread columns"))
    assert unread.split()[2:4] == ["odd\\nname", "2,"]
    assert unread.endswith("and other columns 31")


def test_a_workspace_of_a_target_by_an_old_name_is_refused_until_it_is_renamed(
    workplace: Path, failing: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.save(
        "sparrow", Path("runs/demo/drafters/sparrow"), target=load("demo-small")
    )
    for command in ("status", "prompts talks.json", "train wren", "serve --drafter x"):
        line = failing(*command.split(), "--model", "demo")
        assert "rename the folder to runs/demo-small" in line
    Path("runs/demo").rename("runs/demo-small")
    exporting = ["export", "sparrow", "--out", "out", "--model", "demo-small"]
    assert main(exporting) == 0
    assert main(["status", "--model", "demo"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_json_output(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "talks.json", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["added"], facts["total"]) == (3, 3)
    assert main(["target", "list", "--json"]) == 0
    assert "qwen2.5-vl-7b" in json.loads(capsys.readouterr().out)["targets"]


def test_an_imported_checkpoint_is_a_drafter(
    workplace: Path, capsys: pytest.CaptureFixture[str], failing: Callable[..., str]
) -> None:
    """EAGLE's layout for the demo target, by its names and shapes."""
    info = load("demo-small").info
    width, inner = info.hidden_size, info.intermediate_size
    shapes = {"fc": (width, 2 * width), "layers.0.mlp.down_proj": (width, inner)}
    shapes |= {f"layers.0.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
    shapes |= {f"layers.0.self_attn.{name}_proj": (width, width) for name in "qkvo"}
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    config = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": info.num_heads,
    }
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text(json.dumps(config))
    torch.save(tensors, "theirs/pytorch_model.bin")
    assert (
        main(["import", "theirs", "--as", "eagle2", "--name", "imported", "--json"])
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["not the target's"]["attention_bias"] is False
    assert (
        main(["generate", "--drafter", "imported", "--max-new-tokens", "4", "Hello"])
        == 0
    )
    assert "exists" in failing(
        "import", "theirs", "--as", "eagle2", "--name", "imported"
    )
    assert "visual_norm" in failing("import", "theirs", "--as", "sparrow")
    assert "config.json" in failing("import", ".", "--as", "eagle2")


def test_a_full_disk_loses_nothing(workplace: Path) -> None:
    assert main(["prompts", "talks.json"]) == 0
    before = read(Path("runs/demo-small/prompts.parquet"))
    rows = [
        {"conversations": [{"from": "human", "value": f"Another {i} {hash(str(i))}"}]}
        for i in range(500)
    ]
    (workplace / "more.json").write_text(json.dumps(rows))
    run = subprocess.run(
        [*COMMAND, "prompts", "more.json"],
        capture_output=True,
        text=True,
        # A limit on file sizes stands in for a disk with no room.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "File too large" in line
    assert read(Path("runs/demo-small/prompts.parquet")) == before
    assert not list(Path("runs/demo-small").glob(".*.tmp"))


@pytest.mark.slow
def test_an_interrupted_run_can_be_continued(
    workplace: Path, checkpoint: Callable[..., Path]
) -> None:
    dialogues(640, "many.json")
    model = str(checkpoint("qwen2_5_vl", layers=1))
    assert main(["prompts", "many.json", "-m", model, "--eval-share", "0"]) == 0
    out = workplace / "responses"
    command = [*COMMAND, "responses", "-m", model, "--out", str(out), "--workers", "0"]
    command += ["--max-new-tokens", "40"]
    run = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while run.poll() is None and not list(out.glob("part-*")):
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    shown, err = run.communicate()
    assert run.returncode == 130, err
    assert shown == ""
    assert err.strip().splitlines()[-1].startswith("stopped: ")
    assert f"kept in {out}" in err
    assert "Traceback" not in err
    assert 0 < len(list(out.glob("part-*"))) < 10


def test_the_time_left_is_that_of_the_work_as_it_goes_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading, the steps of an earlier run and those of a faster stage do not count."""
    now = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    with console.progress("training", "steps") as report:
        now = 500.0
        for done in range(1000, 1501):
            report(done, 4000)
            now += 1
        assert "1.0/s, 42:00 left" in capsys.readouterr().err.splitlines()[-1]
        for done in range(1501, 2001):
            report(done, 4000)
            now += 10
    assert "10.0 s each, 5:33:" in capsys.readouterr().err.splitlines()[-1]


# Recipe files

RECIPE = """
recipe = "fair"
steps = 200
tree = "chain-4"
"stages.*.learning_rate" = 1e-3

[stages.multimodal]
hops = 4
losses = { cross_entropy = 0.5 }

[sparrow]
ivsb = false

[sparrow.stages.text]
hops = 3

[msd_vata]
warmup = 0.2
"""


def test_a_recipe_file_has_settings_for_all_drafters_and_for_each(
    workplace: Path,
) -> None:
    Path("mine.toml").write_text(RECIPE)
    sparrow, msd = (
        flat(resolve(name, "mine.toml", ["steps=300"])) for name in ("sparrow", "msd")
    )
    fair = flat(resolve("sparrow", "fair", []))
    changed = {
        name: value for name, value in sparrow.items() if value != fair.get(name)
    }
    assert changed == {
        "steps": 300,
        "tree": "chain-4",
        "stages.text.learning_rate": 1e-3,
        "stages.multimodal.learning_rate": 1e-3,
        "stages.multimodal.hops": 4,
        "stages.multimodal.losses.cross_entropy": 0.5,
        "ivsb": False,
        "stages.text.hops": 3,
    }
    assert (msd["stages.text.hops"], msd["warmup"]) == (1, fair["warmup"])
    assert flat(resolve("msd_vata", "mine.toml", []))["warmup"] == 0.2
    Path("empty.toml").touch()
    assert resolve("msd", "empty.toml", []) == resolve("msd", "paper", [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stpes = 3", "did you mean 'steps'"),
        ("[stages.multimodl]\nhops = 2", "did you mean 'multimodal'"),
        ("[sparow]\nsteps = 2", "did you mean 'sparrow'"),
        ("[sparrow]\nivsp = false", "did you mean 'ivsb'"),
        ("[stage.text]\nhops = 2", "did you mean 'stages'"),
        ('recipe = "fairr"', "did you mean 'fair'"),
        ("recipe = 3", "'3'"),
        ('steps = "many"', "'steps'"),
        ("warmup = 2026-01-01", "'warmup'"),
        ("sparrow = 3", "[sparrow]"),
        ("steps = ", "cannot be read"),
        ("steps = " + "[" * 5000, "cannot be read"),
        (None, "No such file"),
    ],
)
@pytest.mark.parametrize(
    "command", [["train", "sparrow"], ["run", "--drafters", "msd,sparrow"]]
)
def test_a_recipe_file_that_does_not_fit_is_one_line(
    command: list[str],
    text: str | None,
    named: str,
    workplace: Path,
    failing: Callable[..., str],
) -> None:
    if text is not None:
        Path("mine.toml").write_text(text)
    line = failing(*command, "--recipe", "mine.toml")
    assert "mine.toml" in line
    assert named in line
    assert not Path("runs").exists()
