"""Random target states in the shape that targets give them: enough to prove what drafters compute."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Batch, Head, TokenIndex
from vlmdistill.drafters.core.drafter import Drafter, Proposer
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.layers import DecoderLayer, apply_rotary
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.training.progress import TrainingProgress
from vlmdistill.drafters.training.run import Run
from vlmdistill.drafters.training.trainer import train
from vlmdistill.stores import schema
from vlmdistill.stores.schema import Feature, Provenance, Sample, Span, TargetInfo
from vlmdistill.stores.store import Store

D = TypeVar("D", bound=Drafter)
SOURCES = ("hidden", "embed", "layer0", "layer1", "layer2", "layer3")
ALL = (
    "hidden.text",
    "hidden.visual",
    "hidden.span",
    "embed.visual",
    *(
        f"layer{layer}.{where}"
        for layer in (1, 2, 3)
        for where in ("text", "visual", "span")
    ),
)

INFO = TargetInfo(
    name="synthetic",
    family="qwen2_5_vl",
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=23,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    hidden_act="silu",
    attention_bias=True,
    max_position=512,
    eos_ids=(1,),
    visual_ids=(2,),
)

LAYOUTS = {
    "no image": "ttttttrrrrrrr",
    "one image": "ttvvvvttrrrrrrrr",
    "several images": "tvvtvvvttvvvvtrrrrrr",
    "two turns": "ttvvttrrrrtttrrrrr",
    "a video": "tt" + 40 * "v" + "tttrrrrrrrr",
}
"""Samples by letter: t a prompt token, v a visual token, r a response token."""

TRAINED = tuple(name for name in catalogue.NAMES if catalogue.is_trained(name))

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TRAINED),
    ("dflash", {"context": "all", "positions": "expanded", "taps": (1, 3)}),
    (
        "dflash",
        {
            "layers": 2,
            "block": 5,
            "markov": 3,
            "kv_heads": "all",
            "mask": 2,
            "draft_vocab": 9,
        },
    ),
    ("dream", {"middle": 0.25, "kv_heads": "target"}),
    ("eagle2", {"kv_heads": "target"}),
    ("eagle3", {"visual": "none", "draft_vocab": 9}),
    ("eaglevlm", {"compressor": "weigh"}),
    ("eaglevlm", {"compressor": "concat", "ratio": 3, "kernel": 2}),
    ("eaglevlm", {"compressor": "none"}),
    ("hivis", {"threshold": 1, "last_visual": True}),
    ("msd", {"vata": True, "input_norm": True}),
    ("sparrow", {"vata": False}),
    ("sparrow", {"vata": False, "ivsb": False}),
    ("sparrow", {"positions": "compact"}),
    ("specflash", {"ratio": 2, "group": 2, "passes": 2}),
    ("specflash", {"group": 1, "kv_heads": "target"}),
    ("vispec", {"num_q": 4, "injection": False}),
    ("wren", {"depths": False, "normed": False, "threshold": 0}),
    ("wren", {"cell": 2, "draft_vocab": 9}),
]
"""Every trained drafter as its paper has it, and the switches that change what it computes."""


def build(name: str, **settings: Any) -> Drafter:
    """An untrained drafter on random tables, the same each time."""
    torch.manual_seed(0)
    config = dataclasses.replace(catalogue.config(name).model, **settings)
    drafter = catalogue.trained(name)(config, INFO, head())
    for key, weight in drafter.named_parameters():
        if key.endswith("_gate"):
            nn.init.ones_(weight)  # what is behind a closed gate could compute anything
    return drafter


def built(kind: type[D], **settings: Any) -> D:
    """A drafter of that class on the same tables, of its paper's settings but for these."""
    torch.manual_seed(0)
    made: D = kind(kind.Config(**settings), INFO, head()).eval()
    return made


def untrained(name: str, target: Any, seed: int = 0) -> Proposer:
    """A drafter with its paper's settings and fresh weights, for a loaded target."""
    torch.manual_seed(seed)
    return checkpoint.build(name, catalogue.config(name), target.info, target.head)


def save(
    name: str,
    folder: Path,
    drafter: Proposer | None = None,
    *,
    target: Any = None,
    keys: Sequence[str] = (),
    **training: Any,
) -> Path:
    """Save this drafter, or one of random weights, as if it had been trained, for a loaded target or none.

    `keys` are those of the samples that it was trained on, `training` is what its run recorded.
    """
    made: Any = drafter or (untrained(name, target) if target else build(name))
    trained_for = target.provenance((), "float32") if target else provenance()
    origin = checkpoint.Origin(
        trained_for, catalogue.config(name).training, training, keys
    )
    checkpoint.save(made, catalogue.base(name), folder, origin)
    return folder


def head(seed: int = 0) -> Head:
    generator = torch.Generator().manual_seed(seed)
    shape = (INFO.vocab_size, INFO.hidden_size)
    return Head(
        torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    )


def batch(
    layouts: Collection[str], features: Collection[Feature], seed: int = 0
) -> Batch:
    """Samples of those layouts, packed, with random tokens and states.

    A state is the same whatever other features are asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        (s, i, kind)
        for s, layout in enumerate(layouts)
        for i, kind in enumerate(layout)
    ]
    text = [(s, i, kind == "r") for s, i, kind in kinds if kind != "v"]
    spans: list[tuple[int, int, int]] = []
    for s, layout in enumerate(layouts):
        for i, kind in enumerate(layout):
            if kind == "v" and (i == 0 or layout[i - 1] != "v"):
                rest = layout[i:]
                spans.append((s, i, len(rest) - len(rest.lstrip("v"))))
    rows = {"text": len(text), "visual": sum(n for *_, n in spans), "span": len(spans)}
    last_row = torch.cumsum(torch.tensor([n for *_, n in spans] or [0]), 0) - 1
    states: dict[Feature, torch.Tensor] = {}
    for source in {feature.source for feature in features}:
        own = torch.Generator().manual_seed(
            1 + seed * len(SOURCES) + SOURCES.index(source)
        )
        for where in ("text", "visual"):
            states[Feature(source, where)] = torch.randn(
                rows[where], INFO.hidden_size, generator=own
            )
        states[Feature(source, "span")] = states[Feature(source, "visual")][
            last_row[: rows["span"]]
        ]
    return Batch(
        ids_T=torch.randint(3, INFO.vocab_size, (rows["text"],), generator=generator),
        response_T=torch.tensor([response for *_, response in text]),
        position_T=torch.tensor([i for _, i, _ in text]),
        rope_T=torch.tensor([i for _, i, _ in text]),
        segment_T=torch.tensor([s for s, *_ in text]),
        start_M=torch.tensor([i for _, i, _ in spans], dtype=torch.long),
        length_M=torch.tensor([n for *_, n in spans], dtype=torch.long),
        segment_M=torch.tensor([s for s, *_ in spans], dtype=torch.long),
        features={feature: states[feature] for feature in features},
    )


def written(
    drafter: EagleDrafter, one: Batch, generator: torch.Generator | None = None
) -> list[tuple[Tensor, Tensor, TokenIndex]]:
    """What `condition` writes of visual tokens: inputs, rotary positions and places."""
    seen = []

    def spy(x_XD: Tensor, rotary_X: Tensor, tokens: TokenIndex, cache: object) -> None:
        seen.append((x_XD, rotary_X, tokens))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.block.layer, "write_kv", spy)
        drafter.condition(one, PackedKVCache(generator=generator))
    return seen


def in_order(
    one: Batch, text_TX: torch.Tensor, visual_UX: torch.Tensor
) -> torch.Tensor:
    """The rows of a single sample by their positions."""
    order = torch.cat(
        [one.text_tokens.position_N, one.visual_tokens.position_N]
    ).argsort()
    return torch.cat([text_TX, visual_UX])[order]


def states(one: Batch, *sources: str) -> torch.Tensor:
    """The states of a single sample by their positions, those of all sources side by side."""
    every = [
        in_order(one, one.feature(source, "text"), one.feature(source, "visual"))
        for source in sources
    ]
    return torch.cat(every, -1)


def cut(sample: Batch, tokens: int) -> Batch:
    """The first `tokens` text tokens of a single sample, and what precedes them, as a prefill returns it."""
    end = int(sample.position_T[tokens - 1])
    spans = sample.start_M < end
    visual = int(sample.length_M[spans].sum())
    kept = {"text": tokens, "visual": visual, "span": int(spans.sum())}
    return Batch(
        sample.ids_T[:tokens],
        sample.response_T[:tokens],
        sample.position_T[:tokens],
        sample.rope_T[:tokens],
        sample.segment_T[:tokens],
        sample.start_M[spans],
        sample.length_M[spans],
        sample.segment_M[spans],
        {
            feature: state[: kept[feature.where]]
            for feature, state in sample.features.items()
        },
    )


def begun(drafter: Drafter, sample: Batch, tokens: int) -> TreeDrafter:
    """A draft after the first `tokens` text tokens of a single sample, with the next one committed."""
    prompt = cut(sample, tokens)
    draft = TreeDrafter(drafter, prompt)
    before = [prompt.feature(source, "text")[-1:] for source in drafter.sources]
    draft.commit(sample.ids_T[tokens : tokens + 1], torch.cat(before, dim=-1))
    return draft


def plain_layer(layer: DecoderLayer, x_SD: Tensor, position_S: Tensor) -> Tensor:
    """A drafter's layer, of as many key heads as query heads, with a causal mask over consecutive rows."""
    heads, width = INFO.num_heads, INFO.head_dim
    qkv = layer.qkv_proj(x_SD).view(len(x_SD), 3, heads, width)
    factors = layer.rotary(position_S, x_SD.dtype)
    query, key = apply_rotary(qkv[:, 0], factors), apply_rotary(qkv[:, 1], factors)
    score_HSS = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(width)
    score_HSS = score_HSS.masked_fill(
        torch.ones(len(x_SD), len(x_SD)).triu(1).bool(), -math.inf
    )
    mixed = torch.einsum("hqk,khd->qhd", score_HSS.softmax(-1), qkv[:, 2])
    x_SD = x_SD + layer.o_proj(mixed.flatten(1))
    gate, up = layer.gate_up_proj(layer.post_attention_norm(x_SD)).chunk(2, dim=-1)
    out: Tensor = x_SD + layer.down_proj(nn.functional.silu(gate) * up)
    return out


def provenance(features: Collection[str] = ALL) -> Provenance:
    return Provenance(
        target="synthetic",
        config_hash="c",
        weights_hash="w",
        processor_hash="p",
        template_hash="t",
        features=tuple(sorted(features)),
        dtype="float32",
        revision="",
        sampling="",
        code_version="",
        engine="transformers",
        thinking="",
    )


def store(
    path: Path,
    samples: int,
    features: Collection[str] = ALL,
    seed: int = 0,
    *,
    first: int = 0,
    factor: float = 1.0,
) -> Store:
    """A small store of such samples, one layout after the other, float32; one shard, from the `first` on.

    `factor` scales their features.
    """
    wanted = [Feature.parse(name) for name in features]
    tables = head()
    made = Store.create(
        path,
        provenance(features),
        INFO,
        schema.FrozenTables(
            tables.embed_VD.numpy(), tables.lm_head_VD.numpy(), "float32"
        ),
    )
    layouts = list(LAYOUTS.values())
    with made.writer("unit") as writer:
        for number in range(first, samples):
            one = batch(
                [layouts[number % len(layouts)]], wanted, seed=seed * 1000 + number
            )
            writer.add(
                Sample(
                    key=f"sample{number}",
                    ids_T=one.ids_T.int().numpy(),
                    response_T=one.response_T.numpy(),
                    position_T=one.position_T.int().numpy(),
                    rope_T=one.rope_T.int().numpy(),
                    spans=tuple(
                        Span(start, length)
                        for start, length in zip(
                            one.start_M.tolist(), one.length_M.tolist(), strict=True
                        )
                    ),
                    features={
                        feature: factor * state.numpy()
                        for feature, state in one.features.items()
                    },
                    meta={"dataset": "synthetic"},
                )
            )
    return made


SETTINGS = (
    "stages.*.epochs=2",
    "stages.*.learning_rate=0.01",
    "batch_tokens=120",
    "noise=0.2",
)


def plan(
    store: Path,
    out: Path,
    *,
    drafter: str = "sparrow",
    settings: Sequence[str] = (),
    **more: Any,
) -> Run:
    """A short run on such a store, in optimizer steps of two micro-batches."""
    config = override(catalogue.config(drafter), [*SETTINGS, *settings])
    values = {"held_out": 0.0, "save_every": 3, "micro_tokens": 60, **more}
    return Run(
        drafter=catalogue.base(drafter),
        config=config,
        store=str(store),
        out=out,
        **values,
    )


class StopError(Exception):
    """What breaks off a training."""


def stopped(
    run: Run,
    step: int,
    report: Callable[[TrainingProgress], object] = lambda progress: None,
) -> None:
    """Train up to a step and break off."""

    def stop(progress: TrainingProgress) -> None:
        report(progress)
        if progress.step == step:
            raise StopError

    with pytest.raises(StopError):
        train(run, stop)
