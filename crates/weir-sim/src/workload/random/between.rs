//! Operations that come between those of a random workload: ways to open, to hold and to hand over, attributes that have to be there or not, and
//! space that is allocated and given back.

use weir::{AllocateMode, OpenFlags, SyncRangeFlags, XattrMode};

use super::{Generator, NAMES};
use crate::op::{HandOver, Op, Target};

impl Generator<'_> {
    /// One of them, or a few.
    pub(super) fn come_between(&mut self) {
        let writer = self.between.below(u64::from(self.shape.writers)) as u8;
        let name = NAMES[self.between.index(NAMES.len())];
        let path = format!("/w{writer}/{name}");
        match self.between.below(12) {
            0..=2 => self.open_somehow(path, writer),
            3 => self.hold(path, writer),
            4..=5 => self.attribute(path),
            6..=7 => self.hand_over(path),
            8 => self.without_a_name(path, writer),
            _ => self.space(&path),
        }
    }

    fn open_somehow(&mut self, path: String, slot: u8) {
        let kind = self.between.below(32);
        let has = |bit: u64| kind & bit > 0;
        let flags = OpenFlags {
            write: has(1) || has(2),
            create: has(4),
            exclusive: has(8) && has(16),
            truncate: self.between.one_in(4),
            data_sync: self.between.one_in(3),
            permissions: 0o640,
        };
        self.push(Op::OpenWith { path, slot, flags });
        let (offset, length) = (self.between.below(20_000), 1 + self.between.below(9000));
        let tag = 1 + self.ops.len() as u32;
        self.push(Op::Write { target: Target::Slot(slot), offset, length, tag });
    }

    fn hold(&mut self, path: String, slot: u8) {
        let ino = self.model.resolve(&path).ok();
        let inode = ino.and_then(|ino| self.model.inode(ino));
        if inode.is_some_and(|inode| inode.entries().is_none()) {
            self.push(Op::Hold { path, slot });
        }
    }

    fn attribute(&mut self, path: String) {
        let name = format!("user.{}", NAMES[self.between.index(NAMES.len())]);
        let length = self.between.below(300);
        let mode = if self.between.one_in(2) { XattrMode::Create } else { XattrMode::Replace };
        let tag = 1 + self.ops.len() as u32;
        self.push(Op::SetXattr { path, name, length, tag, mode });
    }

    fn hand_over(&mut self, path: String) {
        let kind = self.between.below(16);
        let flags = SyncRangeFlags {
            wait_before: kind & 1 > 0,
            write: kind & 2 > 0,
            wait_after: kind & 4 > 0,
            nowait: kind & 8 > 0,
        };
        let start = self.between.below(50_000);
        let range = start..start + 1 + self.between.below(100_000);
        self.push(Op::HandOver { target: Target::Path(path), range, how: HandOver::Flags(flags) });
    }

    /// A file without a name is written here and there, cut in pieces, and gets a name.
    fn without_a_name(&mut self, path: String, slot: u8) {
        let target = || Target::Slot(slot);
        self.push(Op::TmpFile { dir: format!("/w{slot}"), slot });
        for page in 0..2 + self.between.below(4) {
            let (offset, tag) = (page * 12_288, 1 + self.ops.len() as u32);
            self.push(Op::Write { target: target(), offset, length: 5000, tag });
        }
        if self.between.one_in(2) {
            self.push(Op::Writeback);
        }
        let offset = self.between.below(30_000);
        let mode = AllocateMode::PunchHole;
        self.push(Op::Allocate { target: target(), mode, offset, length: 10_000 });
        let size = self.between.below(20_000);
        self.push(Op::Truncate { target: target(), size });
        self.push(Op::LinkSlot { slot, path });
    }

    fn space(&mut self, path: &str) {
        let target = || Target::Path(path.to_owned());
        let size = self.size(&target());
        let offset = match self.between.below(3) {
            0 => 0,
            1 => size,
            _ => self.between.below(size + 20_000),
        };
        let length = 1 + self.between.below(30_000);
        let mode = AllocateMode::KeepSize;
        self.push(Op::Allocate { target: target(), mode, offset, length });
        match self.between.below(4) {
            0 => self.push(Op::Truncate { target: target(), size }),
            1 => {
                let (offset, tag) = (offset + 3000, 1 + self.ops.len() as u32);
                self.push(Op::Write { target: target(), offset, length: 3000, tag });
            }
            _ => {}
        }
    }
}
