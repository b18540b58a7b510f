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
    seconds: Amount | None = (
        None  # since decoding began, by the decoder's clock; None: not recorded
    )


def pieces(cycles: "Iterable[Cycle]", tokenizer: Any) -> Iterator[Piece]:
    """The text of each cycle; a character of several tokens is held back until its last token."""
    shown: list[
        int
    ] = []  # the tokens of the last piece: some tokenizers drop the space before a first word
    held: list[int] = []  # those after them
    before, seconds = "", 0.0
    for cycle in cycles:
        seconds += cycle.seconds
        for index, token in enumerate(cycle.ids):
            held.append(token)
            text: str = tokenizer.decode(shown + held, skip_special_tokens=True)
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield Piece(text[len(before) :], index < cycle.accepted, seconds)
                shown, held = held, []
                before = tokenizer.decode(shown, skip_special_tokens=True)
