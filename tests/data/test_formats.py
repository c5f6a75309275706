from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from oxrl.data.formats import BadRow, RawRow, recognise, to_sample
from oxrl.types import Message, Sample

HI = Message("user", "Hi")
HELLO = Message("assistant", "Hello!")
GO_AWAY = Message("assistant", "Go away.")
BRIEF = Message("system", "Be brief.")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
PROMPT = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "clock"}}
GOOD_AND_BAD = {"chosen": (HELLO,), "rejected": (GO_AWAY,)}


@pytest.mark.parametrize(
    ("raw", "format", "fields"),
    [
        ({"messages": CHAT}, "messages", {"messages": (HI, HELLO)}),
        ({"messages": CHAT, "system": "Be brief."}, "messages", {"messages": (BRIEF, HI, HELLO)}),
        ({"messages": CHAT, "system": ""}, "messages", {"messages": (HI, HELLO)}),
        ({"messages": CHAT, "tools": [TOOL]}, "messages", {"messages": (HI, HELLO), "tools": (TOOL,)}),
        ({"messages": CHAT, "tools": json.dumps([TOOL])}, "messages", {"messages": (HI, HELLO), "tools": (TOOL,)}),
        ({"messages": PROMPT, "answer": 4}, "messages", {"messages": (HI,), "answer": "4"}),
        ({"messages": CHAT, "answer": "4"}, "messages", {"messages": (HI, HELLO), "answer": "4"}),
        ({"conversations": SHAREGPT}, "sharegpt", {"messages": (HI, HELLO)}),
        ({"conversations": SHAREGPT, "system": "Be brief."}, "sharegpt", {"messages": (BRIEF, HI, HELLO)}),
        ({"conversations": CHAT}, "sharegpt", {"messages": (HI, HELLO)}),
        ({"instruction": "Hi", "output": "Hello!"}, "alpaca", {"messages": (HI, HELLO)}),
        ({"instruction": "Hi", "input": "", "output": "Hello!"}, "alpaca", {"messages": (HI, HELLO)}),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief."},
            "alpaca",
            {"messages": (BRIEF, Message("user", "Add.\n\n2 and 2"), Message("assistant", "4"))},
        ),
        ({"prompt": "Hi", "response": "Hello!"}, "prompt_response", {"messages": (HI, HELLO)}),
        ({"prompt": "Hi", "completion": "Hello!"}, "prompt_response", {"messages": (HI, HELLO)}),
        ({"prompt": PROMPT, "completion": CHAT[1:]}, "prompt_response", {"messages": (HI, HELLO)}),
        ({"prompt": PROMPT, "response": CHAT}, "prompt_response", {"messages": (HI, HELLO)}),
        ({"question": "2+2?", "answer": "4"}, "prompt_answer", {"messages": (Message("user", "2+2?"),), "answer": "4"}),
        ({"prompt": PROMPT, "answer": 4.5}, "prompt_answer", {"messages": (HI,), "answer": "4.5"}),
        ({"text": "Once upon a time"}, "text", {"text": "Once upon a time"}),
        ({"text": "Once", "system": "x"}, "text", {"text": "Once", "metadata": {"system": "x"}}),
        (
            {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."},
            "preference",
            {"messages": (HI,), **GOOD_AND_BAD},
        ),
        (
            {"prompt": PROMPT, "chosen": CHAT, "rejected": [{"role": "assistant", "content": "Go away."}]},
            "preference",
            {"messages": (HI,), **GOOD_AND_BAD},
        ),
        (
            {"instruction": "Hi", "output": "Hello!", "chosen": "Hello!", "rejected": "Go away."},
            "preference",
            {"messages": (HI,), **GOOD_AND_BAD, "metadata": {"output": "Hello!"}},
        ),
        (
            {"system": "Be brief.", "chosen": CHAT, "rejected": [*PROMPT, {"from": "gpt", "value": "Go away."}]},
            "preference",
            {"messages": (BRIEF, HI), **GOOD_AND_BAD},
        ),
        (
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: Hello!",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: Go away.",
            },
            "preference",
            {"messages": (HI, Message("assistant", "Yes?"), HI), **GOOD_AND_BAD},
        ),
        (
            {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Hello!", "rejected": "Go away."},
            "preference",
            {"messages": (HI,), **GOOD_AND_BAD},
        ),
        (
            {"prompt": "Hi", "completion": "Hello!", "label": True},
            "unpaired",
            {"messages": (HI, HELLO), "label": True},
        ),
        ({"prompt": "Hi", "response": "Hello!", "label": 0}, "unpaired", {"messages": (HI, HELLO), "label": False}),
        (
            {"prompt": "Hi", "completion": "Hello!", "label": "False"},
            "unpaired",
            {"messages": (HI, HELLO), "label": False},
        ),
    ],
)
def test_columns_tell_the_format_and_become_the_sample(
    raw: dict[str, Any], format: str, fields: dict[str, Any]
) -> None:
    raw = {**raw, "source": "web", "empty": None}
    expected = Sample(
        "a.jsonl:3", **{**fields, "metadata": {**fields.get("metadata", {}), "source": "web", "empty": None}}
    )
    assert recognise(raw) == format
    assert to_sample(RawRow("a.jsonl:3", raw)) == expected
    assert to_sample(RawRow("a.jsonl:3", raw), format=format) == expected


def test_every_speaker_of_a_chat_keeps_what_it_carried() -> None:
    calls = [{"id": "1", "function": {"name": "clock", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "time is it?", "image_url": None}]
    messages = [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"from": "observation", "value": "12:00"},
        {"role": "assistant", "content": "Noon.", "weight": 0},
    ]
    assert to_sample(RawRow("a:1", {"messages": messages})).messages == (
        BRIEF,
        Message("user", "What time is it?"),
        Message("assistant", "", {"tool_calls": calls}),
        Message("tool", "12:00"),
        Message("assistant", "Noon.", {"weight": 0}),
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"promt": "Hi", "answer": "4"}, r"its columns \(promt, answer\) fit no format"),
        ({"prompt": "Hi", "response": None}, r"\(prompt, response \(None\)\) fit no format"),
        ({}, r"its columns \(none\) fit no format"),
        ({"messages": []}, "messages is an empty conversation"),
        ({"messages": "Hi"}, r"messages must be a list of messages, it is 'Hi' \(str\)"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be an object with role and content"),
        (
            {"messages": [{"role": "wizard", "content": "Hi"}]},
            r"messages\[0\] has the role 'wizard'; known roles: system",
        ),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\] has the role None"),
        ({"messages": [*PROMPT, {"role": "assistant", "content": None}]}, r"messages\[1\] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\] must have text or a list of parts"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\] must have text or a list of parts"),
        *(
            (
                {"messages": [{"role": "user", "content": parts}]},
                r"messages\[0\] has a content part that is neither text",
            )
            for parts in (
                [{"type": "text", "text": "See"}, {"type": "video", "video": "cat.mp4"}],
                [{"type": "text", "text": "See", "image": "cat.png"}],
                [{"type": "text"}],
                [{"type": "text", "text": 3}],
                [{"foo": 1}],
                [{}],
            )
        ),
        *(
            ({"messages": [*CHAT, {"role": "assistant", "content": "", **calls}]}, reason)
            for calls, reason in (
                ({"tool_calls": "[{}]"}, r"messages\[2\].tool_calls must be a list of objects, it is '\[{}\]'"),
                ({"tool_calls": {"function": {"name": "f"}}}, r"messages\[2\].tool_calls must be a list of objects"),
                ({"tool_calls": [{"function": None}]}, r"messages\[2\].tool_calls must name a function"),
                ({"tool_calls": [{"function": {"name": 3}}]}, r"messages\[2\].tool_calls must name a function"),
                ({"function_call": "f"}, r"messages\[2\].function_call must name a function"),
            )
        ),
        ({"prompt": "Hi", "responses": ["a"], "rewards": [10**400]}, "needs a finite number as its reward"),
        ({"messages": CHAT, "tools": "[" * 100_000}, "tools is text but not JSON .lists and objects are nested"),
        ({"messages": CHAT, "system": 3}, "system must be text, it is 3"),
        (
            {"messages": [{"role": "system", "content": "Be long."}, *CHAT], "system": "Be brief."},
            "system column differs",
        ),
        ({"messages": CHAT, "tools": "clock"}, "tools is text but not JSON"),
        ({"messages": CHAT, "tools": ["clock"]}, "tools must be a list of objects"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\] has no value"),
        ({"instruction": " ", "output": "4"}, "instruction is empty"),
        ({"instruction": "Add.", "output": 4}, r"output must be text or a list of messages, it is 4 \(int\)"),
        ({"prompt": "", "response": "4"}, "prompt is empty"),
        ({"prompt": {"text": "Hi"}, "response": "4"}, "prompt must be text or a list of messages"),
        ({"prompt": CHAT, "response": "4"}, "the prompt ends with an assistant message"),
        ({"prompt": "Hi", "response": PROMPT + PROMPT}, "response must begin and end with an assistant message.*user"),
        ({"prompt": "Other", "response": CHAT}, "response must begin and end with an assistant message"),
        ({"prompt": "Hi", "answer": ["4"]}, "answer must be text or a number"),
        ({"prompt": "Hi", "answer": float("nan")}, "answer must be text or a number"),
        ({"prompt": "Hi", "answer": ""}, "answer is empty"),
        ({"text": ""}, "text is empty"),
        ({"text": 3}, "text must be text, it is 3"),
        ({"prompt": "Hi", "completion": "Hello!", "label": "maybe"}, "label must be true or false .* it is 'maybe'"),
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "Hello!"}, "chosen and rejected are identical"),
        ({"chosen": CHAT, "rejected": CHAT}, "chosen and rejected are identical"),
        ({"chosen": "Hello!", "rejected": "Go away."}, "without a prompt column, text must read"),
        ({"chosen": CHAT[1:], "rejected": CHAT}, "share no prompt"),
        (
            {"chosen": CHAT, "rejected": PROMPT},
            "rejected must begin and end with an assistant message; it has: nothing",
        ),
        (
            {"chosen": [*CHAT, *CHAT], "rejected": [*CHAT, {"role": "assistant", "content": "More."}]},
            "the prompt ends with an assistant message",
        ),
    ],
)
def test_a_bad_row_is_reported_with_its_position_and_reason(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=f"^train.jsonl:12: .*{reason}") as caught:
        to_sample(RawRow("train.jsonl:12", raw))
    assert caught.value.where == "train.jsonl:12"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_columns_can_be_mapped_and_an_unmapped_column_of_the_same_name_is_metadata() -> None:
    raw = {"question": "Hi", "solution": "Hello!", "prompt": "unused", "messages": None}
    sample = to_sample(RawRow("a:1", raw), columns={"prompt": "question", "response": "solution"})
    assert sample.messages == (HI, HELLO)
    assert sample.metadata == {"prompt": "unused", "messages": None}


def test_a_mapped_column_is_known_by_its_new_name_only() -> None:
    raw = {"messages": PROMPT, "text": "Hello!"}
    columns = {"prompt": "messages", "response": "text"}
    assert recognise(raw, columns=columns) == "prompt_response"
    assert to_sample(RawRow("a:1", raw), columns=columns) == Sample("a:1", messages=(HI, HELLO))


def test_an_invalid_mapping_is_refused() -> None:
    row = RawRow("a.jsonl:1", {"question": "Hi", "solution": "Hello!"})
    with pytest.raises(
        BadRow, match=r"a.jsonl:1: columns maps 'prompt' to 'query', but the row has question, solution"
    ):
        to_sample(row, columns={"prompt": "query"})
    with pytest.raises(ValueError, match="'promt' is not a column name.*did you mean prompt"):
        to_sample(row, columns={"promt": "question"})


def test_a_format_can_be_chosen_and_a_misspelt_one_gets_the_nearest() -> None:
    row = RawRow("a:1", {"prompt": "Hi", "response": "Hello!", "answer": "4", "text": "Hi there"})
    assert to_sample(row).messages == (HI, HELLO)
    assert to_sample(row, format="prompt_answer").answer == "4"
    assert to_sample(row, format="text").text == "Hi there"
    with pytest.raises(ValueError, match="there is no format 'alpacca'; did you mean alpaca"):
        to_sample(row, format="alpacca")
    with pytest.raises(BadRow, match=r"format 'alpaca' needs the columns instruction \+ output, the row has prompt"):
        to_sample(row, format="alpaca")


def test_the_text_of_a_message_joins_its_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "text": None}, {"type": "image"}, {"text": "b"}]
    messages = (Message("user", "Hi"), Message("user", parts), Message("user", []), Message.from_dict({"role": "user"}))
    assert [message.text for message in messages] == ["Hi", "ab", "", ""]


@pytest.mark.parametrize("column", ["image_base64", "Image_URL", "picture", "audio_path", "videos"])
def test_a_column_of_media_that_no_format_takes_is_refused_by_its_number(column: str) -> None:
    columns = {"prompt": "What is in it?", "answer": "a cat"}
    with pytest.raises(BadRow, match=f"rows:3: it has '{column}'.*remove the column"):
        to_sample(RawRow("rows:3", {**columns, column: ["cat.png"]}))
    for nothing in (None, [], ""):
        assert to_sample(RawRow("rows:4", {**columns, column: nothing})).answer == "a cat"
    assert to_sample(RawRow("rows:5", {**columns, "image_count": 2, "imagination": "x"})).answer == "a cat"


SVAMP = {"Body": "Tom has 3.", "Question": "How many?", "Answer": 3.0}


@pytest.mark.parametrize(
    ("raw", "template", "fields"),
    [
        (SVAMP, {"prompt": "{Body} {Question}", "answer": "Answer"}, ("Tom has 3. How many?", "3.0")),
        (SVAMP, {"prompt": "{{{Question}}} {Answer:.2f}"}, ("{How many?} 3.00", None)),
        ({"q": "Hi", "answer": "4"}, {"prompt": "q"}, ("Hi", "4")),
        ({"instruction": "Hi", "output": "4"}, {"prompt": "{instruction}", "answer": "output"}, ("Hi", "4")),
        ({"messages": PROMPT, "final": 4}, {"answer": "final"}, ("Hi", "4")),
        ({"prompt": "Hi", "answer": "no", "good": "4"}, {"answer": "{good}"}, ("Hi", "4")),
    ],
)
def test_a_template_defines_prompt_and_answer_and_the_columns_it_replaces_are_metadata(raw, template, fields) -> None:
    sample = to_sample(RawRow("a:1", raw), template=template)
    (message,) = sample.messages
    assert (message.content, sample.answer) == fields
    hidden = raw.keys() - {"messages", "prompt"} if "prompt" not in template else raw.keys() - {"answer"}
    assert hidden <= sample.metadata.keys()
    assert not any(name.startswith("\0") for name in sample.metadata)


def test_a_template_defines_preferences_and_a_system_message() -> None:
    raw = {
        "topic": "greetings",
        "said": "Hi",
        "better": [{"role": "assistant", "content": "Hello!"}],
        "worse": "Go away.",
    }
    template = {"prompt": "said", "chosen": "better", "rejected": "{worse}", "system": "On {topic}."}
    sample = to_sample(RawRow("a:1", raw), template=template)
    assert sample.messages == (Message("system", "On greetings."), HI)
    assert (sample.chosen, sample.rejected) == ((HELLO,), (GO_AWAY,))


def test_a_number_in_a_column_of_a_template_is_text() -> None:
    sample = to_sample(RawRow("a:1", SVAMP), template={"prompt": "Body", "response": "Answer"})
    assert [message.content for message in sample.messages] == ["Tom has 3.", "3.0"]


@pytest.mark.parametrize(
    ("raw", "template", "message"),
    [
        (SVAMP, {"prompt": "{Body} {question}"}, "a:1: prompt: it has no column 'question' .* did you mean Question"),
        (SVAMP, {"prompt": "Qestion"}, "a:1: prompt: it has no column 'Qestion' .* did you mean Question"),
        ({**SVAMP, "Body": None}, {"prompt": "{Body}"}, "a:1: prompt: the column 'Body' of the template has no value"),
        ({**SVAMP, "Answer": float("nan")}, {"prompt": "Body", "answer": "Answer"}, "'Answer' of the template has no"),
        ({"Body": PROMPT}, {"prompt": "{Body}!"}, "a:1: prompt: the column 'Body' is a list"),
        ({"Body": "  "}, {"prompt": "{Body}"}, "a:1: prompt is empty"),
        ({"messages": CHAT, "r": "x"}, {"response": "r"}, "the template defines response, but rows of the format"),
        (SVAMP, {"promt": "{Body}"}, "not 'promt'; did you mean prompt"),
    ],
)
def test_a_template_that_does_not_fit_a_row_is_refused_with_the_row_and_the_nearest_name(
    raw, template, message
) -> None:
    with pytest.raises(ValueError, match=message):
        to_sample(RawRow("a:1", raw), template=template)
