"""A real Slurm on one machine, for tests and benchmarks: a controller, and a daemon for each make-believe node.

It takes Debian's slurm-wlm and munge, and root: munged wants a user of its own, and nodes need names in /etc/hosts.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONF = """
ClusterName=jaxrun
SlurmctldHost=localhost
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SlurmdTimeout=5
InactiveLimit=0
KillWait=10
MinJobAge=300
ReturnToService=2
MpiDefault=none
JobRequeue=1
NodeName=node[0-{last}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=30
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    programs = [
        name for name in ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol") if not shutil.which(name)
    ]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "starting a Slurm takes root"
    return None


class Cluster:
    """As a context: started on entry, and all of it ended and removed on exit.

    Args:
      root: a folder for its files; a short path, as sockets need.
    """

    def __init__(self, root: Path, nodes: int = 2, *, port: int = 16817):
        self.root, self.nodes, self._port = root, nodes, port
        self.conf = root / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        if problem := missing():
            sys.exit(problem)
        for name in ("state", "munge", *(f"spool-node{n}" for n in range(self.nodes))):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)  # munged, another user, looks into it
        first = self._port + 10
        self.conf.write_text(
            CONF.format(root=self.root, port=self._port, last=self.nodes - 1, first_port=first, last_port=first + self.nodes - 1)
        )  # fmt: skip
        self._name_nodes()
        try:
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
            for n in range(self.nodes):
                self.start_node(n)
            self.until(
                lambda: self.call("sinfo", "-h", "-o", "%T %D").split() == ["idle", str(self.nodes)], "idle nodes"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.call("scancel", "--user=root", check=False)
        for process in reversed(list(self._daemons.values())):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        for n in range(self.nodes):
            for pid in self.processes_of(n):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- daemons -------------------------------------------------------------------------------------------------------

    def start_node(self, n: int) -> None:
        self._start(f"node{n}", "slurmd", "-D", "-f", str(self.conf), "-N", f"node{n}")

    def kill_node(self, n: int) -> None:
        """As if the machine were gone: its daemon, and all that it has started."""
        pids = self.processes_of(n)
        self._daemons[f"node{n}"].kill()
        self._daemons[f"node{n}"].wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes_of(self, n: int) -> list[int]:
        """What runs on a node: the processes whose environment names it, and the daemons of its steps."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            ours = f"SLURM_CONF={self.conf}".encode() in environment
            if ours and f"SLURMD_NODENAME=node{n}".encode() in environment:
                found.append(int(folder.name))
            elif words.startswith(b"slurmstepd: ") and f"{self.root}".encode() in b"".join(environment):
                # Which node a step's daemon serves shows in its children only.
                children = (folder / "task" / folder.name / "children").read_text().split()
                if any(f"SLURMD_NODENAME=node{n}".encode() in _environment(int(c)) for c in children):
                    found.append(int(folder.name))
        return found

    def _start(self, name: str, *command: str) -> None:
        with open(self.root / f"{name}.out", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def _start_munged(self) -> None:
        folder = self.root / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        owner = pwd.getpwnam("munge")
        for path in (folder, folder / "key"):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        os.chmod(folder / "key", 0o400)
        os.chmod(folder, 0o755)
        command = ["munged", "-F", "--force", f"--socket={folder}/socket", f"--key-file={folder}/key", f"--pid-file={folder}/pid",
                   f"--log-file={folder}/log", f"--seed-file={folder}/seed"]  # fmt: skip
        with open(self.root / "munged.out", "ab") as log:
            self._daemons["munged"] = subprocess.Popen(
                command, stdout=log, stderr=log, user="munge", group="munge", start_new_session=True
            )
        self.until((folder / "socket").exists, "munge socket")

    def _name_nodes(self) -> None:
        """JAX takes the first node's name for the coordinator's address."""
        hosts = Path("/etc/hosts")
        text = hosts.read_text()
        lines = [f"127.0.0.1 node{n}" for n in range(self.nodes)]
        new = [line for line in lines if line not in text.splitlines()]
        if new:
            hosts.write_text(text + "".join(f"{line}\n" for line in new))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**kept, "SLURM_CONF": str(self.conf)}

    def call(self, *command: str, check: bool = True, **more: str) -> str:
        """A Slurm command's output."""
        done = subprocess.run(command, env={**self.environment(), **more}, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, *arguments: str, log: Path, **environment: str) -> int:
        """Gives train.sbatch to Slurm, one task on each node; the job's id."""
        options = [f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--output={log}", "--parsable", f"--chdir={ROOT}"]
        out = self.call("sbatch", *options, str(ROOT / "scripts/slurm/train.sbatch"), *arguments, **environment)
        return int(out.split(";")[0])

    def state(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "-o", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(RuntimeError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {timeout_s:.0f} s; the logs are in {self.root}")
            time.sleep(0.1)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


class JobRig:
    """A run as a job: what chaos.py needs of it."""

    def __init__(self, cluster: Cluster, config: Path, workdir: Path, processes: int):
        self.cluster, self.config, self.workdir, self.processes = cluster, config, workdir, processes
        self.job: int | None = None

    def start(self) -> None:
        self.job = self.cluster.submit(
            "--config", str(self.config), "--workdir", str(self.workdir), f"--config.mesh.data={self.processes}",
            log=self.workdir.with_name(f"{self.workdir.name}.log"), **job_environment(),
        )  # fmt: skip

    def ended(self) -> int | None:
        """The exit code of the job once it has ended; Slurm puts it back into the queue as long as it has not."""
        assert self.job is not None
        state = self.cluster.state(self.job)
        if state["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return int(state["ExitCode"].split(":")[0]) or (state["JobState"] != "COMPLETED")
        return None

    def kill_node(self, n: int, down_s: float = 15.0) -> None:
        """down_s: longer than `SlurmdTimeout`, before which Slurm takes the node's tasks to be alive."""
        self.cluster.kill_node(n)
        time.sleep(down_s)
        self.cluster.start_node(n)

    def close(self) -> None:
        if self.job is not None and self.ended() is None:
            self.cluster.call("scancel", "--full", "--signal=KILL", str(self.job), check=False)
            self.cluster.call("scancel", str(self.job), check=False)


def job_environment(words: Sequence[str] = (sys.executable, "-m", "jaxrun.cli")) -> dict[str, str]:
    return {
        "JAXRUN": " ".join(words), "JAXRUN_STEP_WAIT": "20", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
