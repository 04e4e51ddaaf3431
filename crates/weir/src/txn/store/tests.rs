//! What look-ups find through the layers, and in how many steps.

use super::*;
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::format::BLOCK_BYTES_U64;
use crate::sync::{Turn, take_turns};
use crate::txn::checkpoint::Phase;
use crate::txn::volume_with_a_file;
use crate::{AllocateMode, BackgroundWork};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;

const INODE: u64 = 7;

thread_local! {
    /// Keys that were stepped over.
    pub static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    /// The most at a time, of those that ascend.
    pub static MOST_STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn delta_of(changes: &[(u64, bool)]) -> Delta {
    let mut delta = Delta::default();
    for &(offset, is_put) in changes {
        let value = [offset as u8];
        delta.set(Key::extent(INODE, offset), is_put.then_some(&value[..]));
    }
    delta
}

fn changes() -> impl Strategy<Value = Vec<(u64, bool)>> {
    prop::collection::vec((0..24_u64, any::<bool>()), 0..12)
}

proptest! {
    #[test]
    fn the_greatest_is_what_the_newest_layer_leaves(
        running in changes(),
        frozen in prop::option::of(changes()),
        in_tree in prop::collection::btree_set(0..24_u64, 0..12),
        (from, to) in (0..24_u64, 0..24_u64),
    ) {
        let mut model: BTreeMap<u64, bool> = in_tree.iter().map(|at| (*at, false)).collect();
        for &(offset, is_put) in frozen.iter().flatten().chain(&running) {
            if is_put {
                model.insert(offset, true);
            } else {
                model.remove(&offset);
            }
        }
        let state = State {
            running: delta_of(&running),
            frozen: frozen.map(|changes| Arc::new(delta_of(&changes))),
            tree: TreeRoot::default(),
            next_inode: 0,
            inode_count: 0,
            new_directories: NewDirectories::new(0),
        };
        let (first, last) = (Key::extent(INODE, from), Key::extent(INODE, to));
        let in_range = in_tree.iter().rev().filter(|at| (from..=to).contains(*at));
        let in_range = in_range.map(|at| (Key::extent(INODE, *at), *at));
        let mut left = usize::MAX;
        let found = state.greatest(in_range, (first, last), &mut left);
        let found = found.map(|(key, value)| {
            let (says, is_changed) = match value {
                Ok(bytes) => (u64::from(bytes[0]), true),
                Err(offset) => (offset, false),
            };
            assert_eq!(key, Key::extent(INODE, says));
            (says, is_changed)
        });
        let expected = model.iter().rev().find(|(at, _)| (from..=to).contains(*at));
        prop_assert_eq!(found, expected.map(|(at, is_changed)| (*at, *is_changed)));
    }
}

#[test]
fn a_listing_steps_over_few_removed_names_at_a_time_and_misses_none_that_is_there() {
    const NAMES: u64 = 5000;
    let (volume, _) = volume_with_a_file();
    volume.create_dir("/dir", 0o755).expect("make");
    let name = |number: u64| format!("/dir/{number}");
    for number in 0..NAMES {
        volume.open_file(name(number), crate::OpenFlags::CREATE).expect("create");
        if number % 700 > 0 {
            volume.remove_file(name(number)).expect("remove");
        }
    }
    MOST_STEPS.set(0);
    let listed = volume.read_dir("/dir").expect("list");
    let mut found: Vec<u64> = listed
        .iter()
        .map(|entry| String::from_utf8_lossy(&entry.name).parse().expect("a number"))
        .collect();
    found.sort_unstable();
    assert_eq!(found, (0..NAMES).step_by(700).collect::<Vec<_>>());
    assert_eq!(MOST_STEPS.get(), MOST_HIDDEN);
}

/// A file of so many extents of one block, each behind a hole of one, all of them in the tree.
fn volume_with_extents(count: u64) -> (crate::Volume, crate::File) {
    let (volume, file) = volume_with_a_file();
    for number in 0..count {
        file.write_at(number * 2 * 4096, &[1; 4096]).expect("write");
        if number % 500 == 0 {
            volume.checkpoint().expect("checkpoint");
        }
    }
    volume.checkpoint().expect("checkpoint");
    (volume, file)
}

#[test]
fn a_look_up_behind_what_was_cut_steps_over_it_once() {
    const EXTENTS: u64 = 4000;
    let (_volume, file) = volume_with_extents(EXTENTS);
    file.truncate(4096).expect("cut");
    let store = &file.engine().store;
    let before = STEPS.get();
    let found = store.get_le(Key::extent(file.ino(), u64::MAX), Key::extent(file.ino(), 0));
    assert_eq!(found.expect("look up").map(|(key, _)| key), Some(Key::extent(file.ino(), 0)));
    let steps = STEPS.get() - before;
    assert!(steps >= EXTENTS - 1, "{steps}: the cut is not in the tree yet");
    assert!(steps <= 2 * EXTENTS, "{steps}");
}

/// Where a new extent is best placed is worth a short look, and not one over all that was ever cut.
#[test]
fn who_allocates_behind_what_was_cut_does_not_step_over_all_of_it() {
    const EXTENTS: u64 = 4000;
    /// Farther from what was cut than an extent is long.
    const FAR_BLOCKS: u64 = 100_000;
    let (_volume, file) = volume_with_extents(EXTENTS);
    file.truncate(4096).expect("cut");
    let before = STEPS.get();
    for place in FAR_BLOCKS..FAR_BLOCKS + 10 {
        file.allocate(AllocateMode::Extend, place * 4096, 4096).expect("allocate");
        file.allocate(AllocateMode::PunchHole, place * 4096, 4096).expect("punch");
    }
    let steps = STEPS.get() - before;
    assert!(steps < 10 * 2 * MOST_HIDDEN as u64, "{steps}");
}

/// Where extents may be long, as they are once something was allocated, and for all that is walked through.
#[test]
fn a_walk_through_many_holes_steps_over_each_a_few_times() {
    const RUNS: u64 = 1500;
    let (_volume, file) = volume_with_extents(RUNS);
    let size = file.size();
    let steps = |what: &str, work: &dyn Fn()| {
        let before = STEPS.get();
        work();
        let steps = STEPS.get() - before;
        assert!((RUNS / 2..16 * RUNS).contains(&steps), "{what}: {steps}");
    };
    let allocate = |mode, length| file.allocate(mode, 0, length).expect("allocate");
    steps("to fill holes", &|| allocate(AllocateMode::KeepSize, size));
    steps("to cut", &|| allocate(AllocateMode::PunchHole, size - 4096));
    steps("to find data", &|| assert_eq!(file.seek_data(0), Ok(size - 4096)));
    steps("to fill what was cut", &|| allocate(AllocateMode::KeepSize, size));
}

/// Whoever commits waits for who steps over what came and went since the last checkpoint.
#[test]
fn what_was_cut_is_stepped_over_a_part_at_a_time() {
    const RUNS: u64 = 1500;
    let (volume, file) = volume_with_a_file();
    let scatter = |first: u64| {
        for number in 0..RUNS {
            file.write_at((first + number * 2) * 4096, &[1; 4096]).expect("write");
        }
        while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
    };
    scatter(0);
    let size = file.size();
    let allocate = |mode, length| file.allocate(mode, 0, length).expect("allocate");
    MOST_STEPS.set(0);
    allocate(AllocateMode::PunchHole, size - 4096);
    assert_eq!(file.seek_data(0), Ok(size - 4096));
    allocate(AllocateMode::KeepSize, size);
    allocate(AllocateMode::PunchHole, size);
    assert_eq!(file.seek_data(0), Err(crate::Error::NoSuchExtent));
    scatter(1);
    let mut batch = volume.batch();
    batch.truncate(&file, 4096).expect("truncate");
    batch.write_at(&file, 8192, &vec![1; 4 << 20]).expect("write");
    batch.commit().expect("commit");
    assert_eq!(file.seek_data(0), Ok(8192));
    scatter(2000);
    file.truncate(0).expect("cut");
    let number = file.ino();
    drop(file);
    volume.remove_file("/f").expect("remove");
    while volume.background_step(BackgroundWork::Purge).expect("purge") {}
    assert_eq!(volume.getattr(number).err(), Some(crate::Error::NotFound));
    assert_eq!(MOST_STEPS.get(), MOST_HIDDEN);
}

#[test]
fn a_look_up_ends_however_often_checkpoints_outrun_it() {
    let (volume, file) = volume_with_a_file();
    let engine = file.engine();
    let store = &engine.store;
    let checkpoint = || {
        file.write_at(0, b"a change").expect("write");
        file.fsync().expect("fsync");
        while volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
    };
    let (mut outrun, before) = (0, store.tree().generation);
    std::thread::scope(|scope| {
        let found = store.settle(|| {
            let root = store.tree();
            if store.publishing.try_write().is_some() {
                outrun += 1;
                checkpoint();
                return (root, Ok(Attempt::Outrun));
            }
            // The next one gets as far as its superblock, and not further.
            scope.spawn(checkpoint);
            let is_current = || store.tree().generation == root.generation;
            while engine.checkpointer.phase() != Phase::Completed && is_current() {
                std::thread::yield_now();
            }
            (root, Ok(Attempt::Answer(is_current())))
        });
        assert_eq!((found, outrun), (Ok(true), OUTRUN));
    });
    assert_eq!(store.tree().generation, before + u64::from(OUTRUN) + 1);
}

type Happening = Box<dyn FnOnce()>;

thread_local! {
    /// What is to happen, and before which of the calling thread's locks.
    static HAPPENS: RefCell<Option<(Happening, u32)>> = const { RefCell::new(None) };
}

fn come_to(turn: Turn) {
    assert_eq!(turn, Turn::Locks, "nobody has what it wants");
    match HAPPENS.take() {
        Some((happening, 0)) => happening(),
        Some((happening, locks)) => HAPPENS.set(Some((happening, locks - 1))),
        None => {}
    }
}

/// What a look-up finds of inode `number` around `place`.
type LookUp = fn(&Store, u64, u64) -> Result<Vec<(Key, Vec<u8>)>>;

fn plain(items: impl IntoIterator<Item = Item>) -> Vec<(Key, Vec<u8>)> {
    items.into_iter().map(|(key, value)| (key, value.to_vec())).collect()
}

const LOOK_UPS: [(&str, LookUp); 5] = [
    ("get", |store, number, place| {
        let keys = [Key::extent(number, place), Key::extent(number, place + 1)];
        let mut found = Vec::new();
        for key in keys {
            found.extend(store.get(key)?.map(|value| (key, value)));
        }
        Ok(plain(found))
    }),
    ("get_le", |store, number, place| {
        let below = |place| store.get_le(Key::extent(number, place), Key::extent(number, 0));
        Ok(plain(below(place)?.into_iter().chain(below(place + 1)?)))
    }),
    ("scan", |store, number, place| {
        let mut found = Vec::new();
        let (from, to) = (Key::extent(number, place), Key::extent(number, place + 1));
        store.scan(from, to, &mut |key, value| {
            found.push((key, value.to_vec()));
            Ok(true)
        })?;
        Ok(found)
    }),
    ("collect a few", |store, number, place| {
        let range = (Key::extent(number, place), Key::extent(number, place + 1));
        Ok(plain(store.collect(range.0, range.1, 10)?.0))
    }),
    ("collect all", |store, number, _| {
        let range = (Key::extent(number, 0), Key::extent(number, u64::MAX));
        Ok(plain(store.collect(range.0, range.1, usize::MAX)?.0))
    }),
];

/// Wherever a look-up is, the next tree may be published, with what the deltas had, and the blocks of the one that it reads be used for something
/// else.
#[test]
fn a_look_up_that_a_checkpoint_outruns_finds_what_is_there() {
    const EXTENTS: u64 = 1000;
    let (_volume, file) = volume_with_extents(EXTENTS);
    let (engine, number) = (file.engine().clone(), file.ino());
    let mut place = 0;
    for (what, look_up) in LOOK_UPS {
        for locks in 0.. {
            // One extent goes, and another comes.
            place += 2;
            let change = |mode, place| file.allocate(mode, place * BLOCK_BYTES_U64, 4096);
            change(AllocateMode::PunchHole, place).expect("punch");
            change(AllocateMode::KeepSize, place + 1).expect("allocate");
            let expected = look_up(&engine.store, number, place).expect("look up");
            assert!(!expected.iter().any(|(key, _)| key.offset == place), "{what}");
            assert!(expected.iter().any(|(key, _)| key.offset == place + 1), "{what}");
            let outruns = engine.clone();
            let happening = move || {
                let root_block = outruns.store.tree().block;
                while outruns.checkpoint_step().expect("checkpoint") {}
                let (offset, other) = (root_block * BLOCK_BYTES_U64, AlignedBuf::zeroed(4096));
                let written = outruns.device.write(offset, &[&other], IoClass::Writeback, false);
                written.expect("write");
            };
            HAPPENS.set(Some((Box::new(happening), locks)));
            take_turns(Some(come_to));
            let found = look_up(&engine.store, number, place);
            take_turns(None);
            let is_over = HAPPENS.take().is_some();
            assert!(found == Ok(expected), "{what}: outrun before its lock {locks}");
            if is_over {
                assert!(locks > 1, "{what} was never outrun");
                break;
            }
        }
    }
}
