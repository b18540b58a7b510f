"""The records of evaluations: the counts and times of every prompt.

Each evaluation of a drafter is a file of its own, `reports/<name>.<when>.json`, which
is never replaced. Rates and intervals are not stored: `statistics.py` computes them.

A field is None only where there is nothing to record: CPU seconds on a GPU, or the
surprise of a response that was not sampled.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from vlmdistill.drafters.decoding.hardware import Hardware
from vlmdistill.pipelines.streaming.pieces import Amount, Piece
from vlmdistill.pipelines.targets.software import Software
from vlmdistill.stores import input_files
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import HASH_DIGITS, content_hash

FORMAT: Final = 3  # of all records of evaluations, those of servers included
GENERATED: Final = 6
"""Prompts that the stock model's `generate` answers, too: it takes long."""
BINS: Final = 10  # of the probabilities that a drafter gives its guesses
MAX_CHAIN = 4096  # positions of a draft; with far more, a report would take minutes
MOMENT: Final = "%Y-%m-%d %H:%M:%S"
UTC_ENDING: Final = " UTC"
ZONE_STEP, MOST_OFFSET = 15 * 60, 14 * 3600  # seconds: of the time zones
AGAIN: Final = "remove it, or repeat `vlmdistill eval`"

Record = TypeVar("Record")
Count = Annotated[int, Meta(ge=0, le=10**15)]
Name = Annotated[str, Meta(min_length=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Check = Literal["identical", "near_tie", "different"]
PromptKind = Literal["text", "image", "images", "video"]
Finish = Literal["stop", "length", "broken"]
Rank = Literal["first", "second", "later", "rare"]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The seconds of each phase of decoding, see `drafters.decoding.clock.Phase`."""

    vision: Amount = 0.0
    prefill: Amount = 0.0
    draft_prefill: Amount = 0.0
    draft: Amount = 0.0
    verify: Amount = 0.0
    accept: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class ResponseSection:
    """The cycles that began in one range of contexts, in the reasoning or after it."""

    context: Count  # the lower end of the range, in tokens
    thinking: bool
    calls: Count
    tokens: Count
    accepted: Count


@dataclass(frozen=True, kw_only=True)
class ProbabilityBin:
    """Guesses at one position of the chain whose probability is in one tenth.

    Only guesses whose predecessors were all accepted count.
    """

    position: Count
    tried: Count  # guesses that were verified
    accepted: Count  # of these
    chances: Amount  # sum of the probabilities that the drafter gave them


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """How many tokens of a sampled response were of a rank, and how many to expect.

    Ranks are the target's first, second and later choices; besides, tokens with a
    probability of at most `sampled.RARE`.
    """

    rank: Rank
    tokens: Count
    expected: Amount
    variance: Amount  # of `tokens`


@dataclass(frozen=True, kw_only=True)
class Chains:
    """How many drafts got how far, by position of the most likely chain."""

    chain_tried: tuple[Count, ...] = ()
    """Cycles that verified the position after accepting all before it."""
    chain_accepted: tuple[Count, ...] = ()
    """Of these, cycles that accepted it."""

    def __post_init__(self) -> None:
        positions = len(self.chain_tried)
        if positions != len(self.chain_accepted):
            raise ValueError("chain_tried and chain_accepted differ in length")
        if positions > MAX_CHAIN:
            raise ValueError(
                f"chain_tried has {positions} positions: at most {MAX_CHAIN}"
            )


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The seconds of a response."""

    seconds: Amount  # elapsed, by a clock outside the decoder
    cpu_seconds: Amount | None = None  # of the decoding thread; None on a GPU
    delayed_seconds: Amount | None = None
    """In which the decoding thread was ready to run, and other programs had the CPU. None:
    on a GPU, of several threads, where the system does not tell, and of older records."""

    @property
    def undisturbed_seconds(self) -> float:
        """Elapsed, less those in which other programs had the CPU."""
        return self.seconds - (self.delayed_seconds or 0.0)

    @property
    def own_seconds(self) -> float:
        """Without those of other programs; where these are not known, without sleep either."""
        if self.cpu_seconds is None:
            return self.seconds
        if self.delayed_seconds is None:
            return self.cpu_seconds
        return self.undisturbed_seconds


@dataclass(frozen=True, kw_only=True)
class DecodingCounts(Clocks, Chains):
    """The counts and times from which rates are computed."""

    tokens: Count
    calls: Count  # of the target, after the prefill
    accepted: Count  # drafted tokens
    prefill_seconds: Amount  # of the first cycle, by the decoder's clock
    decode_seconds: Amount  # of all later cycles, by the decoder's clock

    @property
    def undisturbed_decode_seconds(self) -> float:
        """The same of all later cycles, of which other programs had as large a part as of the response."""
        if not self.seconds:
            return self.decode_seconds
        return self.decode_seconds * self.undisturbed_seconds / self.seconds

    @property
    def cycle_seconds(self) -> float:
        """Elapsed in all cycles, by the decoder's clock."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, kw_only=True)
class Decoding(DecodingCounts):
    """The decoding of one prompt once."""

    finish: Finish  # at an EOS, at the limit, or otherwise
    phases: Phases
    passes: Count  # forward passes after the prefill, as the target counts them
    missed: Count
    """Drafted tokens that the response has and no cycle accepted."""
    sections: tuple[ResponseSection, ...] = ()  # empty for plain decoding
    probabilities: tuple[ProbabilityBin, ...] = ()
    """By position and tenth; empty if the drafter gives no probabilities."""
    check: Check | None = None
    """Against the stock model's greedy choices, at temperature 0; None: it cannot read
    the prompt."""
    surprise: float | None = None
    """Above temperature 0: the sum of -log p(token) less its mean, in nats."""
    surprise_variance: Amount | None = None  # of that sum
    ranks: tuple[RankCount, ...] = ()  # above temperature 0
    seed: int | None = None  # of the sampling; None at temperature 0
    response: str = ""  # a hash of its tokens; empty: not recorded


def chain_counts(
    chains: Sequence[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`chain_tried` and `chain_accepted`.

    `chains` are the numbers of accepted and of verified tokens of each cycle.
    """
    longest = max((verified for _, verified in chains), default=0)
    tried = [0] * longest
    accepted = [0] * longest
    for accepted_count, verified_count in chains:
        for position in range(min(accepted_count + 1, verified_count)):
            tried[position] += 1
            accepted[position] += position < accepted_count
    return tuple(tried), tuple(accepted)


def probability_bins(
    chains: Sequence[tuple[int, int]], chances: Sequence[Sequence[float]]
) -> tuple[ProbabilityBin, ...]:
    """The probabilities of guesses in tenths, of the cycles that `chain_counts` counts.

    `chances` are the probabilities that the drafter gave the guesses of each cycle.
    """
    bins: dict[tuple[int, int], ProbabilityBin] = {}
    for (accepted_count, verified_count), cycle_chances in zip(
        chains, chances, strict=True
    ):
        verified = cycle_chances[: min(accepted_count + 1, verified_count)]
        for position, chance in enumerate(verified):
            tenth = min(int(BINS * chance), BINS - 1)
            before = bins.get((position, tenth)) or ProbabilityBin(
                position=position, tried=0, accepted=0, chances=0.0
            )
            bins[position, tenth] = ProbabilityBin(
                position=position,
                tried=before.tried + 1,
                accepted=before.accepted + (position < accepted_count),
                chances=before.chances + chance,
            )
    in_order = [bins[key] for key in sorted(bins)]
    return tuple(replace(one, chances=round(one.chances, 6)) for one in in_order)


@dataclass(frozen=True, kw_only=True)
class Stock(Clocks):
    """The response of the stock model's own `generate` at temperature 0."""

    tokens: Count


@dataclass(frozen=True, kw_only=True)
class Turn:
    """When a prompt was decoded, by all decoders of the evaluation in turn.

    `started` and `ended` are of the machine's clock, the seconds of each decoding of
    another one: they agree unless something else ran in between, or times of the
    record were changed.
    """

    started: Amount  # seconds since 1970
    ended: Amount
    seconds: tuple[Amount, ...]
    """Of each decoding, in the order of decoding, warm-ups included."""
    plain: Count  # the index of plain decoding in `seconds`
    drafted: Count  # the index of the drafter
    encoding: Amount | None = None
    """CPU seconds of encoding the prompt: its files may be read from the disk only the
    first time. None: not measured."""
    other: Amount | None = None
    """Seconds of encoding, of the target's own steps and of checks, between `started`
    and `ended` as well. None: they are not in between."""

    def __post_init__(self) -> None:
        if max(self.plain, self.drafted) >= len(self.seconds):
            raise ValueError("plain or drafted is not an index of seconds")


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt, decoded with plain decoding and with the drafter."""

    key: str
    dataset: str
    kind: PromptKind
    plain: Decoding
    drafted: Decoding
    turn: Turn
    stock: Stock | None = None  # decoded in turn with the others, for some prompts
    room: Count | None = None
    """Positions of the target for the response; None: not recorded."""
    bare_step: Amount | None = None
    """Seconds of the target's own step, the mean of some right after plain decoding. On a
    CPU its `own_seconds`. None: not measured."""


LABELS: Final[dict[str, Callable[[PromptResult], str]]] = {
    "kind": lambda prompt: prompt.kind,
    "dataset": lambda prompt: prompt.dataset,
}
"""Labels of prompts by which results are divided."""


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    """A response that the report shows."""

    key: str
    prompt: str
    files: tuple[str, ...]
    pieces: tuple[Piece, ...]
    tau: Amount
    plain: tuple[Piece, ...]
    """Of plain decoding; empty if it is too long for a replay."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement:
    """All prompts at one temperature."""

    temperature: Amount
    prompts: Annotated[tuple[PromptResult, ...], Meta(min_length=1)]
    shown: tuple[ShownResponse, ...] = ()

    def __repr__(self) -> str:
        return f"{len(self.prompts)} prompts at temperature {self.temperature:g}"

    def by(self, label: Callable[[PromptResult], str]) -> "dict[str, Measurement]":
        """Its prompts by a label, such as kind or dataset, without shown responses."""
        groups: dict[str, list[PromptResult]] = {}
        for prompt in self.prompts:
            groups.setdefault(label(prompt), []).append(prompt)
        return {
            name: replace(self, prompts=tuple(prompts), shown=())
            for name, prompts in groups.items()
        }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The speed of the machine at one moment, with the target's device and dtype."""

    plain_step: Amount | None
    """Seconds of a step of plain decoding; None: the response has a single token."""
    bare_step: Amount | None
    """Seconds of such a step by calls of the target alone; likewise."""
    step_ratio: Amount | None  # median of plain over bare, in pairs; likewise
    step_bytes: Count  # of the weights that such a step reads
    small_product: Amount  # seconds, of a matrix with few rows and a square one
    large_product: Amount  # seconds, of two square matrices
    bandwidth: Amount  # bytes read and written in a second of copying
    cpu_share: Share | None = None  # of these seconds; None on a GPU

    @property
    def reads(self) -> float | None:
        """A step of plain decoding, in times that its weights take to be read."""
        if not self.plain_step or not self.step_bytes:
            return None
        return self.plain_step * self.bandwidth / self.step_bytes

    @property
    def text(self) -> str:
        """The measurements in a line."""
        facts = []
        if self.plain_step is not None:
            facts.append(f"plain step {1e3 * self.plain_step:.2f} ms")
        small, large = 1e6 * self.small_product, 1e6 * self.large_product
        facts.append(f"products {small:.0f} and {large:.0f} µs")
        facts.append(f"memory {self.bandwidth / 1e9:.1f} GB/s")
        if self.cpu_share is not None:
            facts.append(f"CPU share {self.cpu_share:.0%}")
        return ", ".join(facts)


@dataclass(frozen=True, kw_only=True)
class TargetId:
    """The target that was decoded."""

    name: str
    family: str
    fingerprint: str

    @property
    def short_name(self) -> str:
        """See `short_name`."""
        return short_name(self.name)


def short_name(model: str) -> str:
    """The name of a model without its folder or its owner on the hub."""
    return model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How often drafts agreed with the target on held-out samples during training."""

    stage: str
    step: Count
    held_out_agreement: tuple[Share, ...]  # by drafted token


@dataclass(frozen=True, kw_only=True)
class StageTaken:
    """A stage of a training as it was run, whatever its settings planned."""

    name: str
    steps: Count
    passes: Amount  # over the samples of the training


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """The time that a training was given in place of a number of steps, and what its steps took."""

    asked: str  # in words
    seconds: Amount
    cpu_seconds: Amount

    @property
    def text(self) -> str:
        """What was asked for, and what it took."""
        taken = f"{self.seconds:.0f} s and {self.cpu_seconds:.0f} CPU seconds"
        return f"for {self.asked} (its steps took {taken})"


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a drafter was trained, from its folder.

    The defaults are of methods that need no training.
    """

    signature: str | None = None
    steps: Count = 0
    samples: Count = 0
    view: str | None = None
    seed: int | None = None
    stages: tuple[StageTaken, ...] = ()
    history: tuple[Agreement, ...] = ()
    budget: TimeBudget | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedStage:
    """The settings of a training stage."""

    name: str
    epochs: Amount
    """If the run counts steps, the epochs of all stages say only the stage's share."""
    hops: Count


@dataclass(frozen=True, kw_only=True)
class TrainedSettings:
    """The settings of a drafter that its evaluation repeats."""

    tree: str  # the default; an evaluation may use another
    stages: tuple[TrainedStage, ...] = ()


def stages_run(training: Training, config: TrainedSettings) -> list[str]:
    """What was run of each stage, in words: steps, passes over the samples, hops."""
    run_of = {stage.name: stage for stage in training.stages}
    texts = []
    for stage in config.stages:
        facts = [f"{stage.hops} {'hop' if stage.hops == 1 else 'hops'}"]
        if run := run_of.get(stage.name):
            facts = [f"{run.steps:,} steps", f"{run.passes:.1f} passes", *facts]
        texts.append(f"{stage.name} ({', '.join(facts)})")
    return texts


@dataclass(frozen=True, kw_only=True)
class Leak:
    """The evaluated prompts that a drafter has seen in training."""

    samples: Count  # that it was trained on
    prompts: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    """Others with an image or a video that it has seen, or without any, a text."""
    unknown: Count = 0
    """Samples whose media and texts are not in this workspace, or are unreadable."""

    @property
    def keys(self) -> list[str]:
        """The keys of all such prompts."""
        return sorted({*self.prompts, *self.alike})


@dataclass(frozen=True, kw_only=True)
class Again:
    """A prompt decoded in a process of its own."""

    key: str
    calls: Count
    temperature: Amount = 0.0
    encoding: Amount | None = None
    """CPU seconds of encoding it before a drafter was loaded; None: not measured."""
    plain_step: Amount | None = None
    """Seconds of a step of plain decoding then, on a CPU its `own_seconds`; None: not
    decoded plainly, or one token."""
    plain_response: str = ""  # a hash of its tokens; empty: not decoded plainly


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """How fast plain decoding was in an evaluation."""

    measured: str  # when
    against_stock: Amount | None = None  # times as fast as the stock model's `generate`
    error: Amount = 0.0  # the standard error of the logarithm of that
    reads: Amount | None = None  # a step, in times that its weights take to be read


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """The record of the evaluation of one drafter."""

    format: Literal[3]
    name: Name
    drafter: str  # the method
    tree: str
    parameters: Count
    training: Training
    config: TrainedSettings
    weights: str | None  # SHA-256 of the drafter's weights; None: it has none
    leak: Leak | None  # None: it is not known what the drafter was trained on
    target: TargetId
    hardware: str
    """Its name with the hash of what its speed depends on: equal for equal hardware."""
    machine: Hardware
    software: Software
    dtype: str
    threads: Count
    attention: str  # of the target's prefill
    compiled: bool  # whether decoding steps were compiled
    thinking: str  # on, off, mixed; empty: as the target's template has it
    max_new_tokens: Count
    seed: Count | None  # None: each prompt has one that was drawn for it
    measured: str  # date and time; the same for all drafters of one process
    asked: tuple[str, ...]  # the keys of the prompts that were to be measured
    calibrations: tuple[Calibration, ...]  # where each process began, and at the end
    temperatures: Annotated[tuple[Measurement, ...], Meta(min_length=1)]
    title: str = ""  # by `--name`
    settings: str | None = None
    """A hash of the drafter's settings and data, without seed and number of steps."""
    again: tuple[Again, ...] = ()  # some of the prompts
    not_again: str = ""
    """Why none could be decoded again, or not with the same weights: then the target alone is compared."""
    earlier: Baseline | None = None
    """Of the first sound evaluation under the same conditions, if there is one."""

    def __post_init__(self) -> None:
        for measurement in self.temperatures:
            if [prompt.key for prompt in measurement.prompts] != self.keys:
                raise ValueError("its temperatures have different prompts")

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{at.temperature:g}" for at in self.temperatures)
        return (
            f"{self.name}: evaluated on {len(self.keys)} prompts at temperature "
            f"{temperatures}, {self.measured}"
        )

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the prompts, in the order of decoding."""
        return [prompt.key for prompt in self.temperatures[0].prompts]

    @property
    def run(self) -> tuple[object, ...]:
        """Equal for the evaluations of one process: two processes may end in the same second."""
        return self.measured, self.software.command, self.calibrations

    @cached_property
    def prompt_set(self) -> str:
        """A hash of the keys: equal for evaluations of the same prompts."""
        return content_hash(self.keys)

    def without(self, keys: Collection[str]) -> "Evaluation":
        """The evaluation with the same numbers, and no text of some prompts.

        An error of the process that decodes again may quote a prompt.
        """

        def stripped(measurement: Measurement) -> Measurement:
            shown = [one for one in measurement.shown if one.key not in keys]
            return replace(measurement, shown=tuple(shown))

        not_again = "its process failed" if keys and self.not_again else self.not_again
        return replace(
            self,
            temperatures=tuple(map(stripped, self.temperatures)),
            not_again=not_again,
        )

    @property
    def lossless(self) -> bool:
        """Whether no response at temperature 0 differs by more than a near-tie.

        The responses of plain decoding count, too.
        """
        for measurement in self.temperatures:
            for prompt in measurement.prompts:
                if "different" in (prompt.plain.check, prompt.drafted.check):
                    return False
        return True


class Heading(msgspec.Struct, frozen=True):
    """The facts that tell evaluations apart, without the measurements."""

    format: Literal[3]
    name: str
    measured: str
    target: TargetId
    hardware: str
    dtype: str
    threads: int
    attention: str
    compiled: bool
    software: Software
    max_new_tokens: int
    thinking: str
    asked: tuple[str, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Heading":
        """The heading of an evaluation."""
        return cls(*(getattr(evaluation, name) for name in cls.__struct_fields__))

    @property
    def of_baseline(self) -> tuple[object, ...]:
        """The facts that must be equal for plain decoding to be equally fast.

        Of the prompts, those that `generate` answers: it is compared on these alone.
        """
        # Those digits of the fingerprint that earlier versions have as well.
        target = (self.target.name, self.target.fingerprint[:HASH_DIGITS])
        machine = (*target, self.hardware, self.dtype, self.threads)
        settings = (self.attention, self.compiled, self.software.installed)
        prompts = (self.max_new_tokens, self.thinking, self.asked[:GENERATED])
        return (*machine, *settings, *prompts)

    @property
    def drafter(self) -> str:
        """The drafter's name without its tree."""
        return self.name.partition("@")[0]


class _Format(msgspec.Struct):
    format: int


def read(file: Path) -> Evaluation:
    """Read an evaluation; DataError on an invalid file, or of another format."""
    evaluation = read_as(Evaluation, file, "an evaluation")
    return replace(evaluation, measured=_in_utc(evaluation))


def _in_utc(evaluation: Evaluation) -> str:
    """When it was measured, in UTC: earlier versions wrote the local time of the machine, without its zone.

    The clock says when the last prompt ended, seconds before.
    """
    try:
        local = datetime.strptime(evaluation.measured, MOMENT).replace(tzinfo=UTC)
    except ValueError:  # it has a zone
        return evaluation.measured
    ended = max(
        prompt.turn.ended for at in evaluation.temperatures for prompt in at.prompts
    )
    offset = ZONE_STEP * round((local.timestamp() - ended) / ZONE_STEP)
    if abs(offset) > MOST_OFFSET:  # it was finished much later than its last prompt
        return evaluation.measured
    return _written(local - timedelta(seconds=offset))


def heading(file: Path) -> Heading:
    """Read the heading of an evaluation, in a tenth of the time of `read`.

    DataError on an invalid file, or of another format.
    """
    read_heading = read_as(Heading, file, "an evaluation")
    is_in_utc = read_heading.measured.endswith(UTC_ENDING)
    return read_heading if is_in_utc else Heading.of(read(file))


def is_evaluation(file: Path) -> bool:
    """Whether a file is an evaluation."""
    try:
        heading(file)
    except DataError:
        return False
    return True


def read_as(kind: type[Record], file: Path, what: str) -> Record:
    """Read a record of a kind; DataError on an invalid file, or of another format."""
    try:
        return input_files.read(file, kind, what, AGAIN)
    except DataError:
        _check_format(file)
        raise


def _check_format(file: Path) -> None:
    """DataError if a file says that it is of another format."""
    try:
        format_of_file = input_files.read(file, _Format, "a record", AGAIN).format
    except DataError:
        return
    if format_of_file != FORMAT:
        raise DataError(
            f"{file} is of format {format_of_file}, of a development version, and not "
            f"of format {FORMAT}: remove it, and measure again with `vlmdistill eval`"
        )


def files_in(folder: Path) -> list[Path]:
    """The JSON files of a folder.

    DataError on what only has such a name, as a FIFO, which has no end.
    """
    files = sorted(folder.glob("*.json"))
    irregular = [str(file) for file in files if not file.is_file()]
    if irregular:
        raise DataError(f"{', '.join(irregular)}: not a regular file; remove it")
    return files


def now() -> str:
    """Date and time for `measured`: in UTC, so that it sorts, wherever it was measured."""
    return _written(datetime.now(UTC))


def _written(moment: datetime) -> str:
    return f"{moment:{MOMENT}}{UTC_ENDING}"


def new_file(folder: Path, name: str) -> Path:
    """A file for a record: unique over all machines; names sort by time."""
    moment = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    return folder / f"{name}.{moment}-{secrets.token_hex(4)}.json"


def write(record: object, file: Path) -> None:
    """Write or replace the file atomically."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    with atomic_write(file) as aside:
        aside.write_bytes(text)
