"""Make turns of rows that hold question and answer columns instead of a conversation.

The question includes all text that belongs to it: Alpaca's `input`, a `context`, choices, and earlier turns.
"""

import ast
import io
import json
import re
import string
import tokenize
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

from vlmdistill.pipelines.data.prompts.hidden_media import media_kind
from vlmdistill.pipelines.data.prompts.row import has_content
from vlmdistill.pipelines.media.resolver import BadRowError

QUESTIONS = ("question", "query", "prompt", "instruction", "problem")
DETAILS = ("input", "context", "hint", "passage")
"""Each on its own lines below the question; the first is the question where there is no other."""
CHOICES = ("choices", "options", "candidates")
CHOICE = ("choice", "option")  # a list of choices, else an answer
CHOICE_COLUMN = re.compile(
    r"(option|choice|candidate|ending)[ _]?([a-z]|\d)|op[a-e]|a\d"
    r"|\w+[ _](option|choice|candidate)[ _]([a-z]|\d)",
    re.IGNORECASE,
)
CHOICES_COLUMN = re.compile(
    r".*(choice|option|candidate)s.*|choice_list", re.IGNORECASE
)
SMALL_LETTERS = ("a", "b")  # of columns that are choices if a row has both
LABEL = re.compile(
    r"\s*[(\[\uFF08]?(?P<letter>[A-Za-z])(\.(?![A-Za-z]\.)|[):\]\u3001\uFF0E\uFF09])\s*"
)
"""Before a choice. In "A.D. 1066" or "B.B. King" the letter belongs to the choice."""
FIRST_LABELS = (re.compile(r"\bA[.):]"), re.compile(r"\bB[.):]"))  # in one text
RIGHT_ONE = re.compile(r"correct(_\w+)?|answer_?(idx|index|id)", re.IGNORECASE)
"""Columns that say which of several answers is right."""
LETTERS = string.ascii_uppercase  # of choices: their columns, or the labels of a list
REFERENCES = ("answer", "answers", "response", "output", "caption", "captions", "label")
SYSTEM = ("system", "system_prompt")
HISTORY = "history"
NO_VALUES = ("nan", "<noinput>", "<noInput>")
"""Texts without a value: what Python makes of the NaN of a table, and the marks of Alpaca's `input`."""

KEYS_OF_A_TURN = ({"role", "content"}, {"from", "value"})
PAIRS = "give it as turns, or as pairs of texts: a question and its response"

Row = Mapping[str, Any]
Turn = dict[str, Any]


def has_question(row: Row) -> bool:
    """Whether a column of a row is a question."""
    return bool(_questions(row))


def turns_of(row: Row) -> tuple[list[Turn], set[str]]:
    """The turns that the columns of a row make, and the columns that were read.

    BadRowError if several question columns differ, if choices or earlier turns cannot be read, or if choices
    are images.
    """
    questions = _questions(row)
    question = max(questions.values(), key=len)
    others = (text for text in questions.values() if text != question)
    if not all(_has_words(question, text) for text in others):
        raise BadRowError(
            "several questions",
            f"in the columns {', '.join(questions)}: keep one of them",
        )
    details = _details(row)
    choices, choice_columns = _choices(row, question)
    if any(map(media_kind, choices.values())):
        raise BadRowError(
            "choices", f"{', '.join(choice_columns)}: choices are text, not images"
        )
    lines = [question]
    lines += [text for text in details.values() if not _has_line(question, text)]
    if not _has_choices(question, choices):
        lines += [f"{letter}. {choice}" for letter, choice in choices.items()]
    history = _history(row)
    references = _references(row)
    reference = next(iter(references.values()), "")
    if reference and reference not in choices.values():
        _require_no_answer(questions, reference)
    turns = [*_earlier_turns(history), *_round("\n".join(lines), reference)]
    read = {*questions, *details, *choice_columns}
    read.update(name for name, text in references.items() if text == reference)
    if history:
        read.add(HISTORY)
    return turns, read


def system(row: Row) -> dict[str, Any]:
    """The columns that hold the system prompt: text, or a list of parts as in Anthropic's requests."""
    lists = {name: row[name] for name in SYSTEM if _list(row.get(name))}
    return _with_value(_texts(row, SYSTEM)) | lists


def lettered(choices: Sequence[str]) -> dict[str, str]:
    """Choices by their letters; BadRowError if there are too many."""
    if len(choices) > len(LETTERS):
        raise BadRowError(
            "too many choices", f"{len(choices)}, for {len(LETTERS)} letters"
        )
    return dict(zip(LETTERS, choices, strict=False))


def _questions(row: Row) -> dict[str, str]:
    """The columns that hold a question. One of another form is not replaced by its input."""
    if any(has_content(row.get(name)) for name in QUESTIONS):
        questions = _texts(row, QUESTIONS)
    else:
        questions = _texts(row, DETAILS[:1])
    return {name: text for name, text in questions.items() if not _is_list(text)}


def _details(row: Row) -> dict[str, str]:
    """The columns that belong below the question; BadRowError if one is of a form that is not read."""
    for name in DETAILS:
        if isinstance(row.get(name), list | Mapping | bytes) and has_content(row[name]):
            raise BadRowError("text of another form", f"'{name}': give one text")
    return _with_value(_texts_and_numbers(row, DETAILS))


def _is_list(text: str) -> bool:
    """Whether a text is a list of quoted texts, or of turns, in JSON or Python."""
    if re.match(r"\s*\[\s*[\"'{]", text) is None:
        return False
    items = _parsed_list(text)
    if not isinstance(items, list):
        return False
    objects = [item.keys() for item in items if isinstance(item, Mapping)]
    return len(objects) < len(items) or any(
        keys >= turn for keys in objects for turn in KEYS_OF_A_TURN
    )


def _texts(row: Row, names: Sequence[str]) -> dict[str, str]:
    """The columns of these names that hold text."""
    values = {name: row.get(name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and value.strip()
    }


def _texts_and_numbers(row: Row, names: Sequence[str]) -> dict[str, str]:
    """The columns of these names that hold text, or a number, which readers of CSV files make of digits."""
    return _texts({name: _written(row.get(name)) for name in names}, names)


def _with_value(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text.strip() not in NO_VALUES}


def _written(value: Any) -> Any:
    """A number or a truth value as text, all else as it is, also NaN."""
    is_number = isinstance(value, bool | int | float | Decimal) and value == value
    return str(value) if is_number else value


def _has_words(question: str, text: str) -> bool:
    """Whether a question has a text that does not begin or end inside one of its words."""
    edge = r"(?:(?<!\w)|(?!\w))"
    return re.search(edge + re.escape(text.strip()) + edge, question) is not None


def _has_line(question: str, text: str) -> bool:
    """Whether a question has a text as a line, maybe after a name and a colon, a label or a bullet."""
    blanks = r"[^\S\n]*+"
    label = r"\w[\w ]*:|\(?\w{1,2}[.):\]]|[-*\N{BULLET}]"
    line = rf"^{blanks}({label})?{blanks}{re.escape(text.strip())}{blanks}$"
    return re.search(line, question, re.MULTILINE) is not None


def _has_choices(question: str, choices: Mapping[str, str]) -> bool:
    """Whether a question has all choices: after their letters, or each as a line."""
    # A choice that is its letter alone is the name of what the question has.
    texts = {
        letter: "" if choice.strip() == letter else re.escape(choice.strip())
        for letter, choice in choices.items()
    }
    patterns = (rf"\b{letter}[.):\]]\s*{texts[letter]}(?!\w)" for letter in texts)
    has_letters = all(re.search(pattern, question) for pattern in patterns)
    return has_letters or all(_has_line(question, text) for text in choices.values())


def _choices(row: Row, question: str) -> tuple[dict[str, str], Sequence[str]]:
    """The choices of a row by their letters, and the columns that have them.

    They are a list of texts, or a column for each letter. BadRowError if they are of another form, and the
    question does not have them, or if two lists differ.
    """
    lists = _lists(row, CHOICES) or _lists(row, CHOICE)
    first = next(iter(lists.values()), [])
    choices = [_written(choice) for choice in first]
    if choices and all(isinstance(choice, str) for choice in choices):
        if any(items != first for items in lists.values()):
            raise BadRowError("choices", f"{' and '.join(lists)} differ: keep one")
        return _without_letters(choices), [*lists]
    by_column = _texts_and_numbers(row, tuple(LETTERS))
    if LETTERS[0] in by_column:  # else a column that happens to have such a name
        by_letter = _column_choices(by_column)
        if not _has_choices(question, by_letter):
            _require_no_gap([*by_letter])
        return by_letter, [*by_letter]
    _require_no_choices(row)
    return {}, []


def _column_choices(texts: Mapping[str, str]) -> dict[str, str]:
    """The choices in columns by their letters, up to the last one that is not NaN."""
    last = max(_with_value(texts), default="")
    return {
        letter: _without_letter(letter, text)
        for letter, text in texts.items()
        if letter <= last
    }


def _lists(row: Row, names: Sequence[str]) -> dict[str, list[Any]]:
    """The lists in the columns of these names, maybe written as text."""
    lists = {name: _list(_parsed_list(row.get(name))) for name in names}
    return {name: items for name, items in lists.items() if items}


def _require_no_answer(questions: Mapping[str, str], reference: str) -> None:
    """BadRowError if the longest of several questions ends with the response: it is all text of the row."""
    with_answer = [name for name in questions if _ends_with(questions[name], reference)]
    longest = max(questions, key=lambda name: len(questions[name]))
    if with_answer == [longest] and len(questions) > 1:
        raise BadRowError(
            "answer in the question", f"'{longest}' ends with the response: remove it"
        )


def _ends_with(question: str, reference: str) -> bool:
    """Whether a question ends with a response, behind a colon or on lines of its own."""
    text = re.sub(r"<[^<>\s]{1,30}>\Z", "", question.rstrip()).rstrip()  # an EOS
    before, found, after = text.rpartition(reference.strip())
    return bool(found) and not after and before.rstrip(" \t").endswith((":", "\n"))


def _require_no_gap(letters: list[str]) -> None:
    """BadRowError if columns named by letters are not those of at least two choices, from A on."""
    if len(letters) < 2 or letters != [*LETTERS[: len(letters)]]:
        raise BadRowError(
            "choices",
            f"columns {', '.join(letters)}: give A, B and so on without a gap, or rename them",
        )


def _without_letters(choices: Sequence[str]) -> dict[str, str]:
    """Choices by their letters, without labels: of any form if all have theirs."""
    by_letter = lettered(choices)
    labels = {letter: LABEL.match(by_letter[letter]) for letter in by_letter}
    bare = {
        letter: by_letter[letter][label.end() :]
        for letter, label in labels.items()
        if label and label["letter"].upper() == letter
    }
    if len(by_letter) > 1 and len([*filter(None, bare.values())]) == len(by_letter):
        return bare
    return {letter: _without_letter(letter, by_letter[letter]) for letter in by_letter}


def _without_letter(letter: str, choice: str) -> str:
    return re.sub(rf"^\(?{letter}[.):]\s+", "", choice)


def _require_no_choices(row: Row) -> None:
    """BadRowError if choices are of a form that is not read, and the question does not have them."""
    question = "\n".join(_texts(row, QUESTIONS).values())
    others = _choices_under_other_names(row)
    for name, choices in row.items():
        if name not in others and not _may_be_choices(name, choices):
            continue
        if not has_content(_parsed_list(choices)):
            continue
        if isinstance(choices, str) and choices.strip() in question:
            continue
        raise BadRowError(
            "choices", f"'{name}': give a list of texts, or columns A, B and so on"
        )


def _choices_under_other_names(row: Row) -> tuple[str, ...]:
    """Columns that are choices beside others: `a` and `b`, or `answers` and the number of one."""
    if len(_texts_and_numbers(row, SMALL_LETTERS)) == len(SMALL_LETTERS):
        return SMALL_LETTERS
    answers = _parsed_list(row.get("answers"))
    if not isinstance(answers, list) or len({*map(str, answers)}) < 2:
        return ()
    names_right_one = any(
        RIGHT_ONE.fullmatch(str(name)) and has_content(row[name]) for name in row
    )
    numbers = {str(_written(row.get(name))) for name in ("label", "answer")}
    places = {text for n in range(len(answers) + 1) for text in (f"{n}", f"{n}.0")}
    has_place = bool(numbers & places - {*map(str, answers)})
    return ("answers",) if names_right_one or has_place else ()


def _may_be_choices(name: Any, value: Any) -> bool:
    """Whether a column is named after choices. A longer name, such as `num_choices`, may be of others."""
    if name in CHOICES or CHOICE_COLUMN.fullmatch(str(name)):
        return True
    if _is_by_letters(value):
        return True
    if name in CHOICE:
        return isinstance(value, Mapping) or _has_labels(str(value))
    if CHOICES_COLUMN.fullmatch(str(name)) is None:
        return False
    return isinstance(value, list | Mapping) or "\n" in str(value)


def _is_by_letters(value: Any) -> bool:
    """Whether a value is an object of texts by the first letters."""
    if not isinstance(value, Mapping):
        return False
    filled = [letter for letter, text in value.items() if has_content(text)]
    return len(filled) > 1 and sorted(filled) == [*LETTERS[: len(filled)]]


def _has_labels(text: str) -> bool:
    return all(label.search(text) for label in FIRST_LABELS)


def _parsed_list(value: Any) -> Any:
    """The list that text is in JSON or Python, as the options of MMMU; any other value as it is.

    Numbers in it stay as they are written.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return value
    for parse in (_json_list, _python_list):
        try:
            return parse(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _json_list(text: str) -> Any:
    return json.loads(text, parse_int=str, parse_float=str)


def _python_list(text: str) -> list[Any]:
    """The list that Python text is; ValueError or SyntaxError if it is none."""
    parsed = ast.parse(text, mode="eval").body
    if not isinstance(parsed, ast.List):
        raise ValueError(f"a {type(parsed).__name__}, not a list")
    if _joins_texts(text):
        raise ValueError("texts without a comma between them")
    items = zip(parsed.elts, ast.literal_eval(parsed), strict=True)
    return [_as_written(text, node, item) for node, item in items]


def _joins_texts(text: str) -> bool:
    """Whether Python would join texts in it: numpy writes a list without commas."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in pairwise(kinds)


def _as_written(text: str, node: ast.expr, item: Any) -> Any:
    """An item of a list in Python text: of a number the text itself, any other as it is."""
    is_number = isinstance(item, int | float) and not isinstance(item, bool)
    return ast.get_source_segment(text, node) if is_number else item


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _earlier_turns(history: list[Any]) -> list[Turn]:
    """The turns that a list has, or pairs of texts; BadRowError if they are something else."""
    if all(isinstance(item, Mapping) and "role" in item for item in history):
        return history
    if not all(_is_pair(item) for item in history):
        raise BadRowError(HISTORY, PAIRS)
    return [
        turn for question, response in history for turn in _round(question, response)
    ]


def _history(row: Row) -> list[Any]:
    """The list of earlier turns, maybe as text; BadRowError if they are something else."""
    history = _parsed_list(row.get(HISTORY))
    if isinstance(history, str | Mapping) and has_content(history):
        raise BadRowError(HISTORY, PAIRS)
    return _list(history)


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    return all(isinstance(text, str) for text in item)


def _references(row: Row) -> dict[str, str]:
    """The columns that hold a response, and its first text; the first one is the dataset's own response."""
    filled = [name for name in REFERENCES if has_content(row.get(name))]
    texts = {name: _first_text(row[name]) for name in filled}
    # If the first is of another form, such as a number, no other column answers.
    if filled and not texts[filled[0]]:
        return {}
    return {name: text for name, text in texts.items() if text}


def _first_text(response: Any) -> str:
    """The text of a response, or of the first of a list; VQA and SQuAD have it in an object."""
    if isinstance(response, list):
        response = response[0] if response else ""
    if isinstance(response, Mapping):
        return _first_text(response.get("answer") or response.get("text"))
    return response if isinstance(response, str) and response.strip() else ""


def _round(question: str, response: str) -> list[Turn]:
    """A question and, if there is one, its response."""
    turns: list[Turn] = [{"role": "user", "content": question}]
    if response.strip():
        turns.append({"role": "assistant", "content": response})
    return turns
