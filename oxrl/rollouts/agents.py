"""Messages of an external agent to a rollout, with the token ids that the model sampled.

Text does not determine the sampled tokens (it may be tokenised differently), so that messages without ids are refused
unless `tokenize` is set. Recording the ids is left to the agent, or to `endpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from oxrl.data.parts import take_media
from oxrl.rollouts.transcript import Tools, Transcript, begin
from oxrl.types import Generation, Message, Render, Rollout, Sample, Score, Turn

_REASONS: Mapping[str, Literal["stop", "length", "aborted"]] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "aborted": "aborted",
}
_RECORDED = ("token_ids", "logprobs", "prompt_ids", "finish_reason", "version")


def rollout_from_messages(
    messages: Sequence[Message | Mapping[str, Any]],
    render: Render,
    *,
    id: str = "agent",
    tools: Tools = (),
    tokenize: bool = False,
    score: Score | float | None = None,
    group: int = 0,
    index: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """`rollout_from_messages([{"role": "user", ...}, {"role": "assistant", ..., "token_ids": [...]}], render)`.

    An assistant message has `token_ids` and optionally `logprobs`, `prompt_ids` (all tokens before it), `finish_reason`
    and `version`. Without `prompt_ids`, the prompt is rendered by the chat template. Assistant messages before the
    first one with ids are part of the prompt. With `tokenize`, every assistant message counts as sampled, and those
    without ids are rendered by the template and tokenised, without log-probs.
    """
    chat = [each if isinstance(each, Message) else Message.from_dict(each) for each in messages]
    assistant = [index for index, message in enumerate(chat) if message.role == "assistant"]
    sampled = [index for index in assistant if tokenize or "token_ids" in chat[index].extra]
    if not sampled:
        raise ValueError(
            f"{id}: none of {len(assistant)} assistant messages has token_ids, so that no message is known to be "
            "sampled; record them (recording_endpoint does), or pass tokenize=True to train on the tokenised text"
        )
    if unknown := [index for index in assistant if index > sampled[0] and index not in sampled]:
        raise ValueError(
            f"{id}: assistant message {unknown[0]} comes after sampled ones and has no token_ids; record them "
            "for every turn, or pass tokenize=True"
        )
    turns = _turns(chat, sampled, render, id, tools)
    graded = Score(float(score)) if isinstance(score, int | float) else score
    sample = Sample(id, messages=tuple(chat[: sampled[0]]), tools=tuple(tools))
    return Rollout(sample, turns, group=group, index=index, score=graded, metadata=metadata or {})


def _turns(chat: Sequence[Message], sampled: Sequence[int], render: Render, id: str, tools: Tools) -> tuple[Turn, ...]:
    if sampled[0] == 0:
        raise ValueError(f"{id}: the first message is a sampled one; put the prompt before it")
    transcript = begin(render, chat[: sampled[0]], tools=tools)
    turns = []
    for index, following in zip(sampled, [*sampled[1:], len(chat)], strict=True):
        message, replies = _bare(chat[index]), tuple(chat[index + 1 : following])
        prompt_ids, generation = _sampled(chat, index, transcript, id)
        turns.append(Turn(prompt_ids, generation, (message, *take_media(replies)[0]), transcript.media))
        if following < len(chat):
            transcript = transcript.extend(generation, message, replies)
    return tuple(turns)


def _bare(message: Message) -> Message:
    return message._replace(extra={key: value for key, value in message.extra.items() if key not in _RECORDED})


def _sampled(
    chat: Sequence[Message], index: int, transcript: Transcript, id: str
) -> tuple[tuple[int, ...], Generation]:
    recorded = chat[index].extra
    if "token_ids" not in recorded:
        return transcript.prompt_ids, _tokenized([_bare(message) for message in chat[: index + 1]], transcript, id)
    ids = tuple(int(token) for token in recorded["token_ids"])
    logprobs = tuple(float(value) for value in recorded.get("logprobs") or ())
    if not ids or (logprobs and len(logprobs) != len(ids)):
        raise ValueError(
            f"{id}: assistant message {index} has {len(ids)} token_ids and {len(logprobs)} logprobs; give at "
            "least one id, and one log-prob for each id or none at all"
        )
    reason = recorded.get("finish_reason", "stop")
    if reason not in _REASONS:
        raise ValueError(f"{id}: finish_reason of message {index} is {reason!r}; it is one of {', '.join(_REASONS)}")
    prompt_ids = tuple(int(token) for token in recorded.get("prompt_ids") or transcript.prompt_ids)
    generation = Generation(ids, logprobs, _REASONS[reason], int(recorded.get("version", 0)), chat[index].text)
    return prompt_ids, generation._replace(text=transcript.plain(transcript.text_of(generation)))


def _tokenized(chat: Sequence[Message], transcript: Transcript, id: str) -> Generation:
    """Render the last message with the template and tokenise it."""
    (row,) = transcript.render.conversation(chat, id=id, first_trained=len(chat) - 1, tools=transcript.tools)
    return Generation(tuple(row.tokens[row.mask].tolist()), (), "stop", text=chat[-1].text)
