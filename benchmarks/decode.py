"""Times plain decoding steps and speculative cycles, relative to the stock model's steps.

    python -m benchmarks.decode [--model demo-small] [--tree chain-5 ...] [--compile] [--out FILE]

Each round times every kind of work once, as `RUN` steps or cycles in a row: a step between other work takes
longer than one after another, and decoding is the latter. Times are medians over rounds, ratios are medians
of the ratios within a round, so that a machine whose speed drifts affects all alike. The drafter is
untrained: the time of a cycle does not depend on what it drafts. Three tokens of each cycle are committed to
the drafter, none to the target. `vlmdistill eval` measures tau and speedup.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from transformers import DynamicCache

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.decoding.acceptance import verify
from vlmdistill.drafters.decoding.clock import Laps, Phase, wait
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.text_layers import cache_argument
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

TREES = (
    "chain-3",
    "chain-5",
    "chain-8",
    "8-3-2",
    "12-4-3",
    "16-4-4",
    "30-3-8",
    "60-5-10",
)
PREFIX = 100  # tokens after the prompt
RUN = 8  # steps or cycles in a row


def measure(
    target: VisionLanguageTarget,
    drafter: str,
    trees: Sequence[str],
    rounds: int,
    compiled: VisionLanguageTarget | None = None,
) -> dict[str, Any]:
    """Milliseconds and ratios of one target and one untrained drafter; `compiled` is the same target."""
    kind = catalogue.load(drafter)
    untrained = (
        kind(kind.Config(), target.info, target.head)
        .to(target.device, target.dtype)
        .eval()
    )
    picture = Image.new("RGB", (84, 84), (20, 40, 60))
    content = [
        {"type": "image", "image": picture},
        {"type": "text", "text": "Describe the scene."},
    ]
    prompt = target.encode([{"role": "user", "content": content}])
    with torch.inference_mode():
        works = _works(target, untrained, prompt, trees)
        if compiled is not None:
            works["compiled step"] = _steps(
                _plain_step(compiled, prompt), target.device
            )
        times: dict[str, list[Spent]] = {name: [] for name in works}
        for number in range(rounds + 1):
            for name, work in works.items():
                run = work()  # untimed
                found = [run() for _ in range(RUN)]
                wait(target.device)
                if number:  # the first round is a warm-up
                    times[name].append(_mean(found))
    whole = {
        name: [sum(one.values()) for one in rounds] for name, rounds in times.items()
    }
    plain = whole["plain step"]
    figures: dict[str, Any] = {
        "milliseconds": {
            name: statistics.median(values) for name, values in whole.items()
        },
        "plain step / stock step": _ratio(plain, whole["stock step"]),
        "plain step / weights read once": _ratio(plain, whole["weights read once"]),
    }
    if compiled:
        figures["compiled step / plain step"] = _ratio(whole["compiled step"], plain)
    for tree in trees:
        figures[f"{tree}: tokens per cycle to break even"] = _ratio(
            whole[f"{tree} cycle"], plain
        )
        for phase in ("draft", "verify", "accept"):
            spent = [one[phase] for one in times[f"{tree} cycle"]]
            figures["milliseconds"][f"{tree} {phase}"] = statistics.median(spent)
            if phase == "verify":
                figures[f"{tree}: verification / plain step"] = _ratio(spent, plain)
    if target.device.type == "cuda":
        figures["peak memory, GiB"] = (
            torch.cuda.max_memory_allocated(target.device) / 2**30
        )
    return {**figures, "drafter": drafter, "prefix": PREFIX + prompt.length}


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


Spent = dict[str, float]
"""Milliseconds by phase."""
Work = Callable[[], Callable[[], Laps]]
"""Prepares a run of steps or cycles, and gives what each of them is."""


def _mean(run: Sequence[Laps]) -> Spent:
    spent: dict[Any, float] = dict.fromkeys(get_args(Phase), 0.0)
    for laps in run:
        laps.add_to(spent)
    return {phase: 1e3 * seconds / len(run) for phase, seconds in spent.items()}


def _works(
    target: VisionLanguageTarget, drafter: Any, prompt: Any, trees: Sequence[str]
) -> dict[str, Work]:
    """All that is timed, by name, on one prefix."""
    prefix = target.prefill(prompt, drafter.config.needs(target.info, decoding=True))
    one = torch.ones(1, dtype=torch.long, device=target.device)
    before_1D = torch.cat(
        [prefix.feature("hidden", "text")[-1:]] * len(drafter.sources), dim=-1
    )
    plain_step = _plain_step(target, prompt)
    weights = list(target.model.model.language_model.parameters())

    def cycles(shape: Tree) -> Callable[[], Laps]:
        draft = TreeDrafter(drafter, prefix)
        draft.commit(one.repeat(PREFIX), before_1D.repeat(PREFIX, 1))

        def cycle() -> Laps:
            laps = Laps(target.device)
            nodes = draft.grow(shape)
            laps.end("draft")
            states_ND = target.extend(
                nodes.ids_N, nodes.depth_N, nodes.visible_NN, ("hidden",)
            )["hidden"]
            logits_NV = target.logits(states_ND)
            laps.end("verify")
            verify(nodes, logits_NV, 0.0).path_N.tolist()
            laps.end("accept")
            draft.commit(one.repeat(3), before_1D.repeat(3, 1))
            laps.end("draft")
            return laps

        return cycle

    return {
        "plain step": _steps(plain_step, target.device),
        "stock step": _steps(
            _stock_step(target, prompt.length + PREFIX), target.device
        ),
        "weights read once": _steps(
            lambda: [weight.sum() for weight in weights], target.device
        ),
        **{f"{name} cycle": partial(cycles, Tree.parse(name)) for name in trees},
    }


def _steps(run: Callable[[], object], device: torch.device) -> Work:
    def step() -> Laps:
        laps = Laps(device)
        run()
        laps.end("verify")
        return laps

    return lambda: step


def _plain_step(target: VisionLanguageTarget, prompt: Any) -> Callable[[], object]:
    """One more token after the prompt and `PREFIX` tokens; it is not committed."""
    target.prefill(prompt)
    one = torch.ones(1, dtype=torch.long, device=target.device)
    for _ in range(PREFIX):
        target.extend(one, one, None, ("hidden",))
        target.commit([0])
    return lambda: (
        target.logits(target.extend(one, one, None, ("hidden",))["hidden"])
        .argmax(-1)
        .tolist()
    )


def _stock_step(target: VisionLanguageTarget, length: int) -> Callable[[], object]:
    """One token through the stock modules with their own cache: the least that `generate` takes."""
    cache = DynamicCache()
    text = target.model.model.language_model
    caching = {cache_argument(text): cache}
    shape = (1, target.info.num_kv_heads, length, target.info.head_dim)
    rows = torch.zeros(shape, device=target.device, dtype=target.dtype)
    for layer in range(target.info.num_layers):
        cache.update(rows, rows, layer)
    one = torch.ones(1, 1, dtype=torch.long, device=target.device)
    position = one * length
    position = position.expand(3, 1, 1) if target.family.mrope else position

    def step() -> object:
        state = text(input_ids=one, position_ids=position, use_cache=True, **caching)
        token = target.model.lm_head(state.last_hidden_state).argmax(-1)
        cache.crop(-1)
        return token

    return step


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-small")
    parser.add_argument("--drafter", default="sparrow")
    parser.add_argument("--tree", action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="measure a compiled step as well"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench-decode.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    target = load(given.model)
    compiled = load(given.model, compiled=True) if given.compile else None
    result = {
        "model": given.model,
        "threads": given.threads,
        **measure(target, given.drafter, given.tree or TREES, given.rounds, compiled),
    }
    print(
        f"{given.model} with {given.drafter}, {given.threads} threads; medians of {given.rounds} rounds"
    )
    for name, value in result["milliseconds"].items():
        print(f"  {name:<24}{value:9.3f} ms")
    for name, value in result.items():
        if isinstance(value, float):
            print(f"  {name:<44}{value:6.2f}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
