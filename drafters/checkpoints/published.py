"""Drafters as their authors publish them: `config.json` of a Llama or Qwen3 kind, and one file of weights.

The file is `pytorch_model.bin`, of which tensors alone are read, or `model.safetensors`. Each tensor has a
counterpart here, or is the target's and is compared with it, or the checkpoint is refused by its name.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta
from torch import Tensor, nn

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
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
EMBEDDING, HEAD, SPOKEN, FREQUENCIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "t2d",
    "rotary_emb.inv_freq",
)
"""What follows from the target, or from other tensors."""
NEAR = 1e-2  # of a table that was kept in half precision
PADDING = 512
"""Tables of one vocabulary differ by fewer rows: Qwen2-VL's has 151,936 in the small sizes, 152,064 in 7B."""
UNKNOWN = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Switches of later EAGLE-3 trainers that compute something else."""
NESTED = "transformer_layer_config"
"""Where speculators has the layers' configuration."""
WIDTHS = {"qwen3": 128}
"""The width of a head by `model_type` where `head_dim` is missing; else hidden_size / heads."""
PLAIN_AXES = "qwen2_vl"
"""The `model_type` of MSD's code, which gives all axes of M-RoPE the same position: that is plain RoPE."""


Size = Annotated[int, Meta(gt=0, le=1 << 20)]
Heads = Annotated[int, Meta(gt=0, le=1 << 10)]
Positive = Annotated[float, Meta(gt=0)]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of `config.json`; what is missing is as in the authors' code."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(gt=0, le=256)] = 1
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    model_type: str = "llama"
    vocab_size: Size | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Of a head."""
        return (
            self.head_dim
            or WIDTHS.get(self.model_type)
            or self.hidden_size // self.num_attention_heads
        )


class _Left(msgspec.Struct):
    """`eagle_config` of SpecForge and SGLang: the layers that states leave, one less than the next ones."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


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
        return msgspec.structs.replace(
            target,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
            head_dim=layer.width,
            rms_norm_eps=layer.rms_norm_eps,
            rope_theta=layer.rope_theta,
            attention_bias=any(name.endswith("qkv_proj.bias") for name in self.weights),
        )


def is_published(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, and not a drafter of this toolkit."""
    try:
        return "provenance" not in json.loads(read_bytes(folder / "config.json"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read(folder: Path, name: str) -> Published:
    """Read a published checkpoint as the drafter of that name; TrainingError names what does not fit."""
    kind = catalogue.trained(name)
    if not kind.published_names:
        raise TrainingError(
            f"{folder}: published checkpoints of {name} have another architecture than ours"
        )
    raw, layer = _layer(folder, kind)
    found = [folder / file for file in FILES if (folder / file).is_file()]
    if not found:
        raise TrainingError(
            f"{folder} has no weights: there is neither {' nor '.join(FILES)}"
        )
    file, digest, tensors = (
        found[0],
        blake3(max_threads=blake3.AUTO),
        dict[str, Tensor](),
    )
    for one in (
        file,
        *filter(Path.is_file, (folder / name for name in kind.published_files)),
    ):
        tensors |= _tensors(one, "" if one == file else f"{one.name}:")
        digest.update_mmap(one)
    odd = [key for key, one in tensors.items() if not torch.isfinite(one.float()).all()]
    if odd:
        raise TrainingError(f"{file}: {odd[0]} holds values that are not finite")
    digest.update(read_bytes(folder / "config.json"))
    settings: dict[str, Any] = {}
    heads = layer.num_attention_heads
    settings["kv_heads"] = (
        "all" if (layer.num_key_value_heads or heads) == heads else "target"
    )
    switches = vars(kind.Config())
    for tensor, setting in kind.published_settings.items():
        if tensor in tensors:
            settings[setting] = isinstance(switches[setting], bool) or len(
                tensors[tensor]
            )
    for switch, setting in kind.published_switches.items():
        settings[setting] = bool(raw.get(switch))
    try:
        settings |= kind.published_config(raw, tensors)
    except DataError as error:
        raise TrainingError(f"{folder / 'config.json'}: {error}") from None
    names = {
        theirs.replace("*", str(number)): ours.replace("*", str(number))
        for theirs, ours in kind.published_names.items()
        for number in range(layer.num_hidden_layers)
    }
    weights, origin, others = _translate(file, tensors, names)
    return Published(
        layer, digest.hexdigest()[:16], weights, settings, origin, names, others
    )


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a file; TrainingError when it holds anything else, numbers beside them apart."""
    tensors: Any
    try:
        if file.suffix == ".safetensors":
            tensors = read_weights(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (bytes of a stranger: the unpickler raises what it meets)
        raise TrainingError(
            f"{file} cannot be read as tensors alone ({_first(error)})"
        ) from None
    if prefix and isinstance(tensors, dict):
        tensors = {key: one for key, one in tensors.items() if not isinstance(one, int)}
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and _is_plain(one) for key, one in tensors.items()
    ):
        raise TrainingError(
            f"{file} is not a state dict: it holds more than named dense tensors"
        )
    return {f"{prefix}{key}": one for key, one in tensors.items()}


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
    found, paper = read(folder, name), catalogue.config(name)
    if found.layer.hidden_size != target.hidden_size:
        raise TrainingError(
            f"{folder}: hidden_size is {found.layer.hidden_size} and the target's {target.hidden_size}: it "
            "was trained for another target"
        )
    vocabulary = found.layer.vocab_size
    if vocabulary is not None and abs(vocabulary - target.vocab_size) >= PADDING:
        raise TrainingError(
            f"{folder}: vocab_size is {vocabulary} and the target's {target.vocab_size}, more than padding "
            "explains: it was trained for another target"
        )
    try:
        config = override(
            paper,
            [f"{key}={json.dumps(value)}" for key, value in found.settings.items()],
        )
        drafter = checkpoint.build(
            catalogue.base(name), config, found.info(target), head
        )
    except DataError as error:
        raise TrainingError(f"{folder}: {error}") from None
    assert isinstance(drafter, Drafter)
    zeros = _fill(folder, drafter, found)
    check_columns(folder, drafter, target.vocab_size)
    checked = check_copies(folder, drafter, found)
    if EMBEDDING not in checked:
        log.warning(
            "%s has no %s: whether it is of this target could not be checked",
            folder,
            EMBEDDING,
        )
    if odd := sorted({*found.others} - {*checked}):
        raise TrainingError(f"{folder}: {odd[0]} has no counterpart in this method")
    facts = {"from": str(folder), "hash": found.hash, "zero": zeros, "checked": checked}
    own = found.info(target)
    changed = {
        key: getattr(own, key)
        for key in TargetInfo.__struct_fields__
        if getattr(own, key) != getattr(target, key)
    }
    training = {
        "steps": 0,
        "samples": 0,
        "history": [],
        "imported": {**facts, "not the target's": changed},
    }
    origin = checkpoint.Origin(provenance, config.training, training)
    checkpoint.save(drafter, catalogue.base(name), out, origin)
    return {
        "drafter": str(out),
        "method": name,
        "parameters": sum(one.numel() for one in drafter.parameters()),
        "settings": dict(_differing(config, paper)),
        "not the target's": changed,
        "zero": zeros,
        "compared": checked,
    }


def _layer(folder: Path, kind: type[Drafter]) -> tuple[Mapping[str, Any], Layer]:
    """Its `config.json`, and what that says of the layers; TrainingError for what is not here."""
    file = folder / "config.json"
    try:
        raw = json.loads(read_bytes(file))
        layer = msgspec.convert({**raw, **raw.get(NESTED, {})}, Layer)
        rope = layer.rope_scaling or layer.rope_parameters or {}
        theta = msgspec.convert(rope.get("rope_theta", layer.rope_theta), Positive)
        heads, width = layer.num_attention_heads, layer.width
        if heads % (layer.num_key_value_heads or heads) or not width or width % 2:
            raise ValueError(f"num_attention_heads {heads} do not fit the other sizes")
        if not math.isfinite(theta + layer.rms_norm_eps):
            raise ValueError("a number is not finite")
        left = msgspec.convert(
            raw.get("eagle_config") or {}, _Left
        ).eagle_aux_hidden_state_layer_ids
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TrainingError(
            f"{file} is not the configuration of a drafter ({one_line(error)})"
        ) from None
    if "sliding_attention" in (
        layer.layer_types or ("sliding_attention",) * layer.use_sliding_window
    ):
        raise TrainingError(
            f"{file}: its layers have a sliding window of {layer.sliding_window} tokens, and those of "
            "drafters here see everything"
        )
    for switch in UNKNOWN:
        if raw.get(switch) and switch not in kind.published_switches:
            raise TrainingError(
                f"{file}: {switch}={raw[switch]} is another architecture than the authors'"
            )
    if layer.hidden_act != "silu":
        raise TrainingError(
            f"{file}: hidden_act is {layer.hidden_act}, and drafters here have silu"
        )
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    plain = ("default", "mrope") if layer.model_type == PLAIN_AXES else ("default",)
    if scaling not in plain or (
        "mrope_section" in rope and layer.model_type != PLAIN_AXES
    ):
        raise TrainingError(
            f"{file}: rope_scaling {rope} is not plain RoPE, which drafters here have"
        )
    if left is not None:
        layer = msgspec.structs.replace(
            layer, eagle_aux_hidden_state_layer_ids=tuple(one + 1 for one in left)
        )
    return raw, msgspec.structs.replace(layer, rope_theta=theta)


def _is_plain(one: object) -> bool:
    """Whether it is a dense tensor, not a scalar, that holds as many bytes as its shape says."""
    return (
        type(one) in (Tensor, nn.Parameter)
        and isinstance(one, Tensor)
        and one.layout == torch.strided
        and one.device.type == "cpu"
        and not (one.is_quantized or one.is_nested or one.is_complex())
        and one.ndim > 0
        and one.untyped_storage().nbytes() >= one.numel() * one.element_size()
    )


def _translate(
    file: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """The tensors by their names here, where those come from, and those without a counterpart."""
    blocks: dict[str, dict[int, tuple[str, Tensor]]] = {}
    others: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        module, _, kind = theirs.rpartition(".")
        if theirs in names:
            ours = names[theirs]
        elif module in names:
            path, slash, number = names[module].partition("/")
            ours = f"{path}.{kind}{slash}{number}"
        else:
            others[theirs] = tensor
            continue
        key, _, number = ours.partition("/")
        if (
            first := blocks.setdefault(key, {}).setdefault(
                int(number or 0), (theirs, tensor)
            )[0]
        ) != theirs:
            raise TrainingError(
                f"{file} has both {first} and {theirs}, which are the same weight here"
            )
    for key, found in blocks.items():  # what is fused here must be there as a whole
        module, _, kind = key.rpartition(".")
        for theirs, ours in names.items():
            path, slash, number = ours.partition("/")
            if slash and path == module and int(number) not in found:
                raise TrainingError(
                    f"{file} lacks {theirs}.{kind}, and has {found[min(found)][0]}"
                )
    ordered = {
        key: [found[number] for number in sorted(found)]
        for key, found in blocks.items()
    }
    try:
        weights = {
            key: torch.cat([one for _, one in parts]) for key, parts in ordered.items()
        }
    except RuntimeError as error:
        raise TrainingError(
            f"{file}: tensors that belong together do not fit ({_first(error)})"
        ) from None
    return (
        weights,
        {key: ", ".join(name for name, _ in parts) for key, parts in ordered.items()},
        others,
    )


def _fill(folder: Path, drafter: Drafter, found: Published) -> list[str]:
    """Load the weights; returns the biases that are zero because the checkpoint has none."""
    state = drafter.state_dict()
    for key, value in found.weights.items():
        theirs = found.origin[key]
        if key not in state:
            raise TrainingError(f"{folder}: {theirs} has no counterpart in this method")
        if value.shape != state[key].shape:
            raise TrainingError(
                f"{folder}: {theirs} is {[*value.shape]}, and {[*state[key].shape]} is expected of its config"
            )
    missing = sorted(set(state) - set(found.weights))
    zeros = [
        key
        for key in missing
        if key.endswith(".bias") and f"{key[:-4]}weight" in found.weights
    ]
    buffers = (
        {name for name, _ in drafter.named_buffers()}
        if columns_of(drafter) is None
        else set()
    )
    for key in missing:
        if key not in zeros and key not in buffers:
            theirs = next(
                (name for name, ours in found.names.items() if _is(ours, key)), key
            )
            raise TrainingError(f"{folder} lacks {theirs}, which this method needs")
    empty = {key: torch.zeros_like(state[key]) for key in zeros}
    drafter.load_state_dict({**state, **found.weights, **empty})
    return zeros


def _is(ours: str, key: str) -> bool:
    return key == ours or key.rpartition(".")[0] == ours.partition("/")[0]


def check_copies(
    source: object, drafter: Drafter, found: Published, *, chosen: bool = True
) -> list[str]:
    """Compare what is a copy of the target's tensors, or follows from other tensors; returns its names.

    Not `chosen`: the drafter has not taken the checkpoint's choice of tokens.
    """
    columns_K, taps = columns_of(drafter), drafter.taps
    theirs = found.layer.eagle_aux_hidden_state_layer_ids
    if theirs is not None and theirs != taps:
        raise TrainingError(
            f"{source}: it reads the inputs of layers {theirs}; drafters here read {taps}"
        )

    def table(theirs_VD: Tensor, mine_VD: Tensor) -> bool:
        rows = min(len(theirs_VD), len(mine_VD))  # tables are padded differently
        same_width = theirs_VD.ndim == 2 and theirs_VD.shape[1] == mine_VD.shape[1]
        mine_VD = mine_VD[:rows].float().cpu()
        return same_width and torch.allclose(
            theirs_VD[:rows].float(), mine_VD, rtol=NEAR, atol=1e-4
        )

    def embedding(table_VD: Tensor) -> bool:
        return table(table_VD, drafter.embed_VD)

    def lm_head(table_KD: Tensor) -> bool:
        mine_VD = drafter.lm_head_VD
        return table(
            table_KD,
            mine_VD if columns_K is None else mine_VD[columns_K.to(mine_VD.device)],
        )

    def spoken(spoken_V: Tensor) -> bool:
        chosen = torch.arange(len(spoken_V)) if columns_K is None else columns_K.cpu()
        return torch.equal(spoken_V.nonzero()[:, 0], chosen)

    def frequencies(value_d: Tensor) -> bool:
        width = drafter.info.head_dim
        exponent_d = torch.arange(0, width, 2, dtype=torch.float64) / width
        expected_d = drafter.info.rope_theta**-exponent_d
        fits = value_d.shape == expected_d.shape
        return fits and torch.allclose(value_d.double(), expected_d, rtol=NEAR)

    copies: Mapping[str, tuple[Callable[[Tensor], bool], str]] = {
        EMBEDDING: (embedding, "the target's embeddings"),
        **(
            {HEAD: (lm_head, "the target's LM head")}
            if chosen or columns_K is None
            else {}
        ),
        **({SPOKEN: (spoken, "the choice in d2t")} if chosen else {}),
        FREQUENCIES: (frequencies, f"those of rope_theta {drafter.info.rope_theta:g}"),
    }
    checked = []
    for name, tensor in sorted(found.others.items()):
        if check := copies.get(FREQUENCIES if name.endswith(FREQUENCIES) else name):
            if not check[0](tensor):
                raise TrainingError(
                    f"{source}: {name} is not {check[1]}, which a drafter here reads instead"
                )
            checked.append(name)
    return checked


def _differing(config: DrafterConfig, paper: DrafterConfig) -> Mapping[str, Any]:
    mine, theirs = vars(config.model), vars(paper.model)
    return {name: value for name, value in mine.items() if value != theirs[name]}


def _first(error: BaseException) -> str:
    return one_line(error).split(". ")[0][:200] or type(error).__name__
