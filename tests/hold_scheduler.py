"""vLLM's scheduler, which leaves out the sequences that `holding` holds; everything else is scheduled as always."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.holding import Hold


class HoldScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hold, self._id, self._reached = Hold(), "", set[str]()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        held = self._held()
        self.running = [request for request in self.running if request not in held]
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running = [*held, *self.running]
        if held and not output.total_num_scheduled_tokens:
            time.sleep(0.005)  # there is nothing else to do
        return output

    def _held(self) -> list[Any]:
        if (wanted := self._hold.wanted) is None:
            return []
        if wanted.id != self._id:
            self._id, self._reached = wanted.id, set()
        held = [request for request in self.running if wanted.applies_to(request)]
        ids = {request.request_id for request in held}
        if ids - self._reached:
            self._reached |= ids
            self._hold.report(wanted, len(self._reached))
        return held

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._hold.release()  # there are new weights
        return super().reset_prefix_cache(*args, **kwargs)
