"""Weights of a drafter, which a stranger may have written."""

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from vlmdistill.stores.input_files import read_bytes


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    OSError if it is missing or no regular file, SafetensorError if it is damaged. `load_file` of safetensors
    opens the file and reads it while it holds the interpreter's lock: a FIFO, or a disk of the network that
    does not answer, would stop every thread of a server.
    """
    return load(read_bytes(file))
