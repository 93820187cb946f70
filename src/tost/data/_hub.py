"""The Hugging Face hub, when it cannot be reached: libraries try again and again, for half a minute; we ask once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


def unreachable() -> str:
    """Return why the hub cannot be reached; empty if it can be, or if only a proxy knows."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    if getproxies():
        return ""
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=3):
            return ""
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error})"


@contextmanager
def asked_once() -> Iterator[str]:
    """Let libraries use what they have on this machine, and only that if the hub cannot be reached.

    Yields:
        Why it cannot be; empty if it can.
    """
    from huggingface_hub import constants

    reason, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(reason)
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = before
