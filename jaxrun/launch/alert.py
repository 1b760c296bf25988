"""Tells somebody: runs a command of the user's with the event on its standard input, never in the loop's way."""

from __future__ import annotations

import json
import logging
import queue
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxrun.config import ConfigError

log = logging.getLogger("jaxrun")

_TIMEOUT_S = 60.0
# How long the end of a run waits for what has not been told yet.
_CLOSING_S = 15.0


class Alert:
    """Runs `command` once for each event, in order, one at a time, on a thread of its own.

    The command gets the event as one line of JSON on its standard input. If it fails, or takes longer than a
    minute, the log says so and the run goes on.

    Args:
      command: as in a shell, without a shell: `notify.sh --room ops`.

    Raises:
      ConfigError: there is no such program.
    """

    def __init__(self, command: str):
        self._words = alert_words(command)
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="alert", daemon=True)
        self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        self._events.put(json.dumps(event, allow_nan=False))

    def close(self) -> None:
        """Waits a little for what is under way."""
        self._events.put(None)
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            log.error("config.guard.alert: %s is still running; the run does not wait for it", self._words[0])

    def _run(self) -> None:
        while (text := self._events.get()) is not None:
            started = time.monotonic()
            try:
                done = subprocess.run(
                    self._words, input=text + "\n", encoding="utf-8", errors="replace", timeout=_TIMEOUT_S,
                    capture_output=True, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                log.error("config.guard.alert: %s could not tell of an event (%s)", self._words[0], error)
                continue
            log.debug("alert: %s took %.1f s", self._words[0], time.monotonic() - started)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
                log.error("config.guard.alert: %s ended with %d (%s)", self._words[0], done.returncode, said[0])


def alert_words(command: str) -> list[str]:
    """The words of a command whose program exists.

    Raises:
      ConfigError: it does not, or the quoting is wrong.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"config.guard.alert: {command!r} cannot be read ({error}); quote it as in a shell") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else "the empty command"
        raise ConfigError(f"config.guard.alert: there is no program {program}; give the path of an executable file")
    return words
