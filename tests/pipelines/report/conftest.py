"""The fixtures of evaluations, which reports are made of."""

from tests.pipelines.bench.conftest import save, workspace

__all__ = ["save", "workspace"]
