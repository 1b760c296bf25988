#!/usr/bin/env bash
# The whole test suite in an environment of its own.
#
#   scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

use_env .venv-test "[test]"
cd "$root"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.jax_cache}"
# Two workers: most tests start programs, which import and compile on one core. By file, as files share their runs.
exec "$bin/python" -m pytest -q -n 2 --dist loadfile "$@"
