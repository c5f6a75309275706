"""Generated text to tool calls, calls to results: parsers, execution, schemas, and a calculator.

A parser is a function of the text; tools are plain Python functions. Every failure of a call (invalid JSON, an unknown
tool, wrong arguments, an exception, a time-out) is a result that the model reads, never an exception.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import anyio

from oxrl.concurrency import in_thread, is_cancelled, run_blocking
from oxrl.data.media import as_media
from oxrl.data.parts import Content
from oxrl.names import error_text
from oxrl.rollouts.episode import EpisodeError
from oxrl.rollouts.tool_syntax import (
    CHILD,
    DEEPSEEK,
    FENCED,
    HARMONY,
    KEY_OR_VALUE,
    MISTRAL,
    PARAMETER,
    TAGGED,
    TOOL_CALL,
    elements,
    is_deeper,
    json_values,
)
from oxrl.types import Media, Message

T = TypeVar("T")


class ToolCall(NamedTuple):
    """`ToolCall("calculator", {"expression": "2+2"})`; a malformed call has an `error` with the reason."""

    name: str
    arguments: Mapping[str, Any] = {}
    id: str = ""
    error: str | None = None
    written: str = ""  # the part of the text that it was parsed from

    def to_dict(self) -> dict[str, Any]:
        """Return the call in the format of chat templates."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


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
ToolParser: TypeAlias = Callable[[str], Sequence[ToolCall]]
ToolExecutor: TypeAlias = Callable[[Sequence[ToolCall], Mapping[str, Tool]], Any] | Callable[[Sequence[ToolCall]], Any]
"""(calls, tools by name) or (calls) -> one `ToolResult` or text per call, in order; sync or async."""
ToolTracker: TypeAlias = Callable[[Sequence[ToolResult]], Mapping[str, Any]]
"""All results of an episode -> entries for its metadata; plain JSON."""


# A parser finds matches of its format's pattern; a function of the match returns the calls.

_NAMES = ("name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters")
_MAX_TEXT = 1_000_000  # characters of a response
_MAX_CALLS = 128  # of one response
_MAX_DEPTH = 100  # of nested arguments: templates and JSON encoders recurse


def parse_xml_tools(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, `<tool name="f">`, `<function=f><parameter=x>`."""
    calls = _numbered(call for found in TOOL_CALL.finditer(text) for call in _in_tool_call(found))
    return calls or _numbered(_tagged(found) for found in TAGGED.finditer(text))


def parse_json_tools(text: str) -> list[ToolCall]:
    """A JSON object or list with a function name and arguments: bare, fenced, or in OpenAI's format."""
    fenced = [found for found in FENCED.finditer(text) if _looks_like_a_call(found["body"])]
    if fenced:
        return _numbered(call for found in fenced for call in _from_json_text(found["body"], found[0]))
    calls = _numbered(call for value, written in json_values(text) for call in _from_json(value, written))
    if not calls and text.lstrip().startswith(("{", "[")) and _looks_like_a_call(text):
        return _numbered(_from_json_text(text, text))
    return calls


def parse_mistral_tools(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": ...}]` or `[TOOL_CALLS]name[ARGS]{...}`."""
    return _numbered(
        call
        for found in MISTRAL.finditer(text)
        for call in ([_named(found)] if found["name"] else _from_json_text(found["body"], found[0]))
    )


def parse_deepseek_tools(text: str) -> list[ToolCall]:
    """A name and its JSON between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""
    return _numbered(_named(found) for found in DEEPSEEK.finditer(text))


def parse_harmony_tools(text: str) -> list[ToolCall]:
    """`to=functions.name<|channel|>commentary json<|message|>{...}`."""
    return _numbered(_named(found) for found in HARMONY.finditer(text))


def parse_tools(text: str) -> list[ToolCall]:
    """Return the calls of the first format that matches; plain JSON is tried last."""
    parsers = (parse_xml_tools, parse_mistral_tools, parse_deepseek_tools, parse_harmony_tools, parse_json_tools)
    return next((calls for parser in parsers if (calls := parser(text))), [])


_MARKERS: Mapping[str, ToolParser] = {
    "[TOOL_CALLS]": parse_mistral_tools,
    "<｜tool▁call▁begin｜>": parse_deepseek_tools,
    "<|channel|>": parse_harmony_tools,
    "<tool_call>": parse_xml_tools,
    "<function=": parse_xml_tools,
    "<|python_tag|>": parse_json_tools,
}


def tool_parser_for(tokenizer: Any) -> ToolParser:
    """Return the parser for the call format of a tokenizer's (or renderer's) chat template; else `parse_tools`."""
    template = getattr(getattr(tokenizer, "tokenizer", tokenizer), "chat_template", None) or ""
    text = template if isinstance(template, str) else "".join(template.values())
    return next((parser for marker, parser in _MARKERS.items() if marker in text), parse_tools)


def extract_tool_calls(text: str, tool_parser: ToolParser = parse_tools) -> list[ToolCall]:
    """Return the calls in generated text; calls inside a thinking block are ignored.

    More than 128 calls, or more than a million characters, are a malformed call.
    """
    text = text.rpartition("</think>")[2]
    if len(text) > _MAX_TEXT:
        return _numbered([ToolCall("", error=f"the response has {len(text)} characters; at most {_MAX_TEXT} are read")])
    calls = list(tool_parser(text))
    if len(calls) > _MAX_CALLS:
        more = ToolCall("", error=f"the response has {len(calls)} calls; only the first {_MAX_CALLS} are executed")
        return _numbered([*calls[:_MAX_CALLS], more])
    return calls


def _numbered(calls: Iterator[ToolCall] | Sequence[ToolCall]) -> list[ToolCall]:
    return [call if call.id else call._replace(id=f"call_{number}") for number, call in enumerate(calls)]


def _in_tool_call(found: re.Match[str]) -> list[ToolCall]:
    body, written = found["body"].strip(), found[0]
    if inner := list(TAGGED.finditer(body)):
        return [_tagged(each)._replace(written=written) for each in inner]
    pairs = {
        key.strip(): value.strip()
        for (opened, key), (following, value) in pairwise(elements(KEY_OR_VALUE, body))
        if (opened["tag"], following["tag"]) == ("arg_key", "arg_value")
    }
    if pairs:
        return [ToolCall(body.split("<", 1)[0].strip(), pairs, written=written)]
    return _from_json_text(body, written)


def _tagged(found: re.Match[str]) -> ToolCall:
    body = found["body"].strip()
    if body.startswith("{"):
        return _named(found)
    parameters = list(elements(PARAMETER, body)) or list(elements(CHILD, body))
    if body and not parameters:
        return ToolCall(found["name"], error="its parameters are neither tags nor a JSON object", written=found[0])
    return ToolCall(found["name"], {opened["name"]: value.strip() for opened, value in parameters}, written=found[0])


def _named(found: re.Match[str]) -> ToolCall:
    """Parse a match with the name outside of the JSON arguments."""
    return _with_arguments(found["name"], _unfenced(found["body"]), found[0])


def _with_arguments(name: str, arguments: Any, written: str, id: str = "") -> ToolCall:
    """A call with its arguments: an object, or the text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall(name, id=id, error=f"its arguments are not valid JSON ({error})", written=written)
    if not isinstance(arguments, dict):
        return ToolCall(name, id=id, error="its arguments are not a JSON object", written=written)
    if is_deeper(arguments, _MAX_DEPTH):
        return ToolCall(name, id=id, error=f"its arguments are nested more than {_MAX_DEPTH} deep", written=written)
    return ToolCall(name, arguments, id, written=written)


def _from_json_text(body: str, written: str) -> list[ToolCall]:
    try:
        value = json.loads(_unfenced(body))
    except (ValueError, RecursionError) as error:
        return [ToolCall("", error=f"the call is not valid JSON ({error})", written=written)]
    return _from_json(value, written) or [ToolCall("", error="the call names no function", written=written)]


def _from_json(value: Any, written: str) -> list[ToolCall]:
    """Return the calls in a JSON value; an empty list if it has none."""
    calls: list[ToolCall] = []
    unread = [value]
    while unread:
        value = unread.pop()
        if isinstance(value, list):
            unread.extend(reversed(value))
        elif isinstance(value, dict) and "tool_calls" in value:
            unread.append(value["tool_calls"])
        elif isinstance(value, dict):
            calls.extend(_from_object(value, written))
    return calls


def _from_object(value: dict[str, Any], written: str) -> list[ToolCall]:
    inner = next((value[key] for key in ("function", "function_call") if isinstance(value.get(key), dict)), value)
    name = next((inner[key] for key in _NAMES if isinstance(inner.get(key), str)), None)
    given = [inner[key] for key in _ARGUMENTS if key in inner]
    if name is None or (not given and inner is value):
        return []
    return [_with_arguments(name, given[0] if given else {}, written, str(value.get("id") or ""))]


def _looks_like_a_call(text: str) -> bool:
    return '"name"' in text and any(f'"{key}"' in text for key in _ARGUMENTS)


def _unfenced(text: str) -> str:
    fenced = FENCED.search(text)
    return (fenced["body"] if fenced else text).strip()


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
