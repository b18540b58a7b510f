"""Small genuine checkpoints of every family, with random weights, in the layout that hubs publish.

`checkpoint(family, folder)` writes config, weights, tokenizer, image processor and chat template.
A vocabulary under 280 gives a character tokenizer, so that whole distributions can be enumerated.
"""

import base64
import io
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

CHAT = PAD, EOS, _ = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
QWEN_SPECIALS = "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
LLAVA_SPECIALS = ("<unk>", "</s>", "<s>", "<pad>", "<image>")
LETTERS = "etaoinsrhldcumfpgwybvkxjqz ETAOINSRHLDCUMFPGWYBVKXJQZ\n:.,0123456789"

IMAGE_TEXT, VIDEO_TEXT = (
    f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'video' %}VIDEO"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FAMILIES = (
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)
OTHER_PARTS = (
    "llava_siglip",
    "llava_mistral",
    "llava_qwen3",
    "llava_biased",
)  # in the layout of a family
VIDEO = FAMILIES[2:]  # those that have video
HIDDEN, HEADS, KV_HEADS, MLP = 32, 4, 2, 48
TOWER, PATCH = 28, 14  # pixels
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


@dataclass(frozen=True)
class Parts:
    """What the checkpoint of a family that chats as Qwen does is made of."""

    model: str  # a class in transformers, without its `ForConditionalGeneration`
    tokens: str  # special ones, after those of the chat; a space between them
    image: str  # what the chat template writes for one
    ids: dict[str, str]  # settings of the configuration that are ids, by their tokens
    processed: str = ""  # the processors' classes, without `ImageProcessor` and `Processor`; default: `model`
    image_processor: dict[str, Any] = field(default_factory=dict)
    video_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] | None = field(
        default_factory=dict
    )  # None: no file of its own
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(
        default_factory=dict
    )  # tokens that the tokenizer has as attributes
    video: str = VIDEO_TEXT  # what the chat template writes for one


def checkpoint(
    family: str,
    folder: Path,
    *,
    vocabulary: int = 320,
    layers: int = 3,
    seed: int = 0,
    std: float = 0.15,
) -> Path:
    """Write a checkpoint of `family`, or one of OTHER_PARTS, with random weights into `folder`; return it."""
    made: dict[str, Callable[[], Parts]] = {
        "llava_onevision": _llava_onevision,
        "qwen2_vl": partial(_qwen, "Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2}),
        "qwen2_5_vl": partial(_qwen, "Qwen2_5_VL", QWEN2_5_VISION),
        "qwen3_vl": _qwen3_vl,
    }
    llavas: dict[str, dict[str, Any]] = {
        "llava": {},
        "llava_siglip": {
            "text": "qwen2",
            "siglip": True,
        },  # as those for several images have
        "llava_mistral": {"text": "mistral"},
        "llava_qwen3": {"text": "qwen3"},
        "llava_biased": {"attention_bias": True, "mlp_bias": True},
        "llava_gemma2": {
            "text": "gemma2",
            "sliding_window": 24,
            "query_pre_attn_scalar": 8,
        },  # not fused
        "llava_next": {"model": "LlavaNext", "image_grid_pinpoints": PINPOINTS},
    }
    if family in made:
        write(made[family](), folder, vocabulary, layers, seed, std)
    else:
        _llava(folder, vocabulary, layers, seed, std, **llavas[family])
    return folder


def write(
    parts: Parts, folder: Path, vocabulary: int, layers: int, seed: int, std: float
) -> None:
    """Write a checkpoint with random weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = deepcopy(parts)  # transformers may write into it
    template = QWEN_TEMPLATE.replace("IMAGE", parts.image).replace("VIDEO", parts.video)
    tokens = (*CHAT, *parts.tokens.split(" "))
    special: dict[str, Any] = (
        {"extra_special_tokens": parts.named} if parts.named else {}
    )
    tokenizer(
        folder, tokens, vocabulary, template, eos_token=EOS, pad_token=PAD, **special
    )
    kind = parts.processed or parts.model
    images = {"image_processor_type": f"{kind}ImageProcessor", **parts.image_processor}
    write_json(folder, "preprocessor_config.json", **images)
    if parts.video_processor:  # else what holds for images holds for videos
        videos = {
            "video_processor_type": f"{kind}VideoProcessor",
            **parts.video_processor,
        }
        write_json(folder, "video_preprocessor_config.json", **videos)
    if parts.processor is not None:
        write_json(
            folder,
            "processor_config.json",
            processor_class=f"{kind}Processor",
            **parts.processor,
        )
    config = getattr(transformers, f"{parts.model}Config")(
        text_config=text_sizes(vocabulary, layers, **parts.text),
        vision_config=parts.vision,
        **{"tie_word_embeddings": False, **parts.config},
        **{setting: tokens.index(token) for setting, token in parts.ids.items()},
    )
    _save(folder, parts.model, config, [1, 0], seed, std)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A small picture of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=generator, dtype=torch.uint8
    )
    return Image.fromarray(pixels.numpy())


def data_url(data: Image.Image | bytes, kind: str = "png") -> str:
    """An image, or the bytes of its file, as a data URL."""
    if isinstance(data, Image.Image):
        file = io.BytesIO()
        data.save(file, kind)
        data = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def message(text: str, *shown: Any) -> list[dict[str, Any]]:
    """One user turn: images and videos (arrays) first, then text, as in chat JSONL."""
    kinds = ["video" if isinstance(item, np.ndarray) else "image" for item in shown]
    parts: list[dict[str, Any]] = [
        {"type": k, k: item} for k, item in zip(kinds, shown, strict=True)
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _save(
    folder: Path, kind: str, config: Any, eos: list[int], seed: int, std: float
) -> None:
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 or "bias" in name:
            torch.nn.init.normal_(weight, std=std)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=eos, pad_token_id=0
    )
    model.save_pretrained(folder)


def tokenizer(
    folder: Path,
    specials: tuple[str, ...],
    vocabulary: int,
    template: str,
    **special: Any,
) -> Any:
    if vocabulary >= 256 + len(specials):
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        entries = {token: i for i, token in enumerate([*specials, *characters])}
        core = Tokenizer(models.BPE(vocab=entries, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:
        entries = {
            token: i for i, token in enumerate([*specials, *LETTERS][:vocabulary])
        }
        core = Tokenizer(models.WordLevel(vocab=entries, unk_token=LETTERS[0]))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        core.decoder = decoders.Fuse()
    core.add_special_tokens(
        [token for token in specials if token not in special.values()]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, **special
    )
    fast.save_pretrained(folder)
    return fast


PANIC = 40 * "a" + "!"


def panicking(folder: Path) -> Path:
    """Give a checkpoint a regular expression on which its tokenizer panics at the text PANIC."""
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    read["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, read["pre_tokenizer"]],
    }
    file.write_text(json.dumps(read))
    return folder


def write_json(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values, indent=2))


def text_sizes(vocabulary: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


def mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": sections,
        **more,
    }


QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


# Where these are absent, vLLM does not normalize.
NORMED = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}


def grid(patch: int) -> dict[str, Any]:
    """The sizes of Qwen's image and video processors."""
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (2 * patch) ** 2 * 64}
    return {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": size,
    }


def _qwen(model: str, vision: dict[str, Any], patch: int = PATCH, **text: Any) -> Parts:
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{model}Processor",
        **grid(patch),
        **NORMED,
    }
    return Parts(
        model,
        QWEN_SPECIALS,
        IMAGE_TEXT,
        QWEN_IDS,
        image_processor=images,
        processor=None,
        text={"rope_parameters": mrope([1, 1, 2]), **text},
        vision={
            "depth": 2,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "patch_size": patch,
            **vision,
        },
    )


QWEN2_5_VISION = {
    "out_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}


def _qwen3_vl() -> Parts:
    vision = {
        "depth": 3,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = mrope([2, 1, 1], mrope_interleaved=True)
    parts = _qwen("Qwen3VL", vision, patch=16, head_dim=8, rope_parameters=rope)
    half = [0.5, 0.5, 0.5]
    return replace(
        parts, video_processor={**grid(16), "image_mean": half, "image_std": half}
    )


def _clip(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TOWER,
        "patch_size": 7,
        "projection_dim": 32,
        **more,
    }


def _siglip() -> dict[str, Any]:
    return {**_clip(model_type="siglip_vision_model"), "vision_use_head": False}


def _llava(
    folder: Path,
    vocabulary: int,
    layers: int,
    seed: int,
    std: float,
    text: str = "llama",
    siglip: bool = False,
    model: str = "Llava",
    image_grid_pinpoints: list[list[int]] | None = None,
    **more: Any,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    tokenizer(folder, LLAVA_SPECIALS, vocabulary, LLAVA_TEMPLATE, **special)
    tiles = (
        {"image_grid_pinpoints": image_grid_pinpoints} if image_grid_pinpoints else {}
    )
    square = {"height": TOWER, "width": TOWER}
    cropped = {"crop_size": square, "size": {"shortest_edge": TOWER}}
    sizes = {"size": square} if siglip else {**cropped, **tiles}
    kind = "LlavaNext" if tiles else "Siglip" if siglip else "CLIP"
    write_json(
        folder,
        "preprocessor_config.json",
        image_processor_type=f"{kind}ImageProcessor",
        **sizes,
    )
    strategy = "full" if siglip else "default"  # only CLIP has a token that is no patch
    write_json(
        folder,
        "processor_config.json",
        processor_class=f"{model}Processor",
        image_token="<image>",
        patch_size=7,
        num_additional_image_tokens=0 if siglip else 1,
        vision_feature_select_strategy=strategy,
    )
    config = getattr(transformers, f"{model}Config")(
        text_config=text_sizes(
            vocabulary, layers, model_type=text, head_dim=HIDDEN // HEADS, **more
        ),
        vision_config=_siglip() if siglip else _clip(),
        image_token_id=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=False,
        **tiles,
    )
    _save(folder, model, config, [1], seed, std)


def _llava_onevision() -> Parts:
    square = {"height": TOWER, "width": TOWER}
    features = {"vision_feature_select_strategy": "full"}
    return Parts(
        "LlavaOnevision",
        "<image> <video>",
        "<image>",
        {"image_token_id": "<image>", "video_token_id": "<video>"},
        image_processor={"size": square, "image_grid_pinpoints": PINPOINTS},
        video_processor={"size": square},
        processor={
            "image_token": "<image>",
            "video_token": "<video>",
            "num_image_tokens": 16,
            **features,
        },
        text={"model_type": "qwen2"},
        vision=_siglip(),
        config={
            "image_grid_pinpoints": PINPOINTS,
            "vision_feature_layer": -1,
            **features,
        },
        video="<video>",
    )


def clip(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A small video of smooth colours that move, uint8 [frames, height, width, 3]."""
    place_3 = np.random.default_rng(seed).uniform(0.5, 2.0, 3)
    y_H1, x_1W = np.arange(height)[:, None], np.arange(width)[None]
    wave = [
        np.sin(0.06 * (x_1W * c + y_H1 / c) + 0.35 * t)
        for t in range(frames)
        for c in place_3
    ]
    wave_FCHW = np.stack(wave).reshape(frames, 3, height, width)
    return np.moveaxis(128 + 80 * wave_FCHW, 1, -1).astype(np.uint8)


def film(
    path: Path, frames_FHWC: np.ndarray[Any, Any], fps: int = 10, rotation: int = 0
) -> Path:
    """Write a video file of these frames with PyAV; sizes have to be even."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"qscale": "1"})
        stream.height, stream.width = frames_FHWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for frame_HWC in frames_FHWC:
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24"))
            )
        container.mux(stream.encode())
    return path
