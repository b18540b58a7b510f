"""DeepSpeed, tamed: one way to start it on one process or many, on a GPU or none.

The only module that imports DeepSpeed.
"""

import atexit
import json
import logging
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmdistill.stores.errors import TrainingError

POINTER = "latest.json"
ADAM_BETAS = (0.9, 0.95)  # of EAGLE and all its descendants


def start(seed: int) -> tuple[int, int]:
    """Join the process group (a group of one when no launcher made one); returns rank and world size."""
    _environment()
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # On a CPU, DeepSpeed would compile a shared-memory collective with g++ at the first run: minutes, and
    # a stale lock when interrupted. Gloo alone serves.
    __compatible_ops__["deepspeed_shm_comm"] = False
    _quiet()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not torch.distributed.is_initialized():
        if "RANK" not in os.environ:
            # Without a launcher DeepSpeed would look for MPI. An address in the environment would do, but
            # child processes would inherit it.
            os.environ.setdefault("LOCAL_RANK", "0")
            alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group(backend, store=alone, rank=0, world_size=1)
        # The group is left at exit and not before: DeepSpeed remembers it, and a second run here uses it.
        atexit.register(_leave)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def barrier() -> None:
    """Wait for all ranks."""
    torch.distributed.barrier()


def build(module: nn.Module, *, clip: float, zero: int, dtype: torch.dtype) -> Any:
    """A DeepSpeed engine around the module: AdamW without decay, gradients clipped by norm.

    The learning rate is set before every step, the accumulation boundary by the trainer.
    """
    import deepspeed

    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=ADAM_BETAS, weight_decay=0.0)
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # one packed batch
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    return engine


def set_learning_rate(engine: Any, value: float) -> None:
    """One learning rate for all parameters, from now on."""
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def save(engine: Any, folder: Path, tag: str, state: dict[str, Any], signature: str) -> None:
    """Write a resumable checkpoint; the pointer to it moves when every rank's part is there.

    The checkpoint before it is removed afterwards.
    """
    try:
        engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(folder / tag, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"no checkpoint can be written to {folder} ({reason}); make room, then --resume from the last one"
        ) from None
    barrier()
    if torch.distributed.get_rank() == 0:
        world = torch.distributed.get_world_size()
        aside = folder / f".{POINTER}"
        aside.write_text(json.dumps({"tag": tag, "signature": signature, "world": world}))
        os.replace(aside, folder / POINTER)
        for old in folder.glob("step*"):
            if old.name != tag:
                shutil.rmtree(old, ignore_errors=True)


def resumable(folder: Path, signature: str, resume: bool) -> str | None:
    """The tag to continue from, if any; TrainingError when there is one that must not be continued."""
    file = folder / POINTER
    if not file.exists():
        return None
    try:
        pointer = json.loads(file.read_text())
        tag, owner, world = str(pointer["tag"]), pointer["signature"], int(pointer["world"])
    except (ValueError, KeyError, TypeError):
        raise TrainingError(f"{file} is corrupt: remove {folder} to start over") from None
    if not resume:
        raise TrainingError(
            f"an unfinished run is in {folder}: continue it with --resume, or --force to start over"
        )
    if owner != signature:
        raise TrainingError(
            f"the unfinished run in {folder} has other settings or data: repeat its settings to continue it, "
            "or --force to start over"
        )
    if world != int(os.environ.get("WORLD_SIZE", "1")):
        raise TrainingError(
            f"the unfinished run in {folder} ran on {world} ranks: continue it with --ranks {world}"
        )
    return tag


def load(engine: Any, folder: Path, tag: str) -> dict[str, Any]:
    """Continue from a checkpoint of `save`; returns its `state`. TrainingError when it is damaged."""
    try:
        _, state = engine.load_checkpoint(str(folder), tag=tag)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"the checkpoint {folder / tag} is damaged ({reason}); --force to start over"
        ) from None
    assert isinstance(state, dict)
    return state


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _environment() -> None:
    """What DeepSpeed reads from the environment before it is imported."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(tempfile.gettempdir()) / "vlmdistill_extensions"))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _quiet() -> None:
    """DeepSpeed logs to stdout, which belongs to results."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.lower().startswith("deepspeed") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.ERROR)
