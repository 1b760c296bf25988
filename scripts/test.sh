#!/usr/bin/env bash
# The whole test suite in an environment of its own.
#
#   scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

use_env .venv-test "[test]"
cd "$root"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.jax_cache}"
exec "$bin/python" -m pytest -q "$@"
