"""Starting and stopping: many processes, the lock on the run directory, requests to stop."""

from jaxrun.launch.alert import Alert, alert_words
from jaxrun.launch.distributed import agree, cache_compilations, of_each, on_any, start
from jaxrun.launch.lock import RunLock
from jaxrun.launch.stop import StopRequest

__all__ = [
    "Alert",
    "RunLock",
    "StopRequest",
    "agree",
    "alert_words",
    "cache_compilations",
    "of_each",
    "on_any",
    "start",
]
