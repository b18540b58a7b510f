"""`vlmdistill target`: the target models."""

from typing import Annotated

import typer

from vlmdistill.cli import console

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List or describe target models."
)


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that have a name, and the supported model families."""
    from vlmdistill.pipelines.targets.checkpoints.folder import known
    from vlmdistill.pipelines.targets.families import FAMILIES, SHOWN

    targets = known()
    if as_json:
        console.result(
            {"targets": targets, "families": sorted((*FAMILIES, *SHOWN))}, as_json
        )
        return
    states = {None: "not here", True: "here", False: "incomplete"}
    lines = [
        (
            name,
            one["family"],
            _parameters(one["parameters"]),
            states[one["found"]],
            one["origin"],
        )
        for name, one in targets.items()
    ]
    console.rows(("name", "family", "parameters", "weights", "checkpoint"), lines)
    shown = ", ".join(sorted((*FAMILIES, *SHOWN)))
    console.remark(
        f"or a checkpoint folder or hub id of these families: {shown}; or of any other vision-language model "
        "of transformers that passes `vlmdistill target check`"
    )


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(help="A name, a hub id or a checkpoint folder.")
    ],
    text_tokens: Annotated[
        int, typer.Option(min=1, help="Text tokens of the sample whose size is shown.")
    ] = 1000,
    visual_tokens: Annotated[
        int, typer.Option(min=0, help="Visual tokens of that sample.")
    ] = 2500,
    image_count: Annotated[int, typer.Option(min=0, help="Images of that sample.")] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Say which stages fit on so many GPUs, in bfloat16."),
    ] = None,
    gpu_memory: Annotated[
        int, typer.Option(min=1, help="GiB of memory that each of them has free.")
    ] = 76,
    as_json: console.Json = False,
) -> None:
    """Describe a target, find its weights, and show the size of one sample for each drafter.

    Needs no weights: the configurations of the named targets are part of the package.
    """
    from vlmdistill.pipelines.targets.checkpoints.folder import locate

    locate(name)  # before torch
    from vlmdistill.pipelines.targets.describe import describe

    facts = describe(name, text_tokens, visual_tokens, image_count)
    needs = {}
    if gpus is not None:
        from vlmdistill.pipelines.planning import forecast, resources

        needs = forecast.fits(name, gpus, gpu_memory << 30)
        facts["fits"] = {
            stage: {**resources.facts(one), "fits": not one.lacking}
            for stage, one in needs.items()
        }
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
        f"{console.size(facts['head_bytes'])} in a store of bfloat16, "
        f"{console.size(2 * facts['head_bytes'])} of float32, the dtype on a CPU",
        "positions": f"{'M-RoPE' if facts['rope_axes'] > 1 else 'RoPE'}, up to {target['max_position']}",
        "captured": facts["captured"],
    }
    console.result({**lines, **({"hashes": hashes} if hashes else {})}, as_json)
    console.echo(
        f"\nsize of a sample of {text_tokens} text and {visual_tokens} visual tokens, in bfloat16:"
    )
    table = [
        (
            drafter,
            *(
                console.size(cost[part])
                for part in ("bytes", "text_bytes", "visual_bytes")
            ),
            _features(cost["features"]) or "nothing",
        )
        for drafter, cost in facts["drafters"].items()
    ]
    console.rows(("drafter", "bytes", "text", "visual", "features"), table)
    if needs:
        console.echo(
            f"\nmemory of a process in bfloat16, with {gpus} x {gpu_memory} GiB free:"
        )
        stages = [
            (stage, console.size(one.total), one.verdict)
            for stage, one in needs.items()
        ]
        console.rows(("stage", "bytes", "here"), stages)


@app.command("check")
def check(
    name: Annotated[
        str, typer.Argument(help="A name, a hub id or a checkpoint folder.")
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    attention: console.Attention = "sdpa",
    target_dtype: console.TargetDtype = "auto",
    as_json: console.Json = False,
) -> None:
    """Prove that what is known or found of a target's family is true of the model itself.

    Template, ids, spans, states, logits, a response and drafts are compared with the stock model of
    transformers. The first comparison that fails ends the check with exit code 1: the target is not supported
    as it is. Takes seconds on a GPU and minutes on a CPU.
    """
    from vlmdistill.pipelines.targets.loading import load
    from vlmdistill.pipelines.targets.stock import check as checking
    from vlmdistill.stores.errors import TargetError

    target = load(
        name, device=device, dtype=target_dtype, attention=attention, proven=True
    )
    lines: list[checking.Comparison] = []
    for line in checking.lines(target):
        lines.append(line)
        if not as_json:
            console.echo(
                f"{'FAILED' if line.failed else 'ok':7} {line.name:10} {line.failed or line.what}"
            )
    if as_json:
        console.result(
            {"checks": [{"name": one.name, "failed": one.failed} for one in lines]},
            as_json,
        )
    if lines[-1].failed:
        raise TargetError(
            f"{name} is not supported as it is: {lines[-1].name}: {lines[-1].failed}"
        )
    console.remark(
        f"{name} passes: {type(target).__name__}, family {target.family.name}"
    )


def _features(names: list[str]) -> str:
    """Features by position: `hidden.text, embed+hidden.visual`."""
    sources: dict[str, list[str]] = {"text": [], "visual": [], "span": []}
    for name in names:
        source, _, where = name.partition(".")
        sources[where].append(source)
    return ", ".join(
        f"{'+'.join(some)}.{where}" for where, some in sources.items() if some
    )


def _parameters(count: float) -> str:
    return console.scaled(count, ("", "k", "M", "B"), "")
