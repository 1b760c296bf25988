"""Whatever happens to a file of a checkpoint is noticed, and the next older checkpoint is used."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrun.checkpoint import CheckpointDamaged, Checkpointer, checkpointer, describe, read, verify

from .conftest import Recorder
from .states import abstract, bits, make_state

Opener = Callable[..., Checkpointer]

# Every kind that Orbax and jaxrun write; damage is done to the first of a kind. A scalar's data is `c`, a vector's c/0.
FILES = [
    "_CHECKPOINT_METADATA", "commit_success.txt", "manifest.json", "state/_METADATA", "state/_sharding",
    "state/array_metadatas/process_0", "state/*/zarr.json", "state/*/c", "state/*/c/?", "state/*/c/?/?",
]  # fmt: skip
DATA = "state/params.w/c/3/0"


def of_kind(checkpoint: Path, pattern: str) -> list[Path]:
    return sorted(p for p in checkpoint.glob(pattern) if p.is_file() and p.stat().st_size)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints: step 1 of seed 1, step 2 of seed 2."""
    directory = tmp_path_factory.mktemp("pristine")
    checkpoints = Checkpointer(directory, keep=3, on_event=Recorder())
    for step in (1, 2):
        checkpoints.save(step, make_state(seed=step), {"step": step}, wait=True)
    checkpoints.close()
    return directory


@pytest.fixture
def two(pristine: Path, directory: Path) -> Path:
    shutil.copytree(pristine, directory)
    return directory


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def delete(path: Path) -> None:
    path.unlink()


def duplicate(path: Path) -> None:
    shutil.copy(path, path.with_name(path.name + ".copy"))


def fall_back(directory: Path, open_checkpoints: Opener, events: Recorder) -> dict[str, Any]:
    """Restores, which has to give step 1; returns the report about step 2."""
    found = open_checkpoints().restore_newest(abstract())
    assert found is not None
    assert (found[0], found[2]) == (1, {"step": 1})
    assert bits(found[1]) == bits(make_state(seed=1))
    assert events.kinds() == ["checkpoint_rejected"]
    assert not (directory / "2").exists()
    return events[0][1]


def test_the_list_of_files_is_complete(two: Path) -> None:
    present = {p for p in (two / "2").rglob("*") if p.is_file() and p.stat().st_size}
    assert present == {p for pattern in FILES for p in of_kind(two / "2", pattern)}


@pytest.mark.parametrize("damage", [flip_one_bit, truncate, append, delete, duplicate])
@pytest.mark.parametrize("pattern", FILES)
def test_damage_to_any_file_is_noticed_and_the_older_one_is_used(
    two: Path, open_checkpoints: Opener, events: Recorder, pattern: str, damage: Callable[[Path], None]
) -> None:
    path = of_kind(two / "2", pattern)[0]
    damage(path)
    problems = verify(two / "2")
    assert len(problems) == 1
    assert problems[0].startswith(str(path))
    report = fall_back(two, open_checkpoints, events)
    assert report == {"step": 2, "reason": problems[0]}
    assert (two / "2.damaged-0").is_dir()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_anywhere_goes_unseen(pristine: Path, data: st.DataObject) -> None:
    files = sorted(p for p in (pristine / "2").rglob("*") if p.is_file() and p.stat().st_size)
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    where, bit = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(original)
    changed[where] ^= 1 << bit
    try:
        path.write_bytes(changed)
        assert verify(pristine / "2") != []
    finally:
        path.write_bytes(original)
    assert verify(pristine / "2") == []


def test_a_checkpoint_of_another_step_in_this_ones_place_is_noticed(
    two: Path, open_checkpoints: Opener, events: Recorder
) -> None:
    shutil.rmtree(two / "2")
    shutil.copytree(two / "1", two / "2")
    assert "belongs to step 1" in fall_back(two, open_checkpoints, events)["reason"]


def test_a_torn_checkpoint_and_one_by_another_program_are_not_committed(
    two: Path, open_checkpoints: Opener, events: Recorder
) -> None:
    (two / "2" / "manifest.json").unlink()
    checkpoints = open_checkpoints()
    assert checkpoints.steps() == [1]
    assert describe(two / "2").hashes == "absent"
    assert "the save never finished" in fall_back(two, open_checkpoints, events)["reason"]


def test_every_damaged_one_is_kept_under_a_name_of_its_own(
    two: Path, open_checkpoints: Opener, events: Recorder, pristine: Path
) -> None:
    for n in range(3):
        delete(two / "2" / "commit_success.txt")
        open_checkpoints().restore_newest(abstract())
        assert (two / f"2.damaged-{n}").is_dir()
        shutil.copytree(pristine / "2", two / "2")


def test_when_all_are_damaged_there_is_none_and_all_are_kept(
    two: Path, open_checkpoints: Opener, events: Recorder
) -> None:
    for step in ("1", "2"):
        truncate(two / step / "commit_success.txt")
    assert open_checkpoints().restore_newest(abstract()) is None
    assert [e["step"] for e in events.of("checkpoint_rejected")] == [2, 1]
    assert sorted(p.name for p in two.iterdir()) == ["1.damaged-0", "2.damaged-0"]


def test_a_missing_candidate_is_reported_and_passed_over(two: Path, open_checkpoints: Opener, events: Recorder) -> None:
    found = open_checkpoints().restore_newest(abstract(), candidates=[1, 9])
    assert found is not None
    assert found[0] == 1
    assert "no such checkpoint" in events[0][1]["reason"]


def test_a_named_step_that_is_damaged_raises_and_stays_where_it_is(two: Path, open_checkpoints: Opener) -> None:
    path = two / "2" / DATA
    flip_one_bit(path)
    with pytest.raises(CheckpointDamaged, match="content differs from what was saved") as caught:
        open_checkpoints().restore(2, abstract())
    assert caught.value.problems == [f"{path}: content differs from what was saved (xxh3_128)"]
    assert (two / "2").is_dir()


def test_describe_sees_sizes_and_names_but_reads_no_contents(two: Path) -> None:
    data = two / "2" / DATA
    flip_one_bit(data)
    assert describe(two / "2").hashes == "recorded"
    truncate(data)
    found = describe(two / "2")
    assert found.hashes == "damaged"
    assert found.problems[0].startswith(f"{data}: ")


def test_a_bit_that_flips_between_the_device_and_the_disk_is_caught_by_the_arrays_fingerprint(
    open_checkpoints: Opener, events: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_async = checkpointer._save_async

    def corrupting(path: Path, state: Any, timeout_s: float) -> Any:
        w = np.array(state.params["w"])
        w.view(np.uint32)[3, 4] ^= 1
        bad = {**state.params, "w": jnp.asarray(w)}
        return save_async(path, type(state)(state.step, bad, state.opt_state, state.key), timeout_s)

    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(seed=1), {"step": 1}, wait=True)
    monkeypatch.setattr(checkpointer, "_save_async", corrupting)
    checkpoints.save(2, make_state(seed=2), {"step": 2}, wait=True)
    with pytest.raises(CheckpointDamaged, match=r"array params\.w is not what was saved"):
        checkpoints.restore(2, abstract("4x2"))


def test_damage_right_after_the_save_is_rejected_in_the_background(
    open_checkpoints: Opener, events: Recorder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkpointer.manifests.commit

    def then_damage(path: Path, **fields: Any) -> Any:
        manifest = commit(path, **fields)
        flip_one_bit(path / "commit_success.txt")
        return manifest

    checkpoints = open_checkpoints()
    monkeypatch.setattr(checkpointer.manifests, "commit", then_damage)
    checkpoints.save(1, make_state(), {}, wait=True)
    assert events.kinds() == ["checkpoint_saved", "checkpoint_rejected"]
    assert checkpoints.steps() == []
    assert read(directory / "1.damaged-0").step == 1
