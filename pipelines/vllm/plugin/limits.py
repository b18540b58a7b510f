"""The limits of the plugin: all that it does not support is refused before vLLM starts an engine."""

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.serving import KEY, Feeding
from vlmdistill.pipelines.cluster.engine_environment import VERSIONS, supported
from vlmdistill.pipelines.targets.checkpoints.fingerprint import fingerprint
from vlmdistill.pipelines.targets.checkpoints.folder import locate
from vlmdistill.pipelines.targets.checkpoints.template import served_otherwise
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import agree

OTHER_TARGET = "VLMDISTILL_OTHER_TARGET"  # set to 1: a drafter of another target is warned of, not refused


def check_version(version: str) -> str:
    """The release of a version of vLLM, such as 0.32; ValueError unless the plugin knows it."""
    release = supported(version)
    if release is None:
        raise ValueError(
            f"vlmdistill serves drafters with {VERSIONS}, and this is vLLM {version}: install one of "
            "these, or set VLLM_PLUGINS='' to run vLLM without the plugin"
        )
    return release


def feeding_of(vllm_config: Any) -> Feeding | None:
    """How the drafter that vLLM is to run must be fed; None when it is not one of ours."""
    draft_config = getattr(vllm_config.speculative_config, "draft_model_config", None)
    settings = getattr(draft_config, "hf_config", None)
    feeding = getattr(settings, KEY, None)
    if feeding is None:
        return None
    try:
        return msgspec.convert(feeding, Feeding)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"config.json of the drafter: {KEY}: {error}; export it again with this version of vlmdistill"
        ) from None


def drafter_of(feeding: Feeding) -> EagleDrafter:
    """The exported drafter, without its weights; its tables are the target's, which vLLM holds."""
    assert feeding.built is not None, (
        "vLLM builds this class only for drafters that are one EagleBlock"
    )
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


def check(
    vllm_config: Any, warn: Callable[[str], object], *, v2_only: bool = False
) -> None:
    """ValueError when vLLM is to run an exported drafter otherwise than it was trained, or as nobody can.

    A drafter of other origin passes. `warn` gets a line on what cannot be compared. `v2_only`: the plugin has
    no V1 runner of this version.
    """
    feeding = feeding_of(vllm_config)
    if feeding is not None:
        if v2_only and not vllm_config.use_v2_model_runner:
            raise ValueError(
                "vlmdistill's drafters run on the V2 runner alone in this version of vLLM: unset "
                "VLLM_USE_V2_MODEL_RUNNER, and see the log for what made it choose V1; or install vLLM 0.32"
            )
        check_limits(vllm_config, feeding)
        check_target(vllm_config.model_config.model, feeding, warn)


def check_target(model: str, feeding: Feeding, warn: Callable[[str], object]) -> None:
    """ValueError when `model`, a folder or a hub id, is not the target that the drafter was trained for.

    A hub id that is not downloaded yet cannot be compared, which `warn` is told.
    """
    trained = feeding.trained
    if trained is None:
        raise ValueError(
            f"{feeding.drafter}: its config.json names no target: export it again"
        )
    try:
        location = locate(model)
        if location.folder is None:
            raise TargetError(location.lacking)
        if difference := served_otherwise(trained, location.folder, sys.argv):
            warn(f"{feeding.drafter}: {difference}")
        hashes = fingerprint(location.folder, None)
    except TargetError as error:
        warn(
            f"vlmdistill cannot tell whether {feeding.drafter} was trained for this target: {error}"
        )
        return
    for field, served in (
        ("config_hash", hashes.config),
        ("weights_hash", hashes.weights),
    ):
        expected = getattr(trained, field)
        if agree(expected, served):
            continue
        line = (
            f"{feeding.drafter} was trained for another target ({trained.target}): {field} of {model} is "
            f"{served}, not {expected}: few of its tokens would be accepted"
        )
        if os.environ.get(OTHER_TARGET) != "1":
            raise ValueError(
                f"{line}. Serve it with its own target, or set {OTHER_TARGET}=1"
            )
        warn(line)
        return


def check_limits(vllm_config: Any, feeding: Feeding) -> None:
    """ValueError when vLLM is to run the drafter in a way that the plugin does not support."""
    parallel = vllm_config.parallel_config
    sizes = ["pipeline_parallel_size", "decode_context_parallel_size"]
    if vllm_config.use_v2_model_runner:
        sizes += ["prefill_context_parallel_size", "data_parallel_size"]
        if vllm_config.speculative_config.enable_adaptive_verification:
            raise ValueError(
                "vlmdistill's drafters do not run with adaptive verification: set "
                "enable_adaptive_verification to false"
            )
    elif vllm_config.speculative_config.method == "dspark":
        raise ValueError(
            "vLLM's V1 runner has no dspark: start vLLM with VLLM_USE_V2_MODEL_RUNNER=1, or train dflash"
        )
    for name in sizes:
        size = getattr(parallel, name)
        if size > 1:
            raise ValueError(
                f"vlmdistill's drafters do not run with {name}={size}: set it to 1"
            )
    if feeding.visual == "dropped" and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"{feeding.drafter} drops visual tokens from the drafter's KV cache, which prefix caching cannot "
            "share: start vLLM with --no-enable-prefix-caching"
        )
    tokens = vllm_config.speculative_config.num_speculative_tokens
    if 0 < feeding.draft_tokens < tokens:
        raise ValueError(
            f"num_speculative_tokens={tokens}, and {feeding.drafter} drafts at most {feeding.draft_tokens} "
            f"tokens: set it to {feeding.draft_tokens}"
        )
    may_split_images = not vllm_config.scheduler_config.disable_chunked_mm_input
    if feeding.whole_images and may_split_images:
        raise ValueError(
            f"{feeding.drafter} compresses an image from the states of all its tokens, which must be in one "
            "step: start vLLM with --disable-chunked-mm-input"
        )
