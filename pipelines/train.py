"""Train a drafter in a workspace: settings resolved, one rank here or several side by side."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.base import DrafterConfig
from vlmdistill.drafters.config import RECIPES, override
from vlmdistill.drafters.training.record import Progress
from vlmdistill.drafters.training.trainer import Run, train
from vlmdistill.pipelines.workspace import Workspace, only_writer
from vlmdistill.stores.errors import DataError, TrainingError


def default_recipe(model: str) -> str:
    """The papers' settings are for real targets; the demo has its own."""
    return "demo" if model == "demo" else "paper"


def resolve(drafter: str, recipe: str, settings: Sequence[str]) -> DrafterConfig:
    """The configuration of a drafter: its paper's, then a recipe's, then `key=value` settings.

    DataError on an unknown drafter, recipe, key or a value that does not fit.
    """
    catalogue.trained(drafter)
    config = catalogue.config(drafter)
    if recipe not in RECIPES:
        raise DataError(f"there is no recipe '{recipe}'; choose from {', '.join(RECIPES)}")
    stages = {stage.name for stage in config.stages}
    common = [one for one in RECIPES[recipe] if _fits(one, stages)]
    return override(config, [*common, *settings])


def _fits(setting: str, stages: Collection[str]) -> bool:
    """A recipe is for all drafters: what it says of a stage that this one does not have is passed over."""
    first, *rest = setting.split(".")
    return first != "stages" or rest[0] == "*" or rest[0] in stages


def run(
    workspace: Workspace,
    drafter: str,
    config: DrafterConfig,
    *,
    name: str | None = None,
    store: Path | None = None,
    view: str | None = None,
    seed: int = 0,
    zero: int = 0,
    dtype: str = "auto",
    save_every: int = 200,
    resume: bool = False,
    force: bool = False,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Train on this process's rank and return the drafter's folder; see `train`.

    `force` removes what an earlier run of that name left.
    """
    plan = Run(
        drafter=catalogue.base(drafter),
        config=config,
        store=store or workspace.features,
        out=workspace.drafter(name or drafter),
        view=view,
        seed=seed,
        zero=zero,
        dtype=dtype,
        save_every=save_every,
        resume=resume,
    )
    if os.environ.get("RANK", "0") != "0":
        return train(plan, on_step)
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(plan.out):
        if force:
            shutil.rmtree(plan.out, ignore_errors=True)
            shutil.rmtree(plan.state, ignore_errors=True)
        return train(plan, on_step)


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Run the command line again on several ranks of this machine, with torchrun.

    TrainingError when any rank fails; each has said why.
    """
    if ranks < 1:
        raise DataError(f"--ranks {ranks}: give a number above 0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, "-m", "vlmdistill.cli.main", *arguments], check=False)
    if done.returncode:
        raise TrainingError(
            f"training on {ranks} ranks ended with status {done.returncode}: see the lines above"
        )
