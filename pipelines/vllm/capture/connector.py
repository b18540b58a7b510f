"""Runs in the engine: a KV connector that sends the requested rows of hidden states, sequence by sequence.

vLLM's method `extract_hidden_states` keeps the captured layers of all tokens in a KV cache group of their
own, [blocks, layers, block size, D], at each step: chunks of a prompt, and tokens that are generated. When a
sequence is done, its rows are gathered on the device, copied once, and sent by a thread. Where the receiver
is slow the engine waits: it holds few sequences.
"""

import queue
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from vlmdistill.pipelines.vllm.capture.wire import Channel, States, through_stop

LAYER = "cache_only_layers"  # in the name of the one layer that keeps states
HELD = 4  # sequences that wait to be sent


@dataclass
class Done:
    """A sequence whose states are complete, and the blocks that hold them."""

    request: str
    key: str
    ids: list[int]
    rows: dict[int, bytes]
    grown: range  # positions of the response
    grows: tuple[int, ...]  # layers that keep them
    blocks: list[int]


@dataclass
class DoneList(KVConnectorMetadata):
    """The finished sequences that the scheduler hands to the workers in one step."""

    done: list[Done] = field(default_factory=list)


class RowConnector(KVConnectorBase_V1, SupportsHMA):
    """Sends rows of hidden states to the socket `states` of its extra configuration; loads nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(
            vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config
        )
        groups = kv_cache_config.kv_cache_groups
        (self._group,) = (
            number for number, group in enumerate(groups) if _keeps_states(group)
        )
        spec = vllm_config.speculative_config.draft_model_config.hf_config
        self._layers = list(spec.eagle_aux_hidden_state_layer_ids)
        self._path = self._kv_transfer_config.get_from_extra_config("states", "")
        self._done: list[Done] = []  # of the scheduler
        self._cache: torch.Tensor | None = None  # of the worker
        self._queue = queue.Queue[tuple[str, dict[str, torch.Tensor]]](HELD)

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """No token is loaded."""
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Nothing is loaded into these blocks."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished sequence until a worker has sent its rows.

        The last token was drawn and never run: it has no state.
        """
        wanted = request.kv_transfer_params
        prompt = list(request.prompt_token_ids)
        response = list(request.output_token_ids)[:-1]
        ids = prompt + through_stop(response, wanted["stop_ids"])
        done = Done(
            request=request.request_id,
            key=wanted["key"],
            ids=ids,
            rows=wanted["rows"],
            grown=range(len(prompt), len(ids)),
            grows=wanted["grown"],
            blocks=list(block_ids[self._group]),
        )
        self._done.append(done)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> DoneList:
        """Hand over what was finished since the last step."""
        done = self._done
        self._done = []
        return DoneList(done)

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the states; the first worker connects and sends, the others do nothing."""
        if get_tensor_model_parallel_rank():
            return
        (name,) = (name for name in kv_caches if LAYER in name)
        self._cache = kv_caches[name]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        channel = Channel(connection)
        threading.Thread(target=self._send, args=(channel,), daemon=True).start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The model has saved the states itself."""

    def wait_for_save(self) -> None:
        """Rows are copied when a sequence is done."""

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Copy the rows of finished sequences; their blocks are then free."""
        if self._cache is None or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DoneList)
        for done in metadata.done:
            self._queue.put((done.key, self._rows(done)))
        return {done.request for done in metadata.done} or None, None

    def get_finished_count(self) -> int:
        """One worker reports."""
        return 1

    def _rows(self, done: Done) -> dict[str, torch.Tensor]:
        """The requested rows [rows, D] of each requested layer, on the CPU."""
        assert self._cache is not None
        size = self._cache.shape[2]
        blocks = torch.tensor(done.blocks)
        grown_N = torch.tensor(done.grown, dtype=torch.long)
        rows = {"ids": torch.tensor(done.ids, dtype=torch.int32)}
        for layer, positions in done.rows.items():
            position_N = torch.from_numpy(
                np.frombuffer(positions, dtype=np.int32).astype(np.int64)
            )
            if layer in done.grows:
                position_N = torch.cat([position_N, grown_N])
            block_N = blocks[position_N // size].to(self._cache.device)
            offset_N = (position_N % size).to(self._cache.device)
            number = self._layers.index(layer)
            rows[str(layer)] = self._cache[block_N, number, offset_N].cpu()
        return rows

    def _send(self, channel: Channel) -> None:
        """Until our process is gone, which ends the engine as well."""
        while True:
            key, rows = self._queue.get()
            try:
                channel.send(States(key), rows)
            except OSError:
                return

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any: rows are found by block, layer and offset."""
        return None


def _keeps_states(group: Any) -> bool:
    """Whether a group of the KV cache has the layer that keeps states."""
    return any(LAYER in name for name in group.layer_names)
