//! A source tree as an archive: what *foundation* unpacks when it is not given one.

use std::fmt::Write;

use super::load::random_bytes;
use crate::measure::Rng;

const BLOCK: usize = 512;
const FILES_PER_DIRECTORY: u64 = 24;

/// One ustar entry.
fn entry(out: &mut Vec<u8>, name: &str, kind: u8, mode: u32, target: &str, data: &[u8]) {
    let mut header = [0_u8; BLOCK];
    let mut put = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    put(0, name);
    put(100, &format!("{mode:07o}"));
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{:011o}", data.len()));
    // Some day in 2024: unpacking sets times, as it does for a real tree.
    put(136, &format!("{:011o}", 1_710_000_000));
    put(148, "        ");
    put(157, target);
    put(257, "ustar");
    put(263, "00");
    header[156] = kind;
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "{sum:06o}");
    header[148..154].copy_from_slice(text.as_bytes());
    header[154] = 0;
    out.extend_from_slice(&header);
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
}

/// An archive with `files` files of 200 bytes to 64 KiB (log-uniform) in directories of two levels, an
/// executable now and then and a symbolic link in each directory.
pub fn source_tree_archive(files: u64, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed, 0x7A4);
    let content = random_bytes(64 << 10, seed);
    let mut out = Vec::new();
    entry(&mut out, "src/", b'5', 0o755, "", &[]);
    for i in 0..files {
        let (group, dir) = (i / FILES_PER_DIRECTORY / 16, i / FILES_PER_DIRECTORY);
        if i.is_multiple_of(FILES_PER_DIRECTORY * 16) {
            entry(&mut out, &format!("src/g{group}/"), b'5', 0o755, "", &[]);
        }
        if i.is_multiple_of(FILES_PER_DIRECTORY) {
            entry(&mut out, &format!("src/g{group}/d{dir}/"), b'5', 0o755, "", &[]);
            let link = format!("src/g{group}/d{dir}/first.rs");
            entry(&mut out, &link, b'2', 0o777, &format!("f{i}.rs"), &[]);
        }
        let len = rng.log_uniform(200, 64 << 10) as usize;
        let mode = if i.is_multiple_of(50) { 0o755 } else { 0o644 };
        let name = format!("src/g{group}/d{dir}/f{i}.rs");
        entry(&mut out, &name, b'0', mode, "", &content[..len]);
    }
    // Two empty blocks end an archive.
    out.resize(out.len() + 2 * BLOCK, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tar_lists_every_file_directory_and_link() {
        use std::io::Write;
        let archive = source_tree_archive(50, 1);
        let child = std::process::Command::new("tar")
            .args(["-t", "-v", "-f", "-"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            eprintln!("skipped: no tar");
            return;
        };
        let mut pipe = child.stdin.take().expect("piped");
        let feeder = std::thread::spawn(move || pipe.write_all(&archive));
        let out = child.wait_with_output().expect("ends");
        feeder.join().expect("joined").expect("all was read");
        assert!(out.status.success());
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let of_kind = |kind: char| text.lines().filter(|l| l.starts_with(kind)).count();
        assert_eq!((of_kind('-'), of_kind('d'), of_kind('l')), (50, 5, 3), "{text}");
    }
}
