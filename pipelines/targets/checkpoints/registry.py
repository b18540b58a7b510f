"""The names of targets, and the options of loading one.

Light to import, so that a wrong name fails before torch loads.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.suggestions import did_you_mean

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class PublishedModel:
    """A published model: its hub id, and its number of parameters, a tied table counted once."""

    hub: str
    model_type: str
    parameters: int


REGISTRY = MappingProxyType(
    {
        "llava-1.5-7b": PublishedModel(
            "llava-hf/llava-1.5-7b-hf", "llava", 7_063_427_072
        ),
        "llava-1.5-13b": PublishedModel(
            "llava-hf/llava-1.5-13b-hf", "llava", 13_351_494_656
        ),
        "llava-next-7b": PublishedModel(
            "llava-hf/llava-v1.6-vicuna-7b-hf", "llava_next", 7_063_431_168
        ),
        "llava-next-13b": PublishedModel(
            "llava-hf/llava-v1.6-vicuna-13b-hf", "llava_next", 13_351_499_776
        ),
        "llava-onevision-7b": PublishedModel(
            "llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava_onevision", 8_030_807_584
        ),
        "qwen2-vl-7b": PublishedModel(
            "Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", 8_291_375_616
        ),
        "qwen2.5-vl-3b": PublishedModel(
            "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", 3_754_622_976
        ),
        "qwen2.5-vl-7b": PublishedModel(
            "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", 8_292_166_656
        ),
        "qwen2.5-vl-32b": PublishedModel(
            "Qwen/Qwen2.5-VL-32B-Instruct", "qwen2_5_vl", 33_452_718_336
        ),
        "qwen3-vl-4b": PublishedModel(
            "Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl", 4_437_815_808
        ),
        "qwen3-vl-8b": PublishedModel(
            "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", 8_767_123_696
        ),
    }
)

HUB = MappingProxyType({name: model.hub for name, model in REGISTRY.items()})


class Options(TypedDict, total=False):
    """The keywords of `loading.load` that the command line sets, as a run passes them to its workers."""

    dtype: str
    attention: str
    compiled: bool
    thinking: Thinking


def shipped(name: str) -> Path | None:
    """The `config.json` of a registry name, or of its hub id, as published; None for any other.

    It determines shapes, positions and tokens, so that `target show` needs no weights.
    """
    configs = Path(__file__).parents[1] / "configs"
    if name == packaged.NAME:
        return configs / f"{name}.json"
    for short, hub in HUB.items():
        if name in (short, hub):
            return configs / f"{short}.json"
    return None


def hub_id(name: str, suggested: Iterable[str] = ()) -> str:
    """The hub id of a registry name, or the hub id itself; TargetError if it is neither.

    The error suggests similar names, also of `suggested`.
    """
    if name in HUB:
        return HUB[name]
    if Path(name).expanduser().exists() or not HUB_ID.fullmatch(name):
        short = (*EMBEDDED, packaged.NAME, *HUB)
        near = did_you_mean(name, (*short, *HUB.values(), *suggested))
        names = ", ".join(short)
        raise TargetError(
            f"there is no target '{name}'{near}: give a checkpoint folder, a hub id, "
            f"or one of {names}"
        )
    return name
