"""Import named evaluation sets from copies in their published layout.

Of a Parquet file only the row groups with chosen rows are read: the images of a set may be many gigabytes.
"""

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from vlmdistill.pipelines.data.prompts import sources
from vlmdistill.pipelines.data.prompts.evaluation_sets import EvaluationSet, Paper
from vlmdistill.pipelines.data.prompts.hidden_media import media_kind
from vlmdistill.pipelines.data.prompts.importing import (
    DUPLICATE,
    Choices,
    import_rows,
)
from vlmdistill.pipelines.data.prompts.parquet_rows import python_rows, reading_parquet
from vlmdistill.pipelines.data.prompts.row import Row
from vlmdistill.pipelines.media.resolver import BadRowError
from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.input_files import regular
from vlmdistill.stores.progress import Progress, silent

AGAIN = ": download it again"
PARQUET = ".parquet"

Place = tuple[Path, int]
"""A file, and the number of a row in it, from 0."""
Columns = Mapping[str, Any]


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
    _require_complete(published, folder, files)
    places = _places(published, files)
    if not places:
        raise DataError(
            f"{published.name} in {folder}: {published.files} has no rows to use: download it again"
        )
    chosen = _chosen(places, published, paper, limit)
    rows = _rows(published, paper, folder, chosen, label)
    choices = Choices(split="eval", by_dataset=True, fps=fps, frames=frames)
    summary = import_rows([(label, rows, "chat")], out, choices, progress)
    lost = dict(summary.skipped)
    lost.pop(DUPLICATE, None)
    if lost:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in lost.items())
        count = sum(lost.values())
        raise DataError(
            f"{published.name}: {count} of {len(chosen)} samples cannot be used, {reasons}: see "
            f"{summary.skipped_file}"
        )
    return summary.added


def _chosen(
    places: Sequence[Place], published: EvaluationSet, paper: Paper, limit: int | None
) -> list[Place]:
    """The rows that a paper samples, in the order of the files."""
    count = len(places)
    if paper.samples != "all" and paper.name not in published.whole:
        count = min(count, paper.samples)
    if limit:
        count = min(count, limit)
    order = np.random.default_rng(paper.seed or 0).permutation(len(places)).tolist()
    return [places[index] for index in sorted(order[:count])]


def _copy(published: EvaluationSet, data: Path | None) -> Path:
    """The folder of a copy: in `data`, else in the hub's cache, after a download if that is possible."""
    reason = ""
    if data is not None:
        for folder in _folders(published, data):
            if next(folder.glob(published.files), None) is not None:
                return folder
    elif _is_on_hub(published) and published.kind == "image":
        import huggingface_hub

        try:
            copy = huggingface_hub.snapshot_download(
                published.repository,
                repo_type="dataset",
                allow_patterns=_patterns(published),
            )
            return Path(copy)
        except Exception as error:  # noqa: BLE001 - the hub's client raises anything; the user needs one line
            first_sentence = one_line(error).partition(". ")[0]
            reason = f", nor could it be downloaded ({first_sentence})"
    looked_in = f" in {data}" if data else ""
    if data is not None and next(data.glob(published.files), None) is not None:
        looked_in += (
            " (its own files may be another set's: it is not named after this one)"
        )
    unpack = f", unpack {published.unpack} there" if published.unpack else ""
    raise DataError(
        f"there is no copy of {published.name} (with {published.files}){looked_in}{reason}: "
        f"`{_download_command(published, data)}`{unpack}, and give --bench-data {data or 'DIR'}"
    )


def _folders(published: EvaluationSet, data: Path) -> Iterator[Path]:
    """Where a copy may be: folders named after the set or its repository; many sets have the same files."""
    repository = published.repository
    names = (published.name, repository, Path(repository).name)
    yield from (data / name for name in names)
    path = data.absolute()
    if path.parent.name == "snapshots":  # in the hub's cache: datasets--OWNER--NAME/
        path = path.parents[1]
    if path.name.lower().rpartition("--")[2] in map(str.lower, names):
        yield data


def _is_on_hub(published: EvaluationSet) -> bool:
    return "://" not in published.repository


def _patterns(published: EvaluationSet) -> list[str]:
    """The files of a set in its repository, as globs."""
    return [published.files, *(published.images or ())[:1]]


def _download_command(published: EvaluationSet, data: Path | None) -> str:
    """The command that copies a set into a folder."""
    folder = f"{data or 'DIR'}/{published.name}"
    if not _is_on_hub(published):
        return f"git clone {published.repository} {folder}"
    options = []
    if published.revision:
        options.append(f"--revision {published.revision}")
    if published.kind == "image":
        options += [f"--include '{pattern}'" for pattern in _patterns(published)]
    words = [published.repository, *options, f"--local-dir {folder}"]
    return " ".join(["hf download --repo-type dataset", *words])


def _require_complete(
    published: EvaluationSet, folder: Path, files: Sequence[Path]
) -> None:
    """DataError if some files of a set are missing: the samples would be chosen from fewer rows."""
    stems = {file.stem for file in files}
    missing = sorted(published.folders.keys() - stems)
    shards = [re.search(r"^(.*-)(\d{5})-of-(\d{5})", file.stem) for file in files]
    names = [shard and shard[0] for shard in shards]
    counts = {shard and shard[3] for shard in shards}
    # Behind the name may be a hash, so that another upload does not replace the file.
    if len(counts) > 1 or (counts != {None} and len({*names}) < len(names)):
        raise DataError(
            f"{published.name} in {folder}: {published.files} has files of several downloads, such as "
            f"{files[0].name} and {files[-1].name}: remove the others"
        )
    if shard := next(filter(None, shards), None):
        prefix, count = shard[1], int(shard[3])
        numbers = {stem.removeprefix(prefix)[:5] for stem in stems}
        all_numbers = [f"{number:05}" for number in range(count)]
        missing += [
            f"{prefix}{number}" for number in all_numbers if number not in numbers
        ]
    if missing:
        raise DataError(
            f"{published.name} in {folder}: {published.files} lacks {len(missing)} files, such as "
            f"{missing[0]}: download them too"
        )


def _places(published: EvaluationSet, files: Sequence[Path]) -> list[Place]:
    """All rows of a set that its papers choose from."""
    places: list[Place] = []
    for file in files:
        if file.suffix == PARQUET:
            numbers = _parquet_numbers(published, file)
        else:
            numbers = [number for number, _ in enumerate(sources.read(str(file)))]
        places += [(file, number) for number in numbers]
    return places


def _parquet_numbers(published: EvaluationSet, file: Path) -> list[int]:
    """The numbers of the rows of a Parquet file that are used."""
    import pyarrow.parquet as pq

    with reading_parquet(file, AGAIN):
        if published.only is None:
            return [*range(pq.read_metadata(regular(file)).num_rows)]
        column, wanted = published.only
        columns = pq.read_schema(regular(file)).names
        if column not in columns:
            raise _other_layout(published, file, f"no column '{column}'", columns)
        values = pq.read_table(file, columns=[column])[column].to_pylist()
    return [number for number, value in enumerate(values) if value == wanted]


def _rows(
    published: EvaluationSet,
    paper: Paper,
    folder: Path,
    places: Sequence[Place],
    label: str,
) -> Iterator[Row]:
    """The chosen rows as chat messages."""
    read = list(_read(places))
    images = _images(published, folder, [columns for _, columns in read])
    for (file, number), columns in read:
        dataset = label
        try:
            if published.images:
                image = images[columns[published.images[1]]]
                columns = {**columns, "image": image}
            messages = _messages(published, paper, folder, file, columns)
            if published.by:
                dataset = f"{label}/{columns[published.by]}"
        except BadRowError as error:
            yield Row(str(file), label, number + 1, columns, problem=error)
            continue
        except (jinja2.UndefinedError, KeyError, TypeError, IndexError) as error:
            raise _other_layout(published, file, error, list(columns)) from None
        yield Row(str(file), dataset, number + 1, {"messages": messages})


def _messages(
    published: EvaluationSet, paper: Paper, folder: Path, file: Path, columns: Columns
) -> list[Any]:
    """The messages by which a paper asks about a row."""
    kind = published.kind
    texts = published.texts(paper.name, columns)
    text_parts = [{"type": "text", "text": text} for text in texts]
    media = _media(published, folder, file, columns)
    media_parts = [{"type": kind, kind: item} for item in media]
    parts = [*media_parts, *text_parts]
    if paper.image_last and kind == "image":
        parts = [*text_parts, *media_parts]
    messages: list[Any] = []
    if paper.system:
        messages.append({"role": "system", "content": paper.system})
    messages.append({"role": "user", "content": parts})
    return messages


def _read(places: Sequence[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows at these places, which are sorted by file and number."""
    for file, group in groupby(places, key=lambda place: place[0]):
        numbers = [number for _, number in group]
        rows = _read_parquet if file.suffix == PARQUET else _read_text
        for number, columns in rows(file, numbers):
            yield (file, number), columns


def _read_text(
    file: Path, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    wanted = set(numbers)
    for number, row in enumerate(sources.read(str(file))):
        if number in wanted:
            yield number, row.value if isinstance(row.value, dict) else {}


def _read_parquet(
    file: Path, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    with reading_parquet(file, AGAIN):
        parquet = pq.ParquetFile(regular(file))
    start = 0
    for group in range(parquet.num_row_groups):
        end = start + parquet.metadata.row_group(group).num_rows
        inside = [number for number in numbers if start <= number < end]
        if inside:
            with reading_parquet(file, AGAIN):
                table = parquet.read_row_group(group)
                chosen = table.take([number - start for number in inside])
                rows = python_rows(chosen)
            yield from zip(inside, rows, strict=True)
        start = end


def _images(
    published: EvaluationSet, folder: Path, rows: Sequence[Columns]
) -> dict[Any, Any]:
    """The images of the rows by key, of a set that has them in files of their own."""
    import pyarrow.parquet as pq

    if published.images is None:
        return {}
    files, row_key, image_key = published.images
    keys = [row[row_key] for row in rows if row_key in row]
    if not keys:  # no such column
        return {}
    images: dict[Any, Any] = {}
    for file in sorted(folder.glob(files)):
        with reading_parquet(file, AGAIN):
            wanted = [(image_key, "in", keys)]
            columns = [image_key, "image"]
            table = pq.read_table(regular(file), columns=columns, filters=wanted)
            for row in python_rows(table):
                images[row[image_key]] = row["image"]
    if not images:
        raise DataError(
            f"{published.name} in {folder}: {files} has none of its images: download it too"
        )
    return images


def _media(
    published: EvaluationSet, folder: Path, file: Path, columns: Columns
) -> list[Any]:
    """The images or videos of a row: contents of a column, or paths."""
    if "{" not in published.media:
        content = columns[published.media]
        if not content:
            raise KeyError(published.media)
        return content if isinstance(content, list) else [content]
    values = {**columns, "folder": published.folders.get(file.stem, "")}
    path = published.media.format_map(values)
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise DataError(
            f"{published.name}: {file} names the file {path}, which is not in its folder"
        )
    escaped = {name: glob.escape(str(value)) for name, value in values.items()}
    pattern = published.media.format_map(escaped)
    files = folder.absolute().glob(pattern)
    by_kind = [(media_kind(file.name), file) for file in files]
    # A picture beside a film is its preview, and other files are no media.
    usable = [
        (kind != published.kind, file)
        for kind, file in by_kind
        if kind or file.is_dir()
    ]
    _, media_file = min(usable, default=(True, None))
    if media_file is None:
        advice = "download it again"
        if published.unpack:
            advice = f"unpack {published.unpack} there"
        raise DataError(
            f"{published.name}: {folder} has no {path}, which {file.name} names: {advice}"
        )
    return [str(media_file)]


def _other_layout(
    published: EvaluationSet, file: Path, problem: object, columns: Sequence[str]
) -> DataError:
    return DataError(
        f"{published.name}: the layout of {file} is not the published one ({problem}; its columns are "
        f"{', '.join(columns)}): download it again, or import it with --prompts"
    )
