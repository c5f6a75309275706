"""Runs inside the sandbox of an untrusted program: executes it, then serves calls to its functions.

The other side trusts nothing from here: the program shares this process and can write any reply itself.
"""

from __future__ import annotations

import json
import os

from oxrl.rewards.sandbox.literals import NotSerializableError, dumps, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import Any


def serve(sources: list[str], calls: int, replies: int) -> None:
    """Each line on `calls` is `[name, arguments, keywords]`; each line on `replies` is `[status, value]`."""
    program: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    with os.fdopen(calls, "rb") as incoming, os.fdopen(replies, "wb") as outgoing:

        def reply(status: str, value: str) -> None:
            outgoing.write(json.dumps([status, value]).encode() + b"\n")
            outgoing.flush()

        try:
            for source in sources:
                exec(compile(source, "<program>", "exec"), program)  # noqa: S102
        except BaseException as error:  # noqa: BLE001 - also SystemExit: how a program ends is data
            reply("broken", type(error).__name__)
            return
        reply("ready", "")
        for line in incoming:
            try:
                name, arguments, keywords = loads(line)
                reply("value", dumps(program[name](*arguments, **keywords)))
            except NotSerializableError as error:
                reply("opaque", str(error))
            except BaseException as error:  # noqa: BLE001 - as above
                reply("raised", type(error).__name__)
