#!/bin/bash
# Installs everything that the suites for programs, kills and the format, and the tests of the lab, need on Debian. Idempotent and quick
# when all is there. Needs root for the packages; fsx goes into the cache directory only.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/programs/lib.sh
source "$here/lib.sh"

packages=(
    acl attr btrfs-progs curl e2fsprogs fio fuse3 git postgresql-15 procps psmisc python3
    python3-crc32c python3-xxhash redis-server rocksdb-tools rsync sqlite3 stress-ng tar util-linux
    xfsprogs
)
missing=()
for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
        missing+=("$package")
done
if ((${#missing[@]})); then
    echo "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    if ! { apt-get -qq -o DPkg::Lock::Timeout=300 update &&
        apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}"; } \
        >"$log" 2>&1; then
        cat "$log"
        exit 1
    fi
    rm -f "$log"
fi

# fsx, the File System eXerciser, built once into the cache.
if [[ ! -x $FSX ]]; then
    echo "building fsx $FSX_VERSION"
    log=$(mktemp)
    if ! CARGO_TARGET_DIR=$CACHE/fsx-target cargo install fsx --version "$FSX_VERSION" --locked \
        --root "$CACHE/fsx-$FSX_VERSION" >"$log" 2>&1; then
        cat "$log"
        exit 1
    fi
    rm -rf "$CACHE/fsx-target" "$log"
fi

"$here/source_tree.sh" >/dev/null
