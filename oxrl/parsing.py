"""JSON and YAML from outside to plain values, within bounds.

Both readers refuse what would be misread in silence (a key twice, numbers that YAML 1.1 counts to base 60 or 8), what
would hang or overflow (deep nesting, aliases that multiply, endless numbers), and raise nothing but a ValueError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml

MAX_DEPTH = 100  # levels of lists and objects; other code recurses into them
MAX_DIGITS = 100  # of a number in YAML
MAX_YAML_CHARACTERS = 200_000
MAX_YAML_NODES = 100_000  # after every alias is replaced by what it stands for

KeyPath: TypeAlias = tuple[str, ...]
Lines: TypeAlias = dict[KeyPath, int]
"""Line of each key: `{("train", "lr"): 4}`."""


class ParseError(ValueError):
    """Valid syntax with content that is refused: one line per error."""


def parse_json(text: str | bytes) -> Any:
    """`json.loads` within bounds; raises `json.JSONDecodeError`, `UnicodeDecodeError` or `ParseError`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ParseError(f"lists and objects are nested deeper than {MAX_DEPTH} levels") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ParseError):
        raise
    except ValueError as error:  # Python's limit on the digits of an integer
        raise ParseError(f"a number is too long ({str(error).partition(';')[0]})") from None
    opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if opened > MAX_DEPTH and _is_deep(value):
        raise ParseError(f"lists and objects are nested deeper than {MAX_DEPTH} levels")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ParseError(f"the key {twice!r} occurs twice in an object: keep one of them")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a ValueError names the file."""
    try:
        value = parse_json(file.read_bytes())
    except ValueError as error:
        raise ParseError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ParseError(f"{file} must contain an object, it contains a {type(value).__name__}")
    return value


_TAG = "tag:yaml.org,2002:"
_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NUMBERS = {
    # Without base 60 (1:30 is 90) and octal with a leading 0 (010 is 8), which are text here.
    f"{_TAG}int": r"[-+]?(0|[1-9][\d_]*|0b[01_]+|0x[\da-fA-F_]+)",
    # With exponents that have no sign or no decimal point (1e5, 1e-5), which YAML 1.1 reads as text.
    f"{_TAG}float": r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d+[eE][-+]?\d+"
    r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Dates are text, numbers are those of `_NUMBERS`, and nesting is bounded."""

    _depth = 0
    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]  # the stubs take it for an attribute of instances
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in {*_NUMBERS, f"{_TAG}timestamp"}]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ParseError(f"{self.name} nests lists and sections deeper than {MAX_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$", re.ASCII), list("-+0123456789."))


def parse_yaml(text: str, name: str = "the text") -> Any:
    """Return the value of a YAML document; a `ParseError` names its lines and keys, or `name`."""
    return parse_yaml_with_lines(text, name)[0]


def parse_yaml_with_lines(text: str, name: str) -> tuple[Any, Lines]:
    """Return the value and the line of each key."""
    if len(text) > MAX_YAML_CHARACTERS:
        raise ParseError(f"{name} is longer than {MAX_YAML_CHARACTERS:,} characters")
    try:
        loader = _Loader(text)
        loader.name = name
        root = loader.get_single_node()
        if root is None:
            return None, {}
        lines = _checked(root, name)
        return loader.construct_document(root), lines
    except yaml.YAMLError as error:
        raise ParseError(f"{name} is not valid YAML: {error}") from None
    except KeyError as error:  # `!!bool maybe`
        raise ParseError(f"{name} is not valid YAML: {error} does not fit its tag") from None
    except ParseError:
        raise
    except ValueError as error:  # `!!int x`
        raise ParseError(f"{name} is not valid YAML: {error}") from None


def _checked(root: yaml.Node, name: str) -> Lines:
    """Return the line of each key; raise one `ParseError` with all that is wrong."""
    lines: Lines = {}
    wrong: list[str] = []
    for count, (key_path, node) in enumerate(_nodes(root, ()), 1):
        line, key = node.start_mark.line + 1, ".".join(key_path)[:200] or name
        if count > MAX_YAML_NODES or len(key_path) > MAX_DEPTH:
            limits = f"{MAX_YAML_NODES:,} values or {MAX_DEPTH} levels"
            raise ParseError(f"{name} has more than {limits} once its aliases are replaced: write the values out")
        if node.tag not in _TAGS:
            wrong.append(f"line {line}: {key} has the tag {node.tag!r:.200}, which is not supported: leave it out")
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            wrong.append(f"line {line}: {key} is a number of {len(node.value)} characters; at most {MAX_DIGITS}")
        if isinstance(node, yaml.MappingNode):
            wrong += _check_keys(node, key_path)
            scalars = [each for each, _ in node.value if isinstance(each, yaml.ScalarNode)]
            lines |= {(*key_path, each.value): each.start_mark.line + 1 for each in scalars}
    if wrong:
        raise ParseError("\n".join(wrong))
    return lines


def _check_keys(node: yaml.MappingNode, above: KeyPath) -> Iterator[str]:
    """Yield one message per repeated key, of which YAML would keep the last one, and per key that is not a scalar."""
    first: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            yield f"line {line}: a key must be text, not a list or a section"
        elif key.value in first:
            where = ".".join((*above, key.value))[:200]
            yield f"line {line}: {where} is a duplicate of line {first[key.value]}: keep one of them"
        else:
            first[key.value] = line


def _nodes(node: yaml.Node, key_path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node]]:
    """Yield every node with its key path; a node with aliases once for each. The caller ends an alias of itself."""
    yield key_path, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _nodes(value, (*key_path, str(key.value) if isinstance(key, yaml.ScalarNode) else "?"))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _nodes(value, (*key_path, str(index)))


def read_yaml(file: Path) -> Any:
    """Return the value in a YAML file; a ValueError names the file."""
    return parse_yaml(read_yaml_text(file), str(file))


def read_yaml_text(file: Path) -> str:
    """Return the text of a file, no more of it than `parse_yaml` accepts."""
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MAX_YAML_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ParseError(f"{file} is not a text file") from None
