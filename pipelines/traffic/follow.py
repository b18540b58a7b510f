"""A running vLLM takes over new versions of a drafter, and gives back those that accept less.

The server loads an exported folder between two steps (`vllm/plugin/swap.py`), so that it must see the
workspace. What it accepts is read from its metrics.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.pipelines.bench.server_client import Counters, ServerClient, between
from vlmdistill.pipelines.endpoint.trial import Trials
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import VlmdistillError

DRAFTS = 64  # of a sample of what is accepted
FEWEST = 8  # samples of each version: those of many drafts vary less than requests do
T = TypeVar("T")
START = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
    "vlmdistill.pipelines.vllm.plugin.swap.Swap, or restart it with the new version"
)


class FollowError(VlmdistillError):
    """A server does not take another drafter."""


class Follower:
    """Keeps a server on the version of a drafter that is in use."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        url: str,
        *,
        dtype: str = "bfloat16",
        trial: int = 64,
    ) -> None:
        """`dtype` is that of the drafter that the server was started with; ServerError when `url` is none."""
        self.workspace, self.dtype = workspace, dtype
        self._server = ServerClient(url)
        self._loop = asyncio.Runner()
        self.trials = Trials(name, None, trial, FEWEST)
        self._read: Counters = {}
        self._loaded: str | None = None
        """The version with which the server drafts, where that is known."""
        self._stale = False
        """The server may have entries of another version in its prefix cache."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self._wait(self._server.close())
        self._loop.close()

    def look(self) -> None:
        """Count what the server has accepted; load the version in use, or the one before.

        ServerError if the server cannot be reached, FollowError if it takes no drafter. A version that it
        refuses is not tried again.
        """
        current = self.trials.current
        gained = self._gained() if current else None
        if current and gained is not None:
            self.trials.add(current, gained)
        self.trials.tell(self.workspace)
        if self._stale:
            self._empty_cache()
        wanted = self.trials.wanted(self.workspace) or self.trials.current
        if wanted is None or wanted == self._loaded:
            return
        if self._load(wanted) and wanted != self.trials.current:
            self.trials.begin(wanted)

    def _load(self, version: str) -> bool:
        """Whether the server drafts with a version from now on; of a refusal the log has a line."""
        out = self.workspace.root / "served" / version
        export(self.workspace.drafter(version), out, self.dtype)
        before, self._loaded = self._loaded, None
        call = {"method": "load_drafter", "args": [str(out.absolute())]}
        response = self._wait(self._server.request("POST", "collective_rpc", call))
        if response.status_code != 200:
            raise FollowError(
                f"{self._server.url} takes no other drafter while it runs: {START}"
            )
        refusals = [result for result in response.json()["results"] if result]
        if refusals:
            self.trials.refuse(version, FollowError(refusals[0]))
            self._loaded = before
            return False
        self._loaded = version
        self._read = self._wait(self._server.counters())
        self._empty_cache()
        return True

    def _empty_cache(self) -> None:
        """Forget the entries of the version before; vLLM reads running requests, which hold some, again."""
        is_cached = bool(self._read.get(("prompt_tokens", 0)))
        if is_cached:
            path = "reset_prefix_cache?reset_running_requests=true"
            response = self._wait(self._server.request("POST", path))
            self._stale = response.status_code != 200

    def _wait(self, answer: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(answer)

    def _gained(self) -> float | None:
        """Tokens for each call since the last sample; None for too few drafts."""
        counters = self._wait(self._server.counters())
        change = between(self._read, counters)
        if self._read and counters and change.generated is None:
            self._loaded = None  # restarted, with the drafter of its command line
        if change.accepted is None or not change.drafts or change.drafts < DRAFTS:
            return None
        self._read = counters
        return 1 + change.accepted / change.drafts
