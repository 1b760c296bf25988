"""Saving in the background, retention, and restoring the newest sound checkpoint."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import queue
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import absl.logging
import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrun.checkpoint import manifest as manifests
from jaxrun.checkpoint.fingerprint import fingerprints, named_leaves
from jaxrun.checkpoint.manifest import ArrayRecord, CheckpointDamaged, Manifest
from jaxrun.config import ConfigError
from jaxrun.sharding import on_any

log = logging.getLogger(__name__)
T = TypeVar("T")

_DELETING = ".deleting"

# Orbax 0.12 misses, at every save and restore, the files of the kind that it was told not to write. Whether all are there
# is checked by the manifest.
_NEEDLESS = ("Skipping merge of OCDBT", "TensorStore data files not found")
absl.logging.get_absl_logger().addFilter(lambda record: not any(words in str(record.msg) for words in _NEEDLESS))


@dataclass(frozen=True, kw_only=True)
class _Save:
    """What the worker needs to turn Orbax's files into a checkpoint."""

    step: int
    path: Path
    # Orbax's own: result() returns once all processes have written.
    response: Any
    # Name -> (shape, type).
    kinds: dict[str, tuple[tuple[int, ...], str]]
    fingerprints: dict[str, jax.Array]
    host_state: dict[str, Any]
    blocked_s: float
    started: float = field(default_factory=time.perf_counter)


class Checkpointer:
    """The checkpoints of one run; a step s lives in `directory`/<s>/.

    Every method is called by all processes, in the same order, on the main thread; process 0 alone renames,
    deletes and writes manifests, and `directory` is shared by all. `on_event(kind, fields)` is called on the
    caller's thread, inside the methods. Process 0 reports everything; the others only what failed on them.

    Args:
      directory: WORKDIR/checkpoints; created if need be. The first save removes what killed ones left.
      keep: how many of the newest committed checkpoints retention leaves.
      keep_every: besides those, every step divisible by this stays; 0: none.
      busy_wait_s: how long a save that is due waits for the one before it. Waited for once in vain, it is not again: a
        save that hangs holds the loop up once, not at every save until its deadline.
      timeout_s: what a process waits at most for the others' part of a save: one of them may have failed.
      on_event: gets checkpoint_saved {step, bytes, blocked_s, write_s}, checkpoint_verified {step},
        checkpoint_failed {step, error | reason} and checkpoint_rejected {step, reason}.

    Raises:
      ConfigError: `directory` cannot be created or read.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every: int = 0,
        busy_wait_s: float = 60.0,
        timeout_s: float = 1200.0,
        on_event: Callable[[str, dict[str, Any]], None],
    ):
        self._directory = Path(directory).absolute()
        self._keep, self._keep_every, self._on_event = keep, keep_every, on_event
        self._busy_wait_s, self._timeout_s = busy_wait_s, timeout_s
        self._protected: frozenset[int] = frozenset()
        # Steps saved or restored on the current history: saving one of them again would write the same bits.
        self._current: set[int] = set()
        self._reports: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        # One worker, so that saves commit in order; at most one save waits while another is verified.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._commit: Future[bool] | None = None
        self._waited_for: Future[bool] | None = None
        self._jobs: list[Future[Any]] = []
        self._cleared = False
        self._chief = jax.process_index() == 0
        if self._chief:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self._directory}: cannot keep checkpoints there ({error.strerror}); mend that or use "
                    "another --workdir"
                ) from None

    def save(self, step: int, state: Any, host_state: dict[str, Any], *, wait: bool = False) -> float:
        """Copies the state to the host and returns; writing, hashing and committing go on behind.

        `state` may be donated as soon as this returns. A step that is committed on the current history
        is left as it is. A committed checkpoint of the same step from before a rewind is renamed aside. What
        goes wrong with the disk is reported, never raised; the next save is tried afresh.

        Args:
          step: number of updates that `state` has seen.
          state: a pytree of jax.Arrays with any sharding, typed PRNG keys included.
          host_state: what JSON can hold (tuples come back as lists).
          wait: finish an earlier save first, and this one before returning. Without it, a save that is due
            while the previous one is still being written after `busy_wait_s` is reported as failed, and skipped.

        Returns:
          blocked_s: how long the caller was held up until the write went on behind; 0.0 if nothing is saved.
        """
        arrays = named_leaves(state)
        for name, x in arrays.items():
            if not isinstance(x, jax.Array):
                raise TypeError(f"checkpoint state: {name} is a {type(x).__name__}; it has to be a jax.Array")
        host_state = json.loads(json.dumps(host_state))
        if wait:
            self.wait()
        self.poll()
        if self._commit is not None and self._commit is not self._waited_for:
            futures.wait([self._commit], timeout=self._busy_wait_s)
            self._waited_for = self._commit
        if on_any(self._commit is not None and not self._commit.done()):
            self._on_event("checkpoint_failed", {"step": step, "reason": "previous save still running"})
            return 0.0
        path = self._directory / str(step)
        if on_any(step in self._current and _is_committed(path)):
            return 0.0
        started = time.perf_counter()
        try:
            self._make_room(path)
            prints = fingerprints(arrays)
            response = _save_async(path, state, self._timeout_s)
        except OSError as error:
            self._on_event("checkpoint_failed", {"step": step, "error": _one_line(error)})
            return 0.0
        blocked_s = time.perf_counter() - started
        save = _Save(
            step=step,
            path=path,
            response=response,
            kinds={name: (x.shape, str(x.dtype)) for name, x in arrays.items()},
            fingerprints=prints,
            host_state=host_state,
            blocked_s=blocked_s,
        )
        self._commit = self._worker.submit(self._finish, save)
        self._jobs += [self._commit, self._worker.submit(self._verify, path, step, self._commit)]
        if wait:
            self.wait()
        return blocked_s

    def poll(self) -> None:
        """Reports what finished in the background since the last call, and applies retention. Never waits."""
        for job in [j for j in self._jobs if j.done()]:
            self._jobs.remove(job)
            job.result()  # jobs report what goes wrong with the disk themselves; anything else is a bug
        committed = False
        while not self._reports.empty():
            kind, fields = self._reports.get()
            if kind == "checkpoint_saved":
                self._current.add(fields["step"])
                committed = True
            if self._chief or kind == "checkpoint_failed":
                self._on_event(kind, fields)
        if committed and self._chief:
            try:
                self._retain()
            except OSError as error:
                log.error("%s: retention failed (%s)", self._directory, error)

    def wait(self) -> None:
        """Finishes everything that is under way, and reports each part once it is done: a sign of getting on."""
        for job in list(self._jobs):
            job.result()
            self.poll()
        self.poll()

    def close(self) -> None:
        self.wait()
        self._worker.shutdown()

    def steps(self) -> list[int]:
        """The committed steps on disk, ascending. Contents are not read: see `verify`."""
        return [s for s in self._folders() if _is_committed(self._directory / str(s))]

    def protect(self, steps: Iterable[int]) -> None:
        """Sets the steps that retention must leave, whatever their age; replaces those set before."""
        self._protected = frozenset(steps)

    def supersede(self, after_step: int) -> None:
        """After a rewind: checkpoints of later steps are of a dead history, and are renamed aside. The newest
        `keep` of these stay for inspection."""
        self.wait()
        self._current = {s for s in self._current if s <= after_step}
        if self._chief:
            for step in self._folders():
                if step > after_step:
                    self._set_aside(self._directory / str(step), "superseded")
            self._retain()
        _barrier("supersede")

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state and host state of a step.

        The hash of every file is checked before, and the fingerprint of every array after loading.

        Args:
          step: one of `steps()`.
          abstract_state: a pytree of ShapeDtypeStructs (with shardings, on any mesh) like the state saved.

        Raises:
          CheckpointDamaged: it is not what was saved.
          ConfigError: the state saved has other leaves, shapes or types than `abstract_state`.
        """
        self.wait()
        path = self._directory / str(step)
        manifest = _checked(lambda: manifests.read(path))
        _require_same_arrays(path, manifest, named_leaves(abstract_state))
        share = (jax.process_index(), jax.process_count())
        _checked(lambda: _raise_if(manifests.verify(path, share=share)))
        state = _load(path, abstract_state)
        found = jax.device_get(fingerprints(named_leaves(state)))
        _checked(
            lambda: _raise_if(
                f"{path}: array {name} is not what was saved (fingerprint {found[name]}, not {a.fingerprint})"
                for name, a in manifest.arrays.items()
                if int(found[name]) != a.fingerprint
            )
        )
        self._current.add(step)
        return state, dict(manifest.host_state)

    def restore_newest(
        self, abstract_state: Any, candidates: Sequence[int] | None = None
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest sound checkpoint: (step, state, host_state), or None if there is none.

        An unsound one is reported (checkpoint_rejected) and renamed aside, and the next older one tried.
        Call `supersede` with the step before training on, if newer ones were not among the candidates.

        Args:
          abstract_state: see `restore`.
          candidates: the steps to choose from; None: all that have a folder.

        Raises:
          ConfigError: see `restore`. No checkpoint is renamed for that.
        """
        self.wait()
        untried = sorted(set(self._folders() if candidates is None else candidates))
        while (step := _from_chief(untried.pop() if untried else -1)) >= 0:
            try:
                state, host_state = self.restore(step, abstract_state)
            except CheckpointDamaged as error:
                self._reject(self._directory / str(step), step, error)
                self.poll()
                _barrier("rejected")
                continue
            return step, state, host_state
        return None

    def _finish(self, save: _Save) -> bool:
        """On the worker: waits for Orbax to commit, then makes it a checkpoint; whether that worked."""
        size_bytes = 0
        try:
            save.response.result()
            if self._chief:
                prints = jax.device_get(save.fingerprints)
                arrays = {
                    name: ArrayRecord(shape=shape, dtype=dtype, fingerprint=int(prints[name]))
                    for name, (shape, dtype) in save.kinds.items()
                }
                manifest = manifests.commit(save.path, step=save.step, arrays=arrays, host_state=save.host_state)
                size_bytes = manifest.size_bytes
        except Exception as error:  # whatever a file system or Orbax can come up with: the run goes on
            log.error("checkpoint %d failed", save.step, exc_info=error)
            if self._chief:
                self._discard(save.path)
            self._report("checkpoint_failed", step=save.step, error=_one_line(error))
            return False
        self._report(
            "checkpoint_saved",
            step=save.step,
            bytes=size_bytes,
            blocked_s=save.blocked_s,
            write_s=time.perf_counter() - save.started,
        )
        return True

    def _verify(self, path: Path, step: int, commit: Future[bool]) -> None:
        """On the worker: reads back from the disk what was just committed."""
        if not commit.result():
            gc.collect()  # Orbax leaves the host copy of a save that failed in a cycle: the size of the state
            return
        if not self._chief:
            return
        problems = manifests.verify(path, from_disk=True)
        if problems:
            self._reject(path, step, CheckpointDamaged(problems))
        else:
            self._report("checkpoint_verified", step=step)

    def _report(self, kind: str, **fields: Any) -> None:
        self._reports.put((kind, fields))

    def _reject(self, path: Path, step: int, error: CheckpointDamaged) -> None:
        self._report("checkpoint_rejected", step=step, reason=str(error))
        if self._chief and path.exists():
            try:
                self._set_aside(path, "damaged")
            except OSError as cause:
                log.error("%s: cannot be renamed aside (%s)", path, cause.strerror)

    def _set_aside(self, path: Path, why: str) -> None:
        taken = {p.name for p in self._directory.iterdir()}
        target = next(p for n in itertools.count() if (p := path.with_name(f"{path.name}.{why}-{n}")).name not in taken)
        path.rename(target)
        log.warning("%s: renamed to %s", path, target.name)

    def _make_room(self, path: Path) -> None:
        """Orbax writes only where there is nothing. Raises on every process if it fails on process 0."""
        problem: OSError | None = None
        if self._chief:
            try:
                # Found out here, it is known to all; inside Orbax the other processes would wait for process 0.
                probe = self._directory / f"probe{_DELETING}"
                probe.mkdir(exist_ok=True)
                probe.rmdir()
                if not self._cleared:
                    self._jobs += [self._worker.submit(_remove, p) for p in self._directory.glob(f"*{_DELETING}")]
                    self._cleared = True
                for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):  # no save is under way
                    if leftover.suffix != _DELETING:
                        self._delete(leftover)
                if path.exists():
                    self._set_aside(path, "superseded" if _is_committed(path) else "damaged")
            except OSError as error:
                problem = error
        if on_any(problem is not None):
            raise problem or OSError("process 0 could not prepare the checkpoint folder")

    def _delete(self, path: Path) -> None:
        # Renamed first: a kill half-way through must not leave something that looks like a checkpoint.
        target = path.with_name(f"{path.name}.{time.time_ns()}{_DELETING}")
        path.rename(target)
        self._jobs.append(self._worker.submit(_remove, target))

    def _discard(self, path: Path) -> None:
        """Frees what a failed save has taken, which the next one may need; nobody was told of it."""
        try:
            for leftover in [*self._directory.glob(f"{path.name}.orbax-checkpoint-tmp*"), path]:
                if leftover.exists() and not _is_committed(leftover):
                    _remove(leftover)
        except OSError as error:
            log.warning("%s: what a failed save left cannot be removed (%s)", path, error)

    def _retain(self) -> None:
        steps = self.steps()
        multiples = {s for s in steps if self._keep_every and s % self._keep_every == 0}
        kept = {*steps[-self._keep :], *self._protected, *multiples}
        doomed = [self._directory / str(s) for s in steps if s not in kept]
        superseded = [p for p in self._directory.glob("*.superseded-*") if p.suffix != _DELETING]
        superseded.sort(key=lambda p: p.stat().st_mtime)
        for path in doomed + superseded[: -self._keep]:
            try:
                self._delete(path)
            except OSError as error:
                log.error("%s: cannot be deleted (%s)", path, error.strerror)

    def _folders(self) -> list[int]:
        names = (p.name for p in self._directory.iterdir() if p.is_dir())
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def _save_async(path: Path, state: Any, timeout_s: float) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly compress, and zstd is slower than a disk
    context.array.saving.use_ocdbt = False  # its one file for many arrays is written at a fifth of a disk's speed
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    # Where a folder cannot be created, Orbax's threads would wait for it for 20 minutes, holding the host copy.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        # Orbax's free function, not its training.Checkpointer: retention is ours, and that class remembers a
        # save that failed and from then on skips every step up to it.
        return ocp.save_async(path, state)


def _load(path: Path, abstract_state: Any) -> Any:
    from orbax.checkpoint import v1 as ocp

    with ocp.Context():
        state = ocp.load(path, abstract_state)
    # Typed keys come back with the spec of their words, which has a dim more than they have.
    return jax.tree.map(
        lambda x, a: x if x.sharding == a.sharding else jax.jit(lambda k: k, out_shardings=a.sharding)(x),
        state,
        abstract_state,
    )


def _require_same_arrays(path: Path, manifest: Manifest, wanted: dict[str, Any]) -> None:
    for name in [*wanted, *manifest.arrays]:
        saved, want = manifest.arrays.get(name), wanted.get(name)
        has = f"{saved.dtype}{list(saved.shape)}" if saved else "nothing"
        needs = f"{want.dtype}{list(want.shape)}" if want is not None else "nothing"
        if has != needs:
            raise ConfigError(
                f"{path}: array {name}: saved is {has}, this run needs {needs}; go back to the model and "
                "optimizer options that it was saved with, or start in another --workdir"
            )


def _is_committed(path: Path) -> bool:
    try:
        manifests.read(path)
    except CheckpointDamaged:
        return False
    except ConfigError:  # by a newer jaxrun: not readable here, and not ours to delete
        return True
    return True


def _raise_if(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise CheckpointDamaged(found)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:  # tried again by the next run's first save
        log.warning("%s: cannot be removed (%s)", folder, error)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


# Decisions that all processes have to take alike.


def _from_chief(number: int) -> int:
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jaxrun.checkpoint.{name}")


def _checked(check: Callable[[], T]) -> T:
    """The result of `check`; `CheckpointDamaged` on every process if it is raised on one."""
    damage: CheckpointDamaged | None = None
    try:
        result = check()
    except CheckpointDamaged as error:
        damage = error
    if on_any(damage is not None):
        raise damage or CheckpointDamaged(["another process found the checkpoint damaged; its log says where"])
    return result
