"""Published block drafters compute what the layouts of z-lab, SpecForge, DeepSpec and speculators say.

The checkpoints have the names of those codes and random weights; `states` is the pass of a block by them.
Shapes: P positions before the anchor, J slots of a block, D hidden, S the states of several layers together.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS, batch
from tests.drafters.test_dflash import drafted
from vlmdistill.drafters.checkpoints import checkpoint, published
from vlmdistill.drafters.checkpoints.initial import Initial
from vlmdistill.drafters.dflash import DFlash
from vlmdistill.stores.errors import TrainingError

WIDTH, VOCABULARY, BLOCK, RANK, MASK = INFO.hidden_size, INFO.vocab_size, 4, 3, 2
HEADS, KEYS, SIZE, THETA = 4, 2, 8, 500.0
TAPS = (1, 2, 3)
LEFT = [
    tap - 1 for tap in TAPS
]  # a state leaves the layer before the one that it enters
CHOSEN = torch.tensor([1, 3, 4, 5, 7, 8, 10, 12, 15, 16, 18, 20, 22])

LAYERS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": SIZE,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
ZLAB: dict[str, Any] = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "num_target_layers": INFO.num_layers,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LEFT},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "block_size": BLOCK,
    "draft_vocab_size": VOCABULARY,
    "aux_hidden_state_layer_ids": [*TAPS],
    "mask_token_id": MASK,
}
SPARK = {
    **SPECULATORS,
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
}
DEEPSPEC: dict[str, Any] = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "target_layer_ids": LEFT,
    "mask_token_id": MASK,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def weights(
    *, heads: bool = False, chosen: Tensor | None = None, tables: bool = False
) -> dict[str, Tensor]:
    """Random tensors by their names; `heads`: DSpark's, `tables`: the copies that DeepSpec keeps."""
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)

    found = {
        "fc.weight": drawn(WIDTH, len(TAPS) * WIDTH),
        "hidden_norm.weight": drawn(WIDTH),
        "norm.weight": drawn(WIDTH),
    }
    for number in range(2):
        layer = {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * SIZE, WIDTH),
            "self_attn.k_proj": (KEYS * SIZE, WIDTH),
            "self_attn.v_proj": (KEYS * SIZE, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * SIZE),
            "self_attn.q_norm": (SIZE,),
            "self_attn.k_norm": (SIZE,),
            "mlp.gate_proj": (40, WIDTH),
            "mlp.up_proj": (40, WIDTH),
            "mlp.down_proj": (WIDTH, 40),
        }
        found |= {
            f"layers.{number}.{name}.weight": drawn(*shape)
            for name, shape in layer.items()
        }
    if heads:
        columns = VOCABULARY if chosen is None else len(chosen)
        found["markov_head.markov_w1.weight"] = 3 * drawn(VOCABULARY, RANK)
        found["markov_head.markov_w2.weight"] = 9 * drawn(columns, RANK)
        found |= {
            "confidence_head.proj.weight": drawn(1, WIDTH + RANK),
            "confidence_head.proj.bias": drawn(1),
        }
    if tables:
        found |= {
            "embed_tokens.weight": synthetic.head().embed_VD,
            "lm_head.weight": synthetic.head().lm_head_VD,
        }
    if chosen is not None:
        found |= {
            "d2t": chosen - torch.arange(len(chosen)),
            "lm_head.weight": synthetic.head().lm_head_VD[chosen],
        }
        found["t2d"] = torch.zeros(VOCABULARY).bool().index_fill(0, chosen, True)
    return found


def put(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    mask_D: Tensor | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        folder / "model.safetensors",
    )
    if mask_D is not None:
        torch.save(
            {"embedding": mask_D, "mask_token_id": 5}, folder / "mask_embedding.pt"
        )
    return folder


def imported(folder: Path, out: Path, name: str = "dflash") -> DFlash:
    origin = synthetic.provenance()
    published.load(folder, name, synthetic.head(), INFO, out, origin)
    drafter = checkpoint.load(out, synthetic.head(), INFO, provenance=origin)
    assert isinstance(drafter, DFlash)
    return drafter


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def turned(x_NHd: Tensor, place_N: Tensor) -> Tensor:
    half = SIZE // 2
    angle_N1h = place_N[:, None, None] * THETA ** (-torch.arange(half) / half)
    left, right = x_NHd.chunk(2, -1)
    cos, sin = angle_N1h.cos(), angle_N1h.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def states(w: dict[str, Tensor], context_PS: Tensor, block_JD: Tensor) -> Tensor:
    """The states of a block whose anchor comes after the context, [J, D]."""
    context_PD = norm(context_PS @ w["fc.weight"].T, w["hidden_norm.weight"])
    before, slots = len(context_PD), len(block_JD)
    place, x_JD = torch.arange(before + slots), block_JD
    for number in range(2):
        part = {name.removeprefix(f"layers.{number}."): one for name, one in w.items()}
        normed_JD = norm(x_JD, part["input_layernorm.weight"])
        both_SD = torch.cat([context_PD, normed_JD])
        query = (normed_JD @ part["self_attn.q_proj.weight"].T).view(slots, HEADS, SIZE)
        key = (both_SD @ part["self_attn.k_proj.weight"].T).view(-1, KEYS, SIZE)
        value = (both_SD @ part["self_attn.v_proj.weight"].T).view(-1, KEYS, SIZE)
        query = turned(norm(query, part["self_attn.q_norm.weight"]), place[before:])
        key = turned(norm(key, part["self_attn.k_norm.weight"]), place)
        key, value = (one.repeat_interleave(HEADS // KEYS, 1) for one in (key, value))
        chance = (torch.einsum("jhd,shd->hjs", query, key) * SIZE**-0.5).softmax(-1)
        mixed_JX = torch.einsum("hjs,shd->jhd", chance, value).flatten(1)
        x_JD = x_JD + mixed_JX @ part["self_attn.o_proj.weight"].T
        inner_JD = norm(x_JD, part["post_attention_layernorm.weight"])
        gate_JM = F.silu(inner_JD @ part["mlp.gate_proj.weight"].T)
        x_JD = (
            x_JD
            + (gate_JM * (inner_JD @ part["mlp.up_proj.weight"].T))
            @ part["mlp.down_proj.weight"].T
        )
    return norm(x_JD, w["norm.weight"])


def guesses(w: dict[str, Tensor], state_GD: Tensor, last: int) -> list[int]:
    """The most likely tokens, slot after slot."""
    found = list[int]()
    head_KD = synthetic.head().lm_head_VD if "d2t" not in w else w["lm_head.weight"]
    for state_D in state_GD:
        score_K = head_KD @ state_D
        if "markov_head.markov_w1.weight" in w:
            score_K = (
                score_K
                + w["markov_head.markov_w2.weight"]
                @ w["markov_head.markov_w1.weight"][last]
            )
        best = int(score_K.argmax())
        last = best + int(w["d2t"][best]) if "d2t" in w else best
        found.append(last)
    return found


NEW = {
    **ZLAB,
    "dflash_config": {**ZLAB["dflash_config"], "block_size": BLOCK, "causal": False},
}
del NEW["block_size"]
FORGE = {**ZLAB, "architectures": ["DSparkDraftModel"]}
FORGE["dflash_config"] = {
    **ZLAB["dflash_config"],
    "projector_type": "dspark",
    "markov_rank": RANK,
}
FEW = {"draft_vocab_size": len(CHOSEN)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "z-lab": (ZLAB, {}, False),
    "z-lab, newer": (NEW, {}, False),
    "SpecForge, DSpark": (FORGE, {"heads": True}, True),
    "DeepSpec": (DEEPSPEC, {"heads": True, "tables": True}, True),
    "DeepSpec, DFlash": ({**DEEPSPEC, "markov_rank": 0}, {"tables": True}, True),
    "speculators": (SPECULATORS, {}, False),
    "speculators, from the anchor": (
        {**SPECULATORS, "sample_from_anchor": True},
        {},
        True,
    ),
    "speculators, few tokens": ({**SPECULATORS, **FEW}, {"chosen": CHOSEN}, False),
    "speculators, DSpark": (SPARK, {"heads": True}, True),
    "speculators, DSpark from the mask": (
        {**SPARK, "sample_from_anchor": False},
        {"heads": True},
        False,
    ),
    "speculators, DSpark, few tokens": (
        {**SPARK, **FEW},
        {"heads": True, "chosen": CHOSEN},
        True,
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_an_imported_block_guesses_what_its_authors_names_say(
    case: str, learned: bool, tmp_path: Path
) -> None:
    """The taps, whichever way they are counted; the slots; the mask; the heads; the vocabulary."""
    config, kind, anchored = CASES[case]
    w, mask_D = weights(**kind), torch.linspace(-1, 1, WIDTH)
    folder = put(tmp_path / "theirs", config, w, mask_D if learned else None)
    drafter = imported(folder, tmp_path / "ours")
    one = batch([LAYOUTS["several images"]], drafter.config.needs(INFO))
    last = int(one.position_T[-1])
    context_LS = synthetic.states(one, *(f"layer{tap}" for tap in TAPS))
    embed_VD = synthetic.head().embed_VD
    masks_JD = (mask_D if learned else embed_VD[MASK]).expand(BLOCK - 1, -1)
    block_JD = torch.cat([embed_VD[one.ids_T[-1:]], masks_JD])
    state_GD = states(w, context_LS[:last], block_JD)[0 if anchored else 1 :]
    found_1X, tree = drafted(drafter, one, f"chain-{BLOCK}")
    torch.testing.assert_close(found_1X.view(-1, WIDTH), state_GD, rtol=1e-4, atol=1e-5)
    assert tree.ids_N[1:].tolist() == guesses(w, state_GD, int(one.ids_T[-1]))
    if kind.get("heads"):
        before_G = tree.ids_N[:-1]
        told_G = torch.cat([state_GD, w["markov_head.markov_w1.weight"][before_G]], -1)
        expected_G = (
            told_G @ w["confidence_head.proj.weight"][0]
            + w["confidence_head.proj.bias"]
        )
        torch.testing.assert_close(
            drafter.confidence(state_GD, before_G), expected_G, rtol=1e-4, atol=1e-4
        )


def nested(**changes: Any) -> dict[str, Any]:
    return {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], **changes}}


WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
REFUSED: dict[str, dict[str, Any]] = {
    "sliding window of 64": {**ZLAB, **WINDOW},
    "sliding window of 32": {
        **ZLAB,
        "layer_types": None,
        "sliding_window": 32,
        "use_sliding_window": True,
    },
    "sliding window of 64 ": {
        **SPECULATORS,
        "transformer_layer_config": {**LAYERS, **WINDOW},
    },
    "architecture is DFlash2DraftModel": {
        **ZLAB,
        "architectures": ["DFlash2DraftModel"],
    },
    "architecture is xpress": {**SPECULATORS, "speculators_model_type": "xpress"},
    "architecture is domino": nested(projector_type="domino"),
    "architecture is not named": {
        key: one for key, one in ZLAB.items() if key != "architectures"
    },
    "causal=True": nested(causal=True),
    "is_neox_style=False": {**ZLAB, "is_neox_style": False},
    "no mask_token_id": nested(mask_token_id=None),
    "no target layer ids": nested(target_layer_ids=[]),
    "mask=23": nested(mask_token_id=VOCABULARY),
    r"taps=\[1, 2, 4\]": nested(target_layer_ids=[0, 1, 3]),
    "block_size": nested(block_size="x"),
    "describe a block drafter": {**ZLAB, "dflash_config": 3},
    "block=1": nested(block_size=1),
    "rope_scaling": {**ZLAB, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "expected of its config": {**ZLAB, "num_key_value_heads": HEADS},
    r"layers\.1\.": {**ZLAB, "num_hidden_layers": 1, "layer_types": None},
    r"lacks layers\.2\.": {**ZLAB, "num_hidden_layers": 3, "layer_types": None},
}


@pytest.mark.parametrize("odd", REFUSED)
def test_what_is_not_here_is_refused_in_one_line(odd: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "theirs", REFUSED[odd], weights())
    with pytest.raises(TrainingError, match=odd.strip()) as refused:
        imported(folder, tmp_path / "ours")
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    assert not (tmp_path / "ours").exists()


ODD: dict[str, Any] = {
    "lm_head.weight": lambda w: (
        w["lm_head.weight"] + 0.1
    ),  # an overwritten LM head drafts nothing
    "embed_tokens.weight": lambda w: w["embed_tokens.weight"].roll(1, 0),
    "markov_head.gate_proj.weight": lambda w: torch.ones(RANK, WIDTH + RANK),
    "confidence_head.proj.weight": lambda w: torch.ones(
        1, WIDTH
    ),  # without the Markov vector
    "layers.0.self_attn.q_proj.bias": lambda w: torch.ones(HEADS * SIZE),
    "norm.weight": lambda w: w["norm.weight"] * torch.nan,
}


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_has_no_place_is_refused_by_its_name(
    name: str, tmp_path: Path
) -> None:
    w = weights(heads=True, tables=True)
    folder = put(tmp_path / "theirs", DEEPSPEC, {**w, name: ODD[name](w)})
    with pytest.raises(TrainingError, match=name):
        imported(folder, tmp_path / "ours")


def test_an_lm_head_over_few_tokens_must_be_the_targets(tmp_path: Path) -> None:
    w = weights(chosen=CHOSEN)
    for name, change in (
        ("lm_head.weight", -w["lm_head.weight"]),
        ("d2t", w["d2t"].flip(0)),
    ):
        folder = put(tmp_path / "theirs", {**SPECULATORS, **FEW}, {**w, name: change})
        with pytest.raises(TrainingError, match=name):
            imported(folder, tmp_path / "ours")


def test_a_run_begins_with_a_published_block_drafter(tmp_path: Path) -> None:
    w = weights(heads=True, tables=True)
    found = Initial.read(put(tmp_path / "theirs", DEEPSPEC, w), "dspark")
    drafter = synthetic.build("dspark", layers=1, block=BLOCK, taps=TAPS, mask=MASK)
    with pytest.raises(TrainingError, match="no weight"):
        Initial.read(
            put(tmp_path / "other", ZLAB, {"x": torch.ones(3)}), "dflash"
        ).into(drafter, "dspark")
    taken = found.into(drafter, "dspark")
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "input_norms.0.weight",
        "norm.weight",
    } <= {*taken.taken}
    assert taken.fresh["markov_in.weight"] == "[23, 256] here, [23, 3] there"
    assert "input_norms.1.weight" in taken.unused
    assert {"layers", "markov", "context", "positions"} <= {*taken.settings}
    overwritten = put(
        tmp_path / "overwritten",
        DEEPSPEC,
        {**w, "lm_head.weight": -w["lm_head.weight"]},
    )
    with pytest.raises(TrainingError, match=r"lm_head\.weight is not"):
        Initial.read(overwritten, "dspark").into(drafter, "dspark")
