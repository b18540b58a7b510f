"""Another version of a drafter in a running vLLM: its exported folder, loaded between two steps.

    VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls vlmdistill.pipelines.vllm.plugin.swap.Swap

`vlmdistill follow` names the folder, by vLLM's `POST /collective_rpc`.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vlmdistill.drafters.core.serving import KEY

SETTINGS, WEIGHTS = "config.json", "model.safetensors"
METHODS = ("eagle", "eagle3")
"""By vLLM's names. Of block drafters it keeps copies that it fuses from the weights at its start."""


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
        if self.speculative_config is None or self.speculative_config.draft_model_config is None:
            return "vLLM was started without a drafter"
        config, method = self.speculative_config.draft_model_config, self.speculative_config.method
        if method not in METHODS:
            return f"vLLM loads no other {method} while it runs: restart it with {folder}"
        if refused := differs(Path(folder), Path(config.model)):
            return refused
        model = self.model_runner.get_draft_model()
        # Not in place: on a CPU, vLLM has packed the weights and dropped the tensors that hold them.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(load_file(Path(folder) / WEIGHTS).items())
            finally:
                finalize_layerwise_reload(model, config)
        return ""


def differs(folder: Path, used: Path) -> str:
    """Why a folder is not another version of the drafter in `used`; empty if it is one."""
    try:
        mine, theirs = _described(folder), _described(used)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{folder} cannot be loaded: {error}"
    if unlike := sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)):
        return (
            f"{folder} is not another version of the drafter in {used}: {unlike[0]} differs: export it in "
            "the same dtype, or restart vLLM with it"
        )
    return ""


def _described(folder: Path) -> dict[str, Any]:
    """What versions of a drafter have in common: settings, target, and the shapes of weights by name."""
    settings = json.loads((folder / SETTINGS).read_text())
    feeding = settings.pop(KEY)
    trained = feeding.pop("trained") or {}
    target = {name: trained.get(name) for name in ("config_hash", "weights_hash")}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
        shapes = {key: (one.get_shape(), one.get_dtype()) for key, one in slices.items()}
    return {**settings, **feeding, **target, **shapes}
