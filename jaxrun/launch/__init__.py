"""Starting and stopping: many processes, the lock on the run directory, requests to stop, the supervisor.

Nothing here loads JAX before it is needed: the supervisor never does.
"""

from jaxrun.launch.alert import Alert, alert_words
from jaxrun.launch.distributed import agree, cache_compilations, fail_alone, of_each, start, start_alone
from jaxrun.launch.heartbeat import Heartbeat
from jaxrun.launch.lock import RunLock
from jaxrun.launch.stop import StopRequest

__all__ = [
    "Alert",
    "Heartbeat",
    "RunLock",
    "StopRequest",
    "agree",
    "alert_words",
    "cache_compilations",
    "fail_alone",
    "of_each",
    "start",
    "start_alone",
]
