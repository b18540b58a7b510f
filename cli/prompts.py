"""`vlmdistill prompts`: import conversations into the workspace."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.importers import Format as AnyFormat
    from vlmdistill.pipelines.prompts import Choices, Summary
    from vlmdistill.pipelines.workspace import Workspace


class Format(StrEnum):
    """Formats of a source."""

    auto = "auto"
    llava = "llava"
    sharegpt = "sharegpt"
    chat = "chat"
    hf = "hf"


class Turns(StrEnum):
    """Which assistant turns become prompts."""

    first = "first"
    all = "all"


class Split(StrEnum):
    """The side that all prompts of an import are put on."""

    train = "train"
    eval = "eval"


def prompts(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help="JSON or JSONL files, Hugging Face datasets (name[:subset][@split] or folder; a name needs "
            "--format hf), or 'demo': the scenes and dialogues of the embedded target.",
        ),
    ],
    model: console.Model = "demo",
    kind: Annotated[Format, typer.Option("--format", help="Form of the sources.")] = Format.auto,
    images: Annotated[
        Path | None, typer.Option(help="Folder that paths of images and videos are relative to.")
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(help="Frames a second of every video; default: the row's, or the target's."),
    ] = None,
    frames: Annotated[int | None, typer.Option(help="The same by a number of frames, evenly spread.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Import at most N prompts.")] = None,
    turns: Annotated[
        Turns, typer.Option(help="Ask for the first assistant turn of a conversation, or for each.")
    ] = Turns.first,
    augment: Annotated[
        list[str] | None,
        typer.Option(help="none|long|explain|ocr|describe|reason, for prompts with images; may be repeated."),
    ] = None,
    augment_text: Annotated[
        list[str] | None, typer.Option(help="The same for prompts of text alone.")
    ] = None,
    eval_share: Annotated[float, typer.Option(help="Share of prompts held out for eval.")] = 0.05,
    split: Annotated[
        Split | None, typer.Option(help="Put all prompts on one side, instead of by share.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Parquet file; default: the model's workspace.")] = None,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Import prompts: LLaVA JSON, ShareGPT JSON, chat JSONL or a Hugging Face dataset.

    Rows that cannot be used are listed, with the reason, in prompts.skipped.jsonl. Importing again
    adds what is new; the same prompt is kept once.
    """
    from vlmdistill.pipelines import prompts as importing
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    out = out or workspace.prompts
    choices = importing.Choices(
        images=images,
        fps=fps,
        frames=frames,
        limit=limit,
        turns=turns.value,
        augment=tuple(augment or ["none"]),
        augment_text=tuple(augment_text or ["none"]),
        eval_share=eval_share,
        split=split.value if split else None,
    )
    summary = imported(given, workspace, out, choices, kind.value)
    console.result(_facts(summary.to_dict()), as_json)


def imported(
    given: list[str],
    workspace: "Workspace",
    out: Path,
    choices: "Choices",
    kind: "AnyFormat" = "auto",
) -> "Summary":
    """Import the sources as typed; `demo` alone means the files that the demo writes into the workspace.

    These have videos where the model is the embedded target that knows them.
    """
    from vlmdistill.pipelines import prompts as importing
    from vlmdistill.pipelines.demo_prompts import AMOUNTS, import_demo

    with console.progress("importing", "rows") as report:
        if given == ["demo"] and not Path("demo").exists():
            amount = AMOUNTS.get(workspace.model, AMOUNTS["demo"])
            folder = workspace.root / "demo-data"
            return import_demo(folder, out, amount, choices, progress=lambda rows: report(rows, 0))
        return importing.import_prompts(given, out, kind, choices, lambda rows: report(rows, 0))


def _facts(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without what is nothing to tell."""
    always = ("out", "added", "present", "total", "train", "eval", "datasets")
    return {name: value for name, value in summary.items() if name in always or summary["skipped"] or value}
