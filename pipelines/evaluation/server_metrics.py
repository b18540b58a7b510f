"""What a server counts, from its Prometheus metrics: the names of vLLM, SGLang and `vlmdistill serve`."""

import re
from collections.abc import Mapping
from typing import Final

from vlmdistill.pipelines.evaluation.served_records import ServerCounts

NAMES: Final = {
    "vllm:generation_tokens_total": "generated",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "chain_accepted",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:mm_cache_queries_total": "images",
    "vllm:mm_cache_hits_total": "cached_images",
    "sglang:generation_tokens_total": "generated",
    "sglang:spec_verify_calls_total": "drafts",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:cached_tokens_total": "cached_tokens",
    "vlmdistill_completion_tokens_total": "generated",
    "vlmdistill_drafts_total": "drafts",
    "vlmdistill_accepted_tokens_total": "accepted",
    "vlmdistill_chain_tried_tokens_total": "chain_tried",
    "vlmdistill_chain_accepted_tokens_total": "chain_accepted",
}
"""Counters, and what we call them."""
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? ([0-9.eE+]+)$", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)position="(\d+)"')

Counters = Mapping[tuple[str, int], int]
"""Values by name and position in a draft, 0 where a counter has no positions."""


def parse(text: str) -> Counters:
    """The counters of a page of metrics, summed over the engines that it lists."""
    found: dict[tuple[str, int], int] = {}
    for name, labels, value in SAMPLE.findall(text):
        if name in NAMES:
            at = POSITION.search(labels)
            key = NAMES[name], int(at[1]) if at else 0
            found[key] = found.get(key, 0) + int(float(value))
    return found


def between(before: Counters, after: Counters) -> ServerCounts:
    """What was counted from one page to a later one. What a page lacks, or a restart has reset, is None.

    All is None if the first page is empty: the later one counts since the server started.
    Counters of drafts are None, too, when there was no draft.
    """
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    if not before or any(value < 0 for value in gained.values()):
        return ServerCounts()

    def chain(wanted: str) -> tuple[int, ...]:
        return tuple(value for (name, _), value in sorted(gained.items()) if name == wanted)

    drafted = bool(gained.get(("drafts", 0)))
    tried, accepted = chain("chain_tried"), chain("chain_accepted")
    if not tried:  # every draft is a whole chain: a position is verified after all before it were accepted
        tried = (gained.get(("drafts", 0), 0), *accepted[:-1])[: len(accepted)]
    return ServerCounts(
        generated=gained.get(("generated", 0)),
        prompt_tokens=gained.get(("prompt_tokens", 0)),
        cached_tokens=gained.get(("cached_tokens", 0)),
        images=gained.get(("images", 0)),
        cached_images=gained.get(("cached_images", 0)),
        drafts=gained["drafts", 0] if drafted else None,
        accepted=gained.get(("accepted", 0)) if drafted else None,
        chain_tried=tried if drafted else (),
        chain_accepted=accepted if drafted else (),
    )
