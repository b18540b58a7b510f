"""Stage 1: import files and datasets, or the demo's generated prompts, into a workspace."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vlmdistill.pipelines.demo.prompts import AMOUNTS, import_demo
from vlmdistill.pipelines.prompts.formats import Format
from vlmdistill.pipelines.prompts.importing import Choices, ImportSummary, import_prompts
from vlmdistill.pipelines.workspace import Workspace


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
        size = AMOUNTS.get(workspace.model, AMOUNTS["demo"])
        return import_demo(workspace.root / "demo-data", out, size, choices, progress=progress)
    return import_prompts(sources, out, kind, choices, progress)
