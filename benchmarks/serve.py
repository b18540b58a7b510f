"""What a drafter gains in vLLM over the same vLLM without it, beside what its engine allows.

    python -m benchmarks.serve --runs runs --model demo [DRAFTER ...] [--concurrency 1 4 16 64]

It measures as `vlmdistill eval --engine vllm`: a server with the drafter and one without, in alternation by
blocks of prompts, temperature 0. The last server drafts with vLLM's own EAGLE-3 head, of the target's width
and with random weights: a cycle of it is what the engine needs for a draft and its verification. The floor of
a drafter is its `tau` over that cycle, in tokens of the plain server. It needs `make engine`, and a quiet
machine.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.serving import Exportable
from vlmdistill.pipelines.bench.plan import held_out
from vlmdistill.pipelines.bench.served import (
    ServerOptions,
    evaluate_drafters,
    evaluate_server,
)
from vlmdistill.pipelines.bench.served_records import (
    LoadFigures,
    Quartiles,
    ServedEvaluation,
    load_figures,
)
from vlmdistill.pipelines.bench.settings import Settings
from vlmdistill.pipelines.targets.checkpoints.folder import resolve
from vlmdistill.pipelines.vllm.launch import vllm_server
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.schema import TargetInfo

HEAD = "vllm-head"
HEADER = (
    "| drafter | requests at a time | token, ms | plain | first token, ms | plain "
    "| accepted per draft | tau | equal | decoding | floor | whole requests |\n|"
    + "---|"
    * 12
)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A drafter at one concurrency; milliseconds are medians over requests."""

    drafter: str
    concurrency: int
    token: float
    plain_token: float
    first: float
    plain_first: float
    accepted: float | None
    tau: float | None
    identical: int
    compared: int
    decode_speedup: float
    floor: float | None
    """Of `decode_speedup`; None: the head's cycle is not known."""
    speedup: float

    def row(self) -> str:
        """A row of the table."""
        cells = [
            self.drafter,
            f"{self.concurrency}",
            f"{self.token:.1f}",
            f"{self.plain_token:.1f}",
            f"{self.first:.0f}",
            f"{self.plain_first:.0f}",
            _shown(self.accepted),
            _shown(self.tau),
            f"{self.identical} of {self.compared}",
            _shown(self.decode_speedup),
            _shown(self.floor),
            _shown(self.speedup),
        ]
        return f"| {' | '.join(cells)} |"


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


def gains(
    evaluations: Sequence[ServedEvaluation], head: ServedEvaluation | None
) -> Iterator[Gain]:
    """Each drafter at each concurrency; the floor by the cycles of `head`."""
    cycles = dict[int, float]()
    for figures in map(load_figures, head.loads if head else ()):
        cycles[figures.concurrency] = _cycle(figures)
    for evaluation in evaluations:
        for figures in map(load_figures, evaluation.loads):
            yield _gain(evaluation.name, figures, cycles)


def _cycle(figures: LoadFigures) -> float:
    """Milliseconds of a draft and its verification."""
    assert figures.server.tau is not None
    return _ms(figures.server.seconds_per_token) * figures.server.tau


def _gain(name: str, figures: LoadFigures, cycles: Mapping[int, float]) -> Gain:
    server = figures.server
    plain = figures.baseline
    assert plain is not None
    plain_token = _ms(plain.seconds_per_token)
    cycle = cycles.get(figures.concurrency)
    floor = None
    if cycle is not None and server.tau is not None:
        floor = server.tau * plain_token / cycle
    return Gain(
        drafter=name,
        concurrency=figures.concurrency,
        token=_ms(server.seconds_per_token),
        plain_token=plain_token,
        first=_ms(server.first_seconds),
        plain_first=_ms(plain.first_seconds),
        accepted=server.accepted,
        tau=server.tau,
        identical=figures.identical or 0,
        compared=figures.compared or 0,
        decode_speedup=figures.decode_speedup or 0.0,
        floor=floor,
        speedup=figures.speedup or 0.0,
    )


def _ms(seconds: Quartiles | None) -> float:
    """The median in milliseconds."""
    assert seconds is not None, "no request was answered with more than a token"
    return 1000 * seconds.median


def random_head(trained: Path, out: Path, tokens: int, dtype: str) -> Exported:
    """vLLM's EAGLE-3 for the target of a trained drafter, with random weights and nothing of ours."""
    info = TargetInfo.from_dict(describe(trained)["target"])
    kind = catalogue.trained("eagle3")
    tables_VD = torch.zeros(info.vocab_size, info.hidden_size)
    drafter = kind(kind.Config(), info, Head(tables_VD, tables_VD))
    assert isinstance(drafter, Exportable)
    served = drafter.published()
    weights = {}
    for name, weight in served.weights.items():
        like = getattr(torch, dtype) if weight.is_floating_point() else weight.dtype
        weights[name] = weight.detach().to(like, copy=True)
    shutil.rmtree(out, ignore_errors=True)
    checkpoint.put(out, {**served.settings, "torch_dtype": dtype}, weights)
    return Exported(
        drafter=HEAD,
        target="",
        out=str(out),
        dtype=dtype,
        parameters=sum(weight.numel() for weight in weights.values()),
        draft_vocabulary=info.vocab_size,
        target_vocabulary=info.vocab_size,
        layers=served.layers,
        engines=("vllm",),
        plugin=False,
        method=served.method,
        drops_visual=False,
        whole_images=False,
        draft_tokens=tokens,
    )


def measure_head(
    workspace: Workspace, trained: Path, tokens: int, settings: Settings
) -> ServedEvaluation:
    """A server whose drafts are of no use, for the time that they take."""
    folder = workspace.root / "served"
    dtype = str(settings.how["dtype"])
    exported = random_head(trained, folder / "head", tokens, dtype)
    with vllm_server(
        resolve(workspace.model),
        workspace.model,
        dtype,
        folder / "head.log",
        exported,
        whole_images=False,
    ) as url:
        options = ServerOptions(url=url, name=HEAD, served_model=workspace.model)
        return evaluate_server(workspace, options, settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write all of it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("drafters", nargs="*", default=["wren", "sparrow"])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        help="at most the number of prompts",
    )
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--without-head", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/bench-serve.json"))
    given = parser.parse_args(arguments)
    workspace = Workspace.of(given.model, given.runs)
    prompts = len(held_out(workspace.prompts, given.limit, given.model))
    at_most = {min(concurrency, prompts) for concurrency in given.concurrency}
    settings = Settings(
        limit=given.limit,
        max_new_tokens=given.max_new_tokens,
        concurrencies=tuple(sorted(at_most)),
        how={"dtype": given.dtype},
    )
    drafters = [Trained.open(workspace, name) for name in given.drafters]
    outcome = evaluate_drafters(workspace, drafters, settings)
    head = None
    if outcome.evaluations and not given.without_head:
        head = measure_head(workspace, drafters[0].folder, 4, settings)
    rows = list(gains(outcome.evaluations, head))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    sys.stdout.write("\n".join([HEADER, *(row.row() for row in rows)]) + "\n")
    for name, error in outcome.failed.items():
        sys.stderr.write(f"{name}: {error}\n")
    unequal = [row for row in rows if row.identical < row.compared]
    for row in unequal:
        sys.stderr.write(f"{row.drafter}: responses differ at {row.concurrency}\n")
    return 1 if outcome.failed or unequal else 0


if __name__ == "__main__":
    raise SystemExit(main())
