# shellcheck shell=bash
# Set-up that scripts/test, scripts/demo and scripts/check share; sourced, not run.
#
# After `keepstep_setup` the repository's own environment is ready and $VENV_PYTHON is its Python.
# Nothing is done, and no network is needed, when nothing changed since the last time.
#
#   KEEPSTEP_PYTHON  Python to build the environment with; default: the first one of at least 3.11
#   KEEPSTEP_TORCH   what `pip install` gets for torch; default: torch==2.13.0

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
STAMP="$VENV/keepstep-stamp"
TORCH_DEFAULT="torch==2.13.0"
TORCH_WANTED="${KEEPSTEP_TORCH:-$TORCH_DEFAULT}"
PYTHON_WANTED="${KEEPSTEP_PYTHON:-}"
# Settings of the set-up are no settings of keepstep: what is started later must not see them.
unset KEEPSTEP_TORCH KEEPSTEP_PYTHON

say() { printf 'keepstep set-up: %s\n' "$*" >&2; }

fail() {
  printf 'keepstep set-up failed: %s\n' "$*" >&2
  exit 64
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the path of a Python of at least 3.11 that can make virtual environments.
find_python() {
  local candidate found="" candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
  if [ -n "$PYTHON_WANTED" ]; then candidates=("$PYTHON_WANTED"); fi
  for candidate in "${candidates[@]}"; do
    if ! is_recent "$candidate"; then continue; fi
    found="$candidate"
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  if [ -n "$found" ]; then
    fail "$found cannot make virtual environments. Install its venv module" \
      "(on Debian and Ubuntu the package python3-venv) and call this script again."
  fi
  fail "no Python of at least 3.11 found (tried: ${candidates[*]}). Install one, or name it:" \
    "KEEPSTEP_PYTHON=/path/to/python3.12"
}

# Prints the release of torch that Python $1 sees, nothing if it has none.
torch_release() {
  "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true
}

# Whether torch release $1 is one that keepstep was checked against.
torch_is_enough() {
  [[ "$1" =~ ^([0-9]+)\.([0-9]+) ]] || return 1
  ((BASH_REMATCH[1] > 2 || (BASH_REMATCH[1] == 2 && BASH_REMATCH[2] >= 13)))
}

# Prints what the environment depends on; equal text means that nothing has to be done.
wanted_stamp() {
  # The checkout's path too: an environment that was moved does not work.
  printf '%s\n' "$ROOT" "$TORCH_WANTED" "$PYTHON_WANTED"
  "$VENV_PYTHON" -c 'import sys; print(sys.version)'
  cksum <"$ROOT/pyproject.toml"
  cksum <"$ROOT/constraints/ci.txt"
  cksum <"$ROOT/constraints/nvrx.txt"
  cksum <"$ROOT/scripts/_env.sh"
}

is_ready() {
  [ -f "$STAMP" ] && [ -x "$VENV_PYTHON" ] &&
    [ "$(wanted_stamp 2>/dev/null)" = "$(cat "$STAMP")" ]
}

make_venv() {
  local base release options=(--clear)
  # One that is there is kept, unless it is too old or another Python is asked for.
  if [ -z "$PYTHON_WANTED" ] && is_recent "$VENV_PYTHON" &&
    { "$VENV_PYTHON" -m pip --version || "$VENV_PYTHON" -m ensurepip; } >/dev/null 2>&1; then
    say "using the virtual environment .venv ($("$VENV_PYTHON" --version))"
    return
  fi
  base="$(find_python)"
  release="$(torch_release "$base")"
  # A virtual environment's packages cannot be shared with another one, an installation's can.
  if torch_is_enough "$release" && [ "$TORCH_WANTED" = "$TORCH_DEFAULT" ] &&
    "$base" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
    say "$base has torch $release: the environment will use it"
    options+=(--system-site-packages)
  fi
  say "making the virtual environment .venv with $("$base" --version)"
  "$base" -m venv "${options[@]}" "$VENV" || fail "could not make $VENV (see above)"
}

install_all() {
  local release words
  local pip=("$VENV_PYTHON" -m pip --disable-pip-version-check --quiet)
  say "installing keepstep's dependencies (versions and hashes: constraints/ci.txt)"
  "${pip[@]}" install --require-hashes -r "$ROOT/constraints/ci.txt" ||
    fail "pip could not install constraints/ci.txt (see above)"
  release="$(torch_release "$VENV_PYTHON")"
  if torch_is_enough "$release" && [ "$TORCH_WANTED" = "$TORCH_DEFAULT" ]; then
    say "torch $release is installed"
  else
    say "installing $TORCH_WANTED (the largest part; minutes on a slow line)"
    read -r -a words <<<"$TORCH_WANTED"
    # After the pinned packages: pip leaves those that torch is content with as they are.
    "${pip[@]}" install "${words[@]}" ||
      fail "pip could not install $TORCH_WANTED. Set KEEPSTEP_TORCH to what fits this machine," \
        "for example KEEPSTEP_TORCH=torch==2.14.1"
  fi
  # Its wheels exist for some Pythons and C libraries only; all but its engine works without it.
  if ! "${pip[@]}" install --no-deps --require-hashes -r "$ROOT/constraints/nvrx.txt"; then
    say "nvidia-resiliency-ext is not available here: tests of the engine nvrx will be skipped"
  fi
  say "installing keepstep from this folder"
  "${pip[@]}" install --no-deps --no-build-isolation -e "$ROOT" ||
    fail "pip could not install keepstep (see above)"
}

keepstep_setup() {
  if is_ready; then return; fi
  # One set-up at a time in a checkout; the lock ends with this shell, however it ends.
  exec 9<"$ROOT/pyproject.toml"
  if command -v flock >/dev/null; then flock 9; fi
  if ! is_ready; then
    rm -f "$STAMP"
    make_venv
    install_all
    wanted_stamp >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready"
  fi
  exec 9<&-
}
