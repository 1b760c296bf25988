"""A disk that fails during a save costs that checkpoint, not the run: it is reported, and the next save is tried."""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.checkpoint import Checkpointer

from .conftest import Recorder

# Orbax never awaits the rest of a save that failed early: neither its own coroutines, nor TensorStore's writes, which
# then report to an event loop that is closed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine 'OrbaxLayout:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*Event loop is closed:pytest.PytestUnraisableExceptionWarning"),
]

Opener = Callable[..., Checkpointer]


def big_state(value: float) -> dict[str, jnp.ndarray]:
    return {"x": jnp.full((1024, 1024), value)}  # 4 MiB


@contextmanager
def no_file_over(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def folder_gone(directory: Path) -> Iterator[None]:
    away = directory.with_name("away")
    directory.rename(away)
    directory.write_text("not a folder")
    try:
        yield
    finally:
        directory.unlink()
        away.rename(directory)


def expect_a_failure_then_recovery(checkpoints: Checkpointer, events: Recorder, trouble: Callable[[], object]) -> None:
    """One good save, one in trouble, and twice after it: the failed step itself and a later one."""
    checkpoints.save(1, big_state(1), {}, wait=True)
    with trouble():  # type: ignore[attr-defined]
        checkpoints.save(2, big_state(2), {})
        checkpoints.wait()
    assert events.kinds() == ["checkpoint_saved", "checkpoint_verified", "checkpoint_failed"]
    assert events[-1][1]["step"] == 2
    assert events[-1][1]["error"]
    assert checkpoints.steps() == [1]
    for step in (2, 3):
        checkpoints.save(step, big_state(step), {}, wait=True)
    assert checkpoints.steps() == [1, 2, 3]
    found = checkpoints.restore_newest(big_state(0))
    assert found is not None
    assert np.all(np.asarray(found[1]["x"]) == 3)


def test_a_file_that_cannot_grow(open_checkpoints: Opener, events: Recorder) -> None:
    expect_a_failure_then_recovery(open_checkpoints(), events, lambda: no_file_over(1 << 20))


def test_a_checkpoint_folder_that_is_gone(open_checkpoints: Opener, events: Recorder, directory: Path) -> None:
    expect_a_failure_then_recovery(open_checkpoints(), events, lambda: folder_gone(directory))


def test_a_manifest_that_cannot_be_written_leaves_no_checkpoint_behind(
    open_checkpoints: Opener, events: Recorder, directory: Path
) -> None:
    checkpoints = open_checkpoints()
    with no_file_over(64 << 10):  # enough for Orbax's files of this state, not for this host_state
        checkpoints.save(1, {"x": jnp.ones(8)}, {"big": "x" * 100_000}, wait=True)
    assert events.kinds() == ["checkpoint_failed"]
    checkpoints.close()
    assert list(directory.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system takes root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk(small_disk: Path, events: Recorder) -> None:
    ballast = small_disk / "ballast"

    @contextmanager
    def full() -> Iterator[None]:
        free_bytes = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free_bytes - (2 << 20)))  # half of what the next save needs is left
        yield
        os.unlink(ballast)

    checkpoints = Checkpointer(small_disk / "checkpoints", keep=3, on_event=events)
    expect_a_failure_then_recovery(checkpoints, events, full)
    checkpoints.close()


def test_a_read_only_disk(small_disk: Path, events: Recorder) -> None:
    @contextmanager
    def read_only() -> Iterator[None]:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)

    checkpoints = Checkpointer(small_disk / "checkpoints", keep=3, on_event=events)
    expect_a_failure_then_recovery(checkpoints, events, read_only)
    checkpoints.close()
