"""Load a target from whatever names it: one code path for the demo, local folders and hub ids."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from vlmdistill.pipelines.targets.base import VisionLanguageTarget
from vlmdistill.pipelines.targets.capture import DTYPES
from vlmdistill.pipelines.targets.family import Family
from vlmdistill.pipelines.targets.folder import family_of, first_line, parameters_in, read_json, resolve
from vlmdistill.pipelines.targets.spread import ROOM, DeviceMap, SpreadTarget, device_map
from vlmdistill.stores.errors import TargetError

ATTENTION = ("sdpa", "eager", "flash_attention_2")
_PROBE = "probe"  # what a user says when a chat template is tried


def load(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
    layers: DeviceMap | None = None,
    compiled: bool = False,
) -> VisionLanguageTarget:
    """Load `demo`, a registry name, a local checkpoint folder or a hub id.

    `device` auto: a GPU where there is one, and all that this process sees where one is too small;
    `dtype` auto: bfloat16 on a GPU, float32 on a CPU; `attention`: of the capture and the prefill;
    `layers`: where each part lies, instead of `device` (a `device_map` of transformers); `compiled`: steps of
    the decoder by `torch.compile`, on a GPU as CUDA graphs. Raises TargetError, one line each, for everything
    that can be wrong with a name, a folder or a setting.
    """
    if attention not in ATTENTION:
        raise TargetError(f"attention '{attention}' is not served: choose one of {', '.join(ATTENTION)}")
    if dtype != "auto" and dtype not in DTYPES:
        raise TargetError(f"dtype '{dtype}' is not served: choose auto or one of {', '.join(DTYPES)}")
    place = _device(device)
    number = DTYPES.get(dtype, torch.bfloat16 if place.type == "cuda" else torch.float32)
    if attention == "flash_attention_2":
        _check_flash(place, number)
    folder = resolve(name)
    family = family_of(folder / "config.json")
    configuration(folder / "config.json")
    generation = generation_of(folder)
    processor = processor_of(folder, family)
    if device == "auto" and place.type == "cuda" and layers is None:
        layers = _spread(folder, number)
    model = _model(folder, number, attention, place, layers)
    model.generation_config = generation or transformers.GenerationConfig()  # not one made of class defaults
    _check_together(folder, family, model, processor)
    kind = VisionLanguageTarget if len(set((layers or {}).values())) < 2 else SpreadTarget
    return kind(name=name, folder=folder, family=family, model=model, processor=processor, compiled=compiled)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"'{device}' is no device: write auto, cpu, cuda or cuda:1 ({error})") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"device '{device}' is not there: {torch.cuda.device_count()} GPUs are visible")
    return place


def _check_flash(place: torch.device, dtype: torch.dtype) -> None:
    """TargetError when FlashAttention cannot run here."""
    if place.type != "cuda" or dtype == torch.float32:
        raise TargetError("attention 'flash_attention_2' needs a GPU and half precision: choose sdpa")
    if not transformers.utils.is_flash_attn_2_available():
        raise TargetError("attention 'flash_attention_2' needs the package flash-attn: or choose sdpa")


def _spread(folder: Path, dtype: torch.dtype) -> DeviceMap | None:
    """Where each layer lies when one GPU cannot hold the weights; None when it can.

    TargetError when all that are visible cannot either.
    """
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    needed = parameters_in(folder) * dtype.itemsize
    if needed + ROOM <= free[0] or (len(free) == 1 and needed <= free[0]):
        return None
    return device_map(skeleton(folder / "config.json"), dtype.itemsize, free)


def skeleton(config: Path) -> Any:
    """The model of a `config.json` on the meta device: every shape, no weights; TargetError if it is none."""
    read = configuration(config)
    with _in_one_line(f"{config} makes no model"), torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(read)


def configuration(config: Path) -> Any:
    """Read a `config.json`; TargetError when it is none, or when its text model is not served."""
    family = family_of(config)
    written = read_json(config.parent, config.name)
    for part in ("text_config", "vision_config"):  # null: the class's default, of billions of parameters
        if not isinstance(written.get(part, {}), dict):
            raise TargetError(f"{config}: its {part} is no object: fetch the checkpoint again")
    with _in_one_line(f"{config} makes no model"):
        read = transformers.AutoConfig.from_pretrained(config, local_files_only=True)
    text = read.get_text_config()
    kind = type(text).model_type
    if kind not in family.text_types:
        raise TargetError(
            f"{config}: a text model of type '{kind}' is not served, its blocks are others: "
            f"{family.name} is served with {', '.join(family.text_types)}"
        )
    if _slides(text):
        raise TargetError(
            f"{config}: sliding-window attention over {text.sliding_window} tokens is not served: set "
            "sliding_window to null and drop layer_types, if no sequence will be longer than that"
        )
    rope = text.rope_parameters.get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise TargetError(f"{config}: rotary positions of type '{rope}' are not served")
    return read


def _slides(text: Any) -> bool:
    """Whether a layer looks back on fewer tokens than the model reads."""
    kind = type(text)  # a file may name settings that its class does not read
    if hasattr(kind, "layer_types"):
        return "sliding_attention" in text.layer_types
    window = text.sliding_window if hasattr(kind, "sliding_window") else None
    return window is not None and window < text.max_position_embeddings


def generation_of(folder: Path) -> Any:
    """The `generation_config.json` of a checkpoint, None without one; TargetError when it cannot be read.

    The stock loading passes over one that is broken, and with it over the ids that end an answer.
    """
    name = "generation_config.json"
    if not (folder / name).is_file():
        return None
    read_json(folder, name)
    with _in_one_line(f"{folder / name} cannot be read"):
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


def processor_of(folder: Path, family: Family) -> Any:
    """The processor of a checkpoint; TargetError when it does not load, or is another family's."""
    with _in_one_line(f"{folder}: the processor does not load"):
        image = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    found = type(image).__name__
    if found.removesuffix("Pil").removesuffix("Fast") not in family.image_processors:
        raise TargetError(
            f"{folder}: the processor does not match the model: it is a {found}, and {family.name} takes "
            f"{' or '.join(family.image_processors)}: copy the processor files of the published model"
        )
    with _in_one_line(f"{folder}: the processor does not load"):
        processor = family.processor(folder)
        if (video := family.frames(folder)) is not None:
            # In place of the stock one, which is there only with torchvision: features do not hang on that.
            processor.video_processor = video
            processor.skip_tensor_conversion = [*processor.skip_tensor_conversion, "pixel_values_videos"]
    if not processor.chat_template:
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    if not processor.chat_template:
        raise TargetError(f"{folder} has no chat template: add chat_template.jinja of the published model")
    with _in_one_line(f"{folder}: the chat template does not render"):
        turn = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        shown = processor.apply_chat_template([turn], add_generation_prompt=True)
    if _PROBE not in shown or "'type'" in shown:
        raise TargetError(
            f"{folder}: the chat template is for text alone: add chat_template.jinja of the published model"
        )
    return processor


def _model(
    folder: Path, dtype: torch.dtype, attention: str, place: torch.device, layers: DeviceMap | None
) -> Any:
    if layers and not transformers.utils.is_accelerate_available():
        raise TargetError("a target on several devices needs the package accelerate: pip install accelerate")
    with _in_one_line(f"{folder}: the weights do not load"):
        model, report = transformers.AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            device_map=dict(layers) if layers else None,
        )
        model = (model if layers else model.to(place)).eval().requires_grad_(False)
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"{folder}: the weights lack {len(missing)} tensors, {missing[0]} first: wrong files?"
        )
    return model


def _check_together(folder: Path, family: Family, model: Any, processor: Any) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(processor.tokenizer) > rows:
        raise TargetError(
            f"{folder}: the tokenizer does not match the model: {len(processor.tokenizer)} tokens, "
            f"{rows} embeddings"
        )
    theirs, mine = (
        processor.tokenizer.convert_tokens_to_ids(processor.image_token),
        model.config.image_token_id,
    )
    fact = family.mismatch(model.config, processor)
    if theirs != mine:
        fact = f"the image placeholder is {theirs} in the processor and {mine} in the model"
    if fact:
        raise TargetError(f"{folder}: the processor does not match the model: {fact}")


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Whatever broken files raise becomes a TargetError: the user needs one line."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # noqa: BLE001
        raise TargetError(f"{what}: {first_line(error)}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar and no advice while loading; what matters is checked and raised."""
    library = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.CRITICAL)
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # A bare parameter, such as the newline of an image, has its place like any module.
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
