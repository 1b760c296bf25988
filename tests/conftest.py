"""Every test sees eight CPU devices; commands that tests start reuse what earlier ones have compiled."""

import os
import signal
from pathlib import Path

# In the environment, so that the commands that tests start inherit it; before JAX is imported, which reads it then.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# A suite that a shell started in the background ignores SIGINT, and so would every program that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Programs for several CPU devices deadlock when they come from the cache: see `launch.cache_compilations`.
jax.config.update("jax_enable_compilation_cache", False)

# The machine is shared and compiles in between: no deadlines. The same examples every time: a failure repeats.
hypothesis.settings.register_profile("jaxrun", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxrun")


def pytest_configure(config: pytest.Config) -> None:
    # JAX writes an entry of its cache in place: one that a test killed half-way, or that another worker is
    # writing, is unreadable. JAX then warns, and compiles.
    for verb in ("reading", "writing"):
        config.addinivalue_line("filterwarnings", f"default:Error {verb} persistent compilation cache entry")


# What only starts programs and looks at what they leave: two of these can run at once. Tests that use the eight
# simulated devices in their own process can't: they starve each other until XLA aborts.
PROGRAMS = ("tests/e2e/", "tests/faults/", "tests/test_readme.py", "tests/test_scripts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(PROGRAMS):
            item.add_marker("programs")
