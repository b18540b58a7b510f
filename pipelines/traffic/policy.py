"""What may be kept of traffic: a share, by allow and deny lists, up to an age, redacted.

A policy is a TOML file with the fields of `Policy`. Exchanges that a rule cannot be applied to are dropped.
"""

import hashlib
import importlib
import re
import signal
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.pipelines.traffic.dialects import Exchange
from vlmdistill.stores.backends.clock import SKEW
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.schema import content_hash, seconds

Patterns = Mapping[str, str | tuple[str, ...]]
Redact = Callable[[dict[str, Any]], Any]
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?")
FUTURE = "in the future"  # a reason to drop
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class Policy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """The rules of a harvest. The defaults keep all, and 10 GB of images and videos."""

    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Of the conversations, by a hash: the same ones each time."""
    allow: Patterns = {}
    """Header, `user` or `model` -> patterns such as `team-*`, one of which must match each value of it; all
    names must."""
    deny: Patterns = {}
    """The same, of which none may match a value, in any case; what a log does not tell is dropped."""
    max_age: str = ""
    """Such as `30d`: older requests are dropped, and those of the future or without a time."""
    media: str = "10GB"
    """Bytes of all images and videos that are kept: what would exceed them is dropped."""
    redact: str = ""
    """`module:function`. It gets {messages, response, user, headers, time}, and returns messages and response
    without what nobody may keep, or None to drop them. What it raises drops them, too."""

    @classmethod
    def read(cls, file: Path | None) -> "Policy":
        """The policy of a file, or the defaults without one; DataError says what is wrong."""
        if file is None:
            return cls()
        try:
            policy = msgspec.convert(tomllib.loads(file.read_text("utf-8")), cls)
            policy.check()
            return policy
        except (
            OSError,
            ValueError,
            RecursionError,
            msgspec.ValidationError,
            DataError,
        ) as error:
            reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
            raise DataError(f"{file} cannot be used: {reason}") from None

    def check(self) -> None:
        """DataError if a length of time or a size cannot be read, or if there is no such function."""
        _ = self.seconds, self.media_bytes, self.function

    @cached_property
    def seconds(self) -> float | None:
        """The maximum age; None: any."""
        return seconds(self.max_age, "max_age") if self.max_age else None

    @cached_property
    def media_bytes(self) -> int:
        """The bytes of media that may be kept."""
        size = re.fullmatch(SIZE, self.media.strip().lower())
        if not size:
            raise DataError(f"media='{self.media}': write a size such as 500MB or 20GB")
        return int(float(size[1]) * SIZES[size[2]])

    @cached_property
    def function(self) -> Redact | None:
        """The hook; DataError if it is not there."""
        if not self.redact:
            return None
        module, _, name = self.redact.partition(":")
        try:
            function: Redact = getattr(importlib.import_module(module), name)
        except BaseException as error:  # a module raises what it likes
            if _is_stop(error):
                raise
            raise DataError(
                f"redact='{self.redact}' is no function: write module:function ({one_line(error)})"
            ) from None
        if not callable(function):
            raise DataError(
                f"redact='{self.redact}' cannot be called: write module:function"
            )
        return function

    @property
    def hash(self) -> str:
        """A hash of all its fields."""
        return content_hash(msgspec.to_builtins(self))

    def refusal(self, exchange: Exchange, now: float) -> str:
        """Why an exchange may not be kept, as far as its facts say; empty if it may."""
        return (
            self._refusal_by_age(exchange, now)
            or self._refusal_by_lists(exchange)
            or self._refusal_by_share(exchange)
        )

    def _refusal_by_age(self, exchange: Exchange, now: float) -> str:
        if self.seconds is None:
            return ""
        if exchange.time is None:
            return "no time"
        if exchange.time > now + SKEW:  # it would never be too old
            return FUTURE
        return "too old" if exchange.time < now - self.seconds else ""

    def _refusal_by_lists(self, exchange: Exchange) -> str:
        for name, patterns in self.allow.items():
            if not _allows(exchange.values(_plain_name(name)), _listed(patterns)):
                return "not allowed"
        for name, patterns in self.deny.items():
            values = exchange.values(_plain_name(name))
            if values is None:
                return "unknown headers"
            if _denies(values, _listed(patterns)):
                return "denied"
        return ""

    def _refusal_by_share(self, exchange: Exchange) -> str:
        if self.share >= 1:
            return ""
        messages = msgspec.json.encode(exchange.messages, order="sorted")
        drawn = int.from_bytes(hashlib.sha256(messages).digest()[:8])
        return "not sampled" if drawn >= self.share * 2**64 else ""

    def redacted(self, exchange: Exchange, text: str) -> tuple[Any, str]:
        """Messages and response after the hook; BadRowError if it drops them or fails.

        What it raises may quote the text, so that only its kind is told.
        """
        if self.function is None:
            return exchange.messages, text
        headers = exchange.headers or {}
        conversation = {
            "messages": deepcopy(exchange.messages),
            "response": text,
            "user": ", ".join(exchange.values("user") or ()),
            "headers": {name: ", ".join(values) for name, values in headers.items()},
            "time": exchange.time,
        }
        try:
            redacted = self.function(conversation)
            is_dropped = redacted is None or redacted["response"] == ""
            messages = [] if is_dropped else redacted["messages"]
            response = "" if is_dropped else redacted["response"]
        except BaseException as error:
            if _is_stop(error):
                raise
            raise BadRowError("redaction failed", type(error).__name__) from None
        if is_dropped:
            raise BadRowError("redacted whole")
        if not isinstance(messages, list) or not isinstance(response, str):
            raise BadRowError(
                "redaction failed",
                "it returned neither None nor messages and a response",
            )
        return messages, response


def _is_stop(error: BaseException) -> bool:
    """Whether a signal ends this process: what else a hook raises, such as SystemExit, is its own."""
    stopped = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    return stopped or isinstance(error, KeyboardInterrupt)


def _plain_name(name: str) -> str:
    return name.strip().lower()


def _listed(patterns: str | Sequence[str]) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _allows(values: Sequence[str] | None, patterns: Sequence[str]) -> bool:
    """Whether there are values, and one of the patterns matches each."""
    if not values:
        return False
    return all(
        any(fnmatchcase(value, pattern) for pattern in patterns) for value in values
    )


def _denies(values: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether one of the patterns matches one of the values, or all of them as a text, in any case and form.

    A value may have others within it, joined by a gateway, and parameters or quotes.
    """
    if not values:
        return False
    forms = [form for value in values for form in _decoded(value)]
    parts = [part for form in forms for part in re.split(r"[,;\r\n]", form)]
    plain_parts = [part.strip(" \t\"'") for part in parts]
    texts = {_folded(text) for text in (*forms, *plain_parts, ", ".join(values))}
    folded_patterns = [_folded(pattern) for pattern in patterns]
    return any(
        fnmatchcase(text, pattern) for text in texts for pattern in folded_patterns
    )


def _decoded(value: str) -> list[str]:
    """A value, and what it says if it is UTF-8: servers read headers as Latin-1."""
    with suppress(UnicodeError):
        return [value, value.encode("latin-1").decode()]
    return [value]


def _folded(text: str) -> str:
    """A text that is equal for all cases, widths and compositions of its letters; nothing invisible."""
    casefolded = unicodedata.normalize("NFKC", text).casefold()
    composed = unicodedata.normalize("NFKC", casefolded)
    visible = (letter for letter in composed if unicodedata.category(letter)[0] != "C")
    return "".join(visible).strip()
