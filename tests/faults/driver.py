"""A process with a vLLM server, which is killed while it generates; then it trains until it is killed, too.

It does so when the files "fault" and "train" appear in its folder, and reports what happened, one JSON line each;
`test_engines` reads them.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import anyio
import torch

from oxrl.concurrency import task_group
from oxrl.generators.servers import Limits, serving
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.builtin import prepare_builtin
from oxrl.rollouts.collect import RolloutSampler
from oxrl.types import GenerationConfig, Request, Weights
from tests.engines import ARGUMENTS
from tests.holding import VARIABLE, holding
from tests.loops.test_online import Setting
from tests.waiting import HANG, wait_until_async

IN_ONE = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: engine and worker are one process, and the server is ready sooner
LIMITS = Limits(start=HANG, answer=HANG, stall=HANG, look=1, restarts=2)
REQUESTS = [Request((1, 50 + seed), seed=seed) for seed in range(4)]
LONG = GenerationConfig(max_new_tokens=40, seed=4)
SHORT = LONG._replace(max_new_tokens=3)


def report(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def shift(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)


async def with_fault(generator):
    """Return answers to the same requests while the server is killed, and to one that is sent repeatedly since."""
    (replica,) = generator.engines
    answers, meanwhile = [], []

    async def ask():
        answers.extend(await generator.generate(REQUESTS, LONG))

    async def send_short():
        meanwhile.extend(await generator.generate(REQUESTS[:1], SHORT))

    async def send_repeatedly():
        while not answers:
            tasks.start_soon(send_short)
            await anyio.sleep(0.25)

    with holding(8) as hold:
        async with task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: hold.reached == len(REQUESTS), "some tokens of each answer")
            os.kill(
                replica.server.process.pid, signal.SIGKILL
            )  # the server only: its child processes must be ended by oxRL
            hold.release()
            tasks.start_soon(send_repeatedly)
    return answers, {answer.token_ids for answer in meanwhile}


async def report_fault(generator):
    (replica,) = generator.engines
    before = replica.server.process.pid
    expected = await generator.generate(REQUESTS, LONG)
    answers, meanwhile = await with_fault(generator)
    report(
        fault=True,
        equal=[answer.token_ids for answer in answers] == [answer.token_ids for answer in expected],
        meanwhile=meanwhile == {expected[0].token_ids[: SHORT.max_new_tokens]},
        gap=max(abs(a - b) for x, y in zip(answers, expected, strict=True) for a, b in zip(x[1], y[1], strict=False)),
        versions=sorted({answer.version for answer in answers}),
        restarts=replica.restarts,
        old_group=before,
        group=replica.server.process.pid,
    )


async def main(folder):
    setting = Setting("grpo", max_new_tokens=8)
    shift(setting.model)
    async with serving(
        prepare_builtin("tiny"), setting.tokenizer, arguments=ARGUMENTS, log_folder=folder / "logs", limits=LIMITS
    ) as generator:
        (replica,) = generator.engines
        await generator.update_weights(Weights(setting.model, 5))
        del os.environ[IN_ONE]
        report(ready=True, group=replica.server.process.pid, home=str(replica.home))
        fault, train = folder / "fault", folder / "train"
        await wait_until_async(lambda: fault.exists() or train.exists(), "there is something to do")
        if fault.exists():
            await report_fault(generator)
            await wait_until_async(train.exists, "it is to train")
        setting.sampler = RolloutSampler(generator, setting.render, GenerationConfig(max_new_tokens=8), seed=0)
        await run_online(
            setting.backend,
            setting.algorithm,
            setting.manager(batch_size=2),
            [generator],
            setting.render,
            OnlineConfig(num_steps=10_000),
            log=lambda step, metrics: report(step=step, gap=metrics["logprob_gap"], restarts=replica.restarts),
        )


def run(_connection: object, folder: Path) -> None:
    """In a fork; its reports and its log are written to two files of its folder."""
    for name, stream in (("reports", 1), ("log", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    logging.basicConfig(level="WARNING", force=True)
    os.environ |= {VARIABLE: str(folder), IN_ONE: "0"}  # the first server; the next one has both
    anyio.run(main, folder)
