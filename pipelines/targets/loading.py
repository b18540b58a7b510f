"""Loads a target by name, and checks that its parts fit.

There is one code path for the demo targets, folders and hub ids.
"""

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
from torch import Tensor

from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.devices import choose_kernels
from vlmdistill.pipelines.targets.capture import DTYPES
from vlmdistill.pipelines.targets.checkpoints import awq
from vlmdistill.pipelines.targets.checkpoints.folder import (
    check_floats,
    family_of,
    first_line,
    parameters_in,
    read_json,
    resolve,
    weight_files,
)
from vlmdistill.pipelines.targets.checkpoints.registry import Options
from vlmdistill.pipelines.targets.checkpoints.template import (
    JINJA,
    PUBLISHED,
    UNREAD,
    Thinking,
    check_thinking,
    template_of,
)
from vlmdistill.pipelines.targets.encode import CODE, warn_once
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
    """How and where to load a target; the command line sets the inherited options."""

    device: str
    layers: DeviceMap | None
    proven: bool


def load(name: str, **options: Unpack[LoadOptions]) -> VisionLanguageTarget:
    """Load `demo`, a registered name, a local checkpoint folder or a hub id as a target that decodes.

    Args:
        name: The target.
        options: `device`, by default a GPU if there is one; `dtype`, by default bfloat16
            on a GPU and float32 on a CPU; `attention`, the kernel of capture and prefill;
            `compiled`: decoding steps by `torch.compile`, on a GPU as CUDA graphs;
            `layers`: the device of each part (`device_map` of transformers) instead of
            `device`; `thinking`, see `Thinking`; `proven`: no self-test, although the
            family has not been tested before.

    Raises:
        TargetError: The name, the checkpoint or an option is wrong, or the target needs
            several devices.
    """
    source = _Source(name, **options)
    if source.several_devices:
        raise TargetError(
            f"{name} needs several devices, but decoding runs on one: use a larger GPU "
            "or a smaller target (responses and features can use several)"
        )
    return source.target()


def load_for_capture(name: str, **options: Unpack[LoadOptions]) -> TargetModel:
    """Load a target that need not decode.

    If it is too large for one GPU, it is spread over all GPUs that this process sees.
    """
    source = _Source(name, **options)
    if source.several_devices and source.fused:
        target = MultiDeviceTarget(**source.load())
        target.check_runs()
        return target
    return source.target()


def load_encoder(name: str, thinking: Thinking = "") -> TargetModel:
    """A target without weights, which encodes prompts and has its facts and hashes."""
    source = _Source(name, device="cpu", dtype="float32", thinking=thinking)
    return VisionLanguageTarget(**source.load(weights=False))


def load_embedding(name: str) -> tuple[TargetModel, Head]:
    """A target without weights, with its facts and hashes, and its embedding table in float32.

    The table also takes the place of the LM head.
    """
    source = _Source(name, device="cpu", dtype="float32")
    table_VD = _embedding_table(source.folder)
    target = VisionLanguageTarget(**source.load(weights=False))
    embed_VD = table_VD.float() * embed_scale(text_model(target.model))
    return target, Head(embed_VD, embed_VD)


def _embedding_table(folder: Path) -> Tensor:
    """The first embedding table of text tokens in a checkpoint's files [V, D]."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            for name in names:
                if name.endswith("embed_tokens.weight"):
                    table_VD: Tensor = tensors.get_tensor(name)
                    return table_VD
    raise TargetError(
        f"{folder}: no weights are named embed_tokens.weight: wrong files?"
    )


class _Source:
    """A checkpoint whose files and options are checked before its weights load."""

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
        check_thinking(thinking)
        self.name = name
        self.attention = attention
        self.compiled = compiled
        self.layers = layers
        self.thinking = thinking
        self.proven = proven
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
        if not self.fused:
            _check_stock(self.family, attention, compiled)
        self.generation = generation_of(self.folder)
        self.processor = processor_of(self.folder, self.family)
        if device == "auto" and on_gpu and layers is None:
            self.layers = _spread(self.folder, self.dtype)

    @property
    def several_devices(self) -> bool:
        return len(set((self.layers or {}).values())) > 1

    def target(self) -> VisionLanguageTarget:
        """The loaded target.

        Families that this project has not tested run a self-test; TargetError if it fails.
        """
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
        """The arguments of a `TargetModel`, with its weights or on the meta device."""
        if weights:
            model = _model(
                self.folder, self.dtype, self.attention, self.device, self.layers
            )
        else:
            model = skeleton(self.folder / "config.json")
        # The checkpoint's, not the one that transformers makes of class defaults.
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


def _device(name: str) -> torch.device:
    """The device of a name; TargetError if it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TargetError(
            f"unknown device '{name}': use auto, cpu, cuda or cuda:1 ({error})"
        ) from None
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise TargetError(f"device '{name}' does not exist: {gpus} GPUs are visible")
    return device


def _check_stock(family: Family, attention: str, compiled: bool) -> None:
    """TargetError for options that stock layers do not support."""
    if attention == "flash_attention_2":
        raise TargetError(
            f"attention 'flash_attention_2' verifies no drafts of a {family.name}: "
            "choose sdpa"
        )
    if compiled:
        raise TargetError(
            f"the decoding steps of a {family.name} do not compile: omit --compile"
        )


def _check_transformers(family: Family) -> None:
    """TargetError if transformers is older than the versions that have run the family."""
    installed, needed = transformers.__version__, family.oldest_transformers
    if Version(installed) < Version(needed):
        raise TargetError(
            f"transformers {installed} is installed, and a {family.name} needs {needed} "
            f'or newer: pip install "transformers>={needed}"'
        )


def _check_flash(device: torch.device, dtype: torch.dtype) -> None:
    """TargetError if FlashAttention cannot run here."""
    if device.type != "cuda" or dtype == torch.float32:
        raise TargetError(
            "attention 'flash_attention_2' needs a GPU and half precision: choose sdpa"
        )
    if not transformers.utils.is_flash_attn_2_available():
        raise TargetError(
            "attention 'flash_attention_2' needs the package flash-attn: install it, or "
            "choose sdpa"
        )


def _spread(folder: Path, dtype: torch.dtype) -> DeviceMap | None:
    """The device of each layer if one GPU cannot hold the weights, None if it can.

    TargetError if all visible GPUs together cannot hold them.
    """
    gpus = range(torch.cuda.device_count())
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]
    needed = parameters_in(folder) * dtype.itemsize
    if len(free) > 1:
        needed += ROOM
    if needed <= free[0]:
        return None
    return device_map(skeleton(folder / "config.json"), dtype.itemsize, free)


def skeleton(config: Path) -> Any:
    """The model of a `config.json` on the meta device, without weights; TargetError on an invalid file."""
    settings = configuration(config)
    with _in_one_line(f"{config} is not a valid configuration"), torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(settings)


def configuration(config: Path) -> Any:
    """Read a `config.json`; TargetError if it is invalid or its text model is not supported."""
    family = family_of(config).load()
    stored = read_json(config.parent, config.name)
    for part in ("text_config", "vision_config"):
        # For null, the class would take its defaults: billions of parameters.
        if not isinstance(stored.get(part, {}), dict):
            raise TargetError(
                f"{config}: its {part} is not an object: download the checkpoint again"
            )
    with _in_one_line(f"{config} is not a valid configuration"):
        settings = transformers.AutoConfig.from_pretrained(
            config, local_files_only=True
        )
    text = settings.get_text_config()
    rope_type = "no"
    if text.rope_parameters:
        rope_type = text.rope_parameters.get("rope_type", "default")
    if rope_type in ("dynamic", "longrope", "no"):
        raise TargetError(
            f"{config}: rotary positions of type '{rope_type}' are not supported"
        )
    if getattr(text, "cross_attention_layers", None) or settings.is_encoder_decoder:
        raise TargetError(
            f"{config}: a {family.name} reads images by cross-attention, not as tokens: "
            "it is not supported"
        )
    return settings


def _can_fuse(family: Family, text: Any) -> bool:
    """Whether `FusedLayers` can run the text model; else its stock layers run."""
    return type(text).model_type in family.text_types and not _slides(text)


def _slides(text: Any) -> bool:
    """Whether a layer attends to fewer tokens than the longest sequence."""
    config_class = type(text)  # a file may have settings that its class ignores
    if hasattr(config_class, "layer_types"):
        return "sliding_attention" in text.layer_types
    if not hasattr(config_class, "sliding_window"):
        return False
    window = text.sliding_window
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
    image_class = type(image).__name__
    expected = family.image_processors
    base_class = image_class.removesuffix("Pil").removesuffix("Fast")
    if expected and base_class not in expected:
        raise TargetError(
            f"{folder}: the processor does not match the model: it is a {image_class}, "
            f"and {family.name} takes {' or '.join(expected)}: copy the processor files "
            "of the published model"
        )
    with _in_one_line(f"{folder}: the processor does not load"):
        processor = family.load_processor(folder)
    if not processor.chat_template:
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    if not processor.chat_template:
        raise TargetError(
            f"{folder} has no chat template: add {JINJA} of the published model"
        )
    _check_template(folder, processor)
    own = folder / JINJA
    lines = (template_of(folder) or "").splitlines()  # their ends make no difference
    if lines and own.is_file() and own.read_text("utf-8").splitlines() != lines:
        warn_once(UNREAD, str(folder))
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
    # A template for text only renders a string; others may raise anything on one.
    with suppress(Exception), quiet_transformers():
        text_only = _PROBE in rendered(_PROBE)
    try:
        with _in_one_line(f"{folder}: the chat template does not render"):
            text = rendered([{"type": "text", "text": _PROBE}])
        text_only = _PROBE not in text or CODE.search(text) is not None
    except TargetError:
        if not text_only:
            raise
    if text_only:
        raise TargetError(
            f"{folder}: the chat template is for text only: {PUBLISHED}, or use one that "
            "renders the parts (text, image) of a message"
        )


def _model(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    layers: DeviceMap | None,
) -> Any:
    """The model with its weights as floats, on `device` or spread by `layers`."""
    if layers and not transformers.utils.is_accelerate_available():
        raise TargetError(
            "a target on several devices needs the package accelerate: "
            "pip install accelerate"
        )
    settings = configuration(folder / "config.json")
    quantised = getattr(settings, "quantization_config", {})
    loader: Any = transformers.AutoModelForImageTextToText
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    # The layers of this project multiply by floats.
    if quantised.get("quant_method") == awq.METHOD:
        del settings.quantization_config
        loader = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
        source["pretrained_model_name_or_path"] = None
        source["state_dict"] = awq.weights(folder, quantised, dtype)
    elif quantised:
        settings.quantization_config = {**quantised, "dequantize": True}
    else:
        check_floats(folder)
    with _in_one_line(f"{folder}: the weights do not load"):
        model, report = loader.from_pretrained(
            **source,
            config=settings,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            device_map=dict(layers) if layers else None,
        )
        if not layers:
            model = model.to(device)
        model = model.eval().requires_grad_(False)
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"{folder}: the weights lack {len(missing)} tensors, {missing[0]} first: "
            "wrong files?"
        )
    are_floats = all(weight.is_floating_point() for weight in model.parameters())
    if quantised and not are_floats:
        raise TargetError(
            f"{folder}: weights quantised by {quantised['quant_method']} cannot be read "
            "as numbers: use a checkpoint in bfloat16, AWQ, compressed-tensors or fp8"
        )
    return model


def _check_together(folder: Path, family: Family, model: Any, processor: Any) -> None:
    """TargetError if tokenizer or processor do not match the model."""
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = len(processor.tokenizer)
    if tokens > rows:
        raise TargetError(
            f"{folder}: the tokenizer does not match the model: {tokens} tokens, "
            f"{rows} embeddings"
        )
    try:
        facts = family.facts(model.config, processor)
    except TargetError as error:
        raise TargetError(f"{folder}: {error}") from None
    if fact := disagreement(facts):
        raise TargetError(f"{folder}: the processor does not match the model: {fact}")


@contextmanager
def _in_one_line(problem: str) -> Iterator[None]:
    """Turn any exception about a broken file into a TargetError of one line."""
    try:
        with quiet_transformers(), without_panics():
            yield
    except Exception as error:  # noqa: BLE001
        raise TargetError(f"{problem}: {first_line(error)}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library's progress bars and advice; problems are checked for and raised."""
    library = transformers.utils.logging
    level = library.get_verbosity()
    had_bars = library.is_progress_bar_enabled()
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
        if had_bars:
            library.enable_progress_bar()
