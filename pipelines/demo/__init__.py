"""The embedded targets: small Qwen2.5-VL models that the project trains on scenes it draws itself."""

from pathlib import Path

_HERE = Path(__file__).parent
EMBEDDED = {"demo": _HERE / "images", "demo-video": _HERE / "videos"}
"""Their checkpoint folders by name: `demo` knows images, `demo-video` videos as well."""
