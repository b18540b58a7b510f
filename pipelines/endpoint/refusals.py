"""What is wrong with a request, in the words and codes of the OpenAI API."""

import json
from collections.abc import Mapping
from typing import Any

from vlmdistill.pipelines.endpoint.chat import NEUTRAL
from vlmdistill.pipelines.endpoint.gate import ApiError

EXPECTED = {  # by the type of an error
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "list_type": "an array",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
GIVEN = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}
BOUNDS = {  # the sign, what to say, and the end of the code
    "greater_than_equal": (">=", "below minimum", "below_min_value"),
    "less_than_equal": ("<=", "above maximum", "above_max_value"),
    "greater_than": (">", "below minimum", "below_min_value"),
    "less_than": ("<", "above maximum", "above_max_value"),
}
LENGTHS = {
    "too_long": (
        "array too long",
        "an array with maximum length",
        "array_above_max_length",
    ),
    "too_short": (
        "array too short",
        "an array with minimum length",
        "array_below_min_length",
    ),
    "string_too_long": (
        "string too long",
        "a string with maximum length",
        "string_above_max_length",
    ),
    "string_too_short": (
        "string too short",
        "a string with minimum length",
        "string_below_min_length",
    ),
}


def refusal(error: Mapping[str, Any]) -> ApiError:
    """The first error of a validation as the client sees it."""
    kind, value, facts = str(error["type"]), error.get("input"), error.get("ctx") or {}
    param = ".".join(map(str, error["loc"][1:]))
    if kind == "json_invalid" or not param:
        return ApiError(
            400, "the body is not a JSON object of Content-Type application/json"
        )
    if kind == "extra_forbidden":
        instead = (
            f", or send {json.dumps(NEUTRAL[param][0])}" if param in NEUTRAL else ""
        )
        text, code = (
            f"'{param}' is not supported: leave it out{instead}",
            "unsupported_parameter",
        )
    elif kind == "missing":
        text, code = (
            f"Missing required parameter: '{param}'.",
            "missing_required_parameter",
        )
    elif kind in EXPECTED:
        given = GIVEN.get(type(value), "another type")
        text, code = (
            f"Invalid type for '{param}': expected {EXPECTED[kind]}, but got {given} instead.",
            "invalid_type",
        )
    elif kind in BOUNDS:
        sign, where, end = BOUNDS[kind]
        limit = next(iter(facts.values()))
        number = "integer" if isinstance(limit, int) else "decimal"
        expected = f"Expected a value {sign} {limit}, but got {value} instead."
        text, code = (
            f"Invalid '{param}': {number} {where} value. {expected}",
            f"{number}_{end}",
        )
    elif kind in LENGTHS:
        what, expected, code = LENGTHS[kind]
        limit = facts.get("max_length", facts.get("min_length"))
        length = len(value) if isinstance(value, str | list) else 0
        text = f"Invalid '{param}': {what}. Expected {expected} {limit}, but got length {length} instead."
    elif kind == "literal_error":
        shown = json.dumps(value)[:80]
        text, code = (
            f"Invalid value: {shown}. Supported values are: {facts['expected']}.",
            "invalid_value",
        )
    else:
        said = str(facts["error"]) if "error" in facts else str(error["msg"])
        text, code = f"Invalid '{param}': {said}.", "invalid_value"
    return ApiError(400, text, param=param, code=code)
