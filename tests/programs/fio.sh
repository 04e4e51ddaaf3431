#!/bin/bash
# fio with a crc32c in every block: sequential and random, buffered, direct and mapped, with
# syncs, with several jobs. Each job verifies what it wrote; the verify phase reads all blocks
# again after the remount.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SIZE=96m
((QUICK)) && SIZE=24m

# run_fio NAME [arguments]: the job NAME; its files are named after it.
run_fio() {
    local name=$1
    shift
    if ! fio --name="$name" --directory="$WORK" --size="$SIZE" --verify=crc32c --verify_fatal=1 \
        --verify_state_save=0 --randrepeat=1 --randseed=4711 --fallocate=none --group_reporting \
        --output-format=terse --output="$STATE/$name.log" --thread=0 "$@" 2>"$STATE/$name.err" ||
        [[ -s $STATE/$name.err ]]; then
        cat "$STATE/$name.err" "$STATE/$name.log"
        die "fio $name"
    fi
}

all_jobs() { # further arguments go to each job
    run_fio seq-buffered --rw=write --bs=64k --ioengine=psync --numjobs=2 --fsync_on_close=1 "$@"
    run_fio seq-direct --rw=write --bs=1m --ioengine=libaio --iodepth=4 --direct=1 --numjobs=2 "$@"
    run_fio rand-buffered --rw=randwrite --bs=4k --ioengine=psync --fdatasync=64 "$@"
    run_fio rand-direct --rw=randwrite --bs=4k --ioengine=libaio --iodepth=16 --direct=1 "$@"
    run_fio rand-sync --rw=randwrite --bs=16k --ioengine=psync --sync=dsync "$@"
    run_fio rand-mmap --rw=randwrite --bs=8k --ioengine=mmap --numjobs=2 --fsync=128 "$@"
    run_fio rand-uneven --rw=randwrite --bs=12k --ioengine=pvsync --numjobs=3 --fsync=100 "$@"
}

exercise() {
    all_jobs --do_verify=1
    # Reads and writes mixed, several jobs in one file: the data is verified as it is read.
    run_fio mixed --rw=randrw --bs=4k --ioengine=psync --numjobs=2 --io_size=16m --do_verify=1
    run_fio mixed-direct --rw=randrw --bs=4k --ioengine=libaio --iodepth=8 --direct=1 \
        --io_size=16m --do_verify=1
    manifest "$WORK" >"$STATE/manifest"
}

verify() {
    manifest "$WORK" --against "$STATE/manifest"
    all_jobs --verify_only=1
}

run_phases "$@"
