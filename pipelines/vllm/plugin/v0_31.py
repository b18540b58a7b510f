"""The classes of vLLM 0.31 that the plugin replaces: the same as in 0.32."""

from vlmdistill.pipelines.vllm.plugin.v0_32 import V2_ONLY, install

__all__ = ["V2_ONLY", "install"]
