#!/usr/bin/env bash
# Real engines and the field's own trainers against ours: installs all four (cached in .venvs), then tests/parity and
# tests/engines. Called by `make test-engines`.
#
# What cannot be installed here (no wheel for the platform, no network) is told at the end as `NOT RUN: NAME, REASON`, its
# tests are skipped, and the exit code is that of the others. What is installed and does not work is a failure.
#
# Measured from nothing, downloads included, on 2 x86-64 cores: 15 minutes; the two lanes took 741 s each (17 and 37 tests).
# On an older processor without AVX-512 the lanes took 24 and 26 minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
BIN="${VENV:-.venv}/bin"
code=0

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for try in 1 2 3; do
    "$BIN/eagle3lab" fetch --profile smollm2 && break
    if [ "$try" = 3 ]; then exit 1; fi
    sleep $((5 * try))
done

# Mostly downloads: two lanes side by side.
{ scripts/install_vllm.sh; scripts/install_peers.sh specforge; } >"$logs/one" 2>&1 &
{ scripts/install_sglang.sh; scripts/install_peers.sh speculators; } >"$logs/two" 2>&1 &
wait
cat "$logs/one" "$logs/two"
if grep -q '^FAILED:' "$logs/one" "$logs/two"; then code=1; fi

# Two lanes, one thread each. The first trains the drafter that both need (kept in data/cache/engines) while the second
# captures without one; who comes second to the drafter waits.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
lane() {  # NAME TESTS...
    local name=$1
    shift
    # shellcheck disable=SC2086
    "$BIN/python" -m pytest -rsfE -s --durations=0 --durations-min=2 "$@" ${PYTEST_ARGS:-} 2>&1 |
        tee "$logs/$name" | sed -u "s/^/$name: /"
}
lane vllm tests/engines/test_vllm.py tests/engines/test_vllm_server.py tests/parity &
first=$!
lane sglang tests/engines/test_patch.py tests/engines/test_sglang_capture.py tests/engines/test_sglang_capture_kimi.py \
    tests/engines/test_sglang.py tests/engines/test_sglang_probe.py &
second=$!
failed=()
wait "$first" || failed+=(vllm)
wait "$second" || failed+=(sglang)
# Once more, last: the other lane's lines and the durations would bury why.
for name in ${failed[@]+"${failed[@]}"}; do
    code=1
    echo "FAILED: lane $name"
    grep -E '^E  ' "$logs/$name" | tail -n 12
    grep -E '^(FAILED|ERROR) |[0-9]+ (passed|failed|error)' "$logs/$name"
done
grep -h -E '^(NOT RUN|FAILED):' "$logs/one" "$logs/two" | sort -u
exit "$code"
