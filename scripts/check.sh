#!/usr/bin/env bash
# What a commit has to pass: lint, format, types, links in the documentation, the fast tests. All are run, whatever fails.
#
#   scripts/check.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

use_env .venv-check "[dev]"
cd "$root"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.jax_cache}"

failed=()
check() {
  local name=$1
  shift
  say "check: $name"
  "$@" || failed+=("$name")
}

check lint "$bin/ruff" check .
check format "$bin/ruff" format --check .
check types "$bin/mypy"
check links "$bin/python" scripts/check_links.py
check "fast tests" "$bin/python" -m pytest -q -m "not slow and not multiprocess"

if [ ${#failed[@]} -gt 0 ]; then
  die "failed: $(printf '%s; ' "${failed[@]}" | sed 's/; $//')"
fi
say "all checks passed"
