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
        help="Logs: the folder of `serve --record`, JSON lines of the same form or of LiteLLM, batch input "
        "and output files, folders of these, s3://, gs:// or az:// URLs.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE.toml",
        help="What may be kept, by age, lists, share, bytes of media and redaction; see docs/traffic.md. "
        "Default: all, and 10 GB of media.",
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

    rules = Policy.read(policy)
    workspace = console.workspace(model, runs)
    checkpoint(model)  # before torch
    from vlmdistill.pipelines.traffic import harvest as traffic
    from vlmdistill.pipelines.traffic.logs import unread_line

    with console.progress("harvesting", "exchanges") as report:
        harvested = traffic.harvest(
            workspace,
            sources,
            rules,
            round_name=round_name,
            eval_share=eval_share,
            progress=report,
        )
    console.result(asdict(harvested), as_json)
    if harvested.other_files:
        console.note(f"warning: {harvested.other_files}")
    if harvested.unread:
        raise DataError(f"the rest is harvested, but {unread_line(harvested.unread)}")
