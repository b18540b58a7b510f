"""A wheel of vLLM read as source: which names it has, and what our code that runs in vLLM uses of them.

Nothing of it is imported, so a wheel for GPUs, or for another version of torch, is read like any other.
"""

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS, VLLM = "vlmdistill.", "vllm"
Definition = ast.ClassDef | ast.FunctionDef
Assigned = ast.Assign | ast.AnnAssign


class Wheel:
    """The modules of a wheel, by name."""

    def __init__(self, file: Path) -> None:
        self._zip = zipfile.ZipFile(file)
        self._names = set(self._zip.namelist())
        self._read = dict[str, ast.Module | None]()
        self.version = file.name.split("-")[1]

    def module(self, name: str) -> ast.Module | None:
        """The syntax of a module; None if there is none."""
        if name not in self._read:
            path = name.replace(".", "/")
            found = [
                one
                for one in (f"{path}.py", f"{path}/__init__.py")
                if one in self._names
            ]
            self._read[name] = ast.parse(self._zip.read(found[0])) if found else None
        return self._read[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a name is defined, and as what, through any imports; None if a module has no such name."""
        if self.module(f"{module}.{name}"):
            return f"{module}.{name}", self.module(f"{module}.{name}") or ast.Pass()
        tree = self.module(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and (
                source := self._source(module, node)
            ):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(source, alias.name)
            if isinstance(node, Assigned) and name in {
                one.id for one in _targets(node)
            }:
                return module, node
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module of the wheel that an import statement names; None if it is of another package."""
        if not node.level:
            return node.module if (node.module or "").split(".")[0] == VLLM else None
        package = f"{module.replace('.', '/')}/__init__.py" in self._names
        above = module.split(".")[: len(module.split(".")) - node.level + package]
        return ".".join([*above, *filter(None, [node.module])])

    def chain(self, module: str, name: str) -> list[ast.ClassDef]:
        """A class and all those of the wheel that it extends."""
        module, made = self.find(module, name) or (module, None)
        if not isinstance(made, ast.ClassDef):
            return []
        bases = [
            base.value if isinstance(base, ast.Subscript) else base
            for base in made.bases
        ]
        named = [base.id for base in bases if isinstance(base, ast.Name)]
        return [made, *(one for base in named for one in self.chain(module, base))]


def _targets(node: Assigned) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one for one in targets if isinstance(one, ast.Name)]


def members(chain: list[ast.ClassDef]) -> set[str]:
    """Methods, fields, and what methods set on `self`, of a class and those that it extends."""
    found = set[str]()
    for made in chain:
        for node in ast.walk(made):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, Assigned):
                found |= {one.id for one in _targets(node)}
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and _is_self(node.value)
            ):
                found.add(node.attr)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def method(chain: list[ast.ClassDef], name: str) -> ast.FunctionDef | None:
    """The first method of that name."""
    for made in chain:
        for node in made.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
    return None


def accepts(function: ast.FunctionDef, call: ast.Call, bound: bool) -> str:
    """Why a function does not take the arguments of a call; empty if it does, as far as can be told."""
    asked = function.args
    names = [one.arg for one in (*asked.posonlyargs, *asked.args)][bound:]
    given = [one.arg for one in call.keywords]
    positional = [one for one in call.args if not isinstance(one, ast.Starred)]
    if len(positional) > len(names) and not asked.vararg:
        return f"takes {len(names)} arguments, and gets {len(positional)}"
    known = {*names, *(one.arg for one in asked.kwonlyargs)}
    if odd := [one for one in given if one and one not in known and not asked.kwarg]:
        return f"has no argument {odd[0]}"
    if None in given or len(positional) < len(call.args):
        return ""  # *args or **kwargs: anything may be among them
    must = names[len(positional) : len(names) - len(asked.defaults)]
    lacking = [one for one in must if one not in given]
    return f"needs {lacking[0]}" if lacking else ""


@dataclass
class Module:
    """A module of ours that runs in vLLM, and what it uses of a wheel."""

    name: str
    wheel: Wheel
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Local name -> module and name in vLLM."""

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(
            (ROOT / f"{self.name.removeprefix(OURS).replace('.', '/')}.py").read_text()
        )

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Its classes by name."""
        return {
            node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)
        }

    def needs(self) -> Iterator[str]:
        """The modules beside it that it imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                f"{OURS}pipelines.vllm."
            ):
                yield str(node.module)

    def problems(self) -> Iterator[str]:
        """What it uses of vLLM that the wheel does not have, a line each."""
        yield from self._imports()
        for made in self.classes.values():
            if chain := self._chain(made):
                yield from self._class(made, chain)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield from self._attribute(node, node.value.id)
            elif isinstance(node, ast.FunctionDef):
                yield from self._parameters(node)

    def _imports(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == VLLM
            ):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (
                        str(node.module),
                        alias.name,
                    )
                    if self.wheel.find(str(node.module), alias.name) is None:
                        yield f"{self.name}: {node.module} has no {alias.name}"

    def _chain(self, made: ast.ClassDef) -> list[ast.ClassDef]:
        """The classes of vLLM that a class of ours extends, also through ours."""
        found = []
        for base in (base.id for base in made.bases if isinstance(base, ast.Name)):
            if base in self.classes:
                found += self._chain(self.classes[base])
            elif base in self.imported:
                found += self.wheel.chain(*self.imported[base])
        return found

    def _class(self, made: ast.ClassDef, chain: list[ast.ClassDef]) -> Iterator[str]:
        """Methods that vLLM calls, and what is read of `self`."""
        bases = [base.id for base in made.bases if isinstance(base, ast.Name)]
        own = [made, *(self.classes[base] for base in bases if base in self.classes)]
        there, ours = members(chain), members(own)
        read = {
            node.attr
            for node in ast.walk(made)
            if isinstance(node, ast.Attribute)
            and _is_self(node.value)
            and isinstance(node.ctx, ast.Load)
        }
        for name in sorted(read - there - ours):
            yield f"{self.name}: {made.name} reads self.{name}, which {chain[0].name} does not have"
        for node in made.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            if node.name not in there and node.name not in read:
                yield f"{self.name}: nobody calls {made.name}.{node.name}: {chain[0].name} has no such method"
            if (base := method(chain, node.name)) and node.args.args:
                mine = [one.arg for one in node.args.args]
                theirs = [one.arg for one in base.args.args]
                if mine != theirs[: len(mine)] or (
                    len(mine) < len(theirs) and not node.args.vararg
                ):
                    yield f"{self.name}: {made.name}.{node.name}{mine} overrides {theirs}"
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and _is_super(call.func):
                    assert isinstance(call.func, ast.Attribute)
                    base = method(chain, call.func.attr)
                    if base and (why := accepts(base, call, bound=True)):
                        yield f"{self.name}: super().{call.func.attr} of {made.name} {why}"

    def _call(self, node: ast.Call) -> Iterator[str]:
        """Of a function or a class of vLLM."""
        if isinstance(node.func, ast.Name) and node.func.id in self.imported:
            found = self.wheel.find(*self.imported[node.func.id])
            made = found[1] if found else None
            if isinstance(made, ast.ClassDef):
                made = method(
                    self.wheel.chain(*self.imported[node.func.id]), "__init__"
                )
                bound = True
            else:
                bound = False
            if isinstance(made, ast.FunctionDef) and (
                why := accepts(made, node, bound)
            ):
                yield f"{self.name}: {node.func.id} {why}"

    def _attribute(self, node: ast.Attribute, name: str) -> Iterator[str]:
        """Of an imported module or class."""
        if name not in self.imported:
            return
        module, local = self.imported[name]
        found = self.wheel.find(module, local)
        if (
            found
            and isinstance(found[1], ast.Module)
            and self.wheel.find(found[0], node.attr) is None
        ):
            yield f"{self.name}: {found[0]} has no {node.attr}"
        if found and isinstance(found[1], ast.ClassDef):
            chain = self.wheel.chain(module, local)
            if node.attr not in members(chain) and not any(
                "Enum" in ast.unparse(made) for made in chain
            ):
                yield f"{self.name}: {local} has no {node.attr}"

    def _parameters(self, node: ast.FunctionDef) -> Iterator[str]:
        """What is read of parameters whose type is a class of vLLM."""
        for parameter in node.args.args:
            kind = parameter.annotation
            if not (isinstance(kind, ast.Name) and kind.id in self.imported):
                continue
            chain = self.wheel.chain(*self.imported[kind.id])
            has = members(chain)
            for one in ast.walk(node):
                if (
                    isinstance(one, ast.Attribute)
                    and ast.unparse(one.value) == parameter.arg
                ):
                    lacks = [one.attr] if one.attr not in has else []
                elif isinstance(one, ast.Call) and _replaces(one, parameter.arg):
                    lacks = [
                        str(keyword.arg)
                        for keyword in one.keywords
                        if keyword.arg not in has
                    ]
                else:
                    continue
                yield from (
                    f"{self.name}: {kind.id} has no {name}" for name in lacks if chain
                )


def _is_super(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )


def _replaces(call: ast.Call, name: str) -> bool:
    """`replace(name, ...)` or `name.replace(...)`."""
    if isinstance(call.func, ast.Name) and call.func.id == "replace" and call.args:
        return isinstance(call.args[0], ast.Name) and call.args[0].id == name
    return ast.unparse(call.func) == f"{name}.replace"
