"""The contents of a workspace, its gaps and stale parts, and the command that comes next."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import polars as pl

from vlmdistill.drafters.checkpoints.description import describe, weights_hash
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.data.responses import dataset
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.results import DrafterResult
from vlmdistill.pipelines.targets.checkpoints.folder import locate
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace.workspace import Workspace, default_model
from vlmdistill.stores import notebook
from vlmdistill.stores.errors import TargetError, TrainingError, one_line
from vlmdistill.stores.schema import Provenance
from vlmdistill.stores.store import Store

FIRST: Final = "wren"  # the drafter that is suggested where none is trained
SHARE: Final = 0.8
"""Of the samples of a store; a drafter that was trained on fewer missed some."""

OF_DRAFTER: Final = ("drafter", "state", "steps", "tau", "speedup")

DrafterState = Literal["trained", "unfinished", "damaged"]
"""Unfinished: its training has saved no drafter yet. Damaged: its files cannot be read."""
ReportState = Literal["none", "current", "stale"]


@dataclass(frozen=True, kw_only=True)
class DrafterStatus:
    """One drafter of a workspace."""

    name: str
    method: str
    state: DrafterState
    steps: int  # that its weights have seen
    samples: int  # that it was trained on
    validate: int  # samples of its training that validate; 0 also if they are not known
    measured: str  # the time of its last evaluation, empty if never
    tau: float | None  # at its lowest temperature, in the latest evaluation
    speedup: float | None  # None also if it is in doubt
    remarks: tuple[str, ...]  # for the user: what is stale, unfinished or in doubt

    @property
    def speedup_text(self) -> str:
        """The speedup as one cell."""
        return "-" if self.speedup is None else f"{self.speedup:.2f}"


@dataclass(frozen=True, kw_only=True)
class WorkspaceStatus:
    """The contents of a workspace. Counts of prompts and responses are those of the split to train on."""

    root: str
    target: str  # the folder of its weights, or why they cannot be loaded
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
    report_state: ReportState
    stale: tuple[str, ...]  # for the user: what is out of date
    next: str  # the next command; empty if nothing is missing

    def _repr_html_(self) -> str:
        counts = {
            "workspace": self.root,
            "prompts": f"{self.prompts:,} to train on, {self.held_out:,} held out",
            "responses": f"{self.responses:,}",
            "samples": f"{self.samples:,}",
            "evaluations": self.evaluations,
            "next": self.next or "nothing is missing",
        }
        rows = [
            (each.name, each.state, each.steps, each.tau, each.speedup_text)
            for each in self.drafters
        ]
        shown = [["-" if cell is None else cell for cell in row] for row in rows]
        drafters = notebook.table(OF_DRAFTER, shown) if shown else ""
        return notebook.table((), counts.items()) + drafters


def status(workspace: Workspace) -> WorkspaceStatus:
    """Read the records of a workspace; neither the target nor a drafter is loaded."""
    splits = _splits(workspace.prompts)
    train_keys = set(splits.filter(pl.col("split") == "train")["key"])
    all_responses = dataset.facts(workspace.responses)
    responses = all_responses.filter(pl.col("key").is_in(train_keys))
    kept_keys = set(responses.filter("keep")["key"])
    store = Store.find(workspace.features)
    stored_keys = store.keys() if store else set[str]()
    features = tuple(feature.name for feature in store.features) if store else ()

    page = workspace.reports / "index.html"
    evaluations = records.files_in(workspace.reports)
    served = records.files_in(workspace.reports / "served")
    report_state = _report_state(page, evaluations)

    held_out = len(splits) - len(train_keys)
    dropped = dict(dataset.counted(responses["reason"]))
    uncaptured, unlisted = len(kept_keys - stored_keys), len(stored_keys - train_keys)
    contents = WorkspaceStatus(
        root=workspace.parts.url if workspace.parts else str(workspace.root),
        target=_target(workspace.model),
        prompts=len(train_keys),
        held_out=held_out,
        responses=len(responses),
        dropped=dropped,
        samples=len(stored_keys),
        uncaptured=uncaptured,
        features=features,
        drafters=_drafters(workspace, store),
        evaluations=len(evaluations) + len(served),
        report="" if report_state == "none" else str(page),
        report_state=report_state,
        stale=_stale(unlisted, report_state),
        next="",
    )
    return replace(contents, next=_next(contents, workspace.model))


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


def _report_state(page: Path, evaluations: Sequence[Path]) -> ReportState:
    """Whether the page is older than an evaluation."""
    if not page.exists():
        return "none"
    newest = max((file.stat().st_mtime for file in evaluations), default=0.0)
    return "stale" if page.stat().st_mtime < newest else "current"


def _stale(unlisted: int, report: ReportState) -> tuple[str, ...]:
    """Texts for the user; `unlisted` samples of the store belong to no prompt to train on."""
    texts = []
    if unlisted:
        texts.append(f"{unlisted} samples of the store are of no prompt to train on")
    if report == "stale":
        texts.append("the report is older than the latest evaluation")
    return tuple(texts)


def _drafters(workspace: Workspace, store: Store | None) -> tuple[DrafterStatus, ...]:
    latest = selection.last_of_each(workspace.reports)
    return tuple(
        _drafter(workspace, name, store, latest.get(name, []))
        for name in workspace.drafters()
    )


def _drafter(
    workspace: Workspace,
    name: str,
    store: Store | None,
    latest: Sequence[DrafterResult],
) -> DrafterStatus:
    """`latest` are the results of its last evaluation."""
    folder = workspace.drafter(name)
    state: DrafterState = "trained"
    method, training = name, dict[str, Any]()
    remarks: list[str] = []
    try:
        description = describe(folder)
        method, training = description["drafter"], description["training"]
        if store and training:
            remarks += _other_samples(store, description)
        if latest:
            remarks += other_weights(latest[0], training, folder)
    except (TrainingError, msgspec.ValidationError) as error:
        if (folder / "config.json").exists():
            state = "damaged"
            remarks.append(one_line(error))
        else:
            state = "unfinished"
            remarks.append(f"not finished: `vlmdistill train {name}` continues")

    coldest = min(latest, key=lambda result: result.temperature, default=None)
    shown = coldest.facts if coldest else {}
    doubt = doubt_of(coldest) if coldest else ""
    if coldest and doubt:
        if coldest.wrong_counts:
            shown["tau"] = None
        remarks.append(f"no speedup: {doubt}")
    steps = training.get("saved_step", training.get("steps", 0))
    return DrafterStatus(
        name=name,
        method=method,
        state=state,
        steps=steps,
        samples=training.get("samples", 0),
        validate=training.get("validate", 0),
        measured=shown.get("measured", ""),
        tau=shown.get("tau"),
        speedup=coldest.speedup if coldest else None,
        remarks=tuple(remarks),
    )


def _other_samples(store: Store, description: Mapping[str, Any]) -> Iterator[str]:
    """Remarks if a drafter was trained on another store, or on few samples of this one."""
    trained_on = msgspec.convert(description["provenance"], Provenance)
    same_features = msgspec.structs.replace(
        store.provenance, features=trained_on.features
    )
    mismatch = trained_on.mismatch(same_features)
    if mismatch:
        yield f"trained on another store ({mismatch})"
    training = description["training"]
    if not training.get("view") and training["samples"] < SHARE * len(store):
        yield f"trained on {training['samples']} of {len(store)} samples"


def other_weights(
    result: DrafterResult, training: Mapping[str, Any], folder: Path
) -> Iterator[str]:
    """A remark if the evaluation is of other weights than the drafter's present ones."""
    evaluation = result.evaluation
    if evaluation.training.signature != training.get("signature"):
        yield "measured before it was trained again"
    elif evaluation.weights not in (None, weights_hash(folder)):
        yield "measured with other weights"


def doubt_of(result: DrafterResult) -> str:
    """Why no verdict rests on a speedup; empty if nothing speaks against it."""
    if not result.evaluation.lossless:
        return "it is not lossless"
    if result.failures:
        return "its counts contradict each other"
    return next(iter(result.no_speedup), "")


def _next(contents: WorkspaceStatus, model: str) -> str:
    """The command for the first gap."""
    options = "" if model == default_model() else f" --model {model}"
    if not contents.prompts and not contents.held_out:
        source = "demo" if model in EMBEDDED else "FILE..."
        return f"vlmdistill prompts {source}{options}"
    if not contents.prompts or not contents.held_out:
        return f"vlmdistill prompts --resplit 0.2{options}"
    if contents.responses < contents.prompts or contents.uncaptured:
        return f"vlmdistill features{options}"
    if not contents.drafters:
        return f"vlmdistill train {FIRST}{options}"
    for drafter in contents.drafters:
        if drafter.state == "unfinished":
            return f"vlmdistill train {drafter.name}{options}"
    unmeasured = [
        drafter.name
        for drafter in contents.drafters
        if drafter.steps and not drafter.measured
    ]
    if unmeasured:
        return f"vlmdistill eval {' '.join(unmeasured)}{options}"
    if contents.report_state != "current":
        return f"vlmdistill report{options}"
    return ""
