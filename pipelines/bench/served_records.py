"""The records of an evaluation of a server, files in `reports/served/`, and their figures.

The times are the client's, the counts of drafts the server's own. What a server does not report is None.

- `tau`: tokens per call of the target after the prefill, bonus counted, as in `statistics.py`. The calls are
  the server's drafts, and those without a draft that its tokens need besides;
- `accepted`: accepted draft tokens per draft, bonus not counted;
- `alpha[n]`: acceptance rate of the n-th drafted token, of the drafts that had all before it accepted;
- `speedup`: the baseline's over the server's seconds per token, of the same requests at the same concurrency;
- `decode_speedup`: the same after the first token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta

from vlmdistill.pipelines.bench.records import (
    AGAIN,
    Chains,
    Count,
    Decoding,
    Measurement,
    PromptResult,
)
from vlmdistill.pipelines.bench.statistics import Interval, Rate, alpha, figures
from vlmdistill.pipelines.streaming.pieces import Amount
from vlmdistill.pipelines.targets.software import Software
from vlmdistill.stores import input_files

FORMAT: Final = 1
SPEEDS: Final[tuple[Rate, ...]] = ("speedup", "decode_speedup")


@dataclass(frozen=True, kw_only=True)
class ServerCounts(Chains):
    """What a server counted during a run; a cycle of its chains is a draft."""

    generated: Count | None = None
    prompt_tokens: Count | None = None  # looked up in the prefix cache
    cached_tokens: Count | None = None  # found there
    images: Count | None = None  # looked up in the cache of images
    cached_images: Count | None = None  # found there
    drafts: Count | None = None
    accepted: Count | None = None


@dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """A response of a server, by the client's clock."""

    key: str  # of the prompt
    tokens: Count | None  # the EOS included
    seconds: Amount  # from sending the request to the end of the response
    first_seconds: Amount  # to the first text; to the end if there was no text
    finish: str
    response: str  # a hash of its text


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """A request that got no whole response.

    `reason` is a status or a kind of error, and none of the server's text, which may quote the prompt.
    """

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerRun:
    """All prompts sent to one server."""

    seconds: Amount  # while requests of this server ran
    requests: tuple[TimedRequest, ...]
    failed: tuple[FailedRequest, ...]
    counts: ServerCounts

    def __repr__(self) -> str:
        done, failed = len(self.requests), len(self.failed)
        return f"{done + failed} requests, {failed} failed, in {self.seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class ServedLoad:
    """A server, and its baseline, at one temperature and concurrency."""

    temperature: Amount
    concurrency: Annotated[int, Meta(ge=1)]
    server: ServerRun
    baseline: ServerRun | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class ServedEvaluation:
    """The evaluation of one server."""

    format: Literal[1]
    name: str
    url: str
    model: str  # as the server names it
    drafter: str | None  # as the server names it, if it does
    baseline: str | None  # a URL
    prompt_set: str  # a hash of the prompts' keys
    max_new_tokens: Count
    seed: Count
    measured: str  # date and time
    loads: Annotated[tuple[ServedLoad, ...], Meta(min_length=1)]
    software: Software | None = None  # of the client

    def __repr__(self) -> str:
        loads = [f"{one.temperature:g} x {one.concurrency}" for one in self.loads]
        return (
            f"{self.name}: server {self.url} evaluated at temperature x concurrency "
            f"{', '.join(loads) or 'none'}, {self.measured}"
        )

    @property
    def runs(self) -> list[ServerRun]:
        """The runs of the server and of its baseline."""
        return [
            run for load in self.loads for run in (load.server, load.baseline) if run
        ]

    @property
    def answered(self) -> bool:
        """Whether the server responded to any request."""
        return any(load.server.requests for load in self.loads)

    @property
    def failed(self) -> list[FailedRequest]:
        """The requests that failed, at any server."""
        return [one for run in self.runs for one in run.failed]


@dataclass(frozen=True)
class Quartiles:
    """Over the requests of a run."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The metrics of one run, see the top of the file."""

    requests: int
    failed: int
    seconds: float
    tokens: int | None
    tokens_per_second: float | None
    first_seconds: Quartiles | None
    seconds_per_token: Quartiles | None  # after the first token
    cached_prompts: float | None  # share of the prompt tokens that the prefix cache had
    cached_images: float | None  # share of the images that were encoded before
    drafts: int | None
    accepted_tokens: int | None
    tau: float | None
    accepted: float | None
    alpha: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """The metrics at one temperature and concurrency."""

    temperature: float
    concurrency: int
    server: RunFigures
    baseline: RunFigures | None
    identical: int | None  # responses equal to the baseline's, at temperature 0
    compared: int | None
    speedup: float | None
    decode_speedup: float | None
    intervals: dict[Rate, Interval] | None  # 95%, over prompts
    warnings: tuple[str, ...]


def read(file: Path) -> ServedEvaluation:
    """Read an evaluation of a server; DataError on an invalid file."""
    return input_files.read(file, ServedEvaluation, "an evaluation of a server", AGAIN)


def run_figures(run: ServerRun) -> RunFigures:
    """The metrics of a run."""
    counts, done = run.counts, run.requests
    known = [one.tokens for one in done if one.tokens is not None]
    tokens = sum(known) if done and len(known) == len(done) else None
    paces = [
        (one.seconds - one.first_seconds) / (one.tokens - 1)
        for one in done
        if one.tokens is not None and one.tokens > 1
    ]
    tau = None
    if (
        counts.drafts and tokens is not None and not run.failed
    ):  # else the two count different requests
        gained = tokens - len(done)
        undrafted = (
            0 if counts.accepted is None else gained - counts.accepted - counts.drafts
        )
        tau = gained / (counts.drafts + max(0, undrafted))
    return RunFigures(
        requests=len(done),
        failed=len(run.failed),
        seconds=run.seconds,
        tokens=tokens,
        tokens_per_second=_share(tokens, run.seconds),
        first_seconds=_quartiles([one.first_seconds for one in done]),
        seconds_per_token=_quartiles(paces),
        cached_prompts=_share(counts.cached_tokens, counts.prompt_tokens),
        cached_images=_share(counts.cached_images, counts.images),
        drafts=counts.drafts,
        accepted_tokens=counts.accepted,
        tau=tau,
        accepted=_share(counts.accepted, counts.drafts),
        alpha=alpha([counts]) or None,
    )


def load_figures(load: ServedLoad) -> LoadFigures:
    """The metrics of a server, compared with the baseline on the prompts that both responded to."""
    server, baseline = (
        run_figures(load.server),
        run_figures(load.baseline) if load.baseline else None,
    )
    theirs = {one.key: one for one in load.baseline.requests} if load.baseline else {}
    pairs = [
        (theirs[one.key], one) for one in load.server.requests if one.key in theirs
    ]
    greedy = bool(pairs) and load.temperature == 0
    timed = [
        PromptResult(key=one.key, dataset="", kind="text", plain=plain, drafted=drafted)
        for base, one in pairs
        if (plain := _decoding(base)) and (drafted := _decoding(one))
    ]
    rates = (
        figures(Measurement(temperature=load.temperature, prompts=tuple(timed)))
        if timed
        else None
    )
    intervals = (
        {name: found for name, found in rates.intervals.items() if name in SPEEDS}
        if rates
        else {}
    )
    return LoadFigures(
        temperature=load.temperature,
        concurrency=load.concurrency,
        server=server,
        baseline=baseline,
        identical=sum(base.response == one.response for base, one in pairs)
        if greedy
        else None,
        compared=len(pairs) if greedy else None,
        speedup=rates.speedup if rates else None,
        decode_speedup=(rates.decode_speedup or None)
        if rates
        else None,  # 0: nothing came after the first
        intervals=intervals or None,
        warnings=tuple(
            text
            for whose, run, found in (
                ("server", load.server, server),
                ("baseline", load.baseline, baseline),
            )
            if run and found
            for text in _warnings(
                f"the {whose} at concurrency {load.concurrency}", run, found
            )
        ),
    )


def _warnings(at: str, run: ServerRun, found: RunFigures) -> Iterator[str]:
    """What makes the numbers less than they seem; `at` says whose they are."""
    if run.failed and not run.requests:
        yield f"{at} failed all {len(run.failed)} requests: {run.failed[0].reason}"
    for share, what in (
        (found.cached_prompts, "prompt tokens"),
        (found.cached_images, "images"),
    ):
        if share:
            yield (
                f"{at} had {share:.0%} of the {what} in a cache: start it without caches to measure the "
                "first token (vLLM: --no-enable-prefix-caching --mm-processor-cache-gb 0)"
            )
    made = run.counts.generated
    if not run.failed and None not in (made, found.tokens) and made != found.tokens:
        yield (
            f"{at} counted {made} generated tokens, and the responses have {found.tokens}: the draft "
            "counters include other clients' requests"
        )


def _decoding(one: TimedRequest) -> Decoding | None:
    """A request in the terms of `statistics.py`, its calls unknown; None without a count of tokens."""
    if not one.tokens:
        return None
    first, rest = one.first_seconds, one.seconds - one.first_seconds
    return Decoding(
        tokens=one.tokens,
        calls=0,
        accepted=0,
        seconds=one.seconds,
        prefill_seconds=first,
        decode_seconds=rest,
    )


def _share(count: int | None, total: float | None) -> float | None:
    return count / total if count is not None and total else None


def _quartiles(values: Sequence[float]) -> Quartiles | None:
    return (
        Quartiles(*map(float, np.quantile(values, [0.25, 0.5, 0.75])))
        if values
        else None
    )
