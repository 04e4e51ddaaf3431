//! Batches as programs stage them through `WEIR_IOC_BATCH_*`: the steps on the wire, and what is staged by whom.
//!
//! A program gives its steps in portions of what an ioctl can carry; nothing looks at the volume until the commit
//! (`crate::weir_fs`). Decoding is pure. A portion is taken whole or not at all.
//!
//! A batch belongs to the open file that it was begun on: no other descriptor can add to it, and it is dropped when the file's
//! last descriptor is closed, which a program that dies does too.
//!
//! Lock: the table's lock is a leaf.

use std::collections::HashMap;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicUsize, Ordering};

use weir::sync::Mutex;
use weir::{FileType, RenameMode, SetAttr, SetTime, Timestamp};

use crate::errno::Errno;
use crate::ops::{Handle, OpResult};

/// `struct weir_batch_step`. A name of `name_bytes` and data of `data_bytes` follow, then zeros up to a multiple of 8.
#[repr(C)]
struct WireStep {
    op: u16,
    name_bytes: u16,
    data_bytes: u32,
    ino: u64,
    dir: u64,
    value: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    flags: u32,
}

/// `struct weir_batch_times`: the data of a step that sets times.
#[repr(C)]
struct WireTimes {
    atime_seconds: i64,
    mtime_seconds: i64,
    atime_nanoseconds: u32,
    mtime_nanoseconds: u32,
}

/// Bytes of a step before its name.
pub const STEP_BYTES: usize = size_of::<WireStep>();

const _: () = {
    assert!(size_of::<WireStep>() == 48 && offset_of!(WireStep, mode) == 32);
    assert!(size_of::<WireTimes>() == 24 && offset_of!(WireTimes, atime_nanoseconds) == 16);
};

/// Kinds of steps.
pub mod op {
    /// `WEIR_BATCH_WRITE`.
    pub const WRITE: u16 = 1;
    /// `WEIR_BATCH_TRUNCATE`.
    pub const TRUNCATE: u16 = 2;
    /// `WEIR_BATCH_MAKE`.
    pub const MAKE: u16 = 3;
    /// `WEIR_BATCH_SYMLINK`.
    pub const SYMLINK: u16 = 4;
    /// `WEIR_BATCH_LINK`.
    pub const LINK: u16 = 5;
    /// `WEIR_BATCH_UNLINK`.
    pub const UNLINK: u16 = 6;
    /// `WEIR_BATCH_RMDIR`.
    pub const RMDIR: u16 = 7;
    /// `WEIR_BATCH_RENAME`.
    pub const RENAME: u16 = 8;
    /// `WEIR_BATCH_SETATTR`.
    pub const SETATTR: u16 = 9;
}

/// `WEIR_BATCH_MADE(0)`: a number with this bit stands for an inode that the batch makes.
pub const MADE: u64 = 1 << 63;

/// `WEIR_BATCH_SET_MODE` and so on: what a step changes of the attributes.
pub mod set {
    /// Permission bits.
    pub const MODE: u32 = 1;
    /// Owner.
    pub const UID: u32 = 2;
    /// Group.
    pub const GID: u32 = 4;
    /// Access time, from the data.
    pub const ATIME: u32 = 8;
    /// Modification time, from the data.
    pub const MTIME: u32 = 16;
    /// Access time: now.
    pub const ATIME_NOW: u32 = 32;
    /// Modification time: now.
    pub const MTIME_NOW: u32 = 64;
}

/// Bytes staged at a time, in all batches of a mount together.
pub const MAX_STAGED_BYTES: usize = 64 << 20;
/// Batches staged at a time.
pub const MAX_BATCHES: usize = 256;
/// What a step costs in memory beyond its bytes.
const STEP_COST_BYTES: usize = 128;
const MAX_NAME_BYTES: usize = 255;

/// An inode that a step is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// By number.
    Ino(u64),
    /// The one that the batch's `n`th step of those that make one makes.
    Made(usize),
}

/// One step, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Step {
    Write { ino: Node, offset: u64, data: Vec<u8> },
    Truncate { ino: Node, size_bytes: u64 },
    Make { dir: Node, name: Vec<u8>, new: weir::NewInode },
    Symlink { dir: Node, name: Vec<u8>, target: Vec<u8>, uid: u32, gid: u32 },
    Link { ino: Node, dir: Node, name: Vec<u8> },
    Unlink { dir: Node, name: Vec<u8> },
    Rmdir { dir: Node, name: Vec<u8> },
    Rename { dir: Node, name: Vec<u8>, new_dir: Node, new_name: Vec<u8>, mode: RenameMode },
    SetAttr { ino: Node, change: SetAttr },
}

impl Step {
    const fn makes(&self) -> bool {
        matches!(self, Self::Make { .. } | Self::Symlink { .. })
    }
}

/// A step's fields as they came; each is taken at most once, and what nobody took must be zero.
struct Raw<'a> {
    ino: u64,
    dir: u64,
    value: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    flags: u32,
    name: &'a [u8],
    data: &'a [u8],
    /// Inodes made by the steps before.
    made: usize,
}

fn field<const N: usize>(bytes: &[u8], offset: usize) -> Result<[u8; N], Errno> {
    let field = bytes.get(offset..offset + N).ok_or(Errno::EINVAL)?;
    field.try_into().map_err(|_| Errno::EINVAL)
}

fn word(bytes: &[u8], offset: usize) -> Result<u64, Errno> {
    field(bytes, offset).map(u64::from_ne_bytes)
}

fn half(bytes: &[u8], offset: usize) -> Result<u32, Errno> {
    field(bytes, offset).map(u32::from_ne_bytes)
}

fn node(number: u64, made: usize) -> Result<Node, Errno> {
    if number & MADE == 0 {
        return if number == 0 { Err(Errno::EINVAL) } else { Ok(Node::Ino(number)) };
    }
    let index = usize::try_from(number & !MADE).map_err(|_| Errno::EINVAL)?;
    if index < made { Ok(Node::Made(index)) } else { Err(Errno::EINVAL) }
}

fn checked_name(name: &[u8]) -> Result<Vec<u8>, Errno> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Errno::from_raw(libc::ENAMETOOLONG));
    }
    let is_name = !name.is_empty() && name != b"." && name != b"..";
    if is_name && !name.iter().any(|byte| matches!(byte, b'/' | 0)) {
        Ok(name.to_vec())
    } else {
        Err(Errno::EINVAL)
    }
}

impl Raw<'_> {
    fn take_ino(&mut self) -> Result<Node, Errno> {
        node(std::mem::take(&mut self.ino), self.made)
    }
    fn take_dir(&mut self) -> Result<Node, Errno> {
        node(std::mem::take(&mut self.dir), self.made)
    }
    fn take_name(&mut self) -> Result<Vec<u8>, Errno> {
        checked_name(std::mem::take(&mut self.name))
    }
    fn is_used_up(&self) -> bool {
        self.ino | self.dir | self.value == 0
            && self.mode | self.uid | self.gid | self.flags == 0
            && self.name.is_empty()
            && self.data.is_empty()
    }

    fn take_new(&mut self) -> Result<weir::NewInode, Errno> {
        let mode = std::mem::take(&mut self.mode);
        let file_type = FileType::from_mode(mode).ok_or(Errno::EINVAL)?;
        let rdev = u32::try_from(std::mem::take(&mut self.value)).map_err(|_| Errno::EINVAL)?;
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        if file_type == FileType::Symlink || (rdev != 0 && !is_device) {
            return Err(Errno::EINVAL);
        }
        let (uid, gid) = (std::mem::take(&mut self.uid), std::mem::take(&mut self.gid));
        Ok(weir::NewInode { file_type, permissions: mode & 0o7777, uid, gid, rdev })
    }

    fn take_mode_of_rename(&mut self) -> Result<RenameMode, Errno> {
        match std::mem::take(&mut self.flags) {
            0 => Ok(RenameMode::Replace),
            libc::RENAME_NOREPLACE => Ok(RenameMode::NoReplace),
            libc::RENAME_EXCHANGE => Ok(RenameMode::Exchange),
            _ => Err(Errno::EINVAL),
        }
    }

    fn take_time(
        &self,
        flags: u32,
        (given, now): (u32, u32),
        (seconds, nanoseconds): (usize, usize),
    ) -> Result<Option<SetTime>, Errno> {
        match (flags & given != 0, flags & now != 0) {
            (false, false) => Ok(None),
            (false, true) => Ok(Some(SetTime::Now)),
            (true, true) => Err(Errno::EINVAL),
            (true, false) => {
                let seconds = word(self.data, seconds)? as i64;
                let nanoseconds = half(self.data, nanoseconds)?;
                if nanoseconds >= 1_000_000_000 {
                    return Err(Errno::EINVAL);
                }
                Ok(Some(SetTime::At(Timestamp { seconds, nanoseconds })))
            }
        }
    }

    fn take_change(&mut self) -> Result<SetAttr, Errno> {
        let flags = std::mem::take(&mut self.flags);
        let times = flags & (set::ATIME | set::MTIME) != 0;
        if flags == 0 || flags >= set::MTIME_NOW << 1 {
            return Err(Errno::EINVAL);
        }
        if self.data.len() != if times { size_of::<WireTimes>() } else { 0 } {
            return Err(Errno::EINVAL);
        }
        let given = |flag: u32, value: &mut u32| {
            let value = if flags & flag == 0 { return None } else { std::mem::take(value) };
            Some(value)
        };
        let permissions = given(set::MODE, &mut self.mode);
        if permissions.is_some_and(|permissions| permissions & !0o7777 != 0) {
            return Err(Errno::EINVAL);
        }
        let uid = given(set::UID, &mut self.uid);
        let gid = given(set::GID, &mut self.gid);
        let places = |seconds, nanoseconds| (seconds, nanoseconds);
        let atime = self.take_time(
            flags,
            (set::ATIME, set::ATIME_NOW),
            places(offset_of!(WireTimes, atime_seconds), offset_of!(WireTimes, atime_nanoseconds)),
        )?;
        let mtime = self.take_time(
            flags,
            (set::MTIME, set::MTIME_NOW),
            places(offset_of!(WireTimes, mtime_seconds), offset_of!(WireTimes, mtime_nanoseconds)),
        )?;
        self.data = &[];
        // As chown(2) does for everybody.
        let kill_suid_sgid = permissions.is_none() && (uid.is_some() || gid.is_some());
        Ok(SetAttr { permissions, uid, gid, size_bytes: None, atime, mtime, kill_suid_sgid })
    }

    fn step(&mut self, op: u16) -> Result<Step, Errno> {
        Ok(match op {
            op::WRITE => Step::Write {
                ino: self.take_ino()?,
                offset: std::mem::take(&mut self.value),
                data: std::mem::take(&mut self.data).to_vec(),
            },
            op::TRUNCATE => Step::Truncate {
                ino: self.take_ino()?,
                size_bytes: std::mem::take(&mut self.value),
            },
            op::MAKE => {
                Step::Make { dir: self.take_dir()?, name: self.take_name()?, new: self.take_new()? }
            }
            op::SYMLINK => Step::Symlink {
                dir: self.take_dir()?,
                name: self.take_name()?,
                target: std::mem::take(&mut self.data).to_vec(),
                uid: std::mem::take(&mut self.uid),
                gid: std::mem::take(&mut self.gid),
            },
            op::LINK => {
                Step::Link { ino: self.take_ino()?, dir: self.take_dir()?, name: self.take_name()? }
            }
            op::UNLINK => Step::Unlink { dir: self.take_dir()?, name: self.take_name()? },
            op::RMDIR => Step::Rmdir { dir: self.take_dir()?, name: self.take_name()? },
            op::RENAME => Step::Rename {
                dir: self.take_dir()?,
                name: self.take_name()?,
                new_dir: node(std::mem::take(&mut self.value), self.made)?,
                new_name: checked_name(std::mem::take(&mut self.data))?,
                mode: self.take_mode_of_rename()?,
            },
            op::SETATTR => Step::SetAttr { ino: self.take_ino()?, change: self.take_change()? },
            _ => return Err(Errno::EINVAL),
        })
    }
}

/// The steps in `bytes`; `made` inodes were made by the batch before. Any error refuses all of them.
pub fn decode_steps(mut bytes: &[u8], made: usize) -> Result<Vec<Step>, Errno> {
    let mut steps = Vec::new();
    let mut made = made;
    while !bytes.is_empty() {
        let name_bytes: [u8; 2] = field(bytes, offset_of!(WireStep, name_bytes))?;
        let name_bytes = usize::from(u16::from_ne_bytes(name_bytes));
        let data_bytes = half(bytes, offset_of!(WireStep, data_bytes))? as usize;
        let data_at = STEP_BYTES + name_bytes;
        let end = data_at.checked_add(data_bytes).ok_or(Errno::EINVAL)?;
        let padded = end.checked_next_multiple_of(8).ok_or(Errno::EINVAL)?;
        let (step, rest) = bytes.split_at_checked(padded).ok_or(Errno::EINVAL)?;
        if step[end..].iter().any(|byte| *byte != 0) {
            return Err(Errno::EINVAL);
        }
        let mut raw = Raw {
            ino: word(step, offset_of!(WireStep, ino))?,
            dir: word(step, offset_of!(WireStep, dir))?,
            value: word(step, offset_of!(WireStep, value))?,
            mode: half(step, offset_of!(WireStep, mode))?,
            uid: half(step, offset_of!(WireStep, uid))?,
            gid: half(step, offset_of!(WireStep, gid))?,
            flags: half(step, offset_of!(WireStep, flags))?,
            name: &step[STEP_BYTES..data_at],
            data: &step[data_at..end],
            made,
        };
        let step = raw.step(u16::from_ne_bytes(field(step, offset_of!(WireStep, op))?))?;
        if !raw.is_used_up() {
            return Err(Errno::EINVAL);
        }
        made += usize::from(step.makes());
        steps.push(step);
        bytes = rest;
    }
    Ok(steps)
}

/// What a program encodes: see [`crate::client::Batch`].
#[derive(Debug, Clone, Copy, Default)]
pub struct StepFields<'a> {
    /// One of [`op`].
    pub op: u16,
    /// Inode.
    pub ino: u64,
    /// Directory of the name.
    pub dir: u64,
    /// Offset, size, device number or new directory.
    pub value: u64,
    /// Type and permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Of `renameat2`, or [`set`].
    pub flags: u32,
    /// A name.
    pub name: &'a [u8],
    /// Bytes to write, the target of a link, or a new name.
    pub data: &'a [u8],
}

impl StepFields<'_> {
    /// Bytes on the wire.
    pub fn wire_bytes(&self) -> usize {
        (STEP_BYTES + self.name.len() + self.data.len()).next_multiple_of(8)
    }

    /// Appends the step to `buffer`. A name of 64 KiB or more is cut short, which makes it a wrong one.
    pub fn encode(&self, buffer: &mut Vec<u8>) {
        let end = buffer.len() + self.wire_bytes();
        let name = &self.name[..self.name.len().min(usize::from(u16::MAX))];
        buffer.extend_from_slice(&self.op.to_ne_bytes());
        buffer.extend_from_slice(&(name.len() as u16).to_ne_bytes());
        buffer.extend_from_slice(&(self.data.len() as u32).to_ne_bytes());
        for word in [self.ino, self.dir, self.value] {
            buffer.extend_from_slice(&word.to_ne_bytes());
        }
        for half in [self.mode, self.uid, self.gid, self.flags] {
            buffer.extend_from_slice(&half.to_ne_bytes());
        }
        buffer.extend_from_slice(name);
        buffer.extend_from_slice(self.data);
        buffer.resize(end, 0);
    }
}

/// What a program has staged.
#[derive(Debug, Default)]
pub struct Staged {
    /// In the order in which they came.
    pub steps: Vec<Step>,
    made: usize,
    cost_bytes: usize,
}

#[derive(Default)]
struct Table {
    batches: HashMap<u64, (Handle, Staged)>,
    last: u64,
    cost_bytes: usize,
}

/// All staged batches of a mount.
#[derive(Default)]
pub struct Batches {
    table: Mutex<Table>,
    /// As many as the table has: a close need not lock it when there are none.
    count: AtomicUsize,
}

impl Batches {
    /// A new one, of this open file.
    pub fn begin(&self, handle: Handle) -> OpResult<u64> {
        let mut table = self.table.lock();
        if table.batches.len() >= MAX_BATCHES {
            return Err(Errno::ENOMEM);
        }
        table.last += 1;
        let id = table.last;
        table.batches.insert(id, (handle, Staged::default()));
        self.count.store(table.batches.len(), Ordering::Relaxed);
        Ok(id)
    }

    /// Adds steps: all of them or, with an error, none.
    pub fn add(&self, handle: Handle, id: u64, bytes: &[u8]) -> OpResult<()> {
        let mut table = self.table.lock();
        let Table { batches, cost_bytes: total, .. } = &mut *table;
        let staged = match batches.get_mut(&id) {
            Some((owner, staged)) if *owner == handle => staged,
            _ => return Err(Errno::EINVAL),
        };
        let steps = decode_steps(bytes, staged.made)?;
        let cost = bytes.len() + steps.len() * STEP_COST_BYTES;
        if *total + cost > MAX_STAGED_BYTES {
            return Err(Errno::ENOMEM);
        }
        *total += cost;
        staged.cost_bytes += cost;
        staged.made += steps.iter().filter(|step| step.makes()).count();
        staged.steps.extend(steps);
        Ok(())
    }

    /// Takes it out, for the commit or to be dropped.
    pub fn take(&self, handle: Handle, id: u64) -> OpResult<Staged> {
        let mut table = self.table.lock();
        if table.batches.get(&id).is_none_or(|(owner, _)| *owner != handle) {
            return Err(Errno::EINVAL);
        }
        let (_, staged) = table.batches.remove(&id).ok_or(Errno::EINVAL)?;
        table.cost_bytes -= staged.cost_bytes;
        self.count.store(table.batches.len(), Ordering::Relaxed);
        Ok(staged)
    }

    /// The file was closed: what it has staged is dropped.
    pub fn closed(&self, handle: Handle) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut table = self.table.lock();
        let ended: Vec<_> = table.batches.extract_if(|_, (owner, _)| *owner == handle).collect();
        for (_, (_, staged)) in &ended {
            table.cost_bytes -= staged.cost_bytes;
        }
        self.count.store(table.batches.len(), Ordering::Relaxed);
        drop(table);
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(steps: &[StepFields<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for step in steps {
            step.encode(&mut bytes);
        }
        bytes
    }

    fn make(name: &[u8]) -> StepFields<'_> {
        StepFields { op: op::MAKE, dir: 1, mode: 0o100_644, name, ..StepFields::default() }
    }

    const WRITE: StepFields<'_> = StepFields {
        op: op::WRITE,
        ino: 7,
        dir: 0,
        value: 9,
        mode: 0,
        uid: 0,
        gid: 0,
        flags: 0,
        name: b"",
        data: b"bytes",
    };

    #[test]
    fn steps_of_all_kinds_arrive_as_they_were_encoded() {
        let times =
            [1_u64.to_ne_bytes(), 2_u64.to_ne_bytes(), 0x0000_0004_0000_0003_u64.to_le_bytes()];
        let bytes = wire(&[
            make(b"new"),
            WRITE,
            StepFields { ino: MADE, ..WRITE },
            StepFields { op: op::TRUNCATE, ino: 7, value: 3, ..StepFields::default() },
            StepFields {
                op: op::SYMLINK,
                dir: 1,
                name: b"s",
                data: b"to",
                uid: 5,
                ..StepFields::default()
            },
            StepFields { op: op::LINK, ino: MADE, dir: 2, name: b"l", ..StepFields::default() },
            StepFields { op: op::UNLINK, dir: 2, name: b"u", ..StepFields::default() },
            StepFields { op: op::RMDIR, dir: 2, name: b"d", ..StepFields::default() },
            StepFields {
                op: op::RENAME,
                dir: 2,
                name: b"a",
                value: 3,
                data: b"b",
                flags: 1,
                ..StepFields::default()
            },
            StepFields {
                op: op::SETATTR,
                ino: 7,
                mode: 0o4755,
                flags: set::MODE | set::ATIME | set::MTIME,
                data: times.as_flattened(),
                ..StepFields::default()
            },
        ]);
        let steps = decode_steps(&bytes, 0).unwrap();
        assert_eq!(steps.len(), 10);
        assert_eq!(
            steps[2],
            Step::Write { ino: Node::Made(0), offset: 9, data: b"bytes".to_vec() }
        );
        let Step::Rename { new_dir, new_name, mode, .. } = &steps[8] else {
            panic!("{:?}", steps[8])
        };
        assert_eq!(
            (*new_dir, new_name.as_slice(), *mode),
            (Node::Ino(3), &b"b"[..], RenameMode::NoReplace)
        );
        let Step::SetAttr { change, .. } = &steps[9] else { panic!("{:?}", steps[9]) };
        assert_eq!(change.permissions, Some(0o4755));
        let at = |seconds, nanoseconds| Some(SetTime::At(Timestamp { seconds, nanoseconds }));
        assert_eq!((change.atime, change.mtime), (at(1, 3), at(2, 4)));
    }

    #[test]
    fn whatever_a_step_does_not_use_must_be_zero() {
        for wrong in [
            StepFields { name: b"n", ..WRITE },
            StepFields { dir: 1, ..WRITE },
            StepFields { gid: 1, ..WRITE },
            StepFields { flags: 1, ..WRITE },
            StepFields { data: b"x", ..make(b"n") },
            StepFields { ino: 1, ..make(b"n") },
            StepFields { value: 1, ..make(b"n") },
            StepFields { mode: 0o644, ..make(b"n") },
            StepFields { mode: 0o120_777, ..make(b"n") },
            StepFields { op: 0, ..WRITE },
            StepFields { op: 10, ..WRITE },
            StepFields { ino: 0, ..WRITE },
            StepFields { op: op::SETATTR, ino: 1, ..StepFields::default() },
            StepFields { op: op::SETATTR, ino: 1, flags: 128, ..StepFields::default() },
            StepFields {
                op: op::SETATTR,
                ino: 1,
                flags: set::MODE,
                mode: 0o10_000,
                ..StepFields::default()
            },
            StepFields { op: op::SETATTR, ino: 1, flags: set::ATIME, ..StepFields::default() },
            StepFields {
                op: op::SETATTR,
                ino: 1,
                flags: set::UID,
                mode: 1,
                ..StepFields::default()
            },
            StepFields {
                op: op::RENAME,
                dir: 1,
                value: 1,
                name: b"a",
                data: b"b",
                flags: 3,
                ..StepFields::default()
            },
        ] {
            assert_eq!(decode_steps(&wire(&[wrong]), 0), Err(Errno::EINVAL), "{wrong:?}");
        }
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        for name in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            assert_eq!(decode_steps(&wire(&[make(name)]), 0), Err(Errno::EINVAL), "{name:?}");
        }
        let long = [b'n'; 256];
        assert_eq!(decode_steps(&wire(&[make(&long)]), 0).unwrap_err().raw(), libc::ENAMETOOLONG);
        assert!(decode_steps(&wire(&[make(&long[..255])]), 0).is_ok());
    }

    #[test]
    fn an_inode_that_no_earlier_step_makes_is_refused() {
        let later = StepFields { ino: MADE | 1, ..WRITE };
        assert_eq!(decode_steps(&wire(&[make(b"a"), later]), 0), Err(Errno::EINVAL));
        assert!(decode_steps(&wire(&[make(b"a"), later]), 1).is_ok());
        let own = StepFields { dir: MADE, ..make(b"a") };
        assert_eq!(decode_steps(&wire(&[own]), 0), Err(Errno::EINVAL));
    }

    #[test]
    fn every_cut_and_every_changed_byte_of_the_encoding_is_an_answer_and_no_panic() {
        let bytes = wire(&[make(b"name"), StepFields { ino: MADE, ..WRITE }]);
        for end in 0..bytes.len() {
            let whole = end == 0 || end == make(b"name").wire_bytes();
            assert_eq!(decode_steps(&bytes[..end], 0).is_ok(), whole, "{end}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7F, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = decode_steps(&changed, 0);
            }
        }
    }

    #[test]
    fn a_batch_is_reached_through_its_own_file_only_and_ends_with_it() {
        let batches = Batches::default();
        let (mine, other) = (Handle(1), Handle(2));
        let id = batches.begin(mine).unwrap();
        assert_eq!(batches.add(other, id, &wire(&[WRITE])), Err(Errno::EINVAL));
        assert_eq!(batches.add(mine, id + 1, &wire(&[WRITE])), Err(Errno::EINVAL));
        batches.add(mine, id, &wire(&[WRITE])).unwrap();
        assert_eq!(batches.take(other, id).unwrap_err(), Errno::EINVAL);
        batches.closed(other);
        assert_eq!(batches.take(mine, id).unwrap().steps.len(), 1);
        assert_eq!(batches.take(mine, id).unwrap_err(), Errno::EINVAL);
        let id = batches.begin(mine).unwrap();
        batches.closed(mine);
        assert_eq!(batches.take(mine, id).unwrap_err(), Errno::EINVAL);
    }

    #[test]
    fn a_portion_with_a_wrong_step_adds_none_of_its_steps() {
        let batches = Batches::default();
        let id = batches.begin(Handle(1)).unwrap();
        let wrong = wire(&[make(b"a"), StepFields { op: 99, ..WRITE }]);
        assert_eq!(batches.add(Handle(1), id, &wrong), Err(Errno::EINVAL));
        assert_eq!(
            batches.add(Handle(1), id, &wire(&[StepFields { ino: MADE, ..WRITE }])),
            Err(Errno::EINVAL)
        );
        assert!(batches.take(Handle(1), id).unwrap().steps.is_empty());
    }

    #[test]
    fn what_is_staged_is_bounded_and_given_back() {
        let batches = Batches::default();
        let data = vec![1; 1 << 20];
        let portion = wire(&[StepFields { data: &data, ..WRITE }]);
        let id = batches.begin(Handle(1)).unwrap();
        let mut added = 0;
        while batches.add(Handle(1), id, &portion).is_ok() {
            added += 1;
        }
        assert_eq!(added, 63);
        batches.closed(Handle(1));
        let id = batches.begin(Handle(2)).unwrap();
        assert_eq!(batches.add(Handle(2), id, &portion), Ok(()));
        for _ in 1..MAX_BATCHES {
            batches.begin(Handle(2)).unwrap();
        }
        assert_eq!(batches.begin(Handle(2)), Err(Errno::ENOMEM));
    }

    #[test]
    fn what_was_staged_for_a_commit_or_aborted_makes_room_for_what_comes() {
        let batches = Batches::default();
        let data = vec![1; 1 << 20];
        let portion = wire(&[StepFields { data: &data, ..WRITE }]);
        // Of one file that stays open, more than there may be at a time.
        for _ in 0..2 * (MAX_STAGED_BYTES >> 20) {
            let id = batches.begin(Handle(1)).unwrap();
            assert_eq!(batches.add(Handle(1), id, &portion), Ok(()));
            assert_eq!(batches.take(Handle(1), id).unwrap().steps.len(), 1);
        }
    }
}
