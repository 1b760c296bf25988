"""An alert reaches the user's command, and no command of the user's can get in the run's way."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrun.config import ConfigError
from jaxrun.launch import Alert, alert, alert_words

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a program of some Python, with `text` as what it reads and `out` a file to write to; returns the command."""

    def make(code: str) -> str:
        path = tmp_path / "tell me.py"
        head = f"#!{sys.executable}\nimport os, sys\ntext = sys.stdin.read()\nout = open({str(tmp_path / 'told')!r}, 'a')\n"
        path.write_text(head + code + "\n")
        path.chmod(0o755)
        return shlex.quote(str(path))

    return make


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the log says; its own handler, as a command that ran in this process may have taken the others off."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("jaxrun")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def waits_for(gate: Path) -> str:
    """Python that goes on once there is such a file."""
    return f"import time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"


def told(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def event(n: int) -> dict[str, Any]:
    return {"kind": "rewind", "step": n, "reason": 'a "loss" of nan, é'}


def test_the_command_gets_the_event_as_a_line_of_json(script: Script, tmp_path: Path, said: list[str]) -> None:
    told_of = Alert(script("assert text.endswith('\\n'); out.write(text)"))
    told_of.send(event(3))
    told_of.close()
    assert told(tmp_path) == [event(3)]
    assert said == []


def test_events_arrive_one_at_a_time_and_in_order(script: Script, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    told_of = Alert(script(f"os.close(os.open({str(busy)!r}, os.O_CREAT | os.O_EXCL)); out.write(text); out.flush(); os.unlink({str(busy)!r})"))  # fmt: skip
    for n in range(5):
        told_of.send(event(n))
    told_of.close()
    assert [e["step"] for e in told(tmp_path)] == list(range(5))


def test_the_command_gets_the_words_that_a_shell_would_give_it(script: Script, tmp_path: Path) -> None:
    told_of = Alert(script("import json; out.write(json.dumps({'words': sys.argv[1:]}) + '\\n')") + " --room 'ops night' $HOME")  # fmt: skip
    told_of.send(event(0))
    told_of.close()
    assert told(tmp_path) == [{"words": ["--room", "ops night", "$HOME"]}]


def test_a_command_that_fails_is_in_the_log_with_what_it_said_and_the_next_event_is_told(
    script: Script, tmp_path: Path, said: list[str]
) -> None:
    told_of = Alert(script("out.write(text); print('first\\nno such room', file=sys.stderr); sys.exit(3)"))
    told_of.send(event(0))
    told_of.send(event(1))
    told_of.close()
    assert [e["step"] for e in told(tmp_path)] == [0, 1]
    assert len(said) == 2
    assert said[0].startswith("config.guard.alert: ")
    assert said[0].endswith("ended with 3 (no such room)")


def test_a_command_that_says_nothing_or_no_text_does_not_stop_the_others(
    script: Script, tmp_path: Path, said: list[str]
) -> None:
    told_of = Alert(script("out.write(text); os.write(2, b'\\xff\\xfe\\n' * ('\"step\": 1' in text)); sys.exit(1)"))
    for n in range(3):
        told_of.send(event(n))
    told_of.close()
    assert [e["step"] for e in told(tmp_path)] == [0, 1, 2]
    assert [line.rsplit(" (")[1] for line in said] == ["it said nothing)", "\ufffd\ufffd)", "it said nothing)"]


def test_a_command_that_does_not_read_is_not_an_error(script: Script, tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "deaf.py"
    path.write_text(f"#!{sys.executable}\n")
    path.chmod(0o755)
    told_of = Alert(str(path))
    told_of.send({"kind": "rewind", "long": "x" * 1_000_000})
    told_of.close()
    assert said == []


def test_a_program_that_goes_away_during_the_run_is_in_the_log(script: Script, tmp_path: Path, said: list[str]) -> None:
    told_of = Alert(script("out.write(text)"))
    (tmp_path / "tell me.py").unlink()
    told_of.send(event(0))
    told_of.close()
    (line,) = said
    assert line.startswith("config.guard.alert: ")
    assert "could not tell of an event" in line
    assert "\n" not in line


def test_a_command_that_hangs_does_not_hold_up_the_run(script: Script, tmp_path: Path) -> None:
    told_of = Alert(script(waits_for(tmp_path / "gate") + "out.write(text)"))
    for n in range(3):
        told_of.send(event(n))
    # All were taken, and the first has not ended: it waits for what only comes now.
    assert told(tmp_path) == []
    (tmp_path / "gate").touch()
    told_of.close()
    assert [e["step"] for e in told(tmp_path)] == [0, 1, 2]


def test_a_command_that_takes_too_long_is_ended_and_the_next_event_is_told(
    script: Script, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "_TIMEOUT_S", 5.0)
    monkeypatch.setattr(alert, "_CLOSING_S", 300.0)
    told_of = Alert(script("import time; time.sleep(3600 * ('\"step\": 0' in text)); out.write(text)"))
    told_of.send(event(0))
    told_of.send(event(1))
    told_of.close()
    assert [e["step"] for e in told(tmp_path)] == [1]
    assert "timed out after 5.0 seconds" in said[0]


def test_the_end_of_a_run_waits_for_what_is_under_way(script: Script, tmp_path: Path) -> None:
    told_of = Alert(script(waits_for(tmp_path / "gate") + "out.write(text)"))
    told_of.send(event(0))
    told_of.send(event(1))
    closing = threading.Thread(target=told_of.close)
    closing.start()
    assert told(tmp_path) == []
    (tmp_path / "gate").touch()
    closing.join()
    assert [e["step"] for e in told(tmp_path)] == [0, 1]


def test_the_end_of_a_run_does_not_wait_for_ever(
    script: Script, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "_CLOSING_S", 0.0)
    told_of = Alert(script(waits_for(tmp_path / "gate") + "out.write(text)"))
    told_of.send(event(0))
    told_of.close()
    assert len(said) == 1
    assert said[0].endswith("is still running; the run does not wait for it")
    (tmp_path / "gate").touch()
    told_of._thread.join()


def test_numbers_that_json_does_not_have_are_refused_where_they_are_sent(script: Script) -> None:
    told_of = Alert(script("out.write(text)"))
    with pytest.raises(ValueError, match="JSON"):
        told_of.send({"loss": float("nan")})
    told_of.close()


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("/no/such/program --room ops", "there is no program /no/such/program"),
        ("no-such-program-at-all", "there is no program no-such-program-at-all"),
        ("", "there is no program the empty command"),
        ("notify 'ops", "cannot be read"),
    ],
)
def test_a_command_that_cannot_run_is_refused_in_one_line_before_the_run(command: str, wrong: str) -> None:
    for refuse in (alert_words, Alert):
        with pytest.raises(ConfigError) as error:
            refuse(command)
        text = str(error.value)
        assert text.startswith("config.guard.alert: ")
        assert wrong in text
        assert "; " in text
        assert "\n" not in text


def test_a_file_that_is_not_executable_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "notify.sh"
    path.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="executable"):
        alert_words(str(path))
