"""Rows to import, and what becomes of them."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdistill.pipelines.data.prompts.formats import Format
from vlmdistill.pipelines.data.prompts.importing import (
    Choices,
    ImportSummary,
    import_prompts,
)
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read

TALK = {
    "conversations": [
        {"from": "human", "value": "What is this?"},
        {"from": "gpt", "value": "A wall."},
    ]
}
ALPACA = {
    "instruction": "Summarise the text.",
    "input": "Once upon a time.",
    "output": "A tale.",
}


def imported(
    out: Path, *rows: Any, kind: Format = "auto", **choices: Any
) -> ImportSummary:
    """Import rows as a JSON file beside the media."""
    source = out.parents[1] / "rows.json"
    source.write_text(json.dumps(rows))
    return import_prompts([str(source)], out, kind, Choices(**choices))


def one(out: Path, row: Any, **choices: Any) -> Prompt:
    """The only prompt of a row that is imported whole."""
    summary = imported(out, row, **choices)
    assert (summary.added, summary.skipped, summary.unread_columns) == (1, {}, {})
    (prompt,) = read(out)
    return prompt


def refused(out: Path, row: Any) -> tuple[str, str]:
    """Reason and detail of a row that is skipped."""
    summary = imported(out, row, TALK)
    assert (summary.added + summary.present, sum(summary.skipped.values())) == (1, 1)
    (entry,) = map(
        json.loads, out.with_suffix(".skipped.jsonl").read_text().splitlines()
    )
    return entry["reason"], entry["detail"]


def said(*turns: str, **more: Any) -> dict[str, Any]:
    """A row in from/value style, beginning with the human."""
    named = [
        {"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)
    ]
    return {"conversations": named, **more}


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    """Roles and texts of a prompt of text alone."""
    return [
        (message["role"], message["content"][0]["text"]) for message in prompt.messages
    ]


def packed(folder: Path, name: str, rows: list[Any]) -> Path:
    """A file of rows in the form that its name tells."""
    path = folder / name
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = ".jsonl" in name
        path.write_text(
            "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1)
        )
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    path.write_bytes(packers.get(path.suffix, bytes)(path.read_bytes()))
    return path
