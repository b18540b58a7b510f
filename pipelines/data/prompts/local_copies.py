"""Import named evaluation sets from copies in their published layout.

Of a Parquet file only the row groups with chosen rows are read: the images of a set may be many gigabytes.
"""

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from vlmdistill.pipelines.data.prompts import sources
from vlmdistill.pipelines.data.prompts.evaluation_sets import EvaluationSet, Paper
from vlmdistill.pipelines.data.prompts.importing import Choices, import_rows
from vlmdistill.pipelines.data.prompts.sources import Row
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.progress import Progress, silent

AGAIN = ": download it again"

Place = tuple[Path, int]  # a file, and the number of a row in it, from 0


def import_set(
    published: EvaluationSet,
    paper: Paper,
    out: Path,
    *,
    label: str,
    data: Path | None = None,
    limit: int | None = None,
    fps: float | None = None,
    frames: int | None = None,
    progress: Progress = silent,
) -> int:
    """Add the samples that a paper takes of a set to the prompts of `out`; the number of them.

    `label` is their dataset, and `limit` a smaller number of samples. Videos are sampled with `fps` or
    `frames`, by default as the target does it. DataError if there is no copy, if a column or a file is
    missing, or if a sample cannot be used.
    """
    folder = _copy(published, data)
    files = sorted(path for path in folder.glob(published.files) if path.is_file())
    _complete(published, folder, files)
    places = _places(published, files)
    if not places:
        raise DataError(
            f"{published.name} in {folder}: {published.files} has no rows to use: download it again"
        )
    order = np.random.default_rng(paper.seed or 0).permutation(len(places)).tolist()
    most = (
        len(order)
        if paper.samples == "all" or paper.name in published.whole
        else paper.samples
    )
    wanted = sorted(order[: min(limit or most, most)])
    rows = _rows(published, paper, folder, [places[i] for i in wanted], label)
    choices = Choices(split="eval", by_dataset=True, fps=fps, frames=frames)
    summary = import_rows([(label, rows, "chat")], out, choices, progress)
    if lost := {
        reason: count
        for reason, count in summary.skipped.items()
        if reason != "duplicate"
    }:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in lost.items())
        raise DataError(
            f"{published.name}: {sum(lost.values())} of {len(wanted)} samples cannot be used, {reasons}: see "
            f"{summary.skipped_file}"
        )
    return summary.added


def _copy(published: EvaluationSet, data: Path | None) -> Path:
    """The folder of a copy: in `data`, else in the hub's cache, after a download if that is possible."""
    name, repository, reason = published.name, published.repository, ""
    hub = "://" not in repository
    wanted = [published.files, *(published.images or ())[:1]]
    if data is not None:
        for folder in (
            data / name,
            data / repository,
            data / Path(repository).name,
            data,
        ):
            if next(folder.glob(published.files), None) is not None:
                return folder
    elif hub and published.kind == "image":
        import huggingface_hub

        try:
            return Path(
                huggingface_hub.snapshot_download(
                    repository, repo_type="dataset", allow_patterns=wanted
                )
            )
        except Exception as error:  # noqa: BLE001 - the hub's client raises anything; the user needs one line
            reason = (
                f", nor could it be downloaded ({one_line(error).partition('. ')[0]})"
            )
    where = f"{data or 'DIR'}/{name}"
    get = f"git clone {repository} {where}"
    if hub:
        options = [f"--revision {published.revision}"] if published.revision else []
        options += [f"--include '{one}'" for one in wanted if published.kind == "image"]
        get = " ".join(
            [
                "hf download --repo-type dataset",
                repository,
                *options,
                f"--local-dir {where}",
            ]
        )
    unpack = f", unpack {published.unpack} there" if published.unpack else ""
    raise DataError(
        f"there is no copy of {name} (with {published.files}){f' in {data}' if data else ''}{reason}: "
        f"`{get}`{unpack}, and give --bench-data {data or 'DIR'}"
    )


def _complete(published: EvaluationSet, folder: Path, files: Sequence[Path]) -> None:
    """DataError if some files of a set are missing: the samples would be chosen from fewer rows."""
    stems = {file.stem for file in files}
    missing = sorted(published.folders.keys() - stems)
    for file in files:
        if shards := re.search(r"^(.*-)\d{5}-of-(\d{5})", file.stem):
            numbers = {stem.removeprefix(shards[1])[:5] for stem in stems}
            missing += [
                f"{shards[1]}{n:05}"
                for n in range(int(shards[2]))
                if f"{n:05}" not in numbers
            ]
            break
    if missing:
        raise DataError(
            f"{published.name} in {folder}: {published.files} lacks {len(missing)} files, such as "
            f"{missing[0]}: download them too"
        )


def _places(published: EvaluationSet, files: Sequence[Path]) -> list[Place]:
    """All rows of a set that its papers choose from."""
    import pyarrow.parquet as pq

    places: list[Place] = []
    for file in files:
        column, value = published.only or ("", "")
        if file.suffix != ".parquet":
            places += [
                (file, number) for number, _ in enumerate(sources.read(str(file)))
            ]
            continue
        with sources.reading_parquet(file, AGAIN):
            if column and column not in (names := pq.read_schema(regular(file)).names):
                raise _other_layout(published, file, f"no column '{column}'", names)
            kept: Any = range(pq.read_metadata(file).num_rows)
            if column:
                kept = pq.read_table(file, columns=[column])[column].to_pylist()
        places += [
            (file, number)
            for number, has in enumerate(kept)
            if not column or has == value
        ]
    return places


def _rows(
    published: EvaluationSet,
    paper: Paper,
    folder: Path,
    places: Sequence[Place],
    label: str,
) -> Iterator[Row]:
    """The chosen rows as chat messages."""
    read = list(_read(places))
    looked_up = _images(published, folder, [row for _, row in read])
    for (file, number), row in read:
        try:
            if published.images:
                row = {**row, "image": looked_up[row[published.images[1]]]}
            texts: list[Any] = [
                {"type": "text", "text": text}
                for text in published.texts(paper.name, row)
            ]
            shown = [
                {"type": published.kind, published.kind: one}
                for one in _media(published, folder, file, row)
            ]
            group = f"{label}/{row[published.by]}" if published.by else label
        except BadRowError as error:
            yield Row(str(file), label, number + 1, row, problem=error)
            continue
        except (jinja2.UndefinedError, KeyError, TypeError, IndexError) as error:
            raise _other_layout(published, file, error, list(row)) from None
        parts = (
            [*texts, *shown]
            if paper.image_last and published.kind == "image"
            else [*shown, *texts]
        )
        messages: list[Any] = (
            [{"role": "system", "content": paper.system}] if paper.system else []
        )
        messages.append({"role": "user", "content": parts})
        yield Row(str(file), group, number + 1, {"messages": messages})


def _read(places: Sequence[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows at these places, which are sorted by file and number."""
    import pyarrow.parquet as pq

    for file in dict.fromkeys(file for file, _ in places):
        numbers = [number for at, number in places if at == file]
        wanted = set(numbers)
        if file.suffix != ".parquet":
            for number, row in enumerate(sources.read(str(file))):
                if number in wanted:
                    yield (
                        (file, number),
                        row.value if isinstance(row.value, dict) else {},
                    )
            continue
        with sources.reading_parquet(file, AGAIN):
            parquet, start = pq.ParquetFile(regular(file)), 0
        for group in range(parquet.num_row_groups):
            size = parquet.metadata.row_group(group).num_rows
            if inside := [
                number for number in numbers if start <= number < start + size
            ]:
                with sources.reading_parquet(file, AGAIN):
                    table = parquet.read_row_group(group).take(
                        [number - start for number in inside]
                    )
                    rows = sources.python_rows(table)
                yield from (
                    ((file, number), row)
                    for number, row in zip(inside, rows, strict=True)
                )
            start += size


def _images(
    published: EvaluationSet, folder: Path, rows: Sequence[Mapping[str, Any]]
) -> dict[Any, Any]:
    """The images of the rows by key, of a set that has them in files of their own."""
    import pyarrow.parquet as pq

    files, key, theirs = published.images or ("", "", "")
    keys = [row[key] for row in rows if key in row]
    found: dict[Any, Any] = {}
    if not keys:  # no such set, or no such column
        return found
    for file in sorted(folder.glob(files)):
        with sources.reading_parquet(file, AGAIN):
            table = pq.read_table(
                regular(file), columns=[theirs, "image"], filters=[(theirs, "in", keys)]
            )
            found |= {row[theirs]: row["image"] for row in sources.python_rows(table)}
    if not found:
        raise DataError(
            f"{published.name} in {folder}: {files} has none of its images: download it too"
        )
    return found


def _media(
    published: EvaluationSet, folder: Path, file: Path, row: Mapping[str, Any]
) -> list[Any]:
    """The images or videos of a row: contents of a column, or paths."""
    if "{" not in published.media:
        if not (found := row[published.media]):
            raise KeyError(published.media)
        return found if isinstance(found, list) else [found]
    values = {**row, "folder": published.folders.get(file.stem, "")}
    path = published.media.format_map(values)
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise DataError(
            f"{published.name}: {file} names the file {path}, which is not in its folder"
        )
    pattern = published.media.format_map(
        {name: glob.escape(str(value)) for name, value in values.items()}
    )
    file_found = min(folder.absolute().glob(pattern), default=None)
    if file_found is None:
        get = (
            f"unpack {published.unpack} there"
            if published.unpack
            else "download it again"
        )
        raise DataError(
            f"{published.name}: {folder} has no {path}, which {file.name} names: {get}"
        )
    return [str(file_found)]


def _other_layout(
    published: EvaluationSet, file: Path, problem: object, columns: Sequence[str]
) -> DataError:
    return DataError(
        f"{published.name}: the layout of {file} is not the published one ({problem}; its columns are "
        f"{', '.join(columns)}): download it again, or import it with --prompts"
    )
