"""What a target is and what its features would take, told without its weights."""

import math
from pathlib import Path
from typing import Any

import transformers

from vlmdistill.drafters import catalogue as drafters
from vlmdistill.pipelines.demo import EMBEDDED
from vlmdistill.pipelines.targets.catalogue import FAMILIES, REGISTRY
from vlmdistill.pipelines.targets.facts import target_info
from vlmdistill.pipelines.targets.fingerprint import fingerprint
from vlmdistill.pipelines.targets.folder import family_of, locate, parameters_in, weight_files
from vlmdistill.pipelines.targets.loading import generation_of, processor_of, skeleton
from vlmdistill.stores.schema import Feature, TargetInfo

BYTES = 2  # of a stored number, in bfloat16


def known() -> dict[str, dict[str, Any]]:
    """The targets that have a name: family, parameters, whether the weights are here (None: nothing is)."""
    told: dict[str, dict[str, Any]] = {}
    for name in (*EMBEDDED, *REGISTRY):
        place = locate(name)
        published = REGISTRY.get(name)
        told[name] = {
            "origin": place.origin,
            "family": FAMILIES[published.model_type].name if published else family_of(place.config).name,
            "parameters": published.parameters if published else parameters_in(place.config.parent),
            "folder": str(place.folder) if place.folder else None,
            "found": None if place.folder is None else not place.lacking,
            "lacking": place.lacking,
        }
    return told


def survey(name: str, text: int, visual: int, images: int = 1) -> dict[str, Any]:
    """Family, sizes, whether the weights are here, and bytes of one sample for each drafter.

    The sample has `text` and `visual` tokens, these in `images` spans, and is stored in bfloat16. TargetError
    when nothing is known of the name here, or no family serves it.
    """
    place = locate(name)
    family = family_of(place.config)
    model = skeleton(place.config)
    whole = place.folder if not place.lacking else None
    generation = generation_of(place.folder) if place.folder is not None else None
    model.generation_config = generation or transformers.GenerationConfig()
    asked = whole is not None and getattr(generation, "eos_token_id", None) is None  # of what ends an answer
    info = target_info(
        name, family, model, processor_of(whole, family).tokenizer if whole and asked else None
    )
    total, language = (
        sum(w.numel() for w in part.parameters()) for part in (model, model.model.language_model)
    )
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    own_head = 0 if head is embed else head.numel()
    language += own_head
    rows = {"text": text, "visual": visual, "span": images}
    needs = {
        drafter: drafters.load(drafter).needs(drafters.config(drafter), info) for drafter in drafters.NAMES
    }
    needs["all"] = frozenset[Feature]().union(*needs.values())
    return {
        "name": name,
        "origin": place.origin,
        "folder": str(place.folder) if place.folder else None,
        "found": whole is not None,
        "lacking": place.lacking,
        "class": type(model).__name__,
        "parameters": {"all": total, "text": language, "vision": total - language},
        "tied": head is embed,
        "target": info.to_dict(),
        "rope_axes": 3 if family.grids else 1,
        "weights_bytes": sum(path.stat().st_size for path in weight_files(whole)) if whole else None,
        "head_bytes": BYTES * (embed.numel() + own_head),
        "hashes": _hashes(whole) if whole else {},
        "sample": {"text": text, "visual": visual, "images": images, "dtype": "bfloat16"},
        "captured": sorted({feature.source for feature in needs["all"]}, key=_depth),
        "drafters": {drafter: _cost(wanted, rows, info) for drafter, wanted in needs.items()},
    }


def _hashes(folder: Path) -> dict[str, str]:
    told = fingerprint(folder, None)
    return {"config": told.config, "weights": told.weights, "processor": told.processor}


def _depth(source: str) -> float:
    """At which layer's input a source is read."""
    return -1 if source == "embed" else math.inf if source == "hidden" else int(source.removeprefix("layer"))


def _cost(wanted: frozenset[Feature], rows: dict[str, int], info: TargetInfo) -> dict[str, Any]:
    """What one sample takes: states at text tokens, and those at visual tokens and spans."""
    width = BYTES * info.hidden_size
    at_text = sum(width * rows[feature.where] for feature in wanted if feature.where == "text")
    at_visual = sum(width * rows[feature.where] for feature in wanted if feature.where != "text")
    return {
        "features": [f.name for f in sorted(wanted, key=lambda f: (f.where, _depth(f.source)))],
        "text_bytes": at_text,
        "visual_bytes": at_visual,
        "bytes": at_text + at_visual,
    }
