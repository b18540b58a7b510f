"""Describes targets without loading their weights: sizes, location, and the cost of their features."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import transformers

from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.targets.checkpoints.fingerprint import fingerprint
from vlmdistill.pipelines.targets.checkpoints.folder import (
    CheckpointLocation,
    family_of,
    locate,
    weight_files,
)
from vlmdistill.pipelines.targets.checkpoints.info import target_info
from vlmdistill.pipelines.targets.families.family import Family
from vlmdistill.pipelines.targets.families.text_model import text_model
from vlmdistill.pipelines.targets.loading import (
    check_parts,
    generation_of,
    processor_of,
    skeleton,
)
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature, TargetInfo

BYTES = 2  # per number, in bfloat16
TOGETHER = "all"  # in `TargetDescription.drafters`: the union of the drafters' features


class SampleSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of one sample: text tokens, visual tokens, and the spans that they form."""

    text: int
    visual: int
    images: int = 1
    dtype: str = "bfloat16"

    def rows(self, feature: Feature) -> int:
        """The number of positions at which a feature is stored."""
        counts = {"text": self.text, "visual": self.visual, "span": self.images}
        return counts[feature.where]


class FeatureCost(msgspec.Struct, frozen=True, kw_only=True):
    """The features that a drafter needs, and their bytes in one sample."""

    features: list[str]  # names, sorted by position and layer
    text_bytes: int
    visual_bytes: int  # at visual tokens and spans
    bytes: int


class ParameterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a target; a tied table counts once, and as text."""

    all: int
    text: int
    vision: int


class TargetDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a target that need no weights."""

    name: str
    origin: str  # its hub id, or a description of where it comes from
    folder: str | None  # its checkpoint folder, complete or not
    found: bool  # its checkpoint is here and complete
    lacking: str  # why it cannot be loaded from here; empty if it can
    model_class: str = msgspec.field(name="class")
    parameters: ParameterCounts
    tied: bool  # one table serves as embedding and LM head
    target: TargetInfo
    rope_axes: int  # 3 for M-RoPE
    weights_bytes: int | None  # of the weight files; None unless `found`
    head_bytes: int  # of the frozen tables in a store of bfloat16
    hashes: dict[str, str]  # of config, weights and processor; empty unless `found`
    sample: SampleSize
    captured: list[str]  # sources of all features, by layer
    drafters: dict[str, FeatureCost]  # by drafter, and `TOGETHER`

    @property
    def together(self) -> FeatureCost:
        """The features of all drafters of the description together."""
        return self.drafters[TOGETHER]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def describe(
    name: str,
    text: int,
    visual: int,
    images: int = 1,
    *,
    drafters: Sequence[str] | None = None,
) -> TargetDescription:
    """Describe a target, and the bytes of one sample for each drafter.

    The sample has `text` text tokens and `visual` visual tokens in `images` spans,
    stored in bfloat16. `drafters` defaults to all methods.
    TargetError if the name is unknown here, or its family is not supported.
    """
    location = locate(name)
    family = family_of(location.config).load()
    model = skeleton(location.config)
    lacking = _lacking(location, model)
    complete = None if lacking else location.folder

    info = _info(name, family, model, location.folder, complete)
    embed = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    tied = head is embed
    tables = [embed] if tied else [embed, head]
    table_numbers = sum(table.numel() for table in tables)

    sample = SampleSize(text=text, visual=visual, images=images)
    needs = _needs(drafters or catalogue.NAMES, info)
    costs = {
        drafter: feature_cost(features, sample, info.hidden_size)
        for drafter, features in needs.items()
    }
    return TargetDescription(
        name=name,
        origin=location.origin,
        folder=str(location.folder) if location.folder else None,
        found=complete is not None,
        lacking=lacking,
        model_class=type(model).__name__,
        parameters=_parameter_counts(model),
        tied=tied,
        target=info,
        rope_axes=3 if family.mrope else 1,
        weights_bytes=_weights_bytes(complete) if complete else None,
        head_bytes=BYTES * table_numbers,
        hashes=_hashes(complete) if complete else {},
        sample=sample,
        captured=_sources(needs[TOGETHER]),
        drafters=costs,
    )


def feature_cost(
    features: Collection[Feature], sample: SampleSize, hidden_size: int
) -> FeatureCost:
    """The names of features, and their bytes in one sample in bfloat16."""
    row_bytes = BYTES * hidden_size
    text_bytes = 0
    visual_bytes = 0
    for feature in features:
        feature_bytes = row_bytes * sample.rows(feature)
        if feature.where == "text":
            text_bytes += feature_bytes
        else:
            visual_bytes += feature_bytes
    ordered = sorted(features, key=lambda f: (f.where, _layer(f.source)))
    return FeatureCost(
        features=[feature.name for feature in ordered],
        text_bytes=text_bytes,
        visual_bytes=visual_bytes,
        bytes=text_bytes + visual_bytes,
    )


def _lacking(location: CheckpointLocation, model: Any) -> str:
    """Why the target cannot be loaded from here; empty if it can."""
    if location.lacking or location.folder is None:
        return location.lacking
    try:
        check_parts(location.folder, model)
    except TargetError as error:
        return str(error)
    return ""


def _info(
    name: str, family: Family, model: Any, folder: Path | None, complete: Path | None
) -> TargetInfo:
    """The facts of a target; `complete` is `folder` if nothing is lacking there."""
    generation = generation_of(folder) if folder else None
    model.generation_config = generation or transformers.GenerationConfig()
    tokenizer = None
    names_eos = getattr(generation, "eos_token_id", None) is not None
    if complete and not names_eos:  # the tokenizer may name the EOS token
        tokenizer = processor_of(complete, family).tokenizer
    return target_info(name, family, model, tokenizer)


def _parameter_counts(model: Any) -> ParameterCounts:
    embed = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    total = _parameters(model)
    text = _parameters(text_model(model))
    if head is not embed:  # the text model holds the embedding, but not the head
        text += head.numel()
    return ParameterCounts(all=total, text=text, vision=total - text)


def _parameters(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _needs(drafters: Sequence[str], info: TargetInfo) -> dict[str, frozenset[Feature]]:
    """The features that each drafter needs, and their union as `TOGETHER`."""
    needs = {}
    for drafter in drafters:
        config = catalogue.config(drafter)
        needs[drafter] = config.model.needs(info)
    union = frozenset[Feature]().union(*needs.values())
    return {**needs, TOGETHER: union}


def _sources(features: Collection[Feature]) -> list[str]:
    sources = {feature.source for feature in features}
    return sorted(sources, key=_layer)


def _layer(source: str) -> float:
    """The layer whose input a source is."""
    if source == "embed":
        return -1
    if source == "hidden":
        return math.inf
    return int(source.removeprefix("layer"))


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def _hashes(folder: Path) -> dict[str, str]:
    hashes = fingerprint(folder, None)
    return {
        "config": hashes.config,
        "weights": hashes.weights,
        "processor": hashes.processor,
    }
