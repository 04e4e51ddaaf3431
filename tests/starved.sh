#!/usr/bin/env bash
# Runs the engine's concurrency tests while somebody takes the processors away, again and again, for as long as a busy host does: a
# thread that holds something others need may stop anywhere, for tens of milliseconds. Nothing may fail, or wait for ever, for that.
#
#   tests/starved.sh [--rounds N] [--release] [NAME]
#
# N times (5); the engine as it is released; only the tests whose names contain NAME.
#
# Where real-time priority is refused (it takes root) the thieves are ordinary threads, which take less. Exit status: 0 all passed; 1 a test
# failed or did not end; 2 it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=5
name=
profile=()
while [ $# -gt 0 ]; do
    case "$1" in
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    --release) profile=(--release); shift ;;
    --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "starved.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) name=$1; shift ;;
    esac
done
priority=(chrt -f 50)
if ! "${priority[@]}" true 2>/dev/null; then
    echo "starved.sh: real-time priority is refused: the thieves are ordinary threads (run it as root)" >&2
    priority=()
fi

# With `--workspace` the dependencies have the features that other tests have, and are not compiled again.
cargo test --quiet ${profile[@]+"${profile[@]}"} --workspace --test concurrency --no-run
binary=$(cargo test ${profile[@]+"${profile[@]}"} --workspace --test concurrency --no-run --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*concurrency[^"]*\)".*/\1/p' | tail -1)

# Keeps processor $1 busy for up to $2 us at a time, and leaves it alone for up to $3 ms.
thief() {
    exec ${priority[@]+"${priority[@]}"} taskset -c "$1" bash -c '
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
sleep 0.2
if ! kill -0 "${thieves[@]}"; then
    echo "starved.sh: a thief has no processor to take: taskset and chrt are needed, and all processors" >&2
    exit 2
fi

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
