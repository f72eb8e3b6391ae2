#!/usr/bin/env bash
# Real engines and the field's own trainers against ours: installs all four (cached in .venvs), then tests/parity and
# tests/engines. Called by `make test-engines`; at most 25 minutes from nothing on two quiet cores.
#
#   EAGLE3LAB_DRAFTING="vllm sglang"   engines whose drafting is compared step by step (default: none yet, see below)
#
# What cannot be installed prints `NOT RUN: NAME, REASON` and its tests are skipped. On Linux x86-64 all four can, so there
# it is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
BIN="${VENV:-.venv}/bin"
code=0

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
"$BIN/eagle3lab" fetch --profile smollm2 || exit 1

# A drafting test trains its own drafter first. Until its length has been measured on a quiet machine it is asked for.
drafting=()
for engine in vllm sglang; do
    case " ${EAGLE3LAB_DRAFTING:-} " in
        *" $engine "*) ;;
        *)
            drafting+=("--ignore=tests/engines/test_$engine.py")
            echo "NOT RUN: drafting in $engine, its time is not measured yet; EAGLE3LAB_DRAFTING=$engine make test-engines"
            ;;
    esac
done

# Mostly downloads: two lanes side by side.
{
    case " ${drafting[*]} " in *test_vllm*) ;; *) scripts/install_vllm.sh ;; esac
    scripts/install_peers.sh specforge
} >"$logs/one" 2>&1 &
{ scripts/install_sglang.sh; scripts/install_peers.sh speculators; } >"$logs/two" 2>&1 &
wait
cat "$logs/one" "$logs/two"
if grep -q '^NOT RUN:' "$logs/one" "$logs/two" && [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then code=1; fi

"$BIN/python" -m pytest -rs -s --durations=10 "${drafting[@]}" tests/parity tests/engines ${PYTEST_ARGS:-} || code=1
exit "$code"
