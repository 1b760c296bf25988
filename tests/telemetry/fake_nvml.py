"""An NVML library in Python: pynvml calls it as it calls the real one, and it fills in NVML's own structures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml as n

GIB = 1 << 30


@dataclass
class Board:
    """One GPU. Values that are None are answered with NOT_SUPPORTED."""

    bus_id: str
    temperature: int | None = 45
    slowdown: int | None = 90
    memory_max: int | None = 95
    reasons: int = 0
    ecc: dict[tuple[int, int], int] | None = field(default_factory=lambda: {(t, c): 0 for t in (0, 1) for c in (0, 1)})
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    fields: dict[int, int] = field(default_factory=dict)
    lost: bool = False


class FakeNvml:
    """Stands in for the loaded libnvidia-ml.so: `install` puts it where pynvml looks for its functions."""

    def __init__(self, *boards: Board):
        self.boards = list(boards)
        self.xids: list[tuple[int, int]] = []  # (board, XID) not yet delivered
        self.initialised = 0

    def install(self, monkeypatch: Any) -> FakeNvml:
        monkeypatch.setattr(n, "nvmlLib", self)
        monkeypatch.setattr(n, "_nvmlGetFunctionPointer_cache", {})
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(name)  # as a driver too old to know it: pynvml says FUNCTION_NOT_FOUND
        return lambda *args: _FUNCTIONS[name](self, *args)

    def board(self, handle: Any) -> Board:
        return self.boards[(ctypes.cast(handle, ctypes.c_void_p).value or 0) // 16 - 1]


_FUNCTIONS: dict[str, Callable[..., int]] = {}


def nvml_function(fn: Callable[..., int]) -> Callable[..., int]:
    _FUNCTIONS[fn.__name__] = fn
    return fn


def answer(out: Any, value: Any) -> int:
    if value is None:
        return n.NVML_ERROR_NOT_SUPPORTED
    out._obj.value = value
    return n.NVML_SUCCESS


@nvml_function
def nvmlInitWithFlags(lib: FakeNvml, flags: int) -> int:
    lib.initialised += 1
    return n.NVML_SUCCESS


@nvml_function
def nvmlInit_v2(lib: FakeNvml) -> int:
    lib.initialised += 1
    return n.NVML_SUCCESS


@nvml_function
def nvmlShutdown(lib: FakeNvml) -> int:
    lib.initialised -= 1
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceGetHandleByPciBusId_v2(lib: FakeNvml, bus_id: Any, out: Any) -> int:
    for i, board in enumerate(lib.boards):
        if board.bus_id.encode() == bus_id.value:
            ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = 16 * (i + 1)
            return n.NVML_SUCCESS
    return n.NVML_ERROR_NOT_FOUND


@nvml_function
def nvmlDeviceGetName(lib: FakeNvml, handle: Any, text: Any, size: Any) -> int:
    text.value = b"NVIDIA H100 80GB HBM3"
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceGetTemperature(lib: FakeNvml, handle: Any, sensor: Any, out: Any) -> int:
    board = lib.board(handle)
    return n.NVML_ERROR_GPU_IS_LOST if board.lost else answer(out, board.temperature)


@nvml_function
def nvmlDeviceGetTemperatureThreshold(lib: FakeNvml, handle: Any, threshold: Any, out: Any) -> int:
    board = lib.board(handle)
    limits = {n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: board.slowdown, n.NVML_TEMPERATURE_THRESHOLD_MEM_MAX: board.memory_max}  # fmt: skip
    return answer(out, limits[threshold.value])


@nvml_function
def nvmlDeviceGetPowerUsage(lib: FakeNvml, handle: Any, out: Any) -> int:
    return answer(out, 612_345)


@nvml_function
def nvmlDeviceGetEnforcedPowerLimit(lib: FakeNvml, handle: Any, out: Any) -> int:
    return answer(out, 700_000)


@nvml_function
def nvmlDeviceGetClockInfo(lib: FakeNvml, handle: Any, kind: Any, out: Any) -> int:
    return answer(out, {n.NVML_CLOCK_SM: 1755, n.NVML_CLOCK_MEM: 2619}[kind.value])


@nvml_function
def nvmlDeviceGetUtilizationRates(lib: FakeNvml, handle: Any, out: Any) -> int:
    out._obj.gpu, out._obj.memory = 97, 40
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceGetMemoryInfo(lib: FakeNvml, handle: Any, out: Any) -> int:
    out._obj.total, out._obj.used, out._obj.free = 80 * GIB, 62 * GIB, 18 * GIB
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceGetCurrentClocksEventReasons(lib: FakeNvml, handle: Any, out: Any) -> int:
    return answer(out, lib.board(handle).reasons)


@nvml_function
def nvmlDeviceGetTotalEccErrors(lib: FakeNvml, handle: Any, kind: Any, counter: Any, out: Any) -> int:
    ecc = lib.board(handle).ecc
    return answer(out, None if ecc is None else ecc[kind.value, counter.value])


@nvml_function
def nvmlDeviceGetRemappedRows(lib: FakeNvml, handle: Any, *out: Any) -> int:
    rows = lib.board(handle).rows
    if rows is None:
        return n.NVML_ERROR_NOT_SUPPORTED
    for place, value in zip(out, rows, strict=True):
        place._obj.value = value
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceGetFieldValues(lib: FakeNvml, handle: Any, count: Any, out: Any) -> int:
    known = lib.board(handle).fields
    for i in range(count.value):
        value = out._obj[i]
        if value.fieldId in known:
            value.nvmlReturn, value.valueType = n.NVML_SUCCESS, n.NVML_VALUE_TYPE_UNSIGNED_INT
            value.value.uiVal = known[value.fieldId]
        else:
            value.nvmlReturn = n.NVML_ERROR_NOT_SUPPORTED
    return n.NVML_SUCCESS


@nvml_function
def nvmlEventSetCreate(lib: FakeNvml, out: Any) -> int:
    return n.NVML_SUCCESS


@nvml_function
def nvmlDeviceRegisterEvents(lib: FakeNvml, handle: Any, kinds: Any, events: Any) -> int:
    return n.NVML_SUCCESS if kinds.value == n.nvmlEventTypeXidCriticalError else n.NVML_ERROR_INVALID_ARGUMENT


@nvml_function
def nvmlEventSetWait_v2(lib: FakeNvml, events: Any, out: Any, timeout_ms: Any) -> int:
    if not lib.xids:
        return n.NVML_ERROR_TIMEOUT
    board, xid = lib.xids.pop(0)
    event = out._obj
    event.eventType, event.eventData = n.nvmlEventTypeXidCriticalError, xid
    event.device = ctypes.cast(16 * (board + 1), n.c_nvmlDevice_t)
    return n.NVML_SUCCESS


@nvml_function
def nvmlEventSetFree(lib: FakeNvml, events: Any) -> int:
    return n.NVML_SUCCESS
