//! The FUSE protocol as it travels through a ring: a request is a fixed header, the operation's own header (at most 128 bytes), and
//! the rest (names, bytes to write) in the payload; an answer is the payload alone, with its length beside it.
//!
//! Pure. Everything is little pieces copied from and to byte slices with checked ends: what the kernel sends is not trusted to be long
//! enough.

use weir::{Attr, FileType, Timestamp};

use crate::errno::Errno;

/// `struct fuse_uring_req_header`: in/out header, operation header, `struct fuse_uring_ent_in_out`.
pub const HEADER_BYTES: usize = 288;
const OPERATION_AT: usize = 128;
const COMMIT_ID_AT: usize = 264;
const PAYLOAD_LENGTH_AT: usize = 272;

/// `FUSE_IO_URING_CMD_REGISTER`.
pub const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`.
pub const COMMIT_AND_FETCH: u32 = 2;

/// `struct fuse_uring_cmd_req` in the command's 80 bytes.
pub fn command(commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

/// What a command has ended with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Its entry holds a request.
    Request,
    /// The connection has ended.
    Ended,
    /// The kernel did not take it: an entry without a request, or an answer that nobody gets.
    Refused,
}

/// From a completion's result.
pub const fn fate(result: i32) -> Fate {
    match -result {
        ..=0 => Fate::Request,
        libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED | libc::ENODEV => Fate::Ended,
        _ => Fate::Refused,
    }
}

/// Operations (`enum fuse_opcode`).
pub mod op {
    #![allow(missing_docs)]
    pub const LOOKUP: u32 = 1;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const READDIR: u32 = 28;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const IOCTL: u32 = 39;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
}

/// The first fields of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// One of [`op`], or something newer.
    pub opcode: u32,
    /// Answered with the answer.
    pub unique: u64,
    /// The inode it is about.
    pub ino: u64,
    /// Who asks.
    pub uid: u32,
    /// Who asks.
    pub gid: u32,
    /// Who asks: a thread; 0 when the kernel itself does, or somebody whom this process cannot see.
    pub pid: u32,
    /// Names the entry to the kernel.
    pub commit_id: u64,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

/// Fields of a slice, by offset; beyond its end is [`Errno::EIO`].
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], Errno> {
        let bytes = at.checked_add(N).and_then(|end| self.0.get(at..end)).ok_or(Errno::EIO)?;
        bytes.try_into().map_err(|_| Errno::EIO)
    }
    /// A 32-bit number.
    pub fn u32(self, at: usize) -> Result<u32, Errno> {
        self.array(at).map(u32::from_ne_bytes)
    }
    /// A 64-bit number.
    pub fn u64(self, at: usize) -> Result<u64, Errno> {
        self.array(at).map(u64::from_ne_bytes)
    }
    /// The first string, and what is behind its NUL.
    pub fn string(self) -> Result<(&'a [u8], Fields<'a>), Errno> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Errno::EIO)?;
        Ok((&self.0[..end], Fields(&self.0[end + 1..])))
    }
}

/// The request in a header.
pub fn request(header: &[u8]) -> Result<Request, Errno> {
    let fields = Fields(header);
    Ok(Request {
        opcode: fields.u32(4)?,
        unique: fields.u64(8)?,
        ino: fields.u64(16)?,
        uid: fields.u32(24)?,
        gid: fields.u32(28)?,
        pid: fields.u32(32)?,
        commit_id: fields.u64(COMMIT_ID_AT)?,
        payload_bytes: fields.u32(PAYLOAD_LENGTH_AT)? as usize,
    })
}

/// The operation's own header.
pub fn operation(header: &[u8]) -> Fields<'_> {
    Fields(header.get(OPERATION_AT..OPERATION_AT + 128).unwrap_or_default())
}

/// Makes `header` that of an answer with `payload_bytes` of payload.
pub fn answer(header: &mut [u8], unique: u64, result: Result<usize, Errno>) {
    assert_eq!(header.len(), HEADER_BYTES);
    let (error, payload_bytes) = match result {
        Ok(payload_bytes) => (0, payload_bytes as u32),
        Err(error) => (-error.raw(), 0),
    };
    header[0..4].copy_from_slice(&(16 + payload_bytes).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header[PAYLOAD_LENGTH_AT..PAYLOAD_LENGTH_AT + 4].copy_from_slice(&payload_bytes.to_ne_bytes());
}

/// Writes an answer's payload, field by field.
#[derive(Debug)]
pub struct Writer<'a> {
    space: &'a mut [u8],
    used: usize,
}

impl<'a> Writer<'a> {
    /// An empty one.
    pub fn new(space: &'a mut [u8]) -> Self {
        Self { space, used: 0 }
    }
    /// Bytes so far.
    pub fn used(&self) -> usize {
        self.used
    }
    /// Appends `bytes`: all, or [`Errno::ERANGE`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let end = self.used + bytes.len();
        self.space.get_mut(self.used..end).ok_or(Errno::ERANGE)?.copy_from_slice(bytes);
        self.used = end;
        Ok(())
    }
    /// Appends 32-bit numbers.
    pub fn u32s(&mut self, numbers: &[u32]) -> Result<(), Errno> {
        numbers.iter().try_for_each(|number| self.bytes(&number.to_ne_bytes()))
    }
    /// Appends 64-bit numbers.
    pub fn u64s(&mut self, numbers: &[u64]) -> Result<(), Errno> {
        numbers.iter().try_for_each(|number| self.bytes(&number.to_ne_bytes()))
    }

    /// `struct fuse_attr`.
    fn attr(&mut self, attr: &Attr) -> Result<(), Errno> {
        let times = [attr.atime, attr.mtime, attr.ctime];
        self.u64s(&[attr.ino, attr.size_bytes, attr.blocks.saturating_mul(8)])?;
        self.u64s(&times.map(|time| time.seconds as u64))?;
        self.u32s(&times.map(|time| time.nanoseconds))?;
        let mode = attr.file_type.mode_bits() | attr.permissions & 0o7777;
        self.u32s(&[mode, attr.links, attr.uid, attr.gid, attr.rdev, BLOCK_BYTES, 0])
    }

    /// `struct fuse_attr_out`.
    pub fn attr_out(&mut self, attr: &Attr, valid_seconds: u64) -> Result<(), Errno> {
        self.u64s(&[valid_seconds, 0])?;
        self.attr(attr)
    }

    /// `struct fuse_entry_out`.
    pub fn entry_out(&mut self, attr: &Attr, valid_seconds: u64) -> Result<(), Errno> {
        self.u64s(&[attr.ino, 0, valid_seconds, valid_seconds, 0])?;
        self.attr(attr)
    }

    /// `struct fuse_entry_out` of a name that does not exist.
    pub fn no_entry(&mut self, valid_seconds: u64) -> Result<(), Errno> {
        self.u64s(&[0, 0, valid_seconds, valid_seconds, 0])?;
        self.bytes(&[0; 88])
    }

    /// `struct fuse_open_out`.
    pub fn open_out(&mut self, handle: u64, flags: u32) -> Result<(), Errno> {
        self.u64s(&[handle])?;
        self.u32s(&[flags, 0])
    }

    /// `struct fuse_statx_out`: all the basic attributes, and the birth time.
    pub fn statx_out(&mut self, attr: &Attr, valid_seconds: u64) -> Result<(), Errno> {
        const BASIC_AND_BIRTH: u32 = 0x7FF | 0x800;
        self.u64s(&[valid_seconds, 0, 0, 0])?;
        self.u32s(&[BASIC_AND_BIRTH, BLOCK_BYTES])?;
        self.u64s(&[0])?;
        self.u32s(&[attr.links, attr.uid, attr.gid])?;
        let mode = attr.file_type.mode_bits() | attr.permissions & 0o7777;
        self.bytes(&(mode as u16).to_ne_bytes())?;
        self.bytes(&[0; 2])?;
        self.u64s(&[attr.ino, attr.size_bytes, attr.blocks.saturating_mul(8), 0])?;
        for time in [attr.atime, attr.btime, attr.ctime, attr.mtime] {
            self.statx_time(time)?;
        }
        let (major, minor) = (attr.rdev >> 8 & 0xFFF, attr.rdev & 0xFF | attr.rdev >> 12 & !0xFF);
        self.u32s(&[major, minor, 0, 0])?;
        self.bytes(&[0; 14 * 8])
    }

    fn statx_time(&mut self, time: Timestamp) -> Result<(), Errno> {
        self.u64s(&[time.seconds as u64])?;
        self.u32s(&[time.nanoseconds, 0])
    }

    /// `struct fuse_dirent` if it fits into the rest up to `limit` bytes. `plus`: behind a `struct fuse_entry_out` with these attributes,
    /// for so many seconds; without attributes it is zeros, and the kernel takes the name alone.
    pub fn dirent(
        &mut self,
        limit: usize,
        entry: (u64, u64, FileType, &[u8]),
        plus: Option<(Option<&Attr>, u64)>,
    ) -> Result<(), Errno> {
        let (ino, cookie, file_type, name) = entry;
        let before = if plus.is_some() { ENTRY_OUT_BYTES } else { 0 };
        let length = (24 + name.len()).next_multiple_of(8);
        if self.used + before + length > limit.min(self.space.len()) {
            return Err(Errno::ERANGE);
        }
        match plus {
            Some((Some(attr), valid_seconds)) => self.entry_out(attr, valid_seconds)?,
            Some((None, _)) => self.bytes(&[0; ENTRY_OUT_BYTES])?,
            None => {}
        }
        self.u64s(&[ino, cookie])?;
        self.u32s(&[name.len() as u32, file_type.dirent_type().into()])?;
        self.bytes(name)?;
        self.bytes(&[0; 8][..length - 24 - name.len()])
    }
}

const BLOCK_BYTES: u32 = 4096;
/// `struct fuse_entry_out`.
const ENTRY_OUT_BYTES: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_command_is_not_taken_for_the_end_of_the_connection() {
        assert_eq!(fate(0), Fate::Request);
        for error in [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED, libc::ENODEV] {
            assert_eq!(fate(-error), Fate::Ended);
        }
        for error in [libc::EINVAL, libc::ENOENT, libc::EIO, libc::ENOMEM, libc::EFAULT] {
            assert_eq!(fate(-error), Fate::Refused);
        }
    }

    fn attr() -> Attr {
        Attr {
            ino: 0x1122,
            file_type: FileType::Regular,
            permissions: 0o644,
            links: 1,
            uid: 2,
            gid: 3,
            size_bytes: 4,
            blocks: 5,
            rdev: 0,
            atime: Timestamp { seconds: -1, nanoseconds: 6 },
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: Timestamp::default(),
            change_counter: 0,
        }
    }

    #[test]
    fn structures_are_as_long_as_the_kernels() {
        let length = |write: &dyn Fn(&mut Writer<'_>) -> Result<(), Errno>| {
            let mut space = [0; 512];
            let mut writer = Writer::new(&mut space);
            write(&mut writer).unwrap();
            writer.used()
        };
        assert_eq!(length(&|to| to.attr_out(&attr(), 1)), 104);
        assert_eq!(length(&|to| to.entry_out(&attr(), 1)), 128);
        assert_eq!(length(&|to| to.no_entry(1)), 128);
        assert_eq!(length(&|to| to.open_out(1, 2)), 16);
        assert_eq!(length(&|to| to.statx_out(&attr(), 1)), 288);
        let entry = (1, 2, FileType::Regular, &b"123456789"[..]);
        assert_eq!(length(&|to| to.dirent(512, entry, None)), 40);
        assert_eq!(length(&|to| to.dirent(512, entry, Some((Some(&attr()), 1)))), 168);
        assert_eq!(length(&|to| to.dirent(512, entry, Some((None, 1)))), 168);
    }

    #[test]
    fn a_directory_entry_that_does_not_fit_leaves_nothing_of_it() {
        let mut space = [0; 64];
        let mut writer = Writer::new(&mut space);
        let entry = (1, 2, FileType::Regular, &b"name"[..]);
        writer.dirent(64, entry, None).unwrap();
        writer.dirent(64, entry, None).unwrap();
        assert_eq!(writer.dirent(64, entry, None), Err(Errno::ERANGE));
        assert_eq!(writer.used(), 64);
        let mut writer = Writer::new(&mut space);
        assert_eq!(writer.dirent(31, entry, None), Err(Errno::ERANGE));
        assert_eq!(writer.used(), 0);
    }

    #[test]
    fn a_short_header_and_a_string_without_an_end_are_errors() {
        for length in 0..HEADER_BYTES {
            let header = vec![1; length];
            assert_eq!(request(&header).is_ok(), length >= PAYLOAD_LENGTH_AT + 4);
            assert_eq!(operation(&header).u64(0).is_ok(), length >= OPERATION_AT + 128);
        }
        assert!(Fields(b"name").string().is_err());
        let (first, rest) = Fields(b"a\0bc\0").string().unwrap();
        assert_eq!((first, rest.string().unwrap().0), (&b"a"[..], &b"bc"[..]));
    }

    #[test]
    fn an_answer_carries_the_error_or_the_length_and_never_both() {
        let mut header = [0xFF; HEADER_BYTES];
        answer(&mut header, 7, Ok(100));
        assert_eq!(Fields(&header).u32(0), Ok(116));
        assert_eq!(Fields(&header).u32(4), Ok(0));
        assert_eq!(Fields(&header).u64(8), Ok(7));
        assert_eq!(Fields(&header).u32(PAYLOAD_LENGTH_AT), Ok(100));
        answer(&mut header, 7, Err(Errno::ENOENT));
        assert_eq!(Fields(&header).u32(4), Ok(-2_i32 as u32));
        assert_eq!(Fields(&header).u32(PAYLOAD_LENGTH_AT), Ok(0));
    }
}
