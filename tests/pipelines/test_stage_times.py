"""The minutes of a run's stages are those that passed, each counted once."""

from contextlib import nullcontext

from hypothesis import given
from hypothesis import strategies as st

from vlmdistill.pipelines.stage_times import StageTimes
from vlmdistill.stores.progress import silent


def test_a_stage_lasts_from_the_end_of_the_one_before_it() -> None:
    clock = iter([100.0, 112.0, 142.0, 202.0, 214.0])
    times = StageTimes(lambda: next(clock))
    bar = times.timed(lambda action, unit, kept_in="": nullcontext(silent))
    for unit in ("rows", "responses", "steps", "steps"):
        with bar("working on", unit):
            pass
    assert times.minutes() == {
        "prompts": 0.2,
        "responses": 0.5,
        "training": 1.2,
        "total": 1.9,
    }


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=9))
def test_the_minutes_that_are_shown_add_up_to_the_total(seconds: list[float]) -> None:
    clock = [0.0]
    times = StageTimes(lambda: clock[0])
    for stage, passed in enumerate(seconds):
        clock[0] += passed
        times.end(f"stage {stage % 4}")
    minutes = times.minutes()
    total = minutes.pop("total")
    assert f"{sum(minutes.values()):.1f}" == f"{total:.1f}"
    assert abs(total - sum(seconds) / 60) < 0.051
