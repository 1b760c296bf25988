"""A peak is the right one or none, and no utilisation above 100 % is ever reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrun.telemetry.memory import memory_stats
from jaxrun.telemetry.peaks import Peak, peak, published, utilization


def device(kind: str, platform: str = "gpu") -> Any:
    return SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 156), ("NVIDIA A100-SXM4-80GB", 312, 156), ("NVIDIA A100-PCIE-40GB", 312, 156),
        ("NVIDIA A100 80GB PCIe", 312, 156), ("NVIDIA H100 80GB HBM3", 989.4, 494.7), ("NVIDIA H100 PCIe", 756.5, 378),
        ("NVIDIA H100 NVL", 835.5, 417.5), ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA B200", 2250, 1125), ("NVIDIA GB200", 2500, 1250),
        ("NVIDIA L4", 121, 60), ("NVIDIA L40S", 362.05, 183), ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("AMD Instinct MI300X", 1307.4, 163.4), ("TPU v4", 275, 275), ("TPU v5 lite", 197, 197), ("TPU v5e", 197, 197),
        ("TPU v5", 459, 459), ("TPU v5p", 459, 459), ("TPU v6 lite", 918, 918), ("TPU v6e", 918, 918),
        ("TPU7x", 1153.5, 1153.5),
    ],
)  # fmt: skip
def test_known_devices_have_their_vendors_dense_rate(kind: str, bfloat16: float, float32: float) -> None:
    found = [peak(device(kind), dtype) for dtype in ("bfloat16", "float32")]
    assert [p and p.flops for p in found] == [1e12 * bfloat16, 1e12 * float32]
    assert all(p and "dense" in p.source for p in found)


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "TPU v9",
    ],
)
def test_a_device_that_is_only_like_a_known_one_has_no_peak_and_a_line_says_how_to_set_it(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert published(kind, "bfloat16") is None
    with caplog.at_level(logging.WARNING, "jaxrun"):
        assert peak(device(kind), "bfloat16") is None
    (record,) = caplog.records
    assert "set telemetry.peak_flops" in record.message


def test_the_configured_peak_wins() -> None:
    assert peak(device("NVIDIA H200"), "bfloat16", 1e15) == Peak(1e15, "telemetry.peak_flops")


def test_a_cpu_is_measured_once_and_says_so() -> None:
    first = peak(jax.devices("cpu")[0], "float32")
    assert first is not None
    assert first.flops > 1e8
    assert "measured" in first.source
    assert peak(jax.devices("cpu")[0], "float32") is first


def test_utilisation_is_flops_over_time_over_the_peak_of_all_devices() -> None:
    assert utilization(1e15, 2.0, 4, Peak(2.5e14, "a datasheet")) == 0.5
    assert utilization(None, 2.0, 4, Peak(2.5e14, "a datasheet")) is None
    assert utilization(1e15, 2.0, 4, None) is None


def test_more_than_the_peak_is_refused_and_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    low = Peak(1e12, "a datasheet of another device")
    with caplog.at_level(logging.ERROR, "jaxrun"):
        assert utilization(1.52e12, 1.0, 1, low) is None
        assert utilization(1.53e12, 1.0, 1, low) is None
    (record,) = caplog.records
    assert "152 %" in record.message
    assert "another device" in record.message
    assert "telemetry.peak_flops" in record.message


def test_memory_of_the_host_is_known_and_of_a_cpu_device_absent() -> None:
    stats = memory_stats()
    assert stats["host_memory_bytes"] > 1e7
    if jax.default_backend() == "cpu":
        assert set(stats) == {"host_memory_bytes"}
