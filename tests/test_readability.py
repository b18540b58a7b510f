"""The package is written to be read once: few ideas a statement, and names that say something.

Weight is the number of expression nodes of a statement, so that formatting does not change it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for folder in ("src", "stores", "drafters", "pipelines", "cli")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
HEAVY = 25  # expression nodes of a statement that holds several ideas
FEW = 30  # statements of a file that is too short for a mean
SHORT = 3  # lines over which a local name may say nothing
VAGUE = {
    *("one", "ones", "found", "made", "there", "here", "what", "told", "known", "left"),
    *(
        "mine",
        "theirs",
        "others",
        "odd",
        "held",
        "given",
        "taken",
        "had",
        "has",
        "some",
    ),
    *("those", "these", "such", "thing", "things", "more", "it", "that", "this"),
    *("whole", "about", "at_once", "begun", "looked", "asked"),
}
WITHOUT_WEIGHT = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)


def is_weighed(node: ast.AST) -> bool:
    """Statements without definitions, imports and docstrings."""
    if not isinstance(node, ast.stmt) or isinstance(node, WITHOUT_WEIGHT):
        return False
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return not is_docstring


def weight(statement: ast.stmt) -> int:
    """The expressions of a statement, without those of the statements in it."""
    expressions = 0
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        expressions += isinstance(node, ast.expr)
        waiting += ast.iter_child_nodes(node)
    return expressions


def weights(file: Path) -> list[int]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return [weight(node) for node in nodes if is_weighed(node)]  # type: ignore[arg-type]


def local_names(function: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(name, first line, last line) of each name that a function binds."""
    lines = defaultdict(list)
    bound = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            lines[node.id].append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            lines[node.arg].append(node.lineno)
            bound.add(node.arg)
    for name in bound:
        yield name, min(lines[name]), max(lines[name])


def test_a_statement_holds_one_idea() -> None:
    every = [weight for file in FILES for weight in weights(file)]
    assert len(every) > 10_000
    assert mean(every) <= 6.5
    assert sum(weight > HEAVY for weight in every) / len(every) <= 0.007


def test_no_file_is_dense() -> None:
    means = {
        str(file.relative_to(ROOT)): round(mean(own), 1)
        for file in FILES
        if len(own := weights(file)) >= FEW
    }
    assert {file: dense for file, dense in means.items() if dense > 9} == {}


def test_local_names_say_what_they_hold() -> None:
    vague = [
        f"{file.relative_to(ROOT)}:{first} {name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, first, last in local_names(node)
        if name.strip("_") in VAGUE and last - first > SHORT
    ]
    assert vague == []
