"""Rollouts for tests, by their text."""

from oxrl.types import Generation, Message, Rollout, Sample, Turn


def a_sample(answer=None, prompt="What?", **metadata):
    return Sample("s1", (Message("user", prompt),), answer=answer, metadata=metadata)


def a_turn(text="", tokens=(7, 8, 9), prompt=(1, 2), reason="stop"):
    return Turn(tuple(prompt), Generation(tuple(tokens), (-0.5,) * len(tokens), reason, text=text))


def a_rollout(text, answer=None, *, index=0, tokens=(7, 8, 9), prompt="What?", **metadata):
    turn = a_turn(text, tokens)._replace(messages=(Message("assistant", text),))
    return Rollout(a_sample(answer, prompt, **metadata), (turn,), index=index)
