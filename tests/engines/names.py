"""`make test-engine-names`: what our code in vLLM uses of it is in the wheels of all supported versions.

Not collected by name: it needs the wheels, which the target downloads. It runs nothing of vLLM.
"""

import ast
import os
import zipfile
from pathlib import Path

import pytest

from tests.engines.wheel import OURS, Module, Wheel, members, method
from vlmdistill.pipelines.cluster.engine_environment import SUPPORTED, supported

WHEELS = Path(os.environ.get("VLMDISTILL_WHEELS", "build/vllm-wheels"))
PLUGIN = f"{OURS}pipelines.vllm.plugin"
CAPTURE = tuple(
    f"{OURS}pipelines.vllm.capture.{name}" for name in ("server", "connector")
)
GPU = "vllm.v1.worker.gpu"

REACHED = {
    f"{GPU}.block_table:BlockTables": ("compute_slot_mappings", "input_block_tables"),
    f"{GPU}.model_states.default:DefaultModelState": (
        "prepare_attn",
        "encoder_cache",
        "supports_mm_inputs",
    ),
    f"{GPU}.mm.encoder_cache:EncoderCache": ("encoder_outputs", "mm_features"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "encoder_cache",
        "requests",
        "input_batch",
        "get_draft_model",
        "discard_request_mask",
        "sample_tokens",
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids", "num_reqs", "generators"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        *("mm_features", "num_prompt_tokens", "num_computed_tokens", "get_token_id"),
    ),
    "vllm.model_executor.models.interfaces:SupportsMultiModalEmbeddings": (
        *("supports_multimodal_embeddings", "embed_input_ids"),
    ),
    "vllm.model_executor.models.interfaces:SupportsMultiModal": (
        "get_language_model",
        "embed_input_ids",
    ),
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model": (
        *("_normalize_context_k", "_k_norm_weights", "_rms_norm_eps"),
        *("_build_fused_kv_buffers", "_fused_kv_weight", "_fused_kv_bias"),
    ),
    "vllm.config:VllmConfig": (
        "use_v2_model_runner",
        "speculative_config",
        "parallel_config",
    ),
    "vllm.config.parallel:ParallelConfig": (
        *(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
        ),
        *("prefill_context_parallel_size", "data_parallel_size"),
    ),
    "vllm.config.speculative:SpeculativeConfig": (
        *(
            "enable_adaptive_verification",
            "num_speculative_tokens",
            "method",
            "draft_model_config",
        ),
    ),
    "vllm.v1.worker.gpu_worker:Worker": (
        "model_runner",
        "speculative_config",
        "vllm_config",
    ),
    f"{GPU}.model_runner:GPUModelRunner": ("get_draft_model",),
    "vllm.distributed.parallel_state:GroupCoordinator": ("cpu_group", "world_size"),
    "vllm.config.scheduler:SchedulerConfig": (
        "disable_chunked_mm_input",
        "max_num_batched_tokens",
    ),
    "vllm.config.cache:CacheConfig": ("enable_prefix_caching",),
}
"""Members that are reached through objects without a type in our code."""

LIKE = {
    "EagleVlmdistill": (
        "vllm.model_executor.models.llama_eagle",
        "EagleLlamaForCausalLM",
    ),
    "DSparkVlmdistill": (
        "vllm.model_executor.models.qwen3_dspark",
        "Qwen3DSparkForCausalLM",
    ),
    "MedusaVlmdistill": ("vllm.model_executor.models.medusa", "Medusa"),
}
"""Models of ours that vLLM calls like one of its own."""


def wheels() -> list[Path]:
    return sorted(WHEELS.glob("vllm*.whl"))


def modules(wheel: Wheel, *first: str) -> dict[str, Module]:
    """These modules of ours and those that they import, by name."""
    found, left = dict[str, Module](), [*first]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = Module(name, wheel)
            left += found[name].needs()
    return found


def problems(wheel: Wheel, *first: str) -> list[str]:
    """What these modules, and those that they import, use of vLLM that a wheel lacks."""
    there = modules(wheel, *first)
    lacking = [line for module in there.values() for line in module.problems()]
    for name, (module, theirs) in LIKE.items():
        for made in (
            one.classes[name] for one in there.values() if name in one.classes
        ):
            chain = wheel.chain(module, theirs)
            for function in (
                "forward",
                "compute_logits",
                "embed_input_ids",
                "load_weights",
            ):
                mine, base = method([made], function), method(chain, function)
                if mine and base and not _takes(mine, base):
                    lacking.append(f"{name}.{function} differs from that of {theirs}")
    return lacking


def _takes(mine: ast.FunctionDef, base: ast.FunctionDef) -> bool:
    """Whether the arguments of `mine` are those of `base`, and then some with defaults."""
    own, theirs = ([one.arg for one in function.args.args] for function in (mine, base))
    return own[: len(theirs)] == theirs and len(own) - len(theirs) <= len(
        mine.args.defaults
    )


@pytest.mark.skipif(
    not wheels(), reason="no wheels: make test-engine-names downloads them"
)
@pytest.mark.parametrize("file", wheels(), ids=lambda file: file.name.split("-cp")[0])
def test_a_wheel_has_what_our_code_in_vllm_uses(file: Path) -> None:
    wheel = Wheel(file)
    release = (
        supported(wheel.version) or SUPPORTED[-1]
    )  # of a version to come: as the last one
    version = f"{PLUGIN}.v{release.replace('.', '_')}"
    ours = (f"{PLUGIN}.register", f"{PLUGIN}.served_model", f"{PLUGIN}.swap")
    assert problems(wheel, *ours, version, *CAPTURE) == []
    for place, names in REACHED.items():
        module, _, made = place.partition(":")
        assert set(names) <= members(wheel.chain(module, made)), place


def test_what_a_wheel_lacks_is_found(tmp_path: Path) -> None:
    """A wheel in which a class, a method, a parameter and a module are gone."""
    file = tmp_path / "vllm-0.32.0-py3.whl"
    with zipfile.ZipFile(file, "w") as made:
        for module, text in {
            "attn_utils": "def build_slot_mappings_by_layer(slots): ...",
            "input_batch": "class InputBatch:\n    num_reqs: int",
            "spec_decode/eagle/speculator": "class EagleSpeculator:\n    pass",
        }.items():
            made.writestr(f"vllm/v1/worker/gpu/{module}.py", text)
    found = "\n".join(problems(Wheel(file), f"{PLUGIN}.speculator"))
    for words in (
        "vllm.config has no VllmConfig",
        "build_slot_mappings_by_layer takes 1 arguments, and gets 2",
        "InputBatch has no query_start_loc",
        "nobody calls ServedSpeculator.on_multi_step_decode_begin",
        "reads self.block_tables, which EagleSpeculator does not have",
    ):
        assert words in found
