"""A conversation that goes on becomes the next prompt, token for token what was seen and sampled so far, and more.

What a model said is never tokenised again: only what the chat template writes behind it is. Where the template writes
the past differently once it goes on (thinking that is dropped, another end of turn), the whole conversation is written
anew and the transcript counts that; a new row begins there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.data.render import Renderer, match_any, special_tokens
from oxrl.types import Generation, Message, Render

Tools: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Transcript:
    """`begin(render, messages).go_on(generation, said, answers).prompt_ids`: where a conversation stands."""

    render: Render
    messages: tuple[Message, ...]
    tools: Tools
    prompt_ids: tuple[int, ...]
    rewritten: int = 0  # how often the past had to be written anew
    _written: tuple[Message, ...] = ()  # the same messages, with what was said in its very words
    _text: str = ""  # what the template makes of them

    def said(self, generation: Generation) -> str:
        """Its words with the special tokens among them, which may mark a tool call, but without the end of the turn."""
        chat = _chat_of(self.render)
        return generation.text if chat is None else chat.words(generation)[0]

    def plain(self, text: str) -> str:
        """Without special tokens; of several channels, the final one."""
        chat = _chat_of(self.render)
        return text if chat is None else chat.special_text.sub("", text.rpartition("<|channel|>final<|message|>")[2])

    def go_on(self, generation: Generation, said: Message, answers: Sequence[Message]) -> Transcript:
        """After `generation`, which reads as the message `said`, and what the environment answered to it."""
        chat = _chat_of(self.render)
        said, *answered = (_defused(message, chat) for message in (said, *answers))
        if chat is not None:
            words, end = chat.words(generation)
            for form in (Message("assistant", words), said):
                written = (*self._written, form, *answered)
                text = chat.write(written, self.tools)
                rest = _behind(text.removeprefix(self._text), words + end) if text.startswith(self._text) else None
                if rest is not None:
                    ids = (*self.prompt_ids, *generation.token_ids, *chat.ids_behind(rest, end))
                    messages = (*self.messages, said, *answered)
                    return replace(self, messages=messages, prompt_ids=ids, _written=written, _text=text)
        anew = begin(self.render, (*self.messages, said, *answered), tools=self.tools)
        return replace(anew, rewritten=self.rewritten + 1)


def begin(render: Render, messages: Sequence[Message], *, tools: Tools = ()) -> Transcript:
    """A conversation before the model says anything."""
    given = tuple(messages)
    ids = tuple(render.prompt(given, tools=tools).tolist())
    chat = _chat_of(render)
    return Transcript(render, given, tools, ids, _written=given, _text=chat.write(given, tools) if chat else "")


class Told(NamedTuple):
    """A conversation that knows of its tools: what to hand to the template, and in which role results come."""

    messages: tuple[Message, ...]
    tools: Tools
    role: str = "tool"
    by_template: bool = True

    def answers(self, messages: Sequence[Message]) -> list[Message]:
        """Results as the template can write them: from a user, in one message, where it has no role for tools."""
        return list(messages) if self.role == "tool" else _from_user(messages)


_TOOLS_TEXT = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON: \
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
The result comes in <tool_response> tags."""


def tell_tools(render: Render, messages: Sequence[Message], tools: Tools) -> Told:
    """By the template, if it writes tools; else a system message does, or the first message where there can be none."""
    given = tuple(messages)
    if not tools or not np.array_equal(render.prompt(given, tools=tools), render.prompt(given)):
        return Told(given, tools)
    template = str(getattr(getattr(render, "tokenizer", None), "chat_template", ""))
    role = "tool" if re.search("[\"']tool[\"']", template) else "user"
    text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *others = given = tuple(Told((), (), role).answers(given))
    below = (Message("system", text), *given) if first.role != "system" else (_joined(text, first), *others)
    try:
        render.prompt(below)
    except ValueError:  # no system message, please
        below = (_joined(text, first), *others)
    return Told(below, (), role, by_template=False)


def _from_user(messages: Sequence[Message]) -> list[Message]:
    written: list[Message] = []
    for message, before in zip(messages, (None, *messages), strict=False):
        if message.role != "tool":
            written.append(message)
            continue
        response = f"<tool_response>\n{message.content}\n</tool_response>"
        if before is not None and before.role == "tool":
            written[-1] = Message("user", f"{written[-1].content}\n{response}")
        else:
            written.append(Message("user", response))
    return written


def _joined(text: str, message: Message) -> Message:
    content = message.content
    if isinstance(content, str):
        return message._replace(content=f"{content}\n\n{text}" if message.role == "system" else f"{text}\n\n{content}")
    return message._replace(content=[{"type": "text", "text": text}, *content])


class _Chat:
    """A renderer's tokenizer and template, as far as a conversation that goes on needs them."""

    def __init__(self, render: Renderer) -> None:
        self.tokenizer, self.template_kwargs = render.tokenizer, render.template_kwargs
        self.special = special_tokens(self.tokenizer)
        self.special_text = match_any(self.special.values())

    def words(self, generation: Generation) -> tuple[str, str]:
        """What was said, and the special token that it ended with, if it did."""
        ids = list(generation.token_ids)
        end = self.special.get(ids[-1], "") if ids else ""
        spoken = ids[:-1] if end else ids
        return self.tokenizer.decode(spoken, skip_special_tokens=False, clean_up_tokenization_spaces=False), end

    def write(self, messages: Sequence[Message], tools: Tools) -> str:
        """The prompt as text; empty where the template does not take such messages."""
        from jinja2.exceptions import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [message.to_dict() for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        except (TemplateError, TypeError):
            return ""
        return text

    def ids_behind(self, rest: str, end: str) -> list[int]:
        """The ids of `rest`, read behind a special token: many tokenizers treat the beginning of a text differently."""
        left = end or self.tokenizer.eos_token or ""
        ids: list[int] = self.tokenizer(left + rest, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[ids.index(self.tokenizer.convert_tokens_to_ids(left)) + 1 :] if left else ids

    def defused(self, text: str) -> str:
        """With a space in the text of every special token, which would become a control token otherwise."""
        return self.special_text.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


@lru_cache(maxsize=8)
def _chat_of_renderer(render: Renderer) -> _Chat:
    return _Chat(render)


def _chat_of(render: Render) -> _Chat | None:
    """None for a `Render` of another kind: its conversations are written anew at every turn."""
    return _chat_of_renderer(render) if isinstance(render, Renderer) else None


def _defused(message: Message, chat: _Chat | None) -> Message:
    """What comes from outside may spell special tokens; in a prompt it must stay plain text."""
    if chat is None:
        return message
    return Message(message.role, _mapped(message.content, chat), _mapped(dict(message.extra), chat))


def _mapped(value: Any, chat: _Chat) -> Any:
    if isinstance(value, str):
        return chat.defused(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, chat) for key, inner in value.items()}
    return [_mapped(inner, chat) for inner in value] if isinstance(value, list | tuple) else value


def _behind(text: str, words: str) -> str | None:
    """What follows `words` at the beginning of `text`; white space may be laid out differently. None: other words."""
    if text.startswith(words):
        return text[len(words) :]
    place = 0
    for character in "".join(words.split()):
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text) or text[place] != character:
            return None
        place += 1
    return text[place:]
