"""Which names in tests belong to the program, and which to the tests although they forgot to import them.

A program must not define what its results are checked with: `isclose` would always be true.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from oxrl.rewards.sandbox.checks import checking_names

_MODULES = {
    name: name
    for name in (
        "bisect", "calendar", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
        "itertools", "json", "math", "numpy", "operator", "os", "random", "re", "statistics", "string", "sys", "time",
        "typing",
    )
} | {"np": "numpy"}  # fmt: skip
_MEMBERS = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "copy": ("deepcopy",),
    "datetime": ("date", "timedelta"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "functools": ("reduce",),
    "itertools": ("combinations", "permutations"),
    "math": ("inf", "isclose", "isinf", "isnan", "nan", "pi", "sqrt"),
    "typing": ("Any", "Dict", "List", "Optional", "Set", "Tuple", "Union"),
}
_MODULE_OF_MEMBER = {member: module for module, members in _MEMBERS.items() for member in members}


class Names(NamedTuple):
    """`Names(("area",), (), "import math")`: functions and classes of the program, its exceptions, missing imports."""

    program: tuple[str, ...]
    exceptions: tuple[str, ...]
    imports: str


def names_in(tests: Sequence[str], trusted: str, entry_point: str | None = None) -> Names:
    """Assign each name that neither Python nor the `trusted` code defines; raises a SyntaxError."""
    trees = [ast.parse(source) for source in [trusted, *tests]]
    free = _undefined(trees)
    imports = {name: f"import {_MODULES[name]} as {name}" for name in free & _MODULES.keys() if _is_module(trees, name)}
    own = {name for name in free - imports.keys() if name == entry_point or name not in _MODULE_OF_MEMBER}
    if own:  # otherwise the program is asked to define what happens to be in the standard library, too
        members = free - imports.keys() - own
        imports |= {name: f"from {_MODULE_OF_MEMBER[name]} import {name}" for name in members}
    raised = {name for name in free if name.endswith(("Error", "Exception"))} | _caught(trees)
    exceptions = (raised & free) - imports.keys() - {entry_point}
    program = free - imports.keys() - exceptions
    own = program - checking_names(trees, program, entry_point)
    return Names(tuple(sorted(own)), tuple(sorted(exceptions)), "\n".join(sorted(imports.values())))


def undefined_names(tests: Sequence[str], trusted: str) -> set[str]:
    """Names that the tests use and that neither Python nor the `trusted` code defines."""
    return _undefined([ast.parse(source) for source in [trusted, *tests]])


def _nodes(trees: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


def _undefined(trees: Sequence[ast.AST]) -> set[str]:
    """Names that a tree uses and that neither it nor an earlier one defines: a later test may import them again."""
    undefined: set[str] = set()
    defined: set[str] = set(dir(builtins))
    for tree in trees:
        used: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
        undefined |= used - defined
    return undefined


def _is_module(trees: Sequence[ast.AST], name: str) -> bool:
    """Whether the name is only ever followed by a dot."""
    bases = {id(node.value) for node in _nodes(trees) if isinstance(node, ast.Attribute)}
    return all(id(node) in bases for node in _nodes(trees) if isinstance(node, ast.Name) and node.id == name)


def _caught(trees: Sequence[ast.AST]) -> set[str]:
    kinds = [node.type for node in _nodes(trees) if isinstance(node, ast.ExceptHandler) and node.type is not None]
    return {node.id for node in _nodes(kinds) if isinstance(node, ast.Name)}
