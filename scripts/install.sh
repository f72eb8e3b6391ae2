#!/usr/bin/env bash
# Makes .venv with the exact tested set of constraints/lab.txt. Called by `make install`; does nothing when all is there.
#
#   PYTHON=python3.12 VENV=.venv EXTRAS=lab,dev TORCH_INDEX=URL scripts/install.sh
#
# torch is installed first and pinned: whatever pip is configured to find (a local wheel, a mirror, an index) is used.
# TORCH_INDEX names the index of PyTorch's own builds, for a CPU build where the default would bring CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
EXTRAS="${EXTRAS:-lab,dev}"
OLDEST="3.11"

python_ok() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        if python_ok "$PYTHON"; then echo "$PYTHON"; return; fi
        local version
        version=$("$PYTHON" -c 'import platform; print(platform.python_version())' 2>/dev/null || true)
        echo "eagle3lab: $PYTHON is Python ${version:-unknown}; Python $OLDEST or newer is needed; next: make install PYTHON=/path/to/python$OLDEST" >&2
        return 2
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if python_ok "$candidate"; then echo "$candidate"; return; fi
    done
    echo "eagle3lab: no Python $OLDEST or newer on the PATH; next: install one, then make install PYTHON=/path/to/python$OLDEST" >&2
    return 2
}

retry() {
    local try
    for try in 1 2 3; do
        if "$@"; then return 0; fi
        if [ "$try" -lt 3 ]; then echo "install: try $try of 3 failed, again in $((5 * try)) s" >&2; sleep $((5 * try)); fi
    done
    echo "eagle3lab: installing failed three times: $*; next: look at pip's message above" >&2
    return 1
}

hash_inputs() { cat pyproject.toml constraints/lab.txt scripts/install.sh <(echo "$EXTRAS") | cksum | tr -d ' '; }

stamp="$VENV/.installed-$(hash_inputs)"
if [ -f "$stamp" ] && "$VENV/bin/python" -c 'import eagle3lab' >/dev/null 2>&1; then exit 0; fi

python=$(find_python) || exit $?
if ! python_ok "$VENV/bin/python"; then "$python" -m venv --clear "$VENV"; fi
pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --quiet)
torch=$(grep -E '^torch==' constraints/lab.txt)
echo "install: $torch into $VENV ($("$VENV/bin/python" --version))"
retry "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints/lab.txt "$torch"
echo "install: eagle3lab[$EXTRAS]"
retry "${pip[@]}" -c constraints/lab.txt -e ".[$EXTRAS]"
rm -f "$VENV"/.installed-*
touch "$stamp"
