"""Names to objects, the nearest name to one that does not exist, and checks of keyword arguments.

An object is named `package.module:name` or `path/to/file.py:name`. A function defined in a script or a notebook has no
import path: `import_path_of` registers it as `live:module.name@digest of its source` for the lifetime of the process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial, wraps
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LIVE = "live"
_MOST_HELD = 1000  # values of a list or dict that a digest covers
_LIVE: dict[str, Any] = {}
_FOUND: dict[Path, Path] = {}  # absolute paths of files by name: a reward may change the working directory
_MODULES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}  # file -> (time and size, module)


def import_path_of(given: Any) -> str:
    """Return the path from which `import_object` loads a function; registers it if it cannot be imported."""
    name = str(_own_name(given))
    module = getattr(given, "__module__", None) or "__main__"
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is given:
        return f"{module}:{name}"
    path = f"{LIVE}:{module}.{name}@{source_digest(given)}".replace(" ", "")
    _LIVE[path] = given
    return path


def _own_name(given: Any) -> Any:
    """The qualified name of a function; of a partial one that of its function, of a `Reward` its name."""
    inner = given.func if isinstance(given, partial) else given
    return getattr(inner, "__qualname__", None) or getattr(inner, "name", None) or type(inner).__qualname__


def live_name(import_path: str) -> str | None:
    """`live_name("live:__main__.length@1f0c9a2e") == "length"`; None for an object that can be imported."""
    source, _, rest = import_path.partition(":")
    return rest.partition("@")[0].rpartition(".")[2] if source == LIVE else None


def without_digest(import_path: str) -> str:
    """`without_digest("live:__main__.length@1f0c9a2e") == "live:__main__.length"`; other texts as they are."""
    return re.sub(rf"^({LIVE}:.*)@[0-9a-f]{{8}}$", r"\1", import_path)


def is_available(import_path: str) -> bool:
    """Whether this process has the function; one that can be imported counts as available."""
    return live_name(import_path) is None or import_path in _LIVE


def source_digest(given: Any) -> str:
    """Eight hexadecimal digits of the source of a function, and of the functions and plain values that it holds."""
    return hashlib.sha256("\n".join(_sources(given, set())).encode()).hexdigest()[:8]


def _sources(given: Any, seen: set[int]) -> Iterator[str]:
    """Texts that are the same in every process. Of other objects that a function holds: their class."""
    if isinstance(given, str | int | float | bool | None):
        yield repr(given)
    elif id(given) in seen:
        return
    elif isinstance(given, list | tuple | dict) and len(given) <= _MOST_HELD:
        seen.add(id(given))
        for each in [*given, *given.values()] if isinstance(given, dict) else given:
            yield from _sources(each, seen)
    elif isinstance(given, partial):
        yield from _sources([given.func, list(given.args), given.keywords], seen)
    elif isinstance(given, MethodType):
        yield from _sources([given.__func__, given.__self__], seen)
    elif isinstance(given, FunctionType):
        seen.add(id(given))
        yield _source_of(given, given.__code__)
        yield from _sources([given.__defaults__, given.__kwdefaults__], seen)
        for cell in given.__closure__ or ():
            with suppress(ValueError):  # not yet assigned
                yield from _sources(cell.cell_contents, seen)
    else:
        kind = given if isinstance(given, type) else type(given)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if callable(given):
            yield _source_of(kind, None)
            yield from _sources(dict(getattr(given, "__dict__", {})) if kind is not given else {}, seen)


def _source_of(given: Any, code: CodeType | None) -> str:
    try:
        return inspect.getsource(given)
    except (OSError, TypeError):  # defined at a prompt, or not in Python
        return "" if code is None else _code_text(code)


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])


def import_object(import_path: str) -> Any:
    """Return the object at `import_path`, e.g. `my_rewards.py:length`; raise a ValueError if it cannot be imported."""
    if (live := live_name(import_path)) is not None:
        if import_path not in _LIVE:
            raise ValueError(
                f"{live} was defined in the script or notebook that started this run and is not available in this "
                f"process: pass {live} again, as in Trainer(MODEL).train(output=RUN, resume=True, ...), or move it to "
                f"a file and refer to it as FILE.py:{live}"
            )
        return _LIVE[import_path]
    source, _, name = import_path.rpartition(":")
    path = _found(Path(source))
    try:
        module = _module_of_file(path) if path.suffix == ".py" else importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{import_path} cannot be imported: {error}{_line_of(error, path)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file may raise anything, and also exit
        raise ValueError(f"{import_path} cannot be imported: {error_text(error)}{_line_of(error, path)}") from error


def error_text(error: BaseException) -> str:
    """`error_text(ValueError("no number")) == "ValueError: no number"`; the text of an error may raise, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - a custom `__str__` may also exit
        return type(error).__name__


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the file an error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def source_file(import_path: str) -> Path | None:
    """Return the file of an object that `import_object` has imported; None for other texts."""
    source, _, name = import_path.rpartition(":")
    if not name.isidentifier():
        return None
    imported = Path(getattr(sys.modules.get(source), "__file__", None) or "")
    path = _found(Path(source)) if source.endswith(".py") else imported
    return path if path.is_file() else None


def _found(path: Path) -> Path:
    """Return the path of the file, or where a file of this name was found before."""
    if path.suffix == ".py" and path.is_file():
        _FOUND[path] = path.absolute()
    return _FOUND.get(path, path)


def _module_of_file(path: Path) -> ModuleType:
    """Load a module by its file path, since another module may have the same name; once, while the file is the same."""
    if not path.is_file():
        raise ImportError(f"there is no file {path.absolute()}")
    version = (path.stat().st_mtime_ns, path.stat().st_size)
    if (loaded := _MODULES.get(path.absolute())) is not None and loaded[0] == version:
        return loaded[1]
    spec = importlib.util.spec_from_file_location(f"oxrl_user_{path.stem}", path)
    assert spec is not None, f"{path} ends with .py"
    assert spec.loader is not None, f"{path} ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # annotations are resolved there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    _MODULES[path.absolute()] = (version, module)
    return module


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name with the fewest edits from `name`, or None if no similarity reaches `cutoff`.

    Among names with equally many edits it is one with the same letters (`gpro`, `grpo`), then the most similar one.
    """
    names = list(known)
    similar = get_close_matches(name, names, n=max(1, len(names)), cutoff=cutoff)  # the most similar first
    return min(similar, key=lambda each: (_edits(name, each), sorted(each) != sorted(name)), default=None)


def _edits(one: str, other: str) -> int:
    """Insertions, deletions, replacements, and exchanges of neighbours: `_edits("gpro", "grpo") == 1`."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        above, before, row = before, row, [i + 1]
        for j, theirs in enumerate(other):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != theirs)))
            if i and j and letter == other[j - 1] and one[i - 1] == theirs:
                row[-1] = min(row[-1], above[j - 1] + 1)
    return row[-1]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did_you_mean("gpro", ["grpo", "dpo"]) == "; did you mean grpo?"`; `otherwise` if no known name is similar."""
    nearest = nearest_name(name, known)
    return otherwise if nearest is None else f"; did you mean {nearest}?"


def kind_of(value: Any) -> str:
    """`kind_of([1.5]) == "a list of float"`, for messages."""
    name = type(value).__name__
    if type(value) in (list, tuple):
        return f"a {name} of {type(value[0]).__name__}" if value else f"an empty {name}"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def as_record(kind: type[T], given: Any, name: str) -> T:
    """Return `given` as a `kind`: another dataclass is accepted if it has no other fields."""
    known = inspect.signature(kind).parameters
    if isinstance(given, kind):
        return given
    values = {each.name: getattr(given, each.name) for each in fields(given)} if is_dataclass(given) else {}
    if values and not set(values) - set(known):
        return kind(**values)
    unknown = f" with the field {min(set(values) - set(known))}" if values else ""
    raise ValueError(f"{name} is {kind_of(given)}{unknown}; give {kind.__name__}({', '.join(known)})")


def plain_name(name: str) -> str:
    """`plain_name("Online-DPO") == plain_name("online_dpo")`: lower case, without `-` and `_`."""
    return name.lower().replace("-", "").replace("_", "")


def find_name(name: str, known: Iterable[str], unknown: str, custom: str = "") -> str:
    """`find_name("Online-DPO", ["online_dpo"], "no such name") == "online_dpo"`: the spelling in `known`.

    A name that is not there is a ValueError: `unknown`, the nearest name, all known names, and `custom`.
    """
    by_plain_name = {plain_name(each): each for each in known}
    if plain_name(name) not in by_plain_name:
        nearest = nearest_name(plain_name(name), by_plain_name)
        hint = f"; did you mean {by_plain_name[nearest]}?" if nearest else "."
        raise ValueError(f"{unknown}{hint} There are: {', '.join(by_plain_name.values())}{custom}")
    return by_plain_name[plain_name(name)]


def lookup(parameter: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`; an unknown name is a ValueError that lists the known ones."""
    if name not in table:
        raise ValueError(f"{parameter} is {name!r}; it must be one of {', '.join(table)}")
    return table[name]


def check_keywords(
    owner: str,
    parameters: Mapping[str, inspect.Parameter],
    given: Mapping[str, Any],
    check_value: Callable[[str, Any, Any], None],
) -> None:
    """Raise ValueError for an unknown or missing keyword; `check_value(name, value, default)` checks the others."""
    for name, value in given.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters, f"; it takes: {', '.join(parameters) or 'none'}")
            raise ValueError(f"{owner} has no parameter {name}{hint}")
        if parameters[name].default is not inspect.Parameter.empty:
            check_value(name, value, parameters[name].default)
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{owner} needs {', '.join(missing)}")


def renamed_keywords(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept former spellings of keyword parameters, with a DeprecationWarning: `@renamed_keywords(old="new")`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in renamed.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{function.__name__} got both {new} and its former name {old}; pass {new} alone")
                warnings.warn(
                    f"{function.__name__}: {old} is now {new}; pass {new}=...", DeprecationWarning, stacklevel=2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
