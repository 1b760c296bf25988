"""Memory of this process and of its devices."""

from __future__ import annotations

import jax
import psutil


def memory_stats() -> dict[str, int | None]:
    """`host_rss_bytes` of this process; `device_in_use_bytes`, `device_peak_bytes` and `device_limit_bytes` of the
    fullest local device, None where the backend does not say (a CPU)."""
    stats = [s for s in (device.memory_stats() for device in jax.local_devices()) if s]
    fullest: dict[str, int] = max(stats, key=lambda s: s.get("peak_bytes_in_use", 0), default={})
    return {
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "device_in_use_bytes": fullest.get("bytes_in_use"),
        "device_peak_bytes": fullest.get("peak_bytes_in_use"),
        "device_limit_bytes": fullest.get("bytes_limit"),
    }
