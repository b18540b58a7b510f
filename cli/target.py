"""`vlmdistill target`: the target models."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdistill.cli import console

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.describe import FeatureCost, TargetDescription
    from vlmdistill.stores.schema import TargetInfo

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List or describe target models."
)

STATES = {None: "not here", True: "here", False: "incomplete"}  # of a target's weights


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that have a name, and the supported model families."""
    from dataclasses import asdict

    from vlmdistill.pipelines.targets.checkpoints.folder import named_targets
    from vlmdistill.pipelines.targets.families import FAMILIES, SHOWN

    targets = named_targets()
    families = sorted((*FAMILIES, *SHOWN))
    if as_json:
        records = {name: asdict(target) for name, target in targets.items()}
        console.result({"targets": records, "families": families}, as_json)
        return
    lines = []
    for name, target in targets.items():
        parameters = _parameters(target.parameters)
        state = STATES[target.found]
        lines.append((name, target.family, parameters, state, target.origin))
    console.rows(("name", "family", "parameters", "weights", "checkpoint"), lines)
    console.remark(
        f"or a checkpoint folder or hub id of these families: {', '.join(families)}; "
        "or of any other vision-language model of transformers that passes "
        "`vlmdistill target check`"
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
    as_json: console.Json = False,
) -> None:
    """Describe a target, find its weights, and show the size of one sample for each drafter.

    Needs no weights: the configurations of the named targets are part of the package.
    """
    from vlmdistill.pipelines.targets.checkpoints.folder import locate

    locate(name)  # before torch
    from vlmdistill.pipelines.targets.describe import describe

    description = describe(name, text_tokens, visual_tokens, image_count)
    if as_json:
        console.result(description.to_dict(), as_json)
        return
    console.result(_overview(description), as_json)
    console.echo(
        f"\nsize of a sample of {text_tokens} text and {visual_tokens} visual tokens, "
        "in bfloat16:"
    )
    costs = [_cost_row(*item) for item in description.drafters.items()]
    console.rows(("drafter", "bytes", "text", "visual", "features"), costs)


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
    """Self-test a target: compare it with the stock model of transformers.

    It compares template, ids, spans, states, logits, a response and drafts. The first difference ends the
    check with exit code 1: the target is not supported as it is. Takes seconds on a GPU and minutes on a CPU.
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
            state = "FAILED" if line.failed else "ok"
            detail = line.failed or line.what
            console.echo(f"{state:7} {line.name:10} {detail}")
    if as_json:
        checks = [{"name": line.name, "failed": line.failed} for line in lines]
        console.result({"checks": checks}, as_json)
    last = lines[-1]
    if last.failed:
        raise TargetError(
            f"{name} is not supported as it is: {last.name}: {last.failed}"
        )
    console.remark(
        f"{name} passes: {type(target).__name__}, family {target.family.name}"
    )


def _overview(description: "TargetDescription") -> dict[str, Any]:
    """The lines of `target show` above its tables."""
    target = description.target
    counts = description.parameters
    vision = _parameters(counts.vision)
    rope = "M-RoPE" if description.rope_axes > 1 else "RoPE"
    lines: dict[str, Any] = {
        "name": description.name,
        "checkpoint": description.origin,
        "weights": _weights(description),
        "family": f"{target.family} ({description.model_class})",
        "parameters": f"{_parameters(counts.all)}, of which vision {vision}",
        "text_model": _text_model(target),
        "vocabulary": _vocabulary(description),
        "positions": f"{rope}, up to {target.max_position}",
        "captured": description.captured,
    }
    if description.hashes:
        lines["hashes"] = description.hashes
    return lines


def _weights(description: "TargetDescription") -> str:
    """Where the weights are, or why there are none."""
    if description.weights_bytes is None:
        return description.lacking
    return f"{description.folder}, {console.size(description.weights_bytes)}"


def _text_model(target: "TargetInfo") -> str:
    parts = (
        f"{target.num_layers} layers of width {target.hidden_size}",
        f"MLP of {target.intermediate_size}",
        f"{target.num_heads} heads of {target.head_dim}",
        f"{target.num_kv_heads} for keys and values",
    )
    return ", ".join(parts)


def _vocabulary(description: "TargetDescription") -> str:
    """The size of the vocabulary, and of its frozen tables in a store."""
    size = console.size(description.head_bytes)
    float32_size = console.size(2 * description.head_bytes)
    tables = "one table" if description.tied else "two tables"
    return (
        f"{description.target.vocab_size}, {tables} of {size} in a store of bfloat16, "
        f"{float32_size} of float32, the dtype on a CPU"
    )


def _cost_row(drafter: str, cost: "FeatureCost") -> tuple[str, ...]:
    sizes = (cost.bytes, cost.text_bytes, cost.visual_bytes)
    features = _features(cost.features) or "nothing"
    return (drafter, *map(console.size, sizes), features)


def _features(names: list[str]) -> str:
    """Features by position: `hidden.text, embed+hidden.visual`."""
    sources: dict[str, list[str]] = {"text": [], "visual": [], "span": []}
    for name in names:
        source, _, where = name.partition(".")
        sources[where].append(source)
    groups = []
    for where, group in sources.items():
        if group:
            groups.append(f"{'+'.join(group)}.{where}")
    return ", ".join(groups)


def _parameters(count: float) -> str:
    return console.scaled(count, ("", "k", "M", "B"), "")
