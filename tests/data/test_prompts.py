"""Prompt templates are filled from rows; a missing column is named."""

import pytest

from oxrl import fill_prompts


def test_placeholders_are_filled_and_the_rest_of_the_row_is_kept():
    rows = [{"a": 2, "b": 3, "answer": "5", "level": 1}]
    (sample,) = fill_prompts("As {{json}}: {a} + {b}?", rows, system="Be brief.")
    assert [(message.role, message.content) for message in sample.messages] == [
        ("system", "Be brief."),
        ("user", "As {json}: 2 + 3?"),
    ]
    assert sample.answer == "5" and sample.metadata["level"] == 1
    assert fill_prompts("Say {word}.", [{"word": "hi"}])[0].answer is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{a} and {c}", "row 1: it has no column 'c' for the template; it has: a"),
        ("{}", "placeholders have the names of columns"),
        ("{a", "literal brace twice"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template, message):
    rows = [{"a": 1, "c": 2}, {"a": 1}]
    with pytest.raises(ValueError, match=message):
        fill_prompts(template, rows)
