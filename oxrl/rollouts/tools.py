"""Tool calls to results: execution, schemas, and a calculator. Calls are parsed in `tool_calls`.

Tools are plain Python functions. Every failure of a call (invalid JSON, an unknown tool, wrong arguments, an exception,
a time-out) is a result that the model reads, never an exception.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import re
import types
import typing
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import anyio

from oxrl.concurrency import in_thread, is_cancelled, run_blocking
from oxrl.data.media import as_media
from oxrl.data.parts import Content
from oxrl.names import error_text
from oxrl.rollouts.episode import EpisodeError
from oxrl.rollouts.tool_calls import ToolCall
from oxrl.types import Media, Message

T = TypeVar("T")


class ToolResult(NamedTuple):
    """`ToolResult(call, "4")`; `error` is the kind of failure: "malformed", "unknown tool", "time-out", ..."""

    call: ToolCall
    content: str
    error: str | None = None
    media: tuple[Media, ...] = ()  # images or sounds, after the text

    def to_message(self) -> Message:
        known = {"name": self.call.name, "tool_call_id": self.call.id}
        content: Content = self.content
        if self.media:
            text: list[dict[str, Any]] = [{"type": "text", "text": self.content}] if self.content else []
            content = [*text, *({"type": medium.kind, medium.kind: medium} for medium in self.media)]
        return Message("tool", content, {key: value for key, value in known.items() if value})


Tool: TypeAlias = Callable[..., Any]
ToolExecutor: TypeAlias = Callable[[Sequence[ToolCall], Mapping[str, Tool]], Any] | Callable[[Sequence[ToolCall]], Any]
"""(calls, tools by name) or (calls) -> one `ToolResult` or text per call, in order; sync or async."""
ToolTracker: TypeAlias = Callable[[Sequence[ToolResult]], Mapping[str, Any]]
"""All results of an episode -> entries for its metadata; plain JSON."""


async def execute_functions(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool] | Sequence[Tool],
    *,
    time_limit: float = 30.0,
    max_chars: int = 8_000,
) -> list[ToolResult]:
    """Execute calls in order and return one result per call; `time_limit` is in seconds per call.

    Async functions are awaited, others run in a thread. A thread that exceeds the limit is abandoned: Python cannot
    stop it.
    """
    known = by_name(tools)
    return [await _execute(call, known, time_limit, max_chars) for call in calls]


async def _execute(call: ToolCall, tools: Mapping[str, Tool], time_limit: float, max_chars: int) -> ToolResult:
    if call.error is not None:
        return ToolResult(call, f"error: {call.error}", "malformed")
    if call.name not in tools:
        there = ", ".join(tools) or "none"
        return ToolResult(call, f"error: there is no tool {_short(call.name)}; there are: {there}", "unknown tool")
    tool = tools[call.name]
    try:
        arguments = fitting_arguments(tool, call.arguments)
    except (ValueError, RecursionError) as error:
        return ToolResult(call, _cut(f"error: {error}", max_chars), "wrong arguments")
    try:
        with anyio.move_on_after(time_limit) as scope:
            value = await called(tool, **arguments)
    except EpisodeError:  # there is no tool any more: what it would have answered is not known
        raise
    except (Exception, SystemExit, CancelledError) as error:  # a tool may raise anything; the model gets the message
        if isinstance(error, CancelledError) and is_cancelled():
            raise
        return ToolResult(call, _cut(f"error: {error_text(error)}", max_chars), "exception")
    if scope.cancelled_caught:
        return ToolResult(call, f"error: {call.name} took longer than {time_limit:g} s", "time-out")
    result = _result(call, value)
    return result._replace(content=_cut(result.content, max_chars))


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the function's value: awaited if it is async, else run in a thread that can be abandoned."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await in_thread(partial(function, *args, **kwargs))
    return await value if inspect.isawaitable(value) else value


def execute_tools(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool] | Sequence[Tool] = (),
    *,
    tool_executor: ToolExecutor = execute_functions,
) -> list[ToolResult]:
    """Execute calls from synchronous code; `execute_functions` is the async equivalent."""
    return run_blocking(execute_with, tool_executor, calls, by_name(tools))


async def execute_with(
    tool_executor: ToolExecutor, calls: Sequence[ToolCall], tools: Mapping[str, Tool]
) -> list[ToolResult]:
    """Run the executor and check that it returns one result per call."""
    value = tool_executor(*((calls, tools) if _takes_tools(tool_executor) else (calls,)))
    results = list(await value if inspect.isawaitable(value) else value)
    if len(results) != len(calls):
        raise ValueError(f"tool_executor returned {len(results)} results for {len(calls)} calls; return one per call")
    return [
        each if isinstance(each, ToolResult) else _result(call, each) for call, each in zip(calls, results, strict=True)
    ]


def _takes_tools(tool_executor: Callable[..., Any]) -> bool:
    try:
        inspect.signature(tool_executor).bind((), {})
    except TypeError:
        return False
    return True


def count_tool_calls(results: Sequence[ToolResult]) -> dict[str, Any]:
    """`{"tool_calls": 2, "tool_errors": 1, "tools": {"calculator": 2}, "tool_error_kinds": {"time-out": 1}}`."""
    errors = Counter(result.error for result in results if result.error is not None)
    return {
        "tool_calls": len(results),
        "tool_errors": errors.total(),
        "tools": dict(Counter(result.call.name for result in results)),
        "tool_error_kinds": dict(errors),
    }


def track_tool_calls(results: Sequence[ToolResult], *, tool_tracker: ToolTracker = count_tool_calls) -> dict[str, Any]:
    """Return the tracker's metadata for these results."""
    return dict(tool_tracker(results))


def execute_and_track_tools(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool] | Sequence[Tool] = (),
    *,
    tool_executor: ToolExecutor = execute_functions,
    tool_tracker: ToolTracker = count_tool_calls,
) -> tuple[list[ToolResult], dict[str, Any]]:
    """Execute calls and return their results and the tracker's metadata."""
    results = execute_tools(calls, tools, tool_executor=tool_executor)
    return results, track_tool_calls(results, tool_tracker=tool_tracker)


def by_name(tools: Mapping[str, Tool] | Sequence[Tool]) -> dict[str, Tool]:
    """`by_name([calculator]) == {"calculator": calculator}`."""
    if isinstance(tools, Mapping):
        return dict(tools)
    named = {tool.__name__: tool for tool in tools}
    if len(named) < len(tools):
        raise ValueError(f"two tools have the same name ({', '.join(named)}); give a mapping from names to functions")
    return named


def tool_schema(tool: Tool, name: str = "") -> dict[str, Any]:
    """Return a function's JSON schema, from its signature and docstring (lines `name: description`).

    A tool of another program has it as its attribute `schema`.
    """
    if isinstance(own := getattr(tool, "schema", None), Mapping):
        return dict(own)
    hints = _hints(tool)
    about = inspect.getdoc(tool) or ""
    properties, required = {}, []
    for parameter in _named_parameters(tool):
        described = re.search(rf"^\s*{parameter.name}\s*(?:\([^)]*\))?:\s*(.+)$", about, re.MULTILINE)
        schema = _type_schema(hints.get(parameter.name, Any))
        properties[parameter.name] = {**schema, "description": described[1].strip()} if described else schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    function = {
        "name": name or tool.__name__,
        "description": " ".join(about.split("\n\n")[0].split()),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        given = [_type_schema(each) for each in inner if each is not type(None)]
        return given[0] if len(given) == 1 else {"anyOf": given}
    schema = {"type": _TYPES[origin or hint]} if (origin or hint) in _TYPES else {}
    if schema.get("type") == "array" and inner and (items := _type_schema(inner[0])):
        return {**schema, "items": items}
    return schema


def _named_parameters(tool: Tool) -> list[inspect.Parameter]:
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter for parameter in inspect.signature(tool).parameters.values() if parameter.kind in fixed]


def _hints(tool: Tool) -> dict[str, Any]:
    try:
        return typing.get_type_hints(tool)
    except (NameError, TypeError):  # unresolvable names, or an object without annotations
        return {}


def fitting_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments converted to the types of the function's signature; ValueError if they do not fit."""
    given = {str(key): value for key, value in arguments.items()}
    try:
        inspect.signature(tool).bind(**given)
    except TypeError as error:
        takes = ", ".join(parameter.name for parameter in _named_parameters(tool)) or "nothing"
        raise ValueError(f"wrong arguments: {error}; it takes: {takes}") from error
    hints = _hints(tool)
    return {key: _fitting(key, value, hints.get(key, Any)) for key, value in given.items()}


def _fitting(key: str, value: Any, hint: Any) -> Any:
    """Convert `"3"` to 3 for a number, since tags have no types; refuse other types."""
    either = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [typing.get_origin(each) or each for each in either]
    wanted = tuple(kind for kind in kinds if kind in _TYPES)
    if len(wanted) < len(kinds):  # a type outside of JSON: left to the function
        return value
    if isinstance(value, str) and str not in wanted:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = {"true": True, "false": False}.get(value.strip().lower(), value)
    allowed = (*wanted, *((int,) if float in wanted else ()), *((list,) if tuple in wanted else ()))
    if isinstance(value, allowed) and (bool in wanted or not isinstance(value, bool)):
        return value
    names = " or ".join(_TYPES[kind] for kind in wanted)
    raise ValueError(f"wrong arguments: {key} should be of type {names}, but is {_short(repr(value))}")


def _result(call: ToolCall, value: Any) -> ToolResult:
    try:
        texts, media = _media_in(value)
        return ToolResult(call, "\n".join(texts) if media else _as_text(value), media=media)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the `__str__` of a result may raise anything
        return ToolResult(call, f"error: {error_text(error)}", "exception")


def _media_in(value: Any) -> tuple[list[str], tuple[Media, ...]]:
    """Texts and media of a result that is an image of PIL, `Media`, or a list with such; else no media."""
    several = list(value) if isinstance(value, list | tuple) and not isinstance(value, Media) else [value]
    media = [each for each in several if isinstance(each, Media) or _is_picture(each)]
    texts = [_as_text(each) for each in several if not isinstance(each, Media) and not _is_picture(each)]
    return (texts, tuple(as_media(each, "image") for each in media)) if media else ([], ())


def _is_picture(value: Any) -> bool:
    """Whether it is an image of PIL, which need not be installed."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {len(text) - max_chars} more characters]"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MAX_EXPRESSION = 300  # characters
_MAX_BITS = 4_096  # of an intermediate result
_TOO_LARGE = "the number becomes too large"


def calculator(expression: str) -> str:
    """Computes an arithmetic expression with + - * / // % ** and parentheses.

    expression: what to compute, for example "(3 + 4) * 12"
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_EXPRESSION} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        value = _computed(tree)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{_short(expression)!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError(_TOO_LARGE) from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _computed(node: ast.AST) -> int | float:
    value: int | float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_computed(node.operand))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_computed(node.left), _computed(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is not allowed; use numbers, + - * / // % ** and parentheses")
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise ValueError(_TOO_LARGE)
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise ValueError(_TOO_LARGE)
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError(f"{base} ** {exponent} is not a real number")
    return value
