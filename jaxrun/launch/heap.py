"""What the C library does with memory that XLA:CPU gives back."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_heap() -> bool:
    """Has glibc keep what is freed, for the next one who asks; returns whether it will.

    XLA:CPU allocates a program's temporary memory at every call and frees it after. glibc takes such sizes from the
    kernel and gives them back at once, so that every step faults in all of its pages, zeroed, again: a sixth of the
    step of a 10.7M-parameter GPT (docs/performance.md).

    To be called before JAX's backend starts: threads keep the arenas that they have. Does nothing where there are
    accelerators, whose memory is JAX's own, on other C libraries, and where the user has glibc take huge pages
    (GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which has to be set before the process starts, and gains as much).
    """
    huge = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    if huge or not _cpu_only() or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        [mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_THRESHOLD, 1 << 30), mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)]
    )


def _cpu_only() -> bool:
    """Whether JAX will run on the CPU, as far as that can be known without starting it."""
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return platforms == "cpu" if platforms else not any(Path("/dev").glob("nvidia[0-9]*"))
