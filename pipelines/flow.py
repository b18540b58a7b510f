"""The whole flow on one workspace, stage by stage. Each stage does what is missing and no more.

prompts -> responses -> features -> train -> eval
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from vlmdistill.drafters import catalogue, checkpoint
from vlmdistill.drafters.base import DrafterConfig, Tree
from vlmdistill.drafters.training.record import Progress
from vlmdistill.pipelines import answers, features, prompts, responses, train, workers
from vlmdistill.pipelines.answers import Sampling
from vlmdistill.pipelines.demo import EMBEDDED
from vlmdistill.pipelines.demo_prompts import AMOUNTS, import_demo
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError, TrainingError

Report = Callable[[int, int, str], None]
Bar = Callable[[str, str], AbstractContextManager[Report]]  # what, unit


def silent(what: str, unit: str) -> AbstractContextManager[Report]:
    """A bar that shows nothing."""
    return nullcontext(lambda done, total, remark: None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run; the same plan again goes on where it stopped, or redoes nothing."""

    drafters: Sequence[str]
    recipe: str = "paper"
    settings: Sequence[str] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 1024  # of the responses to learn from
    eval_limit: int = 100
    eval_tokens: int = 512
    batch: int = 32  # prompts answered together
    workers: int | None = None
    jobs: int | None = None  # drafters trained at once
    seed: int = 0


def run(workspace: Workspace, plan: Plan, tell: Callable[[str], None], bar: Bar) -> None:
    """Run all stages up to the evaluation; `tell` hears what each stage did, `bar` shows progress.

    Raises what the stages raise; what is done by then stays done.
    """
    if not plan.drafters:
        raise DataError("--drafters names no drafter")
    trained = [name for name in plan.drafters if catalogue.is_trained(name)]
    configs = {name: train.resolve(name, plan.recipe, plan.settings) for name in trained}
    prepare(workspace, plan, tell, bar)
    fit(workspace, configs, plan, tell, bar)
    trees = {config.tree for config in configs.values()}
    measure(workspace, plan, tell, bar, trees.pop() if len(trees) == 1 else None)


def prepare(workspace: Workspace, plan: Plan, tell: Callable[[str], None], bar: Bar) -> None:
    """Everything before training: prompts, and responses and features where a drafter learns from them."""
    trained = [name for name in plan.drafters if catalogue.is_trained(name)]
    if workspace.model in EMBEDDED and not workspace.prompts.exists():
        with bar("importing", "rows") as rows:
            amount = AMOUNTS[workspace.model]
            made = import_demo(
                workspace.root / "data", workspace.prompts, amount, progress=lambda n: rows(n, 0, "")
            )
        tell(f"prompts    {made.train} to learn from and {made.eval} held out, in {workspace.prompts}")
    asked = prompts.select(prompts.read(workspace.prompts, workspace.model), "train")

    missing = bool(trained and answers.unanswered(asked, workspace.responses))
    with workers.session(plan.workers) if missing else nullcontext():
        if missing:
            sampling = Sampling(max_new_tokens=plan.max_new_tokens, seed=plan.seed)
            with bar("answering", "prompts") as shown:
                said = responses.respond(
                    asked,
                    workspace.responses,
                    workspace.model,
                    sampling,
                    workers=plan.workers,
                    batch=plan.batch,
                    unit=4 * plan.batch,
                    report=shown,
                )
            dropped = sum(said.dropped.values())
            tell(f"responses  {said.kept} kept and {dropped} dropped, in {workspace.responses}")
        if trained:
            with bar("capturing", "samples") as shown:
                stored = features.capture(
                    asked,
                    workspace.responses,
                    str(workspace.features),
                    workspace.model,
                    trained,
                    workers=plan.workers,
                    report=shown,
                )
            if stored.captured:
                tell(f"features   {stored.samples} samples, in {stored.store}: {', '.join(stored.features)}")


def fit(
    workspace: Workspace,
    configs: Mapping[str, DrafterConfig],
    plan: Plan,
    tell: Callable[[str], None],
    bar: Bar,
) -> None:
    """Train the drafters that are missing: several at once where there is room, else one after the other."""
    missing = [name for name in configs if not (workspace.drafter(name) / "config.json").exists()]
    at_once = min(len(missing), plan.jobs or train.side_by_side())
    if at_once > 1:
        with bar("training", "%") as shown:
            train.several(
                workspace,
                [train.Job(name, name, plan.seed) for name in missing],
                at_once,
                recipe=plan.recipe,
                settings=plan.settings,
                report=shown,
                on_done=lambda job, cost: tell(f"trained    {job.name}, in {workspace.drafter(job.name)}"),
            )
    for name, config in configs.items():  # those that are there are checked to be of these settings
        fresh = not (workspace.drafter(name) / "config.json").exists()
        with bar(f"training {name}", "%") as shown:
            train.run(
                workspace,
                name,
                config,
                seed=plan.seed,
                resume=True,
                on_step=_steps(shown),
            )
        if fresh:
            tell(f"trained    {name}, in {workspace.drafter(name)}")


def measure(
    workspace: Workspace, plan: Plan, tell: Callable[[str], None], bar: Bar, tree: Tree | None = None
) -> None:
    """Decode with all drafters, unless their evaluations are there; each on its own tree if none is given."""
    stale = [name for name in plan.drafters if not _evaluated(workspace, name, plan)]
    if stale:
        from vlmdistill.pipelines import evaluate

        settings = evaluate.Settings(
            temperatures=plan.temperatures,
            limit=plan.eval_limit,
            max_new_tokens=plan.eval_tokens,
            tree=tree,
            seed=plan.seed,
        )
        # All of them again: numbers from one process on one machine compare.
        with bar("decoding", "prompts") as shown:
            evaluate.evaluate(workspace, list(plan.drafters), settings, on_prompt=shown)
        tell(f"evaluated  {', '.join(plan.drafters)}, in {workspace.reports}")


def _steps(shown: Report) -> Callable[[Progress], None]:
    return lambda progress: shown(round(100 * progress.done), 100, progress.remark)


def _evaluated(workspace: Workspace, name: str, plan: Plan) -> bool:
    """The workspace holds an evaluation of this very drafter at these temperatures."""
    file: Path = workspace.reports / f"{name}.json"
    try:
        seen = json.loads(file.read_text())
        now = checkpoint.describe(workspace.drafter(name))["training"]
        return (
            seen["training"].get("signature") == now.get("signature")
            and {one["temperature"] for one in seen["temperatures"]} >= set(plan.temperatures)
            and seen["max_new_tokens"] == plan.eval_tokens
        )
    except (OSError, ValueError, KeyError, TypeError, TrainingError):
        return False
