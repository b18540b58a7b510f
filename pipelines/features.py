"""Capture the target's hidden states over prompts and answers, into the store.

Ray actors run the target teacher-forced, batched by length. The actor that computes a shard writes
it; what comes back are counts. What is captured is the union of what the chosen drafters need, in
one pass. A rerun captures the missing samples only.
"""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlmdistill.pipelines import answers
from vlmdistill.pipelines.answers import Answer
from vlmdistill.pipelines.fields import check_encoding, chosen, store_at
from vlmdistill.pipelines.prompts import Prompt
from vlmdistill.pipelines.responses import checkpoint, weights_of
from vlmdistill.pipelines.targets.options import Options
from vlmdistill.pipelines.workers import MIB, Crew, session
from vlmdistill.pipelines.workspace import absolute, only_writer, wait_for_workers, working_in
from vlmdistill.stores.errors import DataError, StoreError, TargetError, one_line
from vlmdistill.stores.measures import measures
from vlmdistill.stores.schema import Head, content_hash
from vlmdistill.stores.store import Store
from vlmdistill.stores.tensors import as_numpy

logger = logging.getLogger(__name__)

UNIT_SAMPLES = 256  # at most, in one shard

Report = Callable[[int, int, str], None]  # done, total, remark


@dataclass(frozen=True)
class Item:
    """One sample to capture."""

    prompt: Prompt
    answer: Answer

    @property
    def tokens(self) -> int:
        """The length of the expanded sequence."""
        return self.answer.prompt_tokens + len(self.answer.ids)

    @property
    def meta(self) -> dict[str, str | int | float]:
        """Columns of the store's index, to filter by."""
        return {
            "dataset": self.prompt.dataset,
            "split": self.prompt.split,
            "augmentation": self.prompt.augmentation,
            "finish": self.answer.finish,
            **measures(self.answer.text),  # what the named filters of views read
        }


@dataclass(frozen=True)
class Unit:
    """Samples of similar length that become one shard."""

    items: tuple[Item, ...]
    name: str


@dataclass
class Result:
    """What a worker returns for one unit: counts, never tensors."""

    samples: int = 0
    tokens: int = 0  # text and visual
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did, and what the store holds after it."""

    store: str
    features: tuple[str, ...]
    samples: int  # in the store
    captured: int  # by this run
    failed: dict[str, str]  # key -> why
    samples_per_second: float
    tokens_per_second: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return vars(self)


class Capturer:
    """The worker: loads the target once, captures unit after unit and writes each as a shard."""

    def __init__(
        self,
        model: str,
        store: str,
        drafters: Sequence[str] | None,
        dtype: str,
        sampling: str,
        budget: int,
        how: Options | None = None,
        encoding: Mapping[str, str] | None = None,
    ) -> None:
        from vlmdistill.pipelines.targets.loading import load

        self.guard = (
            working_in(Path(store)) if "://" not in store else None
        )  # held as long as the actor lives
        self.target = load(model, **(how or Options()))
        there = store_at(store)
        check_dtype(there, self.target.dtype_name)
        self.features = chosen(there, drafters, self.target.info)
        self.dtype = dtype
        self.budget = budget
        provenance = self.target.provenance(self.features, dtype, sampling)
        check_encoding(there, self.features, encoding or {})
        kept = {name: way for name, way in (encoding or {}).items() if way != "raw"}
        made = kept if there is None else None  # what is there keeps its own
        self.store = Store.create(store, provenance, self.target.info, stored_head(self.target), made)

    def facts(self) -> dict[str, Any]:
        """What the driver plans with."""
        row_bytes = {"text": 0, "visual": 0, "span": 0}
        for feature in self.features:
            eight = self.store.layout.encoding.get(feature.name) == "int8"
            number = 1 if eight else 4 if self.dtype == "float32" else 2
            row_bytes[feature.where] += number * self.target.info.hidden_size
        return {
            "target": str(self.target.fingerprint),
            "features": tuple(sorted(feature.name for feature in self.features)),
            "text_bytes": row_bytes["text"],
            "visual_bytes": row_bytes["visual"],
        }

    def close(self) -> None:
        """Say that nothing more will be written; the end of the process says it as well."""
        if self.guard:
            self.guard.close()

    def work(self, unit: Unit) -> Result:
        """Capture a unit and commit it, whole; without the samples whose prompt is not what it was."""
        try:
            return self._capture(unit)
        except DataError:
            failed = {item.prompt.key: why for item in unit.items if (why := self._trouble(item))}
            if not failed:
                raise
        items = tuple(item for item in unit.items if item.prompt.key not in failed)
        result = self._capture(Unit(items, unit_name(items))) if items else Result()
        return dataclasses.replace(result, failed=failed)

    def _capture(self, unit: Unit) -> Result:
        """Prompts are read as their batch comes: a shard's worth of long videos would not fit."""
        from vlmdistill.pipelines.targets.batching import packed

        result = Result()
        with self.store.writer(unit.name) as writer:
            for batch in packed(unit.items, lambda item: item.tokens, self.budget):
                prompts = [self._read(item) for item in batch]
                samples = self.target.capture(
                    prompts,
                    [item.answer.ids.tolist() for item in batch],
                    self.features,
                    self.dtype,
                    [item.prompt.key for item in batch],
                )
                for item, prompt, sample in zip(batch, prompts, samples, strict=True):
                    meta = {**item.meta, **shown(item.prompt, prompt.samplings)}
                    writer.add(dataclasses.replace(sample, meta=meta))
                    result.samples += 1
                    result.tokens += item.tokens
        return result

    def _read(self, item: Item) -> Any:
        """The prompt as it was answered; DataError when it is another now."""
        prompt = self.target.encode(item.prompt.messages)
        if prompt.length != item.answer.prompt_tokens:
            raise DataError(
                f"it has {prompt.length} tokens and had {item.answer.prompt_tokens} when it was "
                "answered: did its image or video change?"
            )
        return prompt

    def _trouble(self, item: Item) -> str:
        """Why a prompt cannot be captured; nothing where it can."""
        try:
            self._read(item)
        except DataError as error:
            return one_line(error)
        return ""


def shown(prompt: Prompt, samplings: Sequence[Any]) -> dict[str, str | int]:
    """Columns of the index: how many images, videos and frames, and which, with the time of each frame."""
    parts = [part for message in prompt.messages for part in message["content"] if part["type"] != "text"]
    videos, media = iter(samplings), list[dict[str, Any]]()
    for part in parts:
        fact: dict[str, Any] = {part["type"]: part["path"]}
        if part["type"] == "video":
            sampling = next(videos)
            fact |= {"of": sampling.total, "fps": sampling.fps}
            fact["seconds"] = [round(second, 3) for second in sampling.seconds]
        media.append(fact)
    return {
        "images": sum(part["type"] == "image" for part in parts),
        "videos": len(samplings),
        "frames": sum(len(sampling.indices) for sampling in samplings),
        "media": json.dumps(media),
    }


def stored_head(target: Any) -> Head:
    """The target's frozen tables as a store keeps them, in the dtype that the target runs in."""
    embed = as_numpy(target.head.embed_VD)
    tied = target.head.lm_head_VD is target.head.embed_VD
    config = target.folder / "generation_config.json"
    return Head(
        embed_VD=embed,
        lm_head_VD=embed if tied else as_numpy(target.head.lm_head_VD),
        dtype=target.dtype_name,
        generation=json.loads(config.read_text()) if config.is_file() else {},
    )


def capture(
    prompts: Sequence[Prompt],
    folder: Path,
    store: str,
    model: str,
    drafters: Sequence[str] | None = None,
    *,
    dtype: str = "bfloat16",
    workers: int | None = None,
    budget: int = 8192,
    shard_bytes: int = 512 * MIB,
    report: Report = lambda done, total, remark: None,
    how: Options | None = None,
    encoding: Mapping[str, str] | None = None,
) -> Summary:
    """Bring the features of all kept answers to `prompts` into `store`.

    `drafters` None means all known ones; `how` says how the target is loaded; `encoding` maps field names to
    `raw`, `zstd` or `int8`, those not named are kept raw, or as in the store that is there. DataError when
    there are no answers, or another target gave them; StoreError when the store is of another target or keeps
    a field in another way. Interrupted, it leaves what is done.
    """
    store = os.path.expanduser(store)
    check_origin(model, folder, store)
    by_key = {prompt.key: prompt for prompt in prompts}
    items = [Item(by_key[answer.key], answer) for answer in answers.read(folder) if answer.key in by_key]
    if not items:
        raise DataError(
            f"{folder} holds no kept answer to any of the {len(prompts)} prompts: nothing to capture"
        )
    local = "://" not in store
    with only_writer(Path(store)) if local else nullcontext():
        if local:
            wait_for_workers(Path(store))
        there = set[str]()
        if (opened := store_at(store)) is not None:
            there = opened.keys()
            check_encoding(opened, chosen(opened, drafters, opened.info), encoding or {})
        missing = [item for item in items if item.prompt.key not in there]
        start, done, tokens, failed = time.monotonic(), len(items) - len(missing), 0, dict[str, str]()
        if missing:
            report(done, len(items), "starting")
            told = str(answers.made_with(folder)[0])
            place = str(Path(store).absolute()) if local else store
            worker = partial(Capturer, absolute(model), place, drafters, dtype, told, budget, how, encoding)
            weights = weights_of(model, how)
            with session(workers, weights) as size, Crew[Unit, Result](worker, size, weights) as crew:
                facts = crew.facts()
                start = time.monotonic()
                for outcome in crew.run(plan(missing, facts, shard_bytes)):
                    done += len(outcome.unit.items)
                    tokens += outcome.result.tokens
                    failed |= outcome.result.failed
                    report(done, len(items), f"{tokens / (time.monotonic() - start):.0f} tokens/s")
        seconds = time.monotonic() - start
        if failed and len(failed) == len(missing):
            key, why = next(iter(failed.items()))
            raise TargetError(f"none of the {len(failed)} samples could be captured; {key}: {why}")
        final = Store.open(store)
        captured = len(missing) - len(failed)
        return Summary(
            store=store,
            features=final.provenance.features,
            samples=len(final.keys()),
            captured=captured,
            failed=failed,
            samples_per_second=captured / seconds if captured else 0.0,
            tokens_per_second=tokens / seconds if captured else 0.0,
            seconds=seconds,
        )


def plan(items: Sequence[Item], facts: dict[str, Any], shard_bytes: int) -> list[Unit]:
    """Units of similar length, each about a shard of `shard_bytes`; the longest first."""
    units: list[Unit] = []
    chunk: list[Item] = []
    size = 0
    for item in sorted(items, key=lambda item: (-item.tokens, item.prompt.key)):
        visual = item.answer.visual_tokens
        weight = (item.tokens - visual) * facts["text_bytes"] + visual * facts["visual_bytes"]
        if chunk and (size + weight > shard_bytes or len(chunk) >= UNIT_SAMPLES):
            units.append(Unit(tuple(chunk), unit_name(chunk)))
            chunk, size = [], 0
        chunk.append(item)
        size += weight
    return [*units, Unit(tuple(chunk), unit_name(chunk))]


def unit_name(items: Iterable[Item]) -> str:
    """A name that follows from the samples: the same unit, captured twice, counts once."""
    return content_hash(sorted(item.prompt.key for item in items))


def check_dtype(there: Store | None, mine: str) -> None:
    """StoreError when the states that are there come from a target that ran in another dtype."""
    if there is not None and (theirs := there.record["head"]["dtype"]) != mine:
        raise StoreError(
            f"{there.path} holds states of a target that ran in {theirs}, and this one runs in {mine}: "
            f"give --target-dtype {theirs}, or another --store"
        )


def check_origin(model: str, folder: Path, store: str) -> None:
    """DataError or StoreError naming the field when the answers or the store are of another target."""
    mine = checkpoint(model)
    answers.check_settings(folder, {"checkpoint": str(mine)})
    there = store_at(store)
    if there is None:
        return
    theirs = there.provenance
    for name in ("config", "weights", "processor"):
        if getattr(theirs, f"{name}_hash") != getattr(mine, name):
            raise StoreError(
                f"{store} is of another target ({name}_hash: {getattr(theirs, f'{name}_hash')}, "
                f"not {getattr(mine, name)}): give another --store"
            )
