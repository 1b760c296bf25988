"""A thread that looks at this host and its GPUs every few seconds, keeps what it saw, and holds problems ready."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from jaxrun.journal import DEVICES, LineFile
from jaxrun.telemetry.health import problems
from jaxrun.telemetry.nvml import Nvml, Reading, pci_bus_ids

log = logging.getLogger("jaxrun")


class Sampler:
    """Writes WORKDIR/devices/<process>.jsonl: a line a device and look, and one for the host (`device` null).

    Args:
      every_s: seconds between two looks; 0: none at all.
      nvml: of this process's GPUs; None: it has none.
    """

    def __init__(self, workdir: Path, process: int, *, every_s: float, nvml: Nvml | None = None):
        self._nvml, self._every_s = nvml, every_s
        self._about = {"process": process, "host": socket.gethostname()}
        self._path = workdir / DEVICES / f"{process}.jsonl"
        self._file: LineFile | None = None
        self._failures = 0
        self._last: dict[int, Reading] = {}
        self._lock = threading.Lock()
        self._found: dict[int, set[str]] = {}
        self._stop, self._wake, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        if every_s:
            self._thread.start()

    def take(self) -> dict[int, set[str]]:
        """Device -> its problems since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found

    def look_now(self, timeout_s: float = 2.0) -> None:
        """Waits for a look that begins now; not for long, as a driver in trouble may not answer."""
        if self._nvml is not None and self._thread.is_alive():
            self._looked.clear()
            self._wake.set()
            self._looked.wait(timeout_s)

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        if self._nvml is not None and not self._thread.is_alive():  # a driver that hangs keeps its thread
            self._nvml.close()

    def look(self) -> None:
        """One look at everything; the thread's own work."""
        now = time.time()
        lines: list[dict[str, Any]] = [{"time": now, **self._about, "device": None, **host_readings()}]
        xids: dict[int, list[int]] = {}
        for device, xid in self._nvml.xids() if self._nvml else ():
            xids.setdefault(device, []).append(xid)
        for reading in self._nvml.read() if self._nvml else ():
            reported = xids.get(reading.device, []) + xids.get(-1, [])
            found = problems(self._last.get(reading.device), reading, reported)
            self._last[reading.device] = reading
            lines.append({"time": now, **self._about, **reading.known(), **({"xid": reported} if reported else {})})
            if found:
                log.warning("GPU %d of %s: %s", reading.device, self._about["host"], ", ".join(found))
                with self._lock:
                    self._found.setdefault(reading.device, set()).update(found)
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = LineFile(self._path)
            self._file.append(*lines)
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                log.error("%s: %s; what the devices report is not kept until it can be written", self._path, error)

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call has nothing to compare with
        wait_s = min(1.0, self._every_s)
        while True:
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._stop.is_set():
                break
            try:
                self.look()
                self._looked.set()
            except Exception:  # telemetry never ends a run
                log.exception("reading the devices failed; they are not watched any more")
                return
            wait_s = self._every_s
        if self._file is not None:
            self._file.close()


def host_readings() -> dict[str, Any]:
    """Load, memory and the hottest sensor of this host; what it does not say is absent."""
    memory = psutil.virtual_memory()
    readings: dict[str, Any] = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
    }
    sensors: dict[str, list[Any]] = getattr(psutil, "sensors_temperatures", dict)()  # Linux and FreeBSD only
    found = [s.current for group in sensors.values() for s in group if s.current]
    return readings | ({"temperature_c": max(found)} if found else {})


def open_nvml(platform: str, ordinals: Sequence[int]) -> Nvml | None:
    """NVML for this process's GPUs; None on another platform, and where it cannot be had, which is said once."""
    if platform not in ("gpu", "cuda"):
        return None
    try:
        return Nvml(pci_bus_ids(ordinals))
    except ImportError:
        log.warning("the GPUs' health is not watched: nvidia-ml-py is missing; pip install nvidia-ml-py")
    except Exception as error:  # pynvml's own, or no driver library: either way training goes on
        log.warning("the GPUs' health is not watched: %s", error)
    return None
