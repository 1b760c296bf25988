"""Rehearsed faults: trouble that is put into a real run on purpose, to see it recover. Off unless `config.faults` names some.

Faults of the data (`nan_loss`, `inf_grad`, `poison`, `level_shift`) belong to batch indices: they are there again when
the batch is replayed. Faults of the machine (`lr_spike`, `diverge`, `bitflip`, `kill`, `hang`) belong to a step, strike
before it runs, and only once in the life of a run directory: the loop journals a fault's `text` before it strikes, and
what the journal holds never strikes again. `KINDS` has an example of each.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxrun.config import ConfigError

if TYPE_CHECKING:
    import jax

State = TypeVar("State")
R = TypeVar("R", bound=tuple[Any, ...])

# The top bit of a float32's exponent: flipped, a magnitude below 1 grows by 2**128.
TOP_EXPONENT_BIT = np.uint32(1 << 30)


@dataclass(frozen=True)
class Fault:
    """One fault. `text` is its identity: two spellings of the same fault have one text."""

    kind: str
    # First batch index (faults of the data), or the step that it strikes before (faults of the machine).
    start: int
    # Batches or steps that it lasts; level_shift has no end.
    length: int = 1
    # Layer, pattern, amount, or factor with its x: what stands after the colon.
    argument: str = ""
    # The only process to be hit; None: all of them.
    process: int | None = None
    # Counted over all devices of the run, or over those of `process`.
    device: int | None = None
    # Dotted path of the parameter to be hit; None: the largest of the layers' own.
    leaf: str | None = None
    # Which bit of the float32; None: the top one of its exponent.
    bit: int | None = None

    @property
    def text(self) -> str:
        options = (f":{key}={getattr(self, key)}" for key in OPTIONS if getattr(self, key) is not None)
        length = f"+{self.length}" if self.length > 1 or KINDS[self.kind].length == "required" else ""
        return f"{self.kind}@{self.start}{length}{self.argument and ':' + self.argument}{''.join(options)}"

    @property
    def number(self) -> float:
        """The argument of a kind that takes a number."""
        return float(self.argument.removeprefix("x"))

    def covers(self, index: int) -> bool:
        return self.start <= index < self.start + self.length

    def spares(self, process_index: int) -> bool:
        return self.process not in (None, process_index)


@dataclass(frozen=True)
class Faults:
    """The faults of a run, in the order in which they were named. False if there are none."""

    items: tuple[Fault, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def text(self) -> str:
        return ", ".join(fault.text for fault in self.items)

    def check(self, params: Mapping[str, Any]) -> None:
        """Refuses faults that could not strike here: a rehearsal in which nothing happens proves nothing.

        Args:
          params: the model's parameters or their shapes; every leaf of params["layers"] is [layers, ...].

        Raises:
          ConfigError: one line for each fault whose layer, process, device or leaf this run does not have.
        """
        if not self.items:
            return
        import jax

        num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
        problems = []
        for fault in self.items:
            try:
                if fault.kind == "inf_grad" and fault.number >= num_layers:
                    raise ConfigError(f"layer {fault.argument} is none of 0 to {num_layers - 1}")
                if fault.process is not None and fault.process >= jax.process_count():
                    raise ConfigError(f"process {fault.process} is none of 0 to {jax.process_count() - 1}")
                if fault.kind == "bitflip":
                    _device(fault)
                    _leaf_path(params, fault.leaf)
            except ConfigError as error:
                problems.append(f"config.faults: `{fault.text}`: {error}")
        if problems:
            raise ConfigError("\n".join(problems))

    # -- faults of the data -------------------------------------------------------------------------------------------

    def rows(  # noqa: PLR0917 (a batch is three arrays, and its place in the run two numbers)
        self,
        batch_index: int,
        row_numbers: Sequence[int],
        inputs: NDArray[np.int32],
        targets: NDArray[np.int32],
        weights: NDArray[np.float32],
        vocab_size: int,
        process_index: int | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """The rows of a batch as the faults leave them; the same arrays where no fault hits, else new ones.

        A row's fate depends on `batch_index` and its own number alone, not on which process holds it. The exception
        is `nan_loss` with `process=p`, which hits the first row that process p holds.

        Args:
          row_numbers: [R], which rows of the global batch these are.
          inputs, targets, weights: [R, T]; targets are the inputs, one token on.
          process_index: this process; None: ask JAX.
        """
        for fault in self._hits("poison", batch_index):
            tokens = np.concatenate([inputs, targets[:, -1:]], axis=1)
            tokens = _poison(fault.argument, tokens, batch_index, row_numbers, vocab_size)
            inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        for fault in self._hits("nan_loss", batch_index):
            if fault.process is None:
                hit = [i for i, row in enumerate(row_numbers) if row == 0]
            else:
                hit = [] if fault.spares(_this_process(process_index)) else [0][: len(row_numbers)]
            if hit:
                weights = weights.copy()
                weights[hit, 0] = np.nan
        return inputs, targets, weights

    def applied_to(self, rows: R, batch_index: int, row_numbers: Sequence[int], vocab_size: int) -> R:
        """`rows` for a batch as a data set gives it: a tuple of inputs, targets, weights, and what is left as it is."""
        return type(rows)(*self.rows(batch_index, row_numbers, *rows[:3], vocab_size), *rows[3:])  # type: ignore[call-arg]

    def reported_loss(self, batch_index: int, loss: float) -> float:
        """The loss that is reported for this batch: training itself does not see a `level_shift`."""
        return loss + sum(f.number for f in self.items if f.kind == "level_shift" and batch_index >= f.start)

    @property
    def grad_layer(self) -> int | None:
        """The layer that `inf_grad` hits; None: no such fault, and the step needs no hook for it."""
        return next((int(f.argument) for f in self.items if f.kind == "inf_grad"), None)

    def grad_fault(self, batch_index: int) -> float:
        """What the step's hook gets: 1 where this batch's gradient is to be infinite, else 0."""
        return 1.0 if self._hits("inf_grad", batch_index) else 0.0

    def _hits(self, kind: str, batch_index: int) -> list[Fault]:
        return [f for f in self.items if f.kind == kind and f.covers(batch_index)]

    # -- faults of the machine ----------------------------------------------------------------------------------------

    def due(self, step: int, struck: Mapping[str, int]) -> tuple[Fault, ...]:
        """The faults that strike before `step` runs, in the order to strike in.

        Args:
          struck: the `text` of every fault that has struck in this run directory, and the attempt that it struck in.
        """
        return tuple(f for f in self.items if KINDS[f.kind].of == "step" and f.start == step and f.text not in struck)

    def lr_factor(self, step: int, struck: Mapping[str, int], attempt: int) -> float:
        """The factor on the learning rate of `step`. It lasts no longer than the attempt that it struck in: what runs
        after a restore is a sound machine."""
        factor = 1.0
        for fault in self.items:
            if KINDS[fault.kind].is_lr and fault.covers(step) and struck.get(fault.text) == attempt:
                factor *= fault.number ** (1 if fault.kind == "lr_spike" else step - fault.start + 1)
        return factor

    def strike(self, fault: Fault, state: State, process_index: int) -> State:
        """Lets a fault of the machine happen to this process; returns the state after it.

        `kill` and `hang` do not return in the process that they hit. A hung process still runs its signal handlers.
        `lr_spike` and `diverge` act through `lr_factor`.

        Args:
          state: a dataclass whose `params` are float32 arrays.
        """
        if fault.spares(process_index):
            return state
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "hang":
            while True:
                time.sleep(3600)
        return _flip_bit(fault, state) if fault.kind == "bitflip" else state


def inf_in_layer(grads: Any, layer: int, flag: jax.Array) -> Any:
    """`grads` with one element of one layer infinite where `flag` (a scalar) is above 0; bit for bit the same where not.

    Every leaf of grads["layers"] is [layers, ...]; the first is hit.

    Raises:
      ConfigError: there is no such layer (an index out of range would otherwise do nothing, unseen).
    """
    import jax
    import jax.numpy as jnp

    (first, *others), treedef = jax.tree.flatten(grads["layers"])
    if not 0 <= layer < first.shape[0]:
        raise ConfigError(f"config.faults: inf_grad names layer {layer}, which is none of 0 to {first.shape[0] - 1}")
    element = (layer, *(0,) * (first.ndim - 1))
    hit = first.at[element].set(jnp.where(flag > 0, jnp.inf, first[element]))
    return {**grads, "layers": jax.tree.unflatten(treedef, [hit, *others])}


def _poison(pattern: str, tokens: NDArray[np.int32], batch_index: int, row_numbers: Sequence[int], vocab_size: int) -> NDArray[np.int32]:  # fmt: skip
    """Sequences [R, T + 1], with the same shape and no token outside the vocabulary."""
    if pattern == "repeat":
        return np.full_like(tokens, vocab_size // 2)
    if pattern == "range":
        return (tokens + vocab_size // 2) % vocab_size
    shuffled = np.empty_like(tokens)
    for i, row in enumerate(row_numbers):
        # Raw bits, as NumPy keeps those the same from version to version, but not its permutations (NEP 19).
        bits = np.random.Philox(key=np.array([batch_index, row], np.uint64)).random_raw(tokens.shape[1])
        shuffled[i] = tokens[i, np.argsort(bits, kind="stable")]
    return shuffled


def _this_process(process_index: int | None) -> int:
    import jax

    return jax.process_index() if process_index is None else process_index


def _flip_bit(fault: Fault, state: Any) -> Any:
    """Flips one bit in one device's own copy or part of one parameter: its first element there."""
    import jax

    device, path = _device(fault), _leaf_path(state.params, fault.leaf)
    mask = TOP_EXPONENT_BIT if fault.bit is None else np.uint32(1 << fault.bit)

    def flipped(leaf: jax.Array) -> jax.Array:
        buffers = [shard.data for shard in leaf.addressable_shards]
        for i, buffer in enumerate(buffers):
            if buffer.device == device:
                values = np.array(buffer)
                values.reshape(-1)[:1].view(np.uint32)[0] ^= mask
                buffers[i] = jax.device_put(values, device)
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, buffers)

    params = jax.tree_util.tree_map_with_path(lambda p, x: flipped(x) if _dotted(p) == path else x, state.params)
    return dataclasses.replace(state, params=params)


def _device(fault: Fault) -> jax.Device:
    import jax

    devices = [d for d in jax.devices() if not fault.spares(d.process_index)]
    if fault.device is None or fault.device >= len(devices):
        raise ConfigError(f"device {fault.device} is none of 0 to {len(devices) - 1}")
    return devices[fault.device]


def _leaf_path(params: Mapping[str, Any], leaf: str | None) -> str:
    """The dotted path of the parameter that is meant. By default one that every token goes through: an embedding may
    hold rows that no text ever reads."""
    import jax

    paths = {_dotted(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    if leaf is None:
        return max((p for p in paths if p.startswith("layers.")), key=lambda p: math.prod(paths[p].shape))
    if leaf not in paths:
        raise ConfigError(f"no parameter is called {leaf}; {_nearest(leaf, paths)}")
    return leaf


def _dotted(path: tuple[Any, ...]) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


# -- the notation -----------------------------------------------------------------------------------------------------


def _layer(text: str) -> str:
    return str(_whole(text))


def _pattern(text: str) -> str:
    if text not in PATTERNS:
        raise ValueError
    return text


def _amount(text: str) -> str:
    if not math.isfinite(float(text)):
        raise ValueError
    return repr(float(text)).removesuffix(".0")


def _factor(text: str) -> str:
    if not text.startswith("x") or float(text[1:]) <= 0:
        raise ValueError
    return "x" + _amount(text[1:])


def _whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError
    return int(text)


def _bit(text: str) -> int:
    if _whole(text) > 31:
        raise ValueError
    return _whole(text)


@dataclass(frozen=True)
class Kind:
    """How a kind of fault is written, and what it belongs to."""

    example: str
    of: Literal["batch", "step"]
    length: Literal["none", "optional", "required"] = "none"
    # What the argument is, and what reads it into its one spelling (ValueError: it isn't one).
    argument: tuple[str, Callable[[str], str]] | None = None
    # Of the options, those that it takes; a device has to be named.
    options: tuple[str, ...] = ()
    # Acts through the learning rate, for as long as it lasts.
    is_lr: bool = False


PATTERNS = ("shuffle", "repeat", "range")
OPTIONS: dict[str, Callable[[str], Any]] = {"bit": _bit, "device": _whole, "leaf": str, "process": _whole}
KINDS = {
    "nan_loss": Kind("nan_loss@120", "batch", "optional", options=("process",)),
    "inf_grad": Kind("inf_grad@300:2", "batch", "optional", ("layer", _layer)),
    "poison": Kind("poison@500+40:shuffle", "batch", "required", (f"pattern ({', '.join(PATTERNS)})", _pattern)),
    "level_shift": Kind("level_shift@400:0.5", "batch", argument=("amount", _amount)),
    "lr_spike": Kind("lr_spike@900+20:x30", "step", "required", ("factor", _factor), is_lr=True),
    "diverge": Kind("diverge@600+200:x1.05", "step", "required", ("factor", _factor), is_lr=True),
    "bitflip": Kind("bitflip@700:device=0", "step", options=("bit", "device", "leaf", "process")),
    "kill": Kind("kill@250", "step", options=("process",)),
    "hang": Kind("hang@260", "step", options=("process",)),
}

_ITEM = re.compile(r"(?P<kind>[a-z_]+)@(?P<start>[0-9]{1,18})(\+(?P<length>[0-9]{1,18}))?(?P<rest>(:[^:]*)*)")


def parse(text: str) -> Faults:
    """Reads KIND@WHEN[+LENGTH][:ARGUMENT][:OPTION=VALUE], as many as there are, with commas between.

    Raises:
      ValueError: one line for each item that cannot be meant.
    """
    faults: list[Fault] = []
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            fault = _read(item)
            if fault in faults:
                raise ValueError("is named twice, but would strike once; drop one")
            if fault.kind == "inf_grad" and any(f.kind == "inf_grad" and f.argument != fault.argument for f in faults):
                raise ValueError("another inf_grad names another layer; one run can rehearse one layer")
            faults.append(fault)
        except ValueError as error:
            problems.append(f"`{item}`: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return Faults(tuple(faults))


def _read(item: str) -> Fault:
    match = _ITEM.fullmatch(item)
    name = match["kind"] if match else re.split("[@+:]", item)[0].strip()
    if name not in KINDS:
        raise ValueError(f"there is no fault `{name}`; {_nearest(name, KINDS)}")
    kind = KINDS[name]
    if not match:
        raise ValueError(f"cannot be read; write it like {kind.example}")
    argument, options = _arguments(match["rest"], kind)
    if match["length"] and kind.length == "none":
        raise ValueError(f"has no length; write it like {kind.example}")
    if not match["length"] and kind.length == "required":
        raise ValueError(f"needs a length, such as {kind.example}")
    fault = Fault(name, int(match["start"]), int(match["length"] or 1), argument, **options)
    if fault.length < 1:
        raise ValueError("has to last for 1 or more")
    if kind.of == "step" and fault.start < 1:
        raise ValueError("can never strike, as the first step is 1")
    doublings = math.log2(fault.number) * (fault.length if name == "diverge" else 1) if kind.is_lr else 0.0
    if doublings >= 128:
        raise ValueError("grows beyond what float32 holds (2^128); make the factor smaller, or a `diverge` shorter")
    return fault


def _arguments(text: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    """The argument and the options in :ARGUMENT:OPTION=VALUE."""
    arguments: list[str] = []
    options: dict[str, Any] = {}
    for part in text.split(":")[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            arguments.append(part)
        elif key not in kind.options or key in options or not value:
            raise ValueError(f"does not take `{part}`; write it like {kind.example}")
        else:
            options[key] = _spelled(key, OPTIONS[key], value, kind)

    argument = ""
    if kind.argument:
        what, spelling = kind.argument
        if not arguments:
            raise ValueError(f"needs a {what}, such as {kind.example}")
        argument = _spelled(what, spelling, arguments.pop(0), kind)
    if arguments:
        raise ValueError(f"does not take `{arguments[0]}`; write it like {kind.example}")
    if "device" in kind.options and "device" not in options:
        raise ValueError(f"needs a device, such as {kind.example}")
    return argument, options


def _spelled(what: str, spelling: Callable[[str], Any], text: str, kind: Kind) -> Any:
    try:
        return spelling(text)
    except ValueError:
        raise ValueError(f"`{text}` is no {what}; write it like {kind.example}") from None


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
