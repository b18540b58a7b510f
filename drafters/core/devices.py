"""Where a GPU has to be handled differently from a CPU."""

import torch


def choose_kernels(device: torch.device) -> None:
    """Choose kernels of a GPU that PyTorch does not choose by default.

    - Attention without cuDNN. cuDNN builds a plan for each combination of sizes (68 ms on
      an H100), and a KV cache grows by a token a step: every step would wait for a plan.
      On Hopper, PyTorch prefers cuDNN; its flash and memory-efficient kernels take any
      length.
    - Convolutions of float32 in float32, not in TF32: states of a vision tower would
      differ from a CPU's by 1e-3.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def free_bytes(gpu: torch.device) -> int:
    """Memory of a GPU that this process can still take, with what PyTorch holds for reuse."""
    free, _ = torch.cuda.mem_get_info(gpu)
    for_reuse = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    return free + for_reuse
