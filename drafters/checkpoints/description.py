"""The description of a drafter in its folder: `config.json` and `samples.txt`.

Light to import, so that a missing drafter is an error before torch loads.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from vlmdistill.drafters import catalogue
from vlmdistill.stores.errors import TrainingError, one_line
from vlmdistill.stores.input_files import open_regular, read_bytes
from vlmdistill.stores.suggestions import did_you_mean

FORMAT = 3
"""Of drafter folders. Development versions wrote 1 and 2; nothing reads them."""
WEIGHTS = "model.safetensors"
SAMPLES = "samples.txt"
"""The keys of the samples that the drafter, or a drafter that it began with, was trained on, one a line.

A key of no prompt stands for those that the drafter it began with does not name.
"""


class _DrafterFile(msgspec.Struct, frozen=True):
    """The members of `config.json`."""

    format: int
    drafter: str
    config: dict[str, Any]
    target: dict[str, Any]
    provenance: dict[str, Any]
    training: dict[str, Any]


def describe(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`; TrainingError when it is missing or not a drafter's.

    A method without training needs no folder: its name is enough.
    """
    name = folder.name
    needs_training = name not in catalogue.NAMES or catalogue.is_trained(name)
    if not folder.exists() and not needs_training:
        from vlmdistill.drafters.core.settings import to_dict

        config = to_dict(catalogue.config(name))
        return {"drafter": name, "config": config, "training": {}}
    file = folder / "config.json"
    try:
        content = json.loads(read_bytes(file))
        _check_format(file, content)
        return msgspec.structs.asdict(msgspec.convert(content, _DrafterFile))
    except FileNotFoundError:
        absolute = folder.absolute()
        raise TrainingError(f"no drafter in {absolute}{_instead(folder)}") from None
    except OSError as error:
        raise TrainingError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise TrainingError(f"{file} is not a drafter's: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TrainingError(
            f"{file} is not readable JSON ({one_line(error)}); train the drafter again"
        ) from None


def trained_thinking(folder: Path) -> str | None:
    """The `--thinking` of the responses that the drafter in a folder was trained on; see `describe`.

    Empty: as the template had it. None: the method needs no training.
    """
    provenance = describe(folder).get("provenance")
    return str(provenance.get("thinking", "")) if provenance else None


def _check_format(file: Path, content: Any) -> None:
    """TrainingError for a drafter that another version of vlmdistill wrote."""
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int) or version == FORMAT:
        return
    if version < FORMAT:
        raise TrainingError(
            f"{file} was written by a development version of vlmdistill (format {version}): train "
            "the drafter again, with --force"
        )
    raise TrainingError(
        f"{file} was written by a later version of vlmdistill (format {version}): update vlmdistill"
    )


def trained_on(folder: Path) -> frozenset[str] | None:
    """The keys of the samples that the drafter in a folder, or one that it began with, was trained on.

    None if it does not list them, or the list is empty.
    """
    try:
        keys = read_bytes(folder / SAMPLES).decode().splitlines()
    except (OSError, ValueError):
        return None
    return frozenset(keys) or None


def weights_hash(folder: Path) -> str | None:
    """The SHA-256 of the weights in a drafter's folder; None if there are none or they cannot be read."""
    try:
        with open(open_regular(folder / WEIGHTS), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _instead(folder: Path) -> str:
    """What to do about a missing drafter: the nearest name, or how to train it."""
    if folder.name in catalogue.NAMES:
        return f": it is not trained yet; `vlmdistill train {folder.name}`"
    trained = [file.parent.name for file in folder.parent.glob("*/config.json")]
    if near := did_you_mean(folder.name, sorted(trained)):
        return near
    near = did_you_mean(folder.name, catalogue.NAMES)
    return f"{near}: train one first, for example `vlmdistill train sparrow`"
