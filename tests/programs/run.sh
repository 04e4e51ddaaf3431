#!/bin/bash
# Runs the program suite, each program on a fresh volume of its own:
#
#     create, mount, exercise, unmount, fsck, mount again, verify, unmount, fsck
#
# usage: run.sh --weir BIN [options] [NAME...]
#        run.sh --fs xfs|ext4|btrfs [options] [NAME...]   the same on a loop mount, as a proof
#                                                         of the scripts themselves
#   --quick            fewer rounds and smaller files, with the same kinds of checks
#   --jobs N           so many programs at a time (1)
#   --size SIZE        size of each volume (4G)
#   --work DIR         where the volumes and mount points are (a new directory in /var/tmp)
#   --logs DIR         keep the log of each program here
#   --mount-arg ARG    a further argument of `weir mount`, may be repeated
#   --list             print the names of the programs
#
# One line for each program, the whole log of each that failed, and as the last line
# "N passed, N failed". The exit code is 0 only if all passed. Needs root; see install.sh.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ALL=(posix untar git sqlite postgres fio fsx stress_ng copy_tools cargo_build)
PHASE_LIMIT_SECONDS=600

weir= fs= jobs=1 size=4G work= logs= mount_args=() names=()
export WEIR_TEST_QUICK=0
while (($#)); do
    case $1 in
        --weir) weir=$(realpath -e "$2") || exit 2; shift ;;
        --fs) fs=$2; shift ;;
        --quick) WEIR_TEST_QUICK=1 ;;
        --jobs) jobs=$2; shift ;;
        --size) size=$2; shift ;;
        --work) work=$2; shift ;;
        --logs) logs=$2; shift ;;
        --mount-arg) mount_args+=("$2"); shift ;;
        --list) printf '%s\n' "${ALL[@]}"; exit 0 ;;
        -h | --help) sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-; exit 0 ;;
        -*) echo "run.sh: unknown option $1" >&2; exit 2 ;;
        *) names+=("$1") ;;
    esac
    shift
done
((${#names[@]})) || names=("${ALL[@]}")
for name in "${names[@]}"; do
    [[ " ${ALL[*]} " == *" $name "* ]] || { echo "run.sh: no program $name (there are: ${ALL[*]})" >&2; exit 2; }
done
[[ -n $weir || $fs =~ ^(xfs|ext4|btrfs)$ ]] || { echo "run.sh: give --weir BIN or --fs xfs|ext4|btrfs" >&2; exit 2; }
[[ $EUID == 0 ]] || { echo "run.sh: needs root, for mounts, device nodes and other users" >&2; exit 2; }
"$here/install.sh" || exit 2

[[ -n $work ]] || work=$(mktemp -d /var/tmp/weir-programs.XXXXXX)
mkdir -p "$work"
chmod 755 "$work" # the server of PostgreSQL runs as another user
[[ -n $logs ]] || logs=$work/logs
mkdir -p "$logs"

# --- one kind of volume: make it, mount it, unmount it, check it ---------------------------

make_volume() { # VOLUME
    if [[ -n $weir ]]; then
        "$weir" create "$1" --size "$size"
    else
        truncate -s "$size" "$1"
        case $fs in
            xfs) mkfs.xfs -q "$1" ;;
            ext4) mkfs.ext4 -q -F "$1" ;;
            btrfs) mkfs.btrfs -q "$1" ;;
        esac
    fi
}

mount_volume() { # VOLUME DIR
    if [[ -n $weir ]]; then
        timeout 60 "$weir" mount "$1" "$2" --background "${mount_args[@]}" </dev/null
    else
        mount -o loop "$1" "$2"
    fi
}

# The processes that serve VOLUME. The path is ours alone, so nothing else can match.
servers_of() { pgrep -f -- "mount $1 " || true; }

unmount_volume() { # VOLUME DIR: the volume is closed when it returns
    if [[ -n $weir ]]; then
        # stress-ng's io, which may run beside this one, opens every mount there is for a moment (syncfs).
        local said attempt
        for attempt in {1..50}; do
            said=$(timeout 120 "$weir" umount "$2" 2>&1) && break
            [[ $attempt -lt 50 && $said == *"in use by stress-ng-io"* ]] || { echo "$said"; return 1; }
            sleep 0.2
        done
        mountpoint -q "$2" && { echo "$2 is still mounted after weir umount"; return 1; }
        for _ in {1..300}; do
            [[ -z $(servers_of "$1") ]] && return 0
            sleep 0.1
        done
        echo "the server of $1 is still running 30 s after the unmount"
        return 1
    else
        umount "$2"
    fi
}

check_volume() { # VOLUME
    local code=0
    if [[ -n $weir ]]; then
        timeout 300 "$weir" fsck "$1" || code=$?
    else
        case $fs in
            xfs) xfs_repair -n "$1" || code=$? ;;
            ext4) e2fsck -fn "$1" || code=$? ;;
            btrfs) btrfs check "$1" || code=$? ;;
        esac
    fi
    ((code == 0)) || { echo "fsck: exit code $code"; return 1; }
}

# Takes away whatever a failed or interrupted program left: mounts, then servers.
release() { # VOLUME DIR
    local pid
    if mountpoint -q "$2" 2>/dev/null || grep -q " $2 " /proc/mounts; then
        fuser -km -M "$2" >/dev/null 2>&1
        umount -l "$2" 2>/dev/null || fusermount3 -u -z "$2" 2>/dev/null
    fi
    if [[ -n $weir ]]; then
        for pid in $(servers_of "$1"); do kill -9 "$pid" 2>/dev/null; done
    fi
}

# --- one program ----------------------------------------------------------------------------

step() { # WHAT COMMAND...: a line with its time in the log; the program ends if it fails
    local what=$1 code=0 started=$EPOCHREALTIME
    shift
    echo "--- $what"
    "$@" || code=$?
    printf -- '--- %s: exit code %d, %.1f s\n' "$what" "$code" \
        "$(seconds_between "$started" "$EPOCHREALTIME")"
    ((code == 0)) || exit 1
}

seconds_between() { awk -v a="$1" -v b="$2" 'BEGIN { print b - a }'; }

phase() { timeout -k 10 "$PHASE_LIMIT_SECONDS" "$here/$1.sh" "$2" "$3" </dev/null; }

run_program() { # NAME: in a subshell of its own
    local name=$1
    volume=$work/$name.volume dir=$work/$name.mnt
    export WEIR_TEST_STATE=$work/state
    mkdir -p "$dir" "$WEIR_TEST_STATE"
    trap 'release "$volume" "$dir"' EXIT
    trap 'exit 130' INT TERM
    step create make_volume "$volume"
    step mount mount_volume "$volume" "$dir"
    step exercise phase "$name" "$dir" exercise
    step unmount unmount_volume "$volume" "$dir"
    step fsck check_volume "$volume"
    step 'mount again' mount_volume "$volume" "$dir"
    step verify phase "$name" "$dir" verify
    step 'unmount again' unmount_volume "$volume" "$dir"
    step 'fsck again' check_volume "$volume"
    rm -rf "$volume" "${WEIR_TEST_STATE:?}/$name"
}

report() { # NAME: runs it and prints its line; the exit code is that of the program
    local name=$1 started=$EPOCHREALTIME code=0 seconds
    (run_program "$name") >"$logs/$name.log" 2>&1 &
    running=$!
    trap 'kill -TERM "$running" 2>/dev/null; wait "$running"; exit 130' INT TERM
    wait "$running" || code=$?
    seconds=$(seconds_between "$started" "$EPOCHREALTIME")
    if ((code == 0)); then
        printf 'ok    %-12s %6.1f s%s\n' "$name" "$seconds" "$(skips "$logs/$name.log")"
    else
        # In one piece, even with several programs at a time.
        printf '%s\n' "$(printf 'FAIL  %-12s %6.1f s, log follows\n' "$name" "$seconds"
            sed 's/^/    /' "$logs/$name.log")"
    fi
    return "$code"
}

skips() { # LOG: how many checks were skipped
    local count
    count=$(grep -c -E '^(skip |skipped: .)' "$1")
    ((count)) && printf ' (%d skipped)' "$count"
}

# --- all of them ----------------------------------------------------------------------------

declare -A name_of=()
passed=0 failed=0

finish() {
    local pid
    for pid in "${!name_of[@]}"; do kill -TERM "$pid" 2>/dev/null; done
    wait
    rmdir "$work"/*.mnt 2>/dev/null
    ((failed)) || [[ $logs != "$work/logs" ]] || rm -rf "$work/logs"
    rm -rf "$work/state"
    rmdir "$work" 2>/dev/null || echo "left for a look: $work"
}
trap finish EXIT
trap 'exit 130' INT TERM

collect_one() {
    local pid code=0
    wait -n -p pid || code=$?
    unset "name_of[$pid]"
    if ((code == 0)); then ((passed++)); else ((failed++)); fi
}

suite_started=$EPOCHREALTIME
for name in "${names[@]}"; do
    while ((${#name_of[@]} >= jobs)); do collect_one; done
    report "$name" &
    name_of[$!]=$name
done
while ((${#name_of[@]})); do collect_one; done
printf '%.0f s in all\n' "$(seconds_between "$suite_started" "$EPOCHREALTIME")"
echo "$passed passed, $failed failed"
((failed == 0))
