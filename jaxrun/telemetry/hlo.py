"""FLOPs of the program that really runs: the matrix products in its optimized HLO, with loops multiplied out.

What XLA's own cost analysis leaves out (it counts a loop's body once) is taken from the trip counts that XLA writes
next to its loops. Recomputation is in the program, so this is the numerator of HFU, not of MFU.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CUBLAS = re.compile(r'custom_call_target="__cublas\$')
_CUBLAS_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":(\[[^\]]*\])')
# Custom calls that move or mark data and compute nothing.
_FREE_CALLS = re.compile(
    r'custom_call_target="(Sharding|SPMDFullToShardShape|SPMDShardToFullShape|AllocateBuffer|annotate_device_placement)"'
)


class _Instruction(NamedTuple):
    shape: tuple[int, ...]  # of the result, or of the first part of a tuple
    opcode: str
    rest: str  # operands and attributes


def executed_flops(hlo: str, num_devices: int = 1) -> float | None:
    """FLOPs of one run of an executable, matrix products alone, all devices together.

    Args:
      hlo: `compiled.as_text()`; the program of one device, after partitioning.

    Returns:
      None where something in it cannot be counted: a kernel of an unknown library, a convolution, products in a loop of
      unknown length or in branches that differ.
    """
    computations, entry = _parse(hlo)

    @cache
    def cost(name: str) -> float:
        instructions = computations[name]
        return sum(_cost(i, instructions, cost) for i in instructions.values())

    total = cost(entry)
    return None if math.isnan(total) else num_devices * total


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Computation -> name -> instruction, and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", {}
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            first = _SHAPE.search(shape)
            current[name] = _Instruction(_dims(first.group(1) if first else ""), opcode, rest)
        elif found := _COMPUTATION.match(line):
            current = computations[found.group(2)] = {}
            entry = found.group(2) if found.group(1) else entry
    return computations, entry


def _cost(i: _Instruction, others: dict[str, _Instruction], cost: Callable[[str], float]) -> float:
    """FLOPs of one instruction and what it calls; NaN where they cannot be told."""
    match i.opcode:
        case "dot":
            found = _CONTRACTED.search(i.rest)
            flops = _product(i, others, _dims(found.group(1) if found else ""))
        case "custom-call":
            flops = _library_call(i, others)
        case "convolution":
            flops = math.nan
        case "conditional":
            names = ",".join(a or b for a, b in _BRANCHES.findall(i.rest))
            costs = {cost(name.strip(" %")) for name in names.split(",")}
            flops = costs.pop() if len(costs) == 1 else math.nan
        case "while":
            once, trips = sum(cost(name) for name in _CALLED.findall(i.rest)), _TRIPS.search(i.rest)
            flops = (once * int(trips.group(1)) if trips else math.nan) if once else 0.0
        case "fusion" | "call" | "async-start":
            flops = sum(cost(name) for name in _CALLED.findall(i.rest))
        case _:
            flops = 0.0
    return flops


def _library_call(i: _Instruction, others: dict[str, _Instruction]) -> float:
    if _FREE_CALLS.search(i.rest):
        return 0.0
    found = _CUBLAS_CONTRACTED.search(i.rest) if _CUBLAS.search(i.rest) else None
    return _product(i, others, tuple(int(d) for d in json.loads(found.group(1)))) if found else math.nan


def _product(i: _Instruction, others: dict[str, _Instruction], contracted: tuple[int, ...]) -> float:
    """2 x the elements of the result x the length of each one's sum."""
    lhs = re.search(r"%([\w.\-]+)", i.rest)
    if lhs is None or lhs.group(1) not in others:
        return math.nan
    shape = others[lhs.group(1)].shape
    return 2.0 * math.prod(i.shape) * math.prod(shape[d] for d in contracted)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(",") if d)
