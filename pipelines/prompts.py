"""Stage 1: prompts of files, datasets and evaluation sets into a workspace.

Light to import, so that a wrong source fails before torch loads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vlmdistill.pipelines.data.prompts import evaluation_sets
from vlmdistill.pipelines.data.prompts.formats import Format
from vlmdistill.pipelines.data.prompts.importing import (
    Choices,
    ImportSummary,
    import_prompts,
    import_rows,
)
from vlmdistill.pipelines.data.prompts.local_copies import import_set
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.data.prompts.self_asked import questions
from vlmdistill.pipelines.demo.prompts import AMOUNTS, evaluation_rows, import_demo
from vlmdistill.pipelines.targets.checkpoints.folder import known_family
from vlmdistill.pipelines.workspace.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash


def import_sources(
    workspace: Workspace,
    sources: Sequence[str],
    out: Path | None = None,
    kind: Format = "auto",
    choices: Choices | None = None,
    progress: Progress = silent,
) -> ImportSummary:
    """Import `sources` into `out`, by default the workspace's prompts; see `import_prompts`.

    `demo` alone, unless a file has that name, means generated scenes and dialogues, and videos if the model
    is an embedded target that reads them. `self` alone means `choices.limit` questions that the target
    writes.
    """
    out = out or workspace.prompts
    choices = replace(choices or Choices(), images_only=_images_only(workspace.model))
    if list(sources) == ["self"] and not Path("self").exists():
        if kind != "auto":
            raise DataError("'self' has a format of its own: leave out --format")
        return _import_own_questions(workspace.model, out, choices, progress)
    if list(sources) == ["demo"] and not Path("demo").exists():
        if kind != "auto" or choices.split:
            raise DataError(
                "'demo' has splits and a format of its own: leave out --split and --format"
            )
        size = AMOUNTS.get(workspace.model, AMOUNTS["demo"])
        return import_demo(
            workspace.root / "demo-data", out, size, choices, progress=progress
        )
    return import_prompts(sources, out, kind, choices, progress)


def _import_own_questions(
    model: str, out: Path, choices: Choices, progress: Progress
) -> ImportSummary:
    """Import questions that the target writes; see `self_asked.questions`."""
    if choices.limit is None:
        raise DataError("'self' needs the number of questions: add --limit 500")
    from vlmdistill.pipelines.targets.loading import load

    texts = questions(load(model), choices.limit, progress=progress)
    return import_rows([("self", _rows(texts), "chat")], out, choices)


def _rows(texts: Iterable[str]) -> Iterator[Row]:
    """Conversations that begin with these questions."""
    for number, question in enumerate(texts, start=1):
        turn = {"role": "user", "content": question}
        yield Row("self", "self", number, {"messages": [turn]})


def _images_only(model: str) -> str:
    """The family of a target that is known to read no videos."""
    family = known_family(model)
    return family.name if family and not family.videos else ""


def import_evaluation_sets(
    workspace: Workspace,
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    progress: Progress = silent,
    *,
    fps: float | None = None,
    frames: int | None = None,
) -> tuple[Path, int]:
    """Import evaluation sets, `NAME` or `NAME@PAPER`, into one file of the workspace; it, and its prompts.

    `data` is a folder with copies of the sets, and `limit` a smaller number of samples of each. Videos are
    sampled with `fps` or `frames`, by default as the target does it.
    """
    if limit is not None and limit < 1:
        raise DataError(f"--limit {limit}: give a number of prompts above 0")
    names = list(dict.fromkeys(names))
    published_names = [name for name in names if name != evaluation_sets.DEMO]
    # All names before any set is read: a wrong one fails at once.
    found_sets = {name: evaluation_sets.find(name) for name in published_names}
    folder = workspace.root / "benchmarks"
    file_name = names[0] if len(names) == 1 else content_hash(names)
    out = folder / f"{file_name}.parquet"
    with only_writer(folder):
        out.unlink(missing_ok=True)
        count = 0
        for name in names:
            if name in found_sets:
                published, paper = found_sets[name]
                count += import_set(
                    published,
                    paper,
                    out,
                    label=name,
                    data=data,
                    limit=limit,
                    fps=fps,
                    frames=frames,
                    progress=progress,
                )
                continue
            demo = folder / "demo"
            size = AMOUNTS.get(workspace.model, AMOUNTS["demo"])
            rows = evaluation_rows(demo, videos=size.videos > 0)
            choices = Choices(
                images=demo, split="eval", limit=limit, fps=fps, frames=frames
            )
            demo.mkdir(parents=True, exist_ok=True)
            count += import_rows([(name, rows, "chat")], out, choices, progress).added
    return out, count
