"""`vlmdistill target`: the models that drafters are trained for."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console
from vlmdistill.stores.errors import TargetError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List the targets, look at one, build the demo's again.",
)


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that are known by name, and the families that a checkpoint may be of."""
    from vlmdistill.pipelines.targets.catalogue import FAMILIES
    from vlmdistill.pipelines.targets.survey import known

    targets = known()
    if as_json:
        console.result({"targets": targets, "families": sorted(FAMILIES)}, as_json)
        return
    states = {None: "not here", True: "here", False: "not whole"}
    lines = [
        (name, one["family"], _count(one["parameters"]), states[one["found"]], one["origin"])
        for name, one in targets.items()
    ]
    console.rows(("name", "family", "parameters", "weights", "checkpoint"), lines)
    console.note(f"or any checkpoint folder or hub id of these families: {', '.join(sorted(FAMILIES))}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A name, a hub id or a checkpoint folder.")],
    text_tokens: Annotated[int, typer.Option(min=1, help="Text tokens of the sample that is priced.")] = 1000,
    visual_tokens: Annotated[int, typer.Option(min=0, help="Its visual tokens.")] = 2500,
    images: Annotated[int, typer.Option(min=0, help="Its images.")] = 1,
    as_json: console.Json = False,
) -> None:
    """Show what a target is, where its weights are, and what a sample of it takes for each drafter.

    Needs no weights: the configurations of the known names are part of the package.
    """
    from vlmdistill.pipelines.targets.survey import survey

    told = survey(name, text_tokens, visual_tokens, images)
    if as_json:
        console.result(told, as_json)
        return
    target, parts, hashes = told["target"], told["parameters"], told["hashes"]
    facts = {
        "name": name,
        "checkpoint": told["origin"],
        "weights": f"{told['folder']}, {_size(told['weights_bytes'])}" if told["found"] else told["lacking"],
        "family": f"{target['family']} ({told['class']})",
        "parameters": f"{_count(parts['all'])}, of which vision {_count(parts['vision'])}",
        "text_model": f"{target['num_layers']} layers of width {target['hidden_size']}, MLP of "
        f"{target['intermediate_size']}, {target['num_heads']} heads of {target['head_dim']}, "
        f"{target['num_kv_heads']} for keys and values",
        "vocabulary": f"{target['vocab_size']}, {'one table' if told['tied'] else 'two tables'} of "
        f"{_size(told['head_bytes'])} in a store",
        "positions": f"{'M-RoPE' if told['rope_axes'] > 1 else 'RoPE'}, up to {target['max_position']}",
        "captured": told["captured"],
    }
    console.result({**facts, **({"hashes": hashes} if hashes else {})}, as_json)
    typer.echo(f"\na sample of {text_tokens} text and {visual_tokens} visual tokens, in bfloat16:")
    lines = [
        (
            drafter,
            *(_size(cost[part]) for part in ("bytes", "text_bytes", "visual_bytes")),
            _features(cost["features"]) or "nothing",
        )
        for drafter, cost in told["drafters"].items()
    ]
    console.rows(("drafter", "bytes", "text", "visual", "features"), lines)


@app.command("build-demo")
def build_demo(
    name: Annotated[str, typer.Argument(help="demo, or demo-video, which knows videos too.")] = "demo",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the checkpoint; default: the package's own, where it has none yet."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    as_json: console.Json = False,
) -> None:
    """Train an embedded target from scratch, and score it on held-out scenes and clips."""
    from vlmdistill.pipelines.demo import EMBEDDED, build

    if name not in EMBEDDED:
        raise TargetError(f"there is no embedded target '{name}': choose from {', '.join(EMBEDDED)}")
    folder = out or EMBEDDED[name]
    if out is None and (folder / "model.safetensors").exists():
        raise TargetError(f"{folder} holds the shipped weights, which a build may not equal: give --out DIR")
    with console.progress(f"training the target {name}", "steps") as report:
        scores = build.build(
            folder,
            seed=seed,
            recipe=build.RECIPES[name],
            progress=lambda stage, step, steps, loss: report(step, steps, f"{stage}, loss {loss:.3f}"),
        )
    console.result({"out": str(folder), **scores}, as_json)


def _features(names: list[str]) -> str:
    """Features by where they stand: `hidden.text, embed+hidden.visual`."""
    sources: dict[str, list[str]] = {"text": [], "visual": [], "span": []}
    for name in names:
        source, _, where = name.partition(".")
        sources[where].append(source)
    return ", ".join(f"{'+'.join(some)}.{where}" for where, some in sources.items() if some)


def _size(count: float) -> str:
    """Bytes in decimal units, as the store tells them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _count(parameters: float) -> str:
    for unit in ("", "k", "M"):
        if parameters < 1000:
            return f"{parameters:.3g}{unit}"
        parameters /= 1000
    return f"{parameters:.3g}B"
