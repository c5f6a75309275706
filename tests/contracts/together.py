"""Rank 0 runs pytest and the other ranks serve: `torchrun ... -m tests.contracts.together ARGUMENTS`.

One launch serves many tests: starting costs more than all of them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import pytest

from oxrl.backends.ranks import RankError, Ranks, join_ranks

RANKS: list[Ranks] = []  # of this process, once it has joined
TIME_LIMIT = float(os.environ.get("OXRL_TEST_TIME_LIMIT", "60"))


def ranks() -> Ranks:
    if not RANKS:
        pytest.skip("needs several ranks: it runs inside tests/contracts/test_ranks.py")
    return RANKS[0]


def main(arguments: list[str]) -> int:
    joined = join_ranks(time_limit=TIME_LIMIT)
    if joined.rank:
        with suppress(RankError):  # lost on purpose, by a test; rank 0 knows whether that was right
            joined.serve()
        return 0
    RANKS.append(joined)
    failed = pytest.main([*arguments, "-p", "no:cacheprovider"])
    joined.stop()
    return int(failed)


if __name__ == "__main__":
    from tests.contracts import together  # the tests know this module by its name, not as __main__

    code = together.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # after a rank was lost on purpose, the process groups cannot be taken down in order
