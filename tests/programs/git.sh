#!/bin/bash
# git init, add, commit, branches, gc, fsck and clone of the large source tree.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export GIT_AUTHOR_NAME=Weir GIT_AUTHOR_EMAIL=weir@example.org
export GIT_COMMITTER_NAME=Weir GIT_COMMITTER_EMAIL=weir@example.org
export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'

# The names and hashes of all files of the work tree in $1, without .git.
tree_hash() {
    (cd "$1" && find . -name .git -prune -o -type f -print0 | sort -z |
        xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
}

check_repository() { # DIR: fsck is clean and the work tree is what HEAD says
    local problems
    problems=$(git -C "$1" fsck --full --strict --no-dangling 2>&1) ||
        die "git fsck in $1: $problems"
    [[ -z $problems ]] || die "git fsck in $1 says: $problems"
    [[ -z $(git -C "$1" status --porcelain) ]] || die "the work tree of $1 is not clean"
}

exercise() {
    local repo=$WORK/repo archive
    archive=$("$LIB_DIR/source_tree.sh")
    mkdir "$repo"
    tar -xf "$archive" -C "$repo" --strip-components=2 --exclude=tree/extra --exclude=.gitmodules \
        --no-same-owner
    git -C "$repo" init -q -b main
    git -C "$repo" config gc.auto 0
    git -C "$repo" add -A -f
    git -C "$repo" commit -q -m 'the whole tree'
    local files
    files=$(git -C "$repo" ls-files | wc -l)
    ((files >= 5000)) || die "git tracks only $files files"

    # From here on every object, reference and index is synced.
    git -C "$repo" config core.fsync all
    git -C "$repo" checkout -q -b work
    local i file
    mapfile -t changed < <(git -C "$repo" ls-files | awk 'NR % 40 == 0')
    for file in "${changed[@]}"; do echo "a change" >>"$repo/$file"; done
    git -C "$repo" commit -q -a -m 'many changes'
    git -C "$repo" mv "${changed[0]}" renamed-file
    git -C "$repo" rm -q "${changed[1]}"
    git -C "$repo" commit -q -m 'a rename and a removal'
    git -C "$repo" checkout -q main
    git -C "$repo" tag before-merge
    git -C "$repo" merge -q --no-ff -m 'merge work' work
    for i in {1..20}; do
        echo "$i" >"$repo/counter"
        git -C "$repo" add counter
        git -C "$repo" commit -q -m "count $i"
    done
    git -C "$repo" count-objects -v >"$STATE/before-gc"
    git -C "$repo" gc -q --prune=now

    note head "$(git -C "$repo" rev-parse HEAD)"
    note tree "$(tree_hash "$repo")"
    git clone -q "$repo" "$WORK/linked"          # shares objects by hard links
    git clone -q --no-local "$repo" "$WORK/copied" # goes through the pack protocol
    check_clones
}

check_clones() {
    local clone
    for clone in repo linked copied; do
        if [[ $clone == linked ]]; then # its objects are the ones of repo
            git -C "$WORK/linked" fsck --connectivity-only --no-dangling
        else
            check_repository "$WORK/$clone"
        fi
        same "HEAD of $clone" "$(noted head)" "$(git -C "$WORK/$clone" rev-parse HEAD)"
        same "work tree of $clone" "$(noted tree)" "$(tree_hash "$WORK/$clone")"
    done
}

verify() {
    check_clones
    # The history still works: go back, and forward again.
    git -C "$WORK/copied" checkout -q HEAD~5
    git -C "$WORK/copied" checkout -q main
    [[ -z $(git -C "$WORK/copied" status --porcelain) ]] || die "the work tree is not clean"
    ((QUICK)) || { git -C "$WORK/repo" repack -q -a -d -F && check_repository "$WORK/repo"; }
}

run_phases "$@"
