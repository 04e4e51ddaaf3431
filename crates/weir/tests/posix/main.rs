//! The details that POSIX (and Linux, where it goes further) prescribes, one by one.

#[path = "../common/mod.rs"]
mod common;

mod attributes;
mod errors;
mod names;

use common::*;
use weir::*;

const ROOT: u64 = Volume::ROOT;

fn mkdir(volume: &Volume, dir: u64, name: &[u8]) -> Attr {
    volume.make(dir, name, &NewInode::new(FileType::Directory, 0o755)).expect("mkdir")
}

fn mkfile(volume: &Volume, dir: u64, name: &[u8]) -> Attr {
    volume.make(dir, name, &NewInode::new(FileType::Regular, 0o644)).expect("create")
}

fn timed_volume(atime: AtimePolicy) -> (Volume, std::sync::Arc<HandClock>) {
    let clock = HandClock::at(1_000);
    let options = VolumeOptions { clock: clock.clone(), atime, ..manual(4 * MIB) };
    (open(&formatted(32 * MIB, 0), options), clock)
}
