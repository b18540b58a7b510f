"""The engine environment: found, or refused with what to do."""

from pathlib import Path

import pytest

from vlmdistill.pipelines.cluster import engine_environment as environment
from vlmdistill.stores.errors import TargetError


def test_without_the_environment_the_error_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(
        TargetError, match=r"no engine environment at .*/python: run `make engine`"
    ):
        environment.engine_python()


@pytest.mark.parametrize(
    ("printed", "words"), [("", "no vLLM"), ("0.30.2", "vLLM 0.30.2")]
)
def test_another_version_of_vllm_is_refused(
    printed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {printed}\n")
    python.chmod(0o755)
    monkeypatch.setenv(environment.VARIABLE, str(python))
    with pytest.raises(
        TargetError,
        match=f"has {words}, and vLLM 0.31, 0.32 or 0.33 is supported: run `make",
    ):
        environment.engine_python()
