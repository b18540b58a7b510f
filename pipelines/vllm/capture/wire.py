"""Messages between our process and the engine's: a typed header, and tensors as raw bytes after it."""

import socket
import struct
from collections.abc import Collection, Mapping
from typing import TypeAlias

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

PROTOCOL = 2  # both sides have to agree on it
ROPE = "rope"  # the name of a sequence's rotary positions
LENGTH = struct.Struct("<I")  # bytes of the header

Tensors = Mapping[str, Tensor]


class Start(Struct, frozen=True, tag=True, kw_only=True):
    """Ours: what to load."""

    folder: str
    dtype: str
    layers: tuple[int, ...]
    """Whose inputs are captured; the number of layers stands for the last output."""
    batch_tokens: int  # in one forward pass
    tensor_parallel: int
    states: str  # path of the socket that states are sent to


class Ready(Struct, frozen=True, tag=True, kw_only=True):
    """The engine's: it is loaded."""

    protocol: int
    version: str  # of vLLM
    max_length: int  # tokens that fit into the KV cache


class Failed(Struct, frozen=True, tag=True):
    """The engine's: it cannot go on."""

    why: str


class Medium(Struct, frozen=True):
    """One image or video of a prompt: positions [start, start + length), visual tokens where `mask` is 1."""

    kind: str  # image or video
    start: int
    length: int
    mask: bytes = b""  # one byte per position; empty: all are visual tokens


class Draw(Struct, frozen=True, kw_only=True):
    """How the tokens after a sequence are chosen.

    An engine that captures runs the last of them as well, so it draws one more, which is not of the response.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False  # of the chosen tokens, before temperature and top_p


class Submit(Struct, frozen=True, tag=True, kw_only=True):
    """Ours: a sequence to run; the tensors are its rotary positions [A, L], and what the processor made."""

    key: str
    ids: list[int]
    media: tuple[Medium, ...]
    rows: dict[int, bytes]  # layer -> positions to keep, int32
    grown: tuple[int, ...] = ()
    """Layers that keep the positions of the response as well."""
    draw: Draw


class RunAll(Struct, frozen=True, tag=True):
    """Ours: run the sequences that were submitted."""


class States(Struct, frozen=True, tag=True):
    """The engine's, on the socket for states: tensors [rows, D] by layer, and `ids`, what was run."""

    key: str


class Chosen(Struct, frozen=True):
    """The tokens after a sequence, the one that ended it included."""

    ids: list[int]
    logprobs: list[float] = []
    greedy: int = -1  # the most likely token after them, where the engine captures


class Finished(Struct, frozen=True, tag=True):
    """The engine's, after all states: what follows each sequence, by key."""

    chosen: dict[str, Chosen]


def through_stop(ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to the first of `stop_ids`, which is included."""
    ends = (at + 1 for at, token in enumerate(ids) if token in stop_ids)
    return ids[: next(ends, len(ids))]


Message: TypeAlias = Start | Ready | Failed | Submit | RunAll | States | Finished


class Header(Struct, frozen=True, array_like=True):
    """Precedes the bytes of the tensors: the message, and their names, dtypes and shapes."""

    message: Message
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]


class Channel:
    """Sends and receives messages on a socket. A receiver that does not read blocks the sender."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Message, tensors: Tensors | None = None) -> None:
        """Send a message with its tensors, which are on the CPU; OSError when the other side is gone."""
        named = {name: tensor.contiguous() for name, tensor in (tensors or {}).items()}
        shapes = tuple(
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in named.items()
        )
        header = msgspec.msgpack.encode(Header(message, shapes))
        self._socket.sendall(LENGTH.pack(len(header)) + header)
        for tensor in named.values():
            if tensor.numel():
                self._socket.sendall(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def receive(self) -> tuple[Message, dict[str, Tensor]]:
        """The next message and its tensors; EOFError when the other side is gone."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        header = msgspec.msgpack.decode(self._exactly(length), type=Header)
        tensors = dict[str, Tensor]()
        for name, kind, shape in header.tensors:
            empty = torch.empty(shape, dtype=getattr(torch, kind))
            if empty.numel():
                self._fill(empty.reshape(-1).view(torch.uint8).numpy().data)
            tensors[name] = empty
        return header.message, tensors

    def close(self) -> None:
        """Close the socket; the other side reads the end."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            read = self._socket.recv_into(view)
            if not read:
                raise EOFError
            view = view[read:]
