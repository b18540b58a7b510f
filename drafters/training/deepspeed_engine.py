"""The DeepSpeed engine: start it on any number of processes and devices, and save and restore its state.

The only module that imports DeepSpeed.
"""

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from vlmdistill.drafters.training import ranks

ADAM_BETAS = (0.9, 0.95)  # of EAGLE and all its descendants
WEIGHT, BUFFER, STEP, MOMENTS, BEST = (
    "weight",
    "buffer",
    "step",
    ("exp_avg", "exp_avg_sq"),
    "best",
)


class PartEntry(NamedTuple):
    """One tensor of a state: `<kind>/<name of the weight>`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def build(module: nn.Module, *, clip: float, zero: int, dtype: torch.dtype) -> Any:
    """A DeepSpeed engine around the module: AdamW without decay, gradients clipped by norm.

    The learning rate is set before every step, the accumulation boundary by the trainer.
    """
    _start()
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
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=settings
    )
    return engine


def set_learning_rate(engine: Any, value: float) -> None:
    """One learning rate for all parameters, from now on."""
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def step(engine: Any) -> Tensor | float:
    """One optimizer step if this is its last micro-batch; returns its gradient's norm before clipping."""
    measured = (
        engine.zero_optimization() or engine.bfloat16_enabled()
    )  # by DeepSpeed's own optimizers
    gradients = [one.grad for one in engine.module.parameters() if one.grad is not None]
    norm: Tensor | float = 0.0 if measured else nn.utils.get_total_norm(gradients)
    engine.step()
    if measured:
        known: Tensor | float | None = engine.get_global_grad_norm()
        norm = (
            0.0 if known is None else known
        )  # not `or`: a GPU would be asked what it is
    return norm


def weights(engine: Any) -> dict[str, Tensor]:
    """The trained weights as they compute now, as tensors of a state: the best ones that a run keeps."""
    trained = [
        (name, one)
        for name, one in engine.module.named_parameters()
        if one.requires_grad
    ]
    return {
        f"{BEST}/{name}": one.detach().float().cpu().clone() for name, one in trained
    }


def set_weights(engine: Any, best: Mapping[str, Tensor]) -> None:
    """Let the module compute with these `weights`; its optimizer keeps its own."""
    for name, one in engine.module.named_parameters():
        if one.requires_grad:
            one.data.copy_(best[f"{BEST}/{name}"])


# The state of a run, the same for any number of ranks and any ZeRO stage.


def state(engine: Any) -> dict[str, Tensor]:
    """Weights in float32, Adam's moments and steps, and buffers: gathered from all ranks, kept on rank 0.

    A weight that has had no gradient yet has no moments.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    kept: dict[str, Tensor] = {}

    def keep(kind: str, name: str, value: Tensor) -> None:
        if ranks.is_first():
            kept[f"{kind}/{name}"] = value.detach().cpu().contiguous()

    for name, weight, held in _weights(engine):
        if isinstance(held, _Shard):
            keep(WEIGHT, name, safe_get_full_fp32_param(weight))
            for moment in MOMENTS:
                keep(moment, name, safe_get_full_optimizer_state(weight, moment))
            keep(STEP, name, held.adam[STEP].clone())
        else:
            keep(WEIGHT, name, held)
            for moment, value in engine.optimizer.state.get(held, {}).items():
                keep(moment, name, value)
    for name, value in _buffers(engine).items():
        keep(BUFFER, name, value)
    return kept


def expected(engine: Any, best: bool = False) -> dict[str, PartEntry]:
    """Every tensor that a checkpoint may hold, by its key: of `state`, and with `best` of `weights`."""
    entries = [
        PartEntry(f"{BUFFER}/{name}", tuple(one.shape), one.dtype)
        for name, one in _buffers(engine).items()
    ]
    for name, weight, _ in _weights(engine):
        for kind in (WEIGHT, *MOMENTS, *[BEST][: int(best)]):
            entries.append(
                PartEntry(f"{kind}/{name}", tuple(weight.shape), torch.float32)
            )
        entries.append(PartEntry(f"{STEP}/{name}", (), torch.float32))
    return {entry.key: entry for entry in entries}


def restore(
    engine: Any,
    entries: Sequence[PartEntry],
    tensors: Mapping[str, Tensor],
    source: int,
) -> dict[str, Tensor]:
    """Load a `state`: all ranks know its `entries`, the rank `source` has its tensors.

    Returns the best weights among them.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    best: dict[str, Tensor] = {}
    live = engine.module.state_dict()
    weights = {name: (weight, held) for name, weight, held in _weights(engine)}
    for key, shape, dtype in entries:
        kind, _, name = key.partition("/")
        value = tensors[key] if tensors else torch.empty(shape, dtype=dtype)
        value = ranks.shared(value.to(engine.device), source)
        if kind == BEST and ranks.is_first():
            best[key] = value.cpu()
        if kind in (WEIGHT, BUFFER):
            live[name].copy_(value)
        if kind in (BUFFER, BEST):
            continue
        weight, held = weights[name]
        if kind == STEP:
            value = value.cpu()  # where AdamW keeps it
        if not isinstance(held, _Shard):
            if kind == WEIGHT:
                held.data.copy_(value)
            else:
                engine.optimizer.state[held][kind] = value
        elif kind == WEIGHT:
            safe_set_full_fp32_param(weight, value)
        elif kind == STEP:
            held.adam[STEP].fill_(value)
        else:
            safe_set_full_optimizer_state(weight, value, kind)
    return best


class _Shard(NamedTuple):
    """ZeRO's part of the weights on this rank, in one flat tensor, by the state that Adam has of it."""

    adam: dict[str, Tensor]


def _weights(engine: Any) -> Iterator[tuple[str, nn.Parameter, Tensor | _Shard]]:
    """Each trained weight, and its form in the optimizer: its float32 copy (or itself), or a shard."""
    (group,) = engine.optimizer.param_groups
    trained = [
        (name, one)
        for name, one in engine.module.named_parameters()
        if one.requires_grad
    ]
    if not engine.zero_optimization():
        for (name, weight), held in zip(trained, group["params"], strict=True):
            yield name, weight, held
        return
    (flat,) = group["params"]
    adam = engine.optimizer.optimizer.state[flat]
    if (
        not adam
    ):  # AdamW makes it at the first step, and DeepSpeed then links it to the weights
        adam |= {
            STEP: torch.tensor(0.0),
            **{moment: torch.zeros_like(flat) for moment in MOMENTS},
        }
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, weight in trained:
        yield name, weight, _Shard(adam)


def _buffers(engine: Any) -> dict[str, Tensor]:
    trained = {
        name for name, one in engine.module.named_parameters() if one.requires_grad
    }
    return {
        name: one
        for name, one in engine.module.state_dict().items()
        if name not in trained
    }


def _start() -> None:
    """Let DeepSpeed find the group of ranks; a group of one when no launcher made one."""
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR",
        str(Path(tempfile.gettempdir()) / "vlmdistill_extensions"),
    )
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # On a CPU, DeepSpeed would compile a shared-memory collective with g++ at the first run, which takes
    # minutes and leaves a stale lock when interrupted. Gloo is enough.
    __compatible_ops__["deepspeed_shm_comm"] = False
    for (
        name,
        logger,
    ) in logging.root.manager.loggerDict.items():  # to stdout, which belongs to results
        if name.lower().startswith("deepspeed") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.ERROR)
    if not distributed.is_initialized():
        # Without a launcher DeepSpeed would look for MPI. An address in the environment would do, but
        # child processes would inherit it.
        os.environ.setdefault("LOCAL_RANK", "0")
        alone = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(
            ranks.backend(), store=alone, rank=0, world_size=1
        )
        atexit.register(
            ranks.leave
        )  # not before: a second run in this process uses the group again
    deepspeed.init_distributed(
        dist_backend=ranks.backend(), auto_mpi_discovery=False, verbose=False
    )
