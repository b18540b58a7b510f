"""The data of a store: features, samples, and where they come from.

Shapes: T text tokens of a sample, U visual tokens, M visual spans (images or video runs),
L = T + U positions of the expanded sequence, D hidden width, V vocabulary.
"""

import hashlib
import json
import re
import time
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy.typing as npt
from msgspec import Meta as Bounds
from msgspec import Struct

from vlmdistill.stores.errors import DataError, one_line
from vlmdistill.stores.suggestions import did_you_mean

SCHEMA_VERSION = 2
T = TypeVar("T")
CHUNK_FILE = "c/0/0"  # the one file of rows in the folder of an array

Array = npt.NDArray[Any]
Where = Literal["text", "visual", "span"]
Rows = Literal["text", "visual", "span", "sample"]
"""A row of an array is for one of these."""
Meta = Mapping[str, str | int | float | bool | None]
TIME = "time"
"""The meta column that says when a sample was asked, in seconds since 1970: `store gc --older-than`."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
HASH_DIGITS = 16  # of a hash of content
MOST_DAYS = 100_000  # of a length of time; a wait can be little longer

# Bounds of what is read: far beyond any target, and small enough to compute with.
Size = Annotated[int, Bounds(ge=1, le=1 << 17)]  # of a vector
Count = Annotated[int, Bounds(ge=0, le=1 << 31)]
Id = Annotated[int, Bounds(ge=0, le=1 << 31)]
Label = Annotated[str, Bounds(max_length=1 << 12)]
FEATURE = re.compile(r"(hidden|embed|layer[0-9]{1,5})\.(text|visual|span)")


@dataclass(frozen=True, order=True)
class Feature:
    """One kind of hidden state, captured at one kind of position.

    Args:
        source: `hidden` (the input of `lm_head`: after the final norm), `embed` (the input of layer 0: token
            embeddings with projected visual vectors scattered in) or `layer<k>` (the residual stream that
            enters layer k, before any norm; `hidden_states[k]` of transformers).
        where: `text` (every text token), `visual` (every visual token) or `span` (the last visual token of
            each image or video, which is paired with the first text token after it).
    """

    source: str
    where: Where

    @property
    def name(self) -> str:
        """The name on disk, e.g. `hidden.text` or `layer14.visual`."""
        return f"{self.source}.{self.where}"

    @classmethod
    def parse(cls, name: str) -> "Feature":
        """Read a name back.

        Args:
            name: Such as `hidden.text` or `layer14.visual`.

        Returns:
            The feature of that name.

        Raises:
            DataError: It is not the name of a feature.
        """
        match = FEATURE.fullmatch(name)
        if not match:
            places = typing.get_args(Where)
            examples = [
                f"{of}.{place}" for of in ("hidden", "embed") for place in places
            ]
            near = did_you_mean(name, examples)
            raise DataError(
                f"'{name}' is not a feature{near}: write hidden|embed|layer<k> '.' text|visual|span, "
                "for example hidden.text or layer14.visual"
            )
        return cls(match[1], typing.cast(Where, match[2]))


def as_features(features: Collection[str | Feature] | Feature) -> tuple[Feature, ...]:
    """Features from features or their names, or from a single one. DataError when a name is not a feature."""
    several = (features,) if isinstance(features, str | Feature) else features
    return tuple(
        feature if isinstance(feature, Feature) else Feature.parse(feature)
        for feature in several
    )


def held(features: Mapping[Feature, T], wanted: Feature, holder: str) -> T:
    """The states of a feature; DataError when the `holder`, a sample or batch, was read without it."""
    if wanted not in features:
        names = ", ".join(sorted(feature.name for feature in features)) or "none"
        raise DataError(
            f"the {holder} lacks {wanted.name}, it has {names}: name it in `features`"
        )
    return features[wanted]


@dataclass(frozen=True)
class Span:
    """A run of visual tokens: an image, or tokens of a video without text between them.

    Args:
        start: Its first position in the expanded sequence, from 0.
        length: Its number of visual tokens, at least 1.
    """

    start: int
    length: int


@dataclass(frozen=True)
class Sample:
    """One prompt with its response, teacher-forced through the target. Ragged and unpadded.

    Visual placeholders are left out of the token arrays: T text tokens and the U visual tokens of M spans
    together fill the positions of the expanded sequence, each once.

    Args:
        key: Name of the sample, unique in a store.
        ids_T: int32 [T], token ids.
        response_T: bool [T], whether the target generated the token (EOS included).
        position_T: int32 [T], strictly increasing: the index of the token in the expanded sequence.
        rope_T: int32 [T], the target's own rotary position (all axes of M-RoPE agree on text).
        spans: The M spans of visual tokens, in order.
        features: Each feature as [T, U or M, hidden size] in the dtype of the store; bfloat16 as uint16.
        meta: Small columns of the index: `dataset`, `words`, ...
    """

    key: str
    ids_T: Array
    response_T: Array
    position_T: Array
    rope_T: Array
    spans: tuple[Span, ...] = ()
    features: Mapping[Feature, Array] = field(default_factory=dict)
    meta: Meta = field(default_factory=dict)

    @property
    def visual_tokens(self) -> int:
        """U: the number of visual tokens in the expanded sequence."""
        return sum(span.length for span in self.spans)

    def __repr__(self) -> str:
        features = ", ".join(feature.name for feature in self.features) or "none"
        return (
            f"Sample({self.key!r}: {len(self.ids_T)} text tokens, {int(self.response_T.sum())} of the "
            f"response; {self.visual_tokens} visual tokens in {len(self.spans)} spans; features: {features})"
        )

    def feature(self, name: str) -> Array:
        """Look up a feature.

        Args:
            name: Such as `hidden.text`; see `Feature`.

        Returns:
            Its states [T, U or M, hidden size], in the dtype of the store; bfloat16 as uint16.

        Raises:
            DataError: It is not the name of a feature, or the sample was read without it: name it in
                `features`.
        """
        return held(self.features, Feature.parse(name), "sample")

    def rows(self, where: Where) -> int:
        """Count the rows of a feature.

        Args:
            where: The positions of the feature: `text`, `visual` or `span`.

        Returns:
            T, U or M.
        """
        return {
            "text": len(self.ids_T),
            "visual": self.visual_tokens,
            "span": len(self.spans),
        }[where]


@dataclass(frozen=True)
class PackedSamples:
    """B samples of a batch one after the other, unpadded: T text tokens and M spans of all of them."""

    keys: tuple[str, ...]
    text_tokens_B: Array  # int64
    tokens_T4: Array  # int32: id, position, rotary position, response
    span_M3: Array  # int64: number of the sample, start, length
    features: Mapping[Feature, Array]  # [rows of all samples, D]; bf16 as uint16

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def ids_T(self) -> Array:
        """Token ids."""
        ids_T: Array = self.tokens_T4[:, 0]
        return ids_T

    @property
    def response_T(self) -> Array:
        """Whether the target generated the token (bool)."""
        response_T: Array = self.tokens_T4[:, 3] != 0
        return response_T


class Facts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that are kept as JSON."""

    WHAT: typing.ClassVar[str]  # their name in an error

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `from_dict` reads it back."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """Read `to_dict`'s form; DataError names a member that is missing, unknown or mistyped."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise DataError(
                f"this {cls.WHAT} was written by another version: {one_line(error)}"
            ) from None


class TargetInfo(Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of a target that a drafter is built from; they travel in the store."""

    name: Label
    family: Label
    hidden_size: Size
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    rms_norm_eps: float
    rope_theta: float
    hidden_act: Label
    attention_bias: bool
    max_position: Count
    eos_ids: tuple[Id, ...]
    visual_ids: tuple[Id, ...]  # ids of the image and video placeholders

    WHAT = "target information"


@dataclass(frozen=True)
class FrozenTables:
    """The target's frozen tables, which turn ids into drafter inputs and states into logits.

    `lm_head_VD` is the same object as `embed_VD` when the target ties them.
    """

    embed_VD: Array  # bf16 as uint16
    lm_head_VD: Array
    dtype: str  # bfloat16, float16 or float32
    generation: Mapping[str, Any] = field(default_factory=dict)
    """The target's generation configuration: informative."""

    @property
    def tied(self) -> bool:
        """One table serves as both."""
        return self.lm_head_VD is self.embed_VD


class Provenance(Facts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the features come from. Stores merge, and drafters decode, only where these agree."""

    target: Label  # name or path as given, never compared
    config_hash: Label
    weights_hash: Label
    processor_hash: Label
    template_hash: Label
    features: Annotated[tuple[Label, ...], Bounds(max_length=1000)]
    """Names of the captured features, sorted."""
    dtype: Label  # of the stored features: bfloat16, float16 or float32
    revision: Label  # never compared
    sampling: Label  # never compared: responses of several settings may share a store
    code_version: Label  # never compared
    engine: Label  # that ran the target: `transformers`, or another with its version
    thinking: Label  # whether the target reasons: on, off, mixed; "": as by default

    INFORMATIVE: typing.ClassVar = ("target", "revision", "sampling", "code_version")
    WHAT = "provenance"

    def mismatch(self, other: "Provenance") -> str | None:
        """The first compared field in which the two differ, as `field: own, not other`."""
        for name in self.__struct_fields__:
            if name in self.INFORMATIVE:
                continue
            value = getattr(self, name)
            other_value = getattr(other, name)
            is_hash = name.endswith("_hash")
            if not (agree(value, other_value) if is_hash else value == other_value):
                return f"{name}: {value}, not {other_value}"
        return None


def agree(recorded: str, present: str) -> bool:
    """Whether two hashes of a target are equal, as far as both know.

    Hashes of earlier versions have 16 digits, with which those of today begin.
    """
    shorter, longer = sorted((recorded, present), key=len)
    is_begun = len(shorter) == HASH_DIGITS and longer.startswith(shorter)
    return shorter == longer or is_begun


def content_hash(value: Any) -> str:
    """Sixteen hex digits over the canonical JSON of a value: equal content, equal hash."""
    return _digits(hashlib.sha256(_canonical(value).encode()))


def content_hashes(shared: Any, values: Iterable[Any]) -> list[str]:
    """`content_hash([shared, value])` of each value; `shared`, which may be large, is read once."""
    begun = hashlib.sha256(f"[{_canonical(shared)},".encode())
    hashes = []
    for value in values:
        whole = begun.copy()
        whole.update(f"{_canonical(value)}]".encode())
        hashes.append(_digits(whole))
    return hashes


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def _digits(hashed: "hashlib._Hash") -> str:
    return hashed.hexdigest()[:HASH_DIGITS]


def utc(moment: float) -> str:
    """Seconds since 1970 as a date and time: `2026-11-25T08:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def seconds(text: str, option: str) -> float:
    """A length of time such as `90s`, `12h`, `30d` or `2w`; DataError names the `option` that it is of."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text.strip().lower())
    if not match:
        raise DataError(
            f"{option} '{text}': write a number with s, m, h, d or w, such as 30d"
        )
    number, unit = match.groups()
    length = float(number) * UNITS[unit]
    if length > MOST_DAYS * UNITS["d"]:
        raise DataError(f"{option} '{text[:20]}': give at most {MOST_DAYS}d")
    return length
