"""Tools of a real MCP server: what they answer, and what becomes of an episode when they fail, hang or end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from oxrl.data.render import Renderer
from oxrl.rollouts.collect import RolloutSampler
from oxrl.rollouts.envs import with_tools
from oxrl.rollouts.mcp_tools import mcp_tools
from oxrl.types import GenerationConfig, Message, Rollout, Sample
from tests.rollouts.example_environments import is_running
from tests.rollouts.scripted_text import ScriptedText
from tests.waiting import EXPIRES, HANG

pytest.importorskip("mcp")
pytestmark = [pytest.mark.anyio, pytest.mark.engine]
SERVER = Path(__file__).with_name("tool_server.py")


@pytest.fixture
def anyio_backend():
    return "asyncio"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(tokenizer, tools, texts, **kwargs):
    sampler = RolloutSampler(
        ScriptedText(tokenizer, texts), Renderer(tokenizer), GenerationConfig(), env=with_tools(tools, **kwargs)
    )
    (rollout,) = await sampler((Rollout(Sample("s", (Message("user", "Where?"),))),))
    return rollout


def pids(folder):
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def test_a_servers_tools_answer_fail_hang_and_end_without_a_hung_episode(tiny, tmp_path):
    tokenizer = tiny[1]
    with anyio.fail_after(HANG):
        async with mcp_tools([f"{sys.executable} {SERVER} {tmp_path / 'pids'}"]) as tools:
            assert list(tools) == ["shelf", "look", "broken", "ends", "hangs", "long", "photo"]
            rollout = await played(tokenizer, tools, [call("shelf", letter="a"), "Empty."])
            assert '"description": "Tells what lies on a shelf."' in tokenizer.decode(rollout.turns[0].prompt_ids)
            assert rollout.turns[0].messages[1].content == "shelf a: empty"
            texts = [call("broken"), call("shelf", x=1), call("long"), call("photo"), "Hm."]
            rollout = await played(tokenizer, tools, texts)
            results = [turn.messages[1].content for turn in rollout.turns[:4]]
            assert results[0] == "error: ToolError: Error executing tool broken"
            assert "Field required" in results[1]
            assert results[2].endswith("[cut: 9992000 more characters]") and rollout.error is None
            assert results[3] == "[image]"
            rollout = await played(tokenizer, tools, [call("hangs"), "Hm."], time_limit=EXPIRES)
            assert rollout.turns[0].messages[1].content == f"error: hangs took longer than {EXPIRES:g} s"
            rollout = await played(tokenizer, tools, [call("ends"), "Hm."])
            assert "was lost in a call of ends" in rollout.error and rollout.score is None
            rollout = await played(tokenizer, tools, [call("shelf", letter="b"), "Empty."])  # started again
            assert rollout.turns[0].messages[1].content == "shelf b: empty"
            os.kill(pids(tmp_path)[-1], signal.SIGKILL)
            rollout = await played(tokenizer, tools, [call("shelf", letter="c"), "Empty."])
            assert "was lost in a call of shelf" in rollout.error
    assert len(pids(tmp_path)) == 2 and not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no-such-program --here", "the tool server no-such-program --here cannot be used: FileNotFoundError"),
        (f"{sys.executable} -c 'raise SystemExit(\"no token\")'", "its last output: no token"),
        ("http://127.0.0.1:1/mcp", "the tool server http://127.0.0.1:1/mcp cannot be used"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_with_its_name(target, message):
    with anyio.fail_after(HANG), pytest.raises(ValueError, match=message):
        async with mcp_tools([target]):
            pass
