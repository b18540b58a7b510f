"""The DeepSpeed engine: start it on any number of processes and devices, and save and restore its state.

The only module that imports DeepSpeed.
"""

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed, nn

from vlmdistill.drafters.training import ranks

Engine: TypeAlias = Any  # DeepSpeedEngine, which has no types

ADAM_BETAS = (0.9, 0.95)  # of EAGLE and all its descendants

WEIGHT = "weight"
BUFFER = "buffer"
STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
BEST = "best"


class PartEntry(NamedTuple):
    """One tensor of a state: `<kind>/<name of the weight>`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def build(module: nn.Module, *, clip: float, zero: int, dtype: torch.dtype) -> Engine:
    """A DeepSpeed engine around the module: AdamW without decay, gradients clipped by norm.

    The learning rate is set before every step, the accumulation boundary by the optimizer.
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


def set_learning_rate(engine: Engine, value: float) -> None:
    """One learning rate for all parameters, from now on."""
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def step(engine: Engine) -> Tensor | float:
    """One optimizer step if this is its last micro-batch; returns the gradient's norm before clipping."""
    # DeepSpeed's own optimizers measure the norm.
    is_measured = engine.zero_optimization() or engine.bfloat16_enabled()
    if not is_measured:
        weights = engine.module.parameters()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        engine.step()
        return norm
    engine.step()
    measured: Tensor | float | None = engine.get_global_grad_norm()
    # Not `measured or 0.0`: that would read the number from a GPU.
    return 0.0 if measured is None else measured


def weights(engine: Engine) -> dict[str, Tensor]:
    """The trained weights as they compute now, as tensors of a state: the best ones that a run keeps."""
    return {
        f"{BEST}/{name}": weight.detach().float().cpu().clone()
        for name, weight in _trained(engine)
    }


def set_weights(engine: Engine, best: Mapping[str, Tensor]) -> None:
    """Let the module compute with these `weights`; its optimizer keeps its own."""
    for name, weight in _trained(engine):
        weight.data.copy_(best[f"{BEST}/{name}"])


# The state of a run, the same for any number of ranks and any ZeRO stage.


def state(engine: Engine) -> dict[str, Tensor]:
    """Weights in float32, Adam's moments and steps, and buffers: gathered from all ranks, kept on rank 0.

    A weight that has had no gradient yet has no moments.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state: dict[str, Tensor] = {}

    def keep(kind: str, name: str, value: Tensor) -> None:
        if ranks.is_first():
            state[f"{kind}/{name}"] = value.detach().cpu().contiguous()

    for name, weight, master in _weights(engine):
        if isinstance(master, _Shard):
            keep(WEIGHT, name, safe_get_full_fp32_param(weight))
            for moment in MOMENTS:
                keep(moment, name, safe_get_full_optimizer_state(weight, moment))
            keep(STEP, name, master.adam[STEP].clone())
        else:
            keep(WEIGHT, name, master)
            for moment, value in engine.optimizer.state.get(master, {}).items():
                keep(moment, name, value)
    for name, value in _buffers(engine).items():
        keep(BUFFER, name, value)
    return state


def expected(engine: Engine, best: bool = False) -> dict[str, PartEntry]:
    """Every tensor that a checkpoint may hold, by its key: of `state`, and with `best` of `weights`."""
    kinds = [WEIGHT, *MOMENTS]
    if best:
        kinds.append(BEST)
    entries: list[PartEntry] = []
    for name, buffer in _buffers(engine).items():
        key = f"{BUFFER}/{name}"
        entries.append(PartEntry(key, tuple(buffer.shape), buffer.dtype))
    for name, weight, _ in _weights(engine):
        for kind in kinds:
            key = f"{kind}/{name}"
            entries.append(PartEntry(key, tuple(weight.shape), torch.float32))
        entries.append(PartEntry(f"{STEP}/{name}", (), torch.float32))
    return {entry.key: entry for entry in entries}


def restore(
    engine: Engine,
    entries: Sequence[PartEntry],
    tensors: Mapping[str, Tensor],
    source: int,
) -> dict[str, Tensor]:
    """Load a `state`: all ranks know its `entries`, the rank `source` has its tensors.

    Returns the best weights among them, on rank 0.
    """
    best: dict[str, Tensor] = {}
    module_state = engine.module.state_dict()
    weights = {name: (weight, master) for name, weight, master in _weights(engine)}
    for key, shape, dtype in entries:
        kind, _, name = key.partition("/")
        value = tensors[key] if tensors else torch.empty(shape, dtype=dtype)
        value = ranks.shared(value.to(engine.device), source)
        if kind == BEST:
            if ranks.is_first():
                best[key] = value.cpu()
            continue
        if kind in (WEIGHT, BUFFER):
            module_state[name].copy_(value)
        if kind != BUFFER:
            _restore_optimizer(engine, *weights[name], kind, value)
    return best


def _restore_optimizer(
    engine: Engine,
    weight: nn.Parameter,
    master: "Tensor | _Shard",
    kind: str,
    value: Tensor,
) -> None:
    """Give the optimizer its float32 copy of a weight, a moment of it, or its steps."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if kind == STEP:
        value = value.cpu()  # where AdamW keeps it
    if not isinstance(master, _Shard):
        if kind == WEIGHT:
            master.data.copy_(value)
        else:
            engine.optimizer.state[master][kind] = value
    elif kind == WEIGHT:
        safe_set_full_fp32_param(weight, value)
    elif kind == STEP:
        master.adam[STEP].fill_(value)
    else:
        safe_set_full_optimizer_state(weight, value, kind)


class _Shard(NamedTuple):
    """ZeRO's part of the weights on this rank, one flat tensor, by Adam's state of it."""

    adam: dict[str, Tensor]


def _trained(engine: Engine) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained weights of the module by name."""
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            yield name, weight


def _weights(engine: Engine) -> Iterator[tuple[str, nn.Parameter, Tensor | _Shard]]:
    """Each trained weight with its form in the optimizer: a float32 copy (or itself), or a shard."""
    (group,) = engine.optimizer.param_groups
    if not engine.zero_optimization():
        masters = group["params"]
        for (name, weight), master in zip(_trained(engine), masters, strict=True):
            yield name, weight, master
        return
    (flat,) = group["params"]
    adam = engine.optimizer.optimizer.state[flat]
    if not adam:
        # AdamW makes its state at the first step, and DeepSpeed then links it to the weights.
        adam[STEP] = torch.tensor(0.0)
        for moment in MOMENTS:
            adam[moment] = torch.zeros_like(flat)
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, weight in _trained(engine):
        yield name, weight, _Shard(adam)


def _buffers(engine: Engine) -> dict[str, Tensor]:
    """All tensors of the module that are not trained."""
    trained = {name for name, _ in _trained(engine)}
    tensors = engine.module.state_dict().items()
    return {name: tensor for name, tensor in tensors if name not in trained}


def _start() -> None:
    """Let DeepSpeed find the group of ranks; a group of one when no launcher made one."""
    extensions = Path(tempfile.gettempdir()) / "vlmdistill_extensions"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # On a CPU, DeepSpeed would compile a shared-memory collective with g++ at the first run, which takes
    # minutes and leaves a stale lock when interrupted. Gloo is enough.
    __compatible_ops__["deepspeed_shm_comm"] = False
    # Its loggers write to stdout, which belongs to results.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.lower().startswith("deepspeed") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.ERROR)
    if not distributed.is_initialized():
        _join_alone()
    deepspeed.init_distributed(
        dist_backend=ranks.backend(), auto_mpi_discovery=False, verbose=False
    )


def _join_alone() -> None:
    """Make a group of one rank.

    Without one DeepSpeed would look for MPI. An address in the environment would do, but child processes
    would inherit it.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group(ranks.backend(), store=store, rank=0, world_size=1)
    # At the end of the process, since a second run in it uses the group again.
    atexit.register(ranks.leave)
