"""What is saved is restored, on any mesh, and saving holds nobody up."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.checkpoint import Checkpointer, checkpointer, describe, manifest, verify
from jaxrun.config import ConfigError

from .conftest import Recorder
from .states import MESHES, State, abstract, bits, make_state

Opener = Callable[..., Checkpointer]
HOST = {"batch_index": 12, "losses": [1.5, float("inf")], "name": "ü", "none": None}


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", ["8", "1"])
def test_a_state_comes_back_bit_for_bit_on_any_mesh(open_checkpoints: Opener, source: str, target: str) -> None:
    state = make_state(source)
    checkpoints = open_checkpoints()
    checkpoints.save(5, state, HOST, wait=True)
    restored, host_state = checkpoints.restore(5, abstract(target))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, abstract(target))
    assert host_state == HOST


def test_the_state_may_be_donated_as_soon_as_save_returns(open_checkpoints: Opener) -> None:
    train = jax.jit(lambda s: jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, s), donate_argnums=0)
    checkpoints = open_checkpoints()
    x = jax.device_put(jnp.ones((512, 1024)), make_state().params["w"].sharding)
    for step in range(1, 6):
        checkpoints.save(step, {"x": x}, {})
        for _ in range(3):
            donated, x = x, train({"x": x})["x"]
        assert donated.is_deleted()
        checkpoints.wait()
        like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
        assert np.all(np.asarray(checkpoints.restore(step, like)[0]["x"]) == 1 + 3 * (step - 1))


def test_saved_then_verified_is_reported_on_the_callers_thread(
    open_checkpoints: Opener, events: Recorder, directory: Path
) -> None:
    threads = []

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        threads.append(threading.current_thread())
        events(kind, fields)

    checkpoints = open_checkpoints(on_event=on_event)
    blocked_s = checkpoints.save(5, make_state(), {})
    assert events == []
    checkpoints.wait()
    assert events.kinds() == ["checkpoint_saved", "checkpoint_verified"]
    assert set(threads) == {threading.main_thread()}
    saved = events[0][1]
    assert saved["step"] == 5
    assert saved["blocked_s"] == blocked_s > 0
    assert saved["write_s"] > 0
    on_disk = sum(p.stat().st_size for p in (directory / "5").rglob("*") if p.is_file() and p.name != "manifest.json")
    assert saved["bytes"] == on_disk


def test_a_replicated_array_is_written_once(open_checkpoints: Opener, events: Recorder) -> None:
    mesh = make_state("4x2").params["w"].sharding.mesh
    x = jax.device_put(
        jax.random.bits(jax.random.key(0), (256, 1024)), jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    open_checkpoints().save(1, {"x": x}, {}, wait=True)
    assert x.nbytes <= events[0][1]["bytes"] < 1.1 * x.nbytes


def test_neither_a_save_nor_a_restore_warns_of_anything(
    open_checkpoints: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = open_checkpoints()
    with caplog.at_level(logging.WARNING):
        checkpoints.save(1, make_state(), {}, wait=True)
        checkpoints.restore(1, abstract())
        checkpoints.save(2, make_state(), {}, wait=True)
    assert caplog.messages == []


def test_orbax_itself_can_load_a_checkpoint(open_checkpoints: Opener, directory: Path) -> None:
    state = make_state()
    open_checkpoints().save(5, state, {}, wait=True)
    from orbax.checkpoint import v1 as ocp

    with ocp.training.Checkpointer(directory) as theirs:
        assert [c.step for c in theirs.checkpoints] == [5]
        assert bits(theirs.load(5, abstract())) == bits(state)


def test_a_save_while_the_last_is_still_written_is_reported_and_skipped(
    open_checkpoints: Opener, events: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    commit = manifest.commit
    monkeypatch.setattr(manifest, "commit", lambda *a, **k: (release.wait(30), commit(*a, **k))[1])
    checkpoints = open_checkpoints(busy_wait_s=0)
    checkpoints.save(1, make_state(), {})
    assert checkpoints.save(2, make_state(), {}) == 0
    assert events == [("checkpoint_failed", {"step": 2, "reason": "previous save still running"})]
    waits: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(checkpointer.futures, "wait", lambda *a, **k: waits.append(a))
        assert checkpoints.save(3, make_state(), {}) == 0
    assert waits == []  # it was waited for once
    assert len(events) == 2
    assert checkpoints.steps() == []
    release.set()
    checkpoints.save(3, make_state(), {}, wait=True)
    assert checkpoints.steps() == [1, 3]


def test_waiting_tells_of_each_part_as_it_is_done(
    open_checkpoints: Opener, events: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches the journal sees that it gets on, long before all is saved."""
    verify, told = manifest.verify, threading.Event()
    in_time: list[bool] = []
    monkeypatch.setattr(manifest, "verify", lambda *a, **k: (in_time.append(told.wait(30)), verify(*a, **k))[1])

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        events(kind, fields)
        told.set()

    open_checkpoints(on_event=on_event).save(5, make_state(), {}, wait=True)
    assert events.kinds() == ["checkpoint_saved", "checkpoint_verified"]
    assert in_time == [True]


def test_a_step_that_is_on_disk_already_is_not_saved_again(open_checkpoints: Opener, directory: Path) -> None:
    first = open_checkpoints()
    first.save(5, make_state(), {}, wait=True)
    before = (directory / "5" / "manifest.json").read_bytes()
    assert first.save(5, make_state(), {}, wait=True) == 0
    resumed = open_checkpoints()
    resumed.restore(5, abstract())
    assert resumed.save(5, make_state(), {}, wait=True) == 0
    assert (directory / "5" / "manifest.json").read_bytes() == before


def test_a_rewind_puts_later_checkpoints_aside_and_loses_none(open_checkpoints: Opener, directory: Path) -> None:
    checkpoints = open_checkpoints(keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(seed=step), {}, wait=True)
    checkpoints.supersede(1)
    assert checkpoints.steps() == [1]
    checkpoints.save(2, make_state(seed=20), {}, wait=True)
    assert bits(checkpoints.restore(2, abstract())[0]) == bits(make_state(seed=20))
    assert verify(directory / "2.superseded-0") == []
    assert verify(directory / "3.superseded-0") == []


def test_a_save_over_an_earlier_history_puts_it_aside(open_checkpoints: Opener, directory: Path) -> None:
    open_checkpoints().save(5, make_state(seed=1), {"history": 1}, wait=True)
    open_checkpoints().save(5, make_state(seed=2), {"history": 2}, wait=True)
    assert manifest.read(directory / "5").host_state == {"history": 2}
    assert manifest.read(directory / "5.superseded-0").host_state == {"history": 1}


def test_retention_keeps_the_newest_the_multiples_and_the_protected(open_checkpoints: Opener, directory: Path) -> None:
    checkpoints = open_checkpoints(keep=2, keep_every=4)
    checkpoints.protect([3])
    for step in range(1, 8):
        checkpoints.save(step, make_state(step=step), {}, wait=True)
    assert checkpoints.steps() == [3, 4, 6, 7]
    checkpoints.protect([])
    checkpoints.save(9, make_state(step=9), {}, wait=True)
    assert checkpoints.steps() == [4, 7, 9]
    checkpoints.close()
    assert sorted(p.name for p in directory.iterdir()) == ["4", "7", "9"]


def test_superseded_checkpoints_do_not_fill_the_disk(open_checkpoints: Opener, directory: Path) -> None:
    checkpoints = open_checkpoints(keep=2)
    for _ in range(4):
        for step in (1, 2):
            checkpoints.save(step, make_state(), {}, wait=True)
        checkpoints.supersede(0)
    checkpoints.close()
    assert len(list(directory.iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.params.update(w=jax.ShapeDtypeStruct((8, 8), jnp.float32)), r"params\.w: saved is float32\[16, 8\], this run needs float32\[8, 8\]"),
        (lambda s: s.params.update(w=jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)), r"params\.w: saved is float32\[16, 8\], this run needs bfloat16"),
        (lambda s: s.params.update(new=jax.ShapeDtypeStruct((2,), jnp.int32)), r"params\.new: saved is nothing, this run needs int32\[2\]"),
        (lambda s: s.params.pop("odd"), r"params\.odd: saved is uint32\[7\], this run needs nothing"),
    ],
)  # fmt: skip
def test_another_model_is_a_config_error_and_rejects_no_checkpoint(
    open_checkpoints: Opener, change: Callable[[State], Any], message: str
) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(5, make_state(), {}, wait=True)
    wanted = abstract()
    change(wanted)
    with pytest.raises(ConfigError, match=message):
        checkpoints.restore_newest(wanted)
    assert checkpoints.steps() == [5]


def test_without_checkpoints_there_is_none_to_restore(open_checkpoints: Opener) -> None:
    assert open_checkpoints().restore_newest(abstract()) is None


def test_candidates_limit_what_is_restored(open_checkpoints: Opener) -> None:
    checkpoints = open_checkpoints()
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(seed=step), {}, wait=True)
    found = checkpoints.restore_newest(abstract(), candidates=[1, 2])
    assert found is not None
    assert found[0] == 2
    assert bits(found[1]) == bits(make_state(seed=2))


def test_what_is_not_an_array_is_refused_at_once(open_checkpoints: Opener) -> None:
    with pytest.raises(TypeError, match=r"lr is a float"):
        open_checkpoints().save(1, {"lr": 0.1}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        open_checkpoints().save(1, {"x": jnp.ones(2)}, {"set": {1}})


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep checkpoints there"):
        Checkpointer(tmp_path / "file" / "checkpoints", keep=1, on_event=Recorder())


def test_a_format_from_the_future_says_to_upgrade_and_is_left_alone(
    open_checkpoints: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = open_checkpoints(keep=1)
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    checkpoints.save(5, make_state(), {}, wait=True)
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 1)
    with pytest.raises(ConfigError, match=r"format 2, written by jaxrun .* upgrade it"):
        checkpoints.restore_newest(abstract())
    assert (directory / "5").is_dir()


def test_an_older_format_is_migrated_when_read(
    open_checkpoints: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoints().save(5, make_state(), {"old": 1}, wait=True)
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    monkeypatch.setitem(manifest.MIGRATIONS, 1, lambda body: {**body, "host_state": {"new": 1}})
    assert manifest.read(directory / "5").host_state == {"new": 1}


def test_describe_tells_step_size_and_age(open_checkpoints: Opener, directory: Path) -> None:
    open_checkpoints().save(5, make_state(), {}, wait=True)
    found = describe(directory / "5")
    assert (found.step, found.hashes, found.problems) == (5, "recorded", [])
    assert found.size_bytes == sum(p.stat().st_size for p in (directory / "5").rglob("*") if p.is_file())
    assert 0 <= found.age_s < 60


def test_leftovers_of_a_killed_save_are_removed_by_the_next_save_not_by_a_reader(
    open_checkpoints: Opener, directory: Path
) -> None:
    for name in ("3.orbax-checkpoint-tmp", "2.1.deleting"):
        (directory / name).mkdir(parents=True)
    checkpoints = open_checkpoints()
    assert checkpoints.restore_newest(abstract()) is None
    assert len(list(directory.iterdir())) == 2
    checkpoints.save(3, make_state(), {}, wait=True)
    checkpoints.close()
    assert [p.name for p in directory.iterdir()] == ["3"]


def test_a_failure_is_logged_with_its_cause(
    open_checkpoints: Opener, events: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = open_checkpoints()
    with monkeypatch.context() as m, caplog.at_level(logging.ERROR, logger=checkpointer.__name__):
        m.setattr(manifest, "commit", full)
        checkpoints.save(5, make_state(), {}, wait=True)
    assert events == [("checkpoint_failed", {"step": 5, "error": "OSError: [Errno 28] No space left on device"})]
    assert "checkpoint 5 failed" in caplog.text
    assert checkpoints.steps() == []
    checkpoints.save(5, make_state(), {}, wait=True)
    assert checkpoints.steps() == [5]
