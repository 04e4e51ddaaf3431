#!/bin/bash
# POSIX and Linux semantics, one named check each: see posix_checks.py.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

exercise() {
    python3 "$LIB_DIR/posix_checks.py" "$WORK/checks"
    python3 "$LIB_DIR/posix_checks.py" --keep "$WORK/kept"
    manifest "$WORK/kept" >"$STATE/manifest"
}

verify() {
    manifest "$WORK/kept" --against "$STATE/manifest"
    python3 "$LIB_DIR/posix_checks.py" "$WORK/checks"
}

run_phases "$@"
