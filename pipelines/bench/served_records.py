"""The records of an evaluation of a server, files in `reports/served/`, and their figures.

The times are the client's, the counts of drafts the server's own. What a server does not report is None.

- `tau`: tokens per call of the target after the prefill, bonus counted, as in `statistics.py`. The calls are
  the server's drafts, and those without a draft that its tokens need besides;
- `accepted`: accepted draft tokens per draft, bonus not counted;
- `alpha[n]`: acceptance rate of the n-th drafted token, of the drafts that had all before it accepted;
- `speedup`: the baseline's over the server's seconds per token, of the same requests at the same concurrency;
- `decode_speedup`: the same after the first token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta

from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.records import Chains, Count, DecodingCounts, Leak
from vlmdistill.pipelines.bench.statistics import (
    CHEAP,
    Interval,
    Rate,
    alpha,
    differ_beyond_rounding,
    is_often_below,
    rates_with_intervals,
)
from vlmdistill.pipelines.streaming.pieces import Amount
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.software import Software

SPEEDS: Final[tuple[Rate, ...]] = ("speedup", "decode_speedup")
FILLED: Final = 0.9
"""Share of a run's seconds that its requests take, sent one after the other,"""
BETWEEN: Final = 0.1  # besides these seconds between two of them
ROUNDED: Final = 1.001
OPENING: Final = 32
"""Characters at the start of a response: few enough that rounding, which in half precision changes most long
responses, seldom changes them."""


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
    tokens: Count | None  # the EOS included; None: the server does not tell
    seconds: Amount  # from sending the request to the end of the response
    first_seconds: Amount  # to the first text; to the end if there was no text
    finish: str
    response: str  # a hash of its text
    opening: str = ""  # likewise of its first `OPENING` characters; empty: not known


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
    dtype: str = ""  # in which the target is computed; empty: the server does not tell
    greedy: tuple[TimedRequest, ...] = ()
    """Of a run above temperature 0: responses to the first prompts at temperature 0."""

    def __repr__(self) -> str:
        failed = len(self.failed)
        sent = len(self.requests) + failed
        return f"{sent} requests, {failed} failed, in {self.seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class ServedLoad:
    """A server, and its baseline, at one temperature and concurrency."""

    temperature: Amount
    concurrency: Annotated[int, Meta(ge=1)]
    server: ServerRun
    baseline: ServerRun | None  # None: measured without one


@dataclass(frozen=True, kw_only=True, repr=False)
class ServedEvaluation:
    """The record of the evaluation of one server."""

    format: Literal[3]
    name: str
    url: str
    model: str  # as the server names it
    drafter: str | None  # as the server names it, if it does
    baseline: str | None  # a URL
    prompt_set: str  # a hash of the prompts' keys
    max_new_tokens: Count
    seed: Count | None
    measured: str  # date and time
    software: Software  # of the client
    loads: Annotated[tuple[ServedLoad, ...], Meta(min_length=1)]
    weights: str | None = None  # SHA-256 of the drafter's; None: not known
    leak: Leak | None = None  # None: it is not known what the drafter was trained on
    thinking: Thinking = ""  # empty: as the server has it

    def __repr__(self) -> str:
        loads = [f"{load.temperature:g} x {load.concurrency}" for load in self.loads]
        return (
            f"{self.name}: server {self.url} evaluated at temperature x concurrency "
            f"{', '.join(loads) or 'none'}, {self.measured}"
        )

    @property
    def keys(self) -> list[str]:
        """The keys of the prompts that the server was sent."""
        return _keys(self.loads[0].server)

    @property
    def runs(self) -> list[ServerRun]:
        """The runs of the server and of its baseline."""
        runs = []
        for load in self.loads:
            runs.append(load.server)
            if load.baseline:
                runs.append(load.baseline)
        return runs

    @property
    def answered(self) -> bool:
        """Whether the server responded to any request."""
        return any(load.server.requests for load in self.loads)

    @property
    def failed(self) -> list[FailedRequest]:
        """The requests that failed, at any server."""
        return [request for run in self.runs for request in run.failed]


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
    doubts: tuple[str, ...]
    """Reasons to doubt the speedup, which no table shows then; part of the warnings."""
    warnings: tuple[str, ...]


def read(file: Path) -> ServedEvaluation:
    """Read an evaluation of a server; DataError on an invalid file, or of another format."""
    return records.read_as(ServedEvaluation, file, "an evaluation of a server")


def run_figures(run: ServerRun) -> RunFigures:
    """The metrics of a run."""
    counts, requests = run.counts, run.requests
    tokens = _tokens(requests)
    return RunFigures(
        requests=len(requests),
        failed=len(run.failed),
        seconds=run.seconds,
        tokens=tokens,
        tokens_per_second=_share(tokens, run.seconds),
        first_seconds=_quartiles([request.first_seconds for request in requests]),
        seconds_per_token=_quartiles(_paces(requests)),
        cached_prompts=_share(counts.cached_tokens, counts.prompt_tokens),
        cached_images=_share(counts.cached_images, counts.images),
        drafts=counts.drafts,
        accepted_tokens=counts.accepted,
        tau=_tau(run, tokens),
        accepted=_share(counts.accepted, counts.drafts),
        alpha=alpha([counts]) or None,
    )


def _tokens(requests: Sequence[TimedRequest]) -> int | None:
    """The tokens of all responses; None unless the server reports those of each response."""
    counted = [request.tokens for request in requests if request.tokens is not None]
    if not requests or len(counted) < len(requests):
        return None
    return sum(counted)


def _paces(requests: Sequence[TimedRequest]) -> list[float]:
    """Seconds per token after the first, of each response that has such tokens."""
    paces = []
    for request in requests:
        if request.tokens is not None and request.tokens > 1:
            seconds = request.seconds - request.first_seconds
            paces.append(seconds / (request.tokens - 1))
    return paces


def _tau(run: ServerRun, tokens: int | None) -> float | None:
    """None with failed requests, too: server and client then count different ones."""
    drafts, accepted = run.counts.drafts, run.counts.accepted
    if not drafts or tokens is None or run.failed:
        return None
    gained = tokens - len(run.requests)
    undrafted = 0 if accepted is None else gained - accepted - drafts
    return gained / (drafts + max(0, undrafted))


@dataclass(frozen=True)
class _Pair:
    """The responses of both servers to a prompt, as `statistics.Pair`."""

    plain: DecodingCounts
    drafted: DecodingCounts
    kind: str = "any"  # the record does not tell


def load_figures(load: ServedLoad) -> LoadFigures:
    """The metrics of a server, compared with the baseline on the prompts that both responded to."""
    server = run_figures(load.server)
    baseline = run_figures(load.baseline) if load.baseline else None
    compared = _compared(load, lambda run: run.requests)
    greedy = compared
    if load.temperature:
        greedy = _compared(load, lambda run: run.greedy)
    identical = sum(plain.response == own.response for plain, own in compared)
    is_greedy = bool(compared) and load.temperature == 0
    pairs = []
    for plain_request, request in compared:
        plain, drafted = _counts(plain_request), _counts(request)
        if plain and drafted:
            pairs.append(_Pair(plain, drafted))
    rates, intervals = rates_with_intervals(pairs) if pairs else ({}, {})
    speed_intervals = {rate: intervals[rate] for rate in SPEEDS if rate in intervals}
    doubts = [*_other_prompts(load), *_other_counts(load, compared)]
    of_target = [*_other_target(load, greedy)]
    doubts += [*_drafting_baseline(load), *of_target]
    warnings = [] if of_target else [*_other_responses(load, greedy)]
    warnings += _faster_first_text(load, compared)
    for whose, run, rated in (
        ("server", load.server, server),
        ("baseline", load.baseline, baseline),
    ):
        if run and rated:
            where = f"the {whose} at concurrency {load.concurrency}"
            doubts += _odd_times(where, load.concurrency, run)
            warnings += _warnings(where, run, rated)
    return LoadFigures(
        temperature=load.temperature,
        concurrency=load.concurrency,
        server=server,
        baseline=baseline,
        identical=identical if is_greedy else None,
        compared=len(compared) if is_greedy else None,
        speedup=rates.get("speedup"),
        # 0: nothing came after the first token.
        decode_speedup=rates.get("decode_speedup") or None,
        intervals=speed_intervals or None,
        doubts=tuple(doubts),
        warnings=(*doubts, *warnings),
    )


def _drafting_baseline(load: ServedLoad) -> Iterator[str]:
    """A baseline with a drafter of its own."""
    drafts = load.baseline.counts.drafts if load.baseline else None
    if drafts:
        yield (
            f"the baseline at concurrency {load.concurrency} drafts, too ({drafts} drafts), so that "
            "the speedup is not over plain decoding: start it without a drafter"
        )


def _compared(
    load: ServedLoad, requests_of: Callable[[ServerRun], Iterable[TimedRequest]]
) -> list[tuple[TimedRequest, TimedRequest]]:
    """These requests of the baseline and of the server for the same prompts."""
    baseline_requests = requests_of(load.baseline) if load.baseline else ()
    request_of = {request.key: request for request in baseline_requests}
    return [
        (request_of[request.key], request)
        for request in requests_of(load.server)
        if request.key in request_of
    ]


def _warnings(where: str, run: ServerRun, rated: RunFigures) -> list[str]:
    """Reasons to read the numbers of a server with care."""
    warnings = []
    if run.failed and not run.requests:
        reason = run.failed[0].reason
        warnings.append(f"{where} failed all {len(run.failed)} requests: {reason}")
    warnings += _cache_warnings(where, rated)
    warnings += _impossible_counts(where, run, rated)
    generated = run.counts.generated
    counts_known = generated is not None and rated.tokens is not None
    if counts_known and not run.failed and generated != rated.tokens:
        warnings.append(
            f"{where} counted {generated} generated tokens, and the responses have {rated.tokens}: the draft "
            "counters include other clients' requests"
        )
    return warnings


def _other_prompts(load: ServedLoad) -> Iterator[str]:
    """Prompts that one server alone was sent, or twice: a speedup is then of chosen ones."""
    if load.baseline is None:
        return
    keys = sorted(_keys(load.server))
    baseline_keys = sorted(_keys(load.baseline))
    if keys != baseline_keys or len({*keys}) < len(keys):
        yield (
            f"at temperature {load.temperature:g} and concurrency {load.concurrency}, the server has "
            f"{len(keys)} requests and the baseline {len(baseline_keys)}, not each prompt once for both: a "
            "speedup of chosen prompts says little"
        )


def _keys(run: ServerRun) -> list[str]:
    """The prompts of all requests, those that failed included."""
    answered = [request.key for request in run.requests]
    return answered + [request.key for request in run.failed]


def _other_counts(
    load: ServedLoad, compared: Sequence[tuple[TimedRequest, TimedRequest]]
) -> Iterator[str]:
    """Equal responses of both servers have other numbers of tokens."""
    differing = [
        plain
        for plain, own in compared
        if plain.response == own.response and plain.tokens != own.tokens
    ]
    if differing:
        yield (
            f"at temperature {load.temperature:g} and concurrency {load.concurrency}, {len(differing)} "
            "responses with the baseline's text have other numbers of tokens: a server does not count them "
            "right, and no speed per token compares"
        )


def _other_target(
    load: ServedLoad, greedy: Sequence[tuple[TimedRequest, TimedRequest]]
) -> Iterator[str]:
    """The baseline has another target, or another dtype: greedy responses differ by more than rounding."""
    if load.baseline is None:
        return
    dtypes = load.server.dtype, load.baseline.dtype
    where = f"temperature {load.temperature:g} and concurrency {load.concurrency}"
    if all(dtypes) and dtypes[0] != dtypes[1]:
        yield (
            f"at {where}, the server computes in {dtypes[0]}, and the baseline in {dtypes[1]}, so that the "
            "speedup is not its drafter's alone"
        )
        return
    is_exact = dtypes == ("float32", "float32")
    pairs = [(plain.response, own.response) for plain, own in greedy]
    compared = ""
    if not is_exact:
        openings = [(plain.opening, own.opening) for plain, own in greedy]
        pairs = [pair for pair in openings if all(pair)]
        compared = f" in their first {OPENING} characters"
    different = sum(plain != own for plain, own in pairs)
    if differ_beyond_rounding(different, len(pairs), is_exact=is_exact):
        yield (
            f"at {where}, {different} of {len(pairs)} greedy responses differ from the "
            f"baseline's{compared}, more than by rounding: the baseline has another target, or the server is "
            "not lossless"
        )


def _other_responses(
    load: ServedLoad, greedy: Sequence[tuple[TimedRequest, TimedRequest]]
) -> Iterator[str]:
    """Greedy responses of both servers differ, perhaps by rounding."""
    different = sum(plain.response != own.response for plain, own in greedy)
    if different:
        yield (
            f"at temperature {load.temperature:g} and concurrency {load.concurrency}, {different} of "
            f"{len(greedy)} greedy responses differ from the baseline's: by near-ties, or it is not lossless"
        )


def _faster_first_text(
    load: ServedLoad, compared: Sequence[tuple[TimedRequest, TimedRequest]]
) -> Iterator[str]:
    """The server's first text comes sooner than the baseline's, which has no more to do before it.

    Requests at a time wait for each other, so that there it may.
    """
    if load.concurrency > 1:
        return
    ratio_P = np.array(
        [
            own.first_seconds / plain.first_seconds
            for plain, own in compared
            if plain.first_seconds
        ]
    )
    share = CHEAP[0]
    if is_often_below(ratio_P, share, is_shared=False):
        yield (
            f"at temperature {load.temperature:g}, on {(ratio_P < share).sum()} of {len(ratio_P)} prompts, "
            f"the first text comes in less than {share:.0%} of the baseline's time: unless the first tokens "
            "have no text, the baseline is slower by more than its missing drafter"
        )


def _odd_times(where: str, concurrency: int, run: ServerRun) -> Iterator[str]:
    """Requests that do not fill the seconds of the run, which are of another clock."""
    spent = sum(request.seconds for request in run.requests)
    first = max((each.first_seconds - each.seconds for each in run.requests), default=0)
    least = 0.0
    if concurrency == 1 and not run.failed:
        least = FILLED * run.seconds - BETWEEN * len(run.requests)
    if first > 0 or not least <= spent <= ROUNDED * concurrency * run.seconds:
        yield (
            f"{where} has requests of {spent:.1f} seconds, and {run.seconds:.1f} passed by another clock: "
            "something else ran between them, or times were changed"
        )


def _impossible_counts(where: str, run: ServerRun, rated: RunFigures) -> Iterator[str]:
    """What a server cannot have counted."""
    counts = run.counts
    longest = len(counts.chain_accepted)
    if counts.drafts is None or counts.accepted is None:
        return
    if longest and counts.accepted > counts.drafts * longest:
        yield (
            f"{where} counted {counts.accepted} accepted tokens in {counts.drafts} drafts of at most "
            f"{longest}"
        )
    if rated.tokens is None or run.failed or not longest:
        return
    gained = rated.tokens - len(run.requests)
    # A draft may go on after the end of a response.
    past_the_end = len(run.requests) * longest
    if counts.accepted > gained + past_the_end:
        yield (
            f"{where} counted {counts.accepted} accepted tokens, and the responses have {gained} after "
            "their first"
        )


def _cache_warnings(where: str, rated: RunFigures) -> Iterator[str]:
    shares = (
        (rated.cached_prompts, "prompt tokens"),
        (rated.cached_images, "images"),
    )
    for share, items in shares:
        if share:
            yield (
                f"{where} had {share:.0%} of the {items} in a cache: start it without caches to measure the "
                "first token (vLLM: --no-enable-prefix-caching --mm-processor-cache-gb 0)"
            )


def _counts(request: TimedRequest) -> DecodingCounts | None:
    """A request in the terms of `statistics.py`, its calls unknown; None without a count of tokens."""
    if not request.tokens:
        return None
    return DecodingCounts(
        tokens=request.tokens,
        calls=0,
        accepted=0,
        seconds=request.seconds,
        prefill_seconds=request.first_seconds,
        decode_seconds=request.seconds - request.first_seconds,
    )


def _share(count: int | None, total: float | None) -> float | None:
    if count is None or not total:
        return None
    return count / total


def _quartiles(values: Sequence[float]) -> Quartiles | None:
    if not values:
        return None
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Quartiles(float(low), float(median), float(high))
