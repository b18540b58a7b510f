"""`vlmdistill store`: inspect, check, filter and share feature stores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console
from vlmdistill.stores.errors import StoreError

if TYPE_CHECKING:
    from vlmdistill.stores.integrity.verify import Verification
    from vlmdistill.stores.schema import Feature, TargetInfo

app = typer.Typer(
    help="Inspect, check, filter and share feature stores.", no_args_is_help=True
)

BARS = " ▁▂▃▄▅▆▇█"
LISTED = 20  # names to print; the rest is counted
RESTORE_RECORD = (
    "Copy each such record back from ledger/, such as {0}{1} from {0}ledger/{1}."
)
UNREADABLE = (
    "Check the permissions, the disk and the connection, and run `store verify` again."
)
RECAPTURE = (
    "Remove {0}, and run the `vlmdistill features` again that added its features."
)
RESTORE = "Copy store.json and heads/ from another copy of the store."
REMEDIES = {  # folder -> how to repair damage in it
    "shards": "To replace a damaged shard, remove its record from ledger/commits/, then from commits/, "
    "and run the command that made it again: `vlmdistill features` or `store pull`.",
    "views": "To replace a damaged view, remove its .json from ledger/views/, then from views/, and run "
    "`store filter` again.",
    "stats": "To drop the statistics of a run, remove its .json from ledger/stats/, then from stats/.",
    "cache": "Remove cache/; it is rebuilt when needed.",
    "ledger": "Remove the damaged files in ledger/, and run `store gc` to write them again.",
}
Path = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="A folder, or a URL such as s3://bucket/store."
    ),
]
ViewOption = Annotated[
    str | None, typer.Option("--view", help="Only the samples of this view.")
]
FeaturesOption = Annotated[
    str | None,
    typer.Option(
        "--features",
        metavar="NAMES",
        help="Only these features, such as hidden.text,embed.span.",
    ),
]


@app.command()
def info(store: Path, as_json: console.Json = False) -> None:
    """Show what a store holds, where it comes from, its size, and what each drafter would read."""
    from vlmdistill.stores import summary
    from vlmdistill.stores.store import Store

    with console.progress("open", "shards") as report:
        opened = Store.open(store, report=report)
        facts = summary.info(opened, _needs(opened.info))
    if as_json:
        console.result(facts, True)
        return
    origin, target = facts["provenance"], facts["target"]
    more = f", and {facts['shadowed']} duplicates" if facts["shadowed"] else ""
    sizes = {"features": sum(one["bytes"] for one in facts["fields"].values())}
    sizes |= {of: facts[f"{of}_bytes"] for of in ("index", "head", "records")}
    parts = [f"{of} {console.size(size)}" for of, size in sizes.items()]
    console.result(
        {
            "store": facts["path"],
            "target": f"{origin['target']} ({target['family']}, width {target['hidden_size']})",
            "samples": f"{facts['samples']} in {facts['shards']} shards{more}",
            "size": f"{console.size(facts['bytes'])}: {', '.join(parts)}",
            "dtype": origin["dtype"],
            "engine": origin["engine"],
            "sampling": origin["sampling"] or "not recorded",
            "views": [
                _view(name, kept, facts["views_there"][name])
                for name, kept in facts["views"].items()
            ],
            "runs": facts["runs"],
        },
        False,
    )
    typer.echo()
    features = [
        (name, f["rows"], console.size(f["bytes"]), f.get("encoding", "raw"), _error(f))
        for name, f in facts["fields"].items()
    ]
    console.rows(("feature", "rows", "size", "encoding", "error"), features)
    for annex in facts["annexes"]:
        if annex["samples"] < facts["samples"]:
            lacking, total = facts["samples"] - annex["samples"], facts["samples"]
            console.note(
                f"{lacking} of {total} samples lack {', '.join(annex['features'])}"
            )
    typer.echo()
    datasets = [
        (name or "-", *list(d.values())[:-1], console.size(d["bytes"]))
        for name, d in facts["datasets"].items()
    ]
    console.rows(("dataset", "samples", "text", "visual", "response", "size"), datasets)
    if facts.get("drafters"):
        typer.echo()
        size = console.size
        drafters = [
            (
                name,
                size(d["bytes"]),
                size(d["bytes_per_sample"]),
                ", ".join(d["missing"]) or "none",
            )
            for name, d in facts["drafters"].items()
        ]
        console.rows(("drafter", "reads", "per sample", "missing"), drafters)


@app.command()
def stats(store: Path, view: ViewOption = None, as_json: console.Json = False) -> None:
    """Show the distribution of each column of the index: lengths, text and training statistics."""
    from vlmdistill.stores import summary
    from vlmdistill.stores.store import Store

    with console.progress("open", "shards") as report:
        columns = summary.stats(Store.open(store, report=report), view)
    if as_json:
        console.result(columns, True)
        return
    shown = ["count", "mean", "min", "p50", "p90", "max"]
    if any(c["not_finite"] for c in columns.values()):
        shown.insert(1, "not_finite")
    lines = [
        (
            name,
            *("-" if c[what] is None else c[what] for what in shown),
            _plot(c["histogram"]),
        )
        for name, c in columns.items()
    ]
    console.rows(
        ("column", *(what.replace("_", " ") for what in shown), "distribution"), lines
    )


@app.command()
def verify(
    store: Path,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Shards to read at once; default: one per core, up to 4, and 16 of a URL.",
        ),
    ] = None,
    as_json: console.Json = False,
) -> None:
    """Read the whole store and report damaged, missing and orphaned files. Fails on damage."""
    from vlmdistill.stores.integrity import verify as integrity

    with console.progress("verify", "bytes") as report:
        found = integrity.verify(store, threads=at_once, progress=report)
    kinds = Counter(finding.kind for finding in found.findings)
    listed = [asdict(finding) for finding in found.findings]
    if as_json:
        console.result(
            {
                "files": found.files,
                "bytes": found.bytes,
                "counts": kinds,
                "findings": listed,
            },
            True,
        )
    else:
        console.result(
            {
                "files": found.files,
                "bytes": console.size(found.bytes),
                "findings": kinds,
            },
            False,
        )
        if listed:
            console.rows(
                ("kind", "file", "what"), [tuple(f.values()) for f in listed[:LISTED]]
            )
        if len(listed) > LISTED:
            typer.echo(f"and {len(listed) - LISTED} more: --json lists all")
    if found.damage:
        hidden = sum(finding.kind == "unreadable" for finding in found.damage)
        counts = (
            (len(found.damage) - hidden, "files are damaged or missing"),
            (hidden, "cannot be read"),
        )
        what = " and ".join(f"{count} {how}" for count, how in counts if count)
        raise StoreError(f"{what}, the first {found.damage[0].name}. {_advice(found)}")


def _advice(found: "Verification") -> str:
    """How to repair all damage, each step once."""
    from vlmdistill.stores.manifest import ANNEXES, STORE

    advice = dict[str, str]()
    for finding in found.damage:
        parts = finding.name.split("/")
        annex = (
            f"{parts[0]}/{parts[1]}/" if parts[0] == ANNEXES and len(parts) > 2 else ""
        )
        folder = parts[2] if annex else parts[0]
        if finding.kind == "unreadable":
            advice["unreadable"] = UNREADABLE
        elif finding.name in found.copies:
            advice.setdefault(
                "record", RESTORE_RECORD.format(annex, finding.name[len(annex) :])
            )
        elif folder == ANNEXES or (annex and folder == STORE):
            advice[finding.name] = RECAPTURE.format(annex or finding.name)
        else:
            folder = (
                "shards" if folder == "commits" else folder
            )  # or its record, which has no copy
            advice[folder] = REMEDIES.get(folder, RESTORE)
    return " ".join(dict.fromkeys(advice.values()))


@app.command("filter")
def filter_(
    store: Path,
    name: Annotated[str, typer.Option("--name", help="Name of the new view.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="EXPRESSION",
            help="Keep the samples for which this holds, such as 'words > 5 and code_ratio < 0.05', or "
            "'\"sparrow.kept\" > 0.2' for a statistic of a training run; may be repeated.",
        ),
    ] = None,
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="NAME[=VALUE]",
            help="A named filter: min_words[=6], max_code[=0.05], max_repetition[=0.3], max_tokens[=2048], "
            "unique, mix=llava:0.5,sharegpt:0.5; may be repeated.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--from", help="Start from this view, not from all samples."),
    ] = None,
    as_json: console.Json = False,
) -> None:
    """Make a view of the samples that pass all filters and expressions. No tensor is copied or removed."""
    from vlmdistill.stores.store import Store
    from vlmdistill.stores.views.filters import filter_store

    with console.progress("open", "shards") as report:
        opened = Store.open(store, report=report)
        view = filter_store(
            opened, name, expressions=where or (), filters=named or (), base=base
        )
    facts = {
        "view": view.name,
        "rows": view.rows,
        "kept": view.kept,
        "dropped": dict(view.dropped),
    }
    if as_json:
        console.result(facts, True)
    else:
        console.result(
            {"view": view.name, "kept": f"{view.kept} of {view.rows}"}, False
        )
        if view.dropped:
            console.rows(
                ("dropped", "reason"),
                [(count, reason) for reason, count in view.dropped.items()],
            )
    if not view.kept:
        console.note(f"warning: the view {view.name} keeps none of {view.rows} samples")


@app.command()
def merge(
    target: Annotated[
        str,
        typer.Argument(metavar="INTO", help="Store to merge into; created if missing."),
    ],
    sources: Annotated[
        list[str], typer.Argument(metavar="STORE", help="Stores to copy samples from.")
    ],
    as_json: console.Json = False,
) -> None:
    """Copy the samples of stores of the same target into one store. Samples that exist are not copied."""
    from vlmdistill.stores.sharing.merge import merge as merge_stores

    sources = list(dict.fromkeys(sources))
    with console.progress("merge", "samples") as report:
        reports = merge_stores(target, sources, progress=report)
    facts = {source: asdict(one) for source, one in zip(sources, reports, strict=True)}
    if as_json:
        console.result(facts, True)
        return
    counts = ("copied", "present", "duplicates")
    lines = [
        (source, *map(one.get, counts), len(one["conflicts"]))
        for source, one in facts.items()
    ]
    console.rows(("store", *counts, "conflicts"), lines)
    for source, one in facts.items():
        for what in ("conflicts", "replaced", "left"):
            if one[what]:
                console.echo(f"{what} of {source}: {_some(one[what])}")
        if one["annexes"]:
            console.echo(
                f"samples of {source} that got features of an annex: {_listed(one['annexes'])}"
            )


@app.command()
def push(
    store: Path,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Destination: a folder, or a URL: s3://, gs:// or az://.",
        ),
    ],
    view: ViewOption = None,
    features: FeaturesOption = None,
    as_json: console.Json = False,
) -> None:
    """Copy missing samples to URL; shards copied whole are checked on arrival. Run again to continue."""
    _send(store, url, view, features, as_json)


@app.command()
def pull(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Source: a folder, or a URL: s3://, gs://, az:// or http(s)://.",
        ),
    ],
    store: Path,
    view: ViewOption = None,
    features: FeaturesOption = None,
    as_json: console.Json = False,
) -> None:
    """Copy missing samples from URL and check them on arrival. Run again to continue."""
    _send(url, store, view, features, as_json)


@app.command()
def gc(
    store: Path,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            help="Keep files that were written in the last SECONDS.",
            metavar="SECONDS",
        ),
    ] = 24 * 3600,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also delete samples that were asked longer ago, such as 30d; those without a time stay. "
            "`vlmdistill forget` deletes their prompts, responses and media, too.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files, but remove nothing.")
    ] = False,
    as_json: console.Json = False,
) -> None:
    """Remove files that no record refers to, as killed writers leave them; never those of a live writer."""
    from vlmdistill.stores.integrity.gc import Removed, collect
    from vlmdistill.stores.schema import seconds
    from vlmdistill.stores.sharing.retention import expire, time_of
    from vlmdistill.stores.store import Store

    opened, facts = Store.open(store), dict[str, object]()
    removed = list[Removed]()
    if older_than is not None:
        age = seconds(older_than, "--older-than")
        expired = expire(opened, time_of(opened) - age, dry_run=dry_run)
        removed += [Removed(*one) for one in expired.removed.items()]
        facts = {"samples": len(expired.keys), "untimed": expired.untimed}
    removed += collect(opened, grace=grace, dry_run=dry_run)
    total = sum(item.bytes for item in removed)
    if as_json:
        names = [asdict(item) for item in removed]
        console.result(
            {"removed": names, "bytes": total, "dry_run": dry_run, **facts}, True
        )
        return
    for item in removed:
        console.echo(item.name)
    done = "would remove" if dry_run else "removed"
    console.result({done: f"{len(removed)}, {console.size(total)}", **facts}, False)


def _send(
    source: str, target: str, view: str | None, features: str | None, as_json: bool
) -> None:
    from vlmdistill.stores.schema import Feature
    from vlmdistill.stores.sharing.merge import send

    chosen = (
        [Feature.parse(name.strip()) for name in features.split(",")]
        if features is not None
        else None
    )
    with console.progress("copy", "samples") as report:
        copied = send(source, target, view=view, features=chosen, progress=report)
    facts = asdict(copied)
    named = {what: _some(facts[what]) for what in ("conflicts", "replaced", "left")}
    named["annexes"] = _listed(facts["annexes"])
    console.result(facts if as_json else {**facts, **named}, as_json)


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "none"


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = (
        f" and {len(names) - LISTED} more: --json lists all"
        if len(names) > LISTED
        else ""
    )
    return (", ".join(names[:LISTED]) or "none") + more


def _needs(info: "TargetInfo") -> "Mapping[str, frozenset[Feature]]":
    """The features that each trained drafter reads, with the settings of its paper."""
    from vlmdistill.drafters import catalogue

    names = [name for name in catalogue.NAMES if catalogue.is_trained(name)]
    return {name: catalogue.config(name).model.needs(info) for name in names}


def _view(name: str, kept: int | None, present: int | None) -> str:
    """The samples of a view, and how many of them are still in the store if some are not."""
    if kept is None:
        return f"{name} unreadable"
    return f"{name} {kept}" + (f" ({present} present)" if present != kept else "")


def _error(feature: Mapping[str, Any]) -> str:
    return f"{feature['relative_error']:.2%}" if "relative_error" in feature else "none"


def _plot(histogram: Mapping[str, Any] | None) -> str:
    counts = histogram["counts"] if histogram else ()
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)
