"""The error of an invalid request, in the words and codes of the OpenAI API."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vlmdistill.pipelines.endpoint.chat import NEUTRAL
from vlmdistill.pipelines.endpoint.gate import ApiError

EXPECTED: Final = {  # by the type of an error
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "list_type": "an array",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
SENT: Final = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}
SHOWN: Final = 80  # characters of a value that a message quotes


@dataclass(frozen=True)
class _Bound:
    """A limit of a number."""

    sign: str
    violation: str
    code: str  # after the kind of the number


BOUNDS: Final = {
    "greater_than_equal": _Bound(">=", "below minimum", "below_min_value"),
    "less_than_equal": _Bound("<=", "above maximum", "above_max_value"),
    "greater_than": _Bound(">", "below minimum", "below_min_value"),
    "less_than": _Bound("<", "above maximum", "above_max_value"),
}


@dataclass(frozen=True)
class _Length:
    """A limit of an array or string."""

    kind: str
    violation: str
    end: str  # "minimum" or "maximum"

    @property
    def code(self) -> str:
        """The code of the API."""
        side = "below_min" if self.end == "minimum" else "above_max"
        return f"{self.kind}_{side}_length"


LENGTHS: Final = {
    "too_long": _Length("array", "too long", "maximum"),
    "too_short": _Length("array", "too short", "minimum"),
    "string_too_long": _Length("string", "too long", "maximum"),
    "string_too_short": _Length("string", "too short", "minimum"),
}


@dataclass(frozen=True)
class _Mistake:
    """An error of pydantic."""

    kind: str
    param: str  # the name of the parameter
    value: Any
    context: Mapping[str, Any]
    message: str

    @classmethod
    def of(cls, error: Mapping[str, Any]) -> "_Mistake":
        """From the error's facts, whose location begins with the word body."""
        param = ".".join(map(str, error["loc"][1:]))
        kind, message = str(error["type"]), str(error["msg"])
        return cls(kind, param, error.get("input"), error.get("ctx") or {}, message)

    def refused(self, text: str, code: str) -> ApiError:
        """The error that the client sees."""
        return ApiError(400, text, param=self.param, code=code)


def refusal(error: Mapping[str, Any]) -> ApiError:
    """The first error of a validation as the client sees it."""
    mistake = _Mistake.of(error)
    if mistake.kind == "json_invalid":
        reason = mistake.context.get("error", mistake.message)
        text = f"the body is not JSON: {reason} at character {mistake.param}"
        return ApiError(400, text)
    if not mistake.param:
        return ApiError(400, _other_body(mistake))
    return _reporter(mistake.kind)(mistake)


def _reporter(kind: str) -> Callable[[_Mistake], ApiError]:
    """The function that words errors of a kind."""
    if kind in EXPECTED:
        return _other_type
    if kind in BOUNDS:
        return _out_of_bounds
    if kind in LENGTHS:
        return _other_length
    return REPORTERS.get(kind, _invalid)


def _other_body(mistake: _Mistake) -> str:
    """What is wrong with a body that is no JSON object."""
    if isinstance(mistake.value, bytes):  # FastAPI has not parsed it
        return (
            "the header 'Content-Type: application/json' is missing or another: send it, with curl "
            "-H 'Content-Type: application/json'"
        )
    if mistake.kind == "missing":
        return "the body is empty: send a JSON object"
    sent = SENT.get(type(mistake.value), "another type")
    return f"the body is {sent}, not a JSON object"


def _unsupported(mistake: _Mistake) -> ApiError:
    text = f"'{mistake.param}' is not supported: leave it out"
    if mistake.param in NEUTRAL:
        text += f", or send {json.dumps(NEUTRAL[mistake.param][0])}"
    return mistake.refused(text, "unsupported_parameter")


def _missing(mistake: _Mistake) -> ApiError:
    text = f"Missing required parameter: '{mistake.param}'."
    return mistake.refused(text, "missing_required_parameter")


def _other_type(mistake: _Mistake) -> ApiError:
    expected = EXPECTED[mistake.kind]
    sent = SENT.get(type(mistake.value), "another type")
    text = f"Invalid type for '{mistake.param}': expected {expected}, but got {sent} instead."
    return mistake.refused(text, "invalid_type")


def _out_of_bounds(mistake: _Mistake) -> ApiError:
    bound = BOUNDS[mistake.kind]
    limit = next(iter(mistake.context.values()))
    number = "integer" if isinstance(limit, int) else "decimal"
    expected = f"Expected a value {bound.sign} {limit}"
    text = f"Invalid '{mistake.param}': {number} {bound.violation} value. "
    text += f"{expected}, but got {mistake.value} instead."
    return mistake.refused(text, f"{number}_{bound.code}")


def _other_length(mistake: _Mistake) -> ApiError:
    rule = LENGTHS[mistake.kind]
    limit = mistake.context.get("max_length", mistake.context.get("min_length"))
    is_sized = isinstance(mistake.value, str | list)
    length = len(mistake.value) if is_sized else 0
    article = "an" if rule.kind == "array" else "a"
    expected = f"{article} {rule.kind} with {rule.end} length {limit}"
    text = f"Invalid '{mistake.param}': {rule.kind} {rule.violation}. "
    text += f"Expected {expected}, but got length {length} instead."
    return mistake.refused(text, rule.code)


def _other_value(mistake: _Mistake) -> ApiError:
    sent = json.dumps(mistake.value)[:SHOWN]
    supported = mistake.context["expected"]
    text = f"Invalid value: {sent}. Supported values are: {supported}."
    return mistake.refused(text, "invalid_value")


def _invalid(mistake: _Mistake) -> ApiError:
    why = str(mistake.context.get("error", mistake.message))
    return mistake.refused(f"Invalid '{mistake.param}': {why}.", "invalid_value")


REPORTERS: Final = {
    "extra_forbidden": _unsupported,
    "missing": _missing,
    "literal_error": _other_value,
}
