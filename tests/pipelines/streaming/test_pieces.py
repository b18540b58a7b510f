"""Streaming: the pieces of a response are its text, each token is decoded a bounded number of times."""

import random
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vlmdistill.drafters.decoding.clock import Cycle, Laps
from vlmdistill.pipelines.streaming.pieces import pieces
from vlmdistill.pipelines.targets.loading import load


def of_words() -> PreTrainedTokenizerFast:
    """As Llama's: the first word loses its space, and what is no word is bytes."""
    words = [
        "</s>",
        "\u2581a",
        "b",
        "\u2581",
        *(f"<0x{byte:02X}>" for byte in "\u20ac".encode()),
    ]
    made = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="</s>")
    )
    fused = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*fused, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_pieces_are_the_text_and_each_is_decoded_from_the_last(kind: str) -> None:
    tokenizer: Any = of_words() if kind == "words" else load("demo-small").tokenizer
    rng, lengths = random.Random(0), list[int]()
    words = kind == "words"
    units = (
        [[0], [1], [2], [3], [4, 5, 6]]
        if words
        else [[id] for id in range(len(tokenizer))]
    )
    last = 2 if words else tokenizer.encode("b", add_special_tokens=False)[0]

    class Counted:
        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            return str(tokenizer.decode(ids, **options))

    laps = Laps(torch.device("cpu"))
    for count in (1, 5, 40, 400):
        ids = [*chain.from_iterable(rng.choices(units, k=count)), last]
        cycles = [Cycle([one], 0, (0, 0), [], 0.0, laps) for one in ids]
        text = "".join(piece.text for piece in pieces(cycles, Counted()))
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert max(lengths) < 60
