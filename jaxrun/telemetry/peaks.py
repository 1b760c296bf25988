"""The peak arithmetic rate of a device, and the share of it that a run reaches.

Rates are dense (vendors' large print is often for 2:4 sparsity, twice the dense rate) and per JAX device. For
float32 they are those of the format in which XLA multiplies float32 matrices by default: TF32 on NVIDIA from Ampere
on, one bfloat16 pass on TPUs.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

log = logging.getLogger("jaxrun")


_refused: set[Peak] = set()  # those that the log has explained already


@dataclass(frozen=True)
class Peak:
    """flops: FLOP/s of one device. source: where the number is from, in words."""

    flops: float
    source: str


# Whole `device_kind` as a regular expression, 1e12 FLOP/s in bfloat16 and in float32, source. Nothing is matched in
# part: an H20 is no H200, and a MIG slice no GPU.
_PEAKS: tuple[tuple[str, float, float, str], ...] = (
    # NVIDIA A100 Tensor Core GPU datasheet: BF16 312, TF32 156 (624 and 312 with sparsity).
    (r"NVIDIA A100-(SXM4|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe", 312, 156, "NVIDIA A100 datasheet"),
    # NVIDIA H100 Tensor Core GPU datasheet: with sparsity SXM 1,979 and 989, PCIe 1,513 and 756, NVL 1,671 and 835.
    (r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM5( 80GB)?", 989.4, 494.7, "NVIDIA H100 datasheet, SXM"),
    (r"NVIDIA H100 PCIe", 756.5, 378, "NVIDIA H100 datasheet, PCIe"),
    (r"NVIDIA H100 NVL", 835.5, 417.5, "NVIDIA H100 datasheet, NVL"),
    # NVIDIA H200 Tensor Core GPU datasheet: with sparsity SXM 1,979 and 989, NVL 1,671 and 836.
    (r"NVIDIA H200", 989.4, 494.7, "NVIDIA H200 datasheet, SXM"),
    (r"NVIDIA H200 NVL", 835.5, 418, "NVIDIA H200 datasheet, NVL"),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: with sparsity 1,979 and 989.
    (r"NVIDIA GH200 (120|144G|480)(GB|B)?( HBM3e)?", 989.4, 494.7, "NVIDIA GH200 datasheet"),
    # NVIDIA HGX platform page, HGX B200 of 8 GPUs: with sparsity BF16 36,000, TF32 18,000.
    (r"NVIDIA B200", 2250, 1125, "NVIDIA HGX B200 specifications"),
    # NVIDIA GB200 NVL72 datasheet, 72 GPUs: with sparsity BF16 360,000, TF32 180,000.
    (r"NVIDIA GB200", 2500, 1250, "NVIDIA GB200 NVL72 datasheet"),
    # NVIDIA L4 Tensor Core GPU datasheet: with sparsity 242 and 120.
    (r"NVIDIA L4", 121, 60, "NVIDIA L4 datasheet"),
    # NVIDIA L40S datasheet: BF16 362.05, TF32 183 (733 and 366 with sparsity).
    (r"NVIDIA L40S", 362.05, 183, "NVIDIA L40S datasheet"),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A: BF16 with FP32 accumulation 165.2, TF32 82.6.
    (r"NVIDIA GeForce RTX 4090", 165.2, 82.6, "NVIDIA Ada architecture whitepaper"),
    # AMD Instinct MI300X data sheet: BF16 matrix 1,307.4, FP32 matrix 163.4.
    (r"AMD Instinct MI300X.*", 1307.4, 163.4, "AMD Instinct MI300X data sheet"),
    # Google Cloud TPU documentation, "system architecture" of each generation: peak compute per chip, bf16. A
    # v4 or v5p chip is one device; a TPU7x chip (2,307) is two: its TensorCores cannot be joined (`ChipVersion` in
    # Pallas's documentation).
    (r"TPU v4", 275, 275, "Google Cloud TPU v4 documentation"),
    (r"TPU v5 lite|TPU v5e", 197, 197, "Google Cloud TPU v5e documentation"),
    (r"TPU v5|TPU v5p", 459, 459, "Google Cloud TPU v5p documentation"),
    (r"TPU v6 lite|TPU v6e", 918, 918, "Google Cloud TPU v6e documentation"),
    (r"TPU7x|TPU v7x?", 1153.5, 1153.5, "Google Cloud TPU7x documentation, per TensorCore"),
)


def peak(device: jax.Device, dtype: str, override: float | None = None) -> Peak | None:
    """The peak rate of `device` when it multiplies matrices of `dtype` ("bfloat16" or "float32").

    A CPU's is measured, once a process and in well under a second: to be called before anything else loads it.

    Args:
      override: telemetry.peak_flops, FLOP/s of one device; it wins.

    Returns:
      None if the device is not known; one line in the log then says how to set the rate.
    """
    if override is not None:
        return Peak(override, "telemetry.peak_flops")
    if device.platform == "cpu":
        return _measured(device)
    found = published(device.device_kind, dtype)
    if found is None:
        log.warning(
            "no MFU: the peak rate of %r is not known; set telemetry.peak_flops to its dense %s FLOP/s",
            device.device_kind,
            dtype,
        )
    return found


def published(device_kind: str, dtype: str) -> Peak | None:
    """What the vendor states for a device kind, as JAX names it; None for one that is not in the table."""
    for pattern, bfloat16, float32, source in _PEAKS:
        if re.fullmatch(pattern, device_kind):
            return Peak(1e12 * {"bfloat16": bfloat16, "float32": float32}[dtype], f"{source}, dense {dtype}")
    return None


@functools.cache
def _measured(device: jax.Device, budget_s: float = 0.4) -> Peak:
    """The fastest of several float32 matrix products. Simulated CPU devices share the machine, and so its rate."""
    product, best, best_size = jax.jit(jnp.matmul), 0.0, 0
    for size in (512, 1024):
        x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
        product(x, x).block_until_ready()
        start = before = time.perf_counter()
        while before - start < budget_s / 2:
            product(x, x).block_until_ready()
            now = time.perf_counter()
            rate, before = 2 * size**3 / (now - before), now
            if rate > best:
                best, best_size = rate, size
    shared = len(jax.local_devices(backend="cpu"))
    share = f", shared by {shared} devices" if shared > 1 else ""
    return Peak(best / shared, f"measured on this CPU: float32 matrix product of size {best_size}{share}")


def utilization(flops: float | None, step_time_s: float, num_devices: int, of: Peak | None) -> float | None:
    """Share of the peak of all devices: MFU or HFU, by what `flops` counts.

    Args:
      flops: of one step, on all devices.

    Returns:
      None where a number is missing, and where the share is above 1: one of them is wrong then, as the log says once.
    """
    if flops is None or of is None or not step_time_s > 0:
        return None
    share = flops / (step_time_s * num_devices * of.flops)
    if share > 1:
        if of not in _refused:
            _refused.add(of)
            log.error(
                "MFU would be %.0f %%, which cannot be: either the peak of %.4g FLOP/s (%s) is not this device's, or "
                "the step was timed wrongly; null is recorded. telemetry.peak_flops sets the device's dense rate",
                100 * share, of.flops, of.source,
            )  # fmt: skip
        return None
    return share
