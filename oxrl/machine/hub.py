"""The model hub: one short request decides whether libraries wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 10.0  # for the hub to respond at all


@contextmanager
def offline_if_unreachable(seconds: float = SECONDS) -> Iterator[None]:
    """Inside, huggingface_hub reads its cache only if the hub does not respond, instead of retrying for half a minute.

    `HF_HUB_OFFLINE` is honoured: nothing is requested.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _responds(constants.ENDPOINT, seconds)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _responds(url: str, seconds: float) -> bool:
    """Ask in a thread, which may go on: looking up a name has no time limit of its own."""
    from huggingface_hub import get_session

    responded = threading.Event()
    asked = threading.Event()

    def ask() -> None:
        try:
            get_session().head(url, timeout=seconds)
            responded.set()
        except Exception:  # noqa: BLE001, S110 - of the HTTP library that this version of huggingface_hub uses
            pass
        finally:
            asked.set()

    threading.Thread(target=ask, daemon=True, name="hub").start()
    asked.wait(seconds)
    return responded.is_set()
