//! Standard streams that were closed when the program began (`>&-`).
//!
//! The standard library opens `/dev/null` in their place before `main`, so that no file of the program gets their numbers. What is
//! written there would be lost without a word, and what is read there looks like an empty file. So the program itself notes, before that
//! happens, which of them there are: see `main.rs`.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::failure::Failure;

/// Standard output.
pub const OUTPUT: u8 = 1;
/// How many standard streams there are: 0, 1 and 2.
const STREAMS: u8 = 3;

/// A bit for each stream that was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Notes the streams of which `is_closed` says so. Called before anything else, the standard library's own beginning included.
pub fn note_closed(is_closed: impl Fn(i32) -> bool) {
    let closed = (0..STREAMS).filter(|&stream| is_closed(i32::from(stream)));
    let bits = closed.fold(0, |bits, stream| bits | 1 << stream);
    CLOSED.store(bits, Ordering::Relaxed);
}

/// Whether this stream was closed when the program began.
pub fn was_closed(stream: u8) -> bool {
    CLOSED.load(Ordering::Relaxed) >> stream & 1 != 0
}

/// An error for a path that leads to a stream which was closed.
pub fn check_open(path: &Path) -> Result<(), Failure> {
    match stream_of(path).filter(|&stream| was_closed(stream)) {
        None => Ok(()),
        Some(_) => Err(Failure::host(path, &io::Error::from_raw_os_error(libc::EBADF))),
    }
}

/// The standard stream that a path names as that.
fn stream_of(path: &Path) -> Option<u8> {
    let path = path.to_str()?;
    let named = ["/dev/stdin", "/dev/stdout", "/dev/stderr"].iter().position(|name| *name == path);
    let numbered = || {
        let dirs = ["/dev/fd/", "/proc/self/fd/"];
        dirs.iter().find_map(|dir| path.strip_prefix(dir))?.parse().ok()
    };
    named.map(|stream| stream as u8).or_else(numbered).filter(|&stream| stream < STREAMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_known_by_the_names_that_it_has() {
        for (path, stream) in [
            ("/dev/stdin", Some(0)),
            ("/dev/stdout", Some(1)),
            ("/dev/fd/2", Some(2)),
            ("/proc/self/fd/0", Some(0)),
            ("/proc/self/fd/3", None),
            ("/dev/fd/x", None),
            ("/dev/stdoutx", None),
            ("stdin", None),
        ] {
            assert_eq!(stream_of(Path::new(path)), stream, "{path}");
        }
    }
}
