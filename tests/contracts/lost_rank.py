"""A rank that fails alone: `python -m tests.contracts.lost_rank at_work|idle|mistaken`, once for each of two ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from oxrl.backends.ranks import RankError, join_ranks

TIME_LIMIT = 20.0


class Victim:
    """A worker whose verbs need all ranks, as those over a sharded model do."""

    def meet(self) -> float:
        total = torch.ones(4)
        dist.all_reduce(total)
        return float(total[0])

    def meet_or_die(self) -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.meet()

    def meet_or_refuse(self) -> float:
        if dist.get_rank() == 1:
            raise ValueError("rows of another colour")
        return self.meet()

    def process(self) -> int:
        return os.getpid()


def main(when: str, report: str) -> None:
    ranks = join_ranks(time_limit=TIME_LIMIT)
    if ranks.rank:
        ranks.serve()
    target = ranks.start(Victim)
    assert ranks.call(target, "meet") == [2.0, 2.0]
    if when == "idle":
        os.kill(ranks.call(target, "process")[1], signal.SIGKILL)
        time.sleep(1)
    started = time.monotonic()
    try:
        ranks.call(target, "meet_or_refuse" if when == "mistaken" else "meet_or_die")
    except (RankError, ValueError) as error:
        Path(report).write_text(f"{time.monotonic() - started:.1f}\n{error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
