"""`vlmdistill explain`: whether a drafter is good, and what would make it better."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdistill.cli import console, hints

if TYPE_CHECKING:
    from vlmdistill.pipelines.planning.explain import Explanation, Reference


def explain(
    drafter: Annotated[str, typer.Argument(help="Name of a trained drafter.")],
    model: console.Model = "demo",
    runs: console.Runs = None,
    as_json: console.Json = False,
) -> None:
    """Say whether a drafter is good, what stands out, and the command that helps.

    Compares its acceptance by drafted token and kind of prompt, its samples, template and tree with what
    methods reached on the target demo-small, and its speed with other drafters of the workspace. Nothing is
    loaded or decoded.
    """
    from vlmdistill.pipelines.planning.explain import explain as explained

    workspace = console.workspace(model, runs)
    explanation = explained(workspace, drafter)
    if as_json:
        console.result(asdict(explanation), as_json)
        return
    console.result(_numbers(explanation), as_json=False)
    console.echo("")
    for symptom in explanation.symptoms:
        console.echo(f"{symptom.text}: {hints.completed(symptom.command)}")
    if not explanation.symptoms:
        console.echo("nothing stands out")


def _numbers(explanation: "Explanation") -> dict[str, str]:
    """The numbers of the drafter."""
    numbers = {"drafter": f"{explanation.drafter} ({explanation.method})"}
    if explanation.tau is not None:
        numbers["tau"] = f"{explanation.tau:.2f}"
    if explanation.speedup is not None:
        numbers["tau"] += f", speedup {explanation.speedup:.2f}"
    by_token = _rates(explanation.acceptance)
    if by_token:
        numbers["acceptance"] = f"{by_token} by drafted token"
    kinds = explanation.acceptance_by_kind.items()
    if kinds:
        texts = [f"{kind} {rate:.2f}" for kind, rate in kinds]
        numbers["first_token"] = ", ".join(texts)
    if explanation.reference is not None:
        numbers["beside_demo-small"] = _verdict(explanation.reference)
    # The hop n drafts the token n + 1: of the hops, those that were evaluated compare.
    hops = len(explanation.acceptance) or None
    agreement = _rates(explanation.held_out_agreement[:hops])
    if agreement:
        numbers["held_out_agreement"] = f"{agreement} by hop"
    numbers["trained_on"] = (
        f"{explanation.samples} samples, {explanation.passes:.1f} passes"
    )
    return numbers


def _verdict(reference: "Reference") -> str:
    """How good a drafter is beside its method on `demo-small`."""
    method = reference.method or "the least method with a layer"
    length = len(reference.acceptance)
    return (
        f"{reference.verdict}: {reference.own_tau:.2f} tokens a cycle by these acceptances; {method} reached "
        f"{reference.tau:.2f} there ({_rates(reference.acceptance)}), by a chain of {length}"
    )


def _rates(rates: Iterable[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
