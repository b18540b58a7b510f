"""What code for a CPU and for a GPU has to do differently."""

import torch


def use_kernels_of_any_length(device: torch.device) -> None:
    """Take cuDNN out of PyTorch's choice of attention kernels on a GPU.

    cuDNN builds a plan for each combination of sizes (68 ms on an H100), and a KV cache
    grows by a token a step: every step would wait for a plan. On Hopper, PyTorch prefers
    cuDNN. Its flash and memory-efficient kernels take any length.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def free_bytes(gpu: torch.device) -> int:
    """Memory of a GPU that this process can still take, with what PyTorch holds for reuse."""
    free, _ = torch.cuda.mem_get_info(gpu)
    return free + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
