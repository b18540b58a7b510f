"""The switch of a chat template that turns a target's reasoning on and off."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash

Thinking = Literal["", "on", "off", "mixed"]
"""Whether the target reasons before it answers; mixed: at half of the prompts; empty: as by default."""

VARIABLES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5V; Kimi, Granite
_PROBE = {"role": "user", "content": [{"type": "text", "text": "Think of a number."}]}


def switch_of(processor: Any) -> str | None:
    """The variable of a processor's chat template that changes the prompt; None if it has none."""

    def prompt(name: str, value: bool) -> str:
        text: str = processor.apply_chat_template([_PROBE], add_generation_prompt=True, **{name: value})
        return text

    there = [name for name in VARIABLES if name in str(processor.chat_template)]
    return next((name for name in there if prompt(name, True) != prompt(name, False)), None)


def thinks(mode: Thinking, messages: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the target is to reason on a prompt, the same in every stage; None: as its template has it."""
    if mode == "mixed":
        return int(content_hash([_words(message.get("content")) for message in messages]), 16) % 2 == 0
    return {"on": True, "off": False}.get(mode)


def check_thinking(mode: str) -> None:
    """DataError unless it is a mode."""
    if mode not in get_args(Thinking):
        raise DataError(f"--thinking {mode}: choose on, off or mixed")


def _words(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else content or ()
    return [part if isinstance(part, str) else part.get("text", "") for part in parts]
