"""Which names in tests only check results of the program, as `close` in `r = f(1)`, `assert close(r, 2)`.

Follows values of the program through variables, loops and functions of the tests. A name that is given results of other
functions of the program must be constrained by the tests: its own result is compared with one of their values, or it is
asserted about their values alone, or it must be true of one value and false of another. Otherwise one constant would
satisfy all uses of it, whatever the program computes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_EXPECTED = {"assertTrue": True, "assertIsNotNone": True, "assertFalse": False, "assertIsNone": False}  # of unittest
_COMPARING = ("close", "equal")  # in names of the tests: isclose, assert_allclose, assertAlmostEqual, array_equal
_ASSERTING = ("assert", "check", "ensure", "expect", "verify")  # start of a name that is called for its exceptions


class Origin(NamedTuple):
    """`Origin("area", "result")`: a value is or contains a function of the program, or what it returned.

    `kind` is "function", "instance" (of a class), "result", or "derived": it was given results of other functions.
    """

    name: str
    kind: str


_Origins = frozenset[Origin]
_NONE: _Origins = frozenset()


def checking_names(trees: Sequence[ast.Module], names: set[str], entry_point: str | None) -> set[str]:
    """Those of `names`, which the program may define, that only check its results."""
    flow = _Flow(names | {entry_point} if entry_point else names, entry_point)
    for tree in trees:
        flow.visit(tree)
    for function in flow.uncalled():
        flow.apply(function, {}, _NONE)
    constrained = flow.tested | {name for name, seen in flow.outcomes.items() if {True, False} <= seen}
    return flow.outcomes.keys() - constrained - {entry_point}


class _Flow(ast.NodeVisitor):
    """`visit` returns the origins of an expression."""

    def __init__(self, names: set[str], entry_point: str | None):
        self.names, self.entry_point = names, entry_point
        self.variables: dict[str, _Origins] = {}
        self.functions: dict[str, _Function] = {}  # of the tests
        self.methods: list[_Function] = []
        self.applied: dict[tuple[int, frozenset[tuple[str, _Origins]]], _Origins] = {}
        self.returned = _NONE
        self.branches = 0  # around the current statement
        self.tested: set[str] = set()
        self.outcomes: dict[str, set[bool | None]] = {}  # names given results of others -> what the tests expect of it

    def visit(self, node: ast.AST) -> _Origins:
        origins: _Origins = super().visit(node)
        return origins

    # decisions

    def decide(self, test: ast.expr, expected: bool | None) -> None:
        """The outcome of a test depends on whether this expression is true."""
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                return self.decide(operand, None if expected is None else not expected)
            case ast.BoolOp(values=values) | ast.List(values) | ast.Tuple(values):
                return self._decide_all(values, expected)
            case ast.Call(ast.Name("all" | "any" | "bool"), [ast.List() | ast.Tuple() as values]):
                return self.decide(values, expected)
            case ast.Call(ast.Name("all" | "any" | "bool"), [ast.GeneratorExp() | ast.ListComp() as values]):
                before = self._enter(values.generators)
                self.decide(values.elt, expected)
                self.variables = before
                return None
            case ast.Compare(left, [operator], [right]) if _is_singleton(left) or _is_singleton(right):
                value, constant = (right, left) if _is_singleton(left) else (left, right)
                same = isinstance(operator, ast.Eq | ast.Is) == _is_true(constant)
                return self.decide(value, expected if same or expected is None else not expected)
        for name, kind in self.visit(test):
            if kind == "derived":
                self.outcomes.setdefault(name, set()).add(None if isinstance(test, ast.Compare) else expected)
            elif kind != "function" and not isinstance(test, ast.Compare):
                self.tested.add(name)
        return None

    def _decide_all(self, tests: Iterable[ast.expr], expected: bool | None) -> None:
        for test in tests:
            self.decide(test, expected)

    def compare(self, sides: Sequence[ast.expr]) -> _Origins:
        """A comparison with a value of the tests constrains what is compared."""
        origins = [self.visit(side) for side in sides]
        found = _NONE.union(*origins)
        if any(not each and not _is_singleton(side) for side, each in zip(sides, origins, strict=True)):
            self.tested |= {name for name, kind in found if kind != "function"}
        return found

    def visit_Compare(self, node: ast.Compare) -> _Origins:
        return self.compare([node.left, *node.comparators])

    def visit_Assert(self, node: ast.Assert) -> _Origins:
        self.decide(node.test, expected=True)
        return _NONE

    def visit_IfExp(self, node: ast.IfExp) -> _Origins:
        self.decide(node.test, None)
        return self.visit(node.body) | self.visit(node.orelse)

    def visit_If(self, node: ast.If) -> _Origins:
        fails = [_can_fail(part) for part in (node.body, node.orelse)]
        self.decide(node.test, fails[1] if fails[0] != fails[1] else None)
        return self._branch([*node.body, *node.orelse])

    def visit_While(self, node: ast.While) -> _Origins:
        for _ in range(2):  # a value of one iteration may be used in the next
            self.decide(node.test, None)
            self._branch([*node.body, *node.orelse])
        return _NONE

    # values

    def generic_visit(self, node: ast.AST) -> _Origins:
        return _NONE.union(*[self.visit(child) for child in ast.iter_child_nodes(node)])

    def visit_Name(self, node: ast.Name) -> _Origins:
        name = self.entry_point if node.id == "candidate" and self.entry_point else node.id
        if node.id in self.variables or node.id in self.functions:
            return self.variables.get(node.id, _NONE)
        return frozenset({Origin(name, "function")}) if name in self.names else _NONE

    def visit_Attribute(self, node: ast.Attribute) -> _Origins:
        return _parts(self.visit(node.value))

    def visit_Subscript(self, node: ast.Subscript) -> _Origins:
        return _parts(self.visit(node.value)) | self.visit(node.slice)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> _Origins:
        before = self._enter(node.generators)
        found = self.visit(node.elt)
        self.variables = before
        return found

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815 - the names that ast looks for

    def visit_DictComp(self, node: ast.DictComp) -> _Origins:
        before = self._enter(node.generators)
        found = self.visit(node.key) | self.visit(node.value)
        self.variables = before
        return found

    def _enter(self, generators: Iterable[ast.comprehension]) -> dict[str, _Origins]:
        before = dict(self.variables)
        for each in generators:
            self._bind_items(each.target, each.iter)
            self._decide_all(each.ifs, None)
        return before

    def visit_Lambda(self, node: ast.Lambda) -> _Origins:
        return self.apply(node, {}, _NONE)

    # calls

    def visit_Call(self, node: ast.Call) -> _Origins:
        keywords = [(each.arg, each.value) for each in node.keywords]
        arguments = [*((None, each) for each in node.args), *keywords]
        own = self._function(node.func)
        callee = self.visit(node.func) if own is None else _NONE
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if not callee and own is None and name in _EXPECTED:
            self._decide_all(node.args[:1], _EXPECTED[name])
        elif not callee and own is None and any(part in name.lower() for part in _COMPARING):
            self.compare(node.args)
        given = [_NONE if self._function(value) else self.visit(value) for _, value in arguments]
        found = _NONE.union(*given)
        if name == "partial" and not callee and own is None:
            return found  # it is called later
        results = self._called(callee, found)
        if own is not None:
            results |= self.apply(own, _parameters(own, [key for key, _ in arguments], given), _NONE)
        for number, (_, value) in enumerate(arguments):  # functions that the callee may call
            others = _NONE.union(*given[:number], *given[number + 1 :])
            if isinstance(value, ast.Name | ast.Attribute):
                results |= self._called(frozenset(each for each in given[number] if each.kind == "function"), others)
            if (function := self._function(value)) is not None:
                results |= self.apply(function, {}, others | results)
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) in self.variables:
            self._bind(node.func.value, found, adds=True)  # a list gets another item, say
        return found | results

    def _called(self, callee: _Origins, given: _Origins) -> _Origins:
        """The origins of what these return."""
        found = set()
        for name, kind in callee:
            others = {each.name for each in given if each.kind != "instance"} - {name}
            made = "derived" if others else "instance" if name[:1].isupper() else "result"
            found.add(Origin(name, made if kind == "function" else kind))
        return frozenset(found)

    def _function(self, node: ast.expr) -> _Function | None:
        """The function of the tests that this is."""
        return node if isinstance(node, ast.Lambda) else self.functions.get(getattr(node, "id", ""))

    def apply(self, function: _Function, parameters: dict[str, _Origins], other: _Origins) -> _Origins:
        """Follow the body of a function of the tests; parameters that are not given have the origin `other`."""
        names = [each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)]
        values = {name: parameters.get(name, other) for name in names}
        if self.entry_point and "candidate" in values:
            values["candidate"] |= {Origin(self.entry_point, "function")}
        key = (id(function), frozenset(values.items()))
        if key in self.applied:
            return self.applied[key]
        self.applied[key] = _NONE  # of a recursive call
        before, self.variables = self.variables, {**self.variables, **values}
        outer, self.returned = self.returned, _NONE
        branches, self.branches = self.branches, 0
        for each in function.body if isinstance(function.body, list) else [ast.Return(function.body)]:
            self.visit(each)
        found = self.applied[key] = self.returned
        self.variables, self.returned, self.branches = before, outer, branches
        return found

    def uncalled(self) -> list[_Function]:
        applied = {number for number, _ in self.applied}
        return [each for each in [*self.functions.values(), *self.methods] if id(each) not in applied]

    # statements

    def visit_Expr(self, node: ast.Expr) -> _Origins:
        found = self.visit(node.value)
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id.lower().startswith(_ASSERTING):
            for name in {called.id} & {each.name for each in found if each.kind == "derived"}:
                self.outcomes.setdefault(name, set()).add(None)
        return _NONE

    def visit_Return(self, node: ast.Return | ast.Yield | ast.YieldFrom) -> _Origins:
        if node.value is not None:
            self.returned |= self.visit(node.value)
        return _NONE

    visit_Yield = visit_YieldFrom = visit_Return  # noqa: N815 - the names that ast looks for

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> _Origins:
        if node.name != self.entry_point:  # whose head may be in the prompt
            self.functions[node.name] = node
        return _NONE

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the names that ast looks for

    def visit_ClassDef(self, node: ast.ClassDef) -> _Origins:
        self.methods += [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.variables[node.name] = _NONE
        return _NONE

    def visit_Assign(self, node: ast.Assign) -> _Origins:
        return self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> _Origins:
        return self._assign([node.target], node.value) if node.value else _NONE

    def visit_NamedExpr(self, node: ast.NamedExpr) -> _Origins:
        return self._assign([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> _Origins:
        self._bind(node.target, self.visit(node.value), adds=True)
        return _NONE

    def visit_For(self, node: ast.For | ast.AsyncFor) -> _Origins:
        for _ in range(2):
            self._bind_items(node.target, node.iter)
            self._branch([*node.body, *node.orelse])
        return _NONE

    visit_AsyncFor = visit_For  # noqa: N815 - the names that ast looks for

    def visit_withitem(self, node: ast.withitem) -> _Origins:
        found = self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, found)
        return _NONE

    def visit_Try(self, node: ast.Try) -> _Origins:
        return self._branch([*node.body, *node.handlers, *node.orelse, *node.finalbody])

    def _branch(self, body: Iterable[ast.AST]) -> _Origins:
        self.branches += 1
        for each in body:
            self.visit(each)
        self.branches -= 1
        return _NONE

    # variables

    def _assign(self, targets: Iterable[ast.expr], value: ast.expr) -> _Origins:
        found = _NONE if isinstance(value, ast.Lambda) else self.visit(value)
        for target in targets:
            match target, value:
                case ast.Name(name), ast.Lambda():
                    self.functions[name] = value
                case ast.Tuple(targets_in), ast.Tuple(values) if len(targets_in) == len(values):
                    for each, part in zip(targets_in, values, strict=True):
                        self._bind(each, self.visit(part))
                case _:
                    self._bind(target, found)
        return found

    def _bind(self, target: ast.expr, origins: _Origins, *, adds: bool = False) -> None:
        match target:
            case ast.Name(name):
                kept = self.variables.get(name, _NONE) if adds or self.branches else _NONE
                self.variables[name] = kept | origins
                self.functions.pop(name, None)
            case ast.Tuple(parts) | ast.List(parts):
                for part in parts:
                    self._bind(part, _parts(origins), adds=adds)
            case ast.Starred(value):
                self._bind(value, origins, adds=adds)
            case ast.Attribute(value) | ast.Subscript(value) if origins:  # a part of it changes
                self._bind(value, origins, adds=True)

    def _bind_items(self, target: ast.expr, iterable: ast.expr) -> None:
        """Of each item of the iterable; `zip`, `enumerate` and a list of tuples by column."""
        columns: list[_Origins] = []
        match iterable:
            case ast.Call(ast.Name("zip"), parts):
                columns = [_parts(self.visit(part)) for part in parts]
            case ast.Call(ast.Name("enumerate"), [part, *_]):
                columns = [_NONE, _parts(self.visit(part))]
            case ast.List(rows) | ast.Tuple(rows) if rows and len({_width(row) for row in rows} | {0}) == 2:
                parts_of_rows = [[self.visit(part) for part in getattr(row, "elts", ())] for row in rows]
                columns = [_NONE.union(*column) for column in zip(*parts_of_rows, strict=True)]
        if isinstance(target, ast.Tuple) and len(target.elts) == len(columns):
            for each, origins in zip(target.elts, columns, strict=True):
                self._bind(each, origins)
        else:
            self._bind(target, _parts(self.visit(iterable)))


def _can_fail(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise | ast.Assert) for each in body for node in ast.walk(each))


def _parts(origins: _Origins) -> _Origins:
    """Of an attribute or an item: that of an instance is a result."""
    return frozenset(Origin(name, "result" if kind == "instance" else kind) for name, kind in origins)


def _is_singleton(node: ast.expr) -> bool:
    """True, False or None, or a list of one of them: what a constant check returns, not a value of the tests."""
    if isinstance(node, ast.List | ast.Tuple):
        return len({ast.dump(each) for each in node.elts}) == 1 and _is_singleton(node.elts[0])
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_true(singleton: ast.expr) -> bool:
    return (
        _is_true(singleton.elts[0])
        if isinstance(singleton, ast.List | ast.Tuple)
        else bool(ast.literal_eval(singleton))
    )


def _width(node: ast.expr) -> int:
    return len(node.elts) if isinstance(node, ast.Tuple | ast.List) else 0


def _parameters(function: _Function, keys: Sequence[str | None], given: Sequence[_Origins]) -> dict[str, _Origins]:
    """The origins of its parameters in a call; those of `*args` and `**kwargs` are all that is left."""
    order = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
    named: dict[str, _Origins] = {}
    for number, (key, origins) in enumerate(zip(keys, given, strict=True)):
        parameter = key or (order[number] if number < len(order) else None)
        if parameter is not None:
            named[parameter] = origins
    for rest in (function.args.vararg, function.args.kwarg):
        if rest is not None:
            named[rest.arg] = _NONE.union(*given)
    return named
