"""Loads a target by name and checks that its parts fit: one code path for the demo, folders and hub ids."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from packaging.version import Version
from safetensors import safe_open

from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.devices import choose_kernels
from vlmdistill.pipelines.targets.capture import DTYPES
from vlmdistill.pipelines.targets.checkpoints import awq
from vlmdistill.pipelines.targets.checkpoints.folder import (
    family_of,
    first_line,
    parameters_in,
    read_json,
    resolve,
    weight_files,
)
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.families import SHOWN
from vlmdistill.pipelines.targets.families.family import Family, disagreement
from vlmdistill.pipelines.targets.families.text_model import embed_scale, text_model
from vlmdistill.pipelines.targets.multi_device import (
    ROOM,
    DeviceMap,
    MultiDeviceTarget,
    device_map,
)
from vlmdistill.pipelines.targets.stock.check import prove
from vlmdistill.pipelines.targets.stock.target import StockTarget
from vlmdistill.pipelines.targets.target_model import TargetModel
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import TargetError, without_panics

ATTENTION = ("sdpa", "eager", "flash_attention_2")
_PROBE = "probe"  # a message to try a chat template with


class LoadOptions(Options, total=False):
    """How to load a target: the options of the command line, and where."""

    device: str
    layers: DeviceMap | None
    proven: bool


def load(name: str, **options: Unpack[LoadOptions]) -> VisionLanguageTarget:
    """Load `demo`, a registered name, a local checkpoint folder or a hub id as a target that decodes.

    Options: `device`, by default a GPU if there is one; `dtype`, by default bfloat16 on a GPU and float32 on
    a CPU; `attention`, the kernel of capture and prefill; `compiled`: decoding steps by `torch.compile`, on a
    GPU as CUDA graphs; `layers`: the device of each part (`device_map` of transformers) instead of `device`;
    `proven`: no self-test, although nobody has shown this family to work.
    Raises TargetError, one line, on anything wrong with the name, the checkpoint or an option, and if the
    target needs several devices.
    """
    source = _Source(name, **options)
    if source.several_devices:
        raise TargetError(
            f"{name} needs several devices, but decoding runs on one: use a larger GPU or a smaller target "
            "(responses and features can use several)"
        )
    return source.target()


def load_for_capture(name: str, **options: Unpack[LoadOptions]) -> TargetModel:
    """As `load`, but a target that is too large for one GPU is spread over all that this process sees."""
    source = _Source(name, **options)
    if source.several_devices and source.fused:
        spread = MultiDeviceTarget(**source.load())
        spread.check_runs()
        return spread
    return source.target()


def load_encoder(name: str) -> TargetModel:
    """A target without weights, which encodes prompts and has its facts and hashes."""
    return VisionLanguageTarget(
        **_Source(name, device="cpu", dtype="float32").load(weights=False)
    )


def load_embedding(name: str) -> tuple[TargetModel, Head]:
    """A target without weights, which has its facts and hashes, and its embedding table in float32.

    The table is also in the position of the LM head.
    """
    source = _Source(name, device="cpu", dtype="float32")
    for file in weight_files(source.folder):
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            if found := [key for key in names if key.endswith("embed_tokens.weight")]:
                target = VisionLanguageTarget(**source.load(weights=False))
                scale = embed_scale(text_model(target.model))
                embed_VD = tensors.get_tensor(found[0]).float() * scale
                return target, Head(embed_VD, embed_VD)
    raise TargetError(
        f"{source.folder}: no weights are named embed_tokens.weight: wrong files?"
    )


class _Source:
    """A checkpoint with all that is checked before its weights load."""

    def __init__(
        self,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        attention: str = "sdpa",
        compiled: bool = False,
        layers: DeviceMap | None = None,
        thinking: Thinking = "",
        proven: bool = False,
    ):
        if attention not in ATTENTION:
            raise TargetError(
                f"unknown attention '{attention}': choose one of {', '.join(ATTENTION)}"
            )
        if dtype != "auto" and dtype not in DTYPES:
            raise TargetError(
                f"unknown dtype '{dtype}': choose auto or one of {', '.join(DTYPES)}"
            )
        self.name, self.attention = name, attention
        self.compiled, self.layers, self.thinking, self.proven = (
            compiled,
            layers,
            thinking,
            proven,
        )
        self.device = _device(device)
        choose_kernels(self.device)
        on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES.get(dtype, torch.bfloat16 if on_gpu else torch.float32)
        if attention == "flash_attention_2":
            _check_flash(self.device, self.dtype)
        self.folder = resolve(name)
        self.family = family_of(self.folder / "config.json").load()
        _check_transformers(self.family)
        text = configuration(self.folder / "config.json").get_text_config()
        self.fused = _can_fuse(self.family, text)
        if not self.fused and attention == "flash_attention_2":
            raise TargetError(
                f"attention 'flash_attention_2' verifies no drafts of a {self.family.name}: choose sdpa"
            )
        if not self.fused and compiled:
            raise TargetError(
                f"the decoding steps of a {self.family.name} do not compile: omit --compile"
            )
        self.generation = generation_of(self.folder)
        self.processor = processor_of(self.folder, self.family)
        if device == "auto" and on_gpu and layers is None:
            self.layers = _spread(self.folder, self.dtype)

    @property
    def several_devices(self) -> bool:
        return len(set((self.layers or {}).values())) > 1

    def target(self) -> VisionLanguageTarget:
        """The loaded target; TargetError if it fails its check, where nobody has shown such a one."""
        parts = self.load()
        if self.fused:
            fused = VisionLanguageTarget(compiled=self.compiled, **parts)
            fused.check_runs()
            return fused
        target = StockTarget(**parts)
        target.check_runs()
        if not self.proven and self.family.model_type not in SHOWN:
            prove(target)
        return target

    def load(self, *, weights: bool = True) -> dict[str, Any]:
        """Load the weights: the arguments of a `TargetModel`."""
        if weights:
            model = _model(
                self.folder, self.dtype, self.attention, self.device, self.layers
            )
        else:
            model = skeleton(self.folder / "config.json")
        # Not the one that transformers makes of class defaults.
        model.generation_config = self.generation or transformers.GenerationConfig()
        _check_together(self.folder, self.family, model, self.processor)
        return {
            "name": self.name,
            "folder": self.folder,
            "family": self.family,
            "model": model,
            "processor": self.processor,
            "attention": self.attention,
            "thinking": self.thinking,
        }


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise TargetError(
            f"unknown device '{device}': use auto, cpu, cuda or cuda:1 ({error})"
        ) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise TargetError(
            f"device '{device}' does not exist: {torch.cuda.device_count()} GPUs are visible"
        )
    return found


def _check_transformers(family: Family) -> None:
    """TargetError where the installed transformers is older than what the family has run with."""
    installed, needed = transformers.__version__, family.oldest_transformers
    if Version(installed) < Version(needed):
        raise TargetError(
            f"transformers {installed} is installed, and a {family.name} needs {needed} or newer: "
            f'pip install "transformers>={needed}"'
        )


def _check_flash(device: torch.device, dtype: torch.dtype) -> None:
    """TargetError if FlashAttention cannot run here."""
    if device.type != "cuda" or dtype == torch.float32:
        raise TargetError(
            "attention 'flash_attention_2' needs a GPU and half precision: choose sdpa"
        )
    if not transformers.utils.is_flash_attn_2_available():
        raise TargetError(
            "attention 'flash_attention_2' needs the package flash-attn: install it, or choose sdpa"
        )


def _spread(folder: Path, dtype: torch.dtype) -> DeviceMap | None:
    """The device of each layer if one GPU cannot hold the weights, None if it can.

    TargetError if all visible GPUs together cannot hold them.
    """
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    needed = parameters_in(folder) * dtype.itemsize
    if needed + ROOM <= free[0] or (len(free) == 1 and needed <= free[0]):
        return None
    return device_map(skeleton(folder / "config.json"), dtype.itemsize, free)


def skeleton(config: Path) -> Any:
    """The model of a `config.json` on the meta device, without weights; TargetError on an invalid file."""
    read = configuration(config)
    with _in_one_line(f"{config} is not a valid configuration"), torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(read)


def configuration(config: Path) -> Any:
    """Read a `config.json`; TargetError if it is invalid or its text model is not supported."""
    family = family_of(config).load()
    written = read_json(config.parent, config.name)
    for part in (
        "text_config",
        "vision_config",
    ):  # null would mean the class's: billions of parameters
        if not isinstance(written.get(part, {}), dict):
            raise TargetError(
                f"{config}: its {part} is not an object: download the checkpoint again"
            )
    with _in_one_line(f"{config} is not a valid configuration"):
        read = transformers.AutoConfig.from_pretrained(config, local_files_only=True)
    text = read.get_text_config()
    rope = (
        text.rope_parameters.get("rope_type", "default")
        if text.rope_parameters
        else "no"
    )
    if rope in ("dynamic", "longrope", "no"):
        raise TargetError(
            f"{config}: rotary positions of type '{rope}' are not supported"
        )
    if getattr(text, "cross_attention_layers", None) or read.is_encoder_decoder:
        raise TargetError(
            f"{config}: a {family.name} reads images by cross-attention, not as tokens: it is not supported"
        )
    return read


def _can_fuse(family: Family, text: Any) -> bool:
    """Whether this project has a faster form of the text model's layers; the stock ones run otherwise."""
    return type(text).model_type in family.text_types and not _slides(text)


def _slides(text: Any) -> bool:
    """Whether a layer attends to fewer tokens than the longest sequence."""
    kind = type(text)  # a file may have settings that its class ignores
    if hasattr(kind, "layer_types"):
        return "sliding_attention" in text.layer_types
    window = text.sliding_window if hasattr(kind, "sliding_window") else None
    return window is not None and window < text.max_position_embeddings


def generation_of(folder: Path) -> Any:
    """The `generation_config.json` of a checkpoint, None without one; TargetError if it cannot be read.

    transformers silently ignores a broken file, and with it the EOS ids.
    """
    name = "generation_config.json"
    if not (folder / name).is_file():
        return None
    read_json(folder, name)
    with _in_one_line(f"{folder / name} cannot be read"):
        return transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )


def processor_of(folder: Path, family: Family) -> Any:
    """The processor of a checkpoint; TargetError if it does not load or is of another family."""
    with _in_one_line(f"{folder}: the processor does not load"):
        image = transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True
        )
    found = type(image).__name__
    known = family.image_processors
    if known and found.removesuffix("Pil").removesuffix("Fast") not in known:
        raise TargetError(
            f"{folder}: the processor does not match the model: it is a {found}, and {family.name} takes "
            f"{' or '.join(known)}: copy the processor files of the published model"
        )
    with _in_one_line(f"{folder}: the processor does not load"):
        processor = family.load_processor(folder)
    if not processor.chat_template:
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    if not processor.chat_template:
        raise TargetError(
            f"{folder} has no chat template: add chat_template.jinja of the published model"
        )
    _check_template(folder, processor)
    return processor


def check_parts(folder: Path, model: Any) -> None:
    """TargetError if the processor of a checkpoint does not load, or does not fit its model."""
    family = family_of(folder / "config.json").load()
    _check_together(folder, family, model, processor_of(folder, family))


def _check_template(folder: Path, processor: Any) -> None:
    """TargetError if the chat template does not render messages of parts."""

    def rendered(content: Any) -> str:
        message = {"role": "user", "content": content}
        return str(processor.apply_chat_template([message], add_generation_prompt=True))

    text_only = False
    with suppress(Exception), quiet_transformers():  # it may join strings alone
        text_only = _PROBE in rendered(_PROBE)
    try:
        with _in_one_line(f"{folder}: the chat template does not render"):
            text = rendered([{"type": "text", "text": _PROBE}])
        text_only = _PROBE not in text or "'type'" in text
    except TargetError:
        if not text_only:
            raise
    if text_only:
        raise TargetError(
            f"{folder}: the chat template is for text only: add chat_template.jinja of the published model, "
            "or one that renders the parts (text, image) of a message"
        )


def _model(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    layers: DeviceMap | None,
) -> Any:
    if layers and not transformers.utils.is_accelerate_available():
        raise TargetError(
            "a target on several devices needs the package accelerate: pip install accelerate"
        )
    read = configuration(folder / "config.json")
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "config": read}
    loader: Any = transformers.AutoModelForImageTextToText
    # Our layers multiply by floats.
    if (quantised := getattr(read, "quantization_config", {})).get(
        "quant_method"
    ) == awq.METHOD:
        del read.quantization_config
        loader = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(read)]
        source |= {
            "pretrained_model_name_or_path": None,
            "state_dict": awq.weights(folder, quantised, dtype),
        }
    elif quantised:
        read.quantization_config = {**quantised, "dequantize": True}
    with _in_one_line(f"{folder}: the weights do not load"):
        model, report = loader.from_pretrained(
            **source,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            device_map=dict(layers) if layers else None,
        )
        model = (model if layers else model.to(device)).eval().requires_grad_(False)
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"{folder}: the weights lack {len(missing)} tensors, {missing[0]} first: wrong files?"
        )
    if quantised and not all(
        weight.is_floating_point() for weight in model.parameters()
    ):
        raise TargetError(
            f"{folder}: weights quantised by {quantised['quant_method']} cannot be read as numbers: use a "
            "checkpoint in bfloat16, AWQ, compressed-tensors or fp8"
        )
    return model


def _check_together(folder: Path, family: Family, model: Any, processor: Any) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(processor.tokenizer) > rows:
        raise TargetError(
            f"{folder}: the tokenizer does not match the model: {len(processor.tokenizer)} tokens, "
            f"{rows} embeddings"
        )
    try:
        facts = family.facts(model.config, processor)
    except TargetError as error:
        raise TargetError(f"{folder}: {error}") from None
    if fact := disagreement(facts):
        raise TargetError(f"{folder}: the processor does not match the model: {fact}")


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turn any exception about a broken file into a TargetError of one line."""
    try:
        with quiet_transformers(), without_panics():
            yield
    except Exception as error:  # noqa: BLE001
        raise TargetError(f"{what}: {first_line(error)}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library's progress bars and advice; problems are checked for and raised."""
    library = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.CRITICAL)
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # A parameter outside of any module, such as LLaVA's image newline, has its own entry.
            warnings.filterwarnings(
                "ignore", "The following device_map keys do not match"
            )
            yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
