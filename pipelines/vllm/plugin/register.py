"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""


def register() -> None:
    """Add the drafter classes to vLLM's registry, and what feeds them on each runner.

    vLLM 0.32 loads plugins in plugins/__init__.py `load_general_plugins`, before it imports
    v1/worker/gpu_model_runner.py, which takes the proposers from v1/spec_decode. The V2 runner imports its
    speculator when it needs one. Drafters of other origin run unchanged. ValueError on another version.
    """
    import vllm
    from vllm import ModelRegistry

    from vlmdistill.pipelines.vllm.plugin.limits import check_version

    check_version(vllm.__version__)
    models = "vlmdistill.pipelines.vllm.plugin.served_model"
    ModelRegistry.register_model("EagleVlmdistill", f"{models}:EagleVlmdistill")
    ModelRegistry.register_model("Eagle3BlockVlmdistill", f"{models}:Eagle3BlockVlmdistill")
    ModelRegistry.register_model("MedusaVlmdistill", f"{models}:MedusaVlmdistill")
    ModelRegistry.register_model("LlamaForCausalLMEagle3", f"{models}:Eagle3Vlmdistill")

    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import eagle, medusa
    from vllm.v1.worker.gpu.spec_decode.eagle import speculator

    from vlmdistill.pipelines.vllm.plugin.proposer import ChosenProposer, ServedMedusaProposer
    from vlmdistill.pipelines.vllm.plugin.speculator import ChosenSpeculator
    from vlmdistill.pipelines.vllm.plugin.verification import expand_batch_to_tokens

    eagle.EagleProposer = ChosenProposer
    medusa.MedusaProposer = ServedMedusaProposer
    speculator.EagleSpeculator = ChosenSpeculator
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
