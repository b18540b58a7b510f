"""Another version of a drafter in a running vLLM: its exported folder, loaded between two steps.

    VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls vlmdistill.pipelines.vllm.plugin.swap.Swap

`vlmdistill follow` names the folder, by vLLM's `POST /collective_rpc`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.serving import KEY
from vlmdistill.stores.input_files import read_bytes, regular

SETTINGS, WEIGHTS = "config.json", "model.safetensors"
METHODS = ("eagle", "eagle3", "dflash", "dspark", "medusa")
"""By vLLM's names: those whose drafters it loads from a folder that we export."""
FUSED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
"""Copies of the weights of a block drafter's layers, by which vLLM writes the entries of the context."""


class Swap:
    """What vLLM adds to its workers."""

    model_runner: Any
    speculative_config: Any
    vllm_config: Any

    def load_drafter(self, folder: str) -> str:
        """Draft with the weights of an exported folder from the next step on.

        Why not, in one line, if it is not another version of the drafter that vLLM was started with, which
        then goes on; else an empty string.
        """
        if (
            self.speculative_config is None
            or self.speculative_config.draft_model_config is None
        ):
            return "vLLM was started without a drafter"
        config, method = (
            self.speculative_config.draft_model_config,
            self.speculative_config.method,
        )
        if method not in METHODS:
            return (
                f"vLLM loads no other {method} while it runs: restart it with {folder}"
            )
        used = config.model
        if refused := differs(Path(folder), Path(used)):
            return refused
        model = self.model_runner.get_draft_model()
        inner = getattr(model, "model", None)
        fused = {
            name: copy
            for name in FUSED
            if (copy := getattr(inner, name, None)) is not None
        }
        # Not in place: on a CPU, vLLM has packed the weights and dropped the tensors that hold them.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            config.model = folder  # where vLLM looks for a mask of DFlash
            try:
                model.load_weights(read_weights(Path(folder) / WEIGHTS).items())
            finally:
                config.model = used
                finalize_layerwise_reload(model, config)
        if fused:
            fuse(inner, fused)
        return ""


@torch.no_grad()
def fuse(drafter: Any, fused: dict[str, Tensor]) -> None:
    """Bring the copies of a block drafter's weights up to date, in the tensors that captured graphs read.

    The keys and values of its layers may be packed, so that they are taken from a product with the identity.
    """
    drafter._build_fused_kv_buffers()
    if (weight := fused.get("_fused_kv_weight")) is not None:
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        layers = [layer.self_attn for layer in drafter.layers]
        states = [
            one.qkv_proj.quant_method.apply(one.qkv_proj, identity)[:, one.q_size :]
            for one in layers
        ]
        drafter._fused_kv_weight = torch.cat(states, dim=1).t()
    for name, copy in fused.items():
        setattr(drafter, name, copy.copy_(getattr(drafter, name)))


def differs(folder: Path, used: Path) -> str:
    """Why a folder is not another version of the drafter in `used`; empty if it is one."""
    try:
        mine, theirs = _described(folder), _described(used)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{folder} cannot be loaded: {error}"
    if unlike := sorted(
        name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)
    ):
        return (
            f"{folder} is not another version of the drafter in {used}: {unlike[0]} differs: export it in "
            "the same dtype, or restart vLLM with it"
        )
    return ""


def _described(folder: Path) -> dict[str, Any]:
    """What versions of a drafter have in common: settings, target, and the shapes of weights by name."""
    settings = json.loads(read_bytes(folder / SETTINGS))
    feeding = settings.pop(KEY)
    trained = feeding.pop("trained") or {}
    target = {name: trained.get(name) for name in ("config_hash", "weights_hash")}
    with safe_open(regular(folder / WEIGHTS), framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
        shapes = {
            key: (one.get_shape(), one.get_dtype()) for key, one in slices.items()
        }
    return {**settings, **feeding, **target, **shapes}
