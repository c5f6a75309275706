"""A process with a vLLM server of its own: faults happen while it generates, then it trains until it is killed.

It tells what happened, one JSON line each; `test_engines` reads them and kills it.
"""

import json
import logging
import os
import signal
import sys
import time

import anyio
import torch

from oxrl.concurrent import task_group
from oxrl.generators.fleet import Limits, serving
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.builtin import prepare_builtin
from oxrl.rollouts.collect import Answers
from oxrl.types import GenerationConfig, Request, Weights
from tests.engines import ARGUMENTS
from tests.loops.test_online import Setting

LIMITS = Limits(stall=12, look=1, restarts=2)
REQUESTS = [Request((1, 50 + seed), seed=seed) for seed in range(4)]
LONG = GenerationConfig(max_new_tokens=700, seed=4, stop_token_ids=())

SHORT = LONG._replace(max_new_tokens=6)


def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def shift(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)


async def with_fault(generator, sign):
    """The answers to the same requests while a signal comes, and to one that is asked at every moment until then."""
    (replica,) = generator.engines
    answers, meanwhile, started = [], [], time.monotonic()

    async def ask():
        answers.extend(await generator.generate(REQUESTS, LONG))

    async def ask_shortly():
        meanwhile.extend(await generator.generate(REQUESTS[:1], SHORT))

    async def ask_again_and_again():
        while not answers:
            tasks.start_soon(ask_shortly)
            await anyio.sleep(0.25)

    async with task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.4)
        tell(asked=len(answers) == 0)
        if sign == signal.SIGKILL:
            os.kill(replica.server.process.pid, sign)  # the server alone: what it started is ours to end
        else:
            os.killpg(replica.server.process.pid, sign)
        tasks.start_soon(ask_again_and_again)
    return answers, {answer.token_ids for answer in meanwhile}, time.monotonic() - started


async def main(logs):
    setting = Setting("grpo", max_new_tokens=8)
    shift(setting.model)
    started = time.monotonic()
    async with serving(
        prepare_builtin("tiny"), setting.tokenizer, arguments=ARGUMENTS, log_folder=logs, limits=LIMITS
    ) as generator:
        (replica,) = generator.engines
        tell(ready=time.monotonic() - started, group=replica.server.process.pid, home=str(replica.home))
        await generator.update_weights(Weights(setting.model, 5))
        expected = await generator.generate(REQUESTS, LONG)
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            before = replica.server.process.pid
            answers, meanwhile, seconds = await with_fault(generator, sign)
            gap = max(
                abs(a - b) for x, y in zip(answers, expected, strict=True) for a, b in zip(x[1], y[1], strict=False)
            )
            tell(
                fault=sign.name,
                seconds=seconds,
                equal=[answer.token_ids for answer in answers] == [answer.token_ids for answer in expected],
                meanwhile=meanwhile == {expected[0].token_ids[: SHORT.max_new_tokens]},
                gap=gap,
                versions=sorted({answer.version for answer in answers}),
                restarts=replica.restarts,
                old_group=before,
                group=replica.server.process.pid,
            )
        setting.answers = Answers(generator, setting.render, GenerationConfig(max_new_tokens=8), seed=0)
        await run_online(
            setting.backend,
            setting.algorithm,
            setting.manager(batch_size=2),
            [generator],
            setting.render,
            OnlineConfig(num_steps=10_000),
            log=lambda step, metrics: tell(step=step, gap=metrics["logprob_gap"], restarts=replica.restarts),
        )


if __name__ == "__main__":
    logging.basicConfig(level="WARNING")
    anyio.run(main, sys.argv[1], backend=sys.argv[2])
