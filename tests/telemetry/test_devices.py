"""What NVML says is read as it is, problems are told once, and nothing about it can end or slow a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.telemetry import sampler
from jaxrun.telemetry.health import PROBLEMS, as_bits, from_bits, problems
from jaxrun.telemetry.nvml import Nvml, Reading
from jaxrun.telemetry.sampler import Sampler, host_readings, open_nvml
from tests.telemetry.fake_nvml import GIB, Board, FakeNvml

ECC_NEW = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)


def board(bus_id: str = "0000:1A:00.0", **fields: object) -> Board:
    known = {
        pynvml.NVML_FI_DEV_MEMORY_TEMP: 71,
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 1,
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: 2,
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: 7,
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: 0,
    }
    return Board(bus_id, **{"fields": known, **fields})  # type: ignore[arg-type]


def test_a_reading_has_what_nvml_answers_in_its_own_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(board(), board("0000:3B:00.0", temperature=60, reasons=0x44, rows=(1, 2, 1, 0))).install(monkeypatch)
    nvml = Nvml(["0000:3B:00.0", "0000:1A:00.0"])  # CUDA's order, not NVML's
    second, first = nvml.read()
    assert first == Reading(
        device=1, name="NVIDIA H100 80GB HBM3", temperature_c=45, temperature_limit_c=90, memory_temperature_c=71,
        memory_temperature_limit_c=95, power_w=612.345, power_limit_w=700.0, sm_clock_mhz=1755, memory_clock_mhz=2619,
        utilization=0.97, memory_used_bytes=62 * GIB, memory_total_bytes=80 * GIB, throttle=(), ecc_corrected=0,
        ecc_uncorrected=0, ecc_corrected_total=0, ecc_uncorrected_total=0, remapped_rows=0, remap_pending=0, remap_failed=0,
        nvlink_errors=3, nvlink_crc_errors=7, recovery_action=0,
    )  # fmt: skip
    assert (second.device, second.temperature_c, second.throttle) == (0, 60, ("hw_thermal_slowdown",))
    assert (second.remapped_rows, second.remap_pending, second.remap_failed) == (2, 1, 0)
    nvml.close()


def test_what_a_board_does_not_support_is_absent_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Board("0000:01:00.0", temperature=None, slowdown=None, memory_max=None, ecc=None, rows=None)
    FakeNvml(bare).install(monkeypatch)
    (reading,) = Nvml(["0000:01:00.0"]).read()
    assert not {"temperature_c", "memory_temperature_c", "ecc_uncorrected", "remapped_rows", "nvlink_errors"} & set(
        reading.known()
    )
    assert problems(None, reading) == []


@pytest.mark.parametrize(
    ("then", "now", "found"),
    [
        ({}, {"ecc": {(0, 0): 5, (0, 1): 5, (1, 0): 1, (1, 1): 1}}, ["ecc_uncorrected"]),
        ({}, {"ecc": {(0, 0): 500, (0, 1): 500, (1, 0): 0, (1, 1): 0}}, []),
        ({}, {"rows": (0, 1, 1, 0)}, ["row_remap_pending", "rows_remapped"]),
        ({}, {"rows": (0, 0, 0, 1)}, ["row_remap_failed"]),
        ({}, {"reasons": 0x4}, []),  # a power cap is everyday
        ({}, {"reasons": 0x80}, ["throttled"]),
        ({"reasons": 0x80}, {"reasons": 0x80}, []),  # told once
        ({}, {"temperature": 90}, ["over_temperature"]),
        ({}, {"lost": True}, ["device_lost"]),
    ],
)  # fmt: skip
def test_a_problem_is_told_when_it_begins(
    monkeypatch: pytest.MonkeyPatch, then: dict[str, object], now: dict[str, object], found: list[str]
) -> None:
    readings = []
    for fields in (then, now):
        FakeNvml(board(**fields)).install(monkeypatch)
        readings += Nvml(["0000:1A:00.0"]).read()
    assert problems(*readings) == found


def test_what_a_board_has_behind_it_is_not_this_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(board(ecc={(t, c): 9 for t in (0, 1) for c in (0, 1)}, rows=(3, 3, 0, 0))).install(monkeypatch)
    assert problems(None, *Nvml(["0000:1A:00.0"]).read()) == []


@given(st.sets(st.sampled_from(PROBLEMS)))
def test_problems_travel_as_the_bits_of_a_float32(found: set[str]) -> None:
    bits = as_bits(sorted(found))
    assert bits < 2**24
    assert set(from_bits(bits)) == found


def test_the_sampler_keeps_every_reading_and_hands_problems_over_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNvml(board(), board("0000:3B:00.0")).install(monkeypatch)
    watcher = Sampler(tmp_path, 3, every_s=0, nvml=Nvml(["0000:1A:00.0", "0000:3B:00.0"]))
    watcher.look()
    assert watcher.take() == {}
    assert fake.boards[1].ecc
    fake.boards[1].ecc[ECC_NEW] += 2
    fake.xids += [(0, 43), (1, 94)]  # a program's own fault on one, contained ECC on the other
    with caplog.at_level(logging.WARNING, "jaxrun"):
        watcher.look()
    watcher.look()
    assert watcher.take() == {1: {"ecc_uncorrected", "xid"}}
    assert watcher.take() == {}
    assert "GPU 1" in caplog.text
    watcher.close()
    assert fake.initialised == 0
    lines = [json.loads(line) for line in (tmp_path / "devices" / "3.jsonl").read_text().splitlines()]
    assert [line["device"] for line in lines] == [None, 0, 1] * 3
    assert all({"time", "process", "host"} <= set(line) for line in lines)
    assert (lines[4]["xid"], lines[5]["xid"]) == ([43], [94])
    assert lines[5]["ecc_uncorrected"] == 2
    assert {"cpu_percent", "memory_used_bytes", "memory_total_bytes"} <= set(lines[0])


def test_a_full_disk_does_not_stop_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "devices").write_text("a file where the folder should be")
    watcher = Sampler(tmp_path, 0, every_s=0)
    with caplog.at_level(logging.ERROR, "jaxrun"):
        watcher.look()
        watcher.look()
    assert len(caplog.records) == 1


def test_the_thread_looks_by_itself_and_ends(tmp_path: Path) -> None:
    watcher = Sampler(tmp_path, 0, every_s=0.02)
    path = tmp_path / "devices" / "0.jsonl"
    while not (path.exists() and len(path.read_bytes().splitlines()) > 2):
        assert watcher._thread.is_alive()
        watcher._thread.join(0.01)
    watcher.close()
    assert not watcher._thread.is_alive()


def test_without_a_gpu_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxrun"):
        assert open_nvml("cpu", [0]) is None
    assert not caplog.records


def test_a_gpu_that_cannot_be_watched_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxrun"):
        assert open_nvml("gpu", [0]) is None  # no CUDA driver here
        monkeypatch.setattr(sampler, "pci_bus_ids", lambda ordinals: ["0000:99:00.0"])
        FakeNvml(board()).install(monkeypatch)
        assert open_nvml("gpu", [0]) is None  # no such board
    assert len(caplog.records) == 2
    assert all("not watched" in r.message for r in caplog.records)


def test_the_host_says_load_and_memory() -> None:
    readings = host_readings()
    assert 0 < readings["memory_used_bytes"] < readings["memory_total_bytes"]
