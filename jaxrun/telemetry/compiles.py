"""Compilations in the middle of a run: each stalls all devices, and a function that needs several is a mistake."""

from __future__ import annotations

import collections
import logging
import re
from typing import Any, NamedTuple

import jax
import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"

# Where JAX explains, in warnings, why something has to be compiled.
_EXPLAINERS = ("jax._src.interpreters.partial_eval", "jax._src.compiler", "jax._src.compilation_cache")

_EXPLANATIONS = ("TRACING CACHE MISS", "PERSISTENT COMPILATION CACHE", "Persistent compilation cache", "Writing ", "Not writing ")  # fmt: skip

# JAX's own small helpers (a fill, a cast) are compiled for every new shape; nobody waits for them.
_NOTICEABLE_S = 0.05


class Recompiled(NamedTuple):
    """A function that had been compiled before, in this process. cause: JAX's own explanation, where it gives one."""

    function: str
    compile_s: float
    cause: str


class Compilations:
    """Hears of every compilation in this process from JAX, and of the cause where one is repeated.

    Called on whatever thread compiles; `take` is for the loop.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}  # function -> the period between two `take` in which it was first compiled
        self._period = 0
        self._found: collections.deque[Recompiled] = collections.deque()
        self._cause = ""
        self._watching = False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def watch(self) -> None:
        """To be called when everything that a step needs is compiled."""
        if not self._watching:
            self._watching = True
            # JAX explains a miss of its tracing cache in a warning, which belongs into the journal, not on the terminal.
            jax.config.update("jax_explain_cache_misses", True)
            for name in _EXPLAINERS:
                logging.getLogger(name).addFilter(self._overheard)

    def take(self) -> list[Recompiled]:
        """Those since the last call. What is compiled for several shapes at once, one after another, is not repeated."""
        self._period += 1
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        if self._watching:
            jax.config.update("jax_explain_cache_misses", False)
            for name in _EXPLAINERS:
                logging.getLogger(name).removeFilter(self._overheard)
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _EVENT:
            return
        function = re.sub(r"^jit\((.*)\)$", r"\1", str(about.get("fun_name", "?")))
        is_new = self._first.setdefault(function, self._period) == self._period
        if self._watching and not is_new and duration_secs >= _NOTICEABLE_S:
            cause, self._cause = self._cause, ""
            self._found.append(Recompiled(function, duration_secs, cause or "other shapes or types than before"))

    def _overheard(self, record: logging.LogRecord) -> bool:
        """Keeps JAX's explanation, and keeps it off the terminal."""
        text = record.getMessage()
        if not text.startswith(_EXPLANATIONS):
            return True
        if text.startswith("TRACING"):
            # Of JAX's text, what differs; not where in the files.
            lines = [line.strip(" *:") for line in text.splitlines()[1:]]
            told = [line for line in lines if line and not line.startswith(("for ", "all previously seen"))]
            self._cause = "; ".join(told)[:300]
        return False
