"""What is told of processes and devices is theirs, whatever came before; and waiting that costs nothing is not lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrun import sharding
from jaxrun.config import Config, TelemetryConfig
from jaxrun.history import History
from jaxrun.observer import Observer

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def observer(tmp_path: Path, told: Told) -> Iterator[Observer]:
    config = Config(telemetry=TelemetryConfig(tensorboard=False, device_every_s=0, exchange_every=10))
    mesh = sharding.make_mesh(sharding.resolve(config.mesh, jax.device_count()))
    with jax.set_mesh(mesh):
        made = Observer(config, tmp_path, mesh, attempt=0, on_event=lambda kind, **fields: told.append((kind, fields)))
        yield made
        made.close()


def flown(*, is_ready: bool) -> Any:
    return SimpleNamespace(metrics=SimpleNamespace(loss=SimpleNamespace(is_ready=lambda: is_ready)))


def test_a_wait_for_data_is_lost_only_where_the_devices_had_nothing_to_do(observer: Observer) -> None:
    observer.begin_steps(0)
    with observer.waiting_for_data([flown(is_ready=False)]):
        time.sleep(0.02)
    assert "data_wait" not in observer.spent.read()
    with observer.waiting_for_data([flown(is_ready=True)]):
        time.sleep(0.02)
    assert observer.spent.read()["data_wait"] >= 0.02
    observer.finished(1.0)
    assert observer._interval.take(1)["data_wait_s"] >= 0.04  # the line has both


def test_the_first_exchange_after_a_resume_or_a_rewind_is_of_its_own_steps(observer: Observer) -> None:
    for begin in (lambda: observer.begin_steps(1000), lambda: observer.rewound(1, 1000)):
        begin()
        time.sleep(0.05)
        observer.tell(1010)
        (_, steps, rows) = observer._told.pop()
        assert steps == 10
        assert 0.005 <= rows[0, 0] < 0.05


def test_accounts_add_up_over_a_rewind(observer: Observer, told: Told) -> None:
    observer.begin_steps(0)
    observer.account(20)
    observer.before_going_back(24)
    with observer.spent.on("recovery"):
        time.sleep(0.01)
    observer.rewound(1, 10)
    observer.account(30)
    events = [fields for kind, fields in told if kind == "time_spent"]
    assert [(e["from_step"], e["step"]) for e in events] == [(0, 20), (20, 24), (10, 30)]
    total = sum(s for e in events for s in e["seconds"].values())
    assert total == pytest.approx(sum(observer.spent.read().values()), abs=0.01)


def health(step: int, *, unsound: bool = True) -> tuple[str, int, dict[str, Any]]:
    return "device_health", step, {"device": "cuda:3", "host": "n7", "problem": "ecc_uncorrected", "unsound": unsound}


def test_a_report_counts_if_it_is_of_the_trouble_or_of_the_second_run_and_not_of_an_older_one(tmp_path: Path) -> None:
    history = History(tmp_path, [], 0)
    history.write(health(50), health(110, unsound=False))
    assert history.unsound_devices(100) == []
    history.write(health(105))
    assert history.unsound_devices(100) == ["cuda:3 of n7: ecc_uncorrected"]
    history.write(("rewind", 120, {"to_step": 80, "decision": {}}))
    assert history.unsound_devices(100) == []
    history.write(("triage_started", 130, {"to_step": 60}), health(70))
    assert history.unsound_devices(100) == ["cuda:3 of n7: ecc_uncorrected"]
    history.write(("triage", 125, {"verdict": "data"}))
    assert history.unsound_devices(100) == []
    history.close()
