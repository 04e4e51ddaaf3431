#!/bin/bash
# cp -a, rsync -aHAX, tar, du and find over a tree with everything a tree can hold: extended
# attributes, ACLs, sparse files, hard links, symbolic links, FIFOs, sockets, device nodes,
# unusual modes and names, old and future times.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

make_tree() { # DIR: the reference tree, on the host
    local top=$1 i
    mkdir -p "$top"/{plain,sparse,special,links,empty,attributes}
    for i in {1..200}; do
        head -c $((i * 331)) /dev/urandom >"$top/plain/file$i"
        touch -d "@$((i * 7654321)).$(printf '%09d' $((i * 4999999)))" "$top/plain/file$i"
        chmod "$(printf '%04o' $((i * 37 % 4096)))" "$top/plain/file$i"
        chown "$((i * 3)):$((i * 5))" "$top/plain/file$i"
        ((i % 3)) || ln "$top/plain/file$i" "$top/links/hard$i"
        ln -s "../plain/file$i" "$top/links/soft$i"
    done
    for i in 1 2 3 4; do
        truncate -s "$((i * 16))M" "$top/sparse/hole$i"
        head -c 200000 /dev/urandom |
            dd of="$top/sparse/hole$i" bs=4k seek=$((i * 1000)) conv=notrunc status=none
    done
    mkfifo "$top/special/fifo"
    mknod "$top/special/null" c 1 3
    mknod "$top/special/block" b 7 200
    python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$top/special/sock"
    chmod 4755 "$top/special/null"
    for i in {1..30}; do
        echo "$i" >"$top/attributes/a$i"
        setfattr -n user.small -v "value $i" "$top/attributes/a$i"
        setfattr -n user.large -v "$(printf "%0$((i * 60))d" "$i")" "$top/attributes/a$i"
        setfattr -n trusted.weir -v "0x00ff$(printf '%02x' "$i")" "$top/attributes/a$i"
        setfattr -n security.weir -v "label$i" "$top/attributes/a$i"
        setfacl -m "u:$((1000 + i)):rw,g:postgres:r" "$top/attributes/a$i"
    done
    setfattr -n user.dir -v yes "$top/attributes"
    setfacl -m d:u:1234:rwx,u:1234:rx "$top/attributes"
    setcap_like "$top/attributes/a1"
    touch -h -d '1999-12-31T23:59:59.999999999Z' "$top/links/soft1"
    touch -d '2099-06-01T00:00:00.000000001Z' "$top/attributes/a2"
    touch -d '2001-02-03T04:05:06.7Z' "$top/empty" "$top/sparse" "$top/plain"
}

setcap_like() { # a version 2 file capability (cap_net_raw), set as its bytes
    setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 "$1"
}

# What find sees: name, type, mode, links, size, owner, time (no size and links of directories).
find_listing() {
    (cd "$1" && find . -mindepth 1 \( -type d -printf '%P|%y|%m|%U|%G|%T@\n' -o \
        -printf '%P|%y|%m|%n|%s|%U|%G|%T@|%l\n' \) | sort)
}

check_copy() { # DIR: equal to the reference by our manifest and by find
    manifest "$1" --against "$STATE/manifest"
    diff <(cat "$STATE/find") <(find_listing "$1") || die "find sees another tree in $1"
}

check_sparse() { # DIR: holes took no space
    local file
    for file in "$1"/sparse/hole*; do
        (($(stat -c %b "$file") * 512 < 4000000)) || die "$file is not sparse: $(stat -c '%b blocks' "$file")"
    done
}

# XFS shows ACLs a second time as trusted.SGI_ACL_*, which rsync would take for foreign
# attributes of the target and delete.
copy_with_rsync() { rsync -aHAX --filter='-x trusted.SGI_ACL_*' --specials --devices "$@"; }

exercise() {
    local tree=$STATE/tree
    make_tree "$tree"
    manifest "$tree" >"$STATE/manifest"
    find_listing "$tree" >"$STATE/find"

    cp -a --sparse=always "$tree" "$WORK/cp"
    check_copy "$WORK/cp"
    check_sparse "$WORK/cp"
    cp -a "$WORK/cp" "$WORK/cp2" # from the file system to itself, with SEEK_HOLE and copy_file_range
    check_copy "$WORK/cp2"
    check_sparse "$WORK/cp2"

    copy_with_rsync --sparse "$tree/" "$WORK/rsync"
    check_copy "$WORK/rsync"
    check_sparse "$WORK/rsync"
    local changes
    changes=$(copy_with_rsync --checksum --delete --dry-run --itemize-changes "$tree/" "$WORK/rsync")
    [[ -z $changes ]] || die "rsync finds differences: $changes"
    # Change, delete and add files, then let rsync repair the copy in place.
    for i in {10..60}; do echo changed >>"$WORK/rsync/plain/file$i"; done
    rm -r "$WORK/rsync/attributes" "$WORK/rsync/links"
    touch "$WORK/rsync/extra"
    copy_with_rsync --inplace --no-whole-file --checksum --delete "$tree/" "$WORK/rsync"
    check_copy "$WORK/rsync"

    local flags=(--format=posix --acls --xattrs --xattrs-include='*' --sparse --numeric-owner --warning=none)
    tar "${flags[@]}" -C "$WORK/cp" -cf "$WORK/archive.tar" .
    mkdir "$WORK/tar"
    tar "${flags[@]}" -xpf "$WORK/archive.tar" -C "$WORK/tar"
    # A tar archive cannot hold a socket.
    cp -a "$tree/special/sock" "$WORK/tar/special/sock"
    touch -r "$tree/special" "$WORK/tar/special"
    check_copy "$WORK/tar"
    check_sparse "$WORK/tar"

    # Back to the host.
    cp -a "$WORK/cp2" "$STATE/back"
    check_copy "$STATE/back"

    # du: apparent sizes of files equal the host's; space used is sane.
    local files
    same "du of the files" "$(cd "$tree" && find . -type f -links 1 -print0 | du -cb --files0-from=- | tail -n 1)" \
        "$(cd "$WORK/cp" && find . -type f -links 1 -print0 | du -cb --files0-from=- | tail -n 1)"
    files=$(($(du -s --block-size=1 "$WORK/cp" | cut -f1)))
    ((files > 3000000 && files < 60000000)) || die "du says $files bytes for the tree"
    # df sees the space of a new file, and sees it again after the removal.
    local free_before free_with free_after
    sync -f "$WORK"
    free_before=$(df --output=avail -B1 "$WORK" | tail -n 1)
    head -c 64M /dev/urandom >"$WORK/ballast"
    sync "$WORK/ballast"
    sync -f "$WORK"
    free_with=$(df --output=avail -B1 "$WORK" | tail -n 1)
    ((free_before - free_with > 60000000)) || die "64 MiB written, but df shows $((free_before - free_with)) bytes less"
    rm "$WORK/ballast"
    for _ in {1..60}; do # space of deleted files may come back with the next checkpoint
        sync -f "$WORK"
        free_after=$(df --output=avail -B1 "$WORK" | tail -n 1)
        ((free_after - free_with > 60000000)) && break
        sleep 0.5
    done
    ((free_after - free_with > 60000000)) || die "the space of a deleted file does not come back"
}

verify() {
    local copy
    for copy in cp cp2 rsync tar; do
        check_copy "$WORK/$copy"
        check_sparse "$WORK/$copy"
    done
    mkdir "$WORK/again"
    tar --acls --xattrs --xattrs-include='*' --numeric-owner --warning=none -xpf "$WORK/archive.tar" -C "$WORK/again"
    diff -r --no-dereference "$WORK/again/plain" "$WORK/cp/plain" || die "diff -r"
    find "$WORK" -type f -name 'file*' -delete
    [[ -z $(find "$WORK" -name 'file*' -type f) ]] || die "find -delete left files"
}

run_phases "$@"
