"""Find a target's checkpoint folder, and say in one line what is wrong with it before anything loads."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from vlmdistill.pipelines.demo import EMBEDDED
from vlmdistill.pipelines.targets.catalogue import FAMILIES, HUB, shipped
from vlmdistill.pipelines.targets.family import Family
from vlmdistill.stores.errors import TargetError

HUB_TIMEOUT = 5.0  # seconds until the hub counts as out of reach
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
CONVERT = "load it with transformers and write it with save_pretrained, which makes them"
PROCESSOR = "processor_config.json"


def resolve(name: str) -> Path:
    """The checkpoint folder of an embedded target, of a registry name, of a local path or of a hub id.

    Raises TargetError when there is none, when it is incomplete, or when the hub is out of reach.
    """
    if (folder := _local(name)) is not None:
        return complete(folder)
    return complete(_from_hub(name, _repository(name)))


def _local(name: str) -> Path | None:
    """The folder that a name stands for, whatever is in it; None for what lies on the hub."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    if name in HUB and not (path / "config.json").is_file():
        return None  # a folder of that name, such as its workspace, is no checkpoint
    return path if path.is_dir() else None


@dataclass(frozen=True)
class Place:
    """Where a target is, as far as this machine knows without asking the hub."""

    origin: str  # its hub id, or in words
    config: Path  # its config.json, or the one that is shipped for its name
    folder: Path | None  # its checkpoint folder, whole or not; None: nothing of it is here
    lacking: str  # why it cannot be loaded from here; empty when it can


def locate(name: str) -> Place:
    """Find a target as `resolve` does, without its weights and without the hub.

    Raises TargetError when the name is none, or nothing is known of it here.
    """
    if (folder := _local(name)) is not None:
        origin = "embedded in this package" if name in EMBEDDED else "a local folder"
    else:
        origin = _repository(name)
        folder = cached(origin)
    config = folder / "config.json" if folder else None
    if config is None or not config.is_file():
        config = shipped(name) or config
    cache = huggingface_hub.constants.HF_HUB_CACHE
    if config is None:
        raise TargetError(f"nothing is known of {origin} here: it is not in {cache}, and no registry name")
    if folder is None:
        return Place(origin, config, None, f"not in {cache}: fetched when first used")
    try:
        complete(folder)
    except TargetError as error:
        return Place(origin, config, folder, str(error))
    return Place(origin, config, folder, "")


def _repository(name: str) -> str:
    """The hub id of a name; TargetError when it is neither a registry name nor a hub id."""
    if name not in HUB and (Path(name).expanduser().exists() or not HUB_ID.fullmatch(name)):
        known = ", ".join((*EMBEDDED, *HUB))
        raise TargetError(
            f"there is no target '{name}': give a checkpoint folder, a hub id, or one of {known}"
        )
    return HUB.get(name, name)


def cached(repository: str) -> Path | None:
    """The snapshot of a hub id in the local cache, whole or not; None when there is none."""
    try:
        return Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
    except OSError:
        return None


def family_of(config: Path) -> Family:
    """The family of a `config.json`; TargetError when it is served by none."""
    kind = read_json(config.parent, config.name).get("model_type")
    if kind not in FAMILIES:
        raise TargetError(
            f"{config.parent}: model_type '{kind}' is none of the families served: {', '.join(FAMILIES)}"
        )
    return FAMILIES[str(kind)]


def complete(folder: Path) -> Path:
    """Return the folder if nothing is missing in it; TargetError names the first thing that is."""
    family_of(folder / "config.json")
    for shard in weight_files(folder):
        _check_safetensors(shard)
    _one_of(folder, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json")
    inside = (folder / PROCESSOR).is_file() and "image_processor" in read_json(folder, PROCESSOR)
    if not inside:  # one file holds all settings, or this one those of images
        _one_of(folder, "image processor", "preprocessor_config.json")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the stock loading reads; TargetError when one is missing."""
    shards = [WHOLE]
    if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():
        places = read_json(folder, INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
            raise TargetError(f"{folder / INDEX} is corrupt (its weight_map is none): fetch it again")
        shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        if pickled and not any(folder.glob("*.safetensors")):
            raise TargetError(f"{folder} has {pickled[0]} and no safetensors files: {CONVERT}")
        which = f"{missing[0]} ({len(missing)} of {len(shards)} files)" if missing else INDEX
        raise TargetError(f"{folder} lacks the weights {which}: the download is not whole, fetch it again")
    return [folder / shard for shard in shards]


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One JSON object of the checkpoint; TargetError when it is missing or is none."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TargetError(f"{folder} has no {name}: it is no checkpoint, or not wholly downloaded") from None
    except (OSError, ValueError) as error:
        raise TargetError(f"{folder / name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TargetError(f"{folder / name} holds no JSON object: fetch the checkpoint again")
    return value


def safetensors_header(path: Path) -> bytes:
    """The raw header of a safetensors file: names, types, shapes and places of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, path.stat().st_size))


def parameters_in(folder: Path) -> int:
    """How many numbers the weights of a checkpoint hold, read off their headers alone."""
    headers = [json.loads(safetensors_header(path)) for path in weight_files(folder)]
    tensors = [tensor for header in headers for name, tensor in header.items() if name != "__metadata__"]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def _check_safetensors(path: Path) -> None:
    size, header = path.stat().st_size, safetensors_header(path)
    try:
        tensors = json.loads(header)
        ends = [value["data_offsets"][1] for name, value in tensors.items() if name != "__metadata__"]
        whole = 8 + len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise TargetError(f"{path} is corrupt (its header is unreadable): fetch it again") from None
    if size != whole:
        raise TargetError(f"{path} is corrupt: it has {size} bytes and should have {whole}; fetch it again")


def _one_of(folder: Path, what: str, *names: str) -> None:
    if not any((folder / name).is_file() for name in names):
        raise TargetError(f"{folder} has no {what} ({' or '.join(names)}): fetch the checkpoint again")


def _from_hub(name: str, repository: str) -> Path:
    folder = cached(repository)
    try:
        if folder is not None:
            return complete(folder)
    except TargetError:
        pass  # not whole: ask the hub
    try:
        told = huggingface_hub.HfApi().model_info(repository, timeout=HUB_TIMEOUT)
        files = [file.rfilename for file in told.siblings or ()]
        if files and not any(file.endswith(".safetensors") for file in files):
            raise LookupError(f"it has no safetensors files: {CONVERT}")
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(WANTED)))
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, the user needs one line
        raise TargetError(
            f"could not fetch {repository} from the Hugging Face hub ({first_line(error)}): "
            f"download it elsewhere and pass its folder instead of '{name}'"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error, cut where it rambles, or its type where it has no words."""
    words = str(error).strip()
    return words.splitlines()[0][:240] if words else type(error).__name__
