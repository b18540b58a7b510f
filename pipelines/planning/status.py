"""What a workspace holds, what is missing or stale in it, and the command that comes next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from vlmdistill.drafters.checkpoints.description import describe, weights_hash
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.results import DrafterResult
from vlmdistill.pipelines.targets.checkpoints.folder import locate
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import TargetError, TrainingError, one_line
from vlmdistill.stores.schema import Provenance
from vlmdistill.stores.store import Store

FIRST = "wren"  # the drafter that is suggested where none is trained
SHARE = (
    0.8  # of the samples of a store; a drafter that was trained on fewer missed some
)


@dataclass(frozen=True, kw_only=True)
class DrafterStatus:
    """One drafter of a workspace."""

    name: str
    method: str
    steps: int  # that its weights have seen
    samples: int  # that it was trained on, without those kept apart
    measured: str  # when it was evaluated last, empty if never
    tau: float | None  # at its lowest temperature, in the latest evaluation
    speedup: float | None  # None also if it is in doubt
    remarks: tuple[str, ...]  # what is stale, or not finished


@dataclass(frozen=True, kw_only=True)
class WorkspaceStatus:
    """What a workspace holds. Counts of prompts and responses are those of the split to train on."""

    root: str
    target: str  # where its weights are, or why they cannot be loaded
    prompts: int
    held_out: int
    responses: int  # of these prompts, dropped ones included
    dropped: dict[str, int]  # by reason
    samples: int  # in the feature store
    uncaptured: int  # kept responses without features
    features: tuple[str, ...]
    drafters: tuple[DrafterStatus, ...]
    evaluations: int
    report: str  # the page; empty if there is none
    stale: tuple[str, ...]
    next: str  # the next command; empty if nothing is missing


def status(workspace: Workspace) -> WorkspaceStatus:
    """Read the records of a workspace; neither the target nor a drafter is loaded."""
    splits = _splits(workspace.prompts)
    train = set(splits.filter(pl.col("split") == "train")["key"])
    responses = dataset.facts(workspace.responses).filter(pl.col("key").is_in(train))
    kept = set(responses.filter("keep")["key"])
    store = Store.find(workspace.features)
    stored = store.keys() if store else set[str]()
    measured = selection.last_of_each(workspace.reports)
    drafters = tuple(
        _drafter(workspace, name, store, measured.get(name, []))
        for name in workspace.drafters()
    )
    files = records.files_in(workspace.reports)
    page = workspace.reports / "index.html"
    stale = []
    if store is not None and (gone := len(stored - train)):
        stale.append(f"{gone} samples of the store are of no prompt to train on")
    newest = max((file.stat().st_mtime for file in files), default=0.0)
    if page.exists() and page.stat().st_mtime < newest:
        stale.append("the report is older than the latest evaluation")
    found = WorkspaceStatus(
        root=workspace.parts.url if workspace.parts else str(workspace.root),
        target=_target(workspace.model),
        prompts=len(train),
        held_out=len(splits) - len(train),
        responses=len(responses),
        dropped=dict(dataset.counted(responses["reason"])),
        samples=len(stored),
        uncaptured=len(kept - stored),
        features=tuple(feature.name for feature in store.features) if store else (),
        drafters=drafters,
        evaluations=len(files) + len(records.files_in(workspace.reports / "served")),
        report=str(page) if page.exists() else "",
        stale=tuple(stale),
        next="",
    )
    return replace(found, next=_next(found, workspace.model))


def _splits(file: Path) -> pl.DataFrame:
    """`key` and `split` of each prompt; none if nothing was imported."""
    if not file.is_file():
        return pl.DataFrame(schema={"key": pl.String, "split": pl.String})
    return pl.read_parquet(file, columns=["key", "split"])


def _target(model: str) -> str:
    try:
        location = locate(model)
    except TargetError as error:
        return str(error)
    return location.lacking or str(location.folder)


def _drafter(
    workspace: Workspace,
    name: str,
    store: Store | None,
    latest: Sequence[DrafterResult],
) -> DrafterStatus:
    """`latest` are the results of its last evaluation."""
    folder = workspace.drafter(name)
    result = min(latest, key=lambda one: one.temperature, default=None)
    shown = result.facts if result else {}
    method, training, remarks = name, dict[str, Any](), list[str]()
    try:
        description = describe(folder)
        method, training = description["drafter"], description["training"]
        if store and training:
            origin = msgspec.convert(description["provenance"], Provenance)
            if odd := origin.mismatch(
                msgspec.structs.replace(store.provenance, features=origin.features)
            ):
                remarks.append(f"trained on another store ({odd})")
        if (
            store
            and training
            and not training.get("view")
            and training["samples"] < SHARE * len(store)
        ):
            remarks.append(f"trained on {training['samples']} of {len(store)} samples")
        if latest and latest[0].evaluation.training.signature != training.get(
            "signature"
        ):
            remarks.append("measured before it was trained again")
        elif latest and latest[0].evaluation.weights not in (
            None,
            weights_hash(folder),
        ):
            remarks.append("measured with other weights")
    except (TrainingError, msgspec.ValidationError) as error:
        begun = not (folder / "config.json").exists()
        remarks.append(
            f"not finished: `vlmdistill train {name}` continues"
            if begun
            else one_line(error)
        )
    if result and (why := _doubt(result)):
        shown["speedup"] = None
        remarks.append(f"no speedup: {why}")
    return DrafterStatus(
        name=name,
        method=method,
        steps=training.get("saved_step", training.get("steps", 0)),
        samples=training.get("samples", 0),
        measured=shown.get("measured", ""),
        tau=shown.get("tau"),
        speedup=shown.get("speedup"),
        remarks=tuple(remarks),
    )


def _doubt(result: DrafterResult) -> str:
    """Why no verdict rests on the speedup of a result; empty if nothing speaks against it."""
    if not result.evaluation.lossless:
        return "it is not lossless"
    if result.failures:
        return "its counts contradict each other"
    return result.doubts[0] if result.doubts else ""


def _next(found: WorkspaceStatus, model: str) -> str:
    """The command for the first thing that is missing."""
    of = "" if model == "demo" else f" --model {model}"
    if not found.prompts and not found.held_out:
        return f"vlmdistill prompts {'demo' if model in EMBEDDED else 'FILE...'}{of}"
    if not found.prompts or not found.held_out:
        return f"vlmdistill prompts --resplit 0.2{of}"
    if found.responses < found.prompts or found.uncaptured:
        return f"vlmdistill features{of}"
    if not found.drafters:
        return f"vlmdistill train {FIRST}{of}"
    if begun := [
        one.name
        for one in found.drafters
        if any("not finished" in line for line in one.remarks)
    ]:
        return f"vlmdistill train {begun[0]}{of}"
    if unmeasured := [
        one.name for one in found.drafters if one.steps and not one.measured
    ]:
        return f"vlmdistill eval {' '.join(unmeasured)}{of}"
    if not found.report or any("report" in line for line in found.stale):
        return f"vlmdistill report{of}"
    return ""
