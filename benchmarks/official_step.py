"""One training step as the official codes of EAGLE-2, HASS and ViSpec compute it, in plain torch.

All positions, visual ones included, go through projections of their own and through attention over a whole
mask; the layer is computed again in the backward pass; drafter and target have logits at every position.
Shapes: L tokens of the sample, S entries of the layer, D hidden, H heads, d head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.layers import apply_rotary
from vlmdistill.drafters.core.losses import BEST
from vlmdistill.stores.schema import Feature

KeysValues = tuple[Tensor, Tensor]  # of one pass, [H, S, d]


class OfficialStep(nn.Module):
    """A drafter of the same weights and its losses; `visual` of its tokens are one image."""

    def __init__(
        self, drafter: EagleDrafter, batch: Batch, stage: Stage, *, detach: bool
    ) -> None:
        super().__init__()
        self.drafter, self.stage, self.detach = drafter, stage, detach
        layer = drafter.block.layer
        self.fc = _copy(drafter.block.fc.weight, drafter.block.fc.bias)
        bias = layer.qkv_proj.bias
        biases = bias.chunk(3) if bias is not None else (None,) * 3
        self.qkv = nn.ModuleList(map(_copy, layer.qkv_proj.weight.chunk(3), biases))
        self.gate_up = nn.ModuleList(map(_copy, layer.gate_up_proj.weight.chunk(2)))
        self.o_proj, self.down_proj = (
            _copy(layer.o_proj.weight),
            _copy(layer.down_proj.weight),
        )
        self.norm, self.rotary = layer.post_attention_norm, layer.rotary
        self.compresses = drafter.compresses is not None
        text_L = torch.ones(len(batch.ids_T) + int(batch.length_M), dtype=torch.bool)
        text_L[int(batch.start_M) : int(batch.start_M) + int(batch.length_M)] = False
        self.text_L, self.mask_L = text_L, torch.zeros(len(text_L), dtype=torch.bool)
        self.mask_L[text_L] = batch.response_T & batch.response_T.roll(-1)
        visual = {
            name: batch.features.get(Feature.parse(f"{name}.visual"))
            for name in ("embed", "hidden")
        }
        self.embed_LD = self._whole(drafter.embed(batch.ids_T), visual["embed"])
        self.hidden_LD = self._whole(batch.feature("hidden", "text"), visual["hidden"])
        if self.compresses:  # the state before the text after the image
            self.hidden_LD[int(batch.start_M) + int(batch.length_M) - 1] = (
                batch.feature("hidden", "span")
            )

    def _whole(self, text_TD: Tensor, visual_UD: Tensor | None) -> Tensor:
        whole_LD = text_TD.new_zeros(len(self.text_L), text_TD.shape[1])
        whole_LD[self.text_L] = text_TD.detach()
        if visual_UD is not None:
            whole_LD[~self.text_L] = visual_UD
        return whole_LD

    def forward(self) -> Tensor:
        """The loss, summed over supervised positions and hops."""
        keys: list[KeysValues] = []
        target_LD, input_LD, total = self.hidden_LD, self.hidden_LD, torch.zeros(())
        with torch.no_grad():
            target_LV = F.linear(target_LD, self.drafter.lm_head_VD)
            teacher_LV = target_LV.softmax(-1)
        for hop in range(self.stage.hops):
            state_LD = self._layer(input_LD, keys)
            mask_L = self.mask_L & (
                torch.arange(len(self.mask_L)) >= int(self.mask_L.nonzero()[0]) + hop
            )
            total = total + self.stage.hop_decay**hop * self._loss(
                state_LD, teacher_LV, mask_L
            )
            fed_LD = state_LD.detach() if self.detach else state_LD
            input_LD = torch.cat(
                [self.hidden_LD[:1], fed_LD[1:]]
            )  # the state of token l is its estimate
        return total

    def _layer(self, input_LD: Tensor, keys: list[KeysValues]) -> Tensor:
        """The estimated states of all tokens, zeros for the first and for what is compressed."""
        state_SD, kept_L = (
            input_LD[:-1],
            torch.ones(len(input_LD) - 1, dtype=torch.bool),
        )
        embed_SD, rotary_S = self.embed_LD[1:], torch.arange(len(input_LD) - 1)
        carried_QD = None
        if self.compresses:
            visual_UD = self.embed_LD[~self.text_L]
            (out_QD,) = self.drafter.compress(
                visual_UD, torch.zeros(len(visual_UD), dtype=torch.long), 1
            )
            carried_QD, kept_L = out_QD[:-1], self.text_L[1:].clone()
            first = int((~self.text_L).nonzero()[0])
            joined_LD = torch.zeros_like(input_LD[:-1])
            joined_LD[first:] = out_QD[-1]
            state_SD = self.drafter.img_fc(torch.cat([state_SD, joined_LD], dim=-1))  # type: ignore[operator]
            kept_L[
                first + len(visual_UD) - 1 - len(carried_QD) : first
                + len(visual_UD)
                - 1
            ] = True
        x_SD = self.fc(torch.cat([embed_SD, state_SD], dim=-1))
        if carried_QD is not None:
            at = first + len(visual_UD) - 1 - len(carried_QD)
            x_SD = torch.cat([x_SD[:at], carried_QD, x_SD[at + len(carried_QD) :]])[
                kept_L
            ]
            rotary_S = rotary_S[kept_L]
        own: list[KeysValues] = []
        before = (
            [] if self.compresses else list(keys)
        )  # ViSpec's second pass replaces the whole input
        out_SD = checkpoint(
            self._decoder_layer, x_SD, rotary_S, before, own, use_reentrant=False
        )
        keys.append(own[0])
        whole_LD = input_LD.new_zeros(input_LD.shape)
        whole_LD[1:][kept_L] = out_SD
        return whole_LD

    def _decoder_layer(
        self,
        x_SD: Tensor,
        rotary_S: Tensor,
        before: list[KeysValues],
        own: list[KeysValues],
    ) -> Tensor:
        layer = self.drafter.block.layer
        query_SHd, key_SHd, value_SHd = (
            part(x_SD).unflatten(-1, (layer.heads, -1)) for part in self.qkv
        )
        factors = self.rotary(rotary_S, x_SD.dtype)
        query_HSd, key_HSd = (
            apply_rotary(part, factors).transpose(0, 1) for part in (query_SHd, key_SHd)
        )
        value_HSd = value_SHd.transpose(0, 1)
        own.append((key_HSd, value_HSd))
        keys = [*before, (key_HSd, value_HSd)]
        hops = len(keys) - 1
        scale = layer.head_dim**-0.5
        (first_HSd, value_first_HSd), index_S = keys[0], torch.arange(len(x_SD))
        score_HSS = query_HSd @ first_HSd.transpose(1, 2) * scale
        score_HSS = score_HSS.masked_fill(index_S > index_S[:, None], -torch.inf)
        diagonals = [
            (index_S[hops - hop :], index_S[: len(x_SD) - hops + hop], *keys[hop])
            for hop in range(1, hops + 1)
        ]
        for (
            row,
            column,
            key,
            _,
        ) in diagonals:  # each later pass replaces one diagonal (HASS)
            score_HSS = score_HSS.index_put(
                (torch.arange(layer.heads)[:, None], row, column),
                (query_HSd[:, row] * key[:, column]).sum(-1) * scale,
            )
        weight_HSS = score_HSS.softmax(-1)
        mixed_HSd = weight_HSS @ value_first_HSd
        for row, column, _, value in diagonals:
            change = (
                weight_HSS[:, row, column, None] * (value - value_first_HSd)[:, column]
            )
            mixed_HSd = mixed_HSd.index_add(1, row, change)
        x_SD = x_SD + self.o_proj(mixed_HSd.transpose(0, 1).flatten(1))
        gate, up = self.gate_up
        normed_SD = self.norm(x_SD)
        added_SD: Tensor = self.down_proj(F.silu(gate(normed_SD)) * up(normed_SD))
        return x_SD + added_SD

    def _loss(self, state_LD: Tensor, teacher_LV: Tensor, mask_L: Tensor) -> Tensor:
        draft_LV = F.linear(state_LD, self.drafter.lm_head_VD)
        log_LV = draft_LV.log_softmax(-1)
        ranked = {
            "top_k",
            "list_mle",
        } & self.stage.losses.keys()  # EAGLE-2's code has no top-k
        best_LK = (
            teacher_LV.topk(BEST).indices
            if ranked
            else mask_L.new_zeros(0, dtype=torch.long)
        )
        found = {
            "regression": lambda: F.smooth_l1_loss(
                state_LD, self.hidden_LD, reduction="none"
            ).mean(-1),
            "cross_entropy": lambda: -(teacher_LV * log_LV).sum(-1),
            "top_k": lambda: (
                -(teacher_LV.gather(1, best_LK) * log_LV.gather(1, best_LK)).sum(-1)
            ),
            "l1": lambda: (draft_LV.softmax(-1) - teacher_LV).abs().sum(-1),
            "list_mle": lambda: _list_mle(draft_LV.gather(1, best_LK)),
        }
        losses = [
            weight * (found[name]() * mask_L).sum()
            for name, weight in self.stage.losses.items()
        ]
        return torch.stack(losses).sum()


def _list_mle(score_LK: Tensor) -> Tensor:
    return (score_LK.flip(-1).logcumsumexp(-1).flip(-1) - score_LK).sum(-1)


def _copy(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.load_state_dict(
        {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    )
    return made
