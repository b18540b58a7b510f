"""Finds the folder of a checkpoint, and checks that it is complete before anything loads."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

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
CONVERT = "convert it: load it with transformers and call save_pretrained"
GGUF = (
    "GGUF files are not read: use the checkpoint that they were made from, with config.json and safetensors "
    "files (base_model on the page of the hub names it)"
)
PROCESSOR = "processor_config.json"


def resolve(name: str) -> Path:
    """The checkpoint folder of an embedded target, of a registry name, of a local path or of a hub id.

    Raises TargetError if the folder does not exist or is incomplete, or if the hub is unreachable.
    """
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
    """Where a target is, as far as this machine knows without the hub."""

    origin: str  # its hub id, or a description
    config: Path  # its config.json, or the one that this package ships for its name
    folder: Path | None  # its checkpoint folder, complete or not
    lacking: str  # why it cannot be loaded from here; empty if it can


def locate(name: str) -> CheckpointLocation:
    """Find a target as `resolve` does, without its weights and without the hub.

    Raises TargetError if the name is invalid or nothing is known of it here.
    """
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
            f"nothing is known of {origin} here: it is not in {cache} and not a registered name"
        )
    if folder is None:
        return CheckpointLocation(
            origin, config, None, f"not in {cache}: downloaded on first use"
        )
    try:
        complete(folder)
    except TargetError as error:
        return CheckpointLocation(origin, config, folder, str(error))
    return CheckpointLocation(origin, config, folder, "")


@dataclass(frozen=True)
class NamedTarget:
    """A target that has a name here: what it is, and whether its weights are here."""

    origin: str
    family: str
    parameters: int
    folder: str | None
    found: bool | None  # whether the weights are complete; None without a folder
    lacking: str


def named_targets() -> dict[str, NamedTarget]:
    """The embedded and the published targets, by name."""
    return {name: _named_target(name) for name in (*EMBEDDED, *REGISTRY)}


def _named_target(name: str) -> NamedTarget:
    location = locate(name)
    if published := REGISTRY.get(name):
        family = FAMILIES[published.model_type].name
        parameters = published.parameters
    else:
        family = family_of(location.config).name
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
    seeing = any(
        word in name for name in settings for word in ("vision", "visual", "image")
    )
    parts = {name for name in settings if name.endswith("_config")} - {
        "quantization_config"
    }
    if family.kind == "Found" and "model_type" in settings and not (seeing or parts):
        raise TargetError(
            f"{config.parent} is a language model without images (model_type '{family.model_type}'): use a "
            "vision-language model, such as qwen2.5-vl-3b (`vlmdistill target list`)"
        )
    return family


def known_family(name: str) -> FamilyEntry | None:
    """The family of a target, if it can be told here without the hub."""
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
    family_of(folder / "config.json")
    for shard in weight_files(folder):
        _check_safetensors(shard)
    _one_of(folder, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json")
    inside = (folder / PROCESSOR).is_file() and "image_processor" in read_json(
        folder, PROCESSOR
    )
    if not inside:
        _one_of(folder, "image processor", "preprocessor_config.json")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads; TargetError if one is missing."""
    shards = [WHOLE]
    if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():
        names = read_json(folder, INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(shard, str) for shard in names.values()
        ):
            raise TargetError(
                f"{folder / INDEX} is corrupt (weight_map is invalid): download it again"
            )
        shards = sorted(set(names.values()))
        if outside := [name for name in shards if Path(name).name != name]:
            raise TargetError(
                f"{folder / INDEX} names '{outside[0]}', a file outside the folder"
            )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        if _only_gguf(folder):
            raise TargetError(f"{folder}: {GGUF}")
        if pickled and not any(folder.glob("*.safetensors")):
            raise TargetError(
                f"{folder} has {pickled[0]} and no safetensors files: {CONVERT}"
            )
        which = (
            f"{missing[0]} ({len(missing)} of {len(shards)} files)"
            if missing
            else INDEX
        )
        raise TargetError(
            f"{folder} lacks the weights {which}: the download is incomplete, repeat it"
        )
    return [folder / shard for shard in shards]


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


def _tensors(header: bytes) -> list[dict[str, Any]]:
    return [
        tensor for name, tensor in json.loads(header).items() if name != "__metadata__"
    ]


def parameters_in(folder: Path) -> int:
    """The number of parameters of a checkpoint, from the headers of its files.

    An int32 holds eight weights of 4 bits.
    """
    headers = map(safetensors_header, weight_files(folder))
    tensors = (one for header in headers for one in _tensors(header))
    return sum(
        math.prod(one["shape"]) * (8 if one["dtype"] == "I32" else 1) for one in tensors
    )


def _check_safetensors(path: Path) -> None:
    size, header = path.stat().st_size, safetensors_header(path)
    try:
        expected = (
            8
            + len(header)
            + max((one["data_offsets"][1] for one in _tensors(header)), default=0)
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise TargetError(
            f"{path} is corrupt (its header is unreadable): download it again"
        ) from None
    if size != expected:
        raise TargetError(
            f"{path} is corrupt: it has {size} bytes and should have {expected}; download it again"
        )


def _one_of(folder: Path, what: str, *names: str) -> None:
    if not any((folder / name).is_file() for name in names):
        raise TargetError(
            f"{folder} has no {what} ({' or '.join(names)}): download the checkpoint again"
        )


def _from_hub(name: str, repository: str) -> Path:
    folder = cached(repository)
    try:
        if folder is not None:
            return complete(folder)
    except TargetError:
        pass  # incomplete: ask the hub
    try:
        info = huggingface_hub.HfApi().model_info(repository, timeout=HUB_TIMEOUT)
        files = [file.rfilename for file in info.siblings or ()]
        if files and not any(file.endswith(".safetensors") for file in files):
            gguf = any(file.endswith(".gguf") for file in files)
            raise LookupError(
                GGUF if gguf else f"it has no safetensors files: {CONVERT}"
            )
        return Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=list(WANTED))
        )
    except Exception as error:  # noqa: BLE001 - the hub's client raises anything; the user needs one line
        raise TargetError(
            f"could not download {repository} from the Hugging Face hub ({first_line(error)}): "
            f"download it on another machine and pass its folder instead of '{name}'"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error, at most 240 characters, or its type if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:240] if text else type(error).__name__
