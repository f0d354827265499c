# Sourced by the other scripts: a virtual environment with confed in it, made when it is missing or out of date.
#
#   PYTHON        the interpreter to start from (default: python3.11, else a python3 that is 3.11 or newer)
#   CONFED_VENV   where the environment lives (default: .venv in the checkout)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${CONFED_VENV:-$root/.venv}"

# With several threads, OpenMP's default is to spin while it waits, which on busy cores costs far more than it gains;
# and tokenizers' own threads must not be alive when worker processes are forked.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the interpreter to make the environment with.
find_python() {
  local candidate candidates=(python3.11 python3)
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if is_recent "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: confed needs Python 3.11 or newer, and none was found as ${candidates[*]}." >&2
  echo "Install one, or say where it is: PYTHON=/path/to/python3.11 $0" >&2
  return 1
}

# What the installed packages are a function of: the two files, and the place the editable install points to.
fingerprint() {
  cat "$root/pyproject.toml" "$root/constraints.txt" <(echo "$root") |
    "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_installed() {
  [ -f "$venv/.confed-$1" ] && [ "$(cat "$venv/.confed-$1")" = "$2" ]
}

# prepare [dev]: makes sure that the environment has confed, and with "dev" the development tools.
prepare() {
  local extra="${1:-}" python wanted
  if ! is_recent "$venv/bin/python"; then
    python="$(find_python)"
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
      echo "error: $venv is not a virtual environment; confed will not write into it." >&2
      return 1
    fi
    "$python" -m venv --clear "$venv"
  fi
  wanted="$(fingerprint)"
  if is_installed dev "$wanted" || { [ -z "$extra" ] && is_installed core "$wanted"; }; then
    return
  fi
  echo "installing confed${extra:+ and its development tools} into $venv (once; a minute or two) ..." >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --editable "$root${extra:+[$extra]}" --constraint "$root/constraints.txt" >&2
  # pip would compile these 24,000 files on one core. Not later either: warnings are errors while tests import.
  "$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python3*/site-packages >&2 || true
  echo "$wanted" >"$venv/.confed-${extra:-core}"
}
