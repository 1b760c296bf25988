"""One trainer at a time holds a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from jaxrun.config import ConfigError


class RunLock:
    """Held from construction to the end of the process: the kernel releases it, however the process ends.

    A record lock (`lockf`), which a forked data worker does not inherit, unlike `flock`.

    Raises:
      ConfigError: another process holds it; the message says which.
    """

    def __init__(self, workdir: Path):
        self._fd = os.open(workdir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                f"{workdir}: another trainer holds this run directory ({holder}); stop it, or choose another --workdir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
