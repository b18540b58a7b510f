"""`vlmdistill harvest`: logs of a server become prompts and responses of the workspace."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Logs: JSON lines, batch input and output files, folders of these, s3://, gs:// or az:// URLs; "
        "also the folder of `serve --record`.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy", metavar="FILE.toml", help="What may be kept; see docs/traffic.md."
    ),
]
Share = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Share of the conversations to keep, by a hash of each."
    ),
]
MaxAge = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Drop requests that are older, such as 30d."),
]
MediaBytes = Annotated[
    str | None,
    typer.Option(
        "--media-budget",
        metavar="SIZE",
        help="Most bytes of media kept; default: 10GB.",
    ),
]
Redact = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="What removes from each conversation what nobody may keep.",
    ),
]
Round = Annotated[
    str | None,
    typer.Option("--round", help="Name of the round; default: today's date (UTC)."),
]
EvalShare = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="Share of the conversations to hold out for evaluation."
    ),
]


def harvest(
    sources: Sources,
    model: console.Model = "demo",
    policy: PolicyFile = None,
    share: Share = None,
    max_age: MaxAge = None,
    media: MediaBytes = None,
    redact: Redact = None,
    round_name: Round = None,
    eval_share: EvalShare = 0.1,
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Take prompts and responses from logs of a server, as far as a policy allows.

    Harvesting the same logs again adds what is new. Responses keep the tokens that the server sent; without
    any they are tokenized and checked. What is dropped is counted by reason, and nothing of it is kept. Each
    harvest is a line of traffic/audit.jsonl in the workspace. A file that cannot be read is named, the others
    are harvested, and the exit status is 1.
    """
    from vlmdistill.pipelines.targets.checkpoints.fingerprint import checkpoint
    from vlmdistill.pipelines.traffic.policy import Policy
    from vlmdistill.stores.errors import DataError

    rules = Policy.read(
        policy, share=share, max_age=max_age, media=media, redact=redact
    )
    workspace = console.workspace(model, runs)
    checkpoint(model)  # before torch
    from vlmdistill.pipelines.traffic import harvest as traffic
    from vlmdistill.pipelines.traffic.logs import unread_line

    with console.progress("harvesting", "exchanges") as report:
        made = traffic.harvest(
            workspace,
            sources,
            rules,
            round_name=round_name,
            eval_share=eval_share,
            progress=report,
        )
    console.result(asdict(made), as_json)
    if made.unread:
        raise DataError(f"the rest is harvested, but {unread_line(made.unread)}")
