"""The papers on trial: the ablations of five papers, repeated on the embedded targets over several seeds.

    python -m benchmarks.claims [--only NAME ...] [--seeds 5] [--steps 300] [--jobs 2] [--model M] [--out F]

`claimed.py` lists the claims. Both settings of a claim are trained on one store and evaluated on the same
prompts with a picture; the page says of each claim whether its direction holds. Finished trainings and
evaluations are kept, so an interrupted run continues, and settings that claims share are trained once.
The page is written after every claim. `--only` takes claims whose names begin so, in that order.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks import say
from benchmarks.claimed import PAPERS, Claim, Paper, Setting
from vlmdistill.drafters.checkpoints.settings import RECIPES, to_dict
from vlmdistill.drafters.core import catalogue
from vlmdistill.pipelines import flow, software, train
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.demo.clips import patches_for
from vlmdistill.pipelines.evaluation import evaluate
from vlmdistill.pipelines.evaluation.records import Evaluation, Measurement
from vlmdistill.pipelines.evaluation.statistics import FEWEST, FEWEST_SEEDS, Difference, difference, figures
from vlmdistill.pipelines.prompts.importing import Choices, import_prompts
from vlmdistill.pipelines.runtime.processes import FunctionDone
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace import Workspace
from vlmdistill.stores.errors import DataError, VlmdistillError
from vlmdistill.stores.manifest import VIEWS, record_names
from vlmdistill.stores.schema import content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.views.filters import filter_store

CLIPS = 3  # videos of each length
Verdict = Literal["holds", "does not hold", "cannot be told"]


def judge(claim: Claim, found: Difference) -> Verdict:
    """What the interval says of the claim."""
    if found.interval is None:
        return "cannot be told"
    low, high = found.interval.low, found.interval.high
    if claim.expects == "more":
        return "holds" if low > 0 else "does not hold" if high < 0 else "cannot be told"
    if -claim.margin <= low and high <= claim.margin:
        return "holds"
    return "does not hold" if low > claim.margin or high < -claim.margin else "cannot be told"


@dataclass(frozen=True)
class Arm:
    """One side of a claim, measured: an evaluation for each seed."""

    evaluations: Sequence[Evaluation]
    cpu_seconds: Sequence[float]
    commits: Sequence[str]

    @property
    def measured(self) -> list[Measurement]:
        """The prompts with a picture, by seed; all prompts if none has one."""
        kinds = (one.temperatures[0].by(lambda row: row.kind) for one in self.evaluations)
        pictured = [[at.prompts for kind, at in by.items() if kind != "text"] for by in kinds]
        return [
            replace(one.temperatures[0], prompts=tuple(row for some in groups for row in some), shown=())
            if groups
            else one.temperatures[0]
            for one, groups in zip(self.evaluations, pictured, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The workspaces and conditions of one target's claims."""

    base: Workspace
    seeds: int
    steps: int
    limit: int
    jobs: int

    @property
    def recipe(self) -> tuple[str, ...]:
        """Settings of all drafters; stages keep the ratio of their paper's epochs."""
        shared = RECIPES["demo" if self.base.model in EMBEDDED else "fair"]
        return (*shared.settings.split(), *([f"steps={self.steps}"] if self.steps else []))

    def at(self, length: int) -> Workspace:
        """A workspace with the base's store, and for a length its own prompts and reports."""
        root = self.base.root / "claims" / (str(length) if length else "held-out")
        root.mkdir(parents=True, exist_ok=True)
        (self.base.root / "claims" / "drafters").mkdir(exist_ok=True)
        links = {"drafters": Path("../drafters"), "features": Path("../../features")}
        if not length:
            links["prompts.parquet"] = Path("../../prompts.parquet")
        for name, to in links.items():
            if not (root / name).is_symlink():
                (root / name).symlink_to(to)
        return Workspace(self.base.model, root)

    def settings(self, setting: Setting) -> tuple[str, ...]:
        """What is set for one setting, after the shared recipe."""
        view = [f"stages.*.view={_view(setting.where)}"] if setting.where else []
        return (*setting.settings, *view)

    def folders(self, setting: Setting) -> list[str]:
        """The drafters of a setting by seed. The names contain a hash of the whole configuration."""
        config = train.resolve(setting.drafter, "paper", (*self.recipe, *self.settings(setting)))
        digest = content_hash([catalogue.base(setting.drafter), to_dict(config)])[:10]
        return [f"{setting.drafter}.{digest}.{seed}" for seed in range(self.seeds)]

    def evaluation(self) -> evaluate.Settings:
        """Greedy, each drafter with the tree of its configuration."""
        return evaluate.Settings(limit=self.limit, max_new_tokens=256, threads=1)

    def prepare(self, papers: Sequence[Paper]) -> None:
        """Make the missing prompts, responses, features and views."""
        arms = [side for paper in papers for claim in paper.claims for side in (claim.one, claim.other)]
        names = tuple(dict.fromkeys(one.drafter for one in arms))
        flow.prepare(self.base, flow.Plan(drafters=names), say, flow.silent)
        store = Store.open(str(self.base.features))
        for where in {one.where for one in arms if one.where}:
            if _view(where) not in record_names(store.backend, VIEWS):
                filter_store(store, _view(where), expressions=[where])

    def lengthen(self, length: int) -> None:
        """Write the videos of a length and import them as prompts: the same clips for every length.

        DataError on another target than the embedded ones, where the user has to provide them.
        """
        workspace = self.at(length)
        if workspace.prompts.exists() or not length:
            return
        if self.base.model not in EMBEDDED:
            raise DataError(
                f"{workspace.prompts} is missing: import held-out videos of about {length} visual tokens in "
                "another --runs folder with `vlmdistill prompts --split eval`, and copy its prompts.parquet"
            )
        films = files.write_videos(
            workspace.root / "demo-data", videos=CLIPS, seed=0, tokens=length, split="evaluation"
        )
        choices = Choices(images=films.videos, split="eval", fps=None, frames=2 * patches_for(length))
        import_prompts([str(films.llava)], workspace.prompts, choices=choices)

    def train(self, settings: Sequence[Setting]) -> None:
        """Train what is missing, several at a time."""
        workspace = self.at(0)
        jobs = {
            folder: train.Job(setting.drafter, folder, seed, self.settings(setting))
            for setting in settings
            for seed, folder in enumerate(self.folders(setting))
            if not workspace.drafter(folder).exists()
        }

        def keep(job: train.Job, cost: FunctionDone) -> None:
            facts = {"cpu_seconds": cost.cpu_seconds, "commit": _commit(), "settings": job.settings}
            cost_file(workspace, job.name).write_text(json.dumps(facts))
            say(f"trained {job.name} {' '.join(job.settings)}, {cost.cpu_seconds:.0f} CPU-seconds")

        train.several(
            workspace, list(jobs.values()), self.jobs, recipe="paper", settings=self.recipe, on_done=keep
        )

    def evaluate(self, wanted: Sequence[tuple[Setting, int]], at_once: int) -> None:
        """Evaluate all seeds of settings, each at a length, unless that is done."""
        jobs = [(self.at(length), self.folders(setting), self.evaluation()) for setting, length in wanted]
        missing = [job for job in jobs if not evaluate.kept(*job)]
        with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
            for done in [pool.submit(evaluate.evaluate, *job) for job in missing]:
                say(f"evaluated {', '.join(one.name for one in done.result())}")

    def read(self, setting: Setting, length: int) -> Arm | None:
        """What was measured of a setting; None if it is not complete."""
        workspace = self.at(length)
        if not workspace.prompts.exists():
            return None
        found = evaluate.kept(workspace, self.folders(setting), self.evaluation())
        costs = [cost_file(workspace, folder) for folder in self.folders(setting)]
        facts = [json.loads(file.read_text()) for file in costs if file.exists()]
        seconds, commits = ([one[key] for one in facts] for key in ("cpu_seconds", "commit"))
        return Arm(found, seconds, commits) if found else None


def run(trial: Trial, claim: Claim) -> None:
    """Train and evaluate what a claim lacks."""
    for length in claim.at:
        trial.lengthen(length)
    trial.train(list(dict.fromkeys((claim.one, claim.other))))
    sides = dict.fromkeys(zip((claim.one, claim.other), claim.at, strict=True))
    trial.evaluate([*sides], 1 if claim.rate == "decode_speedup" else trial.jobs)


def _view(where: str) -> str:
    return f"claims-{content_hash(where)[:10]}"


def _commit() -> str:
    return software.commit() or "unknown"


def cost_file(workspace: Workspace, folder: str) -> Path:
    """What the training of a drafter cost."""
    return workspace.drafter(f"{folder}.training") / "cost.json"


Sides = tuple[Arm | None, Arm | None]


def page(papers: Sequence[Paper], sides: Mapping[str, Sides], conditions: Mapping[str, object]) -> str:
    """The claims of each paper as Markdown, with what was found."""
    ran = [arm for pair in sides.values() for arm in pair if arm]
    counts = [_verdict(claim, sides)[0] for paper in papers for claim in paper.claims]
    summary = ", ".join(f"{counts.count(one)} {one}" for one in dict.fromkeys(sorted(counts)))
    hardware = sorted({one.hardware for arm in ran for one in arm.evaluations})
    days = sorted({one.measured[:10] for arm in ran for one in arm.evaluations})
    commits = sorted({commit for arm in ran for commit in arm.commits})
    facts = [
        f"Seeds per setting: {conditions['seeds']}; optimizer steps of every drafter: {conditions['steps']}",
        f"Evaluated {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "Evaluated: nothing yet",
        f"Commit {', '.join(commits)}; {', '.join(hardware)}" if ran else f"Commit {_commit()}",
    ]
    sections = "\n\n".join(_section(paper, sides) for paper in papers)
    return f"""# The papers on trial

`make claims` writes this page. It repeats ablations of five papers on the
embedded targets: {summary}.
{"; ".join(facts)}.

Both sides of a claim have the same optimizer steps, tokens per step, learning rate, store and seeds;
`steps` are divided between stages in the ratio of the paper's epochs. The draft tree is `chain-4` on the
embedded targets unless a setting says otherwise. Rates are of greedy decoding, with the bonus token, pooled
over held-out prompts with an image or a video. *Found* is the mean over seeds of each side, then their
difference with its 95% interval: over seeds (Student's t on the difference of each seed) and over prompts
(bootstrap, for at least {FEWEST} prompts). A claim **holds** if the interval lies on its side of 0, or, for
"as good as", within the margin; it **does not hold** if the interval lies on the other side, or outside the
margin; else it **cannot be told**. At 95%, some of this many claims go wrong by chance. Of claims on speed
only the direction means anything: the target is tiny, and the clock of a shared CPU is in them. CPU-s: CPU
seconds of one training of each side. Papers print other quantities as tau ([methods.md](methods.md)):
compare directions, not numbers.

{sections}
"""


def _section(paper: Paper, sides: Mapping[str, Sides]) -> str:
    titles = "claim, paper, paper's numbers, rate, found, difference, verdict, CPU-s"
    lines = [f"| {' | '.join(titles.split(', '))} |", "|---" * 8 + "|"]
    for claim in paper.claims:
        verdict, one, other, between, cost = _verdict(claim, sides)
        wanted = claim.says if claim.expects == "more" else f"{claim.says} (within {claim.margin})"
        rate = claim.rate.replace("_", " ")
        found = f"{one} / {other}" if one else "-"
        cells = [wanted, claim.source, claim.printed, rate, found, between, verdict, cost]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    settings = "\n".join(
        f"- `{name}`: `{one}` against `{other}`"
        for name, one, other in ((claim.name, claim.one, claim.other) for claim in paper.claims)
    )
    missing = "\n".join(f"- {text}" for text in paper.not_built)
    more = f"\n\nNot built:\n\n{missing}" if missing else ""
    note = f" {paper.note}" if paper.note else ""
    return f"## {paper.title}\n\nTarget `{paper.model}`.{note}\n\n{table}\n\nSettings:\n\n{settings}{more}"


def _verdict(claim: Claim, sides: Mapping[str, Sides]) -> tuple[str, str, str, str, str]:
    """Verdict, the two rates, their difference and the costs of a claim, as text."""
    one, other = sides.get(claim.name, (None, None))
    if one is None or other is None:
        return "not run yet", "", "", "-", "-"
    rates = [
        statistics.fmean(getattr(figures(at), claim.rate) for at in arm.measured) for arm in (one, other)
    ]
    found = difference(one.measured, other.measured, claim.rate)
    costs = [f"{statistics.fmean(arm.cpu_seconds):.0f}" if arm.cpu_seconds else "-" for arm in (one, other)]
    return judge(claim, found), f"{rates[0]:.2f}", f"{rates[1]:.2f}", found.text, " / ".join(costs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the claims, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", help="claims whose names begin so; may be repeated")
    parser.add_argument("--page", action="store_true", help="only write the page, of what is measured")
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument("--steps", type=int, help="300, or for another target those of the recipe `fair`")
    parser.add_argument("--limit", type=int, default=50, help="held-out prompts")
    parser.add_argument("--jobs", type=int, default=2, help="drafters trained in parallel")
    parser.add_argument("--model", help="another target, for all claims")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/claims.md"))
    options = parser.parse_args(arguments)
    papers = [replace(one, model=options.model or one.model) for one in PAPERS]
    trials = {
        model: Trial(
            base=Workspace.of(model, options.runs),
            seeds=options.seeds,
            steps=options.steps or (300 if model in EMBEDDED else 0),
            limit=options.limit,
            jobs=options.jobs,
        )
        for model in dict.fromkeys(one.model for one in papers)
    }
    pairs = [(trials[paper.model], claim) for paper in papers for claim in paper.claims]
    chosen = [pair for start in options.only or [""] for pair in pairs if pair[1].name.startswith(start)]
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)}: no claim has a name that begins so")
    sides: dict[str, Sides] = {claim.name: _read(trial, claim) for trial, claim in pairs}
    conditions = {"seeds": options.seeds, "steps": next(iter(trials.values())).steps or "recipe `fair`"}

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(papers, sides, conditions))

    write()
    if options.page:
        return
    for model in dict.fromkeys(trial.base.model for trial, _ in chosen):
        trials[model].prepare([paper for paper in papers if paper.model == model])
    started, failed = time.monotonic(), list[str]()
    for number, (trial, claim) in enumerate(chosen, 1):
        if None in sides[claim.name]:
            try:
                run(trial, claim)
            except VlmdistillError as error:
                failed.append(f"{claim.name}: {error}")
                continue
            sides[claim.name] = _read(trial, claim)
            write()
        hours = (time.monotonic() - started) / 3600
        say(f"{number} of {len(chosen)}: {claim.name} {_verdict(claim, sides)[0]}, after {hours:.1f} hours")
    say(f"wrote {options.out}")
    if failed:
        raise SystemExit("\n".join(failed))


def _read(trial: Trial, claim: Claim) -> Sides:
    return trial.read(claim.one, claim.at[0]), trial.read(claim.other, claim.at[1])


if __name__ == "__main__":
    main()
