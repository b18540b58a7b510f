"""`vlmdistill target`: the models that drafters are trained for."""

from pathlib import Path
from typing import Annotated

import typer

from vlmdistill.cli import console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List the targets, look at one, build the demo's again.",
)


@app.command("list")
def list_targets(as_json: console.Json = False) -> None:
    """List the targets that are known by name, and the families that a checkpoint may be of."""
    from vlmdistill.pipelines.targets.catalogue import FAMILIES, HUB

    if as_json:
        console.result({"targets": {"demo": "embedded", **HUB}, "families": sorted(FAMILIES)}, as_json)
        return
    console.rows(("name", "checkpoint"), [("demo", "embedded in this package"), *HUB.items()])
    console.note(f"or any checkpoint folder or hub id of these families: {', '.join(sorted(FAMILIES))}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A name, a hub id or a checkpoint folder.")],
    as_json: console.Json = False,
) -> None:
    """Show where a target is and what it is, without loading its weights."""
    import transformers

    from vlmdistill.pipelines.targets.fingerprint import fingerprint
    from vlmdistill.pipelines.targets.folder import resolve, weight_files

    folder = resolve(name)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    weights = sum(path.stat().st_size for path in weight_files(folder))
    hashes = vars(fingerprint(folder, None))
    facts = {
        "name": name,
        "folder": str(folder),
        "family": config.model_type,
        "weights": f"{weights / 2**20:.1f} MiB",
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "heads": text.num_attention_heads,
        "kv_heads": text.num_key_value_heads,
        "vocabulary": text.vocab_size,
        "max_position": text.max_position_embeddings,
        "hashes": {field: hashes[field] for field in ("config", "weights", "processor")},
    }
    console.result(facts, as_json)


@app.command("build-demo")
def build_demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint; default: the package's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    as_json: console.Json = False,
) -> None:
    """Train the embedded demo target from scratch, and score it on held-out scenes."""
    from vlmdistill.pipelines.demo import build

    folder = out or build.CHECKPOINT
    with console.progress("training the demo target", "steps") as report:
        scores = build.build(
            folder,
            seed=seed,
            progress=lambda stage, step, steps, loss: report(step, steps, f"{stage}, loss {loss:.3f}"),
        )
    console.result({"out": str(folder), **scores}, as_json)
