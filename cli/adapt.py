"""`vlmdistill adapt`: train a drafter on new traffic, and publish it if it is better."""

from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console
from vlmdistill.cli.harvest import EvalShare, PolicyFile

if TYPE_CHECKING:
    from vlmdistill.pipelines.workspace.versions import DrafterRound

DEFAULT_MINUTES = 5.0
NOT_PUBLISHED = 3  # exit status: the round is done, and the drafter in use stays


def adapt(
    drafter: Annotated[
        str, typer.Argument(help="Name of a trained drafter of the workspace.")
    ],
    source: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Logs, as for `vlmdistill harvest`; may be repeated.",
        ),
    ],
    model: console.Model = "demo",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Minutes of training.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of training, instead of --minutes.")
    ] = None,
    old: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of samples that the drafter knows already.",
        ),
    ] = 0.5,
    fewest: Annotated[
        int, typer.Option(min=1, help="New samples that a round needs.")
    ] = 32,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A training setting, which stays otherwise as the drafter was trained; may be repeated.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, help="Held-out prompts of the new traffic, and as many others."
        ),
    ] = 60,
    max_new_tokens: console.MaxNewTokens = 256,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of the tokens per call on old prompts that may be lost.",
        ),
    ] = 0.02,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Repeat for ever, beginning so long after the last start: 24h.",
        ),
    ] = None,
    policy: PolicyFile = None,
    eval_share: EvalShare = 0.1,
    workers: console.Workers = None,
    seed: console.Seed = 0,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Adapt a drafter to new traffic: a round of harvest, capture, training and evaluation.

    The new version is an ordinary drafter, NAME.r1, NAME.r2 and so on. It comes into use, also in a running
    `vlmdistill serve`, only if it accepts more on held-out prompts of the traffic and not less on others, by
    their intervals. Exit status 3 says that the round is done and nothing was published; why is printed and
    recorded. A round that was stopped at any point goes on with the same command.
    """
    import time

    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
    from vlmdistill.pipelines.traffic.policy import Policy
    from vlmdistill.stores.errors import DataError
    from vlmdistill.stores.schema import seconds

    rules = Policy.read(policy)
    pause = None if every is None else seconds(every, "--every")
    workspace = console.workspace(model, runs)
    describe(workspace.drafter(drafter))  # before torch
    checkpoint(model)
    from vlmdistill.pipelines.traffic import adapt as traffic
    from vlmdistill.pipelines.traffic.logs import unread_line

    if minutes is None and steps is None:
        minutes = DEFAULT_MINUTES
    how = traffic.Adaptation(
        sources=tuple(source),
        policy=rules,
        eval_share=eval_share,
        minutes=minutes,
        steps=steps,
        old=old,
        fewest=fewest,
        settings=tuple(settings or ()),
        limit=limit,
        max_new_tokens=max_new_tokens,
        tolerance=tolerance,
        seed=seed,
        workers=workers,
    )
    while True:
        start = time.monotonic()
        drafter_round = traffic.adapt(
            workspace, drafter, how, bar=console.progress, say=console.remark
        )
        _show(drafter_round, as_json)
        if pause is None:
            break
        time.sleep(max(0.0, pause - (time.monotonic() - start)))
    unread = (drafter_round.facts.get("harvest") or {}).get("unread")
    if unread:
        raise DataError(
            f"the round is done without a part of the logs: {unread_line(unread)}"
        )
    raise typer.Exit(0 if drafter_round.published else NOT_PUBLISHED)


def _show(drafter_round: "DrafterRound", as_json: bool) -> None:
    import msgspec

    if as_json:
        console.result(msgspec.to_builtins(drafter_round), as_json)
        return
    outcome = f"{drafter_round.base} stays in use"
    if drafter_round.published:
        outcome = f"{drafter_round.drafter} is in use from now on"
    console.echo(f"round {drafter_round.number}: {outcome}: {drafter_round.why}")
