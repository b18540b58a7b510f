"""The page of `research.drift`: `docs/measurements/drift.md`, its numbers and its picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from research.drift import (
    CHOSEN,
    FEW,
    HELD_OUT,
    PHASES,
    ROUNDS,
    SETTINGS,
    STEPS,
    STRATEGIES,
    Adapted,
    Cost,
    Served,
)
from research.methods import spread
from vlmdistill.pipelines.bench.records import Measurement, PromptResult
from vlmdistill.pipelines.bench.statistics import advantage, figures, rates
from vlmdistill.pipelines.report import charts
from vlmdistill.pipelines.report.chart_files import as_svg
from vlmdistill.pipelines.report.page import write

GAIN, SHARE, REACHED = (
    1.15,
    0.1,
    0.95,
)  # the goal: more accepted tokens, of the first cost, of retraining
SAID = {
    "static": "static",
    "once": "adapted once",
    "each": "adapted each round",
    "retrained": "retrained from nothing",
}


def keep(
    out: Path,
    model: str,
    drafter: str,
    first: Sequence[Cost],
    served: Sequence[Sequence[Served]],
    settings: Sequence[Sequence[Adapted]],
) -> None:
    """Write the page with what was found of a model, by seed, and what is there of other models."""
    file = out.with_suffix(".json")
    facts = (
        json.loads(file.read_text()) if file.exists() else {"drift": {}, "settings": {}}
    )
    facts["phases"] = {name: asdict(one) for name, one in PHASES.items()}
    common = {"drafter": drafter, "first": costs(first)}
    if served:
        facts["drift"][model] = {**common, **drift_facts(served)}
        write(
            as_svg(picture(model, facts["drift"][model])),
            out.with_name(f"drift-{model}.svg"),
        )
    if settings:
        facts["settings"][model] = {**common, **settings_facts(settings)}
    file.write_text(json.dumps(facts, indent=1) + "\n")
    out.write_text(page(facts))


def pooled(seeds: Sequence[Measurement]) -> Measurement:
    """One measurement of all seeds: each prompt has the counts of all of them."""
    together = []
    for same in zip(*(one.prompts for one in seeds), strict=True):
        assert len({one.key for one in same}) == 1, "every seed has the same prompts"
        together.append(_sum(same))
    return replace(seeds[0], prompts=tuple(together))


def _sum(same: Sequence[PromptResult]) -> PromptResult:
    """The counts of a prompt in all seeds; of each response the first token is of no call."""
    drafted = [one.drafted for one in same]
    tokens = 1 + sum(one.tokens - 1 for one in drafted)
    calls, accepted = (
        sum(getattr(one, name) for one in drafted) for name in ("calls", "accepted")
    )
    return replace(
        same[0],
        drafted=replace(drafted[0], tokens=tokens, calls=calls, accepted=accepted),
    )


def drift_facts(seeds: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """Tau, costs and ratios by round and strategy."""
    found = []
    for number, name in enumerate([*ROUNDS][1:]):
        mine = {
            strategy: [
                one
                for seed in seeds
                for one in seed
                if (one.round, one.strategy) == (name, strategy)
            ]
            for strategy in STRATEGIES
        }
        on = {
            strategy: pooled([one.on for one in some])
            for strategy, some in mine.items()
        }
        row: dict[str, Any] = {
            "round": name,
            "prompts": len(on["static"].prompts),
            "trained": number,
        }
        for strategy, some in mine.items():
            interval = figures(on[strategy]).intervals["tau"]
            row[strategy] = {
                "tau": [
                    round(value, 3)
                    for value in (
                        rates(on[strategy])["tau"],
                        interval.low,
                        interval.high,
                    )
                ],
                "tau_by_seed": [round(rates(one.on)["tau"], 3) for one in some],
                "accepted": round(rates(on[strategy])["accepted"], 3),
                "old": round(rates(pooled([one.old for one in some]))["tau"], 3),
                **costs([one.cost for one in some]),
            }
            if number and strategy != "static":
                row[strategy]["over_static"] = {
                    rate: ratio(on[strategy], on["static"], rate)
                    for rate in ("tau", "accepted")
                }
        if number:
            row["of_retrained"] = ratio(on["each"], on["retrained"], "accepted")
        found.append(row)
    return {"rounds": found}


def settings_facts(seeds: Sequence[Sequence[Adapted]]) -> dict[str, Any]:
    """Tau on the new and the old traffic, accepted tokens and costs of each setting, by seed."""
    retrained = pooled([seed[-1].new for seed in seeds])
    found = {}
    for number, one in enumerate(seeds[0]):
        mine = [seed[number] for seed in seeds]
        found[one.setting] = {
            "new": [round(rates(some.new)["tau"], 3) for some in mine],
            "old": [round(rates(some.old)["tau"], 3) for some in mine],
            "of_retrained": ratio(
                pooled([some.new for some in mine]), retrained, "accepted"
            ),
            **costs([some.cost for some in mine]),
        }
    return {
        "settings": found,
        "prompts": [len(retrained.prompts), len(seeds[0][0].old.prompts)],
    }


def costs(seeds: Sequence[Cost]) -> dict[str, Any]:
    """What some trainings cost, by seed."""
    return {
        "cpu_seconds": [round(one.cpu_seconds, 1) for one in seeds],
        "guesses": [one.guesses for one in seeds],
    }


def ratio(one: Measurement, other: Measurement, rate: Any) -> list[float]:
    """The ratio of two rates, and its interval."""
    interval = advantage(one, other, rate)
    assert interval is not None, "rounds have enough prompts for an interval"
    return [
        round(value, 3)
        for value in (
            rates(one)[rate] / rates(other)[rate],
            interval.low,
            interval.high,
        )
    ]


def picture(model: str, facts: dict[str, Any]) -> charts.Chart:
    """Tau over the rounds."""
    rows = facts["rounds"]
    lines = [
        charts.Line(
            SAID[name],
            at,
            [(number, row[name]["tau"][0]) for number, row in enumerate(rows, 1)],
        )
        for at, name in enumerate(STRATEGIES)
    ]
    phases = [row["round"][0] for row in rows]
    (second,) = (
        at for at, (one, other) in enumerate(pairwise(phases), 2) if one != other
    )
    title = f"Tau on {model}, first shift before round 1"
    return charts.curves(
        title, "round", lines, up="tokens per call", stages={"second shift": second}
    )


def page(facts: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = [
        _INTRODUCTION.format(
            steps=STEPS,
            command=f"`vlmdistill adapt NAME --from LOG {SETTINGS[CHOSEN].options}`",
            more=FEW,
            share=f"{HELD_OUT:.0%}",
            phases=_phases(facts["phases"]),
        )
    ]
    for model, one in facts["drift"].items():
        parts.append(_drift(model, one))
    if facts["settings"]:
        parts.append(_SETTINGS.format(reached=f"{REACHED:.0%}", share=f"{SHARE:.0%}"))
        parts += [_settings(model, one) for model, one in facts["settings"].items()]
    return "\n".join(parts)


def _phases(phases: dict[str, Any]) -> str:
    lines = [
        "| traffic | about pictures | background | without one | ends in |",
        "|---|---|---|---|---|",
    ]
    for name, one in phases.items():
        cells = [", ".join(one[part]) for part in ("tasks", "grounds", "talks")]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {one['suffix'].strip() or '-'} |"
        )
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _table(
    title: str,
    rows: Sequence[Any],
    cell: Callable[[Any, str], str],
    names: Sequence[str],
) -> str:
    lines = [
        f"| {title} | {' | '.join(row['round'] for row in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    lines += [
        f"| {SAID[name]} | {' | '.join(cell(row, name) for row in rows)} |"
        for name in names
    ]
    return "\n".join(lines)


def _drift(model: str, facts: dict[str, Any]) -> str:
    rows, others = facts["rounds"], STRATEGIES[1:]

    def over(rate: str) -> str:
        def cell(row: Any, name: str) -> str:
            return _interval(row[name]["over_static"][rate])

        return _table(f"{rate} over static", rows[1:], cell, others)

    first = facts["first"]
    prompts = ", ".join(str(row["prompts"]) for row in rows)
    return f"""## `{model}`

`{facts["drafter"]}`, {_seeds(facts)}; {prompts} held-out requests of the rounds.
The first training took {spread(first["cpu_seconds"], 0)} CPU seconds, for {_thousands(first)} thousand
guesses.

![Tau over the rounds](drift-{model}.svg)

{_table("tau", rows, lambda row, name: _interval(row[name]["tau"]), STRATEGIES)}

{over("accepted")}

{over("tau")}

{_table("tau on the traffic of the start", rows, lambda row, name: f"{row[name]['old']:.2f}", STRATEGIES)}

{_table("CPU seconds by then", rows, lambda row, name: spread(row[name]["cpu_seconds"], 0), others)}

{_table("thousand guesses by then", rows, lambda row, name: _thousands(row[name]), others)}

{_verdict(facts)}
"""


def _verdict(facts: dict[str, Any]) -> str:
    """Whether the goal is met, by the round after the first adaptation."""
    row = facts["rounds"][1]
    gain, reached = row["each"]["over_static"]["accepted"], row["of_retrained"]
    cost, guesses = (
        _share(row["each"], facts["first"], what) for what in ("cpu_seconds", "guesses")
    )
    goals = [
        (
            gain[0] >= GAIN,
            f"{gain[0] - 1:+.0%} accepted tokens per call over the static drafter in the round after the "
            f"first adaptation, interval {gain[1] - 1:+.0%} to {gain[2] - 1:+.0%} (goal: {GAIN - 1:+.0%})",
        ),
        (
            cost <= SHARE,
            f"{cost:.1%} of the CPU seconds of the first training (goal: {SHARE:.0%}), and {guesses:.1%} of "
            "its guesses",
        ),
        (
            reached[0] >= REACHED,
            f"{reached[0]:.0%} of the accepted tokens of the drafter that was retrained from nothing, "
            f"interval {reached[1]:.0%} to {reached[2]:.0%} (goal: {REACHED:.0%})",
        ),
    ]
    return "\n".join(
        f"- **{'Met' if met else 'Not met'}**: {text}." for met, text in goals
    )


def _settings(model: str, facts: dict[str, Any]) -> str:
    (new, old), first = facts["prompts"], facts["first"]
    lines = [
        f"`{model}`, `{facts['drafter']}`, {_seeds(facts)}: the mean, with minimum and maximum; {new} "
        f"held-out requests of the new traffic, {old} of the old.\n",
        "| setting | steps | tau, new traffic | accepted, of retrained | tau, old traffic "
        "| CPU-s, of the first | guesses, of the first |",
        "|---|---|---|---|---|---|---|",
    ]
    both: dict[str, list[str]] = {"CPU seconds": [], "guesses": []}
    for name, one in facts["settings"].items():
        shares = [_share(one, first, what) for what in ("cpu_seconds", "guesses")]
        steps = str(SETTINGS[name].steps) if name in SETTINGS else "-"
        costs = [f"{share:.1%}" if share else "-" for share in shares]
        cells = [
            name,
            steps,
            spread(one["new"]),
            _interval(one["of_retrained"]),
            spread(one["old"]),
            *costs,
        ]
        lines.append(f"| {' | '.join(cells)} |")
        for met, share in zip(both.values(), shares, strict=True):
            if share <= SHARE and one["of_retrained"][0] >= REACHED:
                met.append(name)
    said = (
        f"{' and '.join(met) or 'none'} counted in {what}" for what, met in both.items()
    )
    return "\n".join([*lines, f"\nSettings that meet both goals: {', '.join(said)}.\n"])


def _seeds(facts: dict[str, Any]) -> str:
    count = len(facts["first"]["guesses"])
    return f"{count} seed{'s' * (count > 1)}"


def _share(one: dict[str, Any], first: dict[str, Any], what: str) -> float:
    """Of the cost of the first trainings."""
    return float(sum(one[what]) / sum(first[what]))


def _thousands(costs: dict[str, Any]) -> str:
    return spread([one / 1000 for one in costs["guesses"]], 0)


_INTRODUCTION = """# Traffic that shifts

`python -m research.drift` writes this page; the raw numbers are in [drift.json](drift.json). Requests come
in rounds and shift twice: in questions, backgrounds of pictures and wording.

{phases}

One question in five is without a picture. `a0` is before the first shift, `b1` and `b2` after it, `c1` and
`c2` after the second. All drafters begin as one trained on `a0` for {steps} steps:

- **static** stays as it is;
- **once** and **each** are adapted to `b1` alone and to each round, as by
  {command}, with half of the samples from
  earlier rounds;
- **retrained** is trained from nothing on `a0` and `b1`, for {more} steps more.

**A round is measured with the drafter that served it, before training on it**, on the {share} of its
requests that
are held out. Tau is counted at temperature 0 without decoding; intervals are 95% over prompts with the
counts of all seeds.

Costs are CPU seconds of training, which vary on the shared machine, and trained guesses: positions of
responses, hop by hop. Neither cost includes capturing the round's states, which every strategy but `static`
needs. Embedded targets without a section below were not measured.
"""

_SETTINGS = """## Which setting

The same adaptation to `b1` in other settings, measured on `b2` and `a0`; the recipe's batches have 2,048
tokens. Costs are shares of the first training's; accepted tokens are compared with the retrained drafter's.
Goals:
{reached} of them for {share}. The setting above was chosen on the held-out requests of `b1`, with other seeds
([log](../log.md)).
"""
