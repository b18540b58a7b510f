"""A drafter reads what it declares, all of it and nothing else; and what that takes on disk."""

import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny
from tests.drafters import synthetic
from tests.drafters.synthetic import (
    ALL,
    CASES,
    INFO,
    TRAINED,
    batch,
    begun,
    build,
    plan,
)
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.capabilities import MiddleState
from vlmdistill.drafters.core.config import Stage
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.drafters.training.trainer import train
from vlmdistill.drafters.training.unroll import unroll
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import DataError, TrainingError
from vlmdistill.stores.schema import Feature

EVERYTHING = [Feature.parse(name) for name in ALL]
STAGE = Stage(name="test", hops=3, losses={"regression": 1.0, "cross_entropy": 1.0})
TWO_TURNS, OTHER, PROMPT = "tvvttrrrrrvvvtrrrrr", "tvtrrr", 10


def trained_on(drafter: Drafter, sample: Batch) -> list[Tensor]:
    """Losses of every hop, with noise."""
    stage = (
        replace(STAGE, losses={**STAGE.losses, "middle": 1.0})
        if isinstance(drafter, MiddleState)
        else STAGE
    )
    scores = unroll(
        drafter.train(), sample, stage, torch.Generator().manual_seed(0), noise=0.2
    ).scores
    return [one.loss_R.detach() for one in scores]


def drafted_from(drafter: Drafter, sample: Batch) -> list[Tensor]:
    """The first state and tree after a prompt."""
    draft = begun(drafter.eval(), sample, PROMPT)
    assert draft.state_1D is not None
    return [draft.state_1D, draft.grow(Tree.parse("8-2-2")).ids_N]


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_each_declared_feature_counts_and_no_other_does(
    name: str, settings: dict[str, Any], decoding: bool
) -> None:
    drafter = build(name, **settings)
    needs = drafter.config.needs(INFO, decoding=decoding)
    made = drafted_from if decoding else trained_on
    rich = batch([TWO_TURNS] if decoding else [TWO_TURNS, OTHER], EVERYTHING)
    exact = made(drafter, rich.only(needs))
    for one, other in zip(exact, made(drafter, rich), strict=True):
        assert torch.equal(one, other)
    for feature in needs:
        changed = {**rich.features, feature: rich.features[feature].flip(-1)}
        assert not torch.equal(made(drafter, rich.having(changed))[0], exact[0]), (
            feature
        )
        with pytest.raises(DataError, match=f"lacks {feature.name}"):
            made(drafter, rich.only(needs - {feature}))


class Generous:
    """The same target, which gives a drafter more of a prompt than it asks for."""

    def __init__(self, target: VisionLanguageTarget) -> None:
        self._target = target

    def prefill(
        self,
        prompt: Any,
        features: Collection[Feature],
        *on_encoded: Callable[[], None],
    ) -> Batch:
        more = {*features, *(f for f in EVERYTHING if f.source != "layer3")}
        return self._target.prefill(prompt, more, *on_encoded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@pytest.mark.parametrize("name", sorted({*catalogue.NAMES} - {*TRAINED}))
def test_what_needs_no_training_needs_nothing_of_a_prompt(
    name: str, checkpoint: Callable[..., Path]
) -> None:
    target = load(str(checkpoint("qwen2_5_vl")))
    prompt = target.encode(tiny.message("tell", tiny.picture(56, 84)))
    drafter = catalogue.load(name)(
        catalogue.config(name).model, target.info, target.head
    ).eval()
    assert not any(
        drafter.config.needs(target.info, decoding=one) for one in (False, True)
    )

    def said(one: Any) -> list[tuple[list[int], int]]:
        cycles: list[Cycle] = list(
            speculate(one, drafter, prompt, tree=Tree(8, 2, 2), max_new_tokens=12)
        )
        return [(cycle.ids, cycle.accepted) for cycle in cycles]

    assert said(Generous(target)) == said(target)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of everything."""
    path = tmp_path_factory.mktemp("needs") / "rich"
    synthetic.store(path, 8)
    return path


@pytest.mark.parametrize("name", TRAINED)
def test_a_store_needs_what_is_declared_and_no_more(
    name: str, rich: Path, tmp_path: Path
) -> None:
    """Trained on a store of just that, and on one whose other features are all damaged."""
    needs = {feature.name for feature in catalogue.config(name).model.needs(INFO)}
    synthetic.store(tmp_path / "exact", 8, needs)
    shutil.copytree(rich, tmp_path / "rich")
    (shard,) = (tmp_path / "rich" / "shards").iterdir()
    for chunk in (
        file
        for extra in {*ALL} - needs
        for file in (shard / extra).rglob("*")
        if file.is_file()
    ):
        chunk.write_bytes(b"damaged")
    weights = []
    for store in ("exact", "rich"):
        run = plan(
            tmp_path / store,
            tmp_path / f"{store}-out",
            drafter=name,
            settings=("steps=3",),
        )
        weights.append(load_file(train(run) / "model.safetensors"))
    assert all(
        torch.equal(weight, weights[1][key]) for key, weight in weights[0].items()
    )


@pytest.mark.parametrize("name", TRAINED)
def test_a_store_that_lacks_a_feature_is_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    needs = {feature.name for feature in catalogue.config(name).model.needs(INFO)}
    for feature in needs:
        synthetic.store(tmp_path / feature, 1, {*ALL} - {feature})
        with pytest.raises(TrainingError) as error:
            train(plan(tmp_path / feature, tmp_path / "out", drafter=name))
        assert f"does not hold {feature}, which {catalogue.base(name)} needs" in str(
            error.value
        )
        command = f"`vlmdistill features --for {catalogue.base(name)} --store {tmp_path / feature}`"
        assert command in str(error.value)
        assert "\n" not in str(error.value)
