"""The model hub: one short request decides whether libraries wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 10.0  # for the hub to respond at all


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Inside, huggingface_hub reads its cache only if the hub does not respond, instead of retrying for half a minute.

    `HF_HUB_OFFLINE` is honoured: nothing is requested.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _responds(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _responds(url: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(url, timeout=SECONDS)
    except Exception:  # noqa: BLE001 - of the HTTP library that this version of huggingface_hub uses
        return False
    return True
