"""Right programs earn the reward, whatever of Python they use: a reward that refuses them teaches wrong things."""

import zoneinfo

from oxrl.rewards import sandbox
from oxrl.rewards.sandbox.process import packages_of_programs
from tests.rewards.honest import HONEST
from tests.waiting import HANG


def verdict_of(names):
    """All of these programs in one sandbox, since their names differ; each has one test."""
    found = {name: sandbox.names_in([HONEST[name][1]], "") for name in names}
    tests = sandbox.Tests(
        statements=tuple(HONEST[name][1] for name in names),
        setup="\n".join(found[name].imports for name in names),
        remote={each: each for name in names for each in found[name].program},
        exceptions=tuple({each for name in names for each in found[name].exceptions}),
    )
    limits = sandbox.Limits(seconds=HANG)
    return sandbox.run_tests([HONEST[name][0] for name in names], tests, sandbox.available(), limits)


def test_right_programs_pass_their_tests():
    assert len(HONEST) >= 53
    missing = () if "numpy" in packages_of_programs() else ("numpy",)
    missing += () if zoneinfo.available_timezones() else ("time zones",)
    names = [name for name in HONEST if not name.startswith(missing)]
    if (verdict := verdict_of(names)).passed < len(names):
        failed = {name: alone for name in names if (alone := verdict_of([name])).passed < 1}
        raise AssertionError(f"{verdict}; each alone: {failed}")
