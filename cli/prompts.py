"""`vlmdistill prompts`: import prompts into the workspace."""

from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmdistill.cli import console
from vlmdistill.stores.errors import printable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from vlmdistill.pipelines.data.prompts.importing import RowForm
    from vlmdistill.pipelines.workspace.workspace import Workspace

MOST_SHOWN = 3  # of the files that are not read
NOTED = ("skipped_file", "row_forms", "earlier", "unread_files", "sampled")
"""Parts of a summary that have lines of their own."""
MOST_NAMED = 5  # of names with counts
MOST_UNREAD = 20  # of columns
MOST_COLUMNS = 10  # that are named
MOST_FORMS = 5  # of rows, whose first prompts are shown
LONG = 600  # characters of a text, above which its middle is not shown
FEW = 20  # held-out prompts, below which results are noise


def prompts(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC...",
            help="JSON, JSONL, Parquet or tar files, plain or compressed with gzip, bzip2 or xz; Hugging "
            "Face datasets (a folder, or name[:subset][@split] with --format hf); with --ask a folder of "
            "images and videos; or 'demo': generated scenes and dialogues for the demo targets.",
        ),
    ] = None,
    model: console.Model = "demo",
    kind: Annotated[
        Literal["auto", "llava", "sharegpt", "chat", "hf"],
        typer.Option(
            "--format", help="Format of the rows; auto: detect it from the columns."
        ),
    ] = "auto",
    ask: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The question about images and videos that have none."
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the images and videos, if it is not the folder of the source.",
        ),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Frames per second to sample from each video; default: the row's, else the target's."
        ),
    ] = None,
    frames: console.Frames = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Import at most N prompts.")
    ] = None,
    turns: Annotated[
        Literal["first", "all"],
        typer.Option(
            help="Make a prompt for the first user turn of a conversation, or for all of them."
        ),
    ] = "first",
    augment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Text added to prompts with images or videos: none (default), long, explain, ocr, "
            "describe or reason; may be repeated.",
        ),
    ] = None,
    augment_text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Text added to text-only prompts: none (default), long, explain or reason; may be repeated.",
        ),
    ] = None,
    eval_share: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Hold out about this share of the prompts for evaluation, by a hash of each.",
        ),
    ] = 0.05,
    split: Annotated[
        Literal["train", "eval"] | None,
        typer.Option(help="Put all prompts into this split, instead of --eval-share."),
    ] = None,
    resplit: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Import nothing: hold out this share of the prompts that are there. Prompts that have "
            "responses stay in their split.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file to write; default: the workspace's prompts.parquet.",
        ),
    ] = None,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Import prompts from files and datasets into the workspace.

    Importing again adds new prompts; a prompt that exists is not added twice, and one whose image or video
    has changed is replaced. Rows that cannot be used are listed with the reason in prompts.skipped.jsonl. One
    example row of each format (docs/inputs.md has more):

    \b
    LLaVA, with images or videos
    {"image": "1.jpg", "conversations": [
      {"from": "human", "value": "<image>\\nWhat is on the table?"},
      {"from": "gpt", "value": "A red apple."}]}
    {"video": "1.mp4", "fps": 2, "conversations": [
      {"from": "human", "value": "<video>\\nWhat happens?"}]}

    \b
    ShareGPT, text only
    {"conversations": [{"from": "human", "value": "Hello"}]}

    \b
    Chat (OpenAI messages)
    {"messages": [{"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "1.jpg"}},
      {"type": "text", "text": "What is this?"}]}]}

    \b
    Question columns
    {"image": "1.jpg", "question": "Which?", "choices": ["one", "two"]}
    {"instruction": "Summarise the text.", "input": "Once ...", "output": "..."}

    \b
    A folder of images and videos, or a tar archive of them
    vlmdistill prompts photos --ask "Describe the image."

    \b
    Without data: questions that the target writes itself
    vlmdistill prompts self --limit 500
    """
    if resplit is not None:
        if sources or split:
            raise typer.BadParameter(
                "it imports nothing: leave out SRC and --split", param_hint="--resplit"
            )
        _split_again(console.workspace(model, runs), resplit, out, as_json)
        return
    if not sources:
        raise typer.BadParameter("name what to import", param_hint="SRC...")
    from vlmdistill.pipelines.data.prompts.importing import Choices
    from vlmdistill.pipelines.prompts import import_sources
    from vlmdistill.pipelines.targets.embedded import ignorance

    choices = Choices(
        images=images,
        fps=fps,
        frames=frames,
        limit=limit,
        turns=turns,
        ask=ask,
        augment=tuple(augment or ["none"]),
        augment_text=tuple(augment_text or ["none"]),
        eval_share=eval_share,
        split=split,
    )
    with console.progress("importing", "rows") as report:
        workspace = console.workspace(model, runs)
        summary = import_sources(workspace, sources, out, kind, choices, report)
    facts = summary.to_dict()
    if not as_json:
        _show(summary.row_forms)
    console.result(facts if as_json else _without_empty(facts), as_json)
    if summary.unread_files:
        _warn_of_unread_files(summary.unread_files)
    if summary.earlier:
        _note_earlier(summary.earlier)
    if summary.sampled:
        _note_sampled(summary.sampled)
    if summary.hidden_media:
        _warn_of_hidden_media(summary.hidden_media)
    if limits := ignorance(workspace.model, summary.datasets):
        console.note(f"warning: {limits}. Name another one with --model")
    if split is None and eval_share and summary.eval < FEW:
        _warn_of_few(summary.eval, summary.total)


def _show(forms: "Sequence[RowForm]") -> None:
    """Print the first prompt of each of the most common forms of rows."""
    for form in forms[:MOST_FORMS]:
        _show_first(form)
    if others := forms[MOST_FORMS:]:
        prompts = sum(form.prompts for form in others)
        console.remark(
            f"{prompts} prompts of {len(others)} other forms of rows: --json shows the first of each"
        )


def _show_first(form: "RowForm") -> None:
    """Print the turns of a prompt, and the response of its source."""
    prompt = form.first
    media = "with" if prompt.media else "without"
    columns = ", ".join(form.columns[:MOST_COLUMNS])
    ellipsis = ", ..." if len(form.columns) > MOST_COLUMNS else ""
    console.remark(
        f"first of {form.prompts} prompts {media} images or videos, of the columns {columns}{ellipsis} "
        f"(row {prompt.row} of {Path(form.file).absolute().name}):"
    )
    texts = [
        (message["role"], "\n".join(map(_part_text, message["content"])))
        for message in prompt.messages
    ]
    texts.append(("response", prompt.reference or "(none in the source)"))
    for name, text in texts:
        label = f"  {name:<9}  "
        lines = indent(_shortened(text), " " * len(label), lambda _: True)
        console.remark(label + lines[len(label) :])


def _part_text(part: "Mapping[str, Any]") -> str:
    """A part of a turn: its text, or the kind and the file's name in brackets."""
    if part["type"] == "text":
        return str(part["text"])
    return f"[{part['type']} {Path(part['path']).name}]"


def _shortened(text: str) -> str:
    """A text, or the beginning and the end of a long one."""
    half = LONG // 2
    return text if len(text) <= LONG else f"{text[:half]} [...] {text[-half:]}"


def _warn_of_hidden_media(counts: "Counter[str]") -> None:
    from vlmdistill.pipelines.data.prompts.importing import RENAME

    names = _most_common(counts)
    console.note(
        f"warning: columns hold or name images or videos that no prompt shows: {names}: if they belong "
        f"to the questions, {RENAME}"
    )


def _most_common(counts: "Counter[str]") -> str:
    """The most common names with their counts, and whether there are others."""
    most_common = counts.most_common(MOST_NAMED)
    names = ", ".join(f"{name} ({count})" for name, count in most_common)
    return names + (", ..." if len(counts) > MOST_NAMED else "")


def _note_earlier(counts: "Counter[str]") -> None:
    names = _most_common(counts)
    console.note(
        f"prompts of an earlier import stay that this one has not made: {names}. If rows were corrected or "
        "removed, import all sources again into a new file, --out, and move that to prompts.parquet"
    )


def _note_sampled(counts: "Counter[str]") -> None:
    names = _most_common(counts)
    console.note(
        f"the rows say how their videos are sampled: {names}. If that is how the files were "
        "recorded, give --fps or --frames"
    )


def _warn_of_unread_files(names: "Sequence[str]") -> None:
    shown = ", ".join(names[:MOST_SHOWN])
    ellipsis = ", ..." if len(names) > MOST_SHOWN else ""
    files = "1 file is" if len(names) == 1 else f"{len(names)} files are"
    console.note(
        f"warning: {files} not read: {shown}{ellipsis}: name files as sources of their own, or a split as "
        "FOLDER@SPLIT"
    )


def _warn_of_few(held_out: int, total: int) -> None:
    shares = (share for share in (0.2, 0.3, 0.5) if share * total >= FEW)
    share = next(shares, None)
    advice = f"`vlmdistill prompts --resplit {share}`, or " if share else ""
    count = f"only {held_out}" if held_out else "none"
    verb = "are" if held_out > 1 else "is"
    console.note(
        f"warning: {count} of the {total} prompts {verb} held out for `eval`, too few to "
        f"measure drafters: {advice}import more with --split eval"
    )


def _split_again(
    workspace: "Workspace", share: float, out: Path | None, as_json: bool
) -> None:
    from vlmdistill.pipelines.data.prompts.splitting import resplit
    from vlmdistill.pipelines.data.responses import dataset

    summary = resplit(
        out or workspace.prompts, share, dataset.keys(workspace.responses)
    )
    console.result(asdict(summary), as_json)
    if share and summary.kept and not summary.moved:
        console.note(
            "warning: no prompt has moved: those with responses stay in their split"
        )


def _without_empty(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without counts that are zero, and with the most common of the unread columns."""
    unread = summary["unread_columns"]
    shown = {printable(name): count for name, count in unread.most_common(MOST_UNREAD)}
    if others := len(unread) - len(shown):
        shown["and other columns"] = others
    summary = {**summary, "unread_columns": shown}
    always = {"out", "added", "present", "total", "train", "eval", "datasets"}
    if summary["skipped"]:
        always.add("skipped_file")
    return {
        name: value
        for name, value in summary.items()
        if name in always or (value and name not in NOTED)
    }
