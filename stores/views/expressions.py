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

NEAREST, LISTED = (
    5,
    20,
)  # columns named in an error: like the one that is missing, and of the others
LINE = 120  # characters of what polars says of a mistake
MISTAKES = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    ValueError,
    RecursionError,
    OverflowError,
)
LONGEST, OPERATORS, DEPTH = (
    1 << 14,
    200,
    32,
)  # characters; operators; brackets within brackets
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
# Of these none opens a file or a URL, and none makes much of little, as repeat and lpad do.
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
CONNECTIVES: Mapping[int, Operators] = {  # by how many they connect
    1: (
        operator.invert,
        operator.methodcaller("cast", pl.Boolean),
    ),  # SQL casts what it negates
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
    `"sparrow.kept" > 0.2`. Rows where it is unknown (a value is missing or NaN) are dropped. StoreError on a
    mistake, with columns there are.
    `lost` are runs whose statistics could not be read, and why: an expression that needs them is refused.
    `listed` is the command that prints all columns.
    """
    known = [
        name
        for name in columns
        if not name.startswith((XXH3, LOSS)) and not name.endswith(ROW)
    ]
    _require_plain(text)
    try:
        expression = pl.sql_expr(text)
        names = set(expression.meta.root_names())
        renamed = expression.meta.output_name(raise_if_undetermined=False)
        alias = any(
            expression.meta.eq(part.alias(str(renamed)))
            for part in expression.meta.pop()
        )
    except MISTAKES as error:
        why = f"({line_of(error)}). {_some(known, listed)}"
        raise StoreError(f'cannot read the expression "{text}" {why}') from error
    missing = sorted(names - set(columns))
    for run, why in lost.items():
        if (
            any(name.startswith(f"{run}.") or _latest(name, columns) for name in names)
            or missing
        ):
            raise StoreError(f'"{text}" may need what cannot be read: {why}')
    if missing:
        instead = _instead(missing, text, known, listed)
        raise StoreError(f"there is no column '{missing[0]}' (in \"{text}\"){instead}")
    if alias:  # SQL takes a word at the end for a new name
        raise StoreError(
            f"cannot read the expression \"{text}\": unexpected '{renamed}' at the end"
        )

    def keep(rows: pl.DataFrame) -> pl.Series:
        try:
            nan_safe = _nan_safe(expression, rows).alias("keep")
            kept = rows.select(nan_safe)["keep"]
            each = len(kept) == len(rows)
            if len(rows) == 1:  # of which a sum is as long as a column
                each = pl.concat([rows, rows]).select(nan_safe).height == 2
        except MISTAKES as error:
            raise StoreError(
                f'"{text}" cannot be computed: {line_of(error)}'
            ) from error
        if kept.dtype != pl.Boolean or not each:
            raise StoreError(
                f'"{text}" is not a yes or no for each row: compare something, as in COLUMN > 5'
            )
        return kept

    return Filter(text, keep)


def _require_plain(text: str) -> None:
    """StoreError unless an expression has columns, operators and known functions alone, and not too many."""
    at, operators, depth = 0, 0, 0
    why = f"it has more than {LONGEST} characters" if len(text) > LONGEST else ""
    while at < len(text) and not why:
        found = TOKEN.match(text, at)
        if found is None or found["comment"]:
            why = f"{text[at : at + 20]!r} is neither column, operator, number nor text"
            break
        name, at = (found["name"] or "").lower(), found.end()
        depth += bool(found["open"] or found["call"]) - bool(found["close"])
        operators += bool(found["operator"] or name in ("and", "or", "not"))
        if (
            found["call"]
            and re.fullmatch(FUNCTIONS, name)
            and text[at:].lstrip().startswith(")")
        ):
            why = f"{name} needs a value"
        elif found["call"] and not re.fullmatch(f"{FUNCTIONS}|{BEFORE_BRACKETS}", name):
            why = f"'{name}' is no function for a filter: use {FUNCTIONS.replace('|', ', ')}"
        elif re.fullmatch(QUERIES, name):
            why = f"'{name}' belongs to a query, not to a filter; a column of that name is quoted"
        elif operators > OPERATORS or depth > DEPTH:
            why = f"it has more than {OPERATORS} operators, or {DEPTH} brackets within brackets"
    if why:
        shown = text if len(text) <= LINE else f"{text[:LINE]}..."
        raise StoreError(f'cannot read the expression "{shown}" ({why})')


def _nan_safe(expression: pl.Expr, rows: pl.DataFrame) -> pl.Expr:
    """The same, with NaN in a comparison unknown: polars treats it as greater than all numbers.

    Columns have none, see `filter_store`: it comes of a computation, such as 0 / 0.
    """
    parts = expression.meta.pop()[::-1]
    for connect in CONNECTIVES.get(len(parts), ()):
        if expression.meta.eq(connect(*parts)):
            return connect(*(_nan_safe(part, rows) for part in parts))
    for compare in COMPARISONS if len(parts) == 2 else ():
        if expression.meta.eq(compare(*parts)):
            kinds = (
                rows.head(0)
                .select(part.alias(str(at)) for at, part in enumerate(parts))
                .dtypes
            )
            sides = zip(parts, kinds, strict=True)
            return compare(
                *(
                    part.fill_nan(None) if kind.is_float() else part
                    for part, kind in sides
                )
            )
    return expression


def _latest(name: str, columns: Sequence[str]) -> bool:
    """Whether a column has the latest value of several runs: of all of them, or it is not the latest."""
    return any(column.endswith(f".{name}") for column in columns)


def line_of(error: Exception) -> str:
    """The first line of what polars says of a mistake, cut when it is long."""
    line = str(error).splitlines()[0]
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def _instead(
    missing: Sequence[str], text: str, known: Sequence[str], listed: str
) -> str:
    """What to write instead of names that are missing in an expression."""
    dotted = [name for name in known if "." in name]
    meant = [name for name in dotted if name in text]
    meant = meant or [
        name
        for name in dotted
        if name.startswith(tuple(f"{name}." for name in missing))
    ]
    if meant:
        quoted = " or ".join(f'"{name}"' for name in meant[-NEAREST:])
        return f": a name with a dot is written in double quotes, {quoted}"
    if re.search(rf"[=<>]\s*{re.escape(missing[0])}\b", text):
        return f": text is written in single quotes, '{missing[0]}'"
    near = difflib.get_close_matches(missing[0], known, NEAREST)
    instead = f": did you mean {' or '.join(near)}?" if near else "."
    return f"{instead} {_some(known, listed)}"


def _some(columns: Sequence[str], listed: str) -> str:
    """The names of the columns; columns of runs are only counted, for there may be hundreds."""
    plain = [name for name in columns if "." not in name]
    rest = len(columns) - len(plain[:LISTED])
    return f"Columns: {', '.join(plain[:LISTED])}" + (
        f" and {rest} more, see `{listed}`" if rest else ""
    )
