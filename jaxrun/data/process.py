"""What every helper process does."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection


def end_with_parent() -> None:
    """In a worker: a main process that is killed cannot tell its workers to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
