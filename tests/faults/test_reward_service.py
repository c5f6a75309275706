"""A reward service that hangs, returns invalid replies or is down: errors are data, and never a reward of 0."""

import json
import threading
import urllib.request
from contextlib import contextmanager

import pytest

from tests.loops.test_online import Setting, small_letters
from tests.waiting import EXPIRES, HANG
from tests.web import Quiet, serving


class Service(Quiet):
    """Grades as `small_letters` does; `server.fault(count)` returns the fault of the request with this number."""

    def do_POST(self):
        tokens = json.loads(self.read())
        with self.server.lock:
            self.server.count += 1
            fault = self.server.fault(self.server.count)
        if fault == "hangs":
            self.server.release.wait(HANG)
        share = sum(97 <= token < 123 for token in tokens) / max(1, len(tokens))
        self.reply(503 if fault == "busy" else 200, b"<html>busy" if fault == "nonsense" else share)


@contextmanager
def service(fault):
    release = threading.Event()
    with serving(Service, lock=threading.Lock(), count=0, fault=fault, release=release) as server:
        try:
            yield server
        finally:
            release.set()


def reward_of(port):
    def service_reward(rollout):
        body = json.dumps(list(rollout.generation.token_ids)).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", body, timeout=HANG) as reply:
            return json.load(reply)

    return service_reward


@pytest.mark.trains
def test_a_service_that_fails_now_and_then_leaves_answers_ungraded_and_the_run_continues():
    kinds = {5: "hangs", 11: "busy", 17: "nonsense"}  # of every 40 requests
    seen, setting = [], Setting()
    with service(lambda count: kinds.get(count % 40)) as server:
        manager = setting.manager(batch_size=5, reward_fn=reward_of(server.server_port), reward_time_limit=EXPIRES)
        history = setting.run(4, manager, observe=lambda _step, groups: seen.extend(groups))
    ungraded = sum(line["ungraded"] for line in history)
    assert len(history) == 4 and ungraded >= 4 * 3
    rollouts = [rollout for group in seen for rollout in group]
    assert all(rollout.reward == pytest.approx(small_letters(rollout)) for rollout in rollouts), "none was made up"
    assert len(rollouts) >= 4 * 5 * 8 - ungraded, "what was graded is trained on"


@pytest.mark.trains
def test_a_service_that_goes_down_stops_the_run_with_its_error_and_unchanged_weights():
    setting, steps = Setting(), []
    with service(lambda _: None) as server:
        manager = setting.manager(reward_fn=reward_of(server.server_port), reward_time_limit=HANG)

        def down_after_two(step, _metrics):
            steps.append({name: tensor.clone() for name, tensor in setting.model.state_dict().items()})
            if step == 2:
                server.shutdown()
                server.server_close()

        with pytest.raises(
            RuntimeError, match=r"none of 24 prompts .* 24 could not be graded; the first failure: reward "
        ):
            setting.run(6, manager, log=down_after_two)
    assert len(steps) == 2
    assert all(steps[-1][name].equal(tensor) for name, tensor in setting.model.state_dict().items())
