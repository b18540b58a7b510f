"""`make test-engine`: vLLM serves block drafters, and accepts what our own decoder accepts.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from tests.engines.serving import Served, check_caching, noise, v2_runner
from vlmdistill.pipelines.cluster.engine_environment import engine_python

__all__ = ["v2_runner"]

SMALL = ["--set", "layers=2"]
WHOLE = [*SMALL, "--set", "context=all", "--set", "positions=expanded"]
DRAFTERS = {
    "dflash:whole": WHOLE,
    "dflash:token": [*WHOLE, "--set", "mask=3", "--set", "block=5"],
    "dflash:text": SMALL,
    "dspark:whole": [*WHOLE, "--set", "mask=3"],
    "dspark:text": [*SMALL, "--set", "from_anchor=false"],
}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine_python()  # fails at once without one
    # EAGLE-3 has the states of the same layers at visual positions.
    return Served(
        tmp_path_factory.mktemp("blocks"), ["dflash", "eagle3"], DRAFTERS, prompts=12
    )


@pytest.mark.parametrize(
    "name", [name for name in DRAFTERS if name.startswith("dflash")]
)
def test_the_engine_accepts_exactly_what_our_decoder_accepts(
    name: str, served: Served
) -> None:
    """The layers of the target, the mask, a block that sees itself, the target's LM head."""
    found = served.check(name, served.job)
    assert found.identical == found.prompts
    assert found.engine == found.ours
    assert found.engine.accepted > 0


@pytest.mark.parametrize("name", ["dflash:whole", "dflash:text"])
def test_a_prompt_read_in_several_steps_drafts_the_same(
    name: str, served: Served
) -> None:
    found = served.check(name, changed(served.job, step_tokens=16, batch=3), prompts=10)
    assert found.identical == found.prompts
    assert found.engine == found.ours


def test_prompts_from_the_prefix_cache_draft_the_same_and_so_they_do_after_a_reset(
    served: Served,
) -> None:
    check_caching("dflash:whole", served)


@pytest.mark.parametrize("name", ["dflash:whole", "dflash:text"])
def test_a_running_engine_takes_over_another_version(
    name: str, served: Served, tmp_path: Path
) -> None:
    """It then drafts as one that was started with it, from entries that its copies of weights write."""
    first = noise(served.exported(name), tmp_path / "first")
    found = served.check(name, changed(served.job, first=str(first)), prompts=10)
    assert found.identical == found.prompts
    assert found.engine == found.ours


@pytest.mark.usefixtures("v2_runner")
@pytest.mark.parametrize("name", ["dspark:whole", "dspark:text", "dflash:text"])
def test_the_v2_runner_takes_over_another_version(
    name: str, served: Served, tmp_path: Path
) -> None:
    first = noise(served.exported(name), tmp_path / "first")
    found = served.check(
        name, changed(served.job, max_new_tokens=24, first=str(first)), prompts=4
    )
    assert found.identical == found.prompts
    assert found.engine.drafts == found.ours.drafts


@pytest.mark.usefixtures("v2_runner")
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("dspark:whole", 0),
        ("dspark:text", 16),
        ("dflash:whole", 0),
        ("dflash:text", 16),
    ],
)
def test_the_v2_runner_accepts_the_same(name: str, tokens: int, served: Served) -> None:
    """It alone has DSpark."""
    found = served.check(
        name, changed(served.job, max_new_tokens=24, step_tokens=tokens), prompts=10
    )
    assert found.identical == found.prompts
    # vLLM counts what it accepts beyond the limit of a response.
    assert found.engine.drafts == found.ours.drafts
    assert found.engine.accepted > 0
