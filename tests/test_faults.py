"""Rehearsed faults: read strictly, hit exactly what they name, come back (data) or never do (machine)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun import faults, step
from jaxrun.config import Config, ConfigError, ModelConfig, TrainConfig
from jaxrun.faults import KINDS, PATTERNS, Fault, Faults, inf_in_layer, parse

VOCAB = 97

# -- the notation


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    argument = {
        "inf_grad": st.just("3"),
        "poison": st.sampled_from(PATTERNS),
        "level_shift": st.sampled_from(["0.5", "-2", "1e-07", "1e+20"]),
        "lr_spike": st.floats(1e-3, 1e30).map(lambda x: "x" + repr(x).removesuffix(".0")),
        "diverge": st.floats(0.5, 1.05).map(lambda x: "x" + repr(x).removesuffix(".0")),
    }.get(name, st.just(""))
    options: dict[str, Any] = {}
    if "device" in kind.options:
        options["device"] = draw(st.integers(0, 10**6))
    if "leaf" in kind.options:
        options["leaf"] = draw(st.sampled_from([None, "embedding", "layers.attention.key.kernel"]))
    if "process" in kind.options:
        options["process"] = draw(st.none() | st.integers(0, 10**6))
    return Fault(
        name,
        draw(st.integers(1, 10**9)),
        1 if kind.length == "none" else draw(st.integers(1, 1000)),
        draw(argument),
        **options,
    )


@hypothesis.given(any_fault())
def test_what_a_fault_calls_itself_reads_back_as_the_same_fault(fault: Fault) -> None:
    assert parse(fault.text).items == (fault,)


@hypothesis.given(st.lists(any_fault(), max_size=5, unique=True))
def test_a_list_reads_back_as_the_same_list(items: list[Fault]) -> None:
    assert parse(Faults(tuple(items)).text) == Faults(tuple(items))


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_that_an_error_shows_is_itself_right(kind: str) -> None:
    (fault,) = parse(KINDS[kind].example).items
    assert (fault.kind, fault.text) == (kind, KINDS[kind].example)


def test_no_text_is_no_faults_and_that_is_false() -> None:
    assert not parse("")
    assert not parse(" , ")
    assert parse("kill@1")


def test_two_spellings_of_a_fault_have_one_identity() -> None:
    assert parse("lr_spike@0900+20:x30.0").text == parse(" lr_spike@900+20:x3e1 ").text == "lr_spike@900+20:x30"
    assert parse("nan_loss@7+1").text == "nan_loss@7"
    assert parse("bitflip@7:process=1:device=0").text == "bitflip@7:device=0:process=1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lr_spike@900", "needs a factor, such as lr_spike@900+20:x30"),
        ("lr_spike@900:x30", "needs a length, such as lr_spike@900+20:x30"),
        ("lr_spike@900+20:30", "`30` is no factor; write it like lr_spike@900+20:x30"),
        ("lr_spike@900+20:xnan", "`xnan` is no factor; write it like lr_spike@900+20:x30"),
        ("lr_spike@900+20:x-3", "`x-3` is no factor; write it like lr_spike@900+20:x30"),
        ("lr_spike@900+20:x1e39", "grows beyond what float32 holds (2^128); make the factor smaller, or a `diverge` shorter"),
        ("diverge@900+2000:x1.05", "grows beyond what float32 holds (2^128); make the factor smaller, or a `diverge` shorter"),
        ("lr_spike@900+20:x30:process=1", "does not take `process=1`; write it like lr_spike@900+20:x30"),
        ("nan_los@5", "there is no fault `nan_los`; did you mean nan_loss?"),
        ("nan-loss@5", "there is no fault `nan-loss`; did you mean nan_loss?"),
        ("flood@5", "there is no fault `flood`; there are nan_loss, inf_grad, poison, level_shift, lr_spike, diverge, bitflip, kill, hang"),
        ("nan_loss", "cannot be read; write it like nan_loss@120"),
        ("nan_loss@-1", "cannot be read; write it like nan_loss@120"),
        ("nan_loss@5+0", "has to last for 1 or more"),
        ("nan_loss@5:2", "does not take `2`; write it like nan_loss@120"),
        ("inf_grad@5", "needs a layer, such as inf_grad@300:2"),
        ("inf_grad@5:-1", "`-1` is no layer; write it like inf_grad@300:2"),
        ("poison@5+3:scramble", "`scramble` is no pattern (shuffle, repeat, range); write it like poison@500+40:shuffle"),
        ("level_shift@5+3:1", "has no length; write it like level_shift@400:0.5"),
        ("level_shift@5:inf", "`inf` is no amount; write it like level_shift@400:0.5"),
        ("bitflip@5", "needs a device, such as bitflip@700:device=0"),
        ("bitflip@5:device=a", "`a` is no device; write it like bitflip@700:device=0"),
        ("bitflip@5:device=0:leaf=", "does not take `leaf=`; write it like bitflip@700:device=0"),
        ("kill@0", "can never strike, as the first step is 1"),
        ("kill@5:process=1:process=2", "does not take `process=2`; write it like kill@250"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_would_mend_it(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as raised:
        parse(text)
    assert str(raised.value) == f"`{text}`: {error}"


def test_every_bad_item_of_a_list_gets_its_own_line() -> None:
    with pytest.raises(ValueError, match=r"\S") as raised:
        parse("kill@0, nan_loss@5, poison@1:repeat, kill@9, kill@009, inf_grad@1:0, inf_grad@2:1")
    assert [line.split("`")[1] for line in str(raised.value).splitlines()] == [
        "kill@0", "poison@1:repeat", "kill@009", "inf_grad@2:1",
    ]  # fmt: skip


def test_reading_faults_does_not_start_jax() -> None:
    code = "import sys; from jaxrun import faults; faults.parse('kill@5'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- faults of the data


def batch(rows: int, seq_len: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (rows, seq_len + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:], np.ones((rows, seq_len), np.float32)


@hypothesis.given(
    pattern=st.sampled_from(PATTERNS),
    batch_index=st.integers(0, 2**40),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    seq_len=st.integers(1, 9),
)
def test_a_poisoned_batch_is_the_same_however_its_rows_are_split_over_processes(
    pattern: str, batch_index: int, owners: list[int], seq_len: int
) -> None:
    found = parse(f"poison@{batch_index}+1:{pattern}, nan_loss@{batch_index}")
    arrays = batch(len(owners), seq_len)
    whole = found.rows(batch_index, range(len(owners)), *arrays, VOCAB)
    for process in range(4):
        held = [row for row, owner in enumerate(owners) if owner == process]
        part = found.rows(batch_index, held, *(a[held] for a in arrays), VOCAB)
        for got, expected in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got, expected[held])
            assert got.dtype == expected.dtype


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_poisoned_batch_is_poisoned_in_the_same_way_when_it_is_replayed(pattern: str) -> None:
    found, arrays = parse(f"poison@5+3:{pattern}"), batch(4, 16)
    first = found.rows(6, range(4), *arrays, VOCAB)
    again = parse(found.text).rows(6, range(4), *batch(4, 16), VOCAB)
    for a, b, given, untouched in zip(first, again, arrays, batch(4, 16), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(given, untouched)  # nothing is poisoned in place
    assert not np.array_equal(first[0], arrays[0])


@hypothesis.given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 30))
def test_a_window_is_hit_from_its_first_batch_up_to_its_end_and_nothing_else_is_copied(
    start: int, length: int, index: int
) -> None:
    arrays = batch(2, 4)
    for kind in (f"poison@{start}+{length}:range", f"nan_loss@{start}+{length}"):
        changed = parse(kind).rows(index, range(2), *arrays, VOCAB)
        hit = any(a is not b for a, b in zip(changed, arrays, strict=True))
        assert hit == (start <= index < start + length)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_targets_of_a_poisoned_sequence_are_its_own_next_tokens(pattern: str) -> None:
    inputs, targets, weights = parse(f"poison@0+1:{pattern}").rows(0, range(3), *batch(3, 12), VOCAB)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs.min() >= 0, inputs.max() < VOCAB, targets.max() < VOCAB) == (True, True, True)
    assert (weights == 1).all()


def test_shuffling_keeps_each_sequences_tokens_and_orders_no_two_rows_alike() -> None:
    same = np.tile(np.arange(33, dtype=np.int32), (2, 1))
    inputs, targets, _ = parse("poison@3+2:shuffle").rows(3, [0, 1], same[:, :-1], same[:, 1:], np.ones((2, 32)), VOCAB)
    tokens = np.concatenate([inputs, targets[:, -1:]], 1)
    np.testing.assert_array_equal(np.sort(tokens, 1), same)
    assert not np.array_equal(tokens[0], tokens[1])
    other, _, _ = parse("poison@3+2:shuffle").rows(4, [0, 1], same[:, :-1], same[:, 1:], np.ones((2, 32)), VOCAB)
    assert not np.array_equal(other, inputs)


def test_repeating_leaves_one_token_and_another_range_keeps_what_is_equal_equal() -> None:
    arrays = batch(3, 12)
    inputs, targets, _ = parse("poison@0+1:repeat").rows(0, range(3), *arrays, VOCAB)
    assert len(np.unique(np.concatenate([inputs, targets]))) == 1
    inputs, _, _ = parse("poison@0+1:range").rows(0, range(3), *arrays, VOCAB)
    np.testing.assert_array_equal(inputs, (arrays[0] + VOCAB // 2) % VOCAB)


def test_a_nan_loss_is_one_weight_in_row_0_or_in_the_named_process_first_row() -> None:
    arrays = batch(4, 5)
    _, _, weights = parse("nan_loss@2").rows(2, range(4), *arrays, VOCAB)
    assert np.argwhere(np.isnan(weights)).tolist() == [[0, 0]]
    _, _, weights = parse("nan_loss@2").rows(2, [4, 5, 6, 7], *arrays, VOCAB)
    assert np.isfinite(weights).all()
    named = parse("nan_loss@2:process=1")
    for process, expected in ((0, []), (1, [[0, 0]])):
        _, _, weights = named.rows(2, [4, 5, 6, 7], *arrays, VOCAB, process_index=process)
        assert np.argwhere(np.isnan(weights)).tolist() == expected


def test_a_level_shift_stays_and_only_the_report_shows_it() -> None:
    found, arrays = parse("level_shift@10:0.5, level_shift@20:-0.25"), batch(2, 3)
    assert [found.reported_loss(i, 2.0) for i in (9, 10, 19, 20, 999)] == [2.0, 2.5, 2.5, 2.25, 2.25]
    assert np.isnan(found.reported_loss(10, float("nan")))
    assert all(a is b for a, b in zip(found.rows(15, range(2), *arrays, VOCAB), arrays, strict=True))


def test_an_infinite_gradient_belongs_to_its_batches() -> None:
    found = parse("inf_grad@5+2:1, inf_grad@9:1")
    assert found.grad_layer == 1
    assert [found.grad_fault(i) for i in range(4, 11)] == [0, 1, 1, 0, 0, 1, 0]
    assert parse("kill@5").grad_layer is None


# -- faults of the machine


@hypothesis.given(st.lists(any_fault(), max_size=5, unique=True), st.data())
def test_a_machine_fault_strikes_once_however_often_its_step_comes_back(
    items: list[Fault], data: st.DataObject
) -> None:
    found = Faults(tuple(items))
    struck: dict[str, int] = {}
    times: dict[str, int] = {}
    history = data.draw(st.lists(st.sampled_from([f.start for f in items] or [1]), max_size=20))
    for attempt, at in enumerate(history):
        for fault in found.due(at, struck):
            assert fault.start == at
            struck[fault.text] = attempt
            times[fault.text] = times.get(fault.text, 0) + 1
    machine = {f.text for f in items if KINDS[f.kind].of == "step" and f.start in history}
    assert times == dict.fromkeys(machine, 1)


def test_the_learning_rate_is_off_only_in_its_window_and_only_in_the_attempt_that_was_struck() -> None:
    found = parse("lr_spike@5+3:x30")
    struck = {"lr_spike@5+3:x30": 2}
    assert [found.lr_factor(s, struck, 2) for s in range(4, 9)] == [1, 30, 30, 30, 1]
    assert [found.lr_factor(s, struck, 3) for s in range(4, 9)] == [1] * 5
    assert [found.lr_factor(s, {}, 0) for s in range(4, 9)] == [1] * 5


def test_a_divergence_grows_by_its_factor_each_step_and_factors_multiply() -> None:
    found = parse("diverge@5+3:x2, lr_spike@7+1:x10")
    struck = dict.fromkeys((f.text for f in found.items), 0)
    assert [found.lr_factor(s, struck, 0) for s in range(4, 9)] == [1, 2, 4, 80, 1]


@dataclass(frozen=True)
class State:
    """As much of a TrainState as a fault may touch."""

    params: dict[str, Any]


def devices_state(spec: P) -> State:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    kernel = np.random.default_rng(0).normal(0, 0.02, (2, 8, 4)).astype(np.float32)
    scale = np.ones((2, 8), np.float32)
    put = {"kernel": jax.device_put(kernel, NamedSharding(mesh, spec)), "scale": jax.device_put(scale, NamedSharding(mesh, P()))}  # fmt: skip
    return State({"embedding": jnp.ones((50, 8)), "layers": put})


def on_devices(x: jax.Array) -> dict[int, np.ndarray]:
    return {shard.device.id: np.array(shard.data) for shard in x.addressable_shards}


@pytest.mark.parametrize("spec", [P(), P(None, "a"), P(None, "a", "b")], ids=["replicated", "half split", "split"])
def test_a_flipped_bit_is_in_one_devices_own_buffer_and_nowhere_else(spec: P) -> None:
    state, found = devices_state(spec), parse("bitflip@1:device=5")
    before = jax.tree.map(on_devices, state.params)
    after = jax.tree.map(on_devices, found.strike(found.items[0], state, 0).params)
    changed = [
        (jax.tree_util.keystr(path, simple=True, separator="."), np.argwhere(a.view(np.uint32) != b.view(np.uint32)))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    ]
    hit = [(path, where.tolist()) for path, where in changed if len(where)]
    assert hit == [("layers.kernel.5", [[0, 0, 0]])]
    old, new = before["layers"]["kernel"][5][0, 0, 0], after["layers"]["kernel"][5][0, 0, 0]
    assert old.view(np.uint32) ^ new.view(np.uint32) == 1 << 30
    assert abs(new) > 1e30


def test_a_leaf_can_be_named_and_a_flip_outlives_donation_to_the_next_step() -> None:
    state = devices_state(P(None, "a"))
    found = parse("bitflip@1:device=3:leaf=layers.scale")
    scale = found.strike(found.items[0], state, 0).params["layers"]["scale"]
    del state
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    values = on_devices(negate(scale))
    assert [d for d, v in values.items() if np.isinf(v[0, 0])] == [3]  # 1.0 and the top bit: the exponent of infinity
    assert all((np.ravel(v)[1:] == -1).all() for v in values.values())


def test_other_processes_and_the_state_under_an_lr_fault_are_left_alone() -> None:
    state = State({})
    found = parse("kill@1:process=1, hang@1:process=1, lr_spike@1+2:x3, bitflip@1:device=0:process=1")
    assert all(found.strike(fault, state, 0) is state for fault in found.items)


def strike_in_a_process(fault: str) -> subprocess.Popen[str]:
    code = f"from jaxrun import faults\nf = faults.parse({fault!r})\nprint('up', flush=True)\nf.strike(f.items[0], None, 0)\nprint('back')"  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_kill_is_a_death_by_sigkill() -> None:
    process = strike_in_a_process("kill@5")
    assert process.communicate(timeout=60)[0] == "up\n"
    assert process.returncode == -signal.SIGKILL


def test_a_hang_goes_on_until_a_signal_ends_it() -> None:
    process = strike_in_a_process("hang@5:process=0")
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == -signal.SIGTERM


def test_a_fault_that_this_run_cannot_have_is_refused_at_the_start() -> None:
    params = devices_state(P()).params
    parse("inf_grad@1:1, bitflip@1:device=7, bitflip@1:device=0:leaf=layers.scale, kill@1:process=0").check(params)
    parse("").check({})
    wrong = "inf_grad@1:2, kill@1:process=1, bitflip@1:device=8, bitflip@1:device=0:leaf=layers.scales"
    with pytest.raises(ConfigError) as raised:
        parse(wrong).check(params)
    assert str(raised.value).splitlines() == [
        "config.faults: `inf_grad@1:2`: layer 2 is none of 0 to 1",
        "config.faults: `kill@1:process=1`: process 1 is none of 0 to 0",
        "config.faults: `bitflip@1:device=8`: device 8 is none of 0 to 7",
        "config.faults: `bitflip@1:device=0:leaf=layers.scales`: no parameter is called layers.scales; did you mean layers.scale?",
    ]


# -- in the step


@hypothesis.given(st.integers(0, 2))
def test_an_infinite_gradient_is_one_element_of_one_layer(layer: int) -> None:
    grads = {"head": jnp.ones(3), "layers": {"a": jnp.full((3, 2, 2), -0.0), "b": jnp.ones((3, 2))}}
    hit = jax.jit(inf_in_layer, static_argnums=1)
    unhit = hit(grads, layer, jnp.float32(0))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.signbit(x), np.signbit(y)), unhit, grads)
    jax.tree.map(np.testing.assert_array_equal, unhit, grads)
    infinite = jax.tree.map(lambda x: np.argwhere(np.isinf(x)).tolist(), hit(grads, layer, jnp.float32(1)))
    assert infinite == {"head": [], "layers": {"a": [[layer, 0, 0]], "b": []}}


def test_a_layer_that_is_not_there_is_refused_and_not_passed_over() -> None:
    with pytest.raises(ConfigError, match="layer 3, which is none of 0 to 2"):
        inf_in_layer({"layers": {"a": jnp.ones((3, 2))}}, 3, jnp.float32(1))


@pytest.fixture(scope="module")
def rehearsal() -> tuple[Any, Any, step.TrainState]:
    """The train step with and without the hook, and a state."""
    model = ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=32, vocab_size=VOCAB)
    config = Config(model=model, train=TrainConfig(batch_size=4, seq_len=8, num_steps=10), faults="inf_grad@3:1")
    plain = step.build(replace(config, faults=""))
    hooked = step.build(config)
    abstract, rng = jax.eval_shape(plain.init, jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(0, 0.02, a.shape).astype(a.dtype), abstract.params)
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract).replace(params=params)
    # On a device by name, as a struck state is too: one executable for both.
    state = jax.device_put(state, jax.devices()[0])
    return jax.jit(plain.train_step), jax.jit(hooked.train_step), state


def run(train_step: Any, state: step.TrainState, grad_fault: float | None, text: str = "") -> Any:
    rows = parse(text).rows(3, range(4), *batch(4, 8), VOCAB)
    flag = None if grad_fault is None else jnp.float32(grad_fault)
    controls = step.Controls(jnp.float32(1), jnp.float32(jnp.inf), flag)
    return train_step(state, step.Batch(*map(jnp.asarray, rows)), controls)


def test_the_hook_at_rest_changes_no_bit_of_a_step(rehearsal: Any) -> None:
    plain, hooked, state = rehearsal
    jax.tree.map(np.testing.assert_array_equal, run(plain, state, None), run(hooked, state, 0.0))


def test_an_infinite_gradient_leaves_the_loss_finite_and_the_update_out(rehearsal: Any) -> None:
    _, hooked, state = rehearsal
    after, metrics = run(hooked, state, 1.0)
    assert step.SKIP_REASONS[metrics.skip_reason] == "grad_nonfinite"
    assert np.isfinite(metrics.loss)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))


def test_a_nan_loss_reaches_the_step_and_leaves_the_update_out(rehearsal: Any) -> None:
    plain, _, state = rehearsal
    after, metrics = run(plain, state, None, "nan_loss@3")
    assert step.SKIP_REASONS[metrics.skip_reason] == "loss_nonfinite"
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))


def test_a_flipped_bit_is_seen_by_the_very_step_that_it_struck_before(rehearsal: Any) -> None:
    plain, _, state = rehearsal
    found = parse("bitflip@1:device=0")
    _, metrics = run(plain, found.strike(found.items[0], state, 0), None)
    assert not np.isfinite([metrics.loss, metrics.grad_norm, metrics.param_norm]).all()


def test_the_config_names_faults_as_its_own_option() -> None:
    from jaxrun import config

    with pytest.raises(ConfigError) as raised:
        config.validate({"faults": "kil@5"})
    assert str(raised.value) == "config.faults: `kil@5`: there is no fault `kil`; did you mean kill?"
    assert faults.parse(config.validate({"faults": "kill@5"}).faults).text == "kill@5"
