"""The contract of drafters: one `step` that training and decoding share.

The convention of EAGLE, section 3: the entry of token x_{t+1} pairs its embedding with the
target's hidden state h_t of the token before it, and has rotary position t. Its output
g_{t+1} is an estimate of h_{t+1}, so that lm_head(g_{t+1}) predicts x_{t+2}.

Shapes: T text tokens, U visual tokens, E entries (one for each text token that has a
predecessor), R entries whose output is wanted, N tokens or states, S the states of several
layers side by side, D hidden width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlmdistill.drafters.core.batch import Batch, Entries, Head
from vlmdistill.drafters.core.capabilities import ConfidenceHead
from vlmdistill.drafters.core.config import ModelConfig, Stage, TrainConfig
from vlmdistill.drafters.core.kv_cache import KVCache
from vlmdistill.drafters.core.layers import EAGLE_NAMES
from vlmdistill.drafters.core.losses import Scores, TargetRows, no_confidence, score
from vlmdistill.drafters.core.target import Target
from vlmdistill.drafters.core.transfer import place_all
from vlmdistill.drafters.core.tree import DraftSession, Tree
from vlmdistill.drafters.core.tree_drafter import TreeDrafter
from vlmdistill.drafters.core.vocabulary import columns_of
from vlmdistill.stores.schema import TargetInfo


class Proposer(nn.Module, ABC):
    """Proposes tokens to a target: a trained `Drafter`, or a method without training."""

    Config: ClassVar[type[ModelConfig]] = ModelConfig
    """What it computes; the defaults are its paper's."""
    Training: ClassVar[type[TrainConfig]] = TrainConfig
    """How it is trained; the defaults are its paper's."""
    tree: Tree = Tree()
    """The tree that it drafts by default."""
    shaped: ClassVar[bool] = True
    """Whether it drafts the tree that is asked for; else always a tree of its own shape."""

    embed_VD: Tensor
    lm_head_VD: Tensor

    def __init__(self, config: ModelConfig, info: TargetInfo, head: Head) -> None:
        super().__init__()
        self.config = config
        self.info = info
        # Frozen and shared with the target: in the module, but not in its checkpoints.
        self.register_buffer("embed_VD", head.embed_VD, persistent=False)
        self.register_buffer("lm_head_VD", head.lm_head_VD, persistent=False)

    def extra_repr(self) -> str:
        """Its target, size and tree: the first line of its `repr`."""
        parameters = sum(weight.numel() for weight in self.parameters())
        return f"for {self.info.name}, {parameters:,} parameters, tree {self.tree}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The target states that, side by side, are an entry's `hidden_ND` at hop 0."""
        return ("hidden",)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs are among `sources`."""
        layers = [name for name in self.sources if name.startswith("layer")]
        return tuple(int(name.removeprefix("layer")) for name in layers)

    @abstractmethod
    def draft(self, prompt: Batch, target: Target) -> DraftSession:
        """Begin to draft after a prompt that `target` has just read.

        `prompt` is one sequence, which ends in text.
        """


class Drafter(Proposer, ABC):
    """A drafter that goes step by step: how visual tokens enter, and what a step is."""

    published_names: ClassVar[Mapping[str, str]] = EAGLE_NAMES
    """Modules or tensors of its authors' checkpoints -> their names here.

    `/n` is the n-th block of rows, `*` the number of a layer.
    """
    published_settings: ClassVar[Mapping[str, str]] = {}
    """A tensor of such a checkpoint -> the setting that is its number of rows or, if the
    setting is a switch, whether it is there."""
    published_switches: ClassVar[Mapping[str, str]] = {}
    """Switches of its `config.json` -> settings."""
    published_files: ClassVar[tuple[str, ...]] = ()
    """Files that it may have besides its weights: their tensors are named `file:key`."""

    @classmethod
    def published_config(
        cls, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Any]:
        """Settings read from `config.json` and the tensors; DataError if unsupported."""
        return {}

    def draft(self, prompt: Batch, target: Target) -> DraftSession:
        """Begin to grow trees from its own steps."""
        return TreeDrafter(self, prompt)

    def condition(self, batch: Batch, cache: KVCache) -> None:
        """Write what it keeps of the visual tokens of `batch`; by default nothing."""

    @abstractmethod
    def step(self, entries: Entries, cache: KVCache) -> Tensor:
        """One draft step: write the entries to the cache, return the wanted states, [R, D]."""

    def estimate(self, state_ND: Tensor, hop: int) -> Tensor:
        """The part of a state from `step` that estimates the target's, [N, D]; here all."""
        return state_ND

    def lm_logits(self, estimate_ND: Tensor, last_N: Tensor) -> Tensor:
        """Scores of the token after `last_N`, from estimates of its state: float32 [N, V]."""
        return nn.functional.linear(estimate_ND, self.lm_head_VD).float()

    def logits(self, state_ND: Tensor, last_N: Tensor, hop: int = 0) -> Tensor:
        """Scores of the token after `last_N`, from states of `step` at `hop`: float32 [N, V]."""
        return self.lm_logits(self.estimate(state_ND, hop), last_N)

    @property
    def lm_parameters(self) -> tuple[Tensor, ...]:
        """The weights that `lm_logits` and a confidence head train; the LM head is frozen."""
        return ()

    def loss(self, states: Sequence[Tensor], rows: TargetRows, stage: Stage) -> Scores:
        """The losses of a stage on the states that `step` returned, by hop; see `score`."""
        estimates = []
        for hop, state_RD in enumerate(states):
            estimates.append(self.estimate(state_RD, hop))
        confidence = no_confidence
        if isinstance(self, ConfidenceHead):
            confidence = self.confidence
        return score(
            estimates,
            rows,
            self.lm_logits,
            self.lm_head_VD,
            stage.losses,
            confidence=confidence,
            parameters=self.lm_parameters,
            decay=stage.hop_decay,
            pace=stage.pace,
            keep_top=stage.keep_top,
            vocabulary_K=columns_of(self),
        )

    def embed(self, ids_N: Tensor) -> Tensor:
        """The target's token embeddings, [N, D]."""
        return nn.functional.embedding(ids_N, self.embed_VD)

    def entries(self, batch: Batch) -> tuple[Entries, Tensor]:
        """Hop-0 entries of all text tokens that have a predecessor, and their text indices, [E].

        The token at text index j becomes the entry (embedding of x_j, state before it) at
        the rotary position of that state. The indices are where the batch is `readable`.
        """
        token_E, hidden_ES = batch.predecessors(self.sources, "text")
        readable = batch.readable
        device = batch.ids_T.device
        ids_E = readable.ids_T[token_E]
        rotary_E = self.rotary(readable)[token_E] - 1
        ids_E, rotary_E = place_all([ids_E, rotary_E], device)
        tokens = readable.text_tokens.only(token_E).to(device)
        return Entries(ids_E, hidden_ES, rotary_E, tokens), token_E

    def rotary(self, batch: Batch) -> Tensor:
        """Rotary position of every text token under `config.positions`, from tokens alone: [T]."""
        if self.config.positions == "expanded":
            return batch.position_T
        if self.config.positions == "target":
            return batch.rope_T
        segment_T = batch.segment_T
        index_T = torch.arange(len(segment_T), device=segment_T.device)
        first_T = torch.searchsorted(segment_T, segment_T)
        return index_T - first_T
