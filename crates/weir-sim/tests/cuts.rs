//! Cuts of files with many extents, which take several operations: crashes between those, whoever else goes on meanwhile; and what
//! is left to be done when one of them fails.

mod common;

use common::{MANY_EXTENTS, after_a_cut, amid_a_cut};
use weir::{AllocateMode, BackgroundWork, RenameMode, Timestamp};
use weir_sim::explore::Tally;
use weir_sim::op::{Commit, Op, Sync, Target};

const PAGE: u64 = 4096;

fn at(path: &str) -> Target {
    Target::Path(path.to_owned())
}

fn truncate(target: Target, size: u64) -> Op {
    Op::Truncate { target, size }
}

fn write(path: &str, offset: u64, length: u64, tag: u32) -> Op {
    Op::Write { target: at(path), offset, length, tag }
}

fn allocate(mode: AllocateMode, offset: u64, length: u64) -> Op {
    Op::Allocate { target: at("/a"), mode, offset, length }
}

fn unlink(path: &str) -> Op {
    Op::Unlink { path: path.to_owned() }
}

fn rename(from: &str, to: &str) -> Op {
    Op::Rename { from: from.to_owned(), to: to.to_owned(), mode: RenameMode::Replace }
}

fn batch(parts: impl IntoIterator<Item = Op>) -> Op {
    Op::Batch { parts: parts.into_iter().collect(), commit: Commit::Relaxed }
}

#[track_caller]
fn survives((tally, result): (Tally, Result<(), weir_sim::explore::Failure>)) -> Tally {
    assert!(result.is_ok(), "{:#?}", result.err());
    tally
}

/// Between two operations of each, somebody makes everything durable.
#[test]
fn what_takes_several_operations_is_done_or_not_after_a_crash_between_them() {
    let outers = [
        truncate(at("/a"), 0),
        truncate(at("/a"), 2 * PAGE + 100),
        unlink("/a"),
        rename("/b", "/a"),
        allocate(AllocateMode::PunchHole, PAGE / 2, 9 * PAGE),
        allocate(AllocateMode::ZeroRange, PAGE / 2, 9 * PAGE),
        allocate(AllocateMode::CollapseRange, PAGE, 7 * PAGE),
        allocate(AllocateMode::InsertRange, 2 * PAGE, 3 * PAGE),
        batch([write("/a", 100, 100, 3), truncate(at("/a"), 5000), unlink("/b")]),
    ];
    let mut all = Tally::default();
    for outer in outers {
        let tally = survives(amid_a_cut(&outer, &[Op::Sync(Sync::All)], 2));
        assert!(tally.overlapped > 10, "{outer}: {tally:?}");
        println!("{outer}: {} states", tally.states);
        all.add(&tally);
    }
    assert!(all.states > 1000, "{all:?}");
}

/// The orphan item of a cut that goes on is also that of a file without a name: whoever takes a name away meanwhile, or gives one.
#[test]
fn a_file_whose_names_change_amid_a_cut_is_cut_after_a_crash() {
    let tmpfile = [Op::TmpFile { dir: "/".to_owned(), slot: 2 }];
    let inners = [
        vec![unlink("/a")],
        vec![rename("/b", "/a")],
        vec![unlink("/a"), Op::Close { slot: 1 }],
        vec![batch([unlink("/a"), write("/b", 0, 100, 3)])],
        tmpfile.to_vec(),
    ];
    for inner in inners {
        let sync = Op::Sync(Sync::All);
        let inner: Vec<Op> = inner.into_iter().chain([sync]).collect();
        let tally = survives(amid_a_cut(&truncate(at("/a"), 100), &inner, 2));
        assert!(tally.overlapped > 10, "{tally:?}");
    }
}

/// Operations of a cut fail behind the first, which has given the file its new size: the rest is owed. Whatever happens to the file
/// then does not bring back what was cut off, at no device call.
#[test]
fn a_cut_that_is_owed_is_done_before_anything_shows_what_was_cut_off() {
    let (size, whole) = (10 * PAGE + 1000, 2 * MANY_EXTENTS * PAGE);
    let read = || Op::Read { target: at("/a"), offset: 0, length: whole };
    let sync = || Op::Sync(Sync::All);
    let purge = || Op::Background { work: BackgroundWork::Purge, steps: 10 };
    let times = |seconds| {
        let time = Timestamp { seconds, nanoseconds: 7 };
        Op::Utimens { path: "/a".to_owned(), atime: time, mtime: time }
    };
    let stories: Vec<Vec<Op>> = vec![
        vec![truncate(at("/a"), whole), read(), sync()],
        vec![sync(), write("/a", whole, 100, 7), read(), Op::Sync(Sync::Data(at("/a")))],
        vec![Op::Append { target: at("/a"), length: 9000, tag: 7 }, sync(), purge(), sync()],
        vec![allocate(AllocateMode::Extend, 30 * PAGE, 9 * PAGE), read(), sync()],
        vec![allocate(AllocateMode::ZeroRange, 30 * PAGE + 5, 9 * PAGE), read(), sync()],
        // What is left of it lies near the old end.
        vec![allocate(AllocateMode::Extend, whole - 9 * PAGE, 9 * PAGE), read(), sync()],
        vec![allocate(AllocateMode::ZeroRange, whole - 5, 9 * PAGE), read(), sync()],
        vec![allocate(AllocateMode::InsertRange, 4 * PAGE, 2 * PAGE), read(), sync()],
        vec![allocate(AllocateMode::CollapseRange, 4 * PAGE, 2 * PAGE), sync(), read()],
        vec![batch([write("/a", whole, 5000, 7), truncate(at("/a"), whole)]), read(), sync()],
        vec![sync(), unlink("/a"), sync(), purge(), sync()],
        // What is done later of it moves no time.
        vec![times(3), purge(), sync(), times(5), Op::Checkpoint, purge(), sync()],
        vec![truncate(at("/a"), PAGE), Op::Barrier { target: None }, sync(), purge(), read()],
    ];
    for story in stories {
        let mut owed = 0;
        // Opening the volume takes the reads before.
        for (after, times) in (12..17).flat_map(|after| [(after, 1), (after, 3)]) {
            let found = after_a_cut(size, (after, times), Some(8), story.iter().cloned());
            let tally = survives(found);
            // It has happened, and a read of it has failed all the same.
            owed += u64::from(tally.operations > 0 && tally.faults > 0 && tally.refused == 0);
        }
        assert!(owed > 0, "{story:?}");
    }
}
