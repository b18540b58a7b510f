"""Filters from expressions over the columns of the index, such as `words > 5 and code_ratio < 0.05`.

What is missing or no number is unknown: three-valued logic, as SQL has it.
"""

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import polars as pl

from vlmdistill.stores.errors import StoreError
from vlmdistill.stores.tables import LOSS, ROW, XXH3

NEAREST, LISTED = 5, 20  # columns named in an error: like the one that is missing, and of the others
LINE = 120  # characters of what polars says of a mistake
Operators = Sequence[Callable[..., pl.Expr]]
COMPARISONS: Operators = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)
CONNECTIVES: Mapping[int, Operators] = {  # by how many they connect
    1: (operator.invert, operator.methodcaller("cast", pl.Boolean)),  # SQL casts what it negates
    2: (operator.and_, operator.or_),
}


@dataclass(frozen=True)
class Filter:
    """A reason to drop samples: `keep` maps the rows that are left to a Boolean series.

    It is null where a sample has not the value that would tell: such a sample is dropped as unknown.
    """

    reason: str
    keep: Callable[[pl.DataFrame], pl.Series]


def where(text: str, columns: Sequence[str], lost: Mapping[str, str] = MappingProxyType({})) -> Filter:
    """A filter from an expression such as `words > 5 and code_ratio < 0.05`.

    It is SQL as polars reads it; a name with a dot is quoted: `"sparrow.kept" > 0.2`. Rows where
    it is unknown (a value is missing or NaN) are dropped. StoreError on a mistake, with columns there are.
    `lost` are runs whose statistics could not be read, and why: whoever needs them is told.
    """
    known = [name for name in columns if not name.startswith((XXH3, LOSS)) and not name.endswith(ROW)]
    try:
        expression = pl.sql_expr(text)
        names = set(expression.meta.root_names())
        renamed = expression.meta.output_name(raise_if_undetermined=False)
        alias = any(expression.meta.eq(part.alias(str(renamed))) for part in expression.meta.pop())
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise StoreError(f'cannot read the expression "{text}" ({line_of(error)}). {_some(known)}') from error
    missing = sorted(names - set(columns))
    for run, why in lost.items():
        if any(name.startswith(f"{run}.") or _latest(name, columns) for name in names) or missing:
            raise StoreError(f'"{text}" may need what cannot be read: {why}')
    if missing:
        raise StoreError(f"there is no column '{missing[0]}' (in \"{text}\"){_instead(missing, text, known)}")
    if alias:  # SQL takes a word at the end for a new name
        raise StoreError(f"cannot read the expression \"{text}\": '{renamed}' at its end belongs to nothing")

    def keep(rows: pl.DataFrame) -> pl.Series:
        try:
            told = _told(expression, rows).alias("keep")
            kept = rows.select(told)["keep"]
            each = len(kept) == len(rows)
            if len(rows) == 1:  # of which a sum is as long as a column
                each = pl.concat([rows, rows]).select(told).height == 2
        except pl.exceptions.PolarsError as error:
            raise StoreError(f'"{text}" cannot be computed: {line_of(error)}') from error
        if kept.dtype != pl.Boolean or not each:
            raise StoreError(
                f'"{text}" is not a yes or no for each sample: compare something, as in words > 5'
            )
        return kept

    return Filter(text, keep)


def _told(expression: pl.Expr, rows: pl.DataFrame) -> pl.Expr:
    """The same, with NaN in a comparison unknown: polars has it greater than all numbers.

    Columns have none, see `filter_store`: it comes of a computation, such as 0 / 0.
    """
    parts = expression.meta.pop()[::-1]
    for connect in CONNECTIVES.get(len(parts), ()):
        if expression.meta.eq(connect(*parts)):
            return connect(*(_told(part, rows) for part in parts))
    for compare in COMPARISONS if len(parts) == 2 else ():
        if expression.meta.eq(compare(*parts)):
            kinds = rows.head(0).select(part.alias(str(at)) for at, part in enumerate(parts)).dtypes
            sides = zip(parts, kinds, strict=True)
            return compare(*(part.fill_nan(None) if kind.is_float() else part for part, kind in sides))
    return expression


def _latest(name: str, columns: Sequence[str]) -> bool:
    """Whether a column has the latest value of several runs: of all of them, or it is not the latest."""
    return any(column.endswith(f".{name}") for column in columns)


def line_of(error: Exception) -> str:
    """The first line of what polars says of a mistake, cut when it is long."""
    line = str(error).splitlines()[0]
    return line if len(line) <= LINE else f"{line[:LINE]}..."


def _instead(missing: Sequence[str], text: str, known: Sequence[str]) -> str:
    """What to write instead of names that are missing in an expression."""
    dotted = [name for name in known if "." in name]
    meant = [name for name in dotted if name in text]
    meant = meant or [name for name in dotted if name.startswith(tuple(f"{name}." for name in missing))]
    if meant:
        quoted = " or ".join(f'"{name}"' for name in meant[-NEAREST:])
        return f": a name with a dot is written in double quotes, {quoted}"
    near = difflib.get_close_matches(missing[0], known, NEAREST)
    return f": did you mean {' or '.join(near)}? {_some(known)}" if near else f". {_some(known)}"


def _some(columns: Sequence[str]) -> str:
    """The columns there are; those of each run only counted, for there may be hundreds."""
    plain = [name for name in columns if "." not in name]
    rest = len(columns) - len(plain[:LISTED])
    return f"Columns: {', '.join(plain[:LISTED])}" + (f" and {rest} more, see `store stats`" if rest else "")
