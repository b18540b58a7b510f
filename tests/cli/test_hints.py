"""Suggestions for unknown names, and early errors for what would fail later."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import dialogues
from tests.drafters import synthetic
from tests.stores.samples import make
from vlmdistill.cli.main import main
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.suggestions import did_you_mean

pytestmark = pytest.mark.usefixtures("workplace")


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("sparow", ["eagle2", "sparrow"], " (did you mean 'sparrow'?)"),
        ("eagle", ["eagle2", "eagle3", "msd"], " (did you mean 'eagle3' or 'eagle2'?)"),
        ("nonsense", ["eagle2", "sparrow"], ""),
        ("", ["eagle2"], ""),
        ("half", ["float16", "float32"], " (did you mean 'float16'?)"),
    ],
)
def test_names_are_suggested_by_their_spelling(
    name: str, known: Sequence[str], near: str
) -> None:
    assert did_you_mean(name, known) == near


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "sparow"], "sparrow"),
        (["train", "sparrow", "--set", "batch_token=8192"], "batch_tokens"),
        (["train", "sparrow", "--set", "stages.multimodl.hops=3"], "multimodal"),
        (["run", "--drafters", "eagel2"], "eagle2"),
        (["features", "--encoding", "hiden.text=int8"], "hidden.text"),
        (["prompts", "talks.json", "--model", "demo-vide"], "demo-video"),
        (["target", "show", "llava1.5-7b"], "llava-1.5-7b"),
        (["export", "sparow", "--out", "served"], "sparrow"),
        (["report", "--model", "dmo"], "demo"),
    ],
)
def test_a_mistyped_name_is_refused_with_a_suggestion(
    arguments: list[str], meant: str, failing: Callable[..., str]
) -> None:
    assert f"'{meant}'" in failing(*arguments)
    assert not Path("runs").exists()


def test_a_trained_drafter_is_suggested_before_one_to_train(
    failing: Callable[..., str],
) -> None:
    for name in ("eagle3", "my-eagle"):
        synthetic.save("eagle3", Path("runs/demo-small/drafters") / name)
    assert failing("export", "my-eagel", "--out", "served").count("'my-eagle'") == 1
    line = failing("export", "hivis", "--out", "served")
    assert "vlmdistill train hivis" in line


@pytest.mark.parametrize(
    "name", ["demo", "qwen2-vl-7b", "someone/model", "ckpt/mine", "ckpt"]
)
def test_a_target_is_a_known_name_a_hub_id_or_a_folder(name: str) -> None:
    Path("ckpt/mine").mkdir(parents=True)
    Path("ckpt/config.json").touch()
    assert main(["prompts", dialogues(1), "--model", name]) == 0


def test_an_existing_workspace_needs_no_target() -> None:
    Path("runs/pulled").mkdir(parents=True)  # a store that someone sent, to train from
    assert Workspace.of("pulled").root == Path("runs/pulled")
    with pytest.raises(TargetError, match="'pulled'"):
        Workspace.of("puled")


def test_a_workspace_is_any_folder_whose_name_is_text(
    failing: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["prompts", dialogues(1), "--runs", "."]) == 0
    assert Path("demo-small/prompts.parquet").exists()
    odd = os.fsdecode(b"caf\xe9")
    assert r"caf\udce9" in failing("report", "--runs", odd)
    Path(odd).mkdir()
    assert "UTF-8" in failing("report", "--model", f"./{odd}")
    monkeypatch.setenv("VLMDISTILL_RUNS", odd)
    assert "UTF-8" in failing("report")


def test_a_drafters_name_is_not_a_folder_here(failing: Callable[..., str]) -> None:
    workspace = Workspace.of("demo-small")
    for folder in ("runs/demo-small/drafters/sparrow", "sparrow", "exported"):
        Path(folder).mkdir(parents=True)
    assert workspace.trained("sparrow") == workspace.drafter("sparrow")
    assert workspace.trained("./sparrow") == Path("sparrow")
    assert workspace.trained("exported") == Path("exported")
    assert "no folder served/sparow" in failing(
        "generate", "--drafter", "served/sparow", "What?"
    )


def test_a_small_eval_split_is_warned_about_at_import(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def warned(*options: str) -> bool:
        shutil.rmtree("runs", ignore_errors=True)
        capsys.readouterr()
        assert main(["prompts", dialogues(60), *options, "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["total"] == 60
        return "warning: " in shown.err and "--split eval" in shown.err

    assert warned()
    assert not warned("--eval-share", "0.9")
    assert not warned("--eval-share", "0")  # as it was asked for
    assert not warned("--split", "train")
    shutil.rmtree("runs")
    assert main(["prompts", dialogues(3), "--eval-share", "1e-9"]) == 0
    assert "none of the 3 prompts is held out" in capsys.readouterr().err


def test_eval_and_run_refuse_an_empty_split_before_anything_loads(
    failing: Callable[..., str],
) -> None:
    assert main(["prompts", dialogues(3), "--eval-share", "0"]) == 0
    assert "--split eval" in failing("run", "--drafters", "lookahead")
    code = """if True:
        import sys
        from vlmdistill.cli.main import main
        assert main(["eval", "lookahead"]) == 1
        assert not {"torch", "transformers"} & sys.modules.keys()
    """
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "--split eval" in run.stderr
    assert "-m demo-video" in failing("eval", "lookahead", "-m", "demo-video")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_question_is_refused(text: str, failing: Callable[..., str]) -> None:
    assert "TEXT" in failing("generate", text)


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["train", "sparrow", "--set", "lr=1e-4"], "stages.*.learning_rate="),
        (["train", "sparrow", "--set", "stages.text.lr=1e-4"], "'learning_rate'"),
        (["prompts", "llava.json"], "--images"),
        (["prompts", "photos.json"], "--ask"),
    ],
)
def test_an_error_names_what_helps(
    arguments: list[str], cure: str, failing: Callable[..., str]
) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
    ]
    Path("llava.json").write_text(
        json.dumps([{"image": "1.jpg", "conversations": turns}])
    )
    Path("photos.json").write_text(json.dumps([{"image": "1.jpg"}]))
    assert cure in failing(*arguments)


WRONG = {
    "train sparow": "there is no drafter 'sparow' (did you mean 'sparrow'",
    "run --drafters wren,sparow": "there is no drafter 'sparow' (did you mean 'sparrow'",
    "features --for sparow": "there is no drafter 'sparow' (did you mean 'sparrow'",
    "features --model demmo": "there is no target 'demmo' (did you mean 'demo'?)",
    "features": "no prompts in",
    "responses": "no prompts in",
    "eval wren": "no prompts in",
    "generate hi --model demmo": "there is no target 'demmo'",
    "generate hi --image no.jpg": "image no.jpg does not exist",
    "generate hi --drafter wren": "it is not trained yet; `vlmdistill train wren`",
    "generate hi --video no.mp4": "video no.mp4 does not exist",
    "export wren --out out": "it is not trained yet; `vlmdistill train wren`",
    "serve --drafter wren": "it is not trained yet; `vlmdistill train wren`",
    "target list": "llava-next",
    "target show demmo": "there is no target 'demmo'",
    "status": "vlmdistill prompts demo",
    "status --model demmo": "there is no target 'demmo'",
    "list recipes": "each method's own settings",
    "report": "no evaluations in",
    "report a b": "a does not exist",
    "prompts no.json": "no.json",
    "prompts --resplit 0.2": "no prompts in",
    "import nowhere --as eagle3": "nowhere has no config.json",
    "import nowhere --as eagel3": "did you mean 'eagle3'",
    "eval wren --bench textvq": "did you mean 'textvqa'",
    "run --recipe fairr": "did you mean 'fair'",
    "run --tracker mlflow": "choose from tensorboard",
    "train wren --recipe fairr": "did you mean 'fair'",
    "features --encoding hidden.txt=int8": "did you mean 'hidden.text'",
    "serve --host 0.0.0.0": "set --key",
    **{
        f"store {command}": "there is no feature store at nowhere"
        for command in (
            "info nowhere",
            "stats nowhere",
            "verify nowhere",
            "gc nowhere",
            "push nowhere there",
            "pull nowhere there",
            "filter nowhere --where 'words > 1' --name some",
        )
    },
}


def test_cheap_mistakes_and_lists_need_no_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = f"""
import shlex, sys
sys.modules["torch"] = None  # to import it is an error
from vlmdistill.cli.main import main
for command in {list(WRONG)}:
    for out in sys.stdout, sys.stderr:
        print("\\n$", command, file=out, flush=True)
    main(shlex.split(command))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    printed = capfd.readouterr()
    for command, line in WRONG.items():
        said = [
            text.partition(f"$ {command}\n")[2].partition("\n$")[0] for text in printed
        ]
        assert any(line in text for text in said), (command, said)


def test_videos_are_refused_at_import_for_a_target_without_video(
    checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    llava = str(checkpoint("llava"))
    rows = [
        {
            "video": "clip.gif",
            "conversations": [{"from": "human", "value": "<video>What happens?"}],
        }
    ]
    rows += [
        {"conversations": [{"from": "human", "value": f"Question {i}"}]}
        for i in range(3)
    ]
    Path("rows.json").write_text(json.dumps(rows))
    still = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    still[0].save("clip.gif", save_all=True, append_images=still[1:])
    assert main(["prompts", "rows.json", "--model", llava, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["added"], facts["skipped"]) == (3, {"video": 1})
    Path("rows.json").write_text(json.dumps(rows[:1]))
    assert main(["prompts", "rows.json", "--model", llava]) == 1
    assert (
        "targets of the family llava-1.5 support images alone" in capfd.readouterr().err
    )
    assert main(["generate", "What?", "--video", "clip.gif", "--model", llava]) == 1
    assert (
        "targets of the family llava-1.5 support images, not videos"
        in capfd.readouterr().err
    )


def suggested(text: str) -> list[str]:
    """The commands within backquotes, and that of `status`."""
    return [
        *re.findall(r"`(vlmdistill [^`]*)`", text),
        *re.findall(r"^next: (.*)$", text, re.M),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["train", "eagle3"],
        ["eval", "sparrow"],
        ["report"],
        ["export", "sparrow", "--out", "out"],
        ["responses"],
        ["features", "--for", "wren"],
    ],
)
@pytest.mark.parametrize(
    "spelling", ["--model={} --runs={}", "-m {} --runs {}", "--runs {1} --model {0}"]
)
def test_a_suggested_command_is_for_the_workspace_that_was_asked(
    arguments: list[str], spelling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = spelling.format("demo-video", "other").split()
    main([*arguments, *options])
    commands = suggested("\n".join(capsys.readouterr()))
    assert commands
    for command in commands:
        words = command.split()
        assert "demo-video" in words
        assert words[words.index("--runs") + 1] == "other"


def test_a_suggested_command_has_no_option_that_was_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "eagle3"])
    (command,) = suggested(capsys.readouterr().err)
    assert "--runs" not in command


def test_a_suggested_help_needs_no_workspace(failing: Callable[..., str]) -> None:
    Path("rows.json").write_text('[{"note": "nothing"}]')
    output = failing("prompts", "rows.json", "--runs", "other")
    assert "`vlmdistill prompts --help`" in output


@pytest.mark.parametrize(
    ("variable", "arguments", "options"),
    [
        ("", [], ""),
        ("", ["--model", "demo-small"], " --model demo-small"),
        ("demo-small", [], ""),
        ("demo-small", ["--model", "demo-small"], " --model demo-small"),
        ("demo-small", ["--model", "demo"], " --model demo"),
    ],
)
def test_a_suggested_command_names_the_target_that_it_would_not_take_by_itself(
    variable: str,
    arguments: list[str],
    options: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLMDISTILL_MODEL", variable)
    assert main(["status", *arguments]) == 0
    (command,) = suggested("\n".join(capsys.readouterr()))
    assert command == f"vlmdistill prompts demo{options}"


@pytest.mark.parametrize(
    "arguments", [["status"], ["report"], ["export", "sparrow", "--out", "out"]]
)
def test_an_empty_workspace_names_the_one_beside_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make(Path("runs/demo/features"))
    main(arguments)
    assert "--model demo" in "\n".join(capsys.readouterr())
    main([*arguments, "--model", "demo"])
    assert "not empty" not in "\n".join(capsys.readouterr())


def test_a_missing_folder_of_workspaces_is_named(failing: Callable[..., str]) -> None:
    here = Path.cwd()
    line = failing("export", "wren", "--out", "out")
    assert f"no drafter in {here}/runs/demo-small/drafters/wren" in line
    assert f"there is no folder {here}/runs: give --runs" in line
    Path("runs").mkdir()
    assert "no folder" not in failing("export", "wren", "--out", "out")


def test_a_workspace_in_place_of_its_store_names_the_store(
    tmp_path: Path, failing: Callable[..., str]
) -> None:
    make(tmp_path / "demo/features")
    assert f"{tmp_path}/demo/features" in failing(
        "store", "info", str(tmp_path / "demo")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "--format", "htm"], "'html'"),
        (["list", "drafter"], "'drafters'"),
        (["features", "--for", "wren", "--dtype", "float"], "'float16'"),
        (["train", "wren", "--dtype", "bf16"], "'bf16' is not a dtype: choose from"),
        (["export", "wren", "--out", "x", "--dtype", "fp16"], "mean 'float16'"),
        (["eval", "wren", "--temperature", "0,hot"], "'hot' is no number from 0 on"),
        (
            ["eval", "--engine", "openai:http://h", "--concurrency", "0"],
            "'0' is no whole number from 1 on",
        ),
        (["train", "wren", "--minutes", "0"], "--minutes: give a time above 0"),
        (["train", "wren", "--cpu-seconds", "9", "--minutes", "1"], "give one of"),
        (["train", "wren", "--minutes", "1", "--set", "steps=3"], "give one of them"),
        (["train", "wren", "--minutes", "1", "--dry-run"], "--dry-run does not do"),
        (["serve", "--compare", "wren"], "at least two drafters, or --drafter wren"),
        (["serve", "--compare", "a,b", "--drafter", "c"], "leave out --drafter"),
        (["serve", "--compare", "a,b", "--tree", "auto"], "one tree for all"),
        (["eval", "wren", "--limit", "0"], "1 or more"),
        (["train", "wren", "--seed", "x"], "whole number"),
        (["serve", "--port", "70000"], "65535 or less"),
        (["store", "gc", "x", "--grace", "y"], "number"),
    ],
)
def test_a_value_that_is_refused_is_told_in_our_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    line = " ".join(capsys.readouterr().err.split())
    assert said in line
    assert "Input should" not in line
    assert "Value error" not in line


@pytest.mark.parametrize("option", ["--image", "--video"])
def test_an_image_of_the_web_is_refused_by_its_whole_name(
    option: str, failing: Callable[..., str]
) -> None:
    assert "https://example.com/a.png" in failing(
        "generate", "hi", option, "https://example.com/a.png"
    )
