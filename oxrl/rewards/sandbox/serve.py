"""Runs inside the cage of an untrusted program: executes it, then answers calls of its functions.

Nothing here is trusted by the other side: the program shares this process and could say whatever it likes itself.
"""

from __future__ import annotations

import json
import os

from oxrl.rewards.sandbox.literals import CannotTravelError, dumps, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import Any


def serve(sources: list[str], calls: int, answers: int) -> None:
    """Each line on `calls` is `[name, arguments, keywords]`; each on `answers` is `[how it went, value]`."""
    program: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    with os.fdopen(calls, "rb") as incoming, os.fdopen(answers, "wb") as outgoing:

        def answer(how: str, value: str) -> None:
            outgoing.write(json.dumps([how, value]).encode() + b"\n")
            outgoing.flush()

        try:
            for source in sources:
                exec(compile(source, "<program>", "exec"), program)  # noqa: S102
        except BaseException as error:  # noqa: BLE001 - also SystemExit: how a program ends is data here
            answer("broken", type(error).__name__)
            return
        answer("ready", "")
        for line in incoming:
            try:
                name, arguments, keywords = loads(line)
                answer("value", dumps(program[name](*arguments, **keywords)))
            except CannotTravelError as error:
                answer("opaque", str(error))
            except BaseException as error:  # noqa: BLE001 - as above
                answer("raised", type(error).__name__)
