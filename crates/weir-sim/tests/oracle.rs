//! The oracle accepts what a crash may leave, and nothing else: cases made by hand.

use std::sync::Arc;

use weir::{AllocateMode, Timestamp};
use weir_sim::image::Block;
use weir_sim::model::Model;
use weir_sim::model::compare::Strictness;
use weir_sim::model::found::{Found, FoundBody};
use weir_sim::model::history::{Durable, History};
use weir_sim::model::times::Span;
use weir_sim::op::{Op, Target};

fn create(path: &str) -> Op {
    Op::Create { path: path.to_owned(), permissions: 0o644 }
}

fn write(path: &str, offset: u64, length: u64, tag: u32) -> Op {
    Op::Write { target: Target::Path(path.to_owned()), offset, length, tag }
}

fn truncate(path: &str, size: u64) -> Op {
    Op::Truncate { target: Target::Path(path.to_owned()), size }
}

struct Run {
    history: History,
}

impl Run {
    fn new(ops: &[Op]) -> Self {
        let mut run = Self { history: History::new(Model::new()) };
        run.apply(ops);
        run
    }

    fn apply(&mut self, ops: &[Op]) {
        for op in ops {
            let mut next = Model::clone(self.history.now());
            next.apply(op, None).unwrap_or_else(|errno| panic!("{op}: errno {errno}"));
            self.history.push(Arc::new(next));
        }
    }

    fn fsync(&mut self, path: &str) {
        let ino = self.history.now().resolve(path).unwrap();
        self.history.acknowledge(&Durable::Inode { ino, data_only: false }, "fsync");
    }

    fn allows(&self, found: &Found) -> Result<u64, String> {
        let found = self.history.find(found, Strictness::CRASH);
        found.map(|model| model.step()).map_err(|mismatch| mismatch.lines.join("\n"))
    }
}

/// What a volume looks like on which exactly `ops` have survived.
fn found(ops: &[Op]) -> Found {
    let mut model = Model::new();
    for op in ops {
        model.apply(op, None).unwrap();
    }
    Found::from_model(&model)
}

fn file_of(found: &mut Found) -> &mut weir_sim::model::found::FoundNode {
    found.nodes.values_mut().find(|node| matches!(node.body, FoundBody::File(_))).unwrap()
}

#[test]
fn any_prefix_of_what_was_not_acknowledged_is_allowed() {
    let ops = [create("/a"), create("/b"), Op::Unlink { path: "/a".to_owned() }];
    let run = Run::new(&ops);
    for length in 0..=3 {
        assert_eq!(run.allows(&found(&ops[..length])), Ok(length as u64));
    }
    let text = run.allows(&found(&[create("/b")])).map(|step| assert_eq!(step, 3));
    assert!(text.is_ok(), "the same as after all three");
    let text = run.allows(&found(&[create("/c")])).unwrap_err();
    assert!(text.contains("unexpected entry \"c\""), "{text}");
}

#[test]
fn a_later_operation_without_an_earlier_one_is_no_prefix() {
    let run = Run::new(&[create("/a"), create("/b")]);
    assert!(run.allows(&found(&[create("/b")])).is_err());
}

#[test]
fn what_an_fsync_acknowledged_must_be_there_with_all_before() {
    let ops = [create("/a"), create("/b"), create("/c")];
    let mut run = Run::new(&ops);
    run.fsync("/b");
    // Both names are in the root; the file /b was last touched by the second operation.
    let text = run.allows(&found(&ops[..1])).unwrap_err();
    assert!(text.contains("acknowledged operation number 2 is lost"), "{text}");
    assert_eq!(run.allows(&found(&ops[..2])), Ok(2));
    run.fsync("/");
    assert!(run.allows(&found(&ops[..2])).is_err(), "the directory was touched by the third");
}

#[test]
fn synced_data_must_be_there_and_unsynced_data_may_be_page_by_page() {
    let mut run = Run::new(&[create("/a"), write("/a", 0, 8192, 1)]);
    assert!(run.allows(&found(&[create("/a")])).is_ok());
    run.fsync("/a");
    let text = run.allows(&found(&[create("/a")])).unwrap_err();
    assert!(text.contains("number 2 is lost"), "{text}");
    run.apply(&[write("/a", 0, 8192, 2)]);
    // The first page new, the second old.
    let mut mixed = found(&[create("/a"), write("/a", 0, 8192, 1), write("/a", 0, 4096, 2)]);
    assert!(run.allows(&mixed).is_ok());
    // Two versions within a page.
    let FoundBody::File(pages) = &mut file_of(&mut mixed).body else { panic!("a file") };
    let torn = pages[&1].with_sectors(&pages[&0], 0b1);
    pages.insert(1, torn);
    let text = run.allows(&mixed).unwrap_err();
    assert!(text.contains("page 1 holds") && text.contains("tag 2 of file block 0"), "{text}");
}

#[test]
fn cut_off_bytes_never_come_back() {
    let mut run = Run::new(&[create("/a"), write("/a", 0, 8192, 1)]);
    run.fsync("/a");
    run.apply(&[truncate("/a", 100), truncate("/a", 8192)]);
    let both = [create("/a"), write("/a", 0, 8192, 1), truncate("/a", 100), truncate("/a", 8192)];
    assert_eq!(run.allows(&found(&both)), Ok(4));
    let mut garbage = found(&both);
    let FoundBody::File(pages) = &mut file_of(&mut garbage).body else { panic!("a file") };
    let mut bytes = *pages[&0].bytes();
    bytes[200] = 1;
    pages.insert(0, Block::new(&bytes));
    assert!(run.allows(&garbage).is_err());
}

#[test]
fn sizes_are_old_or_new_or_a_whole_page_between() {
    let mut run = Run::new(&[create("/a"), write("/a", 0, 100, 1)]);
    run.fsync("/a");
    run.apply(&[write("/a", 100, 9000, 2)]);
    let of_size = |size: u64| {
        let whole = [create("/a"), write("/a", 0, 100, 1), write("/a", 100, 9000, 2)];
        let mut found = found(&whole);
        let node = file_of(&mut found);
        node.attr.size = size;
        if let FoundBody::File(pages) = &mut node.body {
            pages.retain(|index, _| index * 4096 < size);
        }
        let pages = size.div_ceil(4096);
        node.data = Some(std::iter::once(0..pages).collect());
        node.attr.blocks = pages;
        found
    };
    for (size, allowed) in [(100, true), (4096, true), (8192, true), (9100, true), (5000, false)] {
        assert_eq!(run.allows(&of_size(size)).is_ok(), allowed, "size {size}");
    }
}

#[test]
fn attributes_links_and_explicit_times_are_compared() {
    let link = Op::Link { from: "/a".to_owned(), to: "/b".to_owned() };
    let ops = [create("/a"), link];
    let mut run = Run::new(&ops);
    run.fsync("/b");
    assert!(run.allows(&found(&ops)).is_ok());
    // Two files instead of two names.
    assert!(run.allows(&found(&[create("/a"), create("/b")])).is_err());
    let mut wrong = found(&ops);
    file_of(&mut wrong).attr.links = 1;
    assert!(run.allows(&wrong).unwrap_err().contains("1 links, expected 2"));
    let mut wrong = found(&ops);
    file_of(&mut wrong).attr.uid = 5;
    assert!(run.allows(&wrong).is_err());
}

#[test]
fn a_sync_of_everything_leaves_no_choice() {
    let ops = [create("/a"), write("/a", 0, 5000, 1)];
    let mut run = Run::new(&ops);
    run.history.acknowledge(&Durable::All, "syncfs");
    assert_eq!(run.allows(&found(&ops)), Ok(2));
    assert!(run.allows(&found(&ops[..1])).is_err());
    run.apply(&[create("/b")]);
    assert!(run.allows(&found(&ops)).is_ok());
}

#[test]
fn what_was_allocated_is_there_and_what_was_written_holds_data() {
    let allocate = |mode| {
        let target = Target::Path("/a".to_owned());
        Op::Allocate { target, mode, offset: 8192, length: 8192 }
    };
    let ops = [create("/a"), write("/a", 0, 5000, 1), allocate(AllocateMode::KeepSize)];
    let mut run = Run::new(&ops);
    run.fsync("/a");
    let whole = found(&ops);
    assert_eq!(whole.nodes.values().map(|node| node.attr.blocks).max(), Some(4));
    assert_eq!(run.allows(&whole), Ok(3));
    let mut short = whole.clone();
    file_of(&mut short).attr.blocks = 3;
    assert!(run.allows(&short).unwrap_err().contains("3 blocks, expected 4"));
    let mut hole = whole.clone();
    file_of(&mut hole).data = Some(std::iter::once(0..1).collect());
    assert!(run.allows(&hole).unwrap_err().contains("page 1 is said to be a hole"));
    run.apply(&[truncate("/a", 9000)]);
    let mut written = found(&[&ops[..], &[truncate("/a", 9000)]].concat());
    file_of(&mut written).data = Some(std::iter::once(0..3).collect());
    assert!(run.allows(&written).unwrap_err().contains("page 2 is said to hold data"));
    run.apply(&[allocate(AllocateMode::PunchHole)]);
    run.fsync("/a");
    assert!(run.allows(&whole).is_err(), "the hole is durable");
}

#[test]
fn times_are_those_of_the_last_change_or_of_what_was_there_before_a_write() {
    let at = |seconds| Timestamp { seconds, nanoseconds: 5 };
    let mut run = Run { history: History::new(Model::new()) };
    for (second, op) in (1..).zip([create("/a"), write("/a", 0, 10, 1), write("/a", 0, 10, 2)]) {
        let mut next = Model::clone(run.history.now());
        next.set_clock(Span { first: at(second * 10), last: at(second * 10 + 2) });
        next.apply(&op, None).unwrap();
        run.history.push(Arc::new(next));
    }
    let of_time = |seconds| {
        let mut found = Found::from_model(run.history.now());
        let attr = &mut file_of(&mut found).attr;
        (attr.mtime, attr.ctime) = (at(seconds), at(seconds));
        found
    };
    let allowed = |run: &Run| -> Vec<i64> {
        (0..40).filter(|seconds| run.allows(&of_time(*seconds)).is_ok()).collect()
    };
    assert_eq!(allowed(&run), [10, 11, 12, 20, 21, 22, 30, 31, 32]);
    let ino = run.history.now().resolve("/a").unwrap();
    let mut synced = Run { history: run.history.clone() };
    synced.history.acknowledge(&Durable::Inode { ino, data_only: true }, "fdatasync");
    assert_eq!(allowed(&synced), [10, 11, 12, 20, 21, 22, 30, 31, 32]);
    synced.fsync("/a");
    assert_eq!(allowed(&synced), [30, 31, 32]);
}
