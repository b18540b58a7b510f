"""Exported block drafters: what vLLM's own classes compute from the folder is what the drafter computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters import synthetic
from tests.drafters.checkpoints.test_export import saved
from tests.drafters.synthetic import INFO, LAYOUTS, batch
from tests.drafters.test_dflash import drafted
from vlmdistill.drafters.checkpoints import checkpoint, published
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.dflash import DFlash
from vlmdistill.stores.errors import TrainingError

WHOLE: dict[str, Any] = {
    "context": "all",
    "positions": "expanded",
    "taps": (0, 2, 3),
    "layers": 2,
}
SPARK: dict[str, Any] = {"markov": 3, "tells": True, "from_anchor": True}
CASES: dict[str, dict[str, Any]] = {
    "a token's embedding": {**WHOLE, "mask": 5},
    "a learned mask": WHOLE,
    "DSpark": {**WHOLE, **SPARK, "mask": 5},
    "DSpark from the mask": {**WHOLE, "markov": 3, "mask": 5, "kv_heads": "all"},
}


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_is_read_back_as_the_same_drafter(
    case: str, tmp_path: Path
) -> None:
    """The import is compared with the authors' codes: the target's layers, masks, heads, the first slot."""
    folder, drafter = saved(tmp_path / "dflash", "dflash", **CASES[case])
    written = export(folder, tmp_path / "out", "float32")
    published.load(
        tmp_path / "out",
        "dflash",
        synthetic.head(),
        INFO,
        tmp_path / "back",
        synthetic.provenance(),
    )
    back = checkpoint.load(tmp_path / "back", synthetic.head(), INFO)
    assert isinstance(back, DFlash)
    assert isinstance(drafter, DFlash)
    one = batch([LAYOUTS["several images"]], drafter.config.needs(INFO))
    (mine_1X, tree), (other_1X, other) = (
        drafted(drafter, one, "chain-8"),
        drafted(back, one, "chain-8"),
    )
    torch.testing.assert_close(mine_1X, other_1X)
    assert tree.ids_N.tolist() == other.ids_N.tolist()
    assert len(tree.ids_N) == 1 + written.draft_tokens == 1 + drafter.config.max_hops


@torch.no_grad()
def test_a_mask_that_differs_in_one_bit_is_another_export(tmp_path: Path) -> None:
    folder, drafter = saved(tmp_path / "dflash", "dflash", **WHOLE)
    first = export(folder, tmp_path / "out", "float32")
    assert export(folder, tmp_path / "out", "float32") == first
    assert isinstance(drafter, DFlash)
    drafter.mask_D.copy_(drafter.mask_D.nextafter(drafter.mask_D + 1))
    synthetic.save("dflash", tmp_path / "other", drafter)
    with pytest.raises(TrainingError, match="exists: name a new folder"):
        export(tmp_path / "other", tmp_path / "out", "float32")


@pytest.mark.parametrize("settings", [{}, SPARK, WHOLE, {**WHOLE, **SPARK}], ids=str)
def test_an_engine_is_told_what_it_would_get_wrong(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder, drafter = saved(tmp_path / "dflash", "dflash", **settings)
    written = export(folder, tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block, spark = (
        {**config, **config.get("dflash_config", {})},
        bool(settings.get("markov")),
    )
    assert written.method == ("dspark" if spark else "dflash")
    # vLLM adds one; and what does not say that it is not causal and has no window may be so.
    assert block["target_layer_ids"] == [tap - 1 for tap in drafter.taps]
    assert block["is_causal" if spark else "causal"] is False
    assert {*config["layer_types"]} == {"full_attention"}
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert config["rope_scaling"] is None
    # The LM head and the embeddings stay the target's.
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {name for name in tensors if "lm_head" in name or "embed_tokens" in name}
    # What vLLM alone would draft otherwise, it cannot load.
    needs_plugin = settings.get("context") != "all" or spark
    assert needs_plugin == (
        "vlmdistill" in tensors or "DFlashVlmdistill" in config["architectures"]
    )
    assert written.drops_visual == (settings.get("context") != "all")
    assert (tmp_path / "out" / "mask_embedding.pt").exists() == (not spark)
    export(folder, tmp_path / "out", "float32")  # the same again writes nothing
    with pytest.raises(TrainingError, match="exists"):
        export(folder, tmp_path / "out", "bfloat16")


@pytest.mark.parametrize(
    "odd",
    [
        {"from_anchor": True},
        {"draft_vocab": 9},
        {"positions": "expanded"},
        {"taps": (3, 1)},
        {**WHOLE, "positions": "target"},
    ],
    ids=str,
)
def test_what_no_engine_has_is_refused_in_one_line(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path / "dflash", "dflash", **odd)
    name = next(
        name
        for name in ("from_anchor", "draft_vocab", "taps", "positions")
        if name in odd
    )
    with pytest.raises(
        TrainingError, match=name if "context" not in odd else "positions"
    ):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
