"""HASS: its multi-step attention is that of the paper's mask, written out with streams and -inf."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.drafters import synthetic
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.core.batch import Batch, TokenIndex
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.layers import apply_rotary
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.eagle2 import Eagle2
from vlmdistill.drafters.training.unroll import supervised, unroll

# Heads wide enough to carry one slot for every position, so that attention weights can be read off.
INFO = msgspec.structs.replace(synthetic.INFO, head_dim=32)
SAMPLE = "ttvvvttrrrrrrr"
TRAINING = catalogue.config("hass").training
STAGE = TRAINING.schedule[1]


def build(kv_heads: str = "all") -> Eagle2:
    torch.manual_seed(0)
    return Eagle2(Eagle2.Config(kv_heads=kv_heads), INFO, synthetic.head())  # type: ignore[arg-type]


def sample() -> Batch:
    return synthetic.batch([SAMPLE], Eagle2.Config().needs(INFO))


def streams(
    drafter: Eagle2, one: Batch, *, published: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Every hop's outputs [L - 1, D] and attention weights [H, query, stream, key], position by position.

    Stream 0 holds the target's states, stream k what step k made, one place on. The query at position i of
    step n meets stream n at i, n - 1 at i - 1, and so on; stream 0 at i - n and all before. `published`: the
    scores of the rest are multiplied by zero, and their weights after the softmax, as the official code does.
    """
    text, visual = one.position_T, one.visual_tokens.position_N
    length = len(SAMPLE)
    state_LD, embed_LD = torch.zeros(2, length, INFO.hidden_size).unbind()
    state_LD[text], state_LD[visual] = (
        one.feature("hidden", where) for where in ("text", "visual")
    )
    embed_LD[text], embed_LD[visual] = (
        drafter.embed_VD[one.ids_T],
        one.feature("embed", "visual"),
    )
    layer = drafter.block.layer
    next_LD, past = embed_LD[1:], torch.arange(length - 1)
    i_11, j_1L = past[:, None], past[None]
    made: list[tuple[Tensor, Tensor]] = []
    stream = [state_LD[:-1]]
    for n in range(STAGE.hops):
        x = [
            drafter.block.fc(torch.cat([next_LD, one_LD], dim=-1)) for one_LD in stream
        ]
        qkv = [layer.qkv_proj(x_LD).unflatten(-1, (-1, INFO.head_dim)) for x_LD in x]
        factors = layer.rotary(past, state_LD.dtype)
        group = layer.heads // layer.kv_heads
        split = [
            part.split([layer.heads] + 2 * [layer.kv_heads], dim=1) for part in qkv
        ]
        query_LHd = apply_rotary(split[n][0], factors)
        key_SLHd = torch.stack(
            [apply_rotary(k, factors).repeat_interleave(group, 1) for _, k, _ in split]
        )
        value_SLHd = torch.stack([v.repeat_interleave(group, 1) for _, _, v in split])
        score_HLSL = (
            torch.einsum("ihd,sjhd->hisj", query_LHd, key_SLHd) / INFO.head_dim**0.5
        )
        seen = [j_1L <= i_11 - n] + [j_1L == i_11 - (n - k) for k in range(1, n + 1)]
        seen_LSL = torch.stack(seen, dim=1)
        if published:
            score_HLL = (score_HLSL * seen_LSL).sum(2)
            weight_HLSL = score_HLL.softmax(-1)[:, :, None] * seen_LSL
        else:
            flat_HLX = score_HLSL.masked_fill(~seen_LSL, -torch.inf).flatten(2)
            weight_HLSL = flat_HLX.softmax(-1).nan_to_num().unflatten(-1, (n + 1, -1))
        mixed_LHd = torch.einsum("hisj,sjhd->ihd", weight_HLSL, value_SLHd)
        out_LD = x[n] + layer.o_proj(mixed_LHd.flatten(1))
        gate, up = layer.gate_up_proj(layer.post_attention_norm(out_LD)).chunk(2, -1)
        out_LD = out_LD + layer.down_proj(F.silu(gate) * up)
        made.append((out_LD, weight_HLSL))
        stream.append(torch.cat([stream[-1][:1], out_LD[:-1]]).detach())
    return made


class Recorder(PackedKVCache):
    """Also attends over values that say where they stand: what comes out is the weight of every slot."""

    weights: list[Tensor]

    def __init__(self, window: int, generator: torch.Generator | None) -> None:
        super().__init__(window, generator)
        self.shadow = PackedKVCache()
        Recorder.weights = []

    def update(
        self, key_NKd: Tensor, value_NKd: Tensor, tokens: TokenIndex, hop: int
    ) -> None:
        super().update(key_NKd, value_NKd, tokens, hop)
        slot_N = (
            tokens.position_N - 1
            if hop == 0
            else torch.full_like(tokens.position_N, len(SAMPLE) - 2 + hop)
        )
        where_NKd = F.one_hot(slot_N, INFO.head_dim).float()[:, None].expand_as(key_NKd)
        self.shadow.update(key_NKd, where_NKd, tokens, hop)

    def attend(self, query_QHd: Tensor, tokens: TokenIndex, hop: int) -> Tensor:
        self.weights.append(self.shadow.attend(query_QHd, tokens, hop))
        return super().attend(query_QHd, tokens, hop)


@pytest.mark.parametrize("kv_heads", ["all", "target"])
def test_every_hop_attends_by_the_mask_of_the_paper(
    kv_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdistill.drafters.training.unroll.PackedKVCache", Recorder)
    drafter, one = build(kv_heads), sample()
    states: list[Tensor] = []
    drafter.block.layer.register_forward_hook(
        lambda module, inputs, output: states.append(output)
    )
    unroll(drafter, one, STAGE)
    anchor_R = one.position_T[supervised(one)] - 1
    before = len(SAMPLE) - 1
    expected, wrong = streams(drafter, one), streams(drafter, one, published=True)
    assert len(states) == len(Recorder.weights) == 3
    for hop, (state_RD, weight_RHd) in enumerate(
        zip(states, Recorder.weights, strict=True)
    ):
        kept_R = anchor_R + hop < before
        at_R = (anchor_R + hop)[kept_R]
        torch.testing.assert_close(
            state_RD[kept_R], expected[hop][0][at_R], rtol=1e-4, atol=1e-5
        )
        for (_, weight_HLSL), same in ((expected[hop], True), (wrong[hop], False)):
            naive_RHS = torch.zeros(len(at_R), drafter.block.layer.heads, INFO.head_dim)
            naive_RHS[..., :before] = weight_HLSL[:, at_R, 0].transpose(0, 1)
            for guess in range(1, hop + 1):
                naive_RHS[..., before + guess - 1] = weight_HLSL[
                    :, at_R, guess, at_R - (hop - guess)
                ].transpose(0, 1)
            total_R = naive_RHS.sum(-1)
            assert (
                torch.allclose(weight_RHd[kept_R], naive_RHS, rtol=1e-4, atol=1e-5)
                == same
            )
            assert torch.allclose(total_R, torch.ones_like(total_R), atol=1e-5) == same


def test_the_gradient_is_cut_between_hops_and_nowhere_else() -> None:
    """That of the three losses over streams that are detached, with keys and values that are not."""
    drafter, one = build(), sample()
    hidden_TD, row_R = one.feature("hidden", "text"), supervised(one).nonzero()[:, 0]
    naive = torch.zeros(())
    for hop, (out_LD, _) in enumerate(streams(drafter, one)):
        token_R = row_R[row_R + hop <= row_R.max()] + hop
        state_RD, target_RD = out_LD[one.position_T[token_R] - 1], hidden_TD[token_R]
        draft_RV = F.linear(state_RD, drafter.lm_head_VD).log_softmax(-1)
        plogp_RV = F.linear(target_RD, drafter.lm_head_VD).softmax(-1) * draft_RV
        best_RK = F.linear(target_RD, drafter.lm_head_VD).topk(10).indices
        naive = (
            naive
            + F.smooth_l1_loss(state_RD, target_RD, reduction="none").mean(-1).sum()
        )
        naive = naive - 0.1 * plogp_RV.sum() - plogp_RV.gather(1, best_RK).sum()
    total = unroll(drafter, one, STAGE, detach=TRAINING.detach).total
    torch.testing.assert_close(total, naive)
    weights = list(drafter.parameters())
    cut = torch.autograd.grad(total, weights)
    torch.testing.assert_close(
        cut, torch.autograd.grad(naive, weights), rtol=1e-3, atol=1e-5
    )
    whole = unroll(drafter, one, STAGE).total
    torch.testing.assert_close(whole, naive)
    assert not torch.allclose(torch.autograd.grad(whole, weights)[0], cut[0], rtol=1e-3)


def test_a_checkpoint_that_names_hass_is_read(tmp_path: Path) -> None:
    """As of when HASS had a class of its own."""
    folder = synthetic.save("hass", tmp_path / "mine")
    file = folder / "config.json"
    description = json.loads(file.read_text())
    assert description["drafter"] == "eagle2"
    file.write_text(json.dumps({**description, "drafter": "hass"}))
    drafter = checkpoint.load(folder, synthetic.head(), synthetic.INFO)
    assert isinstance(drafter, Eagle2)
    assert drafter.tree == Tree.parse("60-5-10")


def test_its_settings_are_those_of_the_paper_on_eagle2() -> None:
    losses = {"regression": 1.0, "cross_entropy": 0.1}
    text, multimodal = TRAINING.schedule
    assert (text.hops, text.epochs, text.learning_rate) == (3, 40, 3e-5)
    assert text.losses == losses
    assert (multimodal.hops, multimodal.epochs, multimodal.learning_rate) == (
        3,
        10,
        1e-5,
    )
    assert multimodal.losses == {**losses, "top_k": 1.0}
    assert (TRAINING.batch_tokens, TRAINING.warmup) == (32768, 0.01)
    assert TRAINING.detach
