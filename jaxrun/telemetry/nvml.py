"""What NVIDIA's management library (NVML) says of this process's GPUs, one reading at a time.

Field by field: each may be unsupported on a given board, and is then absent, never 0. Names and numbers of fields
are those of nvidia-ml-py (`import pynvml`), which follows nvml.h.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Clock event reasons that mean less speed than the board is made for. A software power cap (0x4) and idling (0x1)
# are everyday, and left out.
_REASONS = {
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@dataclass(frozen=True)
class Reading:
    """One look at one device; None: the board does not say.

    Attributes:
      device: its place among the devices of this process.
      temperature_limit_c, memory_temperature_limit_c: above which the board slows itself down.
      throttle: why its clocks are below what they could be.
      ecc_corrected, ecc_uncorrected: errors since the driver was loaded; `_total`: in the board's life.
      remapped_rows: because of uncorrected errors. remap_pending, remap_failed: 1 if so.
      nvlink_errors: recoveries and replays of all links. nvlink_crc_errors: transmissions repeated for a bad checksum.
      recovery_action: what NVML says should be done (0: nothing, 1: reset, 2: reboot, 3 and more: drain).
      lost: the device does not answer any more.
    """

    device: int
    name: str | None = None
    temperature_c: int | None = None
    temperature_limit_c: int | None = None
    memory_temperature_c: int | None = None
    memory_temperature_limit_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    remapped_rows: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    nvlink_errors: int | None = None
    nvlink_crc_errors: int | None = None
    recovery_action: int | None = None
    lost: bool = False

    def known(self) -> dict[str, Any]:
        """What the board says, as a line of JSON holds it."""
        return {k: v for k, v in asdict(self).items() if v is not None and (v or k not in ("throttle", "lost"))}


class Nvml:
    """NVML, open for the GPUs of this process.

    Args:
      pci_bus_ids: of each device of this process. NVML counts otherwise than CUDA, and takes no notice of
        CUDA_VISIBLE_DEVICES.

    Raises:
      ImportError: nvidia-ml-py is not installed. pynvml.NVMLError: there is no driver, or no such device.
    """

    def __init__(self, pci_bus_ids: Sequence[str]):
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        try:
            self._handles = [pynvml.nvmlDeviceGetHandleByPciBusId(i.encode()) for i in pci_bus_ids]
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
        self._events = self._listen()

    def read(self) -> list[Reading]:
        return [self._read(i, handle) for i, handle in enumerate(self._handles)]

    def xids(self) -> Iterator[tuple[int, int]]:
        """(device, XID) of the driver's error reports since the last call."""
        n = self._nvml
        while self._events is not None:
            try:
                event = n.nvmlEventSetWait_v2(self._events, 0)
            except n.NVMLError:  # a time-out: there are none
                return
            if event.eventType & n.nvmlEventTypeXidCriticalError:
                yield self._index(event.device), int(event.eventData)

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _listen(self) -> Any:
        n = self._nvml
        try:
            events = n.nvmlEventSetCreate()
            for handle in self._handles:
                n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
        except n.NVMLError:  # not on every system, and not in every container
            return None
        return events

    def _index(self, handle: Any) -> int:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        known = [ctypes.cast(h, ctypes.c_void_p).value for h in self._handles]
        return known.index(address) if address in known else -1

    def _read(self, device: int, handle: Any) -> Reading:
        n = self._nvml
        lost = False

        def ask(fn: Callable[..., Any], *args: Any) -> Any:
            nonlocal lost
            try:
                return fn(handle, *args)
            except n.NVMLError as error:
                lost |= error.value == n.NVML_ERROR_GPU_IS_LOST
                return None

        fields = self._fields(handle)
        memory, use = ask(n.nvmlDeviceGetMemoryInfo), ask(n.nvmlDeviceGetUtilizationRates)
        power, power_limit = ask(n.nvmlDeviceGetPowerUsage), ask(n.nvmlDeviceGetEnforcedPowerLimit)
        rows = ask(n.nvmlDeviceGetRemappedRows)
        reasons = ask(n.nvmlDeviceGetCurrentClocksEventReasons) or 0
        name = ask(n.nvmlDeviceGetName)
        corrected, uncorrected = n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        links = [fields[i] for i in (n.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, n.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL) if i in fields]  # fmt: skip
        return Reading(
            device=device,
            name=name.decode() if isinstance(name, bytes) else name,
            temperature_c=ask(n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU),
            temperature_limit_c=ask(n.nvmlDeviceGetTemperatureThreshold, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            memory_temperature_c=fields.get(n.NVML_FI_DEV_MEMORY_TEMP),
            memory_temperature_limit_c=ask(n.nvmlDeviceGetTemperatureThreshold, n.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if power_limit is None else power_limit / 1000,
            sm_clock_mhz=ask(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_SM),
            memory_clock_mhz=ask(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_MEM),
            utilization=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            throttle=tuple(text for bit, text in _REASONS.items() if reasons & bit),
            ecc_corrected=ask(n.nvmlDeviceGetTotalEccErrors, corrected, n.NVML_VOLATILE_ECC),
            ecc_uncorrected=ask(n.nvmlDeviceGetTotalEccErrors, uncorrected, n.NVML_VOLATILE_ECC),
            ecc_corrected_total=ask(n.nvmlDeviceGetTotalEccErrors, corrected, n.NVML_AGGREGATE_ECC),
            ecc_uncorrected_total=ask(n.nvmlDeviceGetTotalEccErrors, uncorrected, n.NVML_AGGREGATE_ECC),
            remapped_rows=rows and rows[1],
            remap_pending=rows and rows[2],
            remap_failed=rows and rows[3],
            nvlink_errors=sum(links) if links else None,
            nvlink_crc_errors=fields.get(n.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
            recovery_action=fields.get(n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            lost=lost,
        )

    def _fields(self, handle: Any) -> dict[int, int]:
        """Field id -> value, of the fields that the board supports."""
        n = self._nvml
        wanted = [
            n.NVML_FI_DEV_MEMORY_TEMP, n.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            n.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, n.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
            n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        ]  # fmt: skip
        try:
            values = n.nvmlDeviceGetFieldValues(handle, wanted)
        except n.NVMLError:
            return {}
        members = {
            n.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal", n.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            n.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal", n.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
            n.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        }  # fmt: skip
        return {
            v.fieldId: int(getattr(v.value, members[v.valueType]))
            for v in values
            if v.nvmlReturn == n.NVML_SUCCESS and v.valueType in members
        }


def pci_bus_ids(ordinals: Sequence[int]) -> list[str]:
    """Of CUDA's devices by their ordinals in this process, from CUDA's driver, which is loaded already.

    Raises:
      OSError: it does not say.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    found = []
    for ordinal in ordinals:
        text = ctypes.create_string_buffer(32)
        if (code := cuda.cuDeviceGetPCIBusId(text, len(text), ordinal)) != 0:
            raise OSError(f"cuDeviceGetPCIBusId({ordinal}) answers {code}")
        found.append(text.value.decode())
    return found
