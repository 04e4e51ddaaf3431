#!/bin/bash
# Untars a source tree of more than 5,000 files and compares every hash, mode, owner, time,
# link target and hard link with an extraction of the same archive on the host.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

exercise() {
    local archive files
    archive=$("$LIB_DIR/source_tree.sh")
    files=$(grep -c '"kind": "file"' "$archive.manifest")
    ((files >= 5000)) || die "only $files files in the source tree"
    note archive "$archive"
    tar -xpf "$archive" -C "$WORK"
    sync -f "$WORK"
    manifest "$WORK" --against "$archive.manifest"
    # tar's own comparison, and a renamed and a chmod-ed directory with many children.
    tar -df "$archive" -C "$WORK"
    mv "$WORK/tree" "$WORK/elsewhere"
    mv "$WORK/elsewhere" "$WORK/tree"
}

verify() {
    manifest "$WORK" --against "$(noted archive).manifest"
    # Deleting it all must leave empty directories that can be removed.
    rm -rf "$WORK/tree"
    [[ -z $(ls -A "$WORK") ]] || die "files are left after rm -rf"
}

run_phases "$@"
