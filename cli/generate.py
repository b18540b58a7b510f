"""`vlmdistill generate`: generate one response, streamed, with the drafted tokens marked."""

from typing import Annotated

import typer

from vlmdistill.cli import console


def generate(
    text: Annotated[str, typer.Argument(help="The question.")],
    model: console.Model = "demo",
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|URL", help="An image, of s3:// too; may be repeated."
        ),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|URL",
            help="A video file, or a folder of frames, of s3:// too; may be repeated.",
        ),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Frames per second to sample from each video; default: the target's setting."
        ),
    ] = None,
    frames: console.Frames = None,
    drafter: console.DrafterName = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_new_tokens: console.MaxNewTokens = 512,
    tree: console.TreeShape = None,
    seed: console.Seed = 0,
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    compiled: console.Compiled = False,
    runs: console.Runs = None,
) -> None:
    """Generate one response.

    On a terminal, the tokens that the drafter drafted are green and underlined.
    """
    import sys

    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.media.frames import media_file, probe
    from vlmdistill.pipelines.media.images import read_image
    from vlmdistill.pipelines.targets.checkpoints.folder import check_videos

    workspace = console.workspace(model, runs)
    if drafter is not None:  # what is cheap to check comes before torch and the target
        describe(workspace.trained(drafter))
    for source in image or []:
        read_image(media_file({"path": source}))
    if video:
        check_videos(model)
    for source in video or []:
        probe(media_file({"path": source}))
    sampling = {
        name: value
        for name, value in {"fps": fps, "frames": frames}.items()
        if value is not None
    }
    with console.waiting(f"loading {model}"):
        from vlmdistill.pipelines.streaming import response as streaming

        stream = streaming.generate(
            workspace,
            text,
            images=image or [],
            videos=video or [],
            sampling=sampling,
            drafter=drafter,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            tree=tree,
            seed=seed,
            load_options=console.loading(attention, target_dtype, compiled=compiled),
        )
    marked = sys.stdout.isatty()
    for piece in stream.pieces():
        text = console.plain(piece.text) if marked else piece.text
        green = marked and piece.drafted
        typer.echo(
            typer.style(text, fg="green", underline=True) if green else text, nl=False
        )
    typer.echo()
    console.remark(stream.summary())
