"""Drafters that are one `EagleBlock`: what entries are made of, in training, in decoding and in vLLM.

Shapes: N entries, R rows, U visual tokens, M visual spans, C entries of a compressed span, Q outputs of a
compression, X entries of all spans, D hidden, S the states of several layers side by side.
"""

from abc import ABC
from dataclasses import asdict
from typing import Literal

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, Entries, Head, TokenIndex
from vlmdistill.drafters.core.config import ModelConfig, features
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.layers import EagleBlock
from vlmdistill.drafters.core.serving import (
    Built,
    Feeding,
    ServedDrafter,
    Visual,
    layer_settings,
    layer_weights,
    unserved,
)
from vlmdistill.drafters.core.transfer import place
from vlmdistill.stores.schema import TargetInfo


class GuessTable(nn.Embedding):
    """A vector for the first, second, ... guess; later ones share the last. Committed tokens have zeros."""

    def __init__(self, guesses: int, width: int) -> None:
        super().__init__(guesses + 1, width, padding_idx=0)
        nn.init.zeros_(self.weight)

    def forward(self, guess_1: Tensor) -> Tensor:
        """The vector of a hop, [1, D]."""
        return super().forward(guess_1.clamp(max=self.num_embeddings - 1))


class EagleDrafter(Drafter, ABC):
    """One decoder layer over entries [embedding ; state]; a method overrides what differs."""

    def __init__(self, config: ModelConfig, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.block = EagleBlock(info, kv_heads=config.kv_heads)

    @property
    def visual(self) -> Visual:
        """How visual tokens enter; by default not at all."""
        return "dropped"

    @property
    def compresses(self) -> Literal["embed", "hidden"] | None:
        """What of dropped visual tokens `compress` reads: visual embeddings or states; None: nothing."""
        return None

    @property
    def joins(self) -> bool:
        """The last output of `compress` joins all later entries, until the next span."""
        return False

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """What visual tokens become, [M, Q, D]: the entries of each span, and what is joined to others.

        `span_U` is the span of each visual token, on the CPU where it is known there.
        """
        raise NotImplementedError

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The positions of the entries of each span, [M, C]; -1 where a span is too short for one."""
        raise NotImplementedError

    def combine(self, states_NS: Tensor) -> Tensor:
        """The states of entries as `fuse` reads them, [N, D]; by default as they are."""
        return states_NS

    def fuse(
        self,
        embed_ND: Tensor,
        state_ND: Tensor,
        guess_1: Tensor,
        joined_ND: Tensor | None = None,
    ) -> Tensor:
        """The layer's input, [N, D]; by default fc([e_{t+1} ; h_t]).

        `guess_1` is the hop, a tensor: a captured graph of vLLM runs every hop. `joined_ND` is what
        `compress` joins, zeros before the first span.
        """
        x_ND: Tensor = self.block.fc(torch.cat([embed_ND, state_ND], dim=-1))
        return x_ND

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Write visual tokens as `visual` has it, or what `compress` leaves of them."""
        if self.visual == "fused":
            self.block.write_visual(batch.feature("embed", "visual"), batch, cache)
        elif self.visual == "raw":
            tokens = batch.visual_tokens
            self.block.layer.write_kv(
                batch.feature("embed", "visual"), tokens.position_N - 1, tokens, cache
            )
        elif self.compresses is not None:
            read_UD, known = batch.feature(self.compresses, "visual"), batch.readable
            out_MQD = self.compress(
                read_UD, known.visual_tokens.span_N, len(known.start_M)
            )
            self.write_compressed(
                out_MQD, self.places(known.start_M, known.length_M), batch, cache
            )
            if self.joins:
                cache.context["joined"] = out_MQD[:, -1]

    def write_compressed(
        self, out_MQD: Tensor, position_MC: Tensor, batch: Batch, cache: KVCache
    ) -> None:
        """Write the first entries of each span at their positions, [M, C]; -1: there is none.

        The positions are where the batch is `readable`.
        """
        known, device = batch.readable, out_MQD.device
        span_X, entry_X = (position_MC >= 0).nonzero().unbind(1)
        tokens = TokenIndex(
            known.segment_M[span_X], position_MC[span_X, entry_X], span_X
        ).to(device)
        out_XD = out_MQD[tokens.span_N, place(entry_X, device)]
        self.block.layer.write_kv(out_XD, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """EAGLE's step: layer(fuse(e_{t+1}, h_t)) -> g_{t+1}, [R, D]."""
        joined_ND = None
        if self.joins:  # row 0 is for text before the first span
            rows_ND = torch.nn.functional.pad(cache.context["joined"], (0, 0, 1, 0))
            joined_ND = rows_ND[entries.tokens.span_N + 1]
        guess_1 = entries.ids_N.new_full((1,), entries.hop)
        x_ND = self.fuse(
            self.embed(entries.ids_N),
            self.combine(entries.hidden_ND),
            guess_1,
            joined_ND,
        )
        state_RD: Tensor = self.block.layer(
            x_ND, entries.rotary_N, entries.tokens, cache, entries.hop
        )
        return state_RD

    @property
    def after_image(self) -> Literal["visual", "text"]:
        """The state with which the first token after an image is paired: the image's last, or the text's."""
        needs = self.config.needs(self.info, decoding=True)
        return "visual" if needs & features("hidden.span", "hidden.visual") else "text"

    def published(self) -> ServedDrafter:
        """As the plugin of vLLM runs it, which builds the drafter itself around a layer of its own.

        TrainingError when the plugin does not have its rotary positions.
        """
        config, layer = self.config, self.block.layer
        if config.positions == "target" or (
            self.compresses and config.positions != "expanded"
        ):
            raise unserved("positions", config.positions, "expanded")
        weights = {
            f"drafter.{name}": value
            for name, value in self.state_dict().items()
            if not name.startswith("block.layer.")
        }
        if layer.input_norm is not None:
            weights["layer.input_layernorm.weight"] = layer.input_norm.weight
        return ServedDrafter(
            settings={  # vLLM knows prefixes of the names of classes
                "architectures": [
                    "Eagle3BlockVlmdistill" if self.taps else "EagleVlmdistill"
                ],
                "qkv_bias": layer.qkv_proj.bias is not None,
                **layer_settings(self, layer),
                **(
                    {"eagle_aux_hidden_state_layer_ids": [*self.taps]}
                    if self.taps
                    else {}
                ),
            },
            weights={**weights, **layer_weights(layer, "layer")},
            feeding=Feeding(
                drafter=type(self).__module__.rpartition(".")[2],
                visual=self.visual,
                whole_images=self.compresses == "hidden",
                draft_tokens=config.max_hops or 0,
                built=Built(config=asdict(config), target=self.info),
            ),
            method="eagle3"
            if self.taps
            else "eagle",  # which has vLLM keep the states of several layers
            draft_vocabulary=self.info.vocab_size,
            layers=self.taps,
        )
