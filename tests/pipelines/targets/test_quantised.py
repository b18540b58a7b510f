"""A quantised checkpoint is read as the numbers that its weights stand for."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantised import FORMATS, quantised
from tests.tiny import checkpoint
from vlmdistill.pipelines.targets.checkpoints.folder import parameters_in
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.stores.errors import TargetError

MESSAGES = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_weights_are_read_as_numbers(family: str, kind: str, tmp_path: Path) -> None:
    if kind == "int8":
        pytest.importorskip(
            "compressed_tensors", reason="reads the format; not among our dependencies"
        )
    plain, folder = checkpoint(family, tmp_path / "plain", layers=2), tmp_path / kind
    numbers = quantised(plain, folder, kind)
    target = load(str(folder), dtype="float32")
    (expected,) = (
        one
        for name, one in numbers.items()
        if name.endswith("layers.1.mlp.down_proj.weight")
    )
    (found,) = (
        one
        for name, one in target.model.named_parameters()
        if name.endswith("language_model.layers.1.mlp.down_proj.weight")
    )
    torch.testing.assert_close(found, expected)
    prompt = target.encode(MESSAGES)
    (ours,) = target.generate([prompt], max_new_tokens=8, temperature=0.0)
    stock = target.reference(prompt, max_new_tokens=8)
    assert stock is not None
    assert ours.ids == stock.ids
    assert str(target.fingerprint) != str(load(str(plain), dtype="float32").fingerprint)


def test_four_bits_count_as_the_weights_that_they_are(tmp_path: Path) -> None:
    plain = checkpoint("qwen2_5_vl", tmp_path / "plain", layers=2)
    quantised(plain, tmp_path / "awq", "awq")
    assert (
        parameters_in(plain)
        <= parameters_in(tmp_path / "awq")
        < 1.2 * parameters_in(plain)
    )


@pytest.mark.parametrize(
    "wrong", [{"bits": 8}, {"version": "gemv"}, {"zero_point": False}, {"bits": None}]
)
def test_other_packings_of_awq_are_refused(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    quantised(
        checkpoint("qwen2_5_vl", tmp_path / "plain", layers=1), tmp_path / "awq", "awq"
    )
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    config["quantization_config"] |= wrong
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    ((setting, value),) = wrong.items()
    with pytest.raises(TargetError, match=f"AWQ with {setting} {value} cannot be read"):
        load(str(tmp_path / "awq"), dtype="float32")


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_layer_of_awq_without_one_of_its_parts_is_named(
    part: str, tmp_path: Path
) -> None:
    quantised(
        checkpoint("qwen2_5_vl", tmp_path / "plain", layers=1), tmp_path / "awq", "awq"
    )
    weights = load_file(tmp_path / "awq" / "model.safetensors")
    (name,) = (
        one for one in weights if one.endswith(f"layers.0.self_attn.o_proj.{part}")
    )
    for spoilt in (weights.pop(name)[:-1], None):
        more = {} if spoilt is None else {name: spoilt}
        save_file(
            {**weights, **more},
            tmp_path / "awq" / "model.safetensors",
            {"format": "pt"},
        )
        with pytest.raises(
            TargetError, match=r"layers\.0\.self_attn\.o_proj .* download it again"
        ):
            load(str(tmp_path / "awq"), dtype="float32")


def test_without_the_package_of_the_format_one_line_names_it(tmp_path: Path) -> None:
    if find_spec("compressed_tensors"):
        pytest.skip("it is installed")
    quantised(
        checkpoint("qwen2_5_vl", tmp_path / "plain", layers=1),
        tmp_path / "eight",
        "int8",
    )
    with pytest.raises(
        TargetError, match=r"the weights do not load: .*compressed-tensors"
    ):
        load(str(tmp_path / "eight"), dtype="float32")
