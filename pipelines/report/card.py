"""The card of an exported drafter, its README.md: what it is, how to serve it, and what was measured.

Its front matter is what model hubs read. Numbers that a report would not rank are left out, and why is said.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import polars as pl

from vlmdistill.drafters.checkpoints.description import (
    describe,
    trained_on,
    weights_hash,
)
from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.pipelines.bench.records import LABELS, TimeBudget
from vlmdistill.pipelines.report import selection
from vlmdistill.pipelines.report.comparison import group
from vlmdistill.pipelines.report.documents import markdown_row, markdown_text
from vlmdistill.pipelines.report.results import REPEATED, DrafterResult
from vlmdistill.pipelines.report.tables import UNKNOWN, rate
from vlmdistill.pipelines.targets.checkpoints.registry import HUB
from vlmdistill.pipelines.vllm.launch import serve_command
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.schema import Provenance

CARD: Final = "README.md"
HEADER: Final = ("prompts", "count", "T", "tau", "speedup")
OF_MACHINE: Final = "--enforce-eager"
"""An option of vLLM that only machines without a GPU need."""


def write(workspace: Workspace, folder: Path, exported: Exported) -> str:
    """Write the card of a drafter's folder into its export; if there is one, say that it is kept."""
    file = Path(exported.out) / CARD
    if file.exists():
        weights = weights_hash(folder) or ""
        is_of_these = weights in file.read_text(encoding="utf-8", errors="replace")
        difference = "" if is_of_these else ", and does not name these weights"
        return f"{file} is kept{difference}: remove it for a new card"
    with atomic_write(file, alone=True) as new:
        new.write_text(card(workspace, folder, exported), encoding="utf-8")
    return ""


def card(workspace: Workspace, folder: Path, exported: Exported) -> str:
    """The text of the card."""
    description = describe(folder)
    target = HUB.get(exported.target, exported.target)
    lines = [
        *_front_matter(exported, target),
        "",
        f"# {markdown_text(folder.name)}, a drafter for {markdown_text(target)}",
        "",
        f"A drafter for speculative decoding (method {exported.drafter}, {exported.parameters:,} parameters, "
        f"{exported.dtype}). It proposes tokens and the target verifies them: at temperature 0 responses are "
        "the target's own, above it they have the target's distribution.",
        "",
        "## Serve it with vLLM",
        "",
        *_requirements(exported),
        "",
        f"    {_command(exported, target)}",
        "",
        "## Measured",
        "",
        *_measured(_results(workspace, folder)),
        "",
        "## Trained",
        "",
        *_trained(workspace, folder, description),
    ]
    return "\n".join(lines) + "\n"


def _requirements(exported: Exported) -> Iterator[str]:
    """What must be installed, and what vLLM loses without the plugin (docs/vllm.md)."""
    if exported.plugin:
        yield "Install vlmdistill beside vLLM: it is a plugin of vLLM. FOLDER is this folder."
        return
    yield (
        "Nothing has to be installed beside vLLM: FOLDER, this folder, is in the format of the library "
        "speculators, which loads it as well."
    )
    if exported.method == "eagle3":
        yield (
            "vLLM's own EAGLE-3 reads no image embeddings: after an image it accepts fewer tokens than "
            "were measured below."
        )
    else:
        yield (
            "It needs vLLM's V2 model runner, the default on a GPU (`VLLM_USE_V2_MODEL_RUNNER=1` elsewhere): "
            "V1 misplaces tokens after an image."
        )


def _front_matter(exported: Exported, target: str) -> Iterator[str]:
    """What hubs read, in YAML, of which JSON strings are a part.

    The licence is the publisher's choice, which the target's may limit.
    """
    library = "vlmdistill" if exported.plugin else "speculators"
    tags = ["speculative-decoding", "draft-model", "vllm", exported.drafter]
    yield "---"
    yield "# license: (yours to choose; that of the base model may limit it)"
    if "/" in target and not Path(target).is_absolute():
        yield f"base_model: {json.dumps(target)}"
    yield f"library_name: {library}"
    yield "pipeline_tag: image-text-to-text"
    yield f"tags: {json.dumps(tags)}"
    yield "---"


def _command(exported: Exported, target: str) -> str:
    """How vLLM is started, without a path of this machine."""
    is_path = Path(target).is_absolute()
    command = serve_command(
        Path(target).name if is_path else target,
        exported.dtype,
        replace(exported, out="FOLDER"),
        caching=not exported.drops_visual,
        whole_images=exported.whole_images,
    )
    text = shlex.join(word for word in command if word != OF_MACHINE)
    return text.replace(str(Path("FOLDER").absolute()), "FOLDER")


def _results(workspace: Workspace, folder: Path) -> list[DrafterResult]:
    """The latest evaluations of exactly these weights."""
    weights = weights_hash(folder)
    kept = selection.read(workspace.reports).latest.drafter_results
    return [
        result
        for result in kept
        if weights is not None and result.evaluation.weights == weights
    ]


def _measured(results: Iterable[DrafterResult]) -> Iterator[str]:
    """A table and its conditions for each evaluation without doubts, and what is left out."""
    sound: dict[int, list[DrafterResult]] = {}
    left_out: list[DrafterResult] = []
    for result in results:
        if result.unranked:
            left_out.append(result)
        else:
            sound.setdefault(id(result.evaluation), []).append(result)
    if not sound and not left_out:
        yield "These weights were not evaluated."
    for of_evaluation in sound.values():
        yield from _table(of_evaluation)
        yield ""  # or a list goes on
    for result in left_out:
        reasons = "; ".join(result.unranked)
        yield (
            f"An evaluation of {result.evaluation.measured} at temperature {result.temperature:g} is left "
            f"out, since its numbers are in doubt: {markdown_text(reasons)}."
        )


def _table(results: list[DrafterResult]) -> Iterator[str]:
    """The rates of an evaluation, and its conditions."""
    evaluation = results[0].evaluation
    yield markdown_row(HEADER)
    yield markdown_row(["---"] * len(HEADER))
    for result in results:
        yield markdown_row(_row("all", result))
        parts = result.by(LABELS["kind"])
        if len(parts) > 1:
            for kind, part in sorted(parts.items()):
                yield markdown_row(_row(kind, part))
    software = evaluation.software
    conditions = {
        "hardware": f"{evaluation.hardware}, {evaluation.dtype}, threads: {evaluation.threads}",
        "draft tree": evaluation.tree,
        "responses": f"up to {evaluation.max_new_tokens} tokens",
        "prompts": f"{len(evaluation.keys)} held-out ones ({evaluation.prompt_set})",
        "software": f"vlmdistill {software.vlmdistill}, torch {software.torch}, "
        f"transformers {software.transformers}",
        "measured": evaluation.measured,
    }
    yield ""
    yield (
        "Tokens per call of the target (tau) and speedup over plain decoding, end to end, in the decoder of "
        "vlmdistill; in parentheses 95% intervals over prompts. Other engines, prompts and machines differ."
    )
    yield ""
    for name, value in conditions.items():
        yield f"- {name}: {markdown_text(value)}"
    for result in results:
        if result.disturbed:
            reason = markdown_text(result.disturbed)
            yield f"- no speedup at temperature {result.temperature:g}: {reason}"
    (compared,) = group(results)
    if repeated := compared.facts.get(REPEATED):
        yield f"- {REPEATED}: {markdown_text(repeated)}"
    for warning in compared.warnings:
        yield f"- warning: {markdown_text(warning)}"


def _row(prompts: str, result: DrafterResult) -> list[str]:
    figures = result.figures
    # On some kind of prompts it is in doubt, or that of other programs.
    shown = UNKNOWN if result.no_speedup else rate(figures, "speedup")
    tau = rate(figures, "tau")
    row = [prompts, f"{figures.prompts}", f"{result.temperature:g}", tau, shown]
    return [markdown_text(cell) for cell in row]


def _trained(
    workspace: Workspace, folder: Path, description: Mapping[str, Any]
) -> Iterator[str]:
    """Data, length of the training, and the target, whose hashes tell whether this drafter is for it."""
    training = description["training"]
    provenance = Provenance.from_dict(description["provenance"])
    facts = {"target": _target(provenance), "length": _length(training)}
    if datasets := _datasets(workspace, trained_on(folder) or frozenset()):
        facts["data"] = ", ".join(
            f"{name} ({count:,} prompts)" for name, count in datasets.most_common()
        )
    if provenance.sampling:
        facts["responses"] = f"the target's own, {provenance.sampling}"
    facts["weights"] = f"sha256 {weights_hash(folder)} (before the export)"
    for name, fact in facts.items():
        yield f"- {name}: {markdown_text(str(fact))}"


def _target(provenance: Provenance) -> str:
    name = Path(provenance.target).name
    revision = f", revision {provenance.revision}" if provenance.revision else ""
    hashes = f"config {provenance.config_hash}, weights {provenance.weights_hash}"
    return f"{name}{revision}; {hashes}"


def _length(training: Mapping[str, Any]) -> str:
    steps, samples = training.get("steps", 0), training.get("samples", 0)
    length = f"{steps:,} steps on {samples:,} samples, seed {training.get('seed')}"
    budget = training.get("budget")
    return f"{length}, {TimeBudget(**budget).text}" if budget else length


def _datasets(workspace: Workspace, keys: frozenset[str]) -> Counter[str]:
    """How many of the prompts are of each dataset, as far as the workspace has them."""
    if not workspace.prompts.is_file():
        return Counter()
    prompts = pl.read_parquet(workspace.prompts, columns=["key", "dataset"])
    return Counter(prompts.filter(pl.col("key").is_in([*keys]))["dataset"].to_list())
