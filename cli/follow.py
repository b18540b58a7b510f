"""`vlmdistill follow`: a running vLLM takes over new versions of a drafter."""

from typing import Annotated

import typer

from vlmdistill.cli import console


def follow(
    drafter: Annotated[
        str, typer.Argument(help="Name of a trained drafter of the workspace.")
    ],
    server: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A vLLM with this drafter, which can read the workspace.",
        ),
    ],
    model: console.Model = "demo",
    dtype: Annotated[
        console.Dtype,
        typer.Option(help="Dtype of the drafter that the server was started with."),
    ] = "bfloat16",
    every: Annotated[
        str, typer.Option(metavar="TIME", help="How often to look for a newer version.")
    ] = "10s",
    once: Annotated[
        bool, typer.Option("--once", help="Load the version in use, and end.")
    ] = False,
    runs: console.Runs = None,
) -> None:
    """Let a running vLLM draft with the version of a drafter that is in use.

    The server takes it over between two steps; what it responds stays the target's. A version that accepts
    less than the one before is withdrawn, as by `vlmdistill serve`. docs/traffic.md says how vLLM is started.
    """
    import threading

    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.stores.schema import seconds

    pause = seconds(every, "--every")
    workspace = console.workspace(model, runs)
    describe(workspace.drafter(drafter))  # before torch
    from vlmdistill.pipelines.endpoint import switch
    from vlmdistill.pipelines.traffic.follow import Follower, FollowError

    with Follower(workspace, drafter, server, dtype=dtype) as follower:
        follower.look()
        if follower.trials.current is None:
            raise FollowError(
                f"{server} drafts as before: it refused the version in use"
            )
        console.echo(f"{server} drafts with {follower.trials.current}")
        if not once:
            switch.follow(follower.look, threading.Event().wait, pause, drafter)
