"""A quantised checkpoint is read as the numbers that its weights stand for."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.serving import eight_bits
from tests.tiny import checkpoint
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError

MESSAGES = [{"role": "user", "content": "Why?"}]
BLOCK = 16


def fp8(target: Path, out: Path) -> Path:
    """The target with the matrices of its text layers in float8, a scale for each block."""
    shutil.copytree(target, out)
    weights = load_file(target / "model.safetensors")
    for name, weight in list(weights.items()):
        if "visual" not in name and name.endswith("_proj.weight"):
            rows, columns = (size // BLOCK for size in weight.shape)
            blocks = weight.view(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            weights[name] = (blocks / scale).view(weight.shape).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_are_read_as_numbers(kind: str, tmp_path: Path) -> None:
    if kind == "int8":
        pytest.importorskip("compressed_tensors", reason="reads the format; not among our dependencies")
    plain = checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    folder = {"int8": eight_bits, "fp8": fp8}[kind](plain, tmp_path / kind)
    target = load(str(folder), dtype="float32")
    stored = load_file(folder / "model.safetensors")
    (name,) = (one for one in stored if one.endswith("layers.1.mlp.down_proj.weight") and "visual" not in one)
    if kind == "int8":
        expected = stored[name] * stored[f"{name}_scale"]
    else:
        scale = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        expected = stored[name].float() * scale
    layer = target.model.model.language_model.layers[1]
    torch.testing.assert_close(layer.mlp.down_proj.weight.float(), expected.float())
    prompt = target.encode(MESSAGES)
    (ours,) = target.generate([prompt], max_new_tokens=8, temperature=0.0)
    stock = target.reference(prompt, max_new_tokens=8)
    assert stock is not None
    assert ours.ids == stock.ids
    assert str(target.fingerprint) != str(load(str(plain), dtype="float32").fingerprint)


def test_without_the_package_of_the_format_one_line_names_it(tmp_path: Path) -> None:
    if find_spec("compressed_tensors"):
        pytest.skip("it is installed")
    eight = eight_bits(checkpoint("qwen2_5_vl", tmp_path / "plain", layers=1), tmp_path / "eight")
    with pytest.raises(TargetError, match=r"the weights do not load: .*compressed-tensors"):
        load(str(eight), dtype="float32")
