#!/bin/bash
# fsx (File System eXerciser, https://crates.io/crates/fsx): random reads, writes, truncates,
# mapped reads and writes, punches, copies and syncs of one file, each read compared with a
# model. 100,000 operations with all kinds mixed, then two shorter runs that stress block
# alignment and small files.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# fsx NAME OPERATIONS [further arguments] (configuration on standard input)
run_fsx() {
    local name=$1 operations=$2
    shift 2
    cat >"$STATE/$name.toml"
    echo "fsx $name: $operations operations, seed $seed"
    mkdir -p "$STATE/artifacts"
    if ! "$FSX" -q -N "$operations" -S "$seed" -f "$STATE/$name.toml" -P "$STATE/artifacts" \
        "$@" "$WORK/$name" >"$STATE/$name.log" 2>&1; then
        tail -n 60 "$STATE/$name.log"
        die "fsx $name with seed $seed"
    fi
    note "$name.sha" "$(sha_of "$WORK/$name")"
}

exercise() {
    [[ -x $FSX ]] || die "$FSX is missing: run install.sh"
    local seed=${WEIR_TEST_SEED:-20260101}
    ((QUICK)) || local more=40000
    run_fsx mixed 100000 <<'TOML'
flen = 1048576
[opsize]
max = 65536
[weights]
close_open = 1.0
invalidate = 0.5
mapread = 8.0
mapwrite = 8.0
read = 20.0
write = 20.0
truncate = 5.0
fsync = 0.5
fdatasync = 0.5
posix_fallocate = 3.0
punch_hole = 3.0
sendfile = 1.0
posix_fadvise = 1.0
copy_file_range = 2.0
TOML
    run_fsx small 20000 <<'TOML'
flen = 16384
nomsyncafterwrite = true
[opsize]
max = 5000
[weights]
close_open = 5.0
mapread = 5.0
mapwrite = 5.0
read = 10.0
write = 10.0
truncate = 10.0
posix_fallocate = 3.0
punch_hole = 5.0
TOML
    run_fsx aligned "${more:-10000}" <<'TOML'
flen = 8388608
[opsize]
max = 262144
align = 4096
[weights]
close_open = 0.5
invalidate = 0.5
mapread = 1.0
mapwrite = 1.0
read = 10.0
write = 10.0
truncate = 2.0
fdatasync = 0.3
punch_hole = 4.0
copy_file_range = 2.0
TOML
}

verify() {
    local name
    for name in mixed small aligned; do
        same "content of $name" "$(noted $name.sha)" "$(sha_of "$WORK/$name")"
    done
}

run_phases "$@"
