"""Small genuine checkpoints of every family, with random weights, in the layout that hubs publish.

`checkpoint(family, folder)` writes config, weights, tokenizer, image processor and chat template.
A vocabulary under 280 gives a character tokenizer, so that whole distributions can be enumerated.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
LLAVA_SPECIALS = ("<unk>", "</s>", "<s>", "<pad>", "<image>")
ONEVISION_SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<image>", "<video>")
LETTERS = "etaoinsrhldcumfpgwybvkxjqz ETAOINSRHLDCUMFPGWYBVKXJQZ\n:.,0123456789"

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ONEVISION_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>"
)

FAMILIES = ("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
UNFUSED = ("llava_gemma2",)  # in the layout of a family, with layers that only the stock forward pass runs
OTHER_PARTS = ("llava_siglip", "llava_mistral", "llava_qwen3", "llava_biased")  # in the layout of a family
VIDEO = FAMILIES[2:]  # those that have video
HIDDEN, HEADS, KV_HEADS, MLP = 32, 4, 2, 48
TOWER, PATCH = 28, 14  # pixels
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def checkpoint(
    family: str, folder: Path, *, vocabulary: int = 320, layers: int = 3, seed: int = 0, std: float = 0.15
) -> Path:
    """Write a checkpoint of `family`, or one of OTHER_PARTS, with random weights into `folder`; return it."""
    builders: dict[str, Callable[..., None]] = {
        "llava": _llava,
        "llava_siglip": partial(_llava, text="qwen2", siglip=True),  # as those for several images have
        "llava_mistral": partial(_llava, text="mistral"),
        "llava_qwen3": partial(_llava, text="qwen3"),
        "llava_biased": partial(_llava, attention_bias=True, mlp_bias=True),
        "llava_gemma2": partial(_llava, text="gemma2", sliding_window=24, query_pre_attn_scalar=8),
        "llava_next": partial(_llava, model="LlavaNext", image_grid_pinpoints=PINPOINTS),
        "llava_onevision": _llava_onevision,
        "qwen2_vl": partial(_qwen, "Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2}),
        "qwen2_5_vl": partial(_qwen, "Qwen2_5_VL", QWEN2_5_VISION),
        "qwen3_vl": _qwen3_vl,
    }
    folder.mkdir(parents=True, exist_ok=True)
    builders[family](folder, vocabulary, layers, weights(folder, seed, std))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A small picture of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def message(text: str, *shown: Any) -> list[dict[str, Any]]:
    """One user turn: images and videos (arrays) first, then text, as in chat JSONL."""
    kinds = ["video" if isinstance(item, np.ndarray) else "image" for item in shown]
    parts: list[dict[str, Any]] = [{"type": k, k: item} for k, item in zip(kinds, shown, strict=True)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


Save = Callable[[Any, Any, list[int]], None]


def weights(folder: Path, seed: int, std: float) -> Save:
    def save(cls: Any, config: Any, eos: list[int]) -> None:
        torch.manual_seed(seed)
        model = cls(config)
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or "bias" in name:
                torch.nn.init.normal_(weight, std=std)
        model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
        model.save_pretrained(folder)

    return save


def tokenizer(folder: Path, specials: tuple[str, ...], vocabulary: int, template: str, **special: Any) -> Any:
    if vocabulary >= 256 + len(specials):
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        entries = {token: i for i, token in enumerate([*specials, *characters])}
        core = Tokenizer(models.BPE(vocab=entries, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:
        entries = {token: i for i, token in enumerate([*specials, *LETTERS][:vocabulary])}
        core = Tokenizer(models.WordLevel(vocab=entries, unk_token=LETTERS[0]))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        core.decoder = decoders.Fuse()
    core.add_special_tokens([token for token in specials if token not in special.values()])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)
    fast.save_pretrained(folder)
    return fast


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
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


def _qwen_files(folder: Path, vocabulary: int, patch: int, processor: str) -> None:
    eos = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer(folder, QWEN_SPECIALS, vocabulary, QWEN_TEMPLATE, **eos)
    write_json(
        folder,
        "preprocessor_config.json",
        image_processor_type="Qwen2VLImageProcessor",
        processor_class=processor,
        patch_size=patch,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": (2 * patch) ** 2, "longest_edge": (2 * patch) ** 2 * 64},
        image_mean=OPENAI_CLIP_MEAN,  # where these are absent, vLLM does not normalize
        image_std=OPENAI_CLIP_STD,
    )


def _video_file(folder: Path, name: str, **values: Any) -> None:
    """As newer checkpoints have; for the others, what images are processed by holds for videos."""
    write_json(folder, "video_preprocessor_config.json", video_processor_type=name, **values)


def _qwen_ids() -> dict[str, int]:
    ids = {token: i for i, token in enumerate(QWEN_SPECIALS)}
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen(
    model: str,
    vision: dict[str, Any],
    folder: Path,
    vocabulary: int,
    layers: int,
    save: Save,
    patch: int = PATCH,
    **text: Any,
) -> None:
    _qwen_files(folder, vocabulary, patch, f"{model}Processor")
    config = getattr(transformers, f"{model}Config")(
        text_config=text_sizes(vocabulary, layers, **{"rope_parameters": mrope([1, 1, 2]), **text}),
        vision_config={"depth": 2, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": patch, **vision},
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    save(getattr(transformers, f"{model}ForConditionalGeneration"), config, [1, 0])


QWEN2_5_VISION = {
    "out_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}


def _qwen3_vl(folder: Path, vocabulary: int, layers: int, save: Save) -> None:
    vision = {
        "depth": 3,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = mrope([2, 1, 1], mrope_interleaved=True)
    _qwen("Qwen3VL", vision, folder, vocabulary, layers, save, patch=16, head_dim=8, rope_parameters=rope)
    _video_file(
        folder,
        "Qwen3VLVideoProcessor",
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 1024, "longest_edge": 1024 * 64},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
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
    save: Save,
    text: str = "llama",
    siglip: bool = False,
    model: str = "Llava",
    image_grid_pinpoints: list[list[int]] | None = None,
    **more: Any,
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer(folder, LLAVA_SPECIALS, vocabulary, LLAVA_TEMPLATE, **special)
    tiles = {"image_grid_pinpoints": image_grid_pinpoints} if image_grid_pinpoints else {}
    square = {"height": TOWER, "width": TOWER}
    cropped = {"crop_size": square, "size": {"shortest_edge": TOWER}}
    sizes = {"size": square} if siglip else {**cropped, **tiles}
    kind = "LlavaNext" if tiles else "Siglip" if siglip else "CLIP"
    write_json(folder, "preprocessor_config.json", image_processor_type=f"{kind}ImageProcessor", **sizes)
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
        text_config=text_sizes(vocabulary, layers, model_type=text, head_dim=HIDDEN // HEADS, **more),
        vision_config=_siglip() if siglip else _clip(),
        image_token_id=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=False,
        **tiles,
    )
    save(getattr(transformers, f"{model}ForConditionalGeneration"), config, [1])


def _llava_onevision(folder: Path, vocabulary: int, layers: int, save: Save) -> None:
    eos = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer(folder, ONEVISION_SPECIALS, vocabulary, ONEVISION_TEMPLATE, **eos)
    write_json(
        folder,
        "preprocessor_config.json",
        image_processor_type="LlavaOnevisionImageProcessor",
        size={"height": TOWER, "width": TOWER},
        image_grid_pinpoints=PINPOINTS,
    )
    _video_file(folder, "LlavaOnevisionVideoProcessor", size={"height": TOWER, "width": TOWER})
    write_json(
        folder,
        "processor_config.json",
        processor_class="LlavaOnevisionProcessor",
        image_token="<image>",
        video_token="<video>",
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    config = transformers.LlavaOnevisionConfig(
        text_config=text_sizes(vocabulary, layers, model_type="qwen2"),
        vision_config=_siglip(),
        image_token_id=3,
        video_token_id=4,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    save(transformers.LlavaOnevisionForConditionalGeneration, config, [1, 0])


def clip(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A small video of smooth colours that move, uint8 [frames, height, width, 3]."""
    place_3 = np.random.default_rng(seed).uniform(0.5, 2.0, 3)
    y_H1, x_1W = np.arange(height)[:, None], np.arange(width)[None]
    wave = [np.sin(0.06 * (x_1W * c + y_H1 / c) + 0.35 * t) for t in range(frames) for c in place_3]
    wave_FCHW = np.stack(wave).reshape(frames, 3, height, width)
    return np.moveaxis(128 + 80 * wave_FCHW, 1, -1).astype(np.uint8)


def film(path: Path, frames_FHWC: np.ndarray[Any, Any], fps: int = 10, rotation: int = 0) -> Path:
    """Write a video file of these frames with PyAV; sizes have to be even."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"qscale": "1"})
        stream.height, stream.width = frames_FHWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for frame_HWC in frames_FHWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
        container.mux(stream.encode())
    return path
