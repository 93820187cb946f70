"""Signals during a run: the first asks, a later Ctrl-C insists."""

import os
import signal
import time

import pytest

from tost.train import loop
from tost.train.loop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_stops_at_once(monkeypatch):
    monkeypatch.setattr(loop, "GRACE_SECONDS", 0.01)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        time.sleep(0.02)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_echo_of_a_launcher_and_a_late_sigterm_do_not_stop_the_saving():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
