"""Generated text to calls, calls to results; every failure is a result that the model can read."""

import asyncio
import json
import subprocess
import sys
import threading
from typing import Literal

import anyio
import pytest

from oxrl.rollouts.tool_calls import (
    ToolCall,
    extract_tool_calls,
    parse_deepseek_tools,
    parse_harmony_tools,
    parse_json_tools,
    parse_mistral_tools,
    parse_tools,
    parse_xml_tools,
    tool_parser_for,
)
from oxrl.rollouts.tools import (
    ToolResult,
    calculator,
    execute_and_track_tools,
    execute_functions,
    execute_tools,
    execute_with,
    tool_schema,
    track_tool_calls,
)
from tests.clock import no_hang
from tests.data import chat_templates as styles
from tests.data.chat_templates import byte_level
from tests.waiting import HANG

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD = ("add", {"a": 1, "b": 2})
ADD_TEXT = ("add", {"a": "1", "b": "2"})


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def read(parser, text):
    return [(call.name, call.arguments) for call in parser(text)]


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (parse_xml_tools, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", [ADD]),
        (parse_xml_tools, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [ADD, ADD]),
        (parse_xml_tools, f"<tool_call>{CALL}", [ADD]),  # engines may swallow a stop text
        (parse_xml_tools, f"<tool_call>```json\n{CALL}\n```</tool_call>", [ADD]),
        (
            parse_xml_tools,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call>",
            [ADD_TEXT],
        ),
        (parse_xml_tools, '<tool name="add">{"a": 1, "b": 2}</tool>', [ADD]),
        (
            parse_xml_tools,
            '<invoke name="add"><parameter name="a">1</parameter><param name="b">2</param></invoke>',
            [ADD_TEXT],
        ),
        (parse_xml_tools, "<function=add><a>1</a><b>2</b></function>", [ADD_TEXT]),
        (parse_xml_tools, '<tool name="now"></tool>', [("now", {})]),
        (
            parse_xml_tools,
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            [ADD_TEXT],
        ),
        (parse_json_tools, CALL, [ADD]),
        (parse_json_tools, f"I will add.\n```json\n{CALL}\n```\nDone.", [ADD]),
        (parse_json_tools, f"I add {CALL} and [{CALL}, {CALL}].", [ADD, ADD, ADD]),
        (parse_json_tools, '{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        (
            parse_json_tools,
            json.dumps(
                {
                    "tool_calls": [
                        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
                    ]
                }
            ),
            [ADD],
        ),
        (parse_mistral_tools, f"[TOOL_CALLS] [{CALL}, {CALL}]", [ADD, ADD]),
        (parse_mistral_tools, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add{"a": 1, "b": 2}', [ADD, ADD]),
        (
            parse_deepseek_tools,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [ADD],
        ),
        (parse_deepseek_tools, '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>', [ADD]),
        (parse_harmony_tools, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}', [ADD]),
        (
            parse_harmony_tools,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
            [ADD],
        ),
    ],
)
def test_every_supported_call_format_is_parsed(parser, text, expected):
    assert read(parser, text) == expected
    assert read(parse_tools, text) == expected
    assert all(call.written and call.written in text and call.error is None for call in parser(text))


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "A set {1, 2} and a list [3].",
        '{"name": "Ada", "age": 36}',
        '```json\n{"result": 3}\n```',
        "{" * 3000 + '{"a": [' * 3000 + "[{" * 3000,
        "",
    ],
)
def test_text_without_calls_gives_none(text):
    assert parse_tools(text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "not valid JSON"),
        ("<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "names no function"),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "not a JSON object"),
        ('<tool name="add">1, 2</tool>', "neither tags nor a JSON object"),
        ('```json\n{"name": "add", "arguments": {"a": }}\n```', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": 1', "not valid JSON"),
        ('[TOOL_CALLS] [{"name": ', "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(text, reason):
    (call,) = parse_tools(text)
    assert reason in call.error
    (result,) = execute_tools([call], {"add": lambda a, b: a + b})
    assert result.error == "malformed" and reason in result.content


LONG = 500_000
ATTACKS = {
    "a long name": "to=functions." + "a" * LONG,
    "names": "to=functions." * (LONG // 13),
    "channels": "to=functions.a <|channel|>b" * (LONG // 28),
    "tools": "<tool=" * (LONG // 6),
    "functions": "<function=" * (LONG // 10),
    "invocations": "<invoke name = " * (LONG // 15),
    "spaces": "<tool" + " " * LONG,
    "children": "<tool=f>" + "<a>" * (LONG // 3),
    "many children": "<tool=f>" + "".join(f"<a{n}>" for n in range(LONG // 7)),
    "parameters": "<tool=f>" + "<parameter=a>" * (LONG // 13),
    "keys": "<tool_call>f" + "<arg_key>" * (LONG // 9),
    "closed keys": "<tool_call>f" + "<arg_key>a</arg_key>" * (LONG // 20),
    "values": "<tool_call>f<arg_key>a</arg_key>" + "<arg_value>" * (LONG // 11),
    "calls in a call": "<tool_call>" + "<tool=a></tool>" * (LONG // 15),
    "open calls": "<tool_call>" * (LONG // 11),
    "closed calls": "<tool_call></tool_call>" * (LONG // 23),
    "fences": "```json\n" * (LONG // 8),
    "objects": '{"a":' * (LONG // 5),
    "lists": "[{" * (LONG // 2),
    "lists of numbers": '[{"a":' * 300 + "[" + "1," * (LONG // 2),
    "strings": '[{"a":' * 300 + '"' + "a" * LONG,
    "digits": '{"a":' + "1" * LONG,
    "braces": "{" + " " * LONG,
    "mistral": "[TOOL_CALLS]" * (LONG // 12),
    "deepseek": "<｜tool▁call▁begin｜>" * (LONG // 19),
    "a long name of deepseek": "<｜tool▁call▁begin｜>" + "a" * LONG,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_half_a_million_characters_are_parsed_in_linear_time(attack):
    """Parsers whose time grows with the square of the length need minutes."""
    parsers = (parse_xml_tools, parse_mistral_tools, parse_deepseek_tools, parse_harmony_tools, parse_json_tools)
    with no_hang():
        for parser in parsers:
            assert all(call.error or not call.arguments for call in parser(ATTACKS[attack]))


def test_the_size_of_a_response_and_its_calls_are_bounded():
    (call,) = extract_tool_calls("a" * 1_000_001)
    assert call.error == "the response has 1000001 characters; at most 1000000 are read"
    calls = extract_tool_calls(f"<tool_call>{CALL}</tool_call>" * 200)
    assert len(calls) == 129 and all(call.name == "add" for call in calls[:128])
    assert calls[128].error == "the response has 200 calls; only the first 128 are executed"
    assert len({call.id for call in calls}) == 129


@pytest.mark.parametrize("depth", [150, 600, 100_000])
@pytest.mark.parametrize("form", ['{{"name": "add", "arguments": {{"a": {}}}}}', "{}", '{{"tool_calls": {}}}'])
def test_deeply_nested_calls_are_malformed(depth, form):
    text = form.format("[" * depth + "]" * depth)
    for each in (f"<tool_call>{text}</tool_call>", f"<tool=add>{text}</tool>", f"```json\n{text}\n```", text):
        assert all(call.error for call in parse_tools(each))
    nested = '{"tool_calls": ' * depth + "1" + "}" * depth
    assert all(call.error for call in parse_tools(f"<tool_call>{nested}</tool_call>"))


def test_a_broken_object_does_not_hide_the_call_after_it():
    assert read(parse_json_tools, f'{{"thought": {{"a": }} }} {CALL}') == [ADD]
    assert read(parse_json_tools, '{"a": [1, ' * 20 + CALL) == [ADD]


def test_unclosed_tags_do_not_hide_closed_ones():
    text = "<function=add><br> <parameter=a>1</parameter> <parameter=c> <parameter=b>2</parameter></function>"
    assert read(parse_xml_tools, text) == [("add", {"a": "1", "c": "<parameter=b>2"})]
    assert read(parse_xml_tools, "<tool name='add'><br><a>1</a><hr><b>2</b></tool>") == [ADD_TEXT]
    text = "<tool_call>add<arg_key>c</arg_key>\n<arg_key>a</arg_key><arg_value>1</arg_value><arg_value>3</tool_call>"
    assert read(parse_xml_tools, text) == [("add", {"a": "1"})]


def test_calls_in_thinking_blocks_are_ignored():
    text = f"<think>Maybe <tool_call>{CALL}</tool_call>?</think>No."
    assert extract_tool_calls(text) == []
    assert [call.name for call in extract_tool_calls(text + f"<tool_call>{CALL}</tool_call>")] == ["add"]


def test_the_parser_is_replaceable():
    calls = extract_tool_calls("ADD 1 2", tool_parser=lambda text: [ToolCall("add", {"words": text.split()})])
    assert calls == [ToolCall("add", {"words": ["ADD", "1", "2"]})]


@pytest.mark.parametrize(
    ("style", "parser"),
    [
        (styles.QWEN25, parse_xml_tools),
        (styles.MISTRAL, parse_mistral_tools),
        (styles.DEEPSEEK_V3, parse_deepseek_tools),
        (styles.HARMONY, parse_harmony_tools),
        (styles.CHATML, parse_tools),
    ],
)
def test_the_template_determines_the_parser(style, parser):
    assert tool_parser_for(byte_level(style)) is parser


def test_the_parser_of_tiny_is_xml(tiny):
    assert tool_parser_for(tiny[1]) is parse_xml_tools


RELEASE = threading.Event()


@pytest.fixture
def released():
    """Ends the threads of tools that are stuck."""
    RELEASE.clear()
    yield
    RELEASE.set()


def add(a: int, b: int = 1) -> int:
    return a + b


async def slowly(text: str) -> str:
    await anyio.sleep_forever()
    return text


def stuck() -> None:
    RELEASE.wait(HANG)


def broken() -> None:
    raise SystemExit(0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("call", "error", "content"),
    [
        (ToolCall("add", {"a": 1, "b": 2}), None, "3"),
        (ToolCall("add", {"a": "1"}), None, "2"),
        (
            ToolCall("sub", {"a": 1}),
            "unknown tool",
            "no tool sub; there are: add, slowly, stuck, broken, long",
        ),
        (ToolCall("add", {"b": 1}), "wrong arguments", "missing a required argument: 'a'; it takes: a, b"),
        (ToolCall("add", {"a": 1, "c": 1}), "wrong arguments", "unexpected keyword argument 'c'"),
        (ToolCall("add", {"a": "one"}), "wrong arguments", "a should be of type integer, but is 'one'"),
        (ToolCall("add", {"a": True}), "wrong arguments", "a should be of type integer"),
        (ToolCall("slowly", {"text": "x"}), "time-out", "slowly took longer than 0.05 s"),
        (ToolCall("stuck", {}), "time-out", "stuck took longer than 0.05 s"),
        (ToolCall("broken", {}), "exception", "SystemExit"),
        (ToolCall("long", {}), None, "[cut: 90 more characters]"),
    ],
)
async def test_every_failure_is_a_result(call, error, content, anyio_backend, released):
    tools = {"add": add, "slowly": slowly, "stuck": stuck, "broken": broken, "long": lambda: "x" * 100}
    limit = 0.05 if error == "time-out" else HANG
    (result,) = await execute_functions([call], tools, time_limit=limit, max_chars=10 if call.name == "long" else 8000)
    assert result.error == error and content in result.content
    assert result.to_message().role == "tool"


class Unreadable:
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise self


async def raises(error: str) -> None:
    raise {"cancelled": asyncio.CancelledError("by itself"), "unreadable": UnreadableError()}[error]


def raises_in_thread(error: str) -> None:
    raise {"cancelled": asyncio.CancelledError("by itself"), "unreadable": UnreadableError()}[error]


@pytest.mark.anyio
async def test_a_result_or_an_exception_that_cannot_be_read_is_a_result(anyio_backend):
    (result,) = await execute_functions([ToolCall("unreadable")], {"unreadable": Unreadable})
    assert (result.error, result.content) == ("exception", "error: SystemExit: no text")
    (result,) = await execute_with(lambda calls, tools: [Unreadable()], [ToolCall("any")], {})
    assert (result.error, result.content) == ("exception", "error: SystemExit: no text")
    for tool in (raises, raises_in_thread):
        for error, content in (("cancelled", "CancelledError: by itself"), ("unreadable", "error: UnreadableError")):
            (result,) = await execute_functions([ToolCall(tool.__name__, {"error": error})], [tool])
            assert result.error == "exception" and content in result.content


@pytest.mark.anyio
async def test_wrong_arguments_are_reported_in_few_characters_whatever_they_are(anyio_backend):
    deep = json.loads("[" * 400 + "]" * 400)
    for arguments in ({"a": 1, "b" * 100_000: 1}, {"a": deep}, {"a": "[" * 400 + "]" * 400}):
        (result,) = await execute_functions([ToolCall("add", arguments)], [add])
        assert result.error == "wrong arguments" and len(result.content) < 9000


@pytest.mark.anyio
async def test_a_time_out_inside_a_tool_is_its_own_exception(anyio_backend):
    def fetch() -> None:
        raise TimeoutError("the server did not respond")

    (result,) = await execute_functions([ToolCall("fetch")], [fetch])
    assert (result.error, result.content) == ("exception", "error: TimeoutError: the server did not respond")


@pytest.mark.anyio
async def test_cancellation_is_not_a_result(anyio_backend):
    started = anyio.Event()

    async def waits() -> None:
        started.set()
        await anyio.sleep_forever()

    async def cancel_when_it_runs() -> None:
        await started.wait()
        scope.cancel()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_when_it_runs)
            await execute_functions([ToolCall("waits")], [waits], time_limit=HANG)
    assert scope.cancelled_caught


def test_a_tool_that_never_returns_does_not_block_exit():
    code = (
        "import signal; from oxrl.rollouts.tools import *\n"
        "def stuck():\n    while True: signal.pause()\n"
        "async def main(): return await execute_functions([ToolCall('stuck')], [stuck], time_limit=0.1)\n"
        "print(anyio.run(main)[0].error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert (done.stdout.strip(), done.stderr) == ("time-out", "")


def test_results_keep_the_order_of_calls_and_values_become_json():
    def pair(x: int) -> dict[str, int]:
        return {"x": x}

    results = execute_tools([ToolCall("pair", {"x": 1}, "a"), ToolCall("pair", {"x": 2}, "b")], [pair])
    assert [(result.call.id, result.content) for result in results] == [("a", '{"x": 1}'), ("b", '{"x": 2}')]


def test_executor_and_tracker_are_replaceable():
    calls = [ToolCall("add", {"a": 1}), ToolCall("sub")]
    results, tracked = execute_and_track_tools(calls, [add])
    assert tracked == {
        "tool_calls": 2,
        "tool_errors": 1,
        "tools": {"add": 1, "sub": 1},
        "tool_error_kinds": {"unknown tool": 1},
    }
    assert track_tool_calls(results) == tracked
    results, tracked = execute_and_track_tools(
        calls, tool_executor=lambda calls, tools: ["yes"] * len(calls), tool_tracker=lambda results: {"n": len(results)}
    )
    assert results == [ToolResult(calls[0], "yes"), ToolResult(calls[1], "yes")]
    assert tracked == {"n": 2}
    with pytest.raises(ValueError, match="returned 0 results for 2 calls"):
        execute_tools(calls, tool_executor=lambda calls, tools: [])


@pytest.mark.anyio
async def test_the_synchronous_function_works_inside_an_event_loop(anyio_backend):
    assert execute_tools([ToolCall("add", {"a": 1})], [add])[0].content == "2"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        execute_tools([], [add, add])


def search(query: str, limit: int = 3, sort: Literal["new", "best"] = "new", tags: list[str] | None = None) -> str:
    """Finds pages.

    Args:
        query (str): what to look for
        tags: only pages with these
    """
    return query


def test_the_schema_of_a_function_comes_from_its_signature_and_docstring():
    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer"},
                    "sort": {"enum": ["new", "best"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "only pages with these"},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+2", "4"),
        (" (3 + 4) * -12 ", "-84"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("-2 ** 2", "-4"),
        ("--3", "3"),
        ("10 ** 400 // 10 ** 399", "10"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("__import__('os').system('true')", "not allowed"),
        ("open('x')", "not allowed"),
        ("a + 1", "not allowed"),
        ("True + 1", "not allowed"),
        ("1 if 2 else 3", "not allowed"),
        ("2j", "not allowed"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 999 * 10 ** 999", "too large"),
        ("2.0 ** 5000", "too large"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1 / 0", "division by zero"),
        ("2 +", "not an arithmetic expression"),
        ("(" * 140 + "1" + ")" * 139, "not an arithmetic expression"),
        ("1" * 301, "at most 300"),
    ],
)
def test_the_calculator_refuses_what_is_not_arithmetic_or_too_large(expression, error):
    with pytest.raises(ValueError, match=error):
        calculator(expression)
