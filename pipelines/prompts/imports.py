"""Stage 1: import files, datasets and evaluation sets, or the demo's generated prompts, into a workspace."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vlmdistill.pipelines.demo.prompts import AMOUNTS, benchmark_rows, import_demo
from vlmdistill.pipelines.prompts import benchmarks
from vlmdistill.pipelines.prompts.formats import Format
from vlmdistill.pipelines.prompts.importing import Choices, ImportSummary, import_prompts, import_rows
from vlmdistill.pipelines.prompts.local_copies import import_benchmark
from vlmdistill.pipelines.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash


def import_sources(
    workspace: Workspace,
    sources: Sequence[str],
    out: Path | None = None,
    kind: Format = "auto",
    choices: Choices | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> ImportSummary:
    """Import `sources` into `out`, by default the workspace's prompts; see `import_prompts`.

    `demo` alone, unless a file has that name, means generated scenes and dialogues, and videos if the model
    is an embedded target that reads them.
    """
    out = out or workspace.prompts
    if list(sources) == ["demo"] and not Path("demo").exists():
        if kind != "auto" or (choices and choices.split):
            raise DataError("'demo' has splits and a format of its own: leave out --split and --format")
        size = AMOUNTS.get(workspace.model, AMOUNTS["demo"])
        return import_demo(workspace.root / "demo-data", out, size, choices, progress=progress)
    return import_prompts(sources, out, kind, choices, progress)


def import_benchmarks(
    workspace: Workspace,
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[Path, int]:
    """Import evaluation sets, `NAME` or `NAME@PAPER`, into one file of the workspace; it, and its prompts.

    `data` is a folder with copies of the sets, and `limit` a smaller number of samples of each.
    """
    if limit is not None and limit < 1:
        raise DataError(f"--limit {limit}: give a number of prompts above 0")
    names = list(dict.fromkeys(names))
    found = {name: benchmarks.find(name) for name in names if name != benchmarks.DEMO}  # before any is read
    folder = workspace.root / "benchmarks"
    out = folder / f"{names[0] if len(names) == 1 else content_hash(names)}.parquet"
    with only_writer(folder):
        out.unlink(missing_ok=True)
        prompts = 0
        for name in names:
            if name in found:
                benchmark, paper = found[name]
                prompts += import_benchmark(
                    benchmark, paper, out, label=name, data=data, limit=limit, progress=progress
                )
            else:
                rows = benchmark_rows(
                    folder / "demo", videos=AMOUNTS.get(workspace.model, AMOUNTS["demo"]).videos > 0
                )
                choices = Choices(images=folder / "demo", split="eval", limit=limit)
                (folder / "demo").mkdir(parents=True, exist_ok=True)
                prompts += import_rows([(name, rows, "chat")], out, choices, progress).added
    return out, prompts
