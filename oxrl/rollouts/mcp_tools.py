"""Tools of Model Context Protocol servers: `mcp:COMMAND` starts one, `mcp:URL` connects to one.

Its tools are listed at the start and become functions for `with_tools`, which limits the time and the length of their
answers. An error of a tool is text that the model reads. A server that ends or cannot be reached during a call
leaves the episode ungraded, and is started again for the next one.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from math import inf
from typing import IO, Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from oxrl.concurrency import task_group
from oxrl.machine.packages import is_installed, missing_message
from oxrl.names import error_text
from oxrl.rollouts.episode import EpisodeError
from oxrl.rollouts.tools import Tool

PREFIX = "mcp:"
START_SECONDS = 60.0  # to start a server, and to list its tools
_CLOSED = -32000  # the code of an error that says that the connection was closed
_LOG_TAIL = 500  # characters of a server's standard error in messages


class ToolError(Exception):
    """What a tool reported as an error."""


class MCPTool:
    """One tool of a server, as a function for `with_tools`."""

    def __init__(self, server: _Server, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.server, self.__name__ = server, name
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.schema = {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"{self.__name__} of {self.server.target}"

    async def __call__(self, **arguments: Any) -> str:
        return await self.server.call(self.__name__, arguments)


class _Server:
    """A connection to one server, held by a task of its own and opened again after it was lost."""

    def __init__(self, target: str, tasks: TaskGroup) -> None:
        self.target, self._tasks = target, tasks
        self._connection: tuple[Any, anyio.CancelScope] | None = None
        self._lock = anyio.Lock()

    async def connected(self) -> Any:
        """The client of a running connection; EpisodeError if there is none."""
        async with self._lock:
            if self._connection is None:
                outcome = await self._tasks.start(self._hold)
                if isinstance(outcome, str):
                    raise EpisodeError(outcome)
                self._connection = outcome
            return self._connection[0]

    async def _hold(self, *, task_status: TaskStatus[Any]) -> None:
        """Open the connection and hold it until it is cancelled; its errors must not end the other tasks."""
        failure, started = f"no answer within {START_SECONDS:g} s", False
        deadline = anyio.current_time() + START_SECONDS
        with tempfile.TemporaryFile("w+") as log:
            with anyio.CancelScope(deadline=deadline) as scope:
                try:
                    async with _client(self.target, log) as client:
                        scope.deadline, started = inf, True
                        task_status.started((client, scope))
                        await anyio.sleep_forever()
                except Exception as error:  # noqa: BLE001 - transports raise errors of many kinds
                    failure = _reason(error)
            if not started:
                task_status.started(f"the tool server {self.target} cannot be used: {failure}{_tail(log)}")

    async def tools(self) -> list[MCPTool]:
        client = await self.connected()
        listed: list[MCPTool] = []
        cursor: str | None = None
        try:
            with anyio.fail_after(START_SECONDS):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    listed += [
                        MCPTool(self, each.name, each.description or "", each.input_schema) for each in page.tools
                    ]
                    if not (cursor := page.next_cursor):
                        return listed
        except Exception as error:
            raise EpisodeError(f"the tool server {self.target} cannot list its tools: {_reason(error)}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        client = await self.connected()
        try:
            result = await client.call_tool(name, dict(arguments))
        except Exception as error:
            if _of_protocol(error):
                raise ToolError(str(error)) from error
            self._lose(client)
            raise EpisodeError(
                f"the tool server {self.target} was lost in a call of {name}: {_reason(error)}"
            ) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def _lose(self, client: Any) -> None:
        """Close the connection, unless another call has opened a new one since."""
        if self._connection is not None and self._connection[0] is client:
            self._connection[1].cancel()
            self._connection = None


@asynccontextmanager
async def mcp_tools(targets: Sequence[str]) -> AsyncIterator[dict[str, Tool]]:
    """Start or connect to servers, `COMMAND` or `URL`, and yield their tools by name; they are closed at the end.

    A server that does not start, and a name that two of them use, is a ValueError.
    """
    check_installed()
    async with task_group() as tasks:
        try:
            found = [tool for target in targets for tool in await _Server(target, tasks).tools()]
        except EpisodeError as error:
            raise ValueError(f"rollout.tools: {error}") from error
        yield named_once(found)
        tasks.cancel_scope.cancel()


def check_installed() -> None:
    if not is_installed("mcp"):
        raise ValueError(missing_message("mcp"))


def named_once(tools: Iterable[Any]) -> dict[str, Tool]:
    """The tools by name; two with the same name are refused."""
    found: dict[str, Tool] = {}
    for tool in tools:
        name = getattr(tool, "__name__", "") or type(tool).__name__
        if name in found:
            raise ValueError(f"rollout.tools: two tools are called {name}: {found[name]!r} and {tool!r}; leave one out")
        found[name] = tool
    return found


def _client(target: str, log: IO[str]) -> Any:
    mcp = import_module("mcp")
    if target.startswith(("http://", "https://")):
        return mcp.Client(target)
    command, *arguments = shlex.split(target)
    stdio = import_module("mcp.client.stdio")
    return mcp.Client(stdio.stdio_client(mcp.StdioServerParameters(command=command, args=arguments), errlog=log))


def _of_protocol(error: Exception) -> bool:
    """Whether the server itself answered with an error; it is alive."""
    code = getattr(error, "code", None)
    return type(error).__name__ == "MCPError" and code != _CLOSED


def _text(result: Any) -> str:
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {START_SECONDS:g} s"
    return error_text(error)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    text = log.read().strip()
    return f"; its last output: {text[-_LOG_TAIL:]}" if text else ""
