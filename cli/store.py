"""`vlmdistill store`: look into a feature store, check it, cut views, share it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console
from vlmdistill.stores.errors import StoreError

if TYPE_CHECKING:
    from vlmdistill.stores.schema import Feature, TargetInfo

app = typer.Typer(
    help="Look into a feature store, check it, cut views of it, share it.", no_args_is_help=True
)

BARS = " ▁▂▃▄▅▆▇█"
LISTED = 20  # findings shown before the rest is only counted
UNIT = (
    "To make a unit anew, remove its record from commits/ and run what made it again, `vlmdistill features` "
    "or `store pull`."
)
ELSEWHERE = "Bring store.json and heads/ back from another copy of the store."
REMEDIES = {  # what to do about damage in a folder
    "shards": UNIT,
    "commits": UNIT,
    "views": "Remove the .json of a view from views/ and make it again with `store filter`.",
    "stats": "Remove the .json of a run from stats/: its statistics are lost, until it is trained again.",
    "cache": "Remove cache/: it is made again by itself.",
}
Path = Annotated[str, typer.Argument(metavar="STORE", help="A folder, or a URL such as s3://bucket/store.")]
View = Annotated[str | None, typer.Option("--view", help="Only the samples of this view.")]
Fields = Annotated[
    str | None, typer.Option("--fields", help="Only these features, such as hidden.text,embed.span.")
]


@app.command()
def info(store: Path, as_json: console.Json = False) -> None:
    """What is in it, from what, how big; what each drafter would read of it."""
    from vlmdistill.stores import summary
    from vlmdistill.stores.store import Store

    opened = Store.open(store)
    told = summary.info(opened, _needs(opened.info))
    if as_json:
        console.result(told, True)
        return
    origin, target = told["provenance"], told["target"]
    more = f", and {told['shadowed']} more of the same keys" if told["shadowed"] else ""
    sizes = {"fields": sum(field["bytes"] for field in told["fields"].values())}
    sizes |= {of: told[f"{of}_bytes"] for of in ("index", "head", "records")}
    parts = [f"{of} {_size(size)}" for of, size in sizes.items()]
    console.result(
        {
            "store": told["path"],
            "target": f"{origin['target']} ({target['family']}, width {target['hidden_size']})",
            "samples": f"{told['samples']} in {told['units']} units{more}",
            "size": f"{_size(told['bytes'])}: {', '.join(parts)}",
            "dtype": origin["dtype"],
            "sampling": origin["sampling"] or "not told",
            "views": [_view(name, kept, told["views_there"][name]) for name, kept in told["views"].items()],
            "runs": told["runs"],
        },
        False,
    )
    typer.echo()
    fields = [
        (name, f["rows"], _size(f["bytes"]), f.get("encoding", "raw"), _error(f))
        for name, f in told["fields"].items()
    ]
    console.rows(("field", "rows", "size", "encoding", "error"), fields)
    typer.echo()
    datasets = [
        (name or "-", *list(d.values())[:-1], _size(d["bytes"])) for name, d in told["datasets"].items()
    ]
    console.rows(("dataset", "samples", "text", "visual", "response", "size"), datasets)
    if told.get("drafters"):
        typer.echo()
        drafters = [
            (name, _size(d["bytes"]), _size(d["bytes_per_sample"]), ", ".join(d["missing"]) or "none")
            for name, d in told["drafters"].items()
        ]
        console.rows(("drafter", "reads", "per sample", "missing"), drafters)


@app.command()
def stats(store: Path, view: View = None, as_json: console.Json = False) -> None:
    """How lengths, measures and training statistics are distributed, with small plots."""
    from vlmdistill.stores import summary
    from vlmdistill.stores.store import Store

    told = summary.stats(Store.open(store), view)
    if as_json:
        console.result(told, True)
        return
    shown = ["count", "mean", "min", "p50", "p90", "max"]
    if any(c["not_finite"] for c in told.values()):
        shown.insert(1, "not_finite")
    lines = [
        (name, *("-" if c[what] is None else c[what] for what in shown), _plot(c["histogram"]))
        for name, c in told.items()
    ]
    console.rows(("column", *(what.replace("_", " ") for what in shown), "distribution"), lines)


@app.command()
def verify(
    store: Path,
    threads: Annotated[int | None, typer.Option(min=1, help="Files read at once; default: up to 4.")] = None,
    as_json: console.Json = False,
) -> None:
    """Read everything once: finds every flipped byte, missing file and orphan. Fails on damage."""
    from vlmdistill.stores import verify as checking

    with console.progress("verify", "bytes") as report:
        found = checking.verify(store, threads=threads, progress=report)
    kinds: dict[str, int] = {}
    for finding in found.findings:
        kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
    listed = [{"kind": f.kind, "name": f.name, "detail": f.detail} for f in found.findings]
    if as_json:
        console.result(
            {"files": found.files, "bytes": found.bytes, "counts": kinds, "findings": listed}, True
        )
    else:
        console.result({"files": found.files, "bytes": _size(found.bytes), "findings": kinds}, False)
        if listed:
            console.rows(("kind", "file", "what"), [tuple(f.values()) for f in listed[:LISTED]])
        if len(listed) > LISTED:
            typer.echo(f"and {len(listed) - LISTED} more: --json lists all")
    if found.damage:
        first = found.damage[0]
        kinds_of = dict.fromkeys(finding.name.split("/")[0] for finding in found.damage)
        advice = dict.fromkeys(REMEDIES.get(kind, ELSEWHERE) for kind in kinds_of)
        raise StoreError(
            f"{len(found.damage)} files are damaged or missing, the first {first.name}. {' '.join(advice)}"
        )


@app.command("filter")
def filter_(
    store: Path,
    name: Annotated[str, typer.Option("--name", help="Name of the view to make.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            help="Keep samples for which this holds: 'words > 5 and code_ratio < 0.05', or of one training "
            "run '\"sparrow.kept\" > 0.2'; may be repeated.",
        ),
    ] = None,
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help="min_words[=6], max_code[=0.05], max_repetition[=0.3], max_tokens[=2048], unique, "
            "mix=llava:0.5,sharegpt:0.5; may be repeated.",
        ),
    ] = None,
    base: Annotated[str | None, typer.Option("--from", help="Start from this view.")] = None,
    as_json: console.Json = False,
) -> None:
    """Make a view: the samples that pass named filters, then expressions over the index."""
    from vlmdistill.stores.filters import filter_store
    from vlmdistill.stores.store import Store

    view = filter_store(Store.open(store), name, expressions=where or (), filters=named or (), base=base)
    facts = {"view": view.name, "rows": view.rows, "kept": view.kept, "dropped": dict(view.dropped)}
    if as_json:
        console.result(facts, True)
        return
    console.result({"view": view.name, "kept": f"{view.kept} of {view.rows}"}, False)
    if view.dropped:
        console.rows(("dropped", "reason"), [(count, reason) for reason, count in view.dropped.items()])


@app.command()
def merge(
    target: Annotated[str, typer.Argument(metavar="INTO", help="Store to merge into; made if missing.")],
    sources: Annotated[list[str], typer.Argument(metavar="STORE", help="Stores to take samples from.")],
    as_json: console.Json = False,
) -> None:
    """Bring stores of the same target together; what is there already is not copied again."""
    from vlmdistill.stores import share

    sources = list(dict.fromkeys(sources))
    with console.progress("merge", "samples") as report:
        told = share.merge(target, sources, progress=report)
    facts = {source: asdict(one) for source, one in zip(sources, told, strict=True)}
    if as_json:
        console.result(facts, True)
        return
    counts = ("copied", "present", "twins")
    lines = [(source, *map(one.get, counts), len(one["conflicts"])) for source, one in facts.items()]
    console.rows(("store", *counts, "conflicts"), lines)
    for source, one in facts.items():
        for what in ("conflicts", "replaced", "left"):
            if one[what]:
                typer.echo(f"{what} of {source}: {_some(one[what])}")


@app.command()
def push(
    store: Path,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: a folder or any fsspec URL.")],
    view: View = None,
    fields: Fields = None,
    as_json: console.Json = False,
) -> None:
    """Copy what is missing to another place, checked on arrival; run again to continue."""
    _send(store, url, view, fields, as_json)


@app.command()
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where from: a folder or any fsspec URL.")],
    store: Path,
    view: View = None,
    fields: Fields = None,
    as_json: console.Json = False,
) -> None:
    """Copy what is missing from another place, checked on arrival; run again to continue."""
    _send(url, store, view, fields, as_json)


@app.command()
def gc(
    store: Path,
    grace: Annotated[
        float, typer.Option(min=0, help="Leave what was written to in the last SECONDS.", metavar="SECONDS")
    ] = 3600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
    as_json: console.Json = False,
) -> None:
    """Remove what killed writers left and nothing refers to; never a living writer's work."""
    from vlmdistill.stores.collect import collect
    from vlmdistill.stores.store import Store

    removed = collect(Store.open(store), grace=grace, dry_run=dry_run)
    total = sum(item.bytes for item in removed)
    if as_json:
        names = [{"name": item.name, "bytes": item.bytes} for item in removed]
        console.result({"removed": names, "bytes": total, "dry_run": dry_run}, True)
        return
    for item in removed:
        typer.echo(item.name)
    console.result({"would remove" if dry_run else "removed": f"{len(removed)}, {_size(total)}"}, False)


def _send(source: str, target: str, view: str | None, fields: str | None, as_json: bool) -> None:
    from vlmdistill.stores import share
    from vlmdistill.stores.schema import Feature

    given = None if fields is None else [Feature.parse(name.strip()) for name in fields.split(",")]
    with console.progress("copy", "samples") as report:
        told = share.send(source, target, view=view, features=given, progress=report)
    facts = asdict(told)
    named = {what: _some(facts[what]) for what in ("conflicts", "replaced", "left")}
    console.result(facts if as_json else {**facts, **named}, as_json)


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - LISTED} more: --json lists all" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "none") + more


def _needs(info: "TargetInfo") -> "Mapping[str, frozenset[Feature]]":
    """What each drafter that is trained reads for it, as the paper has it."""
    from vlmdistill.drafters import catalogue

    names = [name for name in catalogue.NAMES if catalogue.is_trained(name)]
    return {name: catalogue.trained(name).needs(catalogue.config(name), info) for name in names}


def _view(name: str, kept: int | None, there: int | None) -> str:
    """How many samples a view keeps, and how many of them are there when some are not."""
    if kept is None:
        return f"{name} unreadable"
    return f"{name} {kept}" + (f" ({there} still there)" if there != kept else "")


def _error(field: Mapping[str, Any]) -> str:
    return f"{field['relative_error']:.2%}" if "relative_error" in field else "none"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _plot(histogram: Mapping[str, Any] | None) -> str:
    counts = histogram["counts"] if histogram else ()
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)
