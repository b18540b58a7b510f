"""The records of an evaluation: the counts and times of every prompt.

Each evaluation of a drafter is a file of its own, `reports/<name>.<when>.json`, which is never replaced.
Rates and intervals are not stored: `statistics.py` computes them from the records.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from vlmdistill.drafters.decoding.hardware import Hardware
from vlmdistill.pipelines.streaming.pieces import Amount, Piece
from vlmdistill.pipelines.targets.software import Software
from vlmdistill.stores import input_files
from vlmdistill.stores.backends.local import atomic_write
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import content_hash

FORMAT: Final = 2
GENERATED: Final = (
    6  # prompts that the stock model's `generate` answers, too: it takes long
)
BINS: Final = 10  # of the chances that a drafter tells
MAX_CHAIN = 4096  # positions of a draft; with far more, a report would take minutes
AGAIN: Final = "remove it, or repeat `vlmdistill eval`"

Count = Annotated[int, Meta(ge=0, le=10**15)]
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
class ResponsePart:
    """The cycles of a response that began in one range of contexts, within its reasoning or after it."""

    context: Count  # the least of the range, in tokens
    thinking: bool
    calls: Count
    tokens: Count
    accepted: Count


@dataclass(frozen=True, kw_only=True)
class Told:
    """Guesses at one position of the chain, after accepted ones, whose chances are in one tenth."""

    position: Count
    tried: Count  # guesses that were verified
    accepted: Count  # of these
    chances: Amount  # their sum


@dataclass(frozen=True, kw_only=True)
class RankCount:
    """How many tokens of a sampled response were a choice of this rank, and how many would be expected.

    The target's first, second and later choices, and those less likely than `sampled.RARE`.
    """

    rank: Rank
    tokens: Count
    expected: Amount
    variance: Amount  # of `tokens`


@dataclass(frozen=True, kw_only=True)
class Chains:
    """How many drafts got how far, by position of the most likely chain."""

    chain_tried: tuple[
        Count, ...
    ] = ()  # cycles that verified it after accepting all before it
    chain_accepted: tuple[Count, ...] = ()  # of these, cycles that accepted it

    def __post_init__(self) -> None:
        if len(self.chain_tried) != len(self.chain_accepted):
            raise ValueError("chain_tried and chain_accepted differ in length")
        if len(self.chain_tried) > MAX_CHAIN:
            raise ValueError(
                f"chain_tried has {len(self.chain_tried)} positions: at most {MAX_CHAIN}"
            )


@dataclass(frozen=True, kw_only=True)
class Decoding(Chains):
    """The counts and times of decoding one prompt once."""

    tokens: Count
    calls: Count  # of the target, after the prefill
    accepted: Count  # drafted tokens
    seconds: Amount  # elapsed, by a clock outside the decoder
    prefill_seconds: Amount  # of the first cycle, by the decoder's clock
    decode_seconds: Amount  # of all later cycles, by the decoder's clock
    parts: tuple[
        ResponsePart, ...
    ] = ()  # of the drafter's; none: measured before they were recorded
    told: tuple[
        Told, ...
    ] = ()  # by position and tenth of the chance; empty: no chances were told
    missed: Count = 0  # drafted tokens of the most likely chains that the response has and no cycle accepted
    check: Check | None = (
        None  # against the stock model's greedy choices; None: not compared
    )
    finish: Finish | None = (
        None  # at an EOS, at the limit, or otherwise; None: not recorded
    )
    phases: Phases | None = None  # None: measured before they were recorded
    cpu_seconds: Amount | None = None  # of the decoding thread; None on a GPU
    passes: Count | None = (
        None  # after the prefill, as the target counts them; None: not recorded
    )
    surprise: float | None = (
        None  # above temperature 0: sum of -log p(token) less its mean, in nats
    )
    surprise_variance: Amount | None = None  # of that sum
    ranks: tuple[RankCount, ...] = ()  # above temperature 0; empty: not counted
    seed: int | None = None  # of the sampling; None at temperature 0


def chain_counts(
    chains: Sequence[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`chain_tried` and `chain_accepted`; `chains` are the accepted and verified tokens of each cycle."""
    longest = max((verified for _, verified in chains), default=0)
    tried, accepted = [0] * longest, [0] * longest
    for taken, verified in chains:
        for position in range(min(taken + 1, verified)):
            tried[position] += 1
            accepted[position] += position < taken
    return tuple(tried), tuple(accepted)


def told_chances(
    chains: Sequence[tuple[int, int]], chances: Sequence[Sequence[float]]
) -> tuple[Told, ...]:
    """`told`, of the cycles that `chain_counts` counts, and the chances of their guesses."""
    found: dict[tuple[int, int], tuple[int, int, float]] = {}
    for (taken, verified), told in zip(chains, chances, strict=True):
        for position, chance in enumerate(told[: min(taken + 1, verified)]):
            key = position, min(int(BINS * chance), BINS - 1)
            tried, accepted, total = found.get(key, (0, 0, 0.0))
            found[key] = tried + 1, accepted + (position < taken), total + chance
    return tuple(
        Told(position=position, tried=tried, accepted=accepted, chances=round(total, 6))
        for (position, _), (tried, accepted, total) in sorted(found.items())
    )


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The response of the stock model's own `generate` at temperature 0."""

    tokens: Count
    seconds: Amount
    cpu_seconds: Amount | None = None  # of the decoding thread; None on a GPU


@dataclass(frozen=True, kw_only=True)
class Turn:
    """When a prompt was decoded, by all decoders of the evaluation one after the other.

    `started` and `ended` are of the machine's clock, the seconds of each decoding of another one: they agree
    unless something else ran in between, or times of the record were changed.
    """

    started: Amount  # seconds since 1970
    ended: Amount
    seconds: tuple[Amount, ...]  # of each decoding in this order, warm-ups included
    plain: Count  # the place of plain decoding in `seconds`
    drafted: Count  # the place of the drafter


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt, decoded with plain decoding and with the drafter."""

    key: str
    dataset: str
    kind: PromptKind
    plain: Decoding
    drafted: Decoding
    stock: Stock | None = None  # decoded in turn with the others, for some prompts
    turn: Turn | None = None  # None: of a server


LABELS: Final[dict[str, Callable[[PromptResult], str]]] = {
    "kind": lambda one: one.kind,
    "dataset": lambda one: one.dataset,
}
"""What results are divided by."""


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    """A response that the report shows."""

    key: str
    prompt: str
    files: tuple[str, ...]
    pieces: tuple[Piece, ...]
    tau: Amount
    plain: tuple[
        Piece, ...
    ] = ()  # of plain decoding, measured beside it; empty: not recorded


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement:
    """All prompts at one temperature."""

    temperature: Amount
    prompts: Annotated[tuple[PromptResult, ...], Meta(min_length=1)]
    shown: tuple[ShownResponse, ...] = ()

    def __repr__(self) -> str:
        return f"{len(self.prompts)} prompts at temperature {self.temperature:g}"

    def by(self, label: Callable[[PromptResult], str]) -> "dict[str, Measurement]":
        """Its prompts by a label, such as their kind or dataset; nothing is shown of them."""
        groups: dict[str, list[PromptResult]] = {}
        for one in self.prompts:
            groups.setdefault(label(one), []).append(one)
        return {
            name: replace(self, prompts=tuple(some), shown=())
            for name, some in groups.items()
        }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The speed of the machine itself at one moment, with the target's device, dtype and threads."""

    plain_step: (
        Amount | None
    )  # seconds of plain decoding; None: the response has a single token
    small_product: Amount  # seconds, of a matrix with few rows and a square one
    large_product: Amount  # seconds, of two square matrices
    bandwidth: Amount  # bytes read and written in a second of copying
    cpu_share: Share | None = None  # of these seconds; None on a GPU
    bare_step: Amount | None = (
        None  # seconds of such a step without the decoder; None: not measured
    )
    step_ratio: Amount | None = (
        None  # median of plain over bare, in pairs; None: not measured in pairs
    )
    step_bytes: Count | None = (
        None  # of the weights that such a step reads; None: not recorded
    )

    @property
    def reads(self) -> float | None:
        """A step of plain decoding in times that its weights take to be read; None: not recorded."""
        if not self.plain_step or not self.step_bytes:
            return None
        return self.plain_step * self.bandwidth / self.step_bytes

    @property
    def text(self) -> str:
        """The measurements in a line."""
        step = (
            ""
            if self.plain_step is None
            else f"plain step {1e3 * self.plain_step:.2f} ms, "
        )
        share = "" if self.cpu_share is None else f", CPU share {self.cpu_share:.0%}"
        products = (
            f"{1e6 * self.small_product:.0f} and {1e6 * self.large_product:.0f} µs"
        )
        return (
            f"{step}products {products}, memory {self.bandwidth / 1e9:.1f} GB/s{share}"
        )


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
    """How often a drafter agreed with the target on held-out samples during training, by drafted token."""

    stage: str
    step: Count
    held_out_agreement: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class StageTaken:
    """A stage of a training as it was run, whatever its settings planned."""

    name: str
    steps: Count
    passes: Amount  # over the samples of the training


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a drafter was trained, from its folder; the defaults for methods that need no training."""

    signature: str | None = None
    steps: Count = 0
    samples: Count = 0
    view: str | None = None
    seed: int | None = None
    stages: tuple[StageTaken, ...] = ()  # empty: trained before they were recorded
    history: tuple[Agreement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainedStage:
    """The settings of a training stage."""

    name: str
    epochs: Amount  # of a run that counts steps only the stage's share of them
    hops: Count


@dataclass(frozen=True, kw_only=True)
class TrainedSettings:
    """The settings of a drafter that an evaluation repeats."""

    tree: str  # the default; an evaluation may use another
    stages: tuple[TrainedStage, ...] = ()


def stages_run(training: Training, config: TrainedSettings) -> list[str]:
    """What was run of each stage, in words: its steps, its passes over the samples, and its hops."""
    taken = {stage.name: stage for stage in training.stages}
    said = []
    for stage in config.stages:
        hops = f"{stage.hops} {'hop' if stage.hops == 1 else 'hops'}"
        run = taken.get(stage.name)
        amount = f"{run.steps:,} steps, {run.passes:.1f} passes, " if run else ""
        said.append(f"{stage.name} ({amount}{hops})")
    return said


@dataclass(frozen=True, kw_only=True)
class Leak:
    """The evaluated prompts that a drafter has seen in training."""

    samples: Count  # that it was trained on
    prompts: tuple[str, ...] = ()
    alike: tuple[
        str, ...
    ] = ()  # others, with an image, a video or, without any, a text that it has seen
    unknown: Count = (
        0  # samples whose media and texts are not in this workspace, or cannot be read
    )

    @property
    def keys(self) -> list[str]:
        """All of them."""
        return sorted({*self.prompts, *self.alike})


@dataclass(frozen=True, kw_only=True)
class Again:
    """A prompt decoded at temperature 0 in a process of its own."""

    key: str
    calls: Count


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What plain decoding was compared with in an evaluation."""

    measured: str  # when
    against_stock: Amount | None = None  # times as fast as the stock model's `generate`
    reads: Amount | None = None  # a step, in times that its weights take to be read


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """The evaluation of one drafter."""

    format: Literal[2]
    name: str
    drafter: str
    tree: str
    parameters: Count
    training: Training
    config: TrainedSettings
    target: TargetId
    hardware: str  # its name with the hash of what its speed depends on: equal for the same hardware
    dtype: str
    threads: Count
    max_new_tokens: Count
    seed: Count
    measured: str  # date and time; the same for all drafters of one process
    temperatures: Annotated[tuple[Measurement, ...], Meta(min_length=1)]
    software: Software | None = None  # None: measured before it was recorded
    attention: str | None = (
        None  # of the target's prefill; None: measured before it was recorded
    )
    compiled: bool | None = None  # whether decoding steps were compiled; likewise
    thinking: str = (
        ""  # whether the target reasoned: on, off, mixed; empty: as its template has it
    )
    machine: Hardware | None = None  # likewise
    calibrations: tuple[
        Calibration, ...
    ] = ()  # where each process began, and at the end
    title: str = ""  # by `--name`
    asked: tuple[str, ...] = ()  # the keys of the prompts that were to be measured
    leak: Leak | None = None  # None: it is not known what the drafter was trained on
    again: tuple[Again, ...] = ()  # some of the prompts
    not_again: str = ""  # why none could be decoded again
    weights: str | None = (
        None  # SHA-256 of the drafter's weights; None: it has none, or not recorded
    )
    earlier: Baseline | None = (
        None  # of the last sound evaluation under the same conditions
    )

    def __post_init__(self) -> None:
        if any(
            [one.key for one in at.prompts] != self.keys for at in self.temperatures
        ):
            raise ValueError("its temperatures have different prompts")

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{at.temperature:g}" for at in self.temperatures)
        return (
            f"{self.name}: evaluated on {len(self.keys)} prompts at temperature {temperatures}, "
            f"{self.measured}"
        )

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the prompts, in the order of decoding."""
        return [one.key for one in self.temperatures[0].prompts]

    @cached_property
    def prompt_set(self) -> str:
        """A hash of the keys: evaluations of the same prompts have the same one."""
        return content_hash(self.keys)

    def without(self, keys: Collection[str]) -> "Evaluation":
        """The evaluation with the same numbers, and no text of some prompts.

        An error of the process that decodes again may quote one.
        """

        def stripped(at: Measurement) -> Measurement:
            return replace(
                at, shown=tuple(one for one in at.shown if one.key not in keys)
            )

        not_again = "its process failed" if keys and self.not_again else self.not_again
        return replace(
            self,
            temperatures=tuple(map(stripped, self.temperatures)),
            not_again=not_again,
        )

    @property
    def lossless(self) -> bool:
        """Whether no response at temperature 0, of plain decoding either, differs by more than a near-tie."""
        results = [one for at in self.temperatures for one in at.prompts]
        return not any(
            "different" in (one.plain.check, one.drafted.check) for one in results
        )


def read(file: Path) -> Evaluation:
    """Read an evaluation; DataError on an invalid file."""
    return input_files.read(
        file, Evaluation, f"an evaluation of format {FORMAT}", AGAIN
    )


class Heading(msgspec.Struct, frozen=True):
    """What tells evaluations apart, without what was measured."""

    name: str
    measured: str
    target: TargetId
    hardware: str
    dtype: str
    threads: int
    attention: str | None = None
    compiled: bool | None = None
    software: Software | None = None
    max_new_tokens: int = 0
    thinking: str = ""
    asked: tuple[str, ...] = ()

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Heading":
        """That of an evaluation."""
        return cls(*(getattr(evaluation, name) for name in cls.__struct_fields__))

    @property
    def of_baseline(self) -> tuple[object, ...]:
        """What must be equal for the same baseline: also the prompts that `generate` answers."""
        software = self.software and self.software.installed
        return (
            *(self.target, self.hardware, self.dtype, self.threads),
            *(self.attention, self.compiled, software),
            *(self.max_new_tokens, self.thinking, self.asked[:GENERATED]),
        )

    @property
    def drafter(self) -> str:
        """The drafter's name without its tree."""
        return self.name.partition("@")[0]


def heading(file: Path) -> Heading:
    """Read the heading of an evaluation, in a tenth of the time of `read`; DataError on an invalid file."""
    return input_files.read(file, Heading, f"an evaluation of format {FORMAT}", AGAIN)


def files_in(folder: Path) -> list[Path]:
    """The JSON files of a folder; DataError on what only has such a name, as a FIFO, which has no end."""
    found = sorted(folder.glob("*.json"))
    if odd := [str(file) for file in found if not file.is_file()]:
        raise DataError(f"{', '.join(odd)}: not a regular file; remove it")
    return found


def new_file(folder: Path, name: str) -> Path:
    """A file for an evaluation: its name is on no machine the name of another, and sorts by time."""
    return (
        folder / f"{name}.{datetime.now():%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}.json"
    )


def write(evaluation: object, file: Path) -> None:
    """Replace the file atomically."""
    with atomic_write(file) as aside:
        aside.write_bytes(
            msgspec.json.format(msgspec.json.encode(evaluation), indent=1)
        )
