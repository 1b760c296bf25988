#!/usr/bin/env bash
# A run that gets into trouble three times (a NaN, a poisoned shard, a flipped bit), recovers, and draws what it did.
#
#   scripts/demo_spike.sh [--workdir DIR] [arguments for `jaxrun train`, such as --config.train.num_steps=500]
#
# The picture is DIR/recovery.png; beside the run that recovered stands runs/quickstart, if scripts/quickstart.sh made it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

take_arguments "$root/runs/demo_spike" "$@"

say "1/4 environment"
use_env .venv-demo "[plot]"

say "2/4 training configs/demo_spike.py in $workdir; the warnings are the rehearsal"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
"$bin/jaxrun" train --config "$root/configs/demo_spike.py" --workdir "$workdir" ${arguments[@]+"${arguments[@]}"}

say "3/4 what was skipped, and why"
"$bin/jaxrun" ledger "$workdir" --skipped --worst 1

say "4/4 the picture"
beside=()
if [ -f "$root/runs/quickstart/steps.bin" ]; then beside=(--beside "$root/runs/quickstart"); fi
"$bin/python" "$root/scripts/draw_run.py" "$workdir" "$workdir/recovery.png" ${beside[@]+"${beside[@]}"}
