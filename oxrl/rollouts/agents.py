"""What a user's own agent did becomes a rollout: its messages, with the token ids that the model really sampled.

Text alone is not what was sampled (it reads back as other tokens), so that messages without ids are refused unless
tokenising them is asked for. Recording ids is left to the agent, or to `endpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

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

    An assistant's message carries `token_ids`, and if they are known `logprobs`, `prompt_ids` (all that the model saw
    before), `finish_reason` and `version`. Without `prompt_ids`, the chat template says what it saw. Assistant
    messages before the first one with ids are part of the prompt. With `tokenize`, what has no ids is read by the
    tokenizer as the template writes it, and has no log-probs: every assistant message is taken as sampled then.
    """
    chat = [each if isinstance(each, Message) else Message.from_dict(each) for each in messages]
    spoken = [place for place, message in enumerate(chat) if message.role == "assistant"]
    sampled = [place for place in spoken if tokenize or "token_ids" in chat[place].extra]
    if not sampled:
        raise ValueError(
            f"{id}: none of {len(spoken)} assistant messages has token_ids, so that nothing is known to have been "
            "sampled; record them (the endpoint does), or pass tokenize=True to train on text as it reads"
        )
    if unknown := [place for place in spoken if place > sampled[0] and place not in sampled]:
        raise ValueError(
            f"{id}: the assistant's message {unknown[0]} comes after sampled ones and has no token_ids; record them "
            "for every turn, or pass tokenize=True"
        )
    turns = _turns(chat, sampled, render, id, tools)
    graded = Score(float(score)) if isinstance(score, int | float) else score
    sample = Sample(id, messages=tuple(chat[: sampled[0]]), tools=tuple(tools))
    return Rollout(sample, turns, group=group, index=index, score=graded, metadata=metadata or {})


def _turns(chat: Sequence[Message], sampled: Sequence[int], render: Render, id: str, tools: Tools) -> tuple[Turn, ...]:
    if sampled[0] == 0:
        raise ValueError(f"{id}: it begins with what the model said; put what it was asked before that")
    transcript = begin(render, chat[: sampled[0]], tools=tools)
    turns = []
    for place, following in zip(sampled, [*sampled[1:], len(chat)], strict=True):
        said, answers = _bare(chat[place]), tuple(chat[place + 1 : following])
        prompt_ids, generation = _sampled(chat, place, transcript, id)
        turns.append(Turn(prompt_ids, generation, (said, *answers)))
        if following < len(chat):
            transcript = transcript.go_on(generation, said, answers)
    return tuple(turns)


def _bare(message: Message) -> Message:
    return message._replace(extra={key: value for key, value in message.extra.items() if key not in _RECORDED})


def _sampled(
    chat: Sequence[Message], place: int, transcript: Transcript, id: str
) -> tuple[tuple[int, ...], Generation]:
    recorded = chat[place].extra
    if "token_ids" not in recorded:
        return transcript.prompt_ids, _tokenized([_bare(message) for message in chat[: place + 1]], transcript, id)
    ids = tuple(int(token) for token in recorded["token_ids"])
    logprobs = tuple(float(value) for value in recorded.get("logprobs") or ())
    if not ids or (logprobs and len(logprobs) != len(ids)):
        raise ValueError(
            f"{id}: the assistant's message {place} has {len(ids)} token_ids and {len(logprobs)} logprobs; give at "
            "least one id, and one log-prob for each id or none at all"
        )
    reason = recorded.get("finish_reason", "stop")
    if reason not in _REASONS:
        raise ValueError(f"{id}: finish_reason of message {place} is {reason!r}; it is one of {', '.join(_REASONS)}")
    seen = tuple(int(token) for token in recorded.get("prompt_ids") or transcript.prompt_ids)
    generation = Generation(ids, logprobs, _REASONS[reason], int(recorded.get("version", 0)), chat[place].text)
    return seen, generation._replace(text=transcript.plain(transcript.said(generation)))


def _tokenized(chat: Sequence[Message], transcript: Transcript, id: str) -> Generation:
    """The last message as the template writes it and the tokenizer reads it."""
    (row,) = transcript.render.conversation(chat, id=id, first_trained=len(chat) - 1, tools=transcript.tools)
    return Generation(tuple(row.tokens[row.mask].tolist()), (), "stop", text=chat[-1].text)
