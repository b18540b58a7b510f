"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

import functools
import importlib
from typing import Any


def register() -> None:
    """Add the drafter classes to vLLM's registry, and what feeds them on each runner.

    vLLM loads plugins (plugins/__init__.py `load_general_plugins`) before it makes a configuration and before
    it imports a runner. What differs between versions is in a module for each, such as `v0_32`; ValueError on
    a version that has none. Drafters of other origin run unchanged.
    """
    import vllm
    from vllm import ModelRegistry

    from vlmdistill.pipelines.vllm.plugin.limits import check_version

    version = importlib.import_module(
        f"vlmdistill.pipelines.vllm.plugin.v{check_version(vllm.__version__).replace('.', '_')}"
    )
    models = "vlmdistill.pipelines.vllm.plugin.served_model"
    ModelRegistry.register_model("EagleVlmdistill", f"{models}:EagleVlmdistill")
    ModelRegistry.register_model(
        "Eagle3BlockVlmdistill", f"{models}:Eagle3BlockVlmdistill"
    )
    ModelRegistry.register_model("LlamaForCausalLMEagle3", f"{models}:Eagle3Vlmdistill")
    ModelRegistry.register_model("Qwen3DSparkModel", f"{models}:DSparkVlmdistill")
    # vLLM's own, by a name that it does not know without the plugin: the runner's classes feed it text alone.
    dflash = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
    ModelRegistry.register_model("DFlashVlmdistill", dflash)
    version.install()
    _check_first(version.V2_ONLY)


def _check_first(v2_only: bool) -> None:
    """Let vLLM refuse what does not run when it makes its configuration: before it starts an engine.

    The refusal is then the last line of its log; in an engine's process it would be one of many.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger

    from vlmdistill.pipelines.vllm.plugin.limits import check

    make = EngineArgs.create_engine_config

    @functools.wraps(make)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        check(made, init_logger("vllm.vlmdistill").warning, v2_only=v2_only)
        return made

    EngineArgs.create_engine_config = checked
