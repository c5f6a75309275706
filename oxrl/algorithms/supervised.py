"""Losses that imitate: rows say what should have been said."""

from __future__ import annotations

from oxrl.types import Batch, Item, Losses, Outputs, Render, Sample, Term


def conversation_items(sample: Sample, render: Render) -> list[Item]:
    """Every assistant turn is trained, each as it would be said in its context."""
    if not sample.messages or sample.chosen or sample.label is not None:
        raise ValueError(f"{sample.id}: not a conversation to imitate; sft wants messages or a prompt with a response")
    if sample.messages[-1].role != "assistant":
        hint = "; to imitate the answers, map the column: response=answer" if sample.answer is not None else ""
        raise ValueError(f"{sample.id}: ends with {sample.messages[-1].role!r}, so there is nothing to imitate{hint}")
    return [(row,) for row in render.conversation(sample.messages, id=sample.id, tools=sample.tools)]


def text_items(sample: Sample, render: Render) -> list[Item]:
    """Every token of a plain text is trained."""
    if sample.text is None:
        raise ValueError(f"{sample.id}: cpt trains on plain text; this row has no `text` column")
    return [(row,) for row in render.text(sample.text, id=sample.id)]


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Losses:
    """-log p(token) over the trained tokens of the step; `correct` is there when it was asked for."""
    nll = Term(-(outputs.logprob * batch.mask).sum(), "token")
    correct = outputs.statistics.get("correct")
    return Losses({"nll": nll}, {} if correct is None else {"token_accuracy": Term(correct.sum(), "token")})
