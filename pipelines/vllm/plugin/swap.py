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
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vlmdistill.drafters.checkpoints.weights import read_weights
from vlmdistill.drafters.core.serving import KEY
from vlmdistill.stores.input_files import read_bytes, regular
from vlmdistill.stores.schema import agree

SETTINGS, WEIGHTS = "config.json", "model.safetensors"
HASHES = ("config_hash", "weights_hash")  # of the target
METHODS = ("eagle", "eagle3", "dflash", "dspark", "medusa")
"""By vLLM's names: those whose drafters it loads from a folder that we export."""
FUSED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
"""Copies of the weights of a block drafter's layers, by which vLLM writes the entries of the context."""


class Swap:
    """The methods that vLLM adds to its workers."""

    model_runner: Any
    speculative_config: Any
    vllm_config: Any

    def load_drafter(self, folder: str) -> str:
        """Draft with the weights of an exported folder from the next step on.

        Why not, in one line, if it is not another version of the drafter that vLLM was started with, which
        then goes on; else an empty string.
        """
        speculative = self.speculative_config
        if speculative is None or speculative.draft_model_config is None:
            return "vLLM was started without a drafter"
        if speculative.method not in METHODS:
            return f"vLLM loads no other {speculative.method} while it runs: restart it with {folder}"
        config = speculative.draft_model_config
        used = config.model
        weights = dict[str, Tensor]()
        refusal = differs(Path(folder), Path(used))
        if not refusal:
            weights, refusal = read(Path(folder))
        refusal = first_refusal(refusal)
        if refusal:
            return refusal
        model = self.model_runner.get_draft_model()
        inner = getattr(model, "model", None)
        copies = {name: getattr(inner, name, None) for name in FUSED}
        fused = {name: copy for name, copy in copies.items() if copy is not None}
        # Not in place: on a CPU, vLLM has packed the weights and dropped the tensors that hold them.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            config.model = folder  # where vLLM looks for a mask of DFlash
            try:
                model.load_weights(weights.items())
            finally:
                config.model = used
                finalize_layerwise_reload(model, config)
        if fused:
            fuse(inner, fused)
        clean_cache(model)
        return ""


@torch.no_grad()
def fuse(drafter: Any, fused: dict[str, Tensor]) -> None:
    """Update the copies of a block drafter's weights in place: captured graphs read these tensors.

    The weights of keys and values may be packed, so they are read off a product with the identity.
    """
    drafter._build_fused_kv_buffers()
    weight = fused.get("_fused_kv_weight")
    if weight is not None:
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        keys_and_values = list[Tensor]()
        for layer in drafter.layers:
            attention = layer.self_attn
            projection = attention.qkv_proj
            product = projection.quant_method.apply(projection, identity)
            keys_and_values.append(product[:, attention.q_size :])
        drafter._fused_kv_weight = torch.cat(keys_and_values, dim=1).t()
    for name, copy in fused.items():
        setattr(drafter, name, copy.copy_(getattr(drafter, name)))


def read(folder: Path) -> tuple[dict[str, Tensor], str]:
    """The weights of an exported folder, and why they cannot be used: an empty text if they can."""
    file = folder / WEIGHTS
    try:
        weights = read_weights(file)
    except (OSError, SafetensorError) as error:
        return {}, f"{folder} cannot be loaded: {error}"
    for name, weight in weights.items():
        if not weight.isfinite().all():
            why = f"{name} has values that are not finite"
            return {}, f"{file} cannot be loaded: {why}"
    return weights, ""


def first_refusal(refusal: str) -> str:
    """Why one of the processes that share each layer refuses a version: all load it, or none.

    They read the folder each for itself, perhaps on other machines.
    """
    group = get_tp_group()
    refusals = [""] * group.world_size
    torch.distributed.all_gather_object(refusals, refusal, group=group.cpu_group)
    return next(filter(None, refusals), "")


@torch.no_grad()
def clean_cache(model: torch.nn.Module) -> None:
    """Replace what is not finite in a drafter's KV cache, as another version may have left it.

    Attention reads entries of blocks that are used again with weight 0, and 0 x NaN is NaN.
    """
    for layer in model.modules():
        cache = getattr(layer, "kv_cache", None)
        if isinstance(cache, Tensor) and cache.is_floating_point():
            cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def differs(folder: Path, used: Path) -> str:
    """Why a folder is not another version of the drafter in `used`; empty if it is one."""
    try:
        new_facts = _described(folder)
        used_facts = _described(used)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{folder} cannot be loaded: {error}"
    for name in sorted({*new_facts, *used_facts}):
        new_fact, used_fact = new_facts.get(name), used_facts.get(name)
        is_target = name in HASHES and agree(str(new_fact), str(used_fact))
        if not is_target and new_fact != used_fact:
            return (
                f"{folder} is not another version of the drafter in {used}: {name} differs: export it in "
                "the same dtype, or restart vLLM with it"
            )
    return ""


def _described(folder: Path) -> dict[str, Any]:
    """The facts that versions of a drafter share: settings, target, and the shapes of weights by name."""
    settings = json.loads(read_bytes(folder / SETTINGS))
    feeding = settings.pop(KEY)
    trained = feeding.pop("trained") or {}
    target = {name: str(trained.get(name)) for name in HASHES}
    with safe_open(regular(folder / WEIGHTS), framework="pt") as file:
        shapes = {}
        for key in file.keys():  # noqa: SIM118 (it is no mapping)
            weight = file.get_slice(key)
            shapes[key] = (weight.get_shape(), weight.get_dtype())
    return {**settings, **feeding, **target, **shapes}
