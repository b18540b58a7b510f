"""The decoder of a server: a new version of its drafter takes over between two requests.

A request keeps the decoder in use when it arrived. A switch changes no output: all versions verify with
the same target.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder, ServedResponse
from vlmdistill.pipelines.endpoint.trial import Trials
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import FOR_USER, VlmdistillError, one_line

WAITED = 10.0  # seconds for the last look at the versions, when the server ends
log = logging.getLogger("vlmdistill.pipelines")


class Switch:
    """Hands out the decoder in use. `trial` requests decide whether a new version stays."""

    def __init__(
        self,
        current: ServedDecoder,
        workspace: Workspace | None = None,
        name: str = "",
        trial: int = 64,
    ) -> None:
        """Follow the versions of the drafter `name` in a workspace; without one, nothing is ever switched."""
        self.current, self.workspace = current, workspace
        self.trials = Trials(name, current.drafter_name, trial)
        self._before = current

    def look(self) -> None:
        """Record a withdrawal in the workspace, and switch to the version that is in use by now."""
        if self.workspace is None:
            return
        self.trials.tell(self.workspace)
        wanted = self.trials.wanted(self.workspace)
        if wanted is None:
            return
        try:
            proposer = self.current.target.drafter(self.workspace.drafter(wanted))
        except VlmdistillError as error:
            self.trials.refuse(wanted, error)
            return
        if not self.trials.running:
            self._before = self.current
        self.trials.begin(wanted)
        self.current = replace(self.current, drafter=proposer, drafter_name=wanted)

    def ended(self, response: ServedResponse) -> None:
        """Count a response; withdraw the current version if it accepts less than the one before."""
        version, counts = response.drafter_name, response.decoding
        if version is None or not counts.calls:
            return
        tokens_per_call = (counts.tokens - 1) / counts.calls
        withdrawal = self.trials.add(version, tokens_per_call)
        if withdrawal is not None:
            self.current = self._before

    @contextmanager
    def following(self, seconds: float) -> Iterator[None]:
        """Look for new versions every so many seconds; 0: never. At the end, a withdrawal is recorded."""
        ended = threading.Event()
        thread = threading.Thread(
            target=follow,
            args=(self.look, ended.wait, seconds, self.trials.name),
            daemon=True,
        )
        if seconds:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if seconds:
                thread.join(WAITED)  # not for ever: a network's disk may not answer
            if self.workspace:
                self.trials.tell(self.workspace)


def follow(
    look: Callable[[], None], wait: Callable[[float], bool], seconds: float, name: str
) -> None:
    """Call `look` every so many seconds, until `wait` returns True; a failed look is logged."""
    while not wait(seconds):
        try:
            look()
        except FOR_USER as error:
            log.warning(
                "the versions of %s cannot be followed now: %s", name, one_line(error)
            )
