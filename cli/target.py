"""`vlmdistill target`: the target models."""

from typing import Annotated

import typer

from vlmdistill.cli import console

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List or describe target models.")


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that have a name, and the supported model families."""
    from vlmdistill.pipelines.targets.checkpoints.folder import known
    from vlmdistill.pipelines.targets.families import FAMILIES

    targets = known()
    if as_json:
        console.result({"targets": targets, "families": sorted(FAMILIES)}, as_json)
        return
    states = {None: "not here", True: "here", False: "incomplete"}
    lines = [
        (name, one["family"], _parameters(one["parameters"]), states[one["found"]], one["origin"])
        for name, one in targets.items()
    ]
    console.rows(("name", "family", "parameters", "weights", "checkpoint"), lines)
    console.remark(f"or a checkpoint folder or hub id of these families: {', '.join(sorted(FAMILIES))}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A name, a hub id or a checkpoint folder.")],
    text_tokens: Annotated[
        int, typer.Option(min=1, help="Text tokens of the sample whose size is shown.")
    ] = 1000,
    visual_tokens: Annotated[int, typer.Option(min=0, help="Visual tokens of that sample.")] = 2500,
    image_count: Annotated[int, typer.Option(min=0, help="Images of that sample.")] = 1,
    as_json: console.Json = False,
) -> None:
    """Describe a target, find its weights, and show the size of one sample for each drafter.

    Needs no weights: the configurations of the named targets are part of the package.
    """
    from vlmdistill.pipelines.targets.checkpoints.folder import locate

    locate(name)  # before torch
    from vlmdistill.pipelines.targets.describe import describe

    facts = describe(name, text_tokens, visual_tokens, image_count)
    if as_json:
        console.result(facts, as_json)
        return
    target, parts, hashes = facts["target"], facts["parameters"], facts["hashes"]
    lines = {
        "name": name,
        "checkpoint": facts["origin"],
        "weights": f"{facts['folder']}, {console.size(facts['weights_bytes'])}"
        if facts["found"]
        else facts["lacking"],
        "family": f"{target['family']} ({facts['class']})",
        "parameters": f"{_parameters(parts['all'])}, of which vision {_parameters(parts['vision'])}",
        "text_model": f"{target['num_layers']} layers of width {target['hidden_size']}, MLP of "
        f"{target['intermediate_size']}, {target['num_heads']} heads of {target['head_dim']}, "
        f"{target['num_kv_heads']} for keys and values",
        "vocabulary": f"{target['vocab_size']}, {'one table' if facts['tied'] else 'two tables'} of "
        f"{console.size(facts['head_bytes'])} in a store",
        "positions": f"{'M-RoPE' if facts['rope_axes'] > 1 else 'RoPE'}, up to {target['max_position']}",
        "captured": facts["captured"],
    }
    console.result({**lines, **({"hashes": hashes} if hashes else {})}, as_json)
    console.echo(f"\nsize of a sample of {text_tokens} text and {visual_tokens} visual tokens, in bfloat16:")
    table = [
        (
            drafter,
            *(console.size(cost[part]) for part in ("bytes", "text_bytes", "visual_bytes")),
            _features(cost["features"]) or "nothing",
        )
        for drafter, cost in facts["drafters"].items()
    ]
    console.rows(("drafter", "bytes", "text", "visual", "features"), table)


def _features(names: list[str]) -> str:
    """Features by position: `hidden.text, embed+hidden.visual`."""
    sources: dict[str, list[str]] = {"text": [], "visual": [], "span": []}
    for name in names:
        source, _, where = name.partition(".")
        sources[where].append(source)
    return ", ".join(f"{'+'.join(some)}.{where}" for where, some in sources.items() if some)


def _parameters(count: float) -> str:
    return console.scaled(count, ("", "k", "M", "B"), "")
