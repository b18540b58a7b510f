"""Decodes prompts at temperature 0 in a process of its own, which has seen no response to them."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmdistill.pipelines.bench.records import Again
from vlmdistill.pipelines.cluster.processes import Processes
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.stores.progress import Progress

PROMPTS = 8  # decoded again, at most


def decode_again(
    model: str,
    how: Mapping[str, Any],
    folder: Path,
    tree: str,
    prompts_file: Path,
    keys: Sequence[str],
    max_new_tokens: int,
    threads: int,
) -> tuple[Again, ...]:
    """The calls of some of the prompts with the drafter in `folder`; TrainingError if the process fails."""
    with tempfile.TemporaryDirectory() as made, Processes() as children:
        out = Path(made) / "calls.json"
        arguments = (model, dict(how), folder, tree, prompts_file, [*keys[:PROMPTS]], max_new_tokens, out)
        children.start("decoding again", _decode, arguments, {"OMP_NUM_THREADS": str(threads)})
        for _ in children.messages():
            pass
        return tuple(Again(key=key, calls=calls) for key, calls in json.loads(out.read_text()).items())


def _decode(
    model: str,
    how: dict[str, Any],
    folder: Path,
    tree: str,
    prompts_file: Path,
    keys: list[str],
    max_new_tokens: int,
    out: Path,
    report: Progress,
) -> None:
    from vlmdistill.drafters.core.tree import Tree
    from vlmdistill.drafters.decoding.decoders import speculate
    from vlmdistill.pipelines.targets.loading import load

    target = load(model, **how)
    drafter = target.drafter(folder)
    prompts = {prompt.key: prompt for prompt in prompt_table.load(prompts_file, model, "all")}
    calls = {}
    for number, key in enumerate(keys):
        encoded = target.encode(prompts[key].messages)
        decoded = speculate(target, drafter, encoded, tree=Tree.parse(tree), max_new_tokens=max_new_tokens)
        calls[key] = len(list(decoded)) - 1
        report(number + 1, len(keys))
    out.write_text(json.dumps(calls))
