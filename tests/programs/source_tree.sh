#!/bin/bash
# Prints the path of a tar archive of a large source tree (at least 5,000 files), made once
# and kept in the cache together with its manifest (same path + ".manifest"), which is taken
# from an extraction on the host.
#
# The tree is the crate grpcio-sys (gRPC, Abseil, BoringSSL: about 6,000 files), fetched by
# cargo. If there is no way to the registry, a tree of the same size is taken from the
# machine's own /usr. A crate holds only plain files, so a directory `extra` is added with
# symbolic links, hard links, unusual modes, names and times.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

crate=grpcio-sys
version=0.13.0+1.56.2-patched
archive=$CACHE/source-tree-v1.tar
if [[ -s $archive && -s $archive.manifest ]]; then
    echo "$archive"
    exit 0
fi

scratch=$(mktemp -d "$CACHE/source-tree.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

fetch_crate() {
    mkdir -p "$scratch/fetch/src"
    touch "$scratch/fetch/src/lib.rs"
    cat >"$scratch/fetch/Cargo.toml" <<TOML
[package]
name = "source-tree"
version = "0.0.0"
edition = "2021"
[dependencies]
$crate = "=${version%%+*}"
[workspace]
TOML
    (cd "$scratch/fetch" && cargo fetch) >"$scratch/fetch.log" 2>&1 || return 1
    local home=${CARGO_HOME:-$HOME/.cargo} file
    file=$(find "$home/registry/cache" -name "$crate-$version.crate" -print -quit)
    [[ -n $file ]] && tar -xzf "$file" -C "$scratch/tree"
}

copy_from_host() {
    echo "source_tree: the registry cannot be reached, using this machine's own files" >&2
    mkdir "$scratch/tree/host"
    find /usr/include /usr/share/perl /usr/lib/python3* /usr/share/doc "${RUSTUP_HOME:-$HOME/.rustup}" \
        -xdev -type f -size -256k -readable 2>/dev/null | head -n 6000 >"$scratch/list" || true
    tar -cf - -T "$scratch/list" 2>/dev/null | tar -xf - -C "$scratch/tree/host"
}

add_extras() {
    local extra=$scratch/tree/extra i dir
    mkdir "$extra"
    for i in {1..100}; do
        dir=$extra/d$((i % 10))
        mkdir -p "$dir"
        echo "file $i" >"$dir/file$i"
        ln -s "../d$((i % 7))/file$i" "$dir/relative$i"
        ln "$dir/file$i" "$extra/hard$i"
        ((i % 4)) || ln "$dir/file$i" "$dir/hard-again$i"
        chmod "$(printf '%04o' $((i * 41 % 4096)))" "$dir/file$i"
        touch -h -d "@$((i * 9999991)).$(printf '%09d' $((i * 7777777)))" "$dir/file$i" "$dir/relative$i"
    done
    ln -s /nonexistent/absolute "$extra/dangling"
    ln -s "$(printf 'long/%.0s' {1..190})" "$extra/long-target"
    touch "$extra/$(printf 'n%.0s' {1..255})" "$extra/with space" "$extra/"$'line\nbreak' \
        "$extra/"$'not-utf8-\xff\xfe' "$extra/ünïcödé-文件" "$extra/-dash" "$extra/back\\slash"
    mkdir -p "$extra/empty" "$extra/deep/$(printf 'x/%.0s' {1..60})"
    : >"$extra/empty-file"
    truncate -s 5M "$extra/all-hole"
    head -c 3000000 /dev/urandom >"$extra/large.bin"
    mkfifo "$extra/fifo"
    chmod 1777 "$extra/empty"
    chmod 2775 "$extra/d3"
}

mkdir "$scratch/tree"
fetch_crate || copy_from_host
add_extras
files=$(find "$scratch/tree" -type f | wc -l)
((files >= 5000)) || die "the source tree has only $files files"
tar --format=posix --numeric-owner -C "$scratch" -cf "$scratch/tree.tar" tree
mkdir "$scratch/reference"
tar -xpf "$scratch/tree.tar" -C "$scratch/reference"
manifest "$scratch/reference" >"$scratch/manifest"
mv "$scratch/manifest" "$archive.manifest"
mv "$scratch/tree.tar" "$archive"
echo "$archive"
