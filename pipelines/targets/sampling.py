"""Many answers at once: a token each in every step, over one cache; whoever has ended takes no more part.

Shapes: B answers still going, N positions of the prompts, S positions of the cache, D hidden width,
V vocabulary, Y layers, G key heads and then value heads, H heads, d head width.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmdistill.drafters.decoding.verify import choose
from vlmdistill.pipelines.targets.decoding import Attend, FusedLayers

ROOM = 128  # positions that the cache grows by, at least


@dataclass(frozen=True)
class Chance:
    """How tokens are drawn: the best one at temperature 0, else from the target's own distribution."""

    temperature: float
    top_p: float
    seed: int

    def begin(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A choice of tokens [B] by logits [B, V]; the same ones again after another `begin`."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def draw(logits_BV: Tensor) -> Tensor:
            if self.temperature and self.top_p < 1:
                logits_BV = nucleus(logits_BV, self.temperature, self.top_p)
            return choose(logits_BV, self.temperature, generator)

        return draw


def answers(
    layers: FusedLayers,
    rows: "Rows",
    hidden_BD: Tensor,
    rope_B: Tensor,
    pick: Callable[[Tensor], Tensor],
    stops: Collection[int],
    most: int,
) -> list[list[int]]:
    """The tokens after each prompt, up to one of `stops` (included) or `most` of them.

    `rows` hold the prompts, `hidden_BD` are the states at their ends, `rope_B` the rotary positions after
    them; `pick` chooses a token for each state.
    """
    said: list[list[int]] = [[] for _ in hidden_BD]
    who, last = list(range(len(said))), int(rope_B.max())
    while True:
        token_B = pick(hidden_BD)
        tokens = token_B.tolist()
        for place, token in enumerate(tokens):
            said[who[place]].append(token)
        going = [place for place, token in enumerate(tokens) if token not in stops]
        if not going or len(said[who[going[0]]]) == most:
            return said
        if len(going) < len(who):
            order = rows.keep(going)
            who = [who[place] for place in order]
            index_B = torch.tensor(order, device=rope_B.device)
            token_B, rope_B = token_B[index_B], rope_B[index_B]
        last += 1
        hidden_BD = layers.run(token_B, rope_B, last, rows.attend(), {})["hidden"]
        rope_B = rope_B + 1


class Rows:
    """The keys and values of several sequences of different lengths, each from position 0 on."""

    def __init__(self, layers: FusedLayers, lengths: Sequence[int]):
        like = layers.embed_VD
        self._layers = layers
        self._closed = torch.finfo(like.dtype).min
        self._longest = max(lengths)  # positions written, of the longest
        self._length_B = torch.tensor(lengths, device=like.device)
        shape = (len(layers.layers), len(lengths), 2 * layers.kv_heads, self._longest + ROOM, layers.width)
        # What is not written is closed by the mask, and multiplied by zero all the same: numbers, not noise.
        self._rows_YBGSd = like.new_zeros(shape)
        open_BS = torch.arange(shape[3], device=like.device) < self._length_B[:, None]
        self._mask_BS = torch.where(open_BS, 0.0, self._closed).to(like.dtype)

    def update(self, key_BGNd: Tensor, value_BGNd: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """The call of stock attention layers over the prompts: store, and attend to what was given."""
        rows_BGNd = self._rows_YBGSd[layer, :, :, : key_BGNd.shape[2]]
        rows_BGNd[:, : self._layers.kv_heads] = key_BGNd
        rows_BGNd[:, self._layers.kv_heads :] = value_BGNd
        return key_BGNd, value_BGNd

    def attend(self) -> Attend:
        """One more token in each row, after all that the row holds; each layer writes its own."""
        heads, kv_heads, width = self._layers.heads, self._layers.kv_heads, self._layers.width
        place_B, count = self._length_B, len(self._length_B)
        self._length_B = place_B + 1
        self._longest += 1
        self._reserve(self._longest)
        index_B = torch.arange(count, device=place_B.device)
        self._mask_BS[index_B, place_B] = 0
        end = self._longest
        mask_B11S = self._mask_BS[:, None, None, :end]

        def attend(number: int, qkv_BHd: Tensor) -> Tensor:
            rows_BGSd = self._rows_YBGSd[number]
            rows_BGSd[index_B, :, place_B] = qkv_BHd[:, heads:]
            mixed = F.scaled_dot_product_attention(
                qkv_BHd[:, :heads].view(count, kv_heads, heads // kv_heads, width),
                rows_BGSd[:, :kv_heads, :end],
                rows_BGSd[:, kv_heads:, :end],
                attn_mask=mask_B11S,
                scale=self._layers.scale,
            )
            return mixed.reshape(count, -1)

        return attend

    def _reserve(self, length: int) -> None:
        held = self._mask_BS.shape[1]
        if length > held:
            more = max(ROOM, held // 4)
            self._rows_YBGSd = F.pad(self._rows_YBGSd, (0, 0, 0, more))
            self._mask_BS = F.pad(self._mask_BS, (0, more), value=self._closed)

    def keep(self, going: Sequence[int]) -> list[int]:
        """Drop all other rows. The last ones take their places: which row stands where from now on."""
        count = len(going)
        late = iter([row for row in going if row >= count])
        kept = set(going)
        order = [row if row in kept else next(late) for row in range(count)]
        for place, row in enumerate(order):
            if place != row:
                self._rows_YBGSd[:, place] = self._rows_YBGSd[:, row]
        index_B = torch.tensor(order, device=self._length_B.device)
        self._rows_YBGSd = self._rows_YBGSd[:, :count]
        self._mask_BS, self._length_B = self._mask_BS[index_B], self._length_B[index_B]
        return order


def nucleus(logits_BV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits of the likeliest tokens that together have the share `top_p`, and -inf elsewhere.

    The token that reaches the share is among them, as in the stock implementation (Holtzman et al., 2020).
    """
    sorted_BV, token_BV = logits_BV.sort(-1)
    below_BV = (sorted_BV.double() / temperature).softmax(-1).cumsum(-1)  # from the least likely on
    drop_BV = below_BV <= 1 - top_p
    drop_BV[:, -1] = False
    return logits_BV.masked_fill(drop_BV.scatter(1, token_BV, drop_BV), -torch.inf)
