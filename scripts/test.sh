#!/usr/bin/env bash
# The whole test suite in an environment of its own.
#
#   scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

use_env .venv-test "[test]"
cd "$root"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.jax_cache}"

code=0
tests() {
  local status=0
  "$bin/python" -m pytest -q "$@" || status=$?
  # 5: the arguments select none of this half.
  if [ $status -ne 0 ] && [ $status -ne 5 ]; then code=$status; fi
}
# Most of what is slow starts programs, which import and compile on one core: two at a time.
tests -m programs -n 2 --dist loadfile "$@"
tests -m "not programs" "$@"
exit $code
