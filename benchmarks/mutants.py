"""Mutation tests: break each loss in small ways and count the mutants that its tests detect.

Every mutant is one edit of the syntax tree (a sign flipped, an operator swapped, a clip, mask or stop-gradient dropped,
a constant or comparison changed), imported in a forked process instead of the module, whose test file then runs.

    python benchmarks/mutants.py [preference policy ...] [--only dpo ipo] [--jobs 2] [--list]
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ("preference", "unpaired", "policy", "credit", "kl", "supervised", "rows", "advantages", "online")
TESTED_BY = {"advantages": "online"}  # where a module has no test file with its name
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
CONTRARY = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq}
DROPPED = {"clamp", "detach", "masked_fill", "square", "exp", "expm1", "sqrt", "relu", "sigmoid", "where"}
EXCHANGED = {"minimum": "maximum", "maximum": "minimum", "chosen": "rejected", "rejected": "chosen"}

Edit = Callable[[ast.AST], ast.AST]


def edits(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    """The ways to break one node, each with a name."""
    match node:
        case ast.BinOp(op=op) if type(op) in SWAPPED:
            yield "operator", lambda n: ast.BinOp(n.left, SWAPPED[type(n.op)](), n.right)
        case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not()):
            yield "sign", lambda n: n.operand
        case ast.Compare(ops=[op]) if type(op) in CONTRARY:
            yield "comparison", lambda n: ast.Compare(n.left, [CONTRARY[type(n.ops[0])]()], n.comparators)
        case ast.Constant(value=bool()):
            yield "flag", lambda n: ast.Constant(not n.value)
        case ast.Constant(value=int() | float()):
            yield "constant", lambda n: ast.Constant(n.value * 1.5 + 0.1)
        case ast.Call(func=ast.Attribute(attr=name)) if name in DROPPED:
            yield f"without .{name}", lambda n: n.func.value
        case ast.Attribute(attr=name) if name in EXCHANGED:
            yield f"not {name}", lambda n: ast.Attribute(n.value, EXCHANGED[n.attr], n.ctx)
        case ast.IfExp():
            yield "branch", lambda n: n.orelse


def spared(tree: ast.Module) -> set[int]:
    """Nodes whose change no test should detect: annotations, messages, flags that only guard (`strict`, `slots`)."""
    ids: set[int] = set()
    for node in ast.walk(tree):
        roots = [getattr(node, field, None) for field in ("annotation", "returns")]
        if isinstance(node, ast.Raise | ast.JoinedStr) or getattr(node, "arg", None) in ("strict", "slots"):
            roots.append(node)
        ids |= {id(each) for root in roots if root is not None for each in ast.walk(root)}
    return ids


def mutants(source: str, only: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(description, mutated source) of every single edit, in the functions `only` if there are any."""
    tree = ast.parse(source)
    skip = spared(tree)
    if only:
        chosen = [node for node in tree.body if getattr(node, "name", None) in only]
        skip |= {id(node) for node in ast.walk(tree)} - {id(node) for root in chosen for node in ast.walk(root)}
    for index, node in enumerate(list(ast.walk(tree))):
        for which, (name, _) in enumerate(edits(node) if id(node) not in skip else ()):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[index]
            edit = list(edits(target))[which][1]
            code = ast.unparse(ast.fix_missing_locations(_Replace(target, edit(target)).visit(changed)))
            yield f"line {getattr(node, 'lineno', 0)}, {name}", code


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        return self.replacement if node is self.target else super().generic_visit(node)


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `code` under the module's name."""

    def __init__(self, module: str, code: str) -> None:
        self.module, self.code = module, code

    def find_spec(self, name: str, _path: object, _target: object = None) -> object:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: object) -> None:
        exec(compile(self.code, self.module, "exec"), module.__dict__)


def import_libraries(modules: Sequence[str]) -> None:
    """Import what the tests import, once here and not once in each of a thousand children."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("tests.conftest", *(f"tests.algorithms.{test_file(module).stem}" for module in modules)):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] in ("oxrl", "tests")]:
        del sys.modules[name]


def test_file(module: str) -> Path:
    return ROOT / "tests" / "algorithms" / f"test_{TESTED_BY.get(module, module)}.py"


def survives(module: str, code: str) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            sys.meta_path.insert(0, _Instead(f"oxrl.algorithms.{module}", code))
            options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=120"]
            status = int(pytest.main([*options, str(test_file(module))]) != 0)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="module")
    parser.add_argument("--only", nargs="+", default=(), metavar="function", help="mutate these functions alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="count them, run nothing")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if not arguments.list:
        import_libraries(arguments.modules)
    for module in arguments.modules:
        source = (ROOT / "oxrl" / "algorithms" / f"{module}.py").read_text()
        plain = ast.unparse(ast.parse(source)).splitlines()
        created = list(mutants(source, arguments.only))
        if not arguments.list and not survives(module, source):
            sys.exit(f"{test_file(module)} fails without any mutation")
        alive = 0
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(partial(survives, module), [] if arguments.list else [code for _, code in created]))
        for (description, code), survived in zip(created, results, strict=False):
            if survived:
                alive += 1
                changed = [line for line in difflib.ndiff(plain, code.splitlines()) if line[0] == "+"]
                print(f"  {module} survived: {description}: {changed[0][1:].strip() if changed else ''}", flush=True)
        print(
            f"{module}: {len(created)} mutants" + ("" if arguments.list else f", {len(created) - alive} detected"),
            flush=True,
        )


if __name__ == "__main__":
    main()
