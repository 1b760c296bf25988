"""The shell scripts, with a Python that makes believe to install and to train; the benchmarks' arithmetic."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

from jaxrun import config as config_lib

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.sh") if path.name != "_env.sh")
SCRIPTS.append(ROOT / "scripts/slurm/train.sbatch")

# Found first on PATH, as python3. `-m venv DIR` copies it into DIR; `-m pip` notes its call, and fails where the file
# pip_fails lies; the rest is done by the real one. $1 is its name for itself.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "{lab}/jaxrun" "$3/bin/jaxrun" ;;
  "-m pip")
    echo "$@" >> "{lab}/pip_calls"
    if [ -e "{lab}/pip_fails" ]; then echo "ERROR: no wheel for you"; exit 1; fi
    echo "WARNING: something odd" ;;
  "-c import sys; print(sys.executable)") echo "$0" ;;
  *) exec "{real}" "$@" ;;
esac
"""
FAKE_JAXRUN = """#!/bin/sh
echo "JAX_PLATFORMS=$JAX_PLATFORMS" "$@" >> "{lab}/jaxrun_calls"
if [ "$1" = train ]; then . "{lab}/train"; fi
echo "jaxrun $1 says something"
"""


class Lab:
    """A copy of the scripts in a folder whose name has a blank, with make-believe programs."""

    def __init__(self, folder: Path):
        self.folder, self.repository = folder, folder / "a clone"
        self.repository.mkdir()
        shutil.copytree(ROOT / "scripts", self.repository / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.repository)
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.program("python3", FAKE_PYTHON)
        shutil.move(self.program("jaxrun", FAKE_JAXRUN), folder / "jaxrun")
        (folder / "train").write_text("")

    def program(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(text.replace("{lab}", str(self.folder)).replace("{real}", sys.executable))
        path.chmod(0o755)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "JAX_PLATFORMS")}
        return {**kept, "PATH": f"{self.programs}:/usr/bin:/bin", **more}

    def command(self, *arguments: str) -> list[str]:
        return ["bash", str(self.repository / "scripts" / arguments[0]), *arguments[1:]]

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment(**more), cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}_calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_every_script_parses_and_can_be_executed(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert os.access(path, os.X_OK)


def test_continuous_integration_calls_the_test_script_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test.sh"'
    ]


def test_an_old_python_is_named_with_a_remedy(lab: Lab) -> None:
    old = "#!/bin/sh\nif [ $1 = --version ]; then echo Python 3.9.18; exit; fi; exit 1\n"
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        lab.program(name, old)
    done = lab.run("quickstart.sh")
    assert done.returncode == 1
    assert (
        done.stderr
        == "quickstart.sh: jaxrun needs Python 3.11 or newer, but python3 is Python 3.9.18; install one, or set PYTHON to its path\n"
    )


def test_an_environment_is_made_once_and_reused(lab: Lab) -> None:
    first, second = lab.run("quickstart.sh"), lab.run("quickstart.sh")
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(lab.calls("pip")) == 1
    assert "installing" in first.stdout
    assert "environment: .venv is up to date" in second.stdout


def test_another_pyproject_is_installed_into_the_same_environment(lab: Lab) -> None:
    lab.run("quickstart.sh")
    (lab.repository / ".venv/mine").touch()
    with open(lab.repository / "pyproject.toml", "a") as file:
        file.write("\n")
    lab.run("quickstart.sh")
    assert len(lab.calls("pip")) == 2
    assert (lab.repository / ".venv/mine").exists()


def test_an_environment_that_moved_with_its_repository_is_made_anew(lab: Lab) -> None:
    lab.run("quickstart.sh")
    lab.repository = lab.repository.rename(lab.folder / "moved")
    (lab.repository / ".venv/mine").touch()
    assert lab.run("quickstart.sh").returncode == 0
    assert not (lab.repository / ".venv/mine").exists()


def test_an_environment_that_somebody_else_made_is_never_cleared(lab: Lab) -> None:
    mine = lab.repository / ".venv/mine"
    mine.parent.mkdir()
    mine.touch()
    done = lab.run("quickstart.sh")
    assert done.returncode == 1
    assert "move it away" in done.stderr
    assert mine.exists()


def test_a_failed_installation_shows_what_pip_said_and_is_tried_again(lab: Lab) -> None:
    (lab.folder / "pip_fails").touch()
    failed = lab.run("quickstart.sh")
    assert failed.returncode == 1
    assert "ERROR: no wheel for you" in failed.stderr
    assert lab.calls("jaxrun") == []
    (lab.folder / "pip_fails").unlink()
    assert lab.run("quickstart.sh").returncode == 0
    assert len(lab.calls("pip")) == 2


def test_a_successful_installation_keeps_pips_warnings_to_itself(lab: Lab) -> None:
    done = lab.run("quickstart.sh")
    assert "WARNING" not in done.stdout + done.stderr
    assert "WARNING" in (lab.repository / ".venv/pip.log").read_text()


def test_the_quickstart_trains_on_a_cpu_then_evaluates_and_samples(lab: Lab) -> None:
    done = lab.run("quickstart.sh", "--workdir", "my run", "--config.train.num_steps=7")
    train, evaluate, sample = lab.calls("jaxrun")
    assert train == (
        f"JAX_PLATFORMS=cpu train --config {lab.repository}/configs/quickstart.py --workdir my run --config.train.num_steps=7"
    )
    assert evaluate == "JAX_PLATFORMS=cpu eval my run --batches 32"
    assert sample.startswith("JAX_PLATFORMS=cpu sample my run --prompt def ")
    assert [line for line in done.stdout.splitlines() if line[1:4] == "/4 "] == [
        "1/4 environment", "2/4 training configs/quickstart.py in my run", "3/4 loss on held-out text", "4/4 what the model writes after 'def '",
    ]  # fmt: skip
    assert "run directory: my run" in done.stdout


def test_a_platform_that_the_user_chose_is_kept(lab: Lab) -> None:
    lab.run("quickstart.sh", JAX_PLATFORMS="cuda")
    assert all(call.startswith("JAX_PLATFORMS=cuda") for call in lab.calls("jaxrun"))


@pytest.mark.parametrize("code", [1, 70, 75, 78])
def test_the_exit_code_of_training_is_passed_on(lab: Lab, code: int) -> None:
    (lab.folder / "train").write_text(f"exit {code}")
    done = lab.run("quickstart.sh")
    assert done.returncode == code
    assert len(lab.calls("jaxrun")) == 1
    assert ("the same command goes on" in done.stdout) == (code == 75)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_training_which_may_save_before_it_ends(lab: Lab, number: signal.Signals) -> None:
    ready, saved = lab.folder / "ready", lab.folder / "saved"
    (lab.folder / "train").write_text(
        f"trap 'sleep 0.3; touch \"{saved}\"; exit 75' {number.name.removeprefix('SIG')}\n"
        f'touch "{ready}"\nfor i in $(seq 400); do sleep 0.05; done\n'
    )
    process = subprocess.Popen(
        lab.command("quickstart.sh"), env=lab.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
        process.wait()
    assert saved.exists()


def load(path: str, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_link_that_leads_nowhere_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/there.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[good](docs/there.md#a-heading-with-code) [web](https://example.org/x) `docs/there.md` `docs/*.md`\n"
        "```\n[in a block](nowhere.md) `docs/nowhere.md`\n```\n"
        "[bad](nowhere.md)\n[bad](docs/there.md#nowhere)\n`docs/nowhere.md --flag`\n"
    )
    assert list(load("scripts/check_links.py", "check_links").problems(page, tmp_path)) == [
        "page.md:5: the link to nowhere.md leads nowhere",
        "page.md:6: docs/there.md has no heading #nowhere",
        "page.md:7: names docs/nowhere.md, which is not there",
    ]


def test_a_startup_benchmark_reads_its_figures_from_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts/bench")
    startup = load("scripts/bench/startup.py", "startup")

    def line(step: int, step_time_s: float) -> dict[str, float]:
        return {"step": step, "time": 1000.0 + step, "loss": 1.0, "step_time_s": step_time_s, "data_wait_s": 0.001, "tokens_per_sec": 10 / step_time_s}  # fmt: skip

    metrics = [
        line(1, 50.0),
        line(10, 9.0),
        line(20, 0.5),
        line(30, 0.25),
        line(40, 0.2),
        {"step": 40, "eval_loss": 1.0},
    ]
    events = [
        {"kind": "start", "step": 0, "compile_s": 3.5},
        *({"kind": "checkpoint_saved", "step": 10 * i, "blocked_s": s} for i, s in enumerate((0.1, 0.3, 0.2, 9.0), 1)),
        {"kind": "checkpoint_saved", "step": 50, "found": True},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert startup.measures(tmp_path, started=990.0) == pytest.approx(
        {"compile_s": 3.5, "first_step_s": 11.0, "step_ms": 250.0, "tokens_per_sec": 40.0, "data_wait_ms": 1.0, "stall_ms": 200.0}
    )  # fmt: skip
    assert startup.summary([{"x": 1.0}, {"x": 3.0}, {"x": None}], "x", 1) == "2.0 (1.0 to 3.0)"
    assert startup.summary([{"x": None}], "x", 1) == "—"


# -- clusters ----------------------------------------------------------------------------------------------------------

# What sbatch and srun do for train.sbatch: notes how it is called, and ends as it is told to.
FAKE_SRUN = """#!/bin/bash
echo "$@" >> "{lab}/srun_calls"
. "{lab}/step"
"""
FAKE_SCONTROL = """#!/bin/sh
echo "$@" >> "{lab}/scontrol_calls"
kill -KILL $PPID
"""


@pytest.mark.parametrize(
    ("step", "requeued", "code"),
    [("exit 0", False, 0), ("exit 70", False, 70), ("exit 78", False, 78), ("exit 1", True, -9), ("exit 75", True, -9),
     ("exit 143", True, -9), ("kill -KILL $$", True, -9)],
)  # fmt: skip
def test_a_job_goes_back_into_the_queue_where_another_start_can_help(
    lab: Lab, step: str, requeued: bool, code: int
) -> None:
    lab.program("srun", FAKE_SRUN)
    lab.program("scontrol", FAKE_SCONTROL)
    (lab.folder / "step").write_text(step)
    done = lab.run("slurm/train.sbatch", "--config", "a.py", "--workdir", "my run", SLURM_JOB_ID="17")
    assert done.returncode == code
    assert lab.calls("scontrol") == (["requeue 17"] if requeued else [])
    (call,) = lab.calls("srun")
    assert call.startswith("--kill-on-bad-exit=1 bash -c ")
    assert call.endswith(" task jaxrun supervise --config a.py --workdir my run")


def test_a_step_that_does_not_end_after_a_task_has_failed_is_ended(lab: Lab) -> None:
    """What the task does is done by srun here; scancel signals the batch script."""
    lab.program("srun", '#!/bin/bash\nshift\n"$@"\nexec sleep 100\n')
    lab.program("scancel", '#!/bin/sh\n[ "$*" = "--batch --signal=USR1 17" ] && kill -USR1 "$(cat "{lab}/batch")"\n')
    lab.program("jaxrun", "#!/bin/sh\nexit 75\n")
    lab.program("scontrol", FAKE_SCONTROL)
    command = [
        "bash",
        "-c",
        f'echo $$ > "{lab.folder}/batch"; exec "$@"',
        "x",
        *map(str, lab.command("slurm/train.sbatch")),
    ]
    started = time.monotonic()
    subprocess.run(command, env=lab.environment(SLURM_JOB_ID="17", JAXRUN_STEP_WAIT="1"), check=False, timeout=60)
    assert time.monotonic() - started < 50
    assert lab.calls("scontrol") == ["requeue 17"]


def test_a_crash_loop_that_other_starts_did_not_mend_ends_the_job(lab: Lab) -> None:
    lab.program("srun", FAKE_SRUN)
    lab.program("scontrol", FAKE_SCONTROL)
    (lab.folder / "step").write_text("exit 1")
    done = lab.run("slurm/train.sbatch", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="2")
    assert done.returncode == 1
    assert "a crash loop; see train.log" in done.stdout
    assert lab.calls("scontrol") == []


def test_a_job_that_was_put_back_often_enough_ends(lab: Lab) -> None:
    lab.program("srun", FAKE_SRUN)
    lab.program("scontrol", FAKE_SCONTROL)
    (lab.folder / "step").write_text("exit 75")
    done = lab.run("slurm/train.sbatch", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="3", JAXRUN_REQUEUES="3")
    assert done.returncode == 1
    assert "was put back 3 times already" in done.stdout
    assert lab.calls("scontrol") == []


def test_a_preempted_job_gives_its_tasks_the_time_to_save(lab: Lab) -> None:
    lab.program("srun", FAKE_SRUN)
    lab.program("scontrol", FAKE_SCONTROL)
    ready, saved = lab.folder / "ready", lab.folder / "saved"
    (lab.folder / "step").write_text(
        f'trap \'sleep 0.3; touch "{saved}"; exit 75\' TERM\ntouch "{ready}"\nfor i in $(seq 400); do sleep 0.05; done\n'
    )
    process = subprocess.Popen(lab.command("slurm/train.sbatch"), env=lab.environment(SLURM_JOB_ID="17"))
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert saved.exists()
    assert lab.calls("scontrol") == ["requeue 17"]


def test_the_jobset_starts_as_many_processes_as_it_says_and_ends_where_starting_again_does_not_help() -> None:
    jobset = yaml.safe_load((ROOT / "scripts/k8s/jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    assert set(env) == {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    assert job["completionMode"] == "Indexed"
    assert int(env["JAX_NUM_PROCESSES"]["value"]) == job["completions"] == job["parallelism"]
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>
    name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{name}-{replicated['name']}-0-0.{subdomain}"
    assert [p["containerPort"] for p in container["ports"]] == [int(port)]
    assert "job-completion-index" in env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    by_action = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert by_action["FailJob"]["onExitCodes"]["values"] == [70, 78]
    assert by_action["Ignore"]["onExitCodes"]["values"] == [75]
    assert by_action["FailJob"]["onExitCodes"]["containerName"] == container["name"]
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    grace_s = config_lib.LaunchConfig().grace_s
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > grace_s
    volumes = {v["name"] for v in job["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == volumes
    config_lib.load(ROOT / next(a.split("=")[1] for a in container["args"] if a.startswith("--config=")))


@pytest.mark.slow
def test_the_gpu_benchmarks_shapes_are_lowered_where_there_is_no_gpu() -> None:
    command = [sys.executable, ROOT / "scripts/bench/gpu.py", "--dry-run", "--models", "125M"]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8
    assert "125M blocked attention: " in done.stdout


@pytest.mark.slow
def test_the_comparison_trains_its_peers_in_turns() -> None:
    """Without PyTorch, which the tests do not install: jaxrun and plain JAX start at the same loss."""
    command = [sys.executable, ROOT / "scripts/bench/compare.py", "--shapes", "tiny-llama", "--peers", "jax", "--rounds", "2", "--steps", "1"]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| jaxrun ", "| jax "))]
    ours, plain = (float(row[7].split(",")[0]) for row in rows)
    assert ours == pytest.approx(plain, rel=0.01)
