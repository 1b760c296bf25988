# Sourced by the scripts beside it: the repository's virtual environments, made once and reused.
# Runs on any bash since 3.2 (macOS has that one).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the path of a Python that can run jaxrun: $PYTHON if it is set, else the first that fits.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_new_enough "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "jaxrun needs Python 3.11 or newer, but ${PYTHON:-python3} is" \
    "$("${PYTHON:-python3}" --version 2>&1 | head -n 1 || true); install one, or set PYTHON to its path"
}

# use_env NAME EXTRA: makes sure that the repository's folder NAME is a virtual environment with this package and its
# extra ("" or "[test]") installed, and sets $bin to its programs. It is taken as it is if it was finished by the same
# Python, in the same place, for the same pyproject.toml.
use_env() {
  local env="$root/$1" extra="$2" python wanted stamp found=""
  stamp="$env/.jaxrun-env"
  bin="$env/bin"
  python=$(find_python)
  wanted=$("$python" - "$root" "$extra" <<'PY'
import hashlib, pathlib, sys

root, extra = sys.argv[1:]
print(f"Python {sys.version.split()[0]} in {root}")
print(f"jaxrun{extra}", hashlib.sha256(pathlib.Path(root, "pyproject.toml").read_bytes()).hexdigest())
PY
  )
  if [ -f "$stamp" ]; then found=$(cat "$stamp"); fi
  if [ "$found" = "$wanted" ] && is_new_enough "$bin/python"; then
    say "environment: $1 is up to date"
    return
  fi

  if [ -d "$env" ] && [ ! -f "$stamp" ]; then
    # Somebody's own: added to, never cleared.
    is_new_enough "$bin/python" || die "$env is no virtual environment with Python 3.11 or newer; move it away"
  elif [ "${found%%$'\n'*}" != "${wanted%%$'\n'*}" ] || ! is_new_enough "$bin/python"; then
    say "environment: making $1 with $python"
    rm -rf "$env"
    mkdir "$env"
    say "unfinished" >"$stamp"
    "$python" -m venv "$env" >"$env/venv.log" 2>&1 || {
      cat "$env/venv.log" >&2
      die "could not make a virtual environment with $python; on Debian and Ubuntu: apt install python3-venv"
    }
  fi
  say "environment: installing jaxrun$extra and what it needs (once; some minutes)"
  local started=$SECONDS
  (cd "$root" && quietly "$env/pip.log" "$bin/python" -m pip install --disable-pip-version-check --progress-bar off --editable ".$extra") ||
    die "pip could not install jaxrun$extra; its own words are above, and in $env/pip.log"
  say "$wanted" >"$stamp"
  say "environment: ready after $((SECONDS - started)) s"
}

# quietly LOG COMMAND…: its output goes to LOG, on a terminal its last line is shown; all of it is if it fails.
quietly() {
  local log=$1 code=0
  shift
  if [ -t 2 ]; then
    "$@" 2>&1 | tee "$log" | last_line || code=$?
  else
    "$@" >"$log" 2>&1 || code=$?
  fi
  if [ $code -ne 0 ]; then cat "$log" >&2; fi
  return $code
}

last_line() {
  local line width
  width=$(tput cols 2>/dev/null || echo 80)
  while IFS= read -r line; do
    printf '\r\033[K  %.*s' $((width - 4)) "$line" >&2
  done
  printf '\r\033[K' >&2
}

# take_arguments DEFAULT [ARGUMENT…]: sets $workdir (DEFAULT, or what --workdir says) and the array arguments, which are
# for `jaxrun train`; --help shows the head of the script that is running.
take_arguments() {
  workdir=$1 arguments=()
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help)
        awk 'NR > 1 && !/^#/ {exit} NR > 1 {sub(/^# ?/, ""); print}' "$0"
        exit 0
        ;;
      --workdir)
        [ $# -ge 2 ] || die "--workdir: has no value; write --workdir DIR"
        workdir=$2
        shift
        ;;
      --workdir=*) workdir=${1#--workdir=} ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
}
