"""Drafters as their authors publish them: `config.json` of a Llama or Qwen3 kind, and one file of weights.

The file is `pytorch_model.bin`, of which tensors alone are read, or `model.safetensors`. Each tensor has a
counterpart here, or is the target's and is compared with it, or the checkpoint is refused by its name.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch import Tensor, nn

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.published_config import Layer, read_config
from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.config import DrafterConfig
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.vocabulary import check_columns, columns_of
from vlmdistill.stores.errors import DataError, TrainingError, one_line
from vlmdistill.stores.input_files import read_bytes
from vlmdistill.stores.schema import Provenance, TargetInfo

log = logging.getLogger(__name__)

FILES = ("pytorch_model.bin", "model.safetensors")
# Tensors that are the target's, or follow from other tensors:
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SPOKEN = "t2d"
FREQUENCIES = "rotary_emb.inv_freq"
NEAR = 1e-2
"""Relative tolerance for a table that was kept in half precision."""
PADDING = 512
"""Tables of one vocabulary differ by fewer rows: Qwen2-VL's has 151,936 in the small sizes, 152,064 in 7B."""


@dataclass(frozen=True)
class Published:
    """A published checkpoint, its weights by the names of a drafter here."""

    layer: Layer
    hash: str
    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    """Settings of the drafter that its tensors show."""
    origin: Mapping[str, str]
    """Name here -> their name, or names."""
    names: Mapping[str, str]
    """The drafter's `published_names`, for each of the layers."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors without a counterpart."""

    def info(self, target: TargetInfo) -> TargetInfo:
        """The facts of the target, with those of this drafter's layer in which it may differ."""
        layer = self.layer
        has_bias = any(name.endswith("qkv_proj.bias") for name in self.weights)
        return msgspec.structs.replace(
            target,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.head_width,
            rms_norm_eps=layer.rms_norm_eps,
            rope_theta=layer.rope_theta,
            attention_bias=has_bias,
        )


def is_published(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, and not a drafter of this toolkit."""
    try:
        return "provenance" not in json.loads(read_bytes(folder / "config.json"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


# Reading a checkpoint


def read(folder: Path, name: str) -> Published:
    """Read a published checkpoint as the drafter of that name; TrainingError names what does not fit."""
    kind = catalogue.trained(name)
    if not kind.published_names:
        raise TrainingError(
            f"{folder}: published checkpoints of {name} have another architecture than ours"
        )
    raw, layer = read_config(folder, kind)
    weights_file = _weights_file(folder)
    tensors = _tensors(weights_file)
    digest = blake3(max_threads=blake3.AUTO).update_mmap(weights_file)
    for file_name in kind.published_files:
        file = folder / file_name
        if file.is_file():
            tensors |= _further_tensors(file)
            digest.update_mmap(file)
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise TrainingError(
                f"{weights_file}: {key} holds values that are not finite"
            )
    digest.update(read_bytes(folder / "config.json"))
    settings = _settings(kind, layer, raw, tensors)
    try:
        settings |= kind.published_config(raw, tensors)
    except DataError as error:
        raise TrainingError(f"{folder / 'config.json'}: {error}") from None
    names: dict[str, str] = {}
    for published_name, ours in kind.published_names.items():
        for number in range(layer.num_hidden_layers):
            layer_name = published_name.replace("*", str(number))
            names[layer_name] = ours.replace("*", str(number))
    translation = _translate(weights_file, tensors, names)
    return Published(
        layer,
        digest.hexdigest()[:16],
        translation.weights,
        settings,
        translation.origin,
        names,
        translation.unmatched,
    )


def _weights_file(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise TrainingError(
        f"{folder} has no weights: there is neither {' nor '.join(FILES)}"
    )


def _settings(
    kind: type[Drafter],
    layer: Layer,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The settings of the drafter that shapes, tensors and switches show."""
    has_all_heads = layer.kv_heads == layer.num_attention_heads
    settings: dict[str, Any] = {"kv_heads": "all" if has_all_heads else "target"}
    defaults = vars(kind.Config())
    for name, setting in kind.published_settings.items():
        if name in tensors:
            is_switch = isinstance(defaults[setting], bool)
            settings[setting] = is_switch or len(tensors[name])
    for switch, setting in kind.published_switches.items():
        settings[setting] = bool(raw.get(switch))
    return settings


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; TrainingError when it holds anything else."""
    content = _load(file)
    if not _is_state_dict(content):
        raise TrainingError(
            f"{file} is not a state dict: it holds more than named dense tensors"
        )
    return dict(content)


def _further_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a further file, as `file:key`; numbers beside them are left out."""
    content = _load(file)
    if isinstance(content, dict):
        content = {
            key: value for key, value in content.items() if not isinstance(value, int)
        }
    if not _is_state_dict(content):
        raise TrainingError(
            f"{file} is not a state dict: it holds more than named dense tensors"
        )
    return {f"{file.name}:{key}": tensor for key, tensor in content.items()}


def _load(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            return read_weights(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (bytes of a stranger: the unpickler raises what it meets)
        raise TrainingError(
            f"{file} cannot be read as tensors alone ({_first_sentence(error)})"
        ) from None


def _is_state_dict(content: object) -> bool:
    """Whether a value is a dictionary of dense tensors by name."""
    if not isinstance(content, dict):
        return False
    return all(
        isinstance(key, str) and _is_plain(value) for key, value in content.items()
    )


def _is_plain(value: object) -> bool:
    """Whether a value is a dense tensor, not a scalar, that holds as many bytes as its shape says."""
    if type(value) not in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return False
    if value.layout != torch.strided or value.device.type != "cpu" or value.ndim == 0:
        return False
    if value.is_quantized or value.is_nested or value.is_complex():
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


# Names: published_name -> ours


class _WeightPlace(NamedTuple):
    """Where a published tensor goes."""

    key: str  # a weight here
    block: int  # of the rows of that weight, if several tensors are fused there


class _Translation(NamedTuple):
    weights: dict[str, Tensor]  # by the names here
    origin: dict[str, str]  # name here -> their name, or names
    unmatched: dict[str, Tensor]  # without a counterpart


def _translate(
    file: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> _Translation:
    """The tensors by their names here; TrainingError if two are one weight, or a part of one is missing."""
    fused: dict[str, dict[int, str]] = {}  # weight here -> block of rows -> their name
    unmatched: dict[str, Tensor] = {}
    for published_name, tensor in tensors.items():
        place = _place(published_name, names)
        if place is None:
            unmatched[published_name] = tensor
            continue
        blocks = fused.setdefault(place.key, {})
        first = blocks.setdefault(place.block, published_name)
        if first != published_name:
            raise TrainingError(
                f"{file} has both {first} and {published_name}, which are the same weight here"
            )
    weights: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for key, blocks in fused.items():
        _require_all_blocks(file, key, blocks, names)
        ordered = [blocks[number] for number in sorted(blocks)]
        origin[key] = ", ".join(ordered)
        try:
            weights[key] = torch.cat([tensors[name] for name in ordered])
        except RuntimeError as error:
            raise TrainingError(
                f"{file}: tensors that belong together do not fit ({_first_sentence(error)})"
            ) from None
    return _Translation(weights, origin, unmatched)


def _place(published_name: str, names: Mapping[str, str]) -> _WeightPlace | None:
    """The place of a tensor by its own name or that of its module; None: it has no counterpart."""
    module, _, kind = published_name.rpartition(".")
    if published_name in names:
        key, _, block = names[published_name].partition("/")
    elif module in names:
        path, _, block = names[module].partition("/")
        key = f"{path}.{kind}"
    else:
        return None
    return _WeightPlace(key, int(block or 0))


def _require_all_blocks(
    file: Path, key: str, blocks: Mapping[int, str], names: Mapping[str, str]
) -> None:
    """TrainingError if a tensor is missing of those that are fused in a weight here."""
    module, _, kind = key.rpartition(".")
    for published_name, ours in names.items():
        path, slash, block = ours.partition("/")
        if slash and path == module and int(block) not in blocks:
            raise TrainingError(
                f"{file} lacks {published_name}.{kind}, and has {blocks[min(blocks)]}"
            )


# Importing a checkpoint


def load(
    folder: Path,
    name: str,
    head: Head,
    target: TargetInfo,
    out: Path,
    provenance: Provenance,
) -> Mapping[str, Any]:
    """Write a published checkpoint to `out` as a drafter of this toolkit; returns facts about it.

    TrainingError names a tensor or a setting that would make it compute something else, and refuses an `out`
    that exists.
    """
    if out.exists():
        raise TrainingError(f"{out} exists: give another --name")
    published = read(folder, name)
    _check_target(folder, published.layer, target)
    info = published.info(target)
    paper = catalogue.config(name)
    settings = [
        f"{key}={json.dumps(value)}" for key, value in published.settings.items()
    ]
    try:
        config = override(paper, settings)
        drafter = checkpoint.build(catalogue.base(name), config, info, head)
    except DataError as error:
        raise TrainingError(f"{folder}: {error}") from None
    assert isinstance(drafter, Drafter)
    zeros = _fill(folder, drafter, published)
    check_columns(folder, drafter, target.vocab_size)
    checked = check_copies(folder, drafter, published)
    if EMBEDDING not in checked:
        log.warning(
            "%s has no %s: whether it is of this target could not be checked",
            folder,
            EMBEDDING,
        )
    unexplained = sorted({*published.others} - {*checked})
    if unexplained:
        raise TrainingError(
            f"{folder}: {unexplained[0]} has no counterpart in this method"
        )
    changed = {
        key: getattr(info, key)
        for key in TargetInfo.__struct_fields__
        if getattr(info, key) != getattr(target, key)
    }
    imported = {
        "from": str(folder),
        "hash": published.hash,
        "zero": zeros,
        "checked": checked,
        "not the target's": changed,
    }
    training = {
        "steps": 0,
        "saved_step": 0,
        "samples": 0,
        "history": [],
        "imported": imported,
    }
    origin = checkpoint.Origin(provenance, config.training, training)
    checkpoint.save(drafter, catalogue.base(name), out, origin)
    parameters = sum(weight.numel() for weight in drafter.parameters())
    return {
        "drafter": str(out),
        "method": name,
        "parameters": parameters,
        "settings": _changed_settings(config, paper),
        "not the target's": changed,
        "zero": zeros,
        "compared": checked,
    }


def _check_target(folder: Path, layer: Layer, target: TargetInfo) -> None:
    """TrainingError if the sizes show that the checkpoint is of another target."""
    if layer.hidden_size != target.hidden_size:
        raise TrainingError(
            f"{folder}: hidden_size is {layer.hidden_size} and the target's {target.hidden_size}: it "
            "was trained for another target"
        )
    vocabulary = layer.vocab_size
    if vocabulary is not None and abs(vocabulary - target.vocab_size) >= PADDING:
        raise TrainingError(
            f"{folder}: vocab_size is {vocabulary} and the target's {target.vocab_size}, more than padding "
            "explains: it was trained for another target"
        )


def _fill(folder: Path, drafter: Drafter, published: Published) -> list[str]:
    """Load the weights; returns the biases that are zero because the checkpoint has none."""
    state = drafter.state_dict()
    for key, value in published.weights.items():
        published_name = published.origin[key]
        if key not in state:
            raise TrainingError(
                f"{folder}: {published_name} has no counterpart in this method"
            )
        if value.shape != state[key].shape:
            raise TrainingError(
                f"{folder}: {published_name} is {[*value.shape]}, and {[*state[key].shape]} is "
                "expected of its config"
            )
    zeros: list[str] = []
    optional = set()  # the choice of all tokens is the default of its buffer
    if columns_of(drafter) is None:
        optional = {name for name, _ in drafter.named_buffers()}
    for key in sorted(set(state) - set(published.weights)):
        is_bias = key.endswith(".bias")
        if is_bias and f"{key[:-4]}weight" in published.weights:
            zeros.append(key)
        elif key not in optional:
            raise TrainingError(
                f"{folder} lacks {_their_name(key, published.names)}, which this method needs"
            )
    empty = {key: torch.zeros_like(state[key]) for key in zeros}
    drafter.load_state_dict({**state, **published.weights, **empty})
    return zeros


def _their_name(key: str, names: Mapping[str, str]) -> str:
    """The published name of a weight or of its module; the name here if there is none."""
    module = key.rpartition(".")[0]
    for published_name, ours in names.items():
        if key == ours or module == ours.partition("/")[0]:
            return published_name
    return key


def _changed_settings(config: DrafterConfig, paper: DrafterConfig) -> dict[str, Any]:
    """The model's settings that are not the paper's."""
    default = vars(paper.model)
    return {
        name: value
        for name, value in vars(config.model).items()
        if value != default[name]
    }


# Copies of the target's tensors


class _Copy(NamedTuple):
    """What a tensor must equal, by its name in an error, and the comparison."""

    name: str
    matches: Callable[[Tensor], bool]


def check_copies(
    source: object, drafter: Drafter, published: Published, *, chosen: bool = True
) -> list[str]:
    """Compare tensors that copy the target's, or follow from other tensors; returns their names.

    Not `chosen`: the drafter has not taken the checkpoint's choice of tokens.
    """
    layers = published.layer.eagle_aux_hidden_state_layer_ids
    if layers is not None and layers != drafter.taps:
        raise TrainingError(
            f"{source}: it reads the inputs of layers {layers}; drafters here read {drafter.taps}"
        )
    copies = _copies(drafter, chosen)
    checked = []
    for name, tensor in sorted(published.others.items()):
        copy = copies.get(FREQUENCIES if name.endswith(FREQUENCIES) else name)
        if copy is None:
            continue
        if not copy.matches(tensor):
            raise TrainingError(
                f"{source}: {name} is not {copy.name}, which a drafter here reads instead"
            )
        checked.append(name)
    return checked


def _copies(drafter: Drafter, chosen: bool) -> dict[str, _Copy]:
    """The tensors of a checkpoint that can be compared, by name."""
    columns_K = columns_of(drafter)
    embed_VD = drafter.embed_VD
    lm_head_VD = drafter.lm_head_VD
    if columns_K is not None:
        lm_head_VD = lm_head_VD[columns_K.to(lm_head_VD.device)]
    rope_theta = drafter.info.rope_theta
    is_embedding = partial(_is_table, embed_VD)
    is_frequencies = partial(_is_frequencies, rope_theta, drafter.info.head_dim)
    copies = {
        EMBEDDING: _Copy("the target's embeddings", is_embedding),
        FREQUENCIES: _Copy(f"those of rope_theta {rope_theta:g}", is_frequencies),
    }
    if chosen or columns_K is None:
        copies[HEAD] = _Copy("the target's LM head", partial(_is_table, lm_head_VD))
    if chosen:
        copies[SPOKEN] = _Copy("the choice in d2t", partial(_is_choice, columns_K))
    return copies


def _is_table(expected_VD: Tensor, table_VD: Tensor) -> bool:
    """Whether a table of the vocabulary is the expected one, as far as both have rows: padding differs."""
    rows = min(len(table_VD), len(expected_VD))
    if table_VD.ndim != 2 or table_VD.shape[1] != expected_VD.shape[1]:
        return False
    expected_VD = expected_VD[:rows].float().cpu()
    return torch.allclose(table_VD[:rows].float(), expected_VD, rtol=NEAR, atol=1e-4)


def _is_choice(columns_K: Tensor | None, spoken_V: Tensor) -> bool:
    """Whether these tokens of the vocabulary are the columns of the drafter's logits."""
    expected_K = torch.arange(len(spoken_V)) if columns_K is None else columns_K.cpu()
    return torch.equal(spoken_V.nonzero()[:, 0], expected_K)


def _is_frequencies(rope_theta: float, width: int, value_d: Tensor) -> bool:
    """Whether these are the frequencies of plain RoPE for heads of that width."""
    exponent_d = torch.arange(0, width, 2, dtype=torch.float64) / width
    expected_d = rope_theta**-exponent_d
    if value_d.shape != expected_d.shape:
        return False
    return torch.allclose(value_d.double(), expected_d, rtol=NEAR)


def _first_sentence(error: BaseException) -> str:
    return one_line(error).split(". ")[0][:200] or type(error).__name__
