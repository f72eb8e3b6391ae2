# Sourced by install_peers.sh, install_vllm.sh and install_sglang.sh: a cached virtual environment per foreign program.
#
# Each lives in .venvs/NAME (VENVS=FOLDER moves them) and is stamped with a hash of what determines it, so a second call
# does nothing. What cannot be installed here is one line on standard output, `NOT RUN: NAME, REASON`, and exit code 3.
# What was installed and does not work is `FAILED: NAME, REASON` and exit code 1.
#
#   PYTHON       interpreter for the new environments (default: the one of .venv, else python3)
#   TORCH_INDEX  index of PyTorch's own builds, for a CPU build where the default would bring CUDA (see README)

VENVS="${VENVS:-.venvs}"
TORCH="torch==2.13.0"

not_run() {  # NAME REASON
    echo "NOT RUN: $1, $2"
    return 3
}

base_python() {
    if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; return; fi
    if [ -x "${VENV:-.venv}/bin/python" ]; then echo "${VENV:-.venv}/bin/python"; return; fi
    echo python3
}

# Refuses a platform that an engine has no wheels for, before anything is downloaded.
need_linux_x86_64() {  # NAME
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        not_run "$1" "there is no wheel for $(uname -s) $(uname -m), only for Linux x86_64"
        return 3
    fi
}

venv_stamp() {  # NAME FILES...
    local name=$1
    shift
    echo "$VENVS/$name/.installed-$({ cat "$@" "${BASH_SOURCE[0]}"; "$(base_python)" --version; } | cksum | tr -d ' ')"
}

# Makes .venvs/NAME anew. A half-made one of an interrupted install carries no stamp and is made again.
venv_create() {  # NAME
    local python
    python=$(base_python)
    rm -rf "${VENVS:?}/$1"
    mkdir -p "$VENVS"
    "$python" -m venv "$VENVS/$1" || { not_run "$1" "$python -m venv failed"; return 3; }
}

# pip install into .venvs/NAME with three tries; the last error line of pip becomes the reason. Byte code is left to the
# first import: most of these packages' modules are never imported here.
venv_pip() {  # NAME ARGUMENTS...
    local name=$1 try log reason
    shift
    log=$(mktemp)
    for try in 1 2 3; do
        if "$VENVS/$name/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile "$@" 2>"$log"; then
            rm -f "$log"
            return 0
        fi
        # A version that does not exist does not appear by waiting; an index that was not reached also has "no matching
        # distribution", after lines that say so.
        if grep -q -E 'No matching distribution|ResolutionImpossible' "$log" &&
            ! grep -q -i -E 'retrying|connection|timed out|temporary failure' "$log"; then break; fi
        if [ "$try" -lt 3 ]; then sleep $((5 * try)); fi
    done
    reason=$(grep -E '^ERROR' "$log" | tail -1 | cut -c1-200)
    if grep -q -i 'retrying' "$log"; then reason="the package index was not reached in three tries; $reason"; fi
    cat "$log" >&2
    rm -f "$log"
    not_run "$name" "pip install failed: ${reason:-no error line}"
}

# torch, the largest part. .venv holds the same build for the same Python as a rule: its files are linked, not copied.
venv_torch() {  # NAME
    local own="${VENV:-.venv}/bin/python"
    [ ! -x "$own" ] || "$own" scripts/lib/link_torch.py "$VENVS/$1/bin/python" "$TORCH" || return 3
    venv_pip "$1" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
}

# The end of an install: a command that must work inside, then the stamp.
venv_done() {  # NAME STAMP PYTHON-CODE
    local said
    if ! said=$("$VENVS/$1/bin/python" -c "$3" 2>&1); then
        echo "$said" >&2
        echo "FAILED: $1, installed, but $(tail -1 <<<"$said" | cut -c1-200)"
        return 1
    fi
    touch "$2"
    echo "install: $1 ready in $VENVS/$1 ($(tail -1 <<<"$said"))"
}
