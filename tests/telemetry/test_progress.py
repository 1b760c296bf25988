"""The progress line says what is known, where it can be read, and never gets in the way."""

from __future__ import annotations

import io
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrun.telemetry.progress import Profile, Progress, duration, parameter_table, progress_text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_holds_step_loss_speed_mfu_and_time_left() -> None:
    text = progress_text({"step": 120, "loss": 2.31449, "tokens_per_sec": 41300.2, "mfu": 0.3821}, 2000, 240)
    assert text == "step 120/2000  loss 2.3145  41,300 tokens/s  MFU 38.2 %  4 min left"
    assert (
        progress_text({"step": 1, "loss": "nan", "mfu": None, "update_applied": False}, 2000, None)
        == "step 1/2000  loss nan  update skipped"
    )


def test_durations_read_well() -> None:
    assert [duration(s) for s in (3.4, 89, 91, 3600, 7300, 90_000)] == [
        "3 s",
        "89 s",
        "2 min",
        "1 h 0 min",
        "2 h 2 min",
        "1 d 1 h",
    ]


def test_a_log_gets_a_line_every_few_seconds_and_the_last_one() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(20, stream, every_s=5.0, clock=clock)
    for step in range(1, 21):
        progress.show({"step": step, "loss": 1.0})
        clock.now += 1.0
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert "14 s left" in stream.getvalue().splitlines()[1]
    assert "\r" not in stream.getvalue()


def test_a_terminal_shows_one_line_rewritten_in_place() -> None:
    stream = Terminal()
    progress = Progress(1000, stream)
    progress.show({"step": 9, "loss": 1.0, "tokens_per_sec": 123456.0})
    progress.show({"step": 9, "eval_loss": 2.0})
    progress.show({"step": 10, "loss": 1.0})
    progress.close()
    first, second = stream.getvalue().removeprefix("\r").split("\r")
    assert second.endswith("\n")
    assert len(second.rstrip("\n")) >= len(first)  # nothing of the longer line stays
    assert "eval loss 2.0000" in second


def test_time_left_starts_anew_after_a_rewind() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream, every_s=0.0, clock=clock)
    for step in (1, 11, 3, 4):
        progress.show({"step": step, "loss": 1.0})
        clock.now += 10.0
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == [
        "loss 1.0000",
        "89 s left",
        "loss 1.0000",
        "16 min left",
    ]


def test_a_closed_pipe_or_stream_ends_the_display_only() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w")
    progress = Progress(10, pipe, every_s=0.0)
    for step in range(1, 11):
        progress.show({"step": step, "loss": 1.0})
    progress.close()
    with pytest.raises(BrokenPipeError):
        pipe.close()
    closed = io.StringIO()
    progress = Progress(10, closed, every_s=0.0)
    progress.show({"step": 1, "loss": 1.0})
    closed.close()
    progress.show({"step": 2, "loss": 1.0})
    progress.close()


def test_the_parameter_table_names_every_parameter_also_abstract_ones() -> None:
    params = {
        "layers": {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32)},
        "scale": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    table = parameter_table(params)
    assert "layers/kernel" in table
    assert "(4, 8)" in table
    assert "Total: 40" in table


def test_a_profile_covers_the_steps_asked_for_and_is_taken_once(tmp_path: Path) -> None:
    profile, running = Profile(tmp_path, first_step=2, num_steps=2), []
    x = jnp.ones((4, 4))
    for step in range(1, 8):
        profile.before(step, x)
        running.append(profile._running)
        x = x @ x / 4
    profile.close()
    assert running == [False, True, True, False, False, False, False]
    assert list(tmp_path.rglob("*.xplane.pb"))
    nothing = Profile(tmp_path / "none", first_step=2, num_steps=0)
    for step in range(1, 5):
        nothing.before(step, x)
    assert not (tmp_path / "none").exists()
