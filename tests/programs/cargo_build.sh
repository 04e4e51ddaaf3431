#!/bin/bash
# Builds a small Rust crate (build script, library, binary, unit and integration tests, no
# dependencies) inside the file system and runs its tests. After the remount nothing may be
# stale: cargo decides by modification times.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export CARGO_INCREMENTAL=1 CARGO_TERM_COLOR=never
unset CARGO_TARGET_DIR RUSTFLAGS

in_crate() { (cd "$WORK/ledger" && CARGO_TARGET_DIR=$WORK/ledger/target "$@"); }

write_crate() {
    local root=$WORK/ledger n
    mkdir -p "$root/src/parts" "$root/tests"
    cat >"$root/Cargo.toml" <<'TOML'
[package]
name = "ledger"
version = "0.1.0"
edition = "2021"
build = "build.rs"
[workspace]
TOML
    cat >"$root/build.rs" <<'RUST'
use std::{env, fs, path::Path};
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let table: Vec<String> = (0..1000u64).map(|n| (n * n % 997).to_string()).collect();
    let path = Path::new(&env::var_os("OUT_DIR").unwrap()).join("table.rs");
    fs::write(path, format!("pub const TABLE: [u64; 1000] = [{}];", table.join(","))).unwrap();
}
RUST
    {
        echo 'include!(concat!(env!("OUT_DIR"), "/table.rs"));'
        echo 'pub mod parts;'
    } >"$root/src/lib.rs"
    for n in {1..40}; do
        echo "pub mod part$n;" >>"$root/src/parts/mod.rs"
        cat >"$root/src/parts/part$n.rs" <<RUST
/// Part $n of the sum.
pub fn sum(values: &[u64]) -> u64 {
    values.iter().filter(|v| *v % 41 == $n).sum()
}
#[cfg(test)]
mod tests {
    #[test]
    fn counts_only_its_own() {
        assert_eq!(super::sum(&[$n, $n + 41, $n + 42]), 2 * $n + 41);
    }
}
RUST
    done
    {
        echo 'fn main() {'
        echo '    let mut total = ledger::TABLE.iter().filter(|v| *v % 41 == 0).sum::<u64>();'
        for n in {1..40}; do echo "    total += ledger::parts::part$n::sum(&ledger::TABLE);"; done
        echo '    println!("{total} {}", ledger::TABLE.iter().sum::<u64>());'
        echo '}'
    } >"$root/src/main.rs"
    cat >"$root/tests/whole.rs" <<'RUST'
#[test]
fn the_parts_make_the_whole() {
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_ledger")).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let numbers: Vec<u64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert_eq!(numbers[0], numbers[1]);
}
RUST
}

exercise() {
    write_crate
    in_crate cargo test --offline -j2 >"$STATE/test.log" 2>&1 || { cat "$STATE/test.log"; die "cargo test"; }
    local passed
    passed=$(grep -o '[0-9]* passed' "$STATE/test.log" | awk '{ n += $1 } END { print n }')
    same "tests passed" 41 "$passed"
    # A change in one module is seen and built.
    echo 'pub const CHANGED: bool = true;' >>"$WORK/ledger/src/parts/part7.rs"
    in_crate cargo build --offline -v >"$STATE/build.log" 2>&1 || { cat "$STATE/build.log"; die "cargo build"; }
    grep -q Dirty "$STATE/build.log" || { cat "$STATE/build.log"; die "cargo did not see the change"; }
    note output "$(in_crate target/debug/ledger)"
    manifest "$WORK" >"$STATE/manifest"
}

verify() {
    manifest "$WORK" --against "$STATE/manifest"
    in_crate cargo build --offline -v >"$STATE/again.log" 2>&1 || { cat "$STATE/again.log"; die "cargo build"; }
    grep -q 'Fresh ledger' "$STATE/again.log" || { cat "$STATE/again.log"; die "the build is stale after the remount"; }
    same "output" "$(noted output)" "$(in_crate target/debug/ledger)"
    in_crate cargo clean --offline >/dev/null 2>&1
    [[ ! -e $WORK/ledger/target ]] || die "cargo clean left something"
}

run_phases "$@"
