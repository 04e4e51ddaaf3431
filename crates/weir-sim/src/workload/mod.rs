//! Where the operations come from: every short sequence ([`exhaustive`]), long random ones
//! ([`random`]), and such with a misbehaving disk ([`faults`]).

pub mod exhaustive;
pub mod faults;
pub mod random;

use crate::model::{Ino, Model};
use crate::op::{Hold, Op, Sync, Target};
use crate::rng::Rng;

/// Tags from here on are for operations after a recovery.
const FOLLOWUP_TAG: u32 = 900_000;

/// What to do with a volume after a recovery: extend files (what lies beyond the old end must read as
/// zeros), change some, make room, sync, and change a little more that may be lost.
pub fn followup(model: &Model, rng: &mut Rng) -> Vec<Op> {
    let mut ops = Vec::new();
    let paths = model.paths();
    let size_of = |ino: Ino| model.inode(ino).and_then(|inode| inode.data()).map(|data| data.size);
    let files: Vec<(&String, u64)> =
        paths.iter().filter_map(|(path, ino)| Some((path, size_of(*ino)?))).collect();
    for _ in 0..2.min(files.len()) {
        let (path, size) = files[rng.index(files.len())];
        if size > 1 << 30 {
            continue;
        }
        let target = Target::Path(path.clone());
        let growth = 1 + rng.below(9000);
        ops.push(Op::Truncate { target: target.clone(), size: size + growth });
        ops.push(Op::Read { target, offset: size.saturating_sub(100), length: growth + 100 });
    }
    if let Some((path, size)) = rng.pick(&files).filter(|(_, size)| *size < 1 << 30) {
        let target = Target::Path((*path).clone());
        let tag = FOLLOWUP_TAG + rng.below(1000) as u32;
        let (offset, length) = (rng.below(size + 1), 1 + rng.below(12_000));
        ops.push(Op::Write { target: target.clone(), offset, length, tag });
        match rng.below(3) {
            0 => ops.push(Op::Sync(Sync::Data(target))),
            1 => {
                let range = offset..offset + length;
                let sync = Sync::Data(target);
                ops.push(Op::Submit { sync, range, ticket: 1, hold: Hold::Await });
            }
            _ => {}
        }
    }
    let fresh = format!("/followup{}", rng.below(1000));
    ops.push(Op::Create { path: fresh.clone(), permissions: 0o640 });
    let target = Target::Path(fresh.clone());
    let tag = FOLLOWUP_TAG + 1000;
    ops.push(Op::Append { target: target.clone(), length: 1 + rng.below(6000), tag });
    if let Some((path, _)) = rng.pick(&files) {
        ops.push(Op::Unlink { path: (*path).clone() });
    }
    ops.push(match rng.below(4) {
        0 => Op::Sync(Sync::Full(target.clone())),
        1 => Op::Checkpoint,
        _ => Op::Sync(Sync::All),
    });
    ops.push(Op::Append { target, length: 5000, tag: FOLLOWUP_TAG + 1001 });
    if rng.one_in(2) {
        ops.push(Op::Writeback);
    }
    ops.push(Op::Mkdir { path: format!("{fresh}.d") });
    ops.push(Op::Sync(Sync::Full(Target::Path(format!("{fresh}.d")))));
    ops
}
