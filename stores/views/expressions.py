"""Filters from expressions over the columns of the index, such as `words > 5 and code_ratio < 0.05`.

Missing values and NaN are unknown (SQL three-valued logic).
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import polars as pl

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.index.tables import LOSS, ROW, XXH3

NEAREST = 5  # columns named in an error that are like the missing one
LISTED = 20  # columns named in an error
LINE = 120  # characters of the text of an error of polars
MISTAKES = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    ValueError,
    RecursionError,
    OverflowError,
)
LONGEST = 1 << 14  # characters of an expression
OPERATORS = 200  # in an expression
DEPTH = 32  # brackets within brackets
TOKEN = re.compile(
    r"""\s+
    |(?P<comment>--|/\*)
    |(?P<name>[^\W\d]\w*)(?![\'"])(?P<call>\s*\()?
    |(?P<quoted>"[^"]*")(?!\s*[("])
    |'(?:[^'\\]|''|\\[^'])*'
    |(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w)
    |(?P<open>[(\[])
    |(?P<close>[)\]])
    |(?P<operator>::|\|\||[<>!]=|<>|[-+*/%<>=~.])
    |,""",
    re.VERBOSE,
)
# None of these opens a file or a URL, and none makes a large value of a small one, as repeat and lpad do.
FUNCTIONS = (
    "abs|avg|cast|cbrt|ceil|ceiling|char_length|coalesce|count|ends_with|exp|floor|greatest|ifnull|least|left|"
    "length|ln|log10|log2|lower|ltrim|max|median|min|mod|nullif|octet_length|pow|power|right|round|rtrim|sign|"
    "sqrt|starts_with|stddev|strpos|substr|substring|sum|trim|try_cast|upper|variance"
)
BEFORE_BRACKETS = "all|and|any|array|between|case|else|ilike|in|like|not|or|then|when"
QUERIES = "exists|from|lateral|over|select|table|union|unnest|values|with"
Operators = Sequence[Callable[..., pl.Expr]]
COMPARISONS: Operators = (
    operator.gt,
    operator.ge,
    operator.lt,
    operator.le,
    operator.eq,
    operator.ne,
)
CONNECTIVES: Mapping[int, Operators] = {  # by the number of their operands
    # SQL casts the operand of a negation.
    1: (operator.invert, operator.methodcaller("cast", pl.Boolean)),
    2: (operator.and_, operator.or_),
}


@dataclass(frozen=True)
class Filter:
    """A reason to drop samples: `keep` maps the rows that are left to a Boolean series.

    It is null where a sample lacks a value that the filter needs: such a sample is dropped as unknown.
    """

    reason: str
    keep: Callable[[pl.DataFrame], pl.Series]


def where(
    text: str,
    columns: Sequence[str],
    lost: Mapping[str, str] = MappingProxyType({}),
    listed: str = "store stats",
) -> Filter:
    """A filter from an expression such as `words > 5 and code_ratio < 0.05`.

    It is SQL as polars reads it, of columns, operators and some functions; a name with a dot is quoted:
    `"sparrow.kept" > 0.2`. Rows where it is unknown (a value is missing or NaN) are dropped.

    Args:
        text: The expression.
        columns: The columns of the index.
        lost: The runs whose statistics could not be read, and why: an expression that needs them is refused.
        listed: The command that prints all columns.

    Raises:
        StoreError: The expression is wrong; the error names columns to use.
    """
    public = [name for name in columns if not _internal(name)]
    _require_plain(text)
    expression = _parse(text, public, listed)
    missing = sorted(expression.names - set(columns))
    for run, why in lost.items():
        of_run = any(name.startswith(f"{run}.") for name in expression.names)
        latest = any(_latest(name, columns) for name in expression.names)
        if of_run or latest or missing:
            raise StoreError(f'"{text}" may need statistics that cannot be read: {why}')
    if missing:
        instead = _instead(missing, text, public, listed)
        raise StoreError(f"there is no column '{missing[0]}' (in \"{text}\"){instead}")
    if expression.alias is not None:
        raise StoreError(
            f"cannot read the expression \"{text}\": unexpected '{expression.alias}' at the end"
        )

    def keep(rows: pl.DataFrame) -> pl.Series:
        try:
            nan_safe = _nan_safe(expression.polars, rows).alias("keep")
            kept = rows.select(nan_safe)["keep"]
            one_per_row = len(kept) == len(rows)
            if len(rows) == 1:  # of which a sum is as long as a column
                twice = pl.concat([rows, rows])
                one_per_row = twice.select(nan_safe).height == 2
        except MISTAKES as error:
            raise StoreError(
                f'"{text}" cannot be computed: {line_of(error)}'
            ) from error
        if kept.dtype != pl.Boolean or not one_per_row:
            raise StoreError(
                f'"{text}" is not a yes or no for each row: compare something, as in COLUMN > 5'
            )
        return kept

    return Filter(text, keep)


def _internal(column: str) -> bool:
    """Whether a column says where a sample is stored, and nothing about it."""
    return column.startswith((XXH3, LOSS)) or column.endswith(ROW)


@dataclass(frozen=True)
class _Expression:
    """An expression as polars reads it."""

    polars: pl.Expr
    names: set[str]  # of the columns that it reads
    alias: str | None  # the word at its end that SQL takes for a new name


def _parse(text: str, public: Sequence[str], listed: str) -> _Expression:
    try:
        expression = pl.sql_expr(text)
        names = set(expression.meta.root_names())
        output = str(expression.meta.output_name(raise_if_undetermined=False))
        operands = expression.meta.pop()
        renamed = any(expression.meta.eq(part.alias(output)) for part in operands)
    except MISTAKES as error:
        why = f"({line_of(error)}). {_some(public, listed)}"
        raise StoreError(f'cannot read the expression "{text}" {why}') from error
    return _Expression(expression, names, output if renamed else None)


def _require_plain(text: str) -> None:
    """StoreError unless an expression has columns, operators and known functions alone, and not too many."""
    why = _refusal(text)
    if why:
        shown = text if len(text) <= LINE else f"{text[:LINE]}..."
        raise StoreError(f'cannot read the expression "{shown}" ({why})')


def _refusal(text: str) -> str | None:
    """Why an expression is refused, found by splitting it into tokens; None if it is not."""
    if len(text) > LONGEST:
        return f"it has more than {LONGEST} characters"
    position = operators = depth = 0
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None or token["comment"]:
            shown = text[position : position + 20]
            return f"{shown!r} is neither column, operator, number nor text"
        position = token.end()
        name = (token["name"] or "").lower()
        if token["call"]:
            empty = text[position:].lstrip().startswith(")")
            if empty and re.fullmatch(FUNCTIONS, name):
                return f"{name} needs a value"
            if not re.fullmatch(f"{FUNCTIONS}|{BEFORE_BRACKETS}", name):
                return f"'{name}' is no function for a filter: use {FUNCTIONS.replace('|', ', ')}"
        if re.fullmatch(QUERIES, name):
            return f"'{name}' belongs to a query, not to a filter; a column of that name is quoted"
        depth += bool(token["open"] or token["call"]) - bool(token["close"])
        operators += bool(token["operator"] or name in ("and", "or", "not"))
        if operators > OPERATORS or depth > DEPTH:
            return f"it has more than {OPERATORS} operators, or {DEPTH} brackets within brackets"
    return None


def _nan_safe(expression: pl.Expr, rows: pl.DataFrame) -> pl.Expr:
    """The same expression, with NaN in a comparison unknown: polars treats it as greater than all numbers.

    Columns have no NaN, see `filter_store`: it comes of a computation, such as 0 / 0.
    """
    operands = expression.meta.pop()[::-1]
    for connect in CONNECTIVES.get(len(operands), ()):
        if expression.meta.eq(connect(*operands)):
            return connect(*(_nan_safe(operand, rows) for operand in operands))
    if len(operands) != 2:
        return expression
    for compare in COMPARISONS:
        if expression.meta.eq(compare(*operands)):
            return compare(*(_nan_to_null(operand, rows) for operand in operands))
    return expression


def _nan_to_null(operand: pl.Expr, rows: pl.DataFrame) -> pl.Expr:
    (kind,) = rows.head(0).select(operand.alias("operand")).dtypes
    return operand.fill_nan(None) if kind.is_float() else operand


def _latest(name: str, columns: Sequence[str]) -> bool:
    """Whether a column has the latest value of several runs, of which all must be readable."""
    return any(column.endswith(f".{name}") for column in columns)


def line_of(error: Exception) -> str:
    """The first line of the text of an error of polars, cut when it is long."""
    line = str(error).splitlines()[0]
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def _instead(
    missing: Sequence[str], text: str, public: Sequence[str], listed: str
) -> str:
    """A suggestion for names that are missing in an expression, as a part of the error."""
    dotted = [name for name in public if "." in name]
    runs = tuple(f"{name}." for name in missing)
    meant = [name for name in dotted if name in text]
    meant = meant or [name for name in dotted if name.startswith(runs)]
    if meant:
        quoted = " or ".join(f'"{name}"' for name in meant[-NEAREST:])
        return f": a name with a dot is written in double quotes, {quoted}"
    if re.search(rf"[=<>]\s*{re.escape(missing[0])}\b", text):
        return f": text is written in single quotes, '{missing[0]}'"
    near = difflib.get_close_matches(missing[0], public, NEAREST)
    instead = f": did you mean {' or '.join(near)}?" if near else "."
    return f"{instead} {_some(public, listed)}"


def _some(columns: Sequence[str], listed: str) -> str:
    """The names of the columns; columns of runs are only counted, for there may be hundreds."""
    plain = [name for name in columns if "." not in name]
    shown = plain[:LISTED]
    hidden = len(columns) - len(shown)
    more = f" and {hidden} more, see `{listed}`" if hidden else ""
    return f"Columns: {', '.join(shown)}{more}"
