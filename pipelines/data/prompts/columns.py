"""Make turns of rows that hold question and answer columns instead of a conversation.

The question includes all text that belongs to it: Alpaca's `input`, a `context`, choices, and earlier turns.
"""

import ast
import json
import re
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from vlmdistill.pipelines.media.resolver import BadRowError

QUESTIONS = ("question", "query", "prompt", "instruction", "problem")
MORE = (
    "input",
    "context",
    "hint",
    "passage",
)  # each on its own lines below the question
CHOICES = ("choices", "options")
CHOICE_COLUMN = re.compile(r"(option|choice)[ _]?([a-z]|\d)", re.IGNORECASE)
LETTERS = string.ascii_uppercase  # of choices: their columns, or the labels of a list
REFERENCES = ("answer", "answers", "response", "output", "caption", "captions", "label")
SYSTEM = ("system", "system_prompt")

Turn = dict[str, Any]


def turns_of(row: Mapping[str, Any]) -> tuple[list[Turn], set[str]] | None:
    """The turns that the columns of a row make, and the columns that were read; None without a question.

    BadRowError if several question columns differ.
    """
    questions = _texts(row, QUESTIONS) or _texts(row, MORE[:1])
    if not questions:
        return None
    question = max(questions.values(), key=len)
    if any(text.strip() not in question for text in questions.values()):
        raise BadRowError(
            "several questions",
            f"in the columns {', '.join(questions)}: keep one of them",
        )
    more, choices = _values(row, MORE), _choices(row)
    lines = [
        text
        for text in more.values()
        if not _has(question, rf"^(\w[\w ]*:)?\s*{_exactly(text)}\s*$")
    ]
    shown = (
        rf"\b{letter}[.):\]]\s*{_exactly(choice)}(?!\w)"
        for letter, choice in choices.items()
    )
    if not all(_has(question, pattern) for pattern in shown):
        lines += [f"{letter}. {choice}" for letter, choice in choices.items()]
    history = _list(row.get("history"))
    if not all(map(_pair, history)):
        raise BadRowError(
            "history", "give it as pairs of texts: a question and its response"
        )
    turns = [turn for pair in history for turn in _round(*pair)]
    reference = next((row[name] for name in REFERENCES if row.get(name)), None)
    turns += _round("\n".join([question, *lines]), reference)
    read = {*questions, *more, *REFERENCES, *(("history",) if history else ())}
    read |= {name for name in (*CHOICES, *choices) if choices}
    return turns, read


def system(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns that hold the system prompt."""
    return _texts(row, SYSTEM)


def _texts(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    """The columns of these names that hold text."""
    found = {name: row.get(name) for name in names}
    return {
        name: text
        for name, text in found.items()
        if isinstance(text, str) and text.strip()
    }


def _values(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    """The columns of these names that hold text, or a number, which readers of CSV files make of digits."""
    return _texts({name: _written(row.get(name)) for name in names}, names)


def _written(value: Any) -> Any:
    """A number or a truth value as text; NaN, which means that there is none, and all else as it is."""
    is_number = isinstance(value, bool | int | float | Decimal) and value == value
    return str(value) if is_number else value


def _exactly(text: str) -> str:
    return re.escape(text.strip())


def _has(question: str, pattern: str) -> bool:
    return re.search(pattern, question, re.MULTILINE) is not None


def lettered(choices: Sequence[str]) -> dict[str, str]:
    """Choices by their letters; BadRowError if there are too many."""
    if len(choices) > len(LETTERS):
        raise BadRowError(
            "too many choices", f"{len(choices)}, for {len(LETTERS)} letters"
        )
    return dict(zip(LETTERS, choices, strict=False))


def _choices(row: Mapping[str, Any]) -> dict[str, str]:
    """The choices of a row by their letters: a list of texts, or a column for each letter."""
    lists = (_list(_parsed_list(row.get(name))) for name in CHOICES)
    given = next(filter(None, lists), [])
    listed = [_written(choice) for choice in given]
    if listed and all(isinstance(choice, str) for choice in listed):
        named = lettered(listed)
        return {
            letter: re.sub(rf"^\(?{letter}[.):]\s+", "", choice)
            for letter, choice in named.items()
        }
    found = _values(row, tuple(LETTERS))
    if "A" in found:  # else a column that happens to have such a name
        return found
    _require_no_choices(row)
    return {}


def _require_no_choices(row: Mapping[str, Any]) -> None:
    """BadRowError if choices are of a form that is not read, and the question does not have them."""
    named = [
        name for name in row if name in CHOICES or CHOICE_COLUMN.fullmatch(str(name))
    ]
    asked = "\n".join(_texts(row, QUESTIONS).values())
    for name in named:
        choices = row[name]
        if isinstance(choices, str) and choices.strip() in asked:
            continue
        if choices not in (None, "", [], {}):
            raise BadRowError(
                "choices", f"'{name}': give a list of texts, or columns A, B and so on"
            )


def _parsed_list(value: Any) -> Any:
    """The list that text is in JSON or Python, as the options of MMMU; any other value as it is."""
    if not (isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value, re.DOTALL)):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pair(item: Any) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 2
        and all(isinstance(text, str) for text in item)
    )


def _round(question: str, reference: Any) -> list[Turn]:
    """A question and, if the dataset has it as text, its response."""
    if isinstance(reference, list):
        reference = reference[0]
    made: list[Turn] = [{"role": "user", "content": question}]
    if isinstance(reference, str) and reference.strip():
        made.append({"role": "assistant", "content": reference})
    return made
