"""Keeps texts of harvested prompts out of reports once `forget` has deleted them, as during an evaluation.

`forget` holds the lock of the reports. Whoever writes texts of prompts to the reports takes that lock, too,
and checks under it which prompts still exist.
"""

from collections.abc import Iterable

from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Evaluation, PromptResult
from vlmdistill.pipelines.bench.unfinished import Decoded, Unfinished
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.workspace.workspace import Workspace, lock_file, only_writer
from vlmdistill.stores.backends.locks import locked


def harvested(results: Iterable[PromptResult]) -> set[str]:
    """The keys of the prompts that came from traffic."""
    return {
        prompt.key
        for prompt in results
        if prompt.dataset.startswith(prompt_table.TRAFFIC)
    }


def deleted(workspace: Workspace, results: Iterable[PromptResult]) -> set[str]:
    """The keys of the harvested prompts that are not in the workspace any more."""
    keys = harvested(results)
    if not keys:
        return keys
    return keys - prompt_table.keys(workspace.prompts)


def add_unless_deleted(
    workspace: Workspace, unfinished: Unfinished, decoded: Decoded
) -> None:
    """Append a prompt to an unfinished evaluation, unless it was deleted."""
    file = lock_file(workspace.reports)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The lock is of this machine: other machines see the prompt when it is published.
    with locked(file, wait=True):
        if not deleted(workspace, decoded.results.values()):
            unfinished.add(decoded)


def write_undeleted(
    workspace: Workspace, evaluations: Iterable[Evaluation], unfinished: Unfinished
) -> list[Evaluation]:
    """Write evaluations without the responses to deleted prompts, and end the unfinished one."""
    written = []
    with only_writer(workspace.reports, wait=True):
        if workspace.parts:
            workspace.parts.fetch("prompts", again=True)
        for evaluation in evaluations:
            deleted_keys = deleted(workspace, evaluation.temperatures[0].prompts)
            stripped = evaluation.without(deleted_keys)
            file = records.new_file(workspace.reports, stripped.name)
            records.write(stripped, file)
            written.append(stripped)
        unfinished.remove()
    return written
