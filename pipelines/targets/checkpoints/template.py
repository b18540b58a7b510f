"""The chat template of a target: its switch for reasoning, and whether a server has the trained one."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Provenance, content_hash

Thinking = Literal["", "on", "off", "mixed"]
"""Whether the target reasons before it answers; mixed: at half of the prompts; empty: as by default."""

REASONS: Mapping[Thinking, bool | None] = {"": None, "on": True, "off": False}
"""The value of a template's switch in each mode that has one for all prompts; None: its default."""
MODE_OF = {reasons: mode for mode, reasons in REASONS.items()}
DEFAULT = "as the template has it"  # what messages call the empty mode
LOSS = (
    "expect a third to a half of the accepted tokens, as others have seen of drafters "
    "served so"
)
VARIABLES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5V; Kimi, Granite
DEFAULT_VARIABLES = "--default-chat-template-kwargs"  # an option of `vllm serve`
JINJA = "chat_template.jinja"
FILES = ("processor_config.json", "chat_template.json", JINJA, "tokenizer_config.json")
"""What may have the template, in the order in which transformers looks for it."""
PUBLISHED = (
    f"add {JINJA} of the published model, and remove a chat_template.json, which is "
    "read before it"
)
UNREAD = (
    f"{JINJA} is not read: chat_template.json or processor_config.json has another "
    "template, which comes first"
)
REASONING_END = re.compile(
    r"</(?:\w+:)?think(?:ing)?(?::\w+)?>|</thought>|◁/think▷|\[/THINK\]|<channel\|>|<\|END_THINKING\|>"
    r"|\[BEGIN FINAL RESPONSE\]"  # Apriel
)
REASONING_START = re.compile(
    r"<(?:\w+:)?think(?:ing)?(?::\w+)?>|<thought>|◁think▷|\[THINK\]|<\|channel>thought|<\|START_THINKING\|>"
)
PROBE: Mapping[str, Any] = {
    "role": "user",
    "content": [{"type": "text", "text": "Think of a number."}],
}


def switch_of(processor: Any) -> str | None:
    """The variable of a chat template that turns reasoning on and off; None without one."""

    def prompt(name: str, value: bool) -> str:
        text: str = processor.apply_chat_template(
            [PROBE], add_generation_prompt=True, **{name: value}
        )
        return text

    for name in VARIABLES:
        is_named = name in str(processor.chat_template)
        if is_named and prompt(name, True) != prompt(name, False):
            return name
    return None


def variables_of(
    mode: Thinking, messages: Sequence[Mapping[str, Any]]
) -> dict[str, bool]:
    """Variables of any chat template with which the target reasons on a prompt as in a mode.

    Empty for the template's own default. A template ignores those that it does not name.
    """
    reasons = thinks(mode, messages)
    return {} if reasons is None else dict.fromkeys(VARIABLES, reasons)


def thinking_arguments(mode: str) -> list[str]:
    """Arguments of `vllm serve` with which the target reasons by default as in a mode.

    Empty for the template's own default, and where prompts have different modes.
    """
    if mode not in ("on", "off"):
        return []
    variables = dict.fromkeys(VARIABLES, mode == "on")
    return [DEFAULT_VARIABLES, json.dumps(variables)]


def thinks(mode: Thinking, messages: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the target is to reason on a prompt, the same in every stage.

    None leaves it to the template's default.
    """
    if mode == "mixed":
        words = [_words(message.get("content")) for message in messages]
        return int(content_hash(words), 16) % 2 == 0
    return REASONS[mode]


def template_of(folder: Path) -> str | None:
    """The chat template of a checkpoint, from its files; None if it has none or several."""
    if (folder / "additional_chat_templates").is_dir():
        return None
    for name in FILES:
        file = folder / name
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        if name == JINJA:
            return text
        if template := json.loads(text).get("chat_template"):
            return template if isinstance(template, str) else None
    return None


def served_otherwise(
    trained: Provenance, folder: Path, arguments: Sequence[str] = ()
) -> str:
    """How a server of `folder` changes prompts against training, in a line; empty if it does not.

    `arguments` are those of `vllm serve`, which may name another template, or turn
    reasoning on and off.
    """
    template = _option(arguments, "--chat-template")
    if template is None:
        template = template_of(folder)
    elif Path(template).is_file():
        template = Path(template).read_text(encoding="utf-8")
    if template is not None and content_hash(template) != trained.template_hash:
        return f"the chat template is not the one of training: {LOSS}"
    try:
        text = _option(arguments, DEFAULT_VARIABLES)
        variables = json.loads(text or "{}")
    except ValueError:  # vLLM refuses it
        return ""
    served = next((variables[name] for name in VARIABLES if name in variables), None)
    needed = thinking_arguments(trained.thinking)
    if needed and served != (trained.thinking == "on"):
        return (
            f"the drafter was trained with thinking {trained.thinking}: {LOSS}. Start "
            f"the server with {shlex.join(needed)}, or set it in each request"
        )
    return ""


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option of a command line."""
    for number, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and number + 1 < len(arguments):
            return arguments[number + 1]
    return None


def check_thinking(mode: str) -> None:
    """DataError unless `mode` is a mode of --thinking."""
    if mode not in get_args(Thinking):
        raise DataError(f"--thinking {mode}: choose on, off or mixed")


def _words(content: Any) -> list[str]:
    """The texts of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = content or ()
    return [part if isinstance(part, str) else part.get("text", "") for part in parts]
