"""What may be kept of traffic: a share, by allow and deny lists, no older than so long, redacted.

A policy is a TOML file with the fields of `Policy`. Whatever cannot be decided is dropped.
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
from vlmdistill.pipelines.traffic.logs import Exchange
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.schema import content_hash, seconds

Patterns = Mapping[str, str | tuple[str, ...]]
Redact = Callable[[dict[str, Any]], Any]
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
    """Such as `30d`: older requests are dropped, and those without a time."""
    media: str = "10GB"
    """Bytes of all images and videos that are kept: what would exceed them is dropped."""
    redact: str = ""
    """`module:function`. It gets {messages, response, user, headers, time}, and returns messages and response
    without what nobody may keep, or None to drop them. What it raises drops them, too."""

    @classmethod
    def read(cls, file: Path | None, **changes: Any) -> "Policy":
        """The policy of a file, if any, with the changes that are not None; DataError says what is wrong."""
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8")) if file else {}
            policy = msgspec.convert(
                {
                    **found,
                    **{name: one for name, one in changes.items() if one is not None},
                },
                cls,
            )
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
            raise DataError(
                f"{file or 'the policy'} cannot be used: {reason}"
            ) from None

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
        found = re.fullmatch(
            r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", self.media.strip().lower()
        )
        if not found:
            raise DataError(f"media='{self.media}': write a size such as 500MB or 20GB")
        return int(float(found[1]) * SIZES[found[2]])

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
        """What tells it from another."""
        return content_hash(msgspec.to_builtins(self))

    def refusal(self, exchange: Exchange, now: float) -> str:
        """Why an exchange may not be kept, as far as its facts say; empty if it may."""
        if self.seconds is not None:
            if exchange.time is None:
                return "no time"
            if exchange.time < now - self.seconds:
                return "too old"
        if not all(
            _allows(exchange.values(_named(name)), list_)
            for name, list_ in self.allow.items()
        ):
            return "not allowed"
        for name, patterns in self.deny.items():
            values = exchange.values(_named(name))
            if values is None:
                return "unknown headers"
            if _denies(values, patterns):
                return "denied"
        if self.share < 1:
            drawn = hashlib.sha256(
                msgspec.json.encode(exchange.messages, order="sorted")
            ).digest()
            if int.from_bytes(drawn[:8]) >= self.share * 2**64:
                return "not sampled"
        return ""

    def redacted(self, exchange: Exchange, text: str) -> tuple[Any, str]:
        """Messages and response after the hook; BadRowError if it drops them or fails.

        What it raises may quote the text, so that only its kind is told.
        """
        if self.function is None:
            return exchange.messages, text
        given = {
            "messages": deepcopy(exchange.messages),
            "response": text,
            "user": ", ".join(exchange.values("user") or ()),
            "headers": {
                name: ", ".join(values)
                for name, values in (exchange.headers or {}).items()
            },
            "time": exchange.time,
        }
        try:
            made = self.function(given)
            whole = made is None or made["response"] == ""
            messages, response = (
                ([], "") if whole else (made["messages"], made["response"])
            )
        except BaseException as error:
            if _is_stop(error):
                raise
            raise BadRowError("redaction failed", type(error).__name__) from None
        if whole:
            raise BadRowError("redacted whole")
        if not (isinstance(messages, list) and isinstance(response, str)):
            raise BadRowError(
                "redaction failed",
                "it returned neither None nor messages and a response",
            )
        return messages, response


def _is_stop(error: BaseException) -> bool:
    """Whether a signal ends this process: what else a hook raises, such as SystemExit, is its own."""
    stopped = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    return stopped or isinstance(error, KeyboardInterrupt)


def _named(name: str) -> str:
    return name.strip().lower()


def _allows(values: Sequence[str] | None, patterns: str | Sequence[str]) -> bool:
    """Whether there are values, and one of the patterns matches each."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return bool(values) and all(
        any(fnmatchcase(value, pattern) for pattern in listed) for value in values or ()
    )


def _denies(values: Sequence[str], patterns: str | Sequence[str]) -> bool:
    """Whether one of the patterns matches one of the values, or all of them as a text, in any case and form.

    A value may have others within it, joined by a gateway, and parameters or quotes.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    meant = [form for value in values for form in _decoded(value)]
    parts = [
        part.strip(" \t\"'") for value in meant for part in re.split(r"[,;\r\n]", value)
    ]
    texts = (
        {_folded(text) for text in (*meant, *parts, ", ".join(values))}
        if values
        else set()
    )
    return any(
        fnmatchcase(text, _folded(pattern)) for text in texts for pattern in listed
    )


def _decoded(value: str) -> list[str]:
    """A value, and what it says if it is UTF-8: servers read headers as Latin-1."""
    with suppress(UnicodeError):
        return [value, value.encode("latin-1").decode()]
    return [value]


def _folded(text: str) -> str:
    """A text that is equal for all cases, widths and compositions of its letters; nothing invisible."""
    same = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(
        letter for letter in same if unicodedata.category(letter)[0] != "C"
    ).strip()
