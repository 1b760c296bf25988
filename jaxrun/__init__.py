"""jaxrun: a JAX training loop that finishes the run unattended."""

__version__ = "0.1.0"
