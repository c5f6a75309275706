"""JSON and YAML from outside: what is read, and what is refused with a message and in no time."""

import json

import pytest
import yaml

from oxrl.parsing import MAX_DEPTH, MAX_YAML_CHARACTERS, ParseError, parse_json, parse_yaml, read_json, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{below}'])}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join(9 * [f'*{below}'])}]}}\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("{a: 1, b: [true, ~, 0x1F, 0b11, 1_000, -7]}", {"a": 1, "b": [True, None, 31, 3, 1000, -7]}),
        ("[1e-5, 1E5, 1.5e3, .5, -2., 1_0.5]", [1e-5, 1e5, 1500.0, 0.5, -2.0, 10.5]),
        ("[1:30, 1:30.5, 010, 0o10, 2024-01-02, 2024-13-45, 1e, ._]",
         ["1:30", "1:30.5", "010", "0o10", "2024-01-02", "2024-13-45", "1e", "._"]),
        ("x: &x {a: 1}\ny: {<<: *x, b: 2}", {"x": {"a": 1}, "y": {"a": 1, "b": 2}}),
        ("!!str 5", "5"),
    ],
)  # fmt: skip
def test_yaml_is_read_without_the_numbers_that_surprise(text, value):
    assert parse_yaml(text) == value


def test_numbers_that_yaml_writes_are_read_back():
    values = [0, -5, 10**18, 1e-5, 1e300, -0.1, float("inf"), "1:30", "010", "2024-01-02", "x", True, None]
    assert parse_yaml(yaml.safe_dump(values)) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "c.yaml has more than 100,000 values"),
        (MERGES, "c.yaml has more than 100,000 values"),
        ("a: &a [*a]", "c.yaml has more than"),
        ("a: &a {b: *a}", "c.yaml has more than"),
        ("[\n" * 5000, f"c.yaml nests lists and sections deeper than {MAX_DEPTH} levels"),
        ("#" * (MAX_YAML_CHARACTERS + 1), "c.yaml is longer than"),
        ("a: 1\nb: {c: 2, c: 3}", "line 2: b.c is a duplicate of line 2"),
        ("a: 1\nb: " + 5000 * "7", "line 2: b is a number of 5000 characters"),
        ("a: [1, " + 5000 * "7" + ".5]", "line 1: a.1 is a number of 5002 characters"),
        ("a: !!python/object:os.system x", "line 1: a has the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: !!timestamp x", "line 1: a has the tag"),
        ("a: !!bool maybe", "c.yaml is not valid YAML"),
        ("a: !!int x", "c.yaml is not valid YAML"),
        ("? [a]\n: b", "line 1: a key must be text"),
        ("a: [", "c.yaml is not valid YAML"),
        ("a: 1\n---\nb: 2", "c.yaml is not valid YAML"),
        ("a: \0", "c.yaml is not valid YAML"),
    ],
)
def test_yaml_that_would_hang_overflow_or_be_misread_is_refused(text, message):
    with pytest.raises(ParseError) as caught:
        parse_yaml(text, "c.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested deeper"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested deeper"),
        ('[{"a": 1, "b": 2, "a": 3}]', "the key 'a' occurs twice"),
        ("[" + 5000 * "7" + "]", "a number is too long"),
    ],
)
def test_json_that_would_overflow_or_be_misread_is_refused(text, message):
    for each in (text, text.encode()):
        with pytest.raises(ParseError, match=message):
            parse_json(each)


def test_json_within_the_bounds_is_read_and_errors_of_its_syntax_keep_their_position():
    deep = "[" * MAX_DEPTH + '"[[[["' + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deep)) == deep
    assert parse_json(json.dumps([{"a": "[" * 1000}] * 3)) == [{"a": "[" * 1000}] * 3
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json('{"a": ')
    assert caught.value.pos == 6


def test_a_file_that_cannot_be_parsed_is_named(tmp_path):
    file = tmp_path / "state"
    for read, contents in ((read_json, (b"{", b"\xff", b"[]", b"[" * 100_000)), (read_yaml, (b"{", b"\xff"))):
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(ParseError, match=f"{file} "):
                read(file)
