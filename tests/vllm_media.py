"""The images of a request as vLLM describes them, for code that runs without vLLM."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where the tokens of an image are."""

    offset: int
    length: int
    is_embed: None = None


class Image(NamedTuple):
    """An image of a request."""

    identifier: str
    mm_position: Place
