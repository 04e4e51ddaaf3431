#!/usr/bin/env bash
# Runs the engine's concurrency tests while somebody takes the processors away, again and again, for as long as a busy host does: a
# thread that holds something others need may stop anywhere, for tens of milliseconds. Nothing may fail, or wait for ever, for that.
#
#   tests/starved.sh [--rounds N] [NAME]     N times (5); only the tests whose names contain NAME
#
# Exit status: 0 all passed; 1 a test failed or did not end; 2 it cannot run here (it needs root, for real-time priority).
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=5
name=
while [ $# -gt 0 ]; do
    case "$1" in
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "starved.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) name=$1; shift ;;
    esac
done
if ! chrt -f 50 true 2>/dev/null; then
    echo "starved.sh: real-time priority is refused: run it as root" >&2
    exit 2
fi

# With `--workspace` the dependencies have the features that other tests have, and are not compiled again.
cargo test --quiet --workspace --test concurrency --no-run
binary=$(cargo test --workspace --test concurrency --no-run --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*concurrency[^"]*\)".*/\1/p' | tail -1)

# Keeps processor $1 busy for up to $2 us at a time, and leaves it alone for up to $3 ms.
thief() {
    exec chrt -f 50 taskset -c "$1" bash -c '
        while :; do
            until=$((${EPOCHREALTIME/[^0-9]/} + RANDOM * $1 / 32768))
            while [ "${EPOCHREALTIME/[^0-9]/}" -lt "$until" ]; do :; done
            sleep "0.$(printf %03d $((RANDOM * $2 / 32768 + 1)))"
        done' thief "$2" "$3"
}

thieves=()
trap 'kill "${thieves[@]}" 2>/dev/null || true' EXIT
trap 'exit 1' INT TERM
for processor in $(seq 0 $(($(nproc) - 1))); do
    # Unlike each other, so that one stands still while another goes on.
    thief "$processor" $((120000 >> (processor % 2))) $((80 + processor % 2 * 40)) &
    thieves+=($!)
done

for round in $(seq "$rounds"); do
    began=$SECONDS
    log=$(mktemp)
    if ! "$binary" ${name:+"$name"} >"$log" 2>&1; then
        cat "$log"
        echo "starved.sh: round $round of $rounds failed" >&2
        exit 1
    fi
    rm "$log"
    echo "round $round of $rounds: all passed in $((SECONDS - began)) s"
done
