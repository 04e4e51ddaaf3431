# Shared by the program scripts (sourced, not run). A program script defines two functions,
# `exercise` and `verify`, and ends with `run_phases "$@"`:
#
#     NAME.sh DIR              exercise, then verify, on the mounted file system at DIR
#     NAME.sh DIR exercise     make the data in DIR/NAME, check it, note what must be there
#     NAME.sh DIR verify       check it again (after an unmount and a mount), then delete it
#
# What must be there is noted in $STATE, on the host and not on the file system under test.
# $QUICK is 1 for the shorter variant.
set -euo pipefail

LIB_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${WEIR_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/weir-tests}
QUICK=${WEIR_TEST_QUICK:-0}
FSX_VERSION=0.3.2
FSX=$CACHE/fsx-$FSX_VERSION/bin/fsx
mkdir -p "$CACHE"
export WEIR_TEST_CACHE=$CACHE WEIR_TEST_QUICK=$QUICK
export LC_ALL=C.UTF-8

die() {
    echo "FAIL: $*" >&2
    exit 1
}

# note WHAT VALUE: remember a value on the host for the verify phase.
note() { printf '%s\n' "$2" >"$STATE/$1"; }
noted() { cat "$STATE/$1"; }

# same WHAT EXPECTED ACTUAL: both strings are equal, or the program fails.
same() {
    [[ $2 == "$3" ]] || die "$1: expected '$2', found '$3'"
}

sha_of() { sha256sum "$1" | cut -d' ' -f1; }

# manifest DIR: a line for each file below DIR with type, mode, owner, links, size, mtime,
# hash, target, device number and extended attributes.
manifest() { python3 "$LIB_DIR/manifest.py" "$@"; }

run_phases() {
    local dir=${1:?usage: $0 DIR [exercise|verify|all]} phase=${2:-all}
    [[ -d $dir ]] || die "$dir is not a directory"
    PROGRAM=$(basename "$0" .sh)
    WORK=$(cd "$dir" && pwd)/$PROGRAM
    STATE=${WEIR_TEST_STATE:-/tmp/weir-tests-state}/$PROGRAM
    if [[ $phase == exercise || $phase == all ]]; then
        rm -rf "$STATE" "$WORK"
        mkdir -p "$STATE" "$WORK"
        exercise
    fi
    if [[ $phase == verify || $phase == all ]]; then
        [[ -d $WORK ]] || die "$WORK has vanished"
        verify
        cd /
        rm -rf "$WORK"
        [[ ! -e $WORK ]] || die "$WORK is still there after rm -rf"
    fi
}
