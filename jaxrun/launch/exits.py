"""Exit codes: jaxrun's contract with schedulers and supervisors (docs/recovery.md)."""

# The guard gave up: starting again won't help. Stopped on request, after saving: start again.
FINISHED, GAVE_UP, STOPPED = 0, 70, 75
# The config is wrong, or another trainer holds the run directory.
BAD_CONFIG = 78
