#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, training, held-out loss, a few lines that the model wrote.
#
#   scripts/quickstart.sh [--workdir DIR] [arguments for `jaxrun train`, such as --config.train.num_steps=500]
#
# Exit code: that of `jaxrun train`; 75: stopped on request after saving, and the same command goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

take_arguments "$root/runs/quickstart" "$@"

# Runs a command so that SIGINT and SIGTERM reach it, and waits for how it ends: it may want to save first.
run_to_its_end() {
  local code interrupted
  set -m # a process group of its own, or the shell would have it ignore SIGINT
  "$@" </dev/null &
  local child=$!
  set +m
  trap 'interrupted=1; kill -INT '$child' 2>/dev/null || true' INT
  trap 'interrupted=1; kill -TERM '$child' 2>/dev/null || true' TERM
  while true; do
    interrupted="" code=0
    wait $child || code=$?
    [ -n "$interrupted" ] || break
  done
  trap - INT TERM
  return $code
}

say "1/4 environment"
use_env .venv ""

say "2/4 training configs/quickstart.py in $workdir"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
code=0
run_to_its_end "$bin/jaxrun" train --config "$root/configs/quickstart.py" --workdir "$workdir" \
  ${arguments[@]+"${arguments[@]}"} || code=$?
if [ $code -eq 75 ]; then
  say "stopped after saving; the same command goes on from there"
elif [ $code -ne 0 ]; then
  say "training ended with exit code $code; what happened is above, and in $workdir"
fi
[ $code -eq 0 ] || exit $code

say "3/4 loss on held-out text"
"$bin/jaxrun" eval "$workdir" --batches 32

say "4/4 what the model writes after 'def '"
"$bin/jaxrun" sample "$workdir" --prompt "def " --tokens 200

say ""
say "run directory: $workdir"
say "curves:        $bin/tensorboard --logdir $workdir"
