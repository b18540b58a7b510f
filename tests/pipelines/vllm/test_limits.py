"""What the plugin does not support is refused by name, before a request is served."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.drafters.synthetic import INFO
from vlmdistill.drafters.core.serving import KEY, Built, Feeding
from vlmdistill.pipelines.vllm.plugin.limits import check_limits, check_version, drafter_of, feeding_of

SPARROW = Feeding(drafter="sparrow", visual="dropped")
EAGLE2 = Feeding(drafter="eagle2", visual="fused")


WHOLE = Feeding(drafter="whole", visual="dropped", whole_images=True)


def settings(
    feeding: object = None,
    *,
    v2: bool = False,
    adaptive: bool = False,
    caching: bool = False,
    drafted: int = 4,
    whole: bool = False,
    **parallel: int,
) -> Any:
    """A configuration of vLLM, as far as the plugin reads it."""
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds}
    drafter = SimpleNamespace(hf_config=SimpleNamespace(**({KEY: feeding} if feeding else {})))
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=drafter, num_speculative_tokens=drafted, enable_adaptive_verification=adaptive
        ),
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=whole),
        use_v2_model_runner=v2,
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
    )


def test_one_version_is_supported() -> None:
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    for version in ("0.31.2", "0.320.0", "0.33.0", "1.0"):
        with pytest.raises(ValueError, match=rf"vLLM 0\.32, and this is vLLM {version}: install"):
            check_version(version)


def test_what_runs_is_not_refused() -> None:
    check_limits(settings(), SPARROW)
    check_limits(settings(v2=True), SPARROW)
    check_limits(settings(caching=True, data_parallel_size=2), EAGLE2)
    check_limits(settings(whole=True), WHOLE)
    check_limits(settings(drafted=5), Feeding(drafter="heads", visual="unread", draft_tokens=5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v2": True, "adaptive": True}, "enable_adaptive_verification"),
        ({"v2": True, "data_parallel_size": 2}, "data_parallel_size=2: set it to 1"),
        ({"caching": True}, "sparrow drops visual tokens .* --no-enable-prefix-caching"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: set it to 1"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4: set it to 1"),
    ],
)
def test_what_does_not_run_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_limits(settings(**change), SPARROW)


def test_what_one_drafter_needs_is_named() -> None:
    with pytest.raises(ValueError, match=r"compresses an image .* --disable-chunked-mm-input"):
        check_limits(settings(), WHOLE)
    with pytest.raises(ValueError, match=r"num_speculative_tokens=6, and heads .* 5 tokens: set it to 5"):
        check_limits(settings(drafted=6), Feeding(drafter="heads", visual="unread", draft_tokens=5))


def test_a_drafter_of_other_origin_is_left_to_vllm() -> None:
    assert feeding_of(settings()) is None
    assert feeding_of(SimpleNamespace(speculative_config=None)) is None
    assert feeding_of(settings({"drafter": "sparrow", "visual": "dropped"})) == SPARROW
    with pytest.raises(ValueError, match=r"config.json of the drafter: .*visual.* export it again"):
        feeding_of(settings({"drafter": "sparrow", "visual": "blurred"}))


def test_an_export_of_another_version_is_refused_in_one_line() -> None:
    old = {"drafter": "hivis", "visual": "dropped", "after_image": "text", "guesses": 4}
    with pytest.raises(ValueError, match=r"config.json of the drafter: .*export it again"):
        feeding_of(settings(old))
    for name, config in (("hivis", {"later": 1}), ("hivis", {"threshold": -1}), ("unknown", {})):
        feeding = Feeding(drafter=name, visual="dropped", built=Built(config=config, target=INFO))
        with pytest.raises(ValueError, match=r"config.json of the drafter: .*export it again"):
            drafter_of(feeding)


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["vlmdistill"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_plugin_needs_nothing_that_vllm_does_not_install() -> None:
    """vlmdistill is installed without its dependencies in the engine's environment."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = (
        line for name in ("capture", "train", "eval") for line in project["optional-dependencies"][name]
    )
    names = {re.split(r"[\W]", line, maxsplit=1)[0].lower() for line in (*project["dependencies"], *extras)}
    absent = sorted(names - {"torch", "transformers", "msgspec", "safetensors", "numpy", "pillow"})
    assert "ray" in absent
    package = "vlmdistill.pipelines.vllm.plugin"
    code = "; ".join(
        [
            "import sys",
            *(f"sys.modules[{name!r}] = None" for name in absent),
            *(f"import {package}.{module}" for module in ("register", "entry_map", "feeder", "limits")),
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
