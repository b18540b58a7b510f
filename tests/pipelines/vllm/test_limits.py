"""What the plugin does not support is refused by name, before a request is served."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO
from vlmdistill.drafters.core.serving import KEY, Built, Feeding
from vlmdistill.pipelines.cluster.engine_environment import SUPPORTED
from vlmdistill.pipelines.targets.checkpoints import fingerprint as fingerprints
from vlmdistill.pipelines.targets.checkpoints.fingerprint import fingerprint
from vlmdistill.pipelines.targets.checkpoints.template import template_of
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.vllm import plugin
from vlmdistill.pipelines.vllm.plugin.limits import (
    OTHER_TARGET,
    check,
    check_limits,
    check_version,
    drafter_of,
    feeding_of,
)
from vlmdistill.stores.schema import HASH_DIGITS, Provenance

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
    method: str = "eagle",
    **parallel: int,
) -> Any:
    """A configuration of vLLM, as far as the plugin reads it."""
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds}
    drafter = SimpleNamespace(
        hf_config=SimpleNamespace(**({KEY: feeding} if feeding else {}))
    )
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=drafter,
            num_speculative_tokens=drafted,
            enable_adaptive_verification=adaptive,
            method=method,
        ),
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=whole),
        use_v2_model_runner=v2,
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
    )


def test_three_versions_are_supported() -> None:
    assert [
        check_version(version) for version in ("0.31.2", "0.32.1+cpu", "0.33.0")
    ] == [*SUPPORTED]
    for version in ("0.30.2", "0.320.0", "0.34.0", "1.0"):
        with pytest.raises(
            ValueError, match=rf"0\.32 or 0\.33, and this is vLLM {version}: install"
        ):
            check_version(version)


def test_each_version_has_a_module() -> None:
    there = {file.stem for file in Path(plugin.__file__).parent.glob("v*_*.py")}
    assert there == {f"v{version.replace('.', '_')}" for version in SUPPORTED}


def test_what_runs_is_not_refused() -> None:
    check_limits(settings(), SPARROW)
    check_limits(settings(v2=True), SPARROW)
    check_limits(settings(v2=True, method="dspark"), SPARROW)
    check_limits(settings(method="dflash"), SPARROW)
    check_limits(settings(caching=True, data_parallel_size=2), EAGLE2)
    check_limits(settings(whole=True), WHOLE)
    check_limits(settings(tensor_parallel_size=2), SPARROW)
    check_limits(
        settings(drafted=5), Feeding(drafter="heads", visual="unread", draft_tokens=5)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v2": True, "adaptive": True}, "enable_adaptive_verification"),
        ({"v2": True, "data_parallel_size": 2}, "data_parallel_size=2: set it to 1"),
        (
            {"method": "dspark"},
            "V1 runner has no dspark: start vLLM with VLLM_USE_V2_MODEL_RUNNER=1",
        ),
        (
            {"caching": True},
            "sparrow drops visual tokens .* --no-enable-prefix-caching",
        ),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4: set it to 1"),
    ],
)
def test_what_does_not_run_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_limits(settings(**change), SPARROW)


def test_a_runner_that_is_not_supported_is_refused() -> None:
    check(settings(v2=False), pytest.fail, v2_only=True)  # a drafter of other origin
    with pytest.raises(ValueError, match="run on the V2 runner alone"):
        check(settings(msgspec.to_builtins(SPARROW)), pytest.fail, v2_only=True)


def test_what_one_drafter_needs_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"compresses an image .* --disable-chunked-mm-input"
    ):
        check_limits(settings(), WHOLE)
    with pytest.raises(
        ValueError,
        match=r"num_speculative_tokens=6, and heads .* 5 tokens: set it to 5",
    ):
        check_limits(
            settings(drafted=6),
            Feeding(drafter="heads", visual="unread", draft_tokens=5),
        )


def of_demo() -> Provenance:
    hashes = fingerprint(EMBEDDED["demo-small"], template_of(EMBEDDED["demo-small"]))
    return replace(
        synthetic.provenance(),
        target="demo-small",
        config_hash=hashes.config,
        weights_hash=hashes.weights,
        template_hash=hashes.template,
    )


def beside(target: str | Path, trained: Provenance | None) -> list[str]:
    """Let the plugin check a drafter beside a target; the warnings."""
    warned = list[str]()
    config = settings(msgspec.to_builtins(replace(EAGLE2, trained=trained)))
    config.model_config = SimpleNamespace(model=str(target))
    check(config, warned.append)
    return warned


def test_a_drafter_beside_another_target_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(EMBEDDED["demo-small"], copy)
    assert beside(copy, of_demo()) == []
    assert (
        "chat template is not the one"
        in beside(copy, replace(of_demo(), template_hash="0" * 16))[0]
    )
    with pytest.raises(
        ValueError,
        match=r"eagle2 was trained for another target \(demo-small\): config_hash of",
    ):
        beside(EMBEDDED["demo-video"], of_demo())
    weights = load_file(copy / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"weights_hash .* or set {OTHER_TARGET}=1"):
        beside(copy, of_demo())
    monkeypatch.setenv(OTHER_TARGET, "1")
    assert "weights_hash" in beside(copy, of_demo())[0]


def test_a_drafter_of_an_earlier_version_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its export has the hash that begins today's of large files."""
    monkeypatch.setattr(fingerprints, "SMALL", 1 << 20)
    copy = tmp_path / "copy"
    shutil.copytree(EMBEDDED["demo-small"], copy)
    whole = of_demo()
    former = whole.weights_hash[:HASH_DIGITS]
    assert former != whole.weights_hash
    assert beside(copy, replace(whole, weights_hash=former)) == []
    other = "0" * HASH_DIGITS
    with pytest.raises(ValueError, match="weights_hash"):
        beside(copy, replace(whole, weights_hash=other))


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(ValueError, match="names no target: export it again"):
        beside(EMBEDDED["demo-small"], None)
    assert "not in" in beside("Qwen/Qwen2.5-VL-7B-Instruct", of_demo())[0]


def test_a_drafter_of_other_origin_is_left_to_vllm() -> None:
    assert feeding_of(settings()) is None
    assert feeding_of(SimpleNamespace(speculative_config=None)) is None
    assert feeding_of(settings({"drafter": "sparrow", "visual": "dropped"})) == SPARROW
    with pytest.raises(
        ValueError, match=r"config.json of the drafter: .*visual.* export it again"
    ):
        feeding_of(settings({"drafter": "sparrow", "visual": "blurred"}))


def test_an_export_of_another_version_is_refused_in_one_line() -> None:
    old = {"drafter": "hivis", "visual": "dropped", "after_image": "text", "guesses": 4}
    with pytest.raises(
        ValueError, match=r"config.json of the drafter: .*export it again"
    ):
        feeding_of(settings(old))
    for name, config in (
        ("hivis", {"later": 1}),
        ("hivis", {"threshold": -1}),
        ("unknown", {}),
    ):
        feeding = Feeding(
            drafter=name, visual="dropped", built=Built(config=config, target=INFO)
        )
        with pytest.raises(
            ValueError, match=r"config.json of the drafter: .*export it again"
        ):
            drafter_of(feeding)


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())[
        "project"
    ]
    module, _, name = project["entry-points"]["vllm.general_plugins"][
        "vlmdistill"
    ].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_plugin_needs_nothing_that_vllm_does_not_install() -> None:
    """vlmdistill is installed without its dependencies in the engine's environment."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())[
        "project"
    ]
    extras = (
        line
        for name in ("capture", "train", "eval")
        for line in project["optional-dependencies"][name]
    )
    names = {
        re.split(r"[\W]", line, maxsplit=1)[0].lower()
        for line in (*project["dependencies"], *extras)
    }
    absent = sorted(
        names - {"torch", "transformers", "msgspec", "safetensors", "numpy", "pillow"}
    )
    assert "ray" in absent
    package = "vlmdistill.pipelines.vllm.plugin"
    code = "; ".join(
        [
            "import sys",
            *(f"sys.modules[{name!r}] = None" for name in absent),
            *(
                f"import {package}.{module}"
                for module in ("register", "entry_map", "feeder", "limits")
            ),
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
