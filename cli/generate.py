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
    # Cheap checks come before torch and the target.
    if drafter is not None:
        describe(workspace.trained(drafter))
    for source in image or []:
        read_image(media_file({"path": source}))
    if video:
        check_videos(model)
    for source in video or []:
        probe(media_file({"path": source}))
    sampling: dict[str, float] = {}
    if fps is not None:
        sampling["fps"] = fps
    if frames is not None:
        sampling["frames"] = frames
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
    on_terminal = sys.stdout.isatty()
    for piece in stream.pieces():
        shown = console.plain(piece.text) if on_terminal else piece.text
        if on_terminal and piece.drafted:
            shown = typer.style(shown, fg="green", underline=True)
        typer.echo(shown, nl=False)
    typer.echo()
    console.remark(stream.summary())
