#!/bin/bash
# stress-ng's file system stressors, one after the other, two workers each, with --verify and
# a bounded number of operations. A stressor that the kernel or the file system does not offer
# (exit code 3 or 4) is listed as skipped.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# stressor:operations[:further arguments], operations of both workers together in the quick
# variant; the full one does three times as many.
STRESSORS=(
    access:2000 chdir:2000:--chdir-dirs=200 chmod:1000 chown:3000
    copy-file:20:--copy-file-bytes=128m dentry:2000:--dentries=500 dir:1000:--dir-dirs=200
    dirdeep:500:--dirdeep-inodes=1000 dirmany:2000 fallocate:60:--fallocate-bytes=16m fcntl:5000
    file-ioctl:2000 filename:500:--filename-opts=posix flock:5000 fpunch:2 fsize:100 fstat:5000
    getdent:2000 handle:5000 hdd:4000:--hdd-bytes=16m:--hdd-opts=sync,wr-rnd,rd-rnd,fsync
    inotify:4 io:200 iomix:300:--iomix-bytes=16m lease:1000 link:4 lockf:5000 lockofd:5000
    mknod:500 open:5000 rename:3000 symlink:4 sync-file:60:--sync-file-bytes=4m
    touch:2000:--touch-opts=all utime:5000 xattr:200
    # Not of the class "filesystem", but they work on files in the temporary directory.
    aio:2000 mmap:6:--mmap-bytes=8m:--mmap-file fault:1000 msync:400:--msync-bytes=4m
    readahead:2000:--readahead-bytes=8m revio:1000:--revio-bytes=8m
    seek:4000:--seek-size=16m:--seek-punch sendfile:500:--sendfile-size=1m
    splice:2000
)

# Not run, and why: bind-mount, binderfs (mount file systems of their own); chattr,
# inode-flags, fiemap, verity (ioctls that only some kernel file systems implement); dnotify,
# fanotify, ioprio, dup, eventfd, procfs (do not reach the file system under test); locka
# (deprecated aliases of fcntl locks, covered by lockf and lockofd).

exercise() {
    local entry name operations arguments factor=3 limit=10s passed=() skipped=() code
    ((QUICK)) && factor=1 limit=4s
    for entry in "${STRESSORS[@]}"; do
        IFS=: read -r name operations arguments <<<"$entry"
        code=0
        # shellcheck disable=SC2086
        stress-ng --temp-path "$WORK" --verify --timeout "$limit" --oomable --no-rand-seed \
            "--$name" 2 "--$name-ops" $((operations * factor)) ${arguments//:/ } \
            >"$STATE/$name.log" 2>&1 || code=$?
        case $code in
            0)
                if grep -q 'fail:' "$STATE/$name.log"; then
                    cat "$STATE/$name.log"
                    die "stress-ng $name reports a failure"
                fi
                if grep -q 'skipp' "$STATE/$name.log"; then
                    skipped+=("$name: $(grep -m1 -o 'skipp.*' "$STATE/$name.log")")
                else
                    passed+=("$name")
                fi
                ;;
            3 | 4) skipped+=("$name: $(tail -n 1 "$STATE/$name.log")") ;;
            *)
                cat "$STATE/$name.log"
                die "stress-ng $name: exit code $code"
                ;;
        esac
        [[ -z $(ls -A "$WORK") ]] || { ls -laR "$WORK" | head; die "stress-ng $name left files"; }
    done
    echo "passed (${#passed[@]}): ${passed[*]}"
    printf 'skipped: %s\n' "${skipped[@]}"
    ((${#passed[@]} >= 25)) || die "only ${#passed[@]} stressors ran"
}

verify() {
    [[ -z $(ls -A "$WORK") ]] || die "files of the stressors came back: $(ls -A "$WORK" | head)"
    stress-ng --temp-path "$WORK" --verify --timeout 20s --hdd 1 --hdd-ops 1000 --hdd-bytes 16m \
        --dir 1 --dir-ops 200 --xattr 1 --xattr-ops 20 >"$STATE/verify.log" 2>&1 ||
        { cat "$STATE/verify.log"; die "stress-ng after the remount"; }
}

run_phases "$@"
