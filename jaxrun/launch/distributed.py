"""JAX's own distributed runtime, started the way the launcher at hand expects it."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrun.config import ConfigError
from jaxrun.launch.exits import BAD_CONFIG
from jaxrun.launch.heap import keep_heap
from jaxrun.launch.xla_flags import set_gpu_flags

log = logging.getLogger("jaxrun")
T = TypeVar("T")

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(heartbeat_timeout_s: int = 30, join_timeout_s: float = 300.0) -> None:
    """Joins the other processes of this run, if the environment says that there are any.

    Explicit addresses (the three JAX_* variables) come first; else Slurm and Open MPI are recognised by JAX itself.
    A lost peer ends this process within `heartbeat_timeout_s`: JAX aborts it, and whoever started it starts it again.

    Args:
      join_timeout_s: how long the others are waited for; one may still have to be found hung, and be ended.
    """
    set_gpu_flags()
    keep_heap()
    import jax

    env = os.environ
    timeouts: dict[str, Any] = {
        "heartbeat_timeout_seconds": heartbeat_timeout_s,
        "initialization_timeout": int(join_timeout_s),
    }
    given = [name for name in _EXPLICIT if name in env]
    if given and len(given) < len(_EXPLICIT):
        missing = ", ".join(sorted(set(_EXPLICIT) - set(given)))
        raise ConfigError(f"environment: {given[0]} is set, {missing} not; set all three, or none for a single process")
    if given:
        address, count, index = (env[name] for name in _EXPLICIT)
        if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
            raise ConfigError(
                f"environment: JAX_PROCESS_ID={index} of JAX_NUM_PROCESSES={count}; the first counts from 0 to the second less 1"
            )
        jax.distributed.initialize(address, int(count), int(index), **timeouts)
    elif int(env.get("SLURM_NTASKS", 1)) > 1 or int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        jax.distributed.initialize(**timeouts)


def start_alone(cache: Path) -> None:
    """For what one process does with a run afterwards: the backend as `start` sets it up, so that the same program gives the
    same bits, and compiled programs kept in `cache`."""
    set_gpu_flags()
    keep_heap()
    cache_compilations(cache)


def fail_alone(error: Exception) -> None:
    """Where this process is one of several, ends it at once, with 78 for a `ConfigError` and else 1; else does nothing.

    The others are in a collective or a barrier and wait for this one; waiting for them in turn, for a checkpoint or for
    JAX's shutdown, would be minutes of silence. They hear of its death by its closed connections, or its heartbeat.
    """
    import jax

    if jax.process_count() == 1:
        return
    log.debug("traceback", exc_info=error)
    text = str(error).splitlines()[0] if str(error) else "no message"
    kept = any(isinstance(handler, logging.FileHandler) for handler in log.handlers)  # process 0's
    where = "the traceback is in train.log" if kept else "the traceback is above"
    if not kept:
        traceback.print_exception(error)
    log.error("process %d failed: %s: %s; %s", jax.process_index(), type(error).__name__, text, where)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(BAD_CONFIG if isinstance(error, ConfigError) else 1)


def cache_compilations(folder: Path) -> None:
    """Keeps compiled programs in `folder` from one process to the next, unless JAX has been given a place for them.

    To be called before anything is compiled. Never for several CPU devices: a program that XLA:CPU reads back has lost
    the order of its collectives, so that two devices wait at different ones for ever, and XLA aborts after 40 s.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def agree(fn: Callable[[], T]) -> T:
    """What `fn` returns on process 0, on every process; it may look at the disk, the clock and the journal.

    The value travels as JSON. An error of process 0 is raised on all: a `ConfigError` or `OSError` as such, any other as
    a `RuntimeError`.
    """
    import jax

    if jax.process_count() == 1:
        return fn()
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": fn()}
        except ConfigError as error:
            answer = {"config_error": str(error)}
        except OSError as error:
            answer = {"os_error": str(error)}
        except Exception as error:  # the others wait for an answer, whatever it is
            log.debug("traceback", exc_info=error)
            answer = {"error": f"{type(error).__name__}: {error}"}
    answer = json.loads(_broadcast(json.dumps(answer).encode()))
    if "config_error" in answer:
        raise ConfigError(answer["config_error"])
    if "os_error" in answer:
        raise OSError(answer["os_error"])
    if "error" in answer:
        raise RuntimeError(f"process 0: {answer['error']}")
    return answer["value"]


def of_each(value: str) -> list[str]:
    """A short text of every process, in the order of the processes, on all of them."""
    import jax

    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    padded = np.zeros(256, np.uint8)
    data = value.encode()[: len(padded)]
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).astype(np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def _broadcast(data: bytes) -> bytes:
    import jax
    from jax.experimental import multihost_utils

    size = int(multihost_utils.broadcast_one_to_all(np.int64(len(data)).astype(np.int32)))
    padded = np.zeros(size, np.uint8)
    padded[: len(data) if jax.process_index() == 0 else 0] = np.frombuffer(
        data if jax.process_index() == 0 else b"", np.uint8
    )
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8))
