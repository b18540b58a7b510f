"""The classes of vLLM 0.32 that the plugin replaces: those that draft, on each runner; and repairs on a CPU.

v1/worker/gpu_model_runner.py takes the proposers from v1/spec_decode when it is imported, and
v1/worker/gpu/spec_decode `init_speculator` the speculator when it needs one.
"""

V2_ONLY = False


def install() -> None:
    """Put our classes in the place of vLLM's."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.spec_decode import dflash, eagle, medusa
    from vllm.v1.worker.gpu.spec_decode.eagle import speculator

    from vlmdistill.pipelines.vllm.plugin.block_speculator import put_block_speculators
    from vlmdistill.pipelines.vllm.plugin.medusa import ServedMedusaProposer
    from vlmdistill.pipelines.vllm.plugin.proposer import (
        ChosenBlockProposer,
        ChosenProposer,
    )
    from vlmdistill.pipelines.vllm.plugin.speculator import ChosenSpeculator

    heads = "vlmdistill.pipelines.vllm.plugin.medusa:MedusaVlmdistill"
    ModelRegistry.register_model("MedusaVlmdistill", heads)
    eagle.EagleProposer = ChosenProposer
    medusa.MedusaProposer = ServedMedusaProposer
    dflash.DFlashProposer = ChosenBlockProposer
    speculator.EagleSpeculator = ChosenSpeculator
    put_block_speculators()
    if current_platform.is_cpu():
        _repair()


def _repair() -> None:
    """Repair faults that vLLM has on a CPU alone, see `cpu`."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vlmdistill.pipelines.vllm.plugin.cpu import (
        constraints,
        normed_keys,
        without_unfinished,
    )

    rejection_sampler.apply_sampling_constraints = constraints(
        rejection_sampler.apply_top_k_top_p
    )
    DFlashQwen3Model._normalize_context_k = normed_keys
    GPUModelRunner.sample_tokens = without_unfinished(GPUModelRunner.sample_tokens)
