"""Apply a tokenizer's chat template, a program that came with the model, within a time limit.

transformers runs it in Jinja's sandbox, which keeps it away from the machine but does not end its loops.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_SECONDS = 20.0  # a template takes milliseconds


class TemplateError(ValueError):
    """A chat template failed, or the assistant's part of its output cannot be determined; with reason and remedy."""


class EndlessTemplateError(TemplateError):
    """A chat template did not end in time; unlike other errors, it is not a matter of one row."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generation_prompt: bool,
    cpu_seconds: float = CPU_SECONDS,
    **template_kwargs: Any,
) -> str:
    """Return the text that the template makes of the messages; raise `TemplateError` if it fails or does not end."""
    from jinja2.exceptions import TemplateError as JinjaError

    failures = (JinjaError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
    _refuse_powers(tokenizer.chat_template)
    try:
        with _cpu_limit(cpu_seconds):
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
    except TimeoutError:
        raise EndlessTemplateError(
            f"the chat template did not end within {cpu_seconds:g} s: do not use this model, or set another template"
        ) from None
    except (*failures, MemoryError) as error:
        roles = ", ".join(str(message["role"]) for message in chat)
        raise TemplateError(
            f"the chat template does not accept these messages ({roles}): {error}; change the messages or the template"
        ) from error
    return text


def _refuse_powers(template: Any) -> None:
    """A signal does not interrupt one operation on numbers, and no template needs `9 ** 9 ** 9`."""
    for each in template.values() if isinstance(template, dict) else [template]:
        if "**" in str(each) and _has_powers(str(each)):
            raise EndlessTemplateError(
                "the chat template computes powers (**), which may not end: do not use this model, or set another "
                "template"
            )


@cache
def _has_powers(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return any((kind, value) == ("operator", "**") for _, kind, value in Environment().lex(template))  # noqa: S701
    except TemplateSyntaxError:  # reported when it is rendered
        return False


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after that much CPU time of this process.

    Only the main thread can be interrupted, and a run renders there; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.getsignal(signal.SIGVTALRM)
    if handler is not _stop:
        signal.signal(signal.SIGVTALRM, _stop)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        if handler not in (_stop, signal.SIG_DFL):  # else it stays: there are two calls per row
            signal.signal(signal.SIGVTALRM, handler)


def _stop(_: int, __: FrameType | None) -> None:
    raise TimeoutError
