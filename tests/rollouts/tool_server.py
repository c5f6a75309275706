"""An MCP server for tests: `python tool_server.py FILE` writes its process id to the file."""

import os
import sys
import threading
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("shelves")


@server.tool()
def shelf(letter: str) -> str:
    """Tells what lies on a shelf."""
    return f"shelf {letter}: empty"


@server.tool()
def look() -> str:
    """Looks around."""
    return "a shelf"


@server.tool()
def broken() -> str:
    raise ValueError("no such shelf")


@server.tool()
def ends() -> str:
    os._exit(3)


@server.tool()
def hangs() -> str:
    threading.Event().wait()
    return ""


@server.tool()
def long() -> str:
    return "x" * 10_000_000


@server.tool()
def photo() -> Image:
    return Image(data=b"no image at all", format="png")


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    server.run()
