"""Chat templates that do not end or that fail: a model brings its own, so they are programs that someone else wrote."""

import signal
import threading

import pytest

from oxrl.algorithms import algorithm
from oxrl.data.assemble import assemble
from oxrl.data.render import Renderer
from oxrl.data.template import EndlessTemplateError, TemplateError, apply_template
from oxrl.types import Message, Sample
from tests.data import chat_templates as styles
from tests.data.chat_templates import byte_level

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
CHAT = [{"role": "user", "content": "Hi"}]


def tokenizer_with(template):
    tokenizer = byte_level(styles.CHATML)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [ENDLESS, CALLS])
def test_a_template_that_does_not_end_is_ended(template):
    with pytest.raises(EndlessTemplateError, match="the chat template did not end within 0.1 s"):
        apply_template(tokenizer_with(template), CHAT, generation_prompt=True, cpu_seconds=0.1)


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", {"default": "{% set n = 9 %}{{ n**(n**n) }}"}])
def test_powers_are_refused_because_no_signal_interrupts_one(template):
    with pytest.raises(EndlessTemplateError, match="computes powers"):
        apply_template(tokenizer_with(template), CHAT, generation_prompt=True)


def test_stars_in_the_text_of_a_template_are_no_powers():
    bold = "**{{ messages[0].content }}**{{ '**' }}{# ** #}"
    assert apply_template(tokenizer_with(bold), CHAT, generation_prompt=True) == "**Hi****"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.x.y }}",
        "{{ messages['x'] | int + 'a' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 1000000000000000000 }}",
        "{{ range(1000000000) | list }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_a_value_error_with_the_roles(template):
    with pytest.raises(TemplateError, match=r"does not accept these messages \(user\)"):
        apply_template(tokenizer_with(template), CHAT, generation_prompt=True)


def test_no_row_is_tried_again_with_a_template_that_does_not_end():
    renderer = Renderer(tokenizer_with(ENDLESS), template_kwargs={"cpu_seconds": 0.1})
    samples = [Sample(f"rows:{n}", messages=(Message("user", "Hi"), Message("assistant", "Yes"))) for n in range(1000)]
    with pytest.raises(EndlessTemplateError):
        assemble(samples, algorithm("sft"), renderer, bad_rows="skip")


def test_the_timer_of_the_caller_is_kept_and_other_threads_can_render():
    own = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGVTALRM, own)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000, 7)
    try:
        apply_template(byte_level(styles.CHATML), CHAT, generation_prompt=True)
        delay, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 900 < delay < 1001 and interval == 7
        assert signal.getsignal(signal.SIGVTALRM) is own
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    written = []
    thread = threading.Thread(
        target=lambda: written.append(apply_template(byte_level(styles.CHATML), CHAT, generation_prompt=True))
    )
    thread.start()
    thread.join()
    assert written == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
