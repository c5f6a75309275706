"""The public names of `oxrl` to a page of Markdown: signature and first paragraph of each, grouped by module."""

from __future__ import annotations

import ast
import enum
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ForwardRef

import oxrl

WIDTH = 110


class _Plain(str):
    """Text that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def document() -> str:
    """The page `docs/api.md`."""
    lines = [
        "# API reference",
        "",
        "Generated from the functions themselves by `python docs/api_page.py`. All names are imported from `oxrl`",
        "(`from oxrl import Rollout`); the headings say where they live.",
    ]
    for home, names in oxrl._HOMES.items():
        lines += ["", f"## {home}", "", summary_of(import_module(home))]
        for name in names.split():
            lines += ["", f"### {name}", *_entry(home, name)]
    return "\n".join(lines) + "\n"


def explanation(home: str, name: str) -> str:
    """What is said about a public name, in one paragraph; empty if nothing is."""
    subject = getattr(import_module(home), name)
    if _is_named(subject) and subject.__name__ != name:
        return f"Another name of `{subject.__name__}`."
    if _is_named(subject):
        return "" if _was_made_up(subject) else summary_of(subject)
    words, annotation = _stated(home, name)
    return words or (f"A `{annotation}`." if annotation else "")


def summary_of(subject: Any) -> str:
    """The first paragraph of its docstring, in one line."""
    return " ".join(inspect.cleandoc(subject.__doc__ or "").split("\n\n")[0].split())


def _entry(home: str, name: str) -> Iterator[str]:
    subject = getattr(import_module(home), name)
    if signature := _signature(name, subject):
        yield from ("", "```text", signature, "```")
    yield from ("", explanation(home, name))


def _is_named(subject: Any) -> bool:
    return inspect.isclass(subject) or inspect.isfunction(subject)


def _was_made_up(subject: Any) -> bool:
    """NamedTuples and dataclasses without a docstring get one that only repeats their fields."""
    return inspect.isclass(subject) and (subject.__doc__ or "").startswith(f"{subject.__name__}(")


def _signature(name: str, subject: Any) -> str:
    if not _is_named(subject) or subject.__name__ != name:
        return ""
    if inspect.isclass(subject) and issubclass(subject, enum.Enum):
        return "\n".join(f"{name}.{each.name} = {each.value!r}" for each in subject)
    if getattr(subject, "_is_protocol", False):
        methods = [each for each in vars(subject).items() if inspect.isfunction(each[1]) and _is_public(each[0])]
        return "\n".join(_call(f"{name}.{each}", method, bound=True) for each, method in methods)
    if inspect.isclass(subject) and issubclass(subject, Exception):
        return ""
    return ("async " if inspect.iscoroutinefunction(inspect.unwrap(subject)) else "") + _call(name, subject)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


def _call(name: str, function: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = [_shown(each) for each in signature.parameters.values()][1 if bound else 0 :]
    returned = signature.return_annotation if inspect.isfunction(function) else signature.empty
    whole = signature.replace(parameters=parameters, return_annotation=_words(returned))
    if len(f"{name}{whole}") <= WIDTH:
        return f"{name}{whole}"
    lines = [str(each) for each in parameters]
    if "*, " in str(whole):
        lines.insert([each.kind for each in parameters].index(inspect.Parameter.KEYWORD_ONLY), "*")
    told = str(whole.replace(parameters=[]))
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), told[1:]])


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if " at 0x" in repr(default):
        default = _Plain(default.__name__ if _is_named(default) else type(default).__name__)
    return parameter.replace(annotation=_words(parameter.annotation), default=default)


def _words(annotation: Any) -> Any:
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return _Plain(annotation) if isinstance(annotation, str) else annotation


def _stated(home: str, name: str) -> tuple[str, str]:
    """The string below the assignment of a name, and the annotation in it, wherever in `home` that is."""
    for place in [each for each in sys.modules if each == home or each.startswith(f"{home}.")]:
        body = ast.parse(inspect.getsource(sys.modules[place])).body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
                below = following.value if isinstance(following, ast.Expr) else None
                words = str(below.value) if isinstance(below, ast.Constant) else ""
                return " ".join(words.split("\n\n")[0].split()), ast.unparse(statement.annotation)
    return "", ""


if __name__ == "__main__":
    sys.stdout.write(document())
