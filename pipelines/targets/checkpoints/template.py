"""The chat template of a target: its switch for reasoning, and whether a server has the trained one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Provenance, content_hash

Thinking = Literal["", "on", "off", "mixed"]
"""Whether the target reasons before it answers; mixed: at half of the prompts; empty: as by default."""

LOSS = "expect a third to a half of the accepted tokens, as others have seen of drafters served so"
VARIABLES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5V; Kimi, Granite
_PROBE = {"role": "user", "content": [{"type": "text", "text": "Think of a number."}]}


def switch_of(processor: Any) -> str | None:
    """The variable of a processor's chat template that changes the prompt; None if it has none."""

    def prompt(name: str, value: bool) -> str:
        text: str = processor.apply_chat_template(
            [_PROBE], add_generation_prompt=True, **{name: value}
        )
        return text

    there = [name for name in VARIABLES if name in str(processor.chat_template)]
    return next(
        (name for name in there if prompt(name, True) != prompt(name, False)), None
    )


def thinks(mode: Thinking, messages: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the target is to reason on a prompt, the same in every stage; None: as its template has it."""
    if mode == "mixed":
        return (
            int(
                content_hash([_words(message.get("content")) for message in messages]),
                16,
            )
            % 2
            == 0
        )
    return {"on": True, "off": False}.get(mode)


def template_of(folder: Path) -> str | None:
    """The chat template of a checkpoint, from its files; None if they do not tell which of several."""
    if (folder / "additional_chat_templates").is_dir():
        return None
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    for name in (
        "chat_template.json",
        "processor_config.json",
        "tokenizer_config.json",
    ):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get(
                "chat_template"
            )
            if found:
                return found if isinstance(found, str) else None
    return None


def served_otherwise(
    trained: Provenance, folder: Path, arguments: Sequence[str] = ()
) -> str:
    """What a server of `folder` does to prompts otherwise than in training, in a line; empty if nothing.

    `arguments` are those of `vllm serve`, which may name another template, or turn reasoning on and off.
    """
    template = _option(arguments, "--chat-template")
    if template is None:
        template = template_of(folder)
    elif Path(template).is_file():
        template = Path(template).read_text(encoding="utf-8")
    if template is not None and content_hash(template) != trained.template_hash:
        return f"the chat template is not the one of training: {LOSS}"
    try:
        given = json.loads(_option(arguments, "--default-chat-template-kwargs") or "{}")
    except ValueError:  # vLLM says so itself
        return ""
    served = next((given[name] for name in VARIABLES if name in given), None)
    if trained.thinking in ("on", "off") and served != (trained.thinking == "on"):
        asked = json.dumps({VARIABLES[0]: trained.thinking == "on"})
        return (
            f"the drafter was trained with thinking {trained.thinking}: {LOSS}. Start the server with "
            f"--default-chat-template-kwargs '{asked}', or let each request say so"
        )
    return ""


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option of a command line."""
    for number, one in enumerate(arguments):
        if one.startswith(f"{name}="):
            return one.partition("=")[2]
        if one == name and number + 1 < len(arguments):
            return arguments[number + 1]
    return None


def check_thinking(mode: str) -> None:
    """DataError unless it is a mode."""
    if mode not in get_args(Thinking):
        raise DataError(f"--thinking {mode}: choose on, off or mixed")


def _words(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else content or ()
    return [part if isinstance(part, str) else part.get("text", "") for part in parts]
