"""Multi-turn conversations to prompts: each prompt extends the tokens of the previous prompt and generation.

Generated tokens are never re-tokenised: only the text that the chat template appends is. If the template renders
earlier turns differently later on (thinking is dropped, another end-of-turn token), the complete conversation is
rendered again and counted in `rewritten`; a new row starts there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.data.parts import Content, take_media
from oxrl.data.processor import MediaProcessor, processor_of
from oxrl.data.render import Renderer, match_any, special_tokens
from oxrl.data.template import TemplateError, apply_template
from oxrl.types import Generation, Media, Message, Render

Tools: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Transcript:
    """State of a conversation: `begin(render, messages).extend(generation, message, replies).prompt_ids`."""

    render: Render
    messages: tuple[Message, ...]
    tools: Tools
    prompt_ids: tuple[int, ...]
    rewritten: int = 0  # how often earlier turns had to be rendered again
    media: tuple[Media, ...] = ()  # of the prompt, in order
    _rendered: tuple[Message, ...] = ()  # the same messages, with generated text verbatim
    _text: str = ""  # the template's output for them

    def text_of(self, generation: Generation) -> str:
        """Return its text with special tokens, which may mark a tool call, but without the end-of-turn token."""
        chat = _chat_of(self.render)
        return generation.text if chat is None else chat.decode(generation)[0]

    def plain(self, text: str) -> str:
        """Return the text without special tokens; of several channels, the final one."""
        chat = _chat_of(self.render)
        return text if chat is None else chat.special_text.sub("", text.rpartition("<|channel|>final<|message|>")[2])

    def extend(
        self, generation: Generation, message: Message, replies: Sequence[Message], media: Sequence[Media] = ()
    ) -> Transcript:
        """Append `generation`, whose message form is `message`, and the environment's replies with their media."""
        chat = _chat_of(self.render)
        replies, added = take_media(replies, media)
        media = (*self.media, *added)
        message, *escaped = (_escaped(each, chat) for each in (message, *replies))
        if chat is not None:
            generated, end = chat.decode(generation)
            for form in (Message("assistant", generated), message):
                rendered = (*self._rendered, form, *escaped)
                text = chat.render(rendered, self.tools)
                rest = _rest(text.removeprefix(self._text), generated + end) if text.startswith(self._text) else None
                if rest is not None:
                    ids = (*self.prompt_ids, *generation.token_ids, *chat.ids_after(rest, end, added))
                    messages = (*self.messages, message, *escaped)
                    return replace(self, messages=messages, prompt_ids=ids, media=media, _rendered=rendered, _text=text)
        restarted = begin(self.render, (*self.messages, message, *escaped), tools=self.tools, media=media)
        return replace(restarted, rewritten=self.rewritten + 1)


def begin(render: Render, messages: Sequence[Message], *, tools: Tools = (), media: Sequence[Media] = ()) -> Transcript:
    """Return the transcript of a conversation before the first generation; parts of messages may have media, too."""
    given, found = take_media(messages, media)
    ids = tuple(render.prompt(given, tools=tools, **({"media": found} if found else {})).tolist())
    chat = _chat_of(render)
    text = chat.render(given, tools) if chat else ""
    return Transcript(render, given, tools, ids, media=found, _rendered=given, _text=text)


def opened_by(render: Render, prompt_ids: Sequence[int]) -> str:
    """Return what a prompt already has of the response; other implementations of `Render` are not asked."""
    return render.opened(prompt_ids) if isinstance(render, Renderer) else ""


class ToolPrompt(NamedTuple):
    """Messages and tools to pass to the template, and the role of tool results."""

    messages: tuple[Message, ...]
    tools: Tools
    role: str = "tool"
    by_template: bool = True

    def results(self, messages: Sequence[Message]) -> list[Message]:
        """Return tool results in a role that the template supports; without a tool role, as one user message."""
        return list(messages) if self.role == "tool" else _from_user(messages)


_TOOLS_TEXT = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON: \
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
The result comes in <tool_response> tags."""


def tool_prompt(render: Render, messages: Sequence[Message], tools: Tools, media: Sequence[Media] = ()) -> ToolPrompt:
    """Describe tools by the template if it supports them, else in a system message or in the first message."""
    given = tuple(messages)
    bare, found = take_media(messages, media)
    shown: dict[str, Any] = {"media": found} if found else {}
    if not tools or not np.array_equal(render.prompt(bare, tools=tools, **shown), render.prompt(bare, **shown)):
        return ToolPrompt(given, tools)
    template = str(getattr(getattr(render, "tokenizer", None), "chat_template", ""))
    role = "tool" if re.search("[\"']tool[\"']", template) else "user"
    text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *others = given = tuple(ToolPrompt((), (), role).results(given))
    described = (Message("system", text), *given) if first.role != "system" else (_joined(text, first), *others)
    try:
        render.prompt(take_media(described, media)[0], **shown)
    except ValueError:  # the template refuses system messages
        described = (_joined(text, first), *others)
    return ToolPrompt(described, (), role, by_template=False)


def _from_user(messages: Sequence[Message]) -> list[Message]:
    converted: list[Message] = []
    for message, before in zip(messages, (None, *messages), strict=False):
        if message.role != "tool":
            converted.append(message)
            continue
        response = _around("<tool_response>\n", message.content, "\n</tool_response>")
        if before is not None and before.role == "tool":
            both = _around("", converted[-1].content, "\n")
            joined = both + response if isinstance(both, str) and isinstance(response, str) else None
            converted[-1] = Message("user", joined or [*_parts(both), *_parts(response)])
        else:
            converted.append(Message("user", response))
    return converted


def _around(before: str, content: Content, after: str) -> Content:
    if isinstance(content, str):
        return f"{before}{content}{after}"
    return [*_parts(before), *content, *_parts(after)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def _joined(text: str, message: Message) -> Message:
    content = message.content
    if isinstance(content, str):
        return message._replace(content=f"{content}\n\n{text}" if message.role == "system" else f"{text}\n\n{content}")
    return message._replace(content=[{"type": "text", "text": text}, *content])


class _Chat:
    """Tokenizer and template of a renderer, as far as multi-turn prompts need them."""

    def __init__(self, render: Renderer) -> None:
        self.tokenizer, self.template_kwargs = render.tokenizer, render.template_kwargs
        self.processor = render.processor
        self.special = special_tokens(self.tokenizer)
        self.special_text = match_any(self.special.values())

    def decode(self, generation: Generation) -> tuple[str, str]:
        """Return the generated text and the special token at its end; "" if there is none."""
        ids = list(generation.token_ids)
        end = self.special.get(ids[-1], "") if ids else ""
        kept = ids[:-1] if end else ids
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False), end

    def render(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the prompt as text; empty if the template refuses these messages."""
        chat = [message.to_dict() for message in messages]
        try:
            return apply_template(self.tokenizer, chat, tools, generation_prompt=True, **self.template_kwargs)
        except TemplateError:
            return ""

    def ids_after(self, rest: str, end: str, media: Sequence[Media] = ()) -> list[int]:
        """Tokenise `rest` after a special token: many tokenizers treat the start of a text differently."""
        if media:
            rest = self._reader().expand(rest, media)
        left = end or self.tokenizer.eos_token or ""
        ids: list[int] = self.tokenizer(left + rest, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[ids.index(self.tokenizer.convert_tokens_to_ids(left)) + 1 :] if left else ids

    def _reader(self) -> MediaProcessor:
        processor = self.processor if self.processor is not None else processor_of(self.tokenizer)
        if processor is None:
            raise ValueError("the environment replied with an image or audio, but the model reads text only")
        return processor

    def escaped(self, text: str) -> str:
        """Insert a space into the text of every special token, so that it is not read as a control token."""
        return self.special_text.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


@lru_cache(maxsize=8)
def _chat_of_renderer(render: Renderer) -> _Chat:
    return _Chat(render)


def _chat_of(render: Render) -> _Chat | None:
    """Return None for other implementations of `Render`: their conversations are rendered again at every turn."""
    return _chat_of_renderer(render) if isinstance(render, Renderer) else None


def _escaped(message: Message, chat: _Chat | None) -> Message:
    """External text may spell special tokens; in a prompt it must stay plain text."""
    if chat is None:
        return message
    return Message(message.role, _mapped(message.content, chat), _mapped(dict(message.extra), chat))


def _mapped(value: Any, chat: _Chat) -> Any:
    if isinstance(value, str):
        return chat.escaped(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, chat) for key, inner in value.items()}
    return [_mapped(inner, chat) for inner in value] if isinstance(value, list | tuple) else value


def _rest(text: str, start: str) -> str | None:
    """Return what follows `start` at the beginning of `text`, ignoring white space; None if `text` differs."""
    if text.startswith(start):
        return text[len(start) :]
    position = 0
    for character in "".join(start.split()):
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text) or text[position] != character:
            return None
        position += 1
    return text[position:]
