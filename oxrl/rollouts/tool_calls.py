"""Generated text to tool calls, in the formats of models: XML, JSON, Mistral, DeepSeek, Harmony.

A parser finds matches of its format's pattern (`tool_syntax`); a function of the match returns the calls. A call that
cannot be read is a call with an error, never an exception. Execution is in `tools`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

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


ToolParser: TypeAlias = Callable[[str], Sequence[ToolCall]]


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
