"""Describes targets without loading their weights: sizes, where they are, and the cost of their features."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.targets.checkpoints.fingerprint import fingerprint
from vlmdistill.pipelines.targets.checkpoints.folder import (
    family_of,
    locate,
    weight_files,
)
from vlmdistill.pipelines.targets.checkpoints.info import target_info
from vlmdistill.pipelines.targets.families.text_model import text_model
from vlmdistill.pipelines.targets.loading import (
    check_parts,
    generation_of,
    processor_of,
    skeleton,
)
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature

BYTES = 2  # per number, in bfloat16


def describe(
    name: str,
    text: int,
    visual: int,
    images: int = 1,
    *,
    drafters: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Family, sizes, whether the weights are here, and the bytes of one sample for each drafter.

    The sample has `text` text tokens and `visual` visual tokens in `images` spans, stored in bfloat16. `all`
    is what `drafters` need together, of all methods by default.
    TargetError if the name is unknown here, or its family is not supported.
    """
    location = locate(name)
    family = family_of(location.config).load()
    model = skeleton(location.config)
    folder, lacking = location.folder, location.lacking
    if folder and not lacking:
        try:
            check_parts(folder, model)
        except TargetError as error:
            lacking = str(error)
    if lacking:
        folder = None
    generation = generation_of(location.folder) if location.folder is not None else None
    model.generation_config = generation or transformers.GenerationConfig()
    needed = (
        folder is not None and getattr(generation, "eos_token_id", None) is None
    )  # its EOS
    info = target_info(
        name,
        family,
        model,
        processor_of(folder, family).tokenizer if folder and needed else None,
    )
    total, language = (
        sum(w.numel() for w in part.parameters()) for part in (model, text_model(model))
    )
    embed, head = (
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    own_head = 0 if head is embed else head.numel()
    language += own_head
    rows = {"text": text, "visual": visual, "span": images}
    needs = {
        drafter: catalogue.config(drafter).model.needs(info)
        for drafter in drafters or catalogue.NAMES
    }
    needs["all"] = frozenset[Feature]().union(*needs.values())
    return {
        "name": name,
        "origin": location.origin,
        "folder": str(location.folder) if location.folder else None,
        "found": folder is not None,
        "lacking": lacking,
        "class": type(model).__name__,
        "parameters": {"all": total, "text": language, "vision": total - language},
        "tied": head is embed,
        "target": info.to_dict(),
        "rope_axes": 3 if family.mrope else 1,
        "weights_bytes": sum(path.stat().st_size for path in weight_files(folder))
        if folder
        else None,
        "head_bytes": BYTES * (embed.numel() + own_head),
        "hashes": _hashes(folder) if folder else {},
        "sample": {
            "text": text,
            "visual": visual,
            "images": images,
            "dtype": "bfloat16",
        },
        "captured": sorted({feature.source for feature in needs["all"]}, key=_layer),
        "drafters": {
            drafter: feature_cost(wanted, rows, info.hidden_size)
            for drafter, wanted in needs.items()
        },
    }


def _hashes(folder: Path) -> dict[str, str]:
    hashes = fingerprint(folder, None)
    return {
        "config": hashes.config,
        "weights": hashes.weights,
        "processor": hashes.processor,
    }


def _layer(source: str) -> float:
    """The layer whose input a source is."""
    return (
        -1
        if source == "embed"
        else math.inf
        if source == "hidden"
        else int(source.removeprefix("layer"))
    )


def feature_cost(
    wanted: frozenset[Feature], rows: dict[str, int], hidden_size: int
) -> dict[str, Any]:
    """Features by name, and the bytes of so many rows of each at text positions, and at visual and spans."""
    width = BYTES * hidden_size
    at_text = sum(
        width * rows[feature.where] for feature in wanted if feature.where == "text"
    )
    at_visual = sum(
        width * rows[feature.where] for feature in wanted if feature.where != "text"
    )
    return {
        "features": [
            f.name for f in sorted(wanted, key=lambda f: (f.where, _layer(f.source)))
        ],
        "text_bytes": at_text,
        "visual_bytes": at_visual,
        "bytes": at_text + at_visual,
    }
