"""Rows of tables in text, CSV and TSV, read as a stream."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vlmdistill.pipelines.data.prompts.json_rows import MOST_ROW, Numbered
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def separator_of(name: str) -> str:
    """What separates the values of a table by the name of its file; empty for other files."""
    endings = [end for end in Path(name.lower()).suffixes if end not in COMPRESSED]
    return SEPARATORS.get(endings[-1], "") if endings else ""


def table_rows(file: IO[bytes], separator: str, path: Path) -> Iterator[Numbered]:
    """The rows of an open table. Values stay as they are: `None`, `NA` and `007` may be answers.

    DataError if it is no table, or has two columns of one name.
    """
    csv.field_size_limit(MOST_ROW)  # images in base64
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)
    names, number = list[str](), 0
    try:
        for values in reader:
            if not names:
                names = values
                if twice := [name for name in names if names.count(name) > 1]:
                    raise DataError(f"{path} has two columns {twice[0]!r}: rename one")
            elif values:
                number += 1
                problem = None
                if len(values) != len(names):
                    which = (
                        "too many values"
                        if len(values) > len(names)
                        else "too few values"
                    )
                    problem = BadRowError(
                        which, f"{len(values)}, for {len(names)} columns"
                    )
                yield (
                    number,
                    (dict(zip(names, values, strict=False)), reader.line_num, problem),
                )
    except csv.Error as error:
        raise DataError(
            f"{path} is no table: {error} at line {reader.line_num}"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} after line {reader.line_num}"
        ) from None
    finally:
        text.detach()  # the file is closed by who opened it
