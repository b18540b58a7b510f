"""Targets of a published shape with random weights, drawn where they run: nothing is downloaded.

The shape is one that vlmdistill ships (`vlmdistill target list`); the demo's tokenizer,
chat template and image processor stand for the published ones. What a step costs does
not depend on the values of weights.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from vlmdistill.drafters.core.devices import choose_kernels
from vlmdistill.pipelines.targets.checkpoints.folder import family_of
from vlmdistill.pipelines.targets.checkpoints.registry import shipped
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import configuration, processor_of
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

TINY = "tiny"
"""The shape of the demo, for a rehearsal on a CPU."""
TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Settings that belong to the tokenizer."""
PIXELS = {
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 16384,
}  # of the released Qwen2.5-VL


def checkpoint_without_weights(shape: str, folder: Path) -> Path:
    """Make a checkpoint folder of a shape: everything but weights."""
    demo = EMBEDDED["demo-small"]
    ignored = shutil.ignore_patterns("*.safetensors", "README.md")
    shutil.copytree(demo, folder, ignore=ignored)
    published = shipped(shape)
    if shape != TINY:
        if published is None:
            raise SystemExit(
                f"no shape {shape} is shipped: see `vlmdistill target list`"
            )
        tokens = json.loads((demo / "config.json").read_text())
        config = json.loads(published.read_text())
        config |= {name: tokens[name] for name in TOKENS if name in tokens}
        (folder / "config.json").write_text(json.dumps(config))
    processor = folder / "preprocessor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | PIXELS))
    return folder


def random_target(
    shape: str, device: torch.device, folder: Path
) -> VisionLanguageTarget:
    """A target of a shape on `device`, in bfloat16 on a GPU; `folder` is made."""
    choose_kernels(device)
    checkpoint_without_weights(shape, folder)
    family = family_of(folder / "config.json").load()
    config = configuration(folder / "config.json")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return VisionLanguageTarget(
        name=shape,
        folder=folder,
        family=family,
        model=model.eval().requires_grad_(False),
        processor=processor_of(folder, family),
    )


def question(target: VisionLanguageTarget, side: int, seed: int = 0) -> EncodedPrompt:
    """A question about a square picture of noise, `side` pixels wide."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, (32, 32, 3), np.uint8)
    picture = Image.fromarray(noise).resize((side, side))
    text = {"type": "text", "text": "Describe the scene."}
    content = [{"type": "image", "image": picture}, text]
    return target.encode([{"role": "user", "content": content}])
