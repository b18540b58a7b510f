"""`vlmdistill serve`: an OpenAI-compatible endpoint for one target, and a page to try it."""

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from socket import socket

    from fastapi import FastAPI

LOCAL_NAMES = ("localhost", "127.0.0.1")  # by which a browser may reach a server without a key


def serve(
    model: console.Model = "demo",
    drafter: console.DrafterName = None,
    tree: console.TreeShape = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another machine's needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    key: Annotated[
        str | None,
        typer.Option(
            help="Clients must send this key. The variable does not show in `ps`.", envvar="VLMDISTILL_KEY"
        ),
    ] = None,
    media: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder whose images requests may name by file:// URLs."),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused.")] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of a response, in tokens, for requests that set none.")
    ] = 512,
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    compiled: console.Compiled = False,
    runs: console.Runs = None,
) -> None:
    """Serve an OpenAI-compatible endpoint, and a page to try it.

    The page compares plain with speculative decoding. Requests are decoded one at a time. Ctrl-C and
    SIGTERM let running responses end for 10 seconds.
    """
    import socket

    from vlmdistill.drafters.checkpoints.description import describe
    from vlmdistill.stores.errors import DataError

    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise DataError("the key must be printable ASCII without spaces around it, and not empty")
    if key is None and not _is_local(host):
        raise DataError(f"--host {host}: other machines can connect, so set --key or VLMDISTILL_KEY")
    if media is not None and not media.is_dir():
        raise DataError(f"--media {media}: there is no such folder")
    workspace = console.workspace(model, runs)
    if drafter is not None:
        describe(workspace.trained(drafter))  # before torch
    from vlmdistill.pipelines.endpoint.app import build_app
    from vlmdistill.pipelines.endpoint.served_decoder import open_decoder

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        with console.waiting(f"loading {model}"):
            decoder = open_decoder(
                workspace,
                drafter,
                tree=tree,
                max_new_tokens=max_new_tokens,
                how=console.loading(attention, target_dtype, compiled=compiled),
            )
        name = f"[{host}]" if ":" in host else host
        hosts = ["*"] if key else [*LOCAL_NAMES, name]
        app = build_app(decoder, key=key, media=media, queue_limit=queue, hosts=hosts)
        what = f"serving {decoder.model} with {decoder.drafter_name or 'plain decoding'}"
        until_stopped(app, listener, f"{what} at http://{name}")


def until_stopped(app: "FastAPI", listener: "socket", what: str) -> None:
    """Say `what` with the port, and serve until a signal ends it."""
    from vlmdistill.pipelines.endpoint.hosting import server

    console.echo(f"{what}:{listener.getsockname()[1]}; Ctrl-C stops")
    try:
        server(app).run(sockets=[listener])
    except KeyboardInterrupt:
        raise console.CommandStopped(console.SIGINT_STATUS, "stopped") from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
