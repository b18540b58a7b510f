"""Finds the folder of a checkpoint, and checks that it is complete before anything loads."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.registry import (
    HUB,
    REGISTRY,
    hub_id,
    shipped,
)
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.families import FAMILIES, FamilyEntry, entry
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.input_files import read_bytes

HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"  # of LoRA
CONVERT = "convert it: load it with transformers and call save_pretrained"
GGUF = (
    "GGUF files are not read: use the checkpoint that they were made from, with "
    "config.json and safetensors files (base_model on the page of the hub names it)"
)
PROCESSOR = "processor_config.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights that stand for themselves


def resolve(name: str) -> Path:
    """The checkpoint folder of an embedded target, of a registry name, of a local path or of a hub id.

    Raises TargetError if the folder does not exist or is incomplete, or if the hub is unreachable.
    """
    if name == packaged.NAME:
        return complete(packaged.make())
    if (folder := _local(name)) is not None:
        return complete(folder)
    return complete(_from_hub(name, hub_id(name)))


def _local(name: str) -> Path | None:
    """The local folder of a name, complete or not; None if it is on the hub."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    if path.suffix.lower() == ".gguf":
        raise TargetError(f"{name}: {GGUF}")
    if name in HUB and not (path / "config.json").is_file():
        return None  # a folder of that name may be its workspace
    return path if path.is_dir() else None


@dataclass(frozen=True)
class CheckpointLocation:
    """Where a target is on this machine, found without asking the hub."""

    origin: str  # its hub id, or a description
    config: Path  # its config.json, or the one that this package ships for its name
    folder: Path | None  # its checkpoint folder, complete or not
    lacking: str  # why it cannot be loaded from here; empty if it can


def locate(name: str) -> CheckpointLocation:
    """Find a target as `resolve` does, without its weights and without the hub.

    Raises TargetError if the name is invalid or nothing is known of it here.
    """
    if name == packaged.NAME:
        return _packaged()
    if (folder := _local(name)) is not None:
        origin = "embedded in this package" if name in EMBEDDED else "a local folder"
    else:
        origin = hub_id(name)
        folder = cached(origin)
    config = folder / "config.json" if folder else None
    if config is None or not config.is_file():
        config = shipped(name) or config
    cache = constants.HF_HUB_CACHE
    if config is None:
        raise TargetError(
            f"nothing is known of {origin} here: it is not in {cache} and not a "
            f"registered name; its config.json is enough: `hf download {origin} config.json`"
        )
    if folder is None:
        lacking = f"not in {cache}: downloaded on first use"
        return CheckpointLocation(origin, config, None, lacking)
    try:
        complete(folder)
    except TargetError as error:
        return CheckpointLocation(origin, config, folder, str(error))
    return CheckpointLocation(origin, config, folder, "")


def _packaged() -> CheckpointLocation:
    """The target that is made of a package at first use."""
    origin = f"made of the package {packaged.PACKAGE}"
    folder = packaged.folder()
    if folder.is_dir():
        return CheckpointLocation(origin, folder / "config.json", folder, "")
    config = shipped(packaged.NAME)
    assert config is not None, "the package ships the configuration"
    lacking = f"not in {folder.parent}: made on first use"
    return CheckpointLocation(origin, config, None, lacking)


@dataclass(frozen=True)
class NamedTarget:
    """A target with a short name, and whether its weights are on this machine."""

    origin: str
    family: str
    parameters: int
    folder: str | None
    found: bool | None  # whether the weights are complete; None without a folder
    lacking: str


def named_targets() -> dict[str, NamedTarget]:
    """The embedded, packaged and published targets, by name."""
    return {name: _named_target(name) for name in (*EMBEDDED, packaged.NAME, *REGISTRY)}


def _named_target(name: str) -> NamedTarget:
    location = locate(name)
    if published := REGISTRY.get(name):
        family = FAMILIES[published.model_type].name
        parameters = published.parameters
    else:
        family = family_of(location.config).name
        parameters = packaged.PARAMETERS
        if name in EMBEDDED:
            parameters = parameters_in(location.config.parent)
    return NamedTarget(
        origin=location.origin,
        family=family,
        parameters=parameters,
        folder=str(location.folder) if location.folder else None,
        found=None if location.folder is None else not location.lacking,
        lacking=location.lacking,
    )


def cached(repository: str) -> Path | None:
    """The snapshot of a hub id in the local cache, complete or not; None if there is no snapshot."""
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, local_files_only=True)
        )
    except OSError:
        return None


def family_of(config: Path) -> FamilyEntry:
    """The family of a `config.json`; TargetError if it is that of a language model."""
    settings = read_json(config.parent, config.name)
    family = entry(str(settings.get("model_type")))
    is_found = family.kind == "Found" and "model_type" in settings
    if is_found and not _may_see(settings):
        raise TargetError(
            f"{config.parent} is a language model without images (model_type "
            f"'{family.model_type}'): use a vision-language model, such as "
            "qwen2.5-vl-3b (`vlmdistill target list`)"
        )
    return family


def _may_see(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration may be that of a vision-language model: it has parts, or names vision."""
    for name in settings:
        if any(word in name for word in ("vision", "visual", "image")):
            return True
        if name.endswith("_config") and name != "quantization_config":
            return True
    return False


def known_family(name: str) -> FamilyEntry | None:
    """The family of a target; None if its configuration is not on this machine."""
    try:
        return family_of(locate(name).config)
    except TargetError:
        return None


def check_videos(name: str) -> None:
    """DataError if a target is known to read no videos."""
    if (family := known_family(name)) and not family.videos:
        raise DataError(
            f"targets of the family {family.name} support images, not videos"
        )


def complete(folder: Path) -> Path:
    """Return the folder if it is complete; TargetError names the first missing file."""
    if (folder / ADAPTER).is_file():
        raise TargetError(
            f"{folder} has an adapter ({ADAPTER}), which is not read: merge it into the weights, as by "
            "merge_and_unload of peft, and save them"
        )
    family_of(folder / "config.json")
    for shard in weight_files(folder):
        check_safetensors(shard)
    _one_of(folder, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json")
    in_processor_file = False
    if (folder / PROCESSOR).is_file():
        in_processor_file = "image_processor" in read_json(folder, PROCESSOR)
    if not in_processor_file:
        _one_of(folder, "image processor", "preprocessor_config.json")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads; TargetError if one is missing."""
    has_whole = (folder / WHOLE).is_file()
    has_index = (folder / INDEX).is_file()
    shards = _indexed_files(folder) if has_index and not has_whole else [WHOLE]
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        lacking = f"{missing[0]} ({len(missing)} of {len(shards)} files)"
        raise _lacking_weights(folder, lacking)
    if not shards:
        raise _lacking_weights(folder, INDEX)
    return [folder / shard for shard in shards]


def _indexed_files(folder: Path) -> list[str]:
    """The names of the files of a checkpoint in several; TargetError if its index is corrupt."""
    weight_map: Any = read_json(folder, INDEX).get("weight_map")
    is_map = isinstance(weight_map, dict)
    if not is_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise TargetError(
            f"{folder / INDEX} is corrupt (weight_map is invalid): download it again"
        )
    shards = sorted(set(weight_map.values()))
    for name in shards:
        if Path(name).name != name:
            raise TargetError(
                f"{folder / INDEX} names '{name}', a file outside the folder"
            )
    return shards


def _lacking_weights(folder: Path, lacking: str) -> TargetError:
    """The error for a folder that lacks a file of weights; other formats have their own."""
    if _only_gguf(folder):
        return TargetError(f"{folder}: {GGUF}")
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        return TargetError(
            f"{folder} has {pickled[0]} and no safetensors files: {CONVERT}"
        )
    return TargetError(
        f"{folder} lacks the weights {lacking}: the download is incomplete, repeat it"
    )


def _only_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of the checkpoint; TargetError if it is missing or not one."""
    try:
        value = json.loads(read_bytes(folder / name))
    except FileNotFoundError:
        if _only_gguf(folder):
            raise TargetError(f"{folder}: {GGUF}") from None
        raise TargetError(
            f"{folder} has no {name}: not a checkpoint, or an incomplete download"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{folder / name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TargetError(
            f"{folder / name} is not a JSON object: download the checkpoint again"
        )
    return value


def safetensors_header(path: Path) -> bytes:
    """The raw header of a safetensors file: names, types, shapes and offsets of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, path.stat().st_size))


def tensors_in(header: bytes) -> list[dict[str, Any]]:
    """The `dtype`, `shape` and `data_offsets` of each tensor that a raw header names."""
    entries = json.loads(header).items()
    return [tensor for name, tensor in entries if name != "__metadata__"]


def parameters_in(folder: Path) -> int:
    """The number of parameters of a checkpoint, from the headers of its files.

    An int32 holds eight weights of 4 bits.
    """
    parameters = 0
    for file in weight_files(folder):
        for tensor in tensors_in(safetensors_header(file)):
            packed = 8 if tensor["dtype"] == "I32" else 1
            parameters += packed * math.prod(tensor["shape"])
    return parameters


def check_floats(folder: Path) -> None:
    """TargetError if a weight is no float, which means nothing without its scale."""
    for file in weight_files(folder):
        for name, tensor in json.loads(safetensors_header(file)).items():
            is_weight = name.endswith((".weight", ".bias"))
            if is_weight and tensor["dtype"] not in FLOATS:
                raise TargetError(
                    f"{file}: {name} is of type {tensor['dtype']}, and config.json has "
                    "no quantization_config that gives its scale: download it again"
                )


def check_safetensors(path: Path) -> None:
    """TargetError if a file is not as long as its header says, or has none."""
    size = path.stat().st_size
    header = safetensors_header(path)
    try:
        ends = [tensor["data_offsets"][1] for tensor in tensors_in(header)]
        expected = 8 + len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise TargetError(
            f"{path} is corrupt (its header is unreadable): download it again"
        ) from None
    if size != expected:
        raise TargetError(
            f"{path} is corrupt: it has {size} bytes and should have {expected}; "
            "download it again"
        )


def _one_of(folder: Path, part: str, *names: str) -> None:
    """TargetError unless the folder has one of these files of a part."""
    if not any((folder / name).is_file() for name in names):
        raise TargetError(
            f"{folder} has no {part} ({' or '.join(names)}): "
            "download the checkpoint again"
        )


def _from_hub(name: str, repository: str) -> Path:
    """The folder of a hub id, from the local cache if it is complete there, else downloaded."""
    folder = cached(repository)
    try:
        if folder is not None:
            return complete(folder)
    except TargetError:
        pass  # incomplete: ask the hub
    try:
        return _download(repository)
    except Exception as error:  # noqa: BLE001 - the hub's client raises anything; the user needs one line
        raise TargetError(
            f"could not download {repository} from the Hugging Face hub "
            f"({first_line(error)}): download it on another machine and pass its "
            f"folder instead of '{name}'"
        ) from None


def _download(repository: str) -> Path:
    """Download a checkpoint; LookupError if it has no safetensors files."""
    info = huggingface_hub.HfApi().model_info(repository, timeout=HUB_TIMEOUT)
    files = [file.rfilename for file in info.siblings or ()]
    _check_listed(files)
    folder = huggingface_hub.snapshot_download(repository, allow_patterns=list(WANTED))
    return Path(folder)


def _check_listed(files: Iterable[str]) -> None:
    """LookupError if the hub lists files, and no safetensors files among them."""
    suffixes = {Path(file).suffix for file in files}
    if not suffixes or ".safetensors" in suffixes:
        return
    if ".gguf" in suffixes:
        raise LookupError(GGUF)
    raise LookupError(f"it has no safetensors files: {CONVERT}")


def first_line(error: BaseException) -> str:
    """The first line of an error, at most 240 characters, or its type if it has no text."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return text.splitlines()[0][:240]
