"""A request to stop is a question between two steps; real signals, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxrun.launch import StopRequest

LOOP = """
import time
from jaxrun.launch import StopRequest
stop = StopRequest()
print("ready", flush=True)
step = 0
while stop.at(step) is None:
    step += 1
    time.sleep(0.01)
print(stop.at(step), stop.at(step + 1), flush=True)
time.sleep(float(__import__("sys").argv[1]))  # the save
print("saved", flush=True)
"""


class Loop:
    def __init__(self, save_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(save_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_an_answer_between_two_steps_and_the_process_goes_on_to_save(number: signal.Signals) -> None:
    loop = Loop(save_s=0)
    loop.process.send_signal(number)
    out, err = loop.process.communicate()
    assert out.splitlines() == [f"{number.name} {number.name}", "saved"]
    assert (loop.process.returncode, err) == (0, "")


def test_a_second_interrupt_does_not_wait_for_the_save() -> None:
    loop = Loop(save_s=600)
    loop.process.send_signal(signal.SIGINT)
    assert loop.line() == "SIGINT SIGINT"
    loop.process.send_signal(signal.SIGINT)
    out, err = loop.process.communicate()
    assert "saved" not in out
    assert err.splitlines()[-1].startswith("KeyboardInterrupt")


def test_a_second_sigterm_leaves_the_save_alone() -> None:
    loop = Loop(save_s=0.5)
    loop.process.send_signal(signal.SIGTERM)
    assert loop.line() == "SIGTERM SIGTERM"
    loop.process.send_signal(signal.SIGTERM)
    out, _ = loop.process.communicate()
    assert out.splitlines() == ["saved"]
    assert loop.process.returncode == 0


@pytest.fixture
def handlers() -> Iterator[dict[int, object]]:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_signals_go_back_to_whoever_had_them(handlers: dict[int, object]) -> None:
    stop = StopRequest()
    assert stop.at(1) is None
    assert all(signal.getsignal(n) != handler for n, handler in handlers.items())
    stop.restore()
    assert all(signal.getsignal(n) == handler for n, handler in handlers.items())
