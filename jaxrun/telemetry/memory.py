"""Memory of this process and of its devices."""

from __future__ import annotations

import jax
import psutil


def memory_stats() -> dict[str, int]:
    """`host_memory_bytes` of this process; `device_memory_bytes` in use, `device_memory_peak_bytes` and
    `device_memory_limit_bytes` of the fullest local device, absent where the backend does not say (a CPU)."""
    stats = [s for s in (device.memory_stats() for device in jax.local_devices()) if s]
    fullest: dict[str, int] = max(stats, key=lambda s: s.get("peak_bytes_in_use", 0), default={})
    names = {
        "device_memory_bytes": "bytes_in_use",
        "device_memory_peak_bytes": "peak_bytes_in_use",
        "device_memory_limit_bytes": "bytes_limit",
    }
    of_device = {key: fullest[name] for key, name in names.items() if name in fullest}
    return {"host_memory_bytes": psutil.Process().memory_info().rss, **of_device}
