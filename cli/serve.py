"""`vlmdistill serve`: an OpenAI-compatible endpoint for one target, and a page to try it."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from socket import socket

    from fastapi import FastAPI

LOCAL_NAMES = ("localhost", "127.0.0.1")
"""By which a browser may reach a server without a key."""


def serve(
    model: console.Model = "demo",
    drafter: console.DrafterName = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Drafters to compare on the page, in place of --drafter; {console.LIST}.",
        ),
    ] = None,
    tree: console.TreeShape = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another machine's needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8000,
    key: Annotated[
        str | None,
        typer.Option(
            help="Clients must send this key. The variable does not show in `ps`.",
            envvar="VLMDISTILL_KEY",
        ),
    ] = None,
    media: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder whose images requests may name by file:// URLs."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum length of a response, in tokens, for requests that set none.",
        ),
    ] = 512,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Log requests and responses in this folder, which `harvest` and `adapt` read.",
        ),
    ] = None,
    record_for: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Remove records older than this, such as 30d."
        ),
    ] = None,
    reload: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Look for a newer version of the drafter, as `adapt` publishes it, this often; 0: never.",
        ),
    ] = 10,
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    compiled: console.Compiled = False,
    runs: console.Runs = None,
) -> None:
    """Serve an OpenAI-compatible endpoint, and a page to try it.

    The page compares plain with speculative decoding, and the drafters of --compare with each other.
    Requests are decoded one at a time. Ctrl-C and SIGTERM let running responses end for 10 seconds. A newer
    version of --drafter takes over between two requests; all responses remain the target's.
    """
    from contextlib import nullcontext

    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.pipelines.workspace import versions
    from vlmdistill.stores.errors import DataError
    from vlmdistill.stores.schema import seconds

    if key is not None and not _is_valid_key(key):
        raise DataError(
            "the key must be printable ASCII without spaces around it, and not empty"
        )
    if key is None and not _is_local(host):
        raise DataError(
            f"--host {host}: other machines can connect, so set --key or VLMDISTILL_KEY"
        )
    if media is not None and not media.is_dir():
        raise DataError(f"--media {media}: there is no such folder")
    if record_for is not None and record is None:
        raise typer.BadParameter("requires --record", param_hint="--record-for")
    keep = None if record_for is None else seconds(record_for, "--record-for")

    compared = console.separated(compare)
    _check_compared(compared, drafter, tree)
    workspace = console.workspace(model, runs)
    followed = drafter is not None and reload > 0 and "/" not in drafter
    used = versions.current(workspace, drafter) if drafter and followed else drafter
    if compared:
        used = compared[0]
    for name in compared or ([used] if used else []):
        describe(workspace.trained(name))  # before torch
    with _listening(host, port) as listener:
        console.remark(f"loading {model} ...")
        from vlmdistill.pipelines.endpoint.app import build_app
        from vlmdistill.pipelines.endpoint.served_decoder import open_decoder
        from vlmdistill.pipelines.endpoint.switch import Switch
        from vlmdistill.pipelines.request_log import Recorder

        decoder = open_decoder(
            workspace,
            used,
            compared=compared[1:],
            tree=tree,
            max_new_tokens=max_new_tokens,
            how=console.loading(attention, target_dtype, compiled=compiled),
        )
        address = f"[{host}]" if ":" in host else host
        hosts = ["*"] if key else [*LOCAL_NAMES, address]
        switch = Switch(decoder, workspace if followed else None, drafter or "")
        drafting = ", ".join(decoder.drafters) or "plain decoding"
        if decoder.target.thinking:
            drafting += f", thinking {decoder.target.thinking},"
        with (
            Recorder(record, keep) if record else nullcontext() as recorder,
            switch.following(reload if followed else 0),
        ):
            app = build_app(
                switch,
                recorder=recorder,
                key=key,
                media=media,
                hosts=hosts,
            )
            message = f"serving {decoder.model} with {drafting} at http://{address}"
            _serve_until_stopped(app, listener, message)


def _listening(host: str, port: int) -> "socket":
    """A socket that listens; DataError if that is not possible."""
    import errno
    import socket

    from vlmdistill.stores.errors import DataError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is in use: give another --port (0: any)"
        else:
            text = f"--host {host} --port {port}: {error.strerror}"
        raise DataError(text) from None


def _check_compared(
    compared: Sequence[str], drafter: str | None, tree: str | None
) -> None:
    """BadParameter if drafters cannot be compared beside the other options."""
    if compared and drafter:
        raise typer.BadParameter(
            "--compare names all drafters: leave out --drafter", param_hint="--compare"
        )
    if len(compared) == 1:
        raise typer.BadParameter(
            f"give at least two drafters, or --drafter {compared[0]}",
            param_hint="--compare",
        )
    if compared and tree == "auto":
        raise typer.BadParameter(
            "give one tree for all that are compared", param_hint="--tree"
        )


def _is_valid_key(key: str) -> bool:
    """Whether a header can carry it as it is."""
    is_printable = key.isascii() and key.isprintable()
    return bool(key) and is_printable and key.strip() == key


def _serve_until_stopped(app: "FastAPI", listener: "socket", message: str) -> None:
    """Print the message with the port, and serve until a signal ends it.

    SIGTERM ends the process as a signal does, but only once the command has closed its files.
    """
    from vlmdistill.pipelines.cluster.session import terminable
    from vlmdistill.pipelines.endpoint.hosting import server

    try:
        with terminable():  # the server raises the signal again when it has ended
            console.echo(f"{message}:{listener.getsockname()[1]}; Ctrl-C stops")
            server(app).run(sockets=[listener])
    except KeyboardInterrupt:
        raise console.CommandStopped(console.SIGINT_STATUS, "stopped") from None
    except SystemExit as stop:
        if stop.code == console.SIGTERM_STATUS:
            raise console.CommandTerminated(stop.code) from None
        raise


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
