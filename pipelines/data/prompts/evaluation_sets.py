"""Named evaluation sets: the files that are published, and how each paper asks about them.

`evaluation_sets.toml` declares them, and `local_copies.py` reads their copies.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec

from vlmdistill.pipelines.data.prompts.augment import AUGMENTATIONS
from vlmdistill.pipelines.data.prompts.columns import lettered
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

DEMO = "demo"  # made here, see `pipelines/demo/prompts.py`


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a paper samples its sets; a seed of None is not published, and 0 is taken."""

    name: str
    samples: int | Literal["all"] = 100  # of each set
    seed: int | None = None
    system: str = ""
    image_last: bool = False


class EvaluationSet(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A published set. Paths and globs are relative to a copy of it."""

    name: str
    repository: str  # of datasets on the hub; a URL: a git repository
    files: str  # glob of its Parquet or JSON files
    asked: Mapping[str, tuple[str, ...]]
    """Templates of the text parts by paper, the default first."""
    kind: Literal["image", "video"] = "image"
    media: str = "image"  # a column with files, or a path as a glob with {columns}
    only: tuple[str, str] | None = None
    """A column and its value in the rows that are used."""
    by: str = ""  # a column by which results are kept apart
    whole: tuple[str, ...] = ()  # papers that take all samples
    images: tuple[str, str, str] | None = None
    """Files with the images, the row's key, and their key."""
    folders: Mapping[str, str] = {}  # by name of the file: {folder} in `media`
    revision: str | None = None
    unpack: str = ""  # archives of the copy that must be unpacked in it

    def texts(self, paper: str, row: Mapping[str, Any]) -> list[str]:
        """The text parts of the message about a row; UndefinedError of Jinja names what the row lacks."""
        values = {**row, **_REQUESTS}
        templates = [_TEMPLATES.from_string(text) for text in self.asked[paper]]
        return [template.render(values) for template in templates]


def _lettered(
    choices: Sequence[Any],
    form: str = "{}. {}",
    joint: str = "\n",
    empty: Sequence[object] = (),
) -> str:
    """Choices with their letters; those that are `empty` are left out."""
    return joint.join(
        form.format(letter, choice)
        for letter, choice in lettered(choices).items()
        if choice not in empty
    )


def _not_null(value: Any) -> Any:
    """A value that a template writes; UndefinedError if it is null, which would become the text None."""
    if value is None:
        raise jinja2.UndefinedError("a column that is asked about is null")
    return value


def _declarations(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file by their names, which become fields of theirs."""
    return {name: {"name": name, **fields} for name, fields in table.items()}


_REQUESTS = {name: augmentation.text for name, augmentation in AUGMENTATIONS.items()}
_TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=_not_null)
_TEMPLATES.filters["lettered"] = _lettered
_declared = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
PAPERS = msgspec.convert(_declarations(_declared["papers"]), dict[str, Paper])
SETS = msgspec.convert(_declarations(_declared["sets"]), dict[str, EvaluationSet])


def find(wanted: str) -> tuple[EvaluationSet, Paper]:
    """The set and the paper of `NAME` or `NAME@PAPER`; DataError lists the names."""
    name, _, paper = wanted.partition("@")
    if name not in SETS:
        names = [*SETS, DEMO]
        similar = did_you_mean(name, names)
        raise DataError(
            f"there is no evaluation set '{name}'{similar}: choose from {', '.join(names)}"
        )
    published = SETS[name]
    papers = list(published.asked)
    if paper and paper not in papers:
        raise DataError(
            f"{name} has no prompts of the paper '{paper}': choose from {', '.join(papers)}"
        )
    return published, PAPERS[paper or papers[0]]
