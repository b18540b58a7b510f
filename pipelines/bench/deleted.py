"""Harvested prompts that `forget` deletes while an evaluation runs: their texts are not written after that.

`forget` holds the lock of the reports. Who writes texts of prompts there takes the lock, too, and looks under
it which prompts still exist.
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
    return {one.key for one in results if one.dataset.startswith(prompt_table.TRAFFIC)}


def deleted(workspace: Workspace, results: Iterable[PromptResult]) -> set[str]:
    """The keys of the harvested prompts that are not in the workspace any more."""
    keys = harvested(results)
    return keys - prompt_table.keys(workspace.prompts) if keys else keys


def add(workspace: Workspace, unfinished: Unfinished, decoded: Decoded) -> None:
    """Append a prompt to an unfinished evaluation, unless it was deleted."""
    file = lock_file(workspace.reports)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(
        file, wait=True
    ):  # of this machine alone: others see it when it is published
        if not deleted(workspace, decoded.results.values()):
            unfinished.add(decoded)


def write(
    workspace: Workspace, made: Iterable[Evaluation], unfinished: Unfinished
) -> list[Evaluation]:
    """Write evaluations without the responses to deleted prompts, and end the unfinished one."""
    written = []
    with only_writer(workspace.reports, wait=True):
        if workspace.parts:
            workspace.parts.fetch("prompts", again=True)
        for evaluation in made:
            shown = evaluation.without(
                deleted(workspace, evaluation.temperatures[0].prompts)
            )
            records.write(shown, records.new_file(workspace.reports, shown.name))
            written.append(shown)
        unfinished.remove()
    return written
