"""The text of a response in pieces that know whether the drafter drafted them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

if TYPE_CHECKING:
    from vlmdistill.drafters.decoding.clock import Cycle

Amount = Annotated[float, Meta(ge=0, le=1e15)]


@dataclass(frozen=True)
class Piece:
    """A piece of a response: drafted and accepted, or the target's own."""

    text: str
    drafted: bool
    seconds: Amount | None = None
    """Since decoding began, by the decoder's clock; None: not recorded."""


def pieces(cycles: "Iterable[Cycle]", tokenizer: Any) -> Iterator[Piece]:
    """The text of each cycle; a character of several tokens is held back until its last token."""
    # Tokens are decoded after those of the last piece: some tokenizers drop the space before a first word.
    last_ids = list[int]()
    last_text = ""
    new_ids = list[int]()
    seconds = 0.0
    for cycle in cycles:
        seconds += cycle.seconds
        for index, token in enumerate(cycle.ids):
            new_ids.append(token)
            text: str = tokenizer.decode(last_ids + new_ids, skip_special_tokens=True)
            if len(text) > len(last_text) and not text.endswith("\ufffd"):
                new_text = text[len(last_text) :]
                yield Piece(new_text, index < cycle.accepted, seconds)
                last_ids = new_ids
                new_ids = []
                last_text = tokenizer.decode(last_ids, skip_special_tokens=True)
