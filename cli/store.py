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
    """Show the content, origin and size of a store, and the bytes that each drafter would read."""
    from vlmdistill.stores import summary
    from vlmdistill.stores.store import Store

    with console.progress("open", "shards") as report:
        opened = Store.open(store, report=report)
        facts = summary.info(opened, _needs(opened.info))
    if as_json:
        console.result(facts, True)
        return
    _print_store(facts)
    _print_features(facts)
    _print_datasets(facts)
    _print_drafters(facts)


def _print_store(facts: Mapping[str, Any]) -> None:
    origin = facts["provenance"]
    target = facts["target"]
    shadowed = facts["shadowed"]
    duplicates = f", and {shadowed} duplicates" if shadowed else ""
    views = []
    for name, kept in facts["views"].items():
        views.append(_view(name, kept, facts["views_there"][name]))
    console.result(
        {
            "store": facts["path"],
            "target": f"{origin['target']} ({target['family']}, width {target['hidden_size']})",
            "samples": f"{facts['samples']} in {facts['shards']} shards{duplicates}",
            "size": _sizes(facts),
            "dtype": origin["dtype"],
            "engine": origin["engine"],
            "sampling": origin["sampling"] or "not recorded",
            "views": views,
            "runs": facts["runs"],
        },
        False,
    )


def _sizes(facts: Mapping[str, Any]) -> str:
    """The size of a store, and of its features, index, head and records."""
    feature_bytes = sum(field["bytes"] for field in facts["fields"].values())
    sizes = {"features": feature_bytes}
    for kind in ("index", "head", "records"):
        sizes[kind] = facts[f"{kind}_bytes"]
    listed = [f"{kind} {console.size(size)}" for kind, size in sizes.items()]
    return f"{console.size(facts['bytes'])}: {', '.join(listed)}"


def _print_features(facts: Mapping[str, Any]) -> None:
    typer.echo()
    rows = []
    for name, field in facts["fields"].items():
        size = console.size(field["bytes"])
        encoding = field.get("encoding", "raw")
        rows.append((name, field["rows"], size, encoding, _error(field)))
    console.rows(("feature", "rows", "size", "encoding", "error"), rows)
    total = facts["samples"]
    for annex in facts["annexes"]:
        lacking = total - annex["samples"]
        if lacking > 0:
            features = ", ".join(annex["features"])
            console.note(f"{lacking} of {total} samples lack {features}")


def _print_datasets(facts: Mapping[str, Any]) -> None:
    typer.echo()
    rows = []
    for name, dataset in facts["datasets"].items():
        *counts, size = dataset.values()
        rows.append((name or "-", *counts, console.size(size)))
    console.rows(("dataset", "samples", "text", "visual", "response", "size"), rows)


def _print_drafters(facts: Mapping[str, Any]) -> None:
    if not facts.get("drafters"):
        return
    typer.echo()
    rows = []
    for name, cost in facts["drafters"].items():
        read = console.size(cost["bytes"])
        per_sample = console.size(cost["bytes_per_sample"])
        missing = ", ".join(cost["missing"]) or "none"
        rows.append((name, read, per_sample, missing))
    console.rows(("drafter", "reads", "per sample", "missing"), rows)


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
    if any(column["not_finite"] for column in columns.values()):
        shown.insert(1, "not_finite")
    rows = []
    for name, column in columns.items():
        values = ["-" if column[fact] is None else column[fact] for fact in shown]
        rows.append((name, *values, _plot(column["histogram"])))
    heads = [fact.replace("_", " ") for fact in shown]
    console.rows(("column", *heads, "distribution"), rows)


@app.command()
def verify(
    store: Path,
    as_json: console.Json = False,
) -> None:
    """Read the whole store and report damaged, missing and orphaned files. Fails on damage."""
    from vlmdistill.stores.integrity import verify as integrity

    with console.progress("verify", "bytes") as report:
        verified = integrity.verify(store, progress=report)
    kinds = Counter(finding.kind for finding in verified.findings)
    findings = [asdict(finding) for finding in verified.findings]
    facts = {"files": verified.files, "bytes": verified.bytes}
    if as_json:
        console.result({**facts, "counts": kinds, "findings": findings}, True)
    else:
        size = console.size(verified.bytes)
        console.result({**facts, "bytes": size, "findings": kinds}, False)
        if findings:
            rows = [tuple(finding.values()) for finding in findings[:LISTED]]
            console.rows(("kind", "file", "what"), rows)
        if len(findings) > LISTED:
            typer.echo(f"and {len(findings) - LISTED} more: --json lists all")
    if verified.damage:
        raise StoreError(_damage(verified))


def _damage(verified: "Verification") -> str:
    """The number of damaged files, the first of them, and how to repair them."""
    unreadable = sum(finding.kind == "unreadable" for finding in verified.damage)
    damaged = len(verified.damage) - unreadable
    counts = []
    if damaged:
        counts.append(f"{damaged} files are damaged or missing")
    if unreadable:
        counts.append(f"{unreadable} cannot be read")
    first = verified.damage[0].name
    return f"{' and '.join(counts)}, the first {first}. {_advice(verified)}"


def _advice(verified: "Verification") -> str:
    """How to repair all damage, each step once."""
    from vlmdistill.stores.manifest import ANNEXES, STORE

    advice = dict[str, str]()  # by the kind of damage
    for finding in verified.damage:
        folders = finding.name.split("/")
        annex = ""
        if folders[0] == ANNEXES and len(folders) > 2:
            annex = f"{folders[0]}/{folders[1]}/"
        name = finding.name[len(annex) :]
        folder = name.split("/")[0]
        if finding.kind == "unreadable":
            advice["unreadable"] = UNREADABLE
        elif finding.name in verified.copies:
            advice.setdefault("record", RESTORE_RECORD.format(annex, name))
        elif folder == ANNEXES or (annex and folder == STORE):
            advice[finding.name] = RECAPTURE.format(annex or finding.name)
        else:
            if folder == "commits":  # a record without a copy
                folder = "shards"
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
    if as_json:
        dropped = dict(view.dropped)
        facts = {"view": view.name, "rows": view.rows, "kept": view.kept}
        console.result({**facts, "dropped": dropped}, True)
    else:
        kept = f"{view.kept} of {view.rows}"
        console.result({"view": view.name, "kept": kept}, False)
        if view.dropped:
            rows = [(count, reason) for reason, count in view.dropped.items()]
            console.rows(("dropped", "reason"), rows)
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
    facts = {}
    for source, copied in zip(sources, reports, strict=True):
        facts[source] = asdict(copied)
    if as_json:
        console.result(facts, True)
        return
    counts = ("copied", "present", "duplicates")
    rows = []
    for source, copied_facts in facts.items():
        values = [copied_facts[count] for count in counts]
        rows.append((source, *values, len(copied_facts["conflicts"])))
    console.rows(("store", *counts, "conflicts"), rows)
    for source, copied_facts in facts.items():
        for kind in ("conflicts", "replaced", "left"):
            if copied_facts[kind]:
                console.echo(f"{kind} of {source}: {_some(copied_facts[kind])}")
        annexes = copied_facts["annexes"]
        if annexes:
            console.echo(
                f"samples of {source} that got features of an annex: {_listed(annexes)}"
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
    from vlmdistill.stores.sharing.retention import expire, require_past, time_of
    from vlmdistill.stores.store import Store

    opened = Store.open(store)
    facts = dict[str, object]()
    removed = list[Removed]()
    if older_than is not None:
        age = seconds(older_than, "--older-than")
        now = time_of(opened)
        expired = expire(opened, now - age, dry_run=dry_run)
        removed += [Removed(name, size) for name, size in expired.removed.items()]
        facts = {"samples": len(expired.keys), "untimed": expired.untimed}
        require_past(opened, now)
    removed += collect(opened, grace=grace, dry_run=dry_run)
    total = sum(item.bytes for item in removed)
    if as_json:
        items = [asdict(item) for item in removed]
        console.result(
            {"removed": items, "bytes": total, "dry_run": dry_run, **facts}, True
        )
        return
    for item in removed:
        console.echo(item.name)
    action = "would remove" if dry_run else "removed"
    console.result({action: f"{len(removed)}, {console.size(total)}", **facts}, False)


def _send(
    source: str, target: str, view: str | None, features: str | None, as_json: bool
) -> None:
    from vlmdistill.stores.schema import Feature
    from vlmdistill.stores.sharing.merge import send

    chosen = None
    if features is not None:
        chosen = [Feature.parse(name.strip()) for name in features.split(",")]
    with console.progress("copy", "samples") as report:
        copied = send(source, target, view=view, features=chosen, progress=report)
    facts = asdict(copied)
    if not as_json:
        for kind in ("conflicts", "replaced", "left"):
            facts[kind] = _some(facts[kind])
        facts["annexes"] = _listed(facts["annexes"])
    console.result(facts, as_json)


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "none"


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    listed = ", ".join(names[:LISTED]) or "none"
    if len(names) > LISTED:
        return f"{listed} and {len(names) - LISTED} more: --json lists all"
    return listed


def _needs(info: "TargetInfo") -> "Mapping[str, frozenset[Feature]]":
    """The features that each trained drafter reads, with the settings of its paper."""
    from vlmdistill.drafters import catalogue

    names = [name for name in catalogue.NAMES if catalogue.is_trained(name)]
    return {name: catalogue.config(name).model.needs(info) for name in names}


def _view(name: str, kept: int | None, present: int | None) -> str:
    """The samples of a view, and how many of them are still in the store if some are not."""
    if kept is None:
        return f"{name} unreadable"
    if present != kept:
        return f"{name} {kept} ({present} present)"
    return f"{name} {kept}"


def _error(feature: Mapping[str, Any]) -> str:
    return f"{feature['relative_error']:.2%}" if "relative_error" in feature else "none"


def _plot(histogram: Mapping[str, Any] | None) -> str:
    """A histogram as a row of bars; a bin that is not empty has at least the lowest bar."""
    counts = histogram["counts"] if histogram else ()
    largest = max(counts, default=0)
    steps = len(BARS) - 1
    return "".join(BARS[-(-count * steps // largest)] for count in counts)
