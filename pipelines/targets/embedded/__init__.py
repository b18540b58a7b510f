"""The embedded targets: checkpoints of small Qwen2.5-VL models, made by `examples/demo_target`."""

from pathlib import Path

_HERE = Path(__file__).parent
EMBEDDED = {name: _HERE / name for name in ("demo", "demo-small", "demo-video")}
"""Their checkpoint folders by name: `demo` and `demo-small` know images, `demo-video` videos as well.
`demo` has six times the parameters of `demo-small`, so that its steps cost products rather than calls."""
