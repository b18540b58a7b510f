"""Drafters that are one `EagleBlock`: what entries are made of, in training, decoding and vLLM.

Shapes: N entries, R rows, U visual tokens, M visual spans, C entries of a compressed span, Q
outputs of a compression, X entries of all spans, D hidden, S the states of several layers
side by side.
"""

from abc import ABC
from dataclasses import asdict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, Entries, Head, TokenIndex
from vlmdistill.drafters.core.config import EagleConfig, features
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.layers import EagleBlock
from vlmdistill.drafters.core.serving import (
    DRAFT_IDS,
    Built,
    Feeding,
    ServedDrafter,
    Visual,
    layer_settings,
    layer_weights,
    unserved,
)
from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.core.vocabulary import FrequentTokens
from vlmdistill.stores.schema import TargetInfo


class GuessTable(nn.Embedding):
    """A vector for the first, second, ... guess; later ones share the last.

    Committed tokens have zeros.
    """

    def __init__(self, guesses: int, width: int) -> None:
        super().__init__(guesses + 1, width, padding_idx=0)
        nn.init.zeros_(self.weight)

    def forward(self, guess_1: Tensor) -> Tensor:
        """The vector of a hop, [1, D]."""
        return super().forward(guess_1.clamp(max=self.num_embeddings - 1))


class EagleDrafter(FrequentTokens, Drafter, ABC):
    """One decoder layer over entries [embedding ; state]; a method overrides what differs."""

    def __init__(self, config: EagleConfig, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        self.register_vocabulary(config.draft_vocab)
        self.block = EagleBlock(info, kv_heads=config.kv_heads)

    @property
    def visual(self) -> Visual:
        """How visual tokens enter; by default not at all."""
        return "dropped"

    @property
    def compresses(self) -> Literal["embed", "hidden"] | None:
        """Whether `compress` reads visual embeddings or states; None: nothing is compressed."""
        return None

    @property
    def joins(self) -> bool:
        """Whether the last output of `compress` joins all later entries, until the next span."""
        return False

    def compress(self, read_UD: Tensor, span_U: Tensor, spans: int) -> Tensor:
        """Compress the visual tokens of each span: [M, Q, D].

        The first outputs are the entries of a span; the last may be joined to later ones.
        `span_U` is the span of each visual token; it is on the CPU if it is known there.
        """
        raise NotImplementedError

    def places(self, start_M: Tensor, length_M: Tensor) -> Tensor:
        """The positions of the entries of each span, [M, C]; -1 where a span has fewer."""
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

        Args:
            embed_ND: Token embeddings.
            state_ND: The states before them, from `combine`.
            guess_1: The hop, as a tensor: a captured graph of vLLM runs every hop.
            joined_ND: What `compress` joins; zeros before the first span.
        """
        entry_N2D = torch.cat([embed_ND, state_ND], dim=-1)
        x_ND: Tensor = self.block.fc(entry_N2D)
        return x_ND

    @property
    def has_cell(self) -> bool:
        """Whether `cell` makes all guesses but the first, instead of the layer."""
        return False

    def cell(self, embed_ND: Tensor, state_ND: Tensor) -> Tensor:
        """The drafter's states of guesses, by their embeddings and the states before them, [N, D]."""
        raise NotImplementedError

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Write visual tokens as `visual` says, or what `compress` makes of them."""
        if self.visual == "fused":
            self.block.write_visual(batch.feature("embed", "visual"), batch, cache)
        elif self.visual == "raw":
            embed_UD = batch.feature("embed", "visual")
            tokens = batch.visual_tokens
            rotary_U = tokens.position_N - 1
            self.block.layer.write_kv(embed_UD, rotary_U, tokens, cache)
        elif self.compresses is not None:
            read_UD = batch.feature(self.compresses, "visual")
            readable = batch.readable
            start_M = readable.start_M
            length_M = readable.length_M
            span_U = readable.visual_tokens.span_N
            out_MQD = self.compress(read_UD, span_U, len(start_M))
            position_MC = self.places(start_M, length_M)
            self.write_compressed(out_MQD, position_MC, batch, cache)
            if self.joins:
                cache.context["joined"] = out_MQD[:, -1]

    def write_compressed(
        self, out_MQD: Tensor, position_MC: Tensor, batch: Batch, cache: KVCache
    ) -> None:
        """Write the first entries of each span at their positions; -1: there is none.

        `position_MC` is where the batch is `readable`.
        """
        device = out_MQD.device
        span_X, entry_X = (position_MC >= 0).nonzero().unbind(1)
        segment_X = batch.readable.segment_M[span_X]
        position_X = position_MC[span_X, entry_X]
        tokens = TokenIndex(segment_X, position_X, span_X).to(device)
        out_XD = out_MQD[tokens.span_N, place(entry_X, device)]
        self.block.layer.write_kv(out_XD, tokens.position_N - 1, tokens, cache)

    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """EAGLE's step: layer(fuse(e_{t+1}, h_t)) -> g_{t+1}, [R, D]."""
        joined_ND = None
        if self.joins:
            # Row 0 is for text before the first span.
            joined_MD = cache.context["joined"]
            joined_XD = F.pad(joined_MD, (0, 0, 1, 0))
            joined_ND = joined_XD[entries.tokens.span_N + 1]
        guess_1 = entries.ids_N.new_full((1,), entries.hop)
        embed_ND = self.embed(entries.ids_N)
        state_ND = self.combine(entries.hidden_ND)
        x_ND = self.fuse(embed_ND, state_ND, guess_1, joined_ND)
        state_RD: Tensor = self.block.layer(
            x_ND, entries.rotary_N, entries.tokens, cache, entries.hop
        )
        return state_RD

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """The target's LM head, of the draft vocabulary."""
        return F.linear(estimate_ND, self.head_KD).float()

    @property
    def after_image(self) -> Literal["visual", "text"]:
        """The state with which the first token after an image is paired.

        The last one of the image, or of the text before it.
        """
        needs = self.config.needs(self.info, decoding=True)
        image_states = features("hidden.span", "hidden.visual")
        return "visual" if needs & image_states else "text"

    def published(self) -> ServedDrafter:
        """As the plugin of vLLM runs it, which builds the drafter around a layer of vLLM's.

        TrainingError when the plugin does not have its rotary positions.
        """
        self._check_positions()
        config = self.config
        info = self.info
        layer = self.block.layer
        # By their prefixes vLLM tells drafters that read the states of several layers.
        architecture = "Eagle3BlockVlmdistill" if self.taps else "EagleVlmdistill"
        settings = layer_settings(self, layer)
        settings["architectures"] = [architecture]
        settings["qkv_bias"] = layer.qkv_proj.bias is not None
        if self.taps:
            settings["eagle_aux_hidden_state_layer_ids"] = [*self.taps]
        weights = {}
        for name, value in self.state_dict().items():
            if name != "d2t" and not name.startswith("block.layer."):
                weights[f"drafter.{name}"] = value
        vocabulary_K = self.vocabulary_K
        if vocabulary_K is not None:
            weights[DRAFT_IDS] = vocabulary_K
        if layer.input_norm is not None:
            weights["layer.input_layernorm.weight"] = layer.input_norm.weight
        _, _, name = type(self).__module__.rpartition(".")
        feeding = Feeding(
            drafter=name,
            visual=self.visual,
            whole_images=self.compresses == "hidden",
            draft_tokens=config.max_hops or 0,
            built=Built(config=asdict(config), target=info),
        )
        weights |= layer_weights(layer, "layer")
        return ServedDrafter(
            settings=settings,
            weights=weights,
            feeding=feeding,
            method="eagle3" if self.taps else "eagle",
            draft_vocabulary=info.vocab_size
            if vocabulary_K is None
            else len(vocabulary_K),
            layers=self.taps,
        )

    def _check_positions(self) -> None:
        """TrainingError for rotary positions that the plugin does not have."""
        positions = self.config.positions
        if positions == "expanded":
            return
        if positions == "target" or self.compresses:
            raise unserved("positions", positions, "expanded")
