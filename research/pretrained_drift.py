"""Traffic to the pretrained target that turns to code: *Drift* in `docs/measurements/pretrained.md`.

    python -m research.pretrained_drift [--drafter wren.s0] [--requests 300] [--steps 80] [--runs DIR]

The workspace is that of `research.pretrained`, whose drafters were trained on questions of all kinds. The
target answers requests for Python functions, which are logged as a server logs them, and `vlmdistill adapt`
does the rest. Its round, with the tokens per call of both versions on held-out requests and on the questions
of before, is written as JSON. The workspace stays changed: give a copy.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from research import say
from research.drift import exchange
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.traffic.adapt import Adaptation, adapt
from vlmdistill.pipelines.workspace.workspace import Workspace

REQUESTED_AT = 1.79e9
"""When the first request came, in Unix seconds."""
BATCH = 32
TASKS = (
    "sorts {} by length",
    "counts the vowels in {}",
    "removes duplicates from {}",
    "finds the longest item of {}",
    "reverses {}",
    "splits {} into two halves",
    "writes {} to a text file",
    "reads {} from a JSON file",
    "returns the most common element of {}",
    "checks whether {} is empty",
    "merges {} with a dictionary",
    "prints {} line by line",
    "shuffles {} without changing the original",
    "filters the even positions of {}",
    "compares {} with a second argument",
)
THINGS = (
    "a list of words",
    "a list of file names",
    "a string",
    "the rows of a CSV file",
    "a nested list",
    "a tuple of numbers",
    "a set of names",
    "a queue of orders",
    "a matrix",
    "the keys of a dictionary",
    "a paragraph of text",
    "a list of dates",
    "a linked list",
    "a stack of cards",
    "a list of e-mail addresses",
    "the lines of a log file",
    "a binary tree",
    "an array of temperatures",
    "a shopping list",
    "a list of URLs",
)
FORMS = (
    "Write a Python function that {}.",
    "Can you write Python code that {}?",
    "I need a Python script that {}. Please show the code.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Log the requests, adapt the drafter to them, and write what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafter", default="wren.s0")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--limit", type=int, default=30, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=160, help="of a response")
    parser.add_argument("--eval-tokens", type=int, default=96, help="of a decoded one")
    parser.add_argument("--dtype", default="bfloat16", help="that answers")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("build/pretrained-drift.json"))
    options = parser.parse_args(arguments)
    workspace = Workspace.of(packaged.NAME, options.runs)
    log = workspace.root / "logs" / "code.jsonl"
    if not log.exists():
        lines = [json.dumps(line) for line in _answered(options)]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("\n".join(lines) + "\n")
        say(f"logged {len(lines)} requests")
    adaptation = Adaptation(
        sources=(str(log),),
        eval_share=0.2,
        steps=options.steps,
        limit=options.limit,
        max_new_tokens=options.eval_tokens,
    )
    drafter_round = adapt(workspace, options.drafter, adaptation, say=say)
    record = json.dumps(msgspec.to_builtins(drafter_round), indent=1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f"{record}\n")
    say(f"wrote {options.out}: {drafter_round.why}")


def requests(count: int) -> list[str]:
    """Different requests for code, in random order."""
    phrases = [task.format(thing) for task in TASKS for thing in THINGS]
    texts = [form.format(phrase) for form in FORMS for phrase in phrases]
    return random.Random(0).sample(texts, count)


def _answered(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the log: requests with the greedy responses of the target."""
    target = load(packaged.NAME, dtype=options.dtype)
    texts = requests(options.requests)
    for start in range(0, len(texts), BATCH):
        batch = [
            [{"role": "user", "content": text}] for text in texts[start : start + BATCH]
        ]
        prompts = [target.encode(messages) for messages in batch]
        responses = target.generate(
            prompts, max_new_tokens=options.tokens, temperature=0.0, top_p=1.0, seed=0
        )
        answers = zip(batch, prompts, responses, strict=True)
        for number, (messages, prompt, response) in enumerate(answers, start):
            yield exchange(messages, prompt, response, REQUESTED_AT + number)


if __name__ == "__main__":
    main()
