"""The names of vLLM that our code replaces are those of the page for vLLM, each with a hook of vLLM's."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "vllm-upstream.md"
NAME = re.compile(r"`([\w.]+)`")


def replaced(tree: ast.Module) -> Iterator[str]:
    """Members of modules and classes of vLLM that a module of ours assigns, by their full names."""
    imported = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in imported:
            owner = imported[node.value.id]
            yield f"{owner}.{node.attr}".removeprefix("vllm.")


def listed() -> set[str]:
    """The names in the first column of the page's table."""
    rows = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return {name for row in rows for name in NAME.findall(row)}


def test_the_page_lists_every_name_of_vllm_that_is_replaced() -> None:
    files = sorted((ROOT / "pipelines" / "vllm").rglob("*.py"))
    found = {name for file in files for name in replaced(ast.parse(file.read_text()))}
    assert found == listed()
    assert len(found) > 5


def test_a_name_that_is_replaced_is_found() -> None:
    source = """
def install():
    from vllm.v1.worker.gpu.spec_decode.eagle import speculator
    from vllm.engine.arg_utils import EngineArgs as Arguments
    speculator.EagleSpeculator = 1
    Arguments.create = 2
    speculator = Arguments
    local.attribute = 3
"""
    assert list(replaced(ast.parse(source))) == [
        "v1.worker.gpu.spec_decode.eagle.speculator.EagleSpeculator",
        "engine.arg_utils.EngineArgs.create",
    ]
