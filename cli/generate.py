"""`vlmdistill generate`: one answer, streamed, with the drafted tokens marked."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console


def generate(
    text: Annotated[str, typer.Argument(help="What to ask.")],
    model: console.Model = "demo",
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    video: Annotated[
        list[Path] | None, typer.Option(help="A video file, or a folder of frames; may be repeated.")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Frames a second of the videos; default: the target's.")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="The same by a number of frames.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Name or folder of a trained drafter; plain decoding without.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    tree: Annotated[str | None, typer.Option(help="total-depth-k such as 30-3-8, or chain-5.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=console.LAST_SEED, help="Seed of sampling.")] = 0,
    attention: console.Kernels = console.Attention.sdpa,
    target_dtype: console.Precision = console.TargetDtype.auto,
    compiled: console.Compiled = False,
    runs: console.Runs = None,
) -> None:
    """Answer one prompt. Drafted tokens that were accepted are green and underlined on a terminal."""
    import sys

    from vlmdistill.drafters.base import Tree
    from vlmdistill.pipelines.answer import answer
    from vlmdistill.pipelines.workspace import Workspace

    workspace = Workspace.of(model, Path(runs) if runs else None)
    stream = answer(
        workspace,
        text,
        images=image or [],
        videos=video or [],
        sampling={name: value for name, value in {"fps": fps, "frames": frames}.items() if value is not None},
        drafter=drafter,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        tree=Tree.parse(tree) if tree else None,
        seed=seed,
        how=console.loading(attention, target_dtype, compiled=compiled),
    )
    marked = sys.stdout.isatty()
    for piece in stream.pieces():
        green = marked and piece.drafted
        typer.echo(typer.style(piece.text, fg="green", underline=True) if green else piece.text, nl=False)
    typer.echo()
    console.note(stream.summary())
