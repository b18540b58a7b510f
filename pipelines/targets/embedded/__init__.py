"""The embedded targets: checkpoints of small Qwen2.5-VL models, made by `examples/demo_target`."""

from collections.abc import Iterable
from pathlib import Path

_HERE = Path(__file__).parent
EMBEDDED = {name: _HERE / name for name in ("demo", "demo-small", "demo-video")}
"""Their checkpoint folders by name: `demo` and `demo-small` know images, `demo-video` videos as well.
`demo` has six times the parameters of `demo-small`, so that its steps cost products rather than calls."""
LIMITS = "{} knows pictures of coloured shapes alone"
KNOWN = ("demo", "self", "traffic-")
"""The beginnings of the datasets that an embedded target may know."""


def limits(model: str) -> str:
    """What an embedded target knows; an empty text for another target."""
    return LIMITS.format(model) if model in EMBEDDED else ""


def ignorance(model: str, datasets: Iterable[str]) -> str:
    """What an embedded target knows, if one of the datasets is beyond that; else an empty text."""
    unknown = [name for name in datasets if not name.startswith(KNOWN)]
    if model not in EMBEDDED or not unknown:
        return ""
    return f"{limits(model)}: its responses to {unknown[0]} show the steps, not what a target can see"
