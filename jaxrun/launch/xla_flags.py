"""XLA's flags for NVIDIA GPUs, in one place. None has been measured here yet: no GPU was at hand (docs/performance.md)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# What each is for, by XLA's and NVIDIA's own documents (JAX-Toolbox sets the first one and nothing else).
GPU_FLAGS = {
    # Collectives start as early and are waited for as late as their data allow.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # Collectives of neighbouring layers travel together, up to that many bytes.
    "xla_gpu_all_reduce_combine_threshold_bytes": "134217728",
    "xla_gpu_all_gather_combine_threshold_bytes": "134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "67108864",
}


def set_gpu_flags(environment: MutableMapping[str, str] | None = None, devices: Path = Path("/dev")) -> list[str]:
    """Adds GPU_FLAGS to XLA_FLAGS where there is an NVIDIA GPU that JAX may use; returns the names of those it added.

    A flag that XLA_FLAGS already has stays as the user set it. To be called before JAX's backend starts. XLA aborts
    on flags that it does not know, and a CPU's XLA need not know these.
    """
    environment = os.environ if environment is None else environment
    platforms = environment.get("JAX_PLATFORMS", "")
    if not any(devices.glob("nvidia[0-9]*")) or (platforms and "cuda" not in platforms and "gpu" not in platforms):
        return []
    given = environment.get("XLA_FLAGS", "")
    named = {flag.lstrip("-").partition("=")[0] for flag in given.split()}
    added = [name for name in GPU_FLAGS if name not in named]
    environment["XLA_FLAGS"] = " ".join([*(f"--{name}={GPU_FLAGS[name]}" for name in added), given]).strip()
    return added
