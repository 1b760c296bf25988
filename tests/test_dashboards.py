"""`jaxrun watch` and `jaxrun report` on a real run that was rewound, and on run directories in every state."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import poisoned
import pytest

from jaxrun import cli
from jaxrun import config as config_lib
from jaxrun.config import Config, ConfigError
from jaxrun.journal import EVENTS, METRICS, LineFile, read_lines
from jaxrun.report import main as report_main
from jaxrun.telemetry.goodput import goodput
from jaxrun.watch import Watched, frame
from jaxrun.watch import main as watch_main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 80, 24


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a real run: a spike, a second run, a rewind, a discarded window, a skipped update. To be looked at only."""
    return poisoned.trained(tmp_path_factory.getbasetemp() / "poisoned")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """What `jaxrun watch RUN --once` prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def call(run: Path) -> str:
        capsys.readouterr()
        assert cli.main(["watch", str(run), "--once"]) == 0
        out = capsys.readouterr().out
        assert all(len(line.rstrip()) <= WIDTH for line in out.splitlines())
        return out

    return call


def report(*runs: Path, output: Path) -> str:
    assert report_main([*map(str, runs), "--output", str(output)]) == 0
    return output.read_text()


def run_directory(path: Path, events: list[dict[str, Any]], lines: list[dict[str, Any]], num_steps: int = 100) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config_lib.to_json(Config(train=config_lib.TrainConfig(num_steps=num_steps))))
    for name, records in ((EVENTS, events), (METRICS, lines)):
        if records:
            file = LineFile(path / name)
            file.append(*records)
            file.close()
    return path


def event(at: float, kind: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": at, "step": step, "attempt": 0, "kind": kind, **fields}


def training(begin: float, num_lines: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": s, "attempt": 0, "time": begin + s, "loss": 3.0 / s, "grad_norm": 1.0, **fields} for s in range(1, num_lines + 1)]  # fmt: skip


# -- a real run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_watch_shows_a_real_run_that_was_rewound(shown: Callable[[Path], str], workdir: Path) -> None:
    out = shown(workdir)
    assert out.startswith(f"{workdir.name}  finished ")
    assert f"step {poisoned.NUM_STEPS} of {poisoned.NUM_STEPS} " in out
    assert re.search(r"^loss +[\d.]+ +[▁▂▃▄▅▆▇█!]{10,}$", out, re.M)
    assert re.search(r"^checkpoints .*\b\d+ good", out, re.M)
    assert "back from step" in out
    assert "finished" in out.splitlines()[-1]
    told = goodput(list(read_lines(workdir / EVENTS))).goodput
    assert told is not None
    assert f"goodput {100 * told:.1f} % of " in out


@pytest.mark.slow
def test_a_frame_fits_on_a_small_terminal(workdir: Path) -> None:
    snapshot = Watched(workdir).read(time.time())
    for width, height in ((80, 24), (40, 12), (200, 60), (20, 5)):
        lines = frame(snapshot, width, height).renderables
        assert len(lines) <= height


@pytest.mark.slow
def test_the_report_tells_the_incidents_of_a_real_run(workdir: Path, tmp_path: Path) -> None:
    page = report(workdir, output=tmp_path / "report.html")
    said = page[page.index("</head>") :]
    (rewind,) = [e for e in read_lines(workdir / EVENTS) if e["kind"] == "rewind"]
    assert f"went back from step {rewind['from_step']} to {rewind['to_step']}, learning rate x 0.5" in said
    assert "data: every number came out the same again" in said
    assert "the loss is not finite" in said
    assert re.search(r"discarded batches \d+ to \d+ \(their worst sequence has a loss of", said)
    assert re.search(r"batch \d+ row \d+, loss [\d.]+: \d\d\.txt@\d+", said)
    assert '<dt>goodput</dt><dd class="">' in said
    assert "guard.patience" in said


@pytest.mark.slow
def test_the_report_fetches_nothing(workdir: Path, tmp_path: Path) -> None:
    page = report(workdir, output=tmp_path / "report.html")
    assert not re.search(r"<(link|img|iframe)\b", page[page.index("</head>") :])
    assert not re.search(r"<[^>]*\b(src|href)\s*=\s*[\"']?(https?:)?//", page[page.index("</head>") :])
    assert page.count("<script src") == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the report in; on Debian: apt install chromium")
def test_the_report_s_plots_are_drawn_in_a_browser(workdir: Path, tmp_path: Path) -> None:
    output, other = tmp_path / "report.html", run_directory(tmp_path / "other", [], training(0, 50))
    for runs in ([workdir], [workdir, other]):
        page = report(*runs, output=output)
        assert CHROMIUM is not None
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", output.as_uri()],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stderr[-2000:]
        figures = page.count('<div class="figure"')
        assert figures >= 2
        assert len(re.findall(r'<div class="figure[^"]*js-plotly-plot', done.stdout)) == figures
        assert "scatterlayer" in done.stdout
        assert done.stdout.count('class="trace scatter') >= 5


@pytest.mark.slow
def test_several_runs_are_told_side_by_side(workdir: Path, tmp_path: Path) -> None:
    other = run_directory(tmp_path / "another", [], training(0, 50))
    page = report(workdir, other, output=tmp_path / "both.html")
    assert "<th>run</th><th>another</th>" in page
    assert "train.batch_size" in page[: page.index("<details>")]  # among the differences
    assert '"name":"another: loss"' in page
    assert '"name":"run: loss"' in page


# -- run directories in every state -----------------------------------------------------------------------------------

NOW = time.time()
STATES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "nothing but a config": ([], [], "no run yet"),
    "starting": ([event(NOW - 5, "start")], [], "starting for "),
    "running": ([event(NOW - 45, "start")], training(NOW - 41, 40), "running for "),
    "dead": ([event(NOW - 9000, "start")], training(NOW - 8000, 40), "looks dead: no sign of life for 2 h"),
    "gave up": ([event(NOW - 99, "start"), event(NOW, "gave_up", 40, onset=30, reason="it comes back")], training(NOW - 60, 40), "gave up "),
    "stopped": ([event(NOW - 99, "start"), event(NOW, "preempted", 40, reason="SIGTERM")], training(NOW - 60, 40), "start it again"),
    "finished": ([event(NOW - 99, "start"), event(NOW, "finished", 100)], training(NOW - 101, 100), "finished "),
    "old": ([event(NOW - 99, "start"), event(NOW, "finished", 40)], [{"step": s, "attempt": 0, "loss": 1.0} for s in range(1, 41)], "finished "),
    "without a step": ([event(NOW - 99, "start"), event(NOW, "finished", 0)], [], "finished "),
    "nothing finite": ([event(NOW - 5, "start")], [*training(NOW - 4, 3, mfu=None), {"step": 4, "attempt": 0, "time": NOW, "loss": "nan", "grad_norm": "inf"}], "running"),
}  # fmt: skip


@pytest.fixture
def at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands at NOW, however long it took to come here."""
    monkeypatch.setattr(time, "time", lambda: NOW)


@pytest.mark.usefixtures("at_that_time")
@pytest.mark.parametrize("name", STATES)
def test_every_state_is_shown_and_reported(shown: Callable[[Path], str], tmp_path: Path, name: str) -> None:
    events, lines, said = STATES[name]
    run = run_directory(tmp_path / "a run", events, lines)
    for path in run.glob("*.jsonl"):  # what was being written when it was looked at, and when that was
        path.write_bytes(path.read_bytes() + b'{"step": 41, "att')
        last = max([x["time"] for x in (*events, *lines) if "time" in x])
        os.utime(path, (last, last))
    assert said in shown(run)
    assert name == "nothing but a config" or "Run a run" in report(run, output=tmp_path / "report.html")


def test_an_empty_folder_is_watched_until_a_run_appears_and_is_not_reported(
    shown: Callable[[Path], str], tmp_path: Path
) -> None:
    assert "no run yet" in shown(tmp_path)
    with pytest.raises(ConfigError, match="is no run directory"):
        report_main([str(tmp_path)])
    with pytest.raises(ConfigError, match="no such folder"):
        watch_main([str(tmp_path / "nowhere")])
    watched = Watched(tmp_path)
    assert watched.read(NOW).status.state == "empty"
    run_directory(tmp_path, [event(NOW - 45, "start")], training(NOW - 41, 40))
    seen = watched.read(NOW)
    assert (seen.status.state, seen.status.step, len(seen.series)) == ("running", 40, 40)
    assert seen.left_s == pytest.approx(60)


def test_the_report_is_the_run_s_own_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, lines, _ = STATES["finished"]
    run = run_directory(tmp_path / "run", events, lines)
    assert report_main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'} (")
    assert [p.name for p in run.iterdir() if p.name.startswith(".")] == []


def test_devices_and_norms_by_layer_are_shown_where_there_are_any(shown: Callable[[Path], str], tmp_path: Path) -> None:
    norms = {"grad_norm/embed": 0.5, **{f"grad_norm/layer_{i}": 0.1 * (i + 1) for i in range(12)}}
    events = [*STATES["finished"][0], event(NOW, "device_health", 50, device=0, host="n1", problem="throttled")]
    run = run_directory(tmp_path / "run", events, training(NOW - 101, 100, **norms, device_memory_bytes=2.5e9))
    bare = report(run, output=tmp_path / "report.html")
    assert "Devices" not in bare
    (run / "devices").mkdir()
    samples = [
        {"time": NOW - t, "process": 0, "host": "n1", "device": d, **({"temperature_c": 61.0, "power_w": 412.0, "utilization": 0.97, "ecc_corrected": 3, "throttle": ["power cap"]} if d is not None else {"cpu_percent": 12.0})}
        for t in range(50, 0, -1) for d in (0, None)
    ]  # fmt: skip
    (run / "devices" / "0.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    out = shown(run)
    assert "device 0: 61 °C 412 W busy 97 %" in out
    assert "host: CPU 12 %" in out
    assert "device 0 on n1: throttled" in out
    page = report(run, output=tmp_path / "report.html")
    assert '"type":"heatmap"' in page
    assert re.search(r'"y":\["embed","layer_0","layer_1","layer_2",.*"layer_10","layer_11"\]', page)
    assert "power cap" in page


def test_what_only_looks_needs_no_device() -> None:
    code = "import sys, jaxrun.watch, jaxrun.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_leaving_the_live_view_leaves_the_terminal_clean(tmp_path: Path, number: int) -> None:
    run = run_directory(tmp_path / "run", [event(time.time() - 45, "start")], training(time.time() - 41, 40))
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrun.cli", "watch", str(run), "--every", "0.1"],
        stdin=other_end, stdout=other_end, stderr=other_end, env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(other_end)
    seen = b""
    while seen.count(b"running for") < 2:  # a frame, and one more
        seen += os.read(terminal, 65536)
    process.send_signal(number)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    assert process.wait(timeout=60) == 0
    os.close(terminal)
    entered, left = seen.find(b"\x1b[?1049h"), seen.rfind(b"\x1b[?1049l")
    assert 0 <= entered < left
    assert b"\x1b[?25h" in seen[seen.rfind(b"\x1b[?25l") :]  # the cursor is back
    assert b"Traceback" not in seen
    assert b"running for" in seen[left:]  # the last frame stays
