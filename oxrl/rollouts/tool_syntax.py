"""The syntax of tool calls in generated text: patterns of tags and markers, closed elements, JSON values.

A model may write any text, so the time must be linear in its length: repetitions in patterns are possessive (`++`),
none runs past the start of the next match, and text that is no JSON is not parsed again and again.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

_TAG = r"(?:=|\s++name\s*+=\s*+)[\"']?(?P<name>[^\"'<>\s]++)[\"']?\s*+>"
TAGGED = re.compile(rf"<(?P<tag>tool|function|invoke){_TAG}(?P<body>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)", re.DOTALL)
PARAMETER = re.compile(rf"<(?P<tag>parameter|param|arg){_TAG}")
KEY_OR_VALUE = re.compile(r"<(?P<tag>arg_key|arg_value)>")
CHILD = re.compile(r"<(?P<tag>(?P<name>\w++))>")
_CLOSING = re.compile(r"</(?P<tag>\w++)>")
FENCED = re.compile(r"```(?:json|tool_call|tool)?[ \t]*+\n(?P<body>.*?)(?:```|\Z)", re.DOTALL)
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)?(?:\[ARGS\])?(?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)
DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]++)(?:<｜tool▁sep｜>|\s)(?P<body>.*?)"
    r"(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
HARMONY = re.compile(
    r"(?:<\|channel\|>\w++ )?to=functions\.(?P<name>[\w.-]++)[^<]{0,99}+(?:<\|channel\|>[^<]{0,99}+)?"
    r"(?:<\|constrain\|>[^<]{0,99}+)?<\|message\|>(?P<body>.*?)(?=<\|call\|>|<\|start\|>|\Z)",
    re.DOTALL,
)
_JSON_START = re.compile(r'\{\s*+"|\[\s*+\{')
_MAX_REPARSES = 32  # how often, on average, a character may be parsed in vain


def elements(opening: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each opening tag that is closed, with its content; every tag in the text is visited once."""
    closings: dict[str, deque[re.Match[str]]] = {}
    for closing in _CLOSING.finditer(text):
        closings.setdefault(closing["tag"], deque()).append(closing)
    end = 0
    for opened in opening.finditer(text):
        later = closings.get(opened["tag"])
        while later and later[0].start() < opened.end():
            later.popleft()
        if later and opened.start() >= end:
            end = later[0].end()
            yield opened, text[opened.end() : later[0].start()]


def json_values(text: str) -> Iterator[tuple[Any, str]]:
    """Yield each JSON object, or list of objects, in the text, with its source."""
    decoder = json.JSONDecoder()
    end, left = 0, _MAX_REPARSES * len(text)
    for found in _JSON_START.finditer(text):
        start = found.start()
        if start < end:
            continue
        if left < 0:
            return
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:  # it counts the lines before it; that of a string has the string's start
            left -= (len(text) if error.msg.startswith("Unterminated") else error.pos) - start + error.pos // 16
        except (ValueError, RecursionError):
            left -= len(text) - start
        else:
            yield value, text[start:end]


def is_deeper(value: Any, depth: int) -> bool:
    """`is_deeper([[1]], 1)`: whether lists and objects are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [child for each in level for child in _children(each)]
    return bool(level)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
