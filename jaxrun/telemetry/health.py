"""What two readings of a device say about its health: problems, each told once, when it begins."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrun.telemetry.nvml import Reading

# In a number a problem is the bit of its place here: so processes can tell each other of them.
PROBLEMS = (
    "ecc_uncorrected",  # new uncorrected memory errors
    "xid",  # the driver reports an error that hardware causes
    "row_remap_failed",
    "row_remap_pending",  # a reset is needed for it to come into force
    "rows_remapped",
    "device_lost",
    "recovery_action",  # NVML asks for a reset, a reboot or a drain
    "nvlink_errors",
    "throttled",
    "over_temperature",
)

# A number may have come out wrong with these; throttling and heat only make it late.
UNSOUND = frozenset({"ecc_uncorrected", "xid", "row_remap_failed", "device_lost", "recovery_action"})

# XIDs for which NVIDIA names hardware as the likely cause (its XID catalogue; 13, 31, 43 and 45 are mostly a program's
# own fault): double-bit ECC, NVLink, fallen off the bus, contained and uncontained ECC, row remap failure, GSP.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143})


def problems(before: Reading | None, now: Reading, xids: Sequence[int] = ()) -> list[str]:
    """What is wrong in `now` that was not in `before`, in the order of PROBLEMS; `before` None: what is wrong at all.

    Counters count what came since `before`: what a board has behind it when a run begins is not the run's.
    """

    def rose(name: str) -> bool:
        old, new = getattr(before, name, None), getattr(now, name)
        return old is not None and new is not None and new > old

    def began(name: str) -> bool:
        return bool(getattr(now, name)) and not getattr(before, name, None)

    found = {
        "ecc_uncorrected": rose("ecc_uncorrected"),
        "xid": any(x in HARDWARE_XIDS for x in xids),
        "row_remap_failed": began("remap_failed"),
        "row_remap_pending": began("remap_pending"),
        "rows_remapped": rose("remapped_rows"),
        "device_lost": began("lost"),
        "recovery_action": began("recovery_action"),
        "nvlink_errors": rose("nvlink_errors"),
        "throttled": bool(set(now.throttle) - set(before.throttle if before else ())),
        "over_temperature": _too_hot(now) and not (before and _too_hot(before)),
    }
    return [problem for problem in PROBLEMS if found[problem]]


def _too_hot(reading: Reading) -> bool:
    pairs = (
        (reading.temperature_c, reading.temperature_limit_c),
        (reading.memory_temperature_c, reading.memory_temperature_limit_c),
    )
    return any(t is not None and limit is not None and t >= limit for t, limit in pairs)


def as_bits(found: Sequence[str]) -> int:
    return sum(1 << PROBLEMS.index(problem) for problem in set(found))


def from_bits(bits: int) -> list[str]:
    return [problem for i, problem in enumerate(PROBLEMS) if bits >> i & 1]
