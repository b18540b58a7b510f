"""The classes of vLLM 0.33 that the plugin replaces: those that draft on the V2 runner.

Its V1 runner is deprecated and not supported (`limits.check_limits`), and it has no drafters with heads.
"""

V2_ONLY = True


def install() -> None:
    """Put our classes in the place of vLLM's, which `init_speculator` looks up when it needs one."""
    from vllm.v1.worker.gpu.spec_decode.eagle import speculator

    from vlmdistill.pipelines.vllm.plugin.block_speculator import put_block_speculators
    from vlmdistill.pipelines.vllm.plugin.speculator import ChosenSpeculator

    speculator.EagleSpeculator = ChosenSpeculator
    put_block_speculators()
