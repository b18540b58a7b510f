"""Runs in the engine: a scheduler that verifies no drafts.

The method `extract_hidden_states` drafts each token once more. To verify that costs a position in each step.
And vLLM 0.32 on a CPU loses temperature and top-p when it verifies drafts (`expand_batch_to_tokens`).
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class UndraftedScheduler(Scheduler):
    """vLLM's own, but for the drafts."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Leave them."""
