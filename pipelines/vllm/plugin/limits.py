"""What the plugin supports; everything else is refused in one line before a request is served."""

from typing import Any

import msgspec
import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.serving import KEY, Feeding
from vlmdistill.pipelines.cluster.environment import SUPPORTED
from vlmdistill.stores.errors import DataError


def check_version(version: str) -> None:
    """ValueError unless the plugin knows this version of vLLM."""
    if not version.startswith(f"{SUPPORTED}."):
        raise ValueError(
            f"vlmdistill serves drafters with vLLM {SUPPORTED}, and this is vLLM {version}: install "
            f"vllm=={SUPPORTED}.*, or set VLLM_PLUGINS='' to run vLLM without the plugin"
        )


def feeding_of(vllm_config: Any) -> Feeding | None:
    """How the drafter that vLLM is to run must be fed; None when it is not one of ours."""
    speculative = vllm_config.speculative_config
    settings = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    found = getattr(settings, KEY, None)
    if found is None:
        return None
    try:
        return msgspec.convert(found, Feeding)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"config.json of the drafter: {KEY}: {error}; export it again with this version of vlmdistill"
        ) from None


def drafter_of(feeding: Feeding) -> EagleDrafter:
    """The exported drafter, without its weights; its tables are the target's, which vLLM holds."""
    assert feeding.built is not None, "vLLM builds this class only for drafters that are one EagleBlock"
    none_0D = torch.empty(0, feeding.built.target.hidden_size)
    try:
        kind = catalogue.trained(feeding.drafter)
        config = kind.Config(**feeding.built.config)
    except (TypeError, DataError) as error:
        raise ValueError(
            f"config.json of the drafter: {error}; export it again with this version of vlmdistill"
        ) from None
    drafter = kind(config, feeding.built.target, Head(none_0D, none_0D))
    assert isinstance(drafter, EagleDrafter)
    return drafter.eval()


def check_limits(vllm_config: Any, feeding: Feeding) -> None:
    """ValueError when vLLM is to run the drafter in a way that the plugin does not support."""
    parallel = vllm_config.parallel_config
    sizes = ["tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"]
    if vllm_config.use_v2_model_runner:
        sizes += ["prefill_context_parallel_size", "data_parallel_size"]
        if vllm_config.speculative_config.enable_adaptive_verification:
            raise ValueError(
                "vlmdistill's drafters do not run with adaptive verification: set "
                "enable_adaptive_verification to false"
            )
    for name in sizes:
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(f"vlmdistill's drafters do not run with {name}={size}: set it to 1")
    if feeding.visual == "dropped" and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"{feeding.drafter} drops visual tokens from the drafter's KV cache, which prefix caching cannot "
            "share: start vLLM with --no-enable-prefix-caching"
        )
    asked = vllm_config.speculative_config.num_speculative_tokens
    if 0 < feeding.draft_tokens < asked:
        raise ValueError(
            f"num_speculative_tokens={asked}, and {feeding.drafter} drafts at most {feeding.draft_tokens} "
            f"tokens: set it to {feeding.draft_tokens}"
        )
    if feeding.whole_images and not vllm_config.scheduler_config.disable_chunked_mm_input:
        raise ValueError(
            f"{feeding.drafter} compresses an image from the states of all its tokens, which must be in one "
            "step: start vLLM with --disable-chunked-mm-input"
        )
