"""Times a plain decoding step and each part of a speculative cycle, relative to the stock model's step.

    python -m benchmarks.decode [--model demo] [--tree chain-5 ...] [--compile] [--out FILE]

Each round runs every part once. Times are medians over rounds, ratios are medians of the ratios within a
round, so that a machine whose speed drifts affects all parts alike. The drafter is untrained: the time of a
cycle does not depend on what it drafts. Its last part, the target's KV cache that keeps the accepted tokens,
is not timed. `vlmdistill eval` measures tau and speedup.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache

from vlmdistill.drafters.core import catalogue
from vlmdistill.drafters.core.tree import DraftTree, Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.decoding.acceptance import verify
from vlmdistill.drafters.decoding.clock import wait
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

TREES = ("chain-3", "chain-5", "chain-8", "8-3-2", "12-4-3", "16-4-4", "30-3-8", "60-5-10")
PREFIX = 100  # tokens after the prompt


def measure(
    model: str, drafter: str, trees: Sequence[str], rounds: int, threads: int, *, compiled: bool = False
) -> dict[str, Any]:
    """Milliseconds and ratios of one target and one untrained drafter."""
    torch.set_num_threads(threads)
    target = load(model)
    kind = catalogue.load(drafter)
    untrained = kind(kind.Config(), target.info, target.head).to(target.device, target.dtype).eval()
    picture = Image.new("RGB", (84, 84), (20, 40, 60))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Describe the scene."}]
    prompt = target.encode([{"role": "user", "content": content}])
    with torch.inference_mode():
        parts, before = _parts(target, untrained, prompt, trees)
        if compiled:
            parts["compiled step"] = _plain_step(load(model, compiled=True), prompt)
        for name, run in parts.items():  # a warm-up
            before.get(name, _nothing)()
            run()
        times: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(rounds):
            for name, run in parts.items():
                before.get(name, _nothing)()
                wait(target.device)
                start = time.perf_counter()
                run()
                wait(target.device)
                times[name].append(1e3 * (time.perf_counter() - start))
    plain = times["plain step"]
    figures: dict[str, Any] = {
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "plain step / stock step": _ratio(plain, times["stock step"]),
        "plain step / weights read once": _ratio(plain, times["weights read once"]),
    }
    if compiled:
        figures["compiled step / plain step"] = _ratio(times["compiled step"], plain)
    for tree in trees:
        steps = [times[f"{tree} {part}"] for part in ("grow", "extend", "verify", "commit")]
        cycle = [sum(row) for row in zip(*steps, strict=True)]
        figures[f"{tree}: tokens per cycle to break even"] = _ratio(cycle, plain)
        figures[f"{tree}: verification / plain step"] = _ratio(steps[1], plain)
    if target.device.type == "cuda":
        figures["peak memory, GiB"] = torch.cuda.max_memory_allocated(target.device) / 2**30
    figures |= {"model": model, "drafter": drafter, "threads": threads, "prefix": PREFIX + prompt.length}
    return figures


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _nothing() -> None:
    """What most parts need before they are timed."""


Parts = dict[str, Callable[[], object]]


def _parts(
    target: VisionLanguageTarget, drafter: Any, prompt: Any, trees: Sequence[str]
) -> tuple[Parts, Parts]:
    """Every timed part by name, on one prefix; and what is done before a part, untimed, to keep it so."""
    needs = drafter.config.needs(target.info, decoding=True)
    prefix = target.prefill(prompt, needs)
    one = torch.ones(1, dtype=torch.long, device=target.device)
    before_1D = torch.cat([prefix.feature("hidden", "text")[-1:]] * len(drafter.sources), dim=-1)
    plain_step = _plain_step(target, prompt)
    step = _stock_step(target, prompt.length + PREFIX)
    weights = list(target.model.model.language_model.parameters())
    parts: Parts = {
        "plain step": plain_step,
        "stock step": step,
        "weights read once": lambda: [weight.sum() for weight in weights],
    }
    before: Parts = {}
    sessions: dict[str, TreeDrafter] = {}

    def begin(name: str) -> None:
        sessions[name] = TreeDrafter(drafter, prefix)
        sessions[name].commit(one.repeat(PREFIX), before_1D.repeat(PREFIX, 1))

    def commit(name: str) -> None:
        sessions[name].commit(one.repeat(3), before_1D.repeat(3, 1))

    for name in trees:
        shape = Tree.parse(name)
        begin(name)
        draft = sessions[name]
        nodes = draft.grow(shape)
        nodes_again = (nodes.ids_N, nodes.depth_N, nodes.visible_NN, ("hidden",))
        states = target.extend(*nodes_again)["hidden"]
        parts |= {
            f"{name} grow": partial(draft.grow, shape),
            f"{name} extend": partial(target.extend, *nodes_again),
            f"{name} verify": partial(_verify, target, nodes, states),
            f"{name} commit": partial(commit, name),
        }
        before[f"{name} commit"] = partial(begin, name)
    return parts, before


def _plain_step(target: VisionLanguageTarget, prompt: Any) -> Callable[[], object]:
    """One more token after the prompt and `PREFIX` tokens; it is not committed."""
    target.prefill(prompt)
    one = torch.ones(1, dtype=torch.long, device=target.device)
    for _ in range(PREFIX):
        target.extend(one, one, None, ("hidden",))
        target.commit(one - 1)
    return lambda: target.logits(target.extend(one, one, None, ("hidden",))["hidden"]).argmax(-1)


def _verify(target: VisionLanguageTarget, nodes: DraftTree, states_ND: Tensor) -> list[int]:
    path: list[int] = verify(nodes, target.logits(states_ND), 0.0).path_N.tolist()
    return path


def _stock_step(target: VisionLanguageTarget, length: int) -> Callable[[], object]:
    """One token through the stock modules with their own cache: the least that `generate` takes."""
    cache = DynamicCache()
    shape = (1, target.info.num_kv_heads, length, target.info.head_dim)
    rows = torch.zeros(shape, device=target.device, dtype=target.dtype)
    for layer in range(target.info.num_layers):
        cache.update(rows, rows, layer)
    one = torch.ones(1, 1, dtype=torch.long, device=target.device)
    position = one * length
    position = position.expand(3, 1, 1) if target.family.mrope else position

    def step() -> object:
        text = target.model.model.language_model
        state = text(input_ids=one, position_ids=position, past_key_values=cache, use_cache=True)
        token = target.model.lm_head(state.last_hidden_state).argmax(-1)
        cache.crop(-1)
        return token

    return step


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="sparrow")
    parser.add_argument("--tree", action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="measure a compiled step as well")
    parser.add_argument("--out", type=Path, default=Path("build/bench-decode.json"))
    given = parser.parse_args()
    result = measure(
        given.model, given.drafter, given.tree or TREES, given.rounds, given.threads, compiled=given.compile
    )
    print(f"{given.model} with {given.drafter}, {given.threads} threads; medians of {given.rounds} rounds")
    for name, value in result["milliseconds"].items():
        print(f"  {name:<24}{value:9.3f} ms")
    for name, value in result.items():
        if isinstance(value, float):
            print(f"  {name:<44}{value:6.2f}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
