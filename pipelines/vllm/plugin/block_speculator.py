"""Speculators of block drafters whose context is text alone, on vLLM's V2 runner.

Shapes: N rows of a step, S the states of several layers side by side.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark import speculator as dspark
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vlmdistill.pipelines.vllm.plugin.entry_map import TextStates
from vlmdistill.pipelines.vllm.plugin.feeder import Feeder
from vlmdistill.pipelines.vllm.plugin.limits import feeding_of
from vlmdistill.pipelines.vllm.plugin.served_model import BesideAnyTarget
from vlmdistill.pipelines.vllm.plugin.speculator import feed_batch, without_dropped


class _TextContext(DFlashSpeculator):
    """Leaves the states of visual tokens out before vLLM writes the context, so that positions have no gaps.

    The arguments of `propose` are all that vLLM drafts from; its graphs read its own copies of them.
    """

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter."""
        super().load_model(target_model)
        self._feeder = Feeder(TextStates(), self.device)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Draft a block from the states of text."""
        if aux_hidden_states and self.model_state.supports_mm_inputs and not dummy_run:
            states_NS = torch.cat(aux_hidden_states, dim=-1)
            feed = feed_batch(
                self._feeder, input_batch, self.model_state, states_NS, None
            )
            if feed is not None:
                input_batch = without_dropped(input_batch, feed)
                # vLLM combines them, in 0.33 within a graph.
                aux_hidden_states = [feed.hidden_KD]
        drafted: Tensor = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        return drafted


class ChosenDFlashSpeculator(BesideAnyTarget, DFlashSpeculator):
    """vLLM's speculator for its own DFlash drafters, and `TextDFlashSpeculator` for those of text alone."""

    def __new__(cls, vllm_config: VllmConfig, *_: object) -> "ChosenDFlashSpeculator":
        """Choose by the drafter's folder."""
        return object.__new__(TextDFlashSpeculator if _reads_text(vllm_config) else cls)


class TextDFlashSpeculator(_TextContext, ChosenDFlashSpeculator):
    """DFlash whose context is text alone."""


class ChosenDSparkSpeculator(BesideAnyTarget, DSparkSpeculator):
    """vLLM's speculator for its own DSpark drafters, and `TextDSparkSpeculator` for those of text alone."""

    def __new__(cls, vllm_config: VllmConfig, *_: object) -> "ChosenDSparkSpeculator":
        """Choose by the drafter's folder."""
        return object.__new__(TextDSparkSpeculator if _reads_text(vllm_config) else cls)


class TextDSparkSpeculator(_TextContext, ChosenDSparkSpeculator):
    """DSpark whose context is text alone."""


def _reads_text(vllm_config: VllmConfig) -> bool:
    feeding = feeding_of(vllm_config)
    return feeding is not None and feeding.visual == "dropped"


def put_block_speculators() -> None:
    """Replace vLLM's classes by these: `init_speculator` looks them up when it needs one."""
    dflash.DFlashSpeculator = ChosenDFlashSpeculator
    dspark.DSparkSpeculator = ChosenDSparkSpeculator
