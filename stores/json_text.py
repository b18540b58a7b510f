"""JSON text as it is written: numbers keep their text, and a key with two values is noticed."""

import json
from collections.abc import Mapping
from typing import Any

MOST_DEPTH = 100  # of lists and objects in each other; what reads them calls itself


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
    """Reads JSON; notes keys that an object has twice with different values, and values nested deeply."""

    def __init__(self) -> None:
        super().__init__(
            object_pairs_hook=self._object,
            parse_float=WrittenNumber,
            parse_constant=WrittenNumber,
        )
        self._repeated: list[str] = []
        self._was_deep = False

    def repeated_key(self) -> str | None:
        """The first key with two values that was read since the last call, if there is one."""
        repeated, self._repeated = self._repeated, []
        return repeated[0] if repeated else None

    def was_deep(self) -> bool:
        """Whether a value since the last call was nested more than MOST_DEPTH deep."""
        was_deep, self._was_deep = self._was_deep, False
        return was_deep

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """The value at a place of a text, None if it is nested too deeply, and its end."""
        value, end = super().raw_decode(s, idx)
        brackets = s.count("[", idx, end) + s.count("{", idx, end)
        if brackets > MOST_DEPTH and _is_deep(value):
            value, self._was_deep = None, True
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            for key, item in pairs:
                last = value[key]
                if last != item or type(last) is not type(item):  # 1 == True
                    self._repeated.append(key)
        return value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are in each other more than MOST_DEPTH times."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [item for holder in level for item in _items(holder)]
    return bool(level)


def _items(holder: Any) -> Any:
    if isinstance(holder, Mapping):
        return holder.values()
    return holder if isinstance(holder, list) else ()


def loads_once(text: str) -> Any:
    """The value of JSON text; ValueError if it is none, too deep, or an object has a key with two values."""
    decoder = KeyCheckingDecoder()
    value = decoder.decode(text)
    if decoder.repeated_key() is not None:
        raise ValueError("a key with two values")  # its name may be private text
    if decoder.was_deep():
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    return value
