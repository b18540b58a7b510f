"""JSON text as it is written: numbers keep their text, and a key with two values is noticed."""

import json
from typing import Any


class WrittenNumber(float):
    """A number with a point or an exponent; its text is the one of the file, such as 1.50."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> "WrittenNumber":
        """The number that a text says."""
        number = super().__new__(cls, text)
        number._text = str(text)
        return number

    def __str__(self) -> str:
        """As it is written."""
        return self._text


def plain(value: Any) -> Any:
    """The same value with ordinary numbers, which typed records need."""
    if isinstance(value, WrittenNumber):
        return float(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class KeyCheckingDecoder(json.JSONDecoder):
    """Reads JSON, and notes the keys that an object has twice with different values."""

    def __init__(self) -> None:
        super().__init__(
            object_pairs_hook=self._object,
            parse_float=WrittenNumber,
            parse_constant=WrittenNumber,
        )
        self._repeated: list[str] = []

    def repeated_key(self) -> str | None:
        """The first key with two values that was read since the last call, if there is one."""
        repeated, self._repeated = self._repeated, []
        return repeated[0] if repeated else None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            for key, item in pairs:
                last = value[key]
                if last != item or type(last) is not type(item):  # 1 == True
                    self._repeated.append(key)
        return value


def loads_once(text: str) -> Any:
    """The value of JSON text; ValueError if it is none, or an object in it has a key with two values."""
    decoder = KeyCheckingDecoder()
    value = decoder.decode(text)
    if decoder.repeated_key() is not None:
        raise ValueError("a key with two values")  # its name may be private text
    return value
