"""The papers on trial: the ablations of six papers, repeated on the embedded targets over several seeds.

    python -m research.claims [--paper P] [--only NAME ...] [--seeds 5] [--steps 300] [--jobs 2] [--out F]

`claimed.py` lists the claims. Both settings of a claim are trained on one store and measured on the same
prompts with a picture; the page says of each claim whether its direction holds. Finished trainings and
measurements are kept, so an interrupted run continues, and settings that claims share are trained once.
The page is written after every claim; claims on speed come last, and need the machine for themselves: both
sides are decoded in one process.
`--only` takes claims whose names begin so, in that order.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from research import say
from research.claimed import PAPERS, Claim, Paper, Setting
from research.trial import Run, Trial, compare, cost
from vlmdistill.pipelines.bench.statistics import (
    FEWEST,
    FEWEST_SEEDS,
    Difference,
    difference,
    figures,
)
from vlmdistill.pipelines.targets import software
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import StoppedError, VlmdistillError

Verdict = Literal["holds", "does not hold", "cannot be told"]
MANY = {  # verdict -> of several claims
    "holds": "hold",
    "does not hold": "do not hold",
    "cannot be told": "cannot be told",
    "not run yet": "have not run yet",
}


def judge(claim: Claim, found: Difference) -> Verdict:
    """What the interval says of the claim."""
    if found.interval is None or claim.ours:
        return "cannot be told"
    low, high = found.interval.low, found.interval.high
    if claim.expects == "more":
        return "holds" if low > 0 else "does not hold" if high < 0 else "cannot be told"
    if -claim.margin <= low and high <= claim.margin:
        return "holds"
    return (
        "does not hold"
        if low > claim.margin or high < -claim.margin
        else "cannot be told"
    )


def run(trial: Trial, claim: Claim) -> None:
    """Train and measure what a claim lacks."""
    both = (claim.one, claim.other)
    trial.train([*dict.fromkeys(both)])
    if claim.rate == "tau" or trial.counts:
        for setting, length in dict.fromkeys(zip(both, claim.at, strict=True)):
            trial.measure(setting, length)
    if claim.rate != "tau":
        trial.race(claim.name, both)


Sides = tuple[
    Sequence[Run], Sequence[Run]
]  # of both settings, a run for each seed; empty: not measured


@dataclass(frozen=True)
class Conditions:
    """What holds for all claims of a page."""

    seeds: int
    steps: int | str
    compared: int = 0  # responses of which tau was counted and decoded
    alike: int = 0  # of these, with the same cycles and accepted tokens


def page(
    papers: Sequence[Paper], sides: Mapping[str, Sides], conditions: Conditions
) -> str:
    """The claims of each paper as Markdown, with what was found."""
    ran = [one for pair in sides.values() for runs in pair for one in runs]
    counts = [_verdict(claim, sides)[0] for paper in papers for claim in paper.claims]
    summary = ", ".join(
        f"{counts.count(one)} {many}" for one, many in MANY.items() if one in counts
    )
    hardware = sorted({one.measured.hardware for one in ran})
    days = sorted({one.measured.day for one in ran})
    commits = sorted({one.cost.commit for one in ran})
    facts = [
        f"Seeds per setting: {conditions.seeds}; optimizer steps of every drafter: {conditions.steps}",
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}"
        if days
        else "Measured: nothing yet",
        f"Commit {', '.join(commits)}; {', '.join(hardware)}"
        if ran
        else f"Commit {software.commit()}",
    ]
    sections = "\n\n".join(_section(paper, sides) for paper in papers)
    return f"""# The papers on trial

`make claims` writes this page. It repeats ablations of {len(papers)} papers on the embedded targets.
Of {len(counts)} claims, {summary}.

{"; ".join(facts)}.

- **Both sides** of a claim have the same optimizer steps (divided between stages in the ratio of the
  paper's epochs), tokens per step, learning rate, store and seeds. Visual tokens count if the drafter
  reads them, so a drafter that hides them gets more samples. The tree is `chain-4` unless a setting says
  otherwise.
- **Rates** are of greedy decoding, with the bonus token, pooled over held-out prompts with an image or a
  video. Papers print other quantities as tau ([papers.md](../papers.md)): compare directions, not
  numbers.
- **Found** is the mean over seeds of each side. Their difference has a 95% interval over seeds (Student's
  t on the difference of each seed) and over prompts (jackknife, for at least {FEWEST} prompts).
- **Verdict.** A claim holds if the interval lies on its side of 0, or, for "as good as", within the
  margin; it does not hold if the interval lies on the other side, or outside the margin. Otherwise it
  cannot be told, also if `eval` would warn of the measurement, or a setting has something of ours that
  the paper has not.
- **Chance.** At 95%, some of this many claims go wrong.
- **Speed**: all seeds of both sides decode each prompt in turn in one process, without the prefill (the
  papers' speedups include it). Trust only its direction, since the target is tiny.
- **CPU-s**: CPU seconds of one training of each side.

On the embedded targets tau is counted without decoding, on the target's own responses
(`research/trial.py`). As a check, {conditions.compared} responses were decoded too, for the claims on
speed; {conditions.alike} of them gave the same counts.

{sections}
"""


def _section(paper: Paper, sides: Mapping[str, Sides]) -> str:
    titles = "claim, paper, paper's numbers, rate, found, difference, verdict, CPU-s"
    lines = [f"| {' | '.join(titles.split(', '))} |", "|---" * 8 + "|"]
    for claim in paper.claims:
        verdict, one, other, between, cost = _verdict(claim, sides)
        wanted = (
            claim.says
            if claim.expects == "more"
            else f"{claim.says} (within {claim.margin})"
        )
        wanted += f"; ours: {claim.ours}" if claim.ours else ""
        rate = claim.rate.replace("_", " ")
        found = f"{one} / {other}" if one else "-"
        cells = [
            wanted,
            claim.source,
            claim.printed,
            rate,
            found,
            between,
            verdict,
            cost,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    names: dict[tuple[Setting, Setting], list[str]] = {}
    for claim in paper.claims:
        names.setdefault((claim.one, claim.other), []).append(f"`{claim.name}`")
    settings = "\n".join(
        f"- {', '.join(alike)}: `{one}` against `{other}`"
        for (one, other), alike in names.items()
    )
    missing = "\n".join(f"- {text}" for text in paper.not_built)
    more = f"\n\nNot built:\n\n{missing}" if missing else ""
    note = f" {paper.note}" if paper.note else ""
    return f"## {paper.title}\n\nTarget `{paper.model}`.{note}\n\n{table}\n\nSettings:\n\n{settings}{more}"


def _verdict(
    claim: Claim, sides: Mapping[str, Sides]
) -> tuple[str, str, str, str, str]:
    """Verdict, the two rates, their difference and the costs of a claim, as text."""
    pair = sides.get(claim.name, ((), ()))
    if not all(pair):
        return "not run yet", "", "", "-", "-"
    one, other = arms = [[run.pictured for run in runs] for runs in pair]
    rates = [
        f"{statistics.fmean(getattr(figures(at), claim.rate) for at in arm):.2f}"
        for arm in arms
    ]
    costs = " / ".join(cost(runs) for runs in pair)
    found = difference(one, other, claim.rate)
    doubtful = any(figures(at).warnings for arm in arms for at in arm)
    verdict = "cannot be told" if doubtful else judge(claim, found)
    return verdict, rates[0], rates[1], found.text, costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the claims, and write the page after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", help="claims whose names begin so; may be repeated"
    )
    parser.add_argument("--paper", default="", help="the papers whose titles begin so")
    parser.add_argument(
        "--page", action="store_true", help="only write the page, of what is measured"
    )
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument(
        "--steps",
        type=int,
        help="300, or for another target those of the recipe `fair`",
    )
    parser.add_argument("--limit", type=int, default=50, help="held-out prompts")
    parser.add_argument(
        "--jobs", type=int, default=2, help="drafters trained in parallel"
    )
    parser.add_argument("--model", help="another target, for all claims")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/claims.md"))
    options = parser.parse_args(arguments)
    papers = [
        replace(one, model=options.model or one.model)
        for one in PAPERS
        if one.title.startswith(options.paper)
    ]
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
    chosen = [
        pair
        for start in options.only or [""]
        for pair in pairs
        if pair[1].name.startswith(start)
    ]
    chosen.sort(key=lambda pair: pair[1].rate != "tau")
    if not chosen:
        raise SystemExit(
            f"--paper {options.paper!r} --only {options.only}: no claim has a name that begins so"
        )
    sides: dict[str, Sides] = {
        claim.name: _read(trial, claim) for trial, claim in pairs
    }
    steps = next(iter(trials.values())).steps or "those of the recipe `fair`"

    checks: dict[tuple[str, Setting], tuple[int, int]] = {}

    def check(trial: Trial, claim: Claim) -> None:
        if claim.rate == "tau" or not trial.counts:
            return
        for setting, length, decoded in zip(
            (claim.one, claim.other), claim.at, sides[claim.name], strict=True
        ):
            if decoded and (counted := trial.read(setting, length)):
                checks[claim.name, setting] = compare(counted, decoded)

    for trial, claim in pairs:
        check(trial, claim)

    def write() -> None:
        compared = checks.values() or [(0, 0)]
        conditions = Conditions(
            options.seeds, steps, *(sum(some) for some in zip(*compared, strict=True))
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(papers, sides, conditions))

    write()
    if options.page:
        return
    for model in dict.fromkeys(trial.base.model for trial, _ in chosen):
        claims = [
            claim for paper in papers if paper.model == model for claim in paper.claims
        ]
        trials[model].prepare(
            [side for claim in claims for side in (claim.one, claim.other)]
        )
    started, failed = time.monotonic(), list[str]()
    for number, (trial, claim) in enumerate(chosen, 1):
        if not all(sides[claim.name]):
            try:
                run(trial, claim)
            except StoppedError as stop:
                raise SystemExit(128 + stop.signal) from None
            except VlmdistillError as error:
                failed.append(f"{claim.name}: {error}")
                continue
            sides[claim.name] = _read(trial, claim)
            check(trial, claim)
            write()
        hours = (time.monotonic() - started) / 3600
        say(
            f"{number} of {len(chosen)}: {claim.name} {_verdict(claim, sides)[0]}, after {hours:.1f} hours"
        )
    say(f"wrote {options.out}")
    if failed:
        raise SystemExit("\n".join(failed))


def _read(trial: Trial, claim: Claim) -> Sides:
    if claim.rate == "tau":
        return trial.read(claim.one, claim.at[0]), trial.read(claim.other, claim.at[1])
    one, other = trial.raced(claim.name, (claim.one, claim.other))
    return one, other


if __name__ == "__main__":
    main()
