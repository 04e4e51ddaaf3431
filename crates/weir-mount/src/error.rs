//! Why a volume cannot be mounted or unmounted, in words for people.

use std::fmt;
use std::io;

use thiserror::Error;

/// A mount that did not come about, or ended badly.
#[derive(Debug, Error)]
pub enum MountError {
    /// The kernel has no FUSE, or this container no device for it.
    #[error(
        "/dev/fuse is missing: load the module (modprobe fuse), or give the container the device"
    )]
    NoFuse,
    /// The device is there and cannot be opened.
    #[error("cannot open /dev/fuse ({0}): run as root, or ask for access to the device")]
    FuseDevice(#[source] io::Error),
    /// An ordinary user needs the helper.
    #[error("fusermount3 is missing: install fuse3, or mount as root")]
    NoHelper,
    /// The helper refused.
    #[error("fusermount3 refused: {0}")]
    Helper(String),
    /// The directory cannot be mounted on.
    #[error("{0}")]
    Directory(String),
    /// A name with a zero byte.
    #[error("the volume's name cannot be passed to the kernel")]
    Name,
    /// The kernel refused.
    #[error("the kernel refused the mount: {0}")]
    Mount(#[source] io::Error),
    /// The connection failed.
    #[error("the connection to the kernel failed: {0}")]
    Session(#[source] io::Error),
    /// The engine.
    #[error(transparent)]
    Volume(#[from] weir::Error),
}

/// A process that keeps a mount busy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Process id.
    pub pid: u32,
    /// Command name.
    pub name: String,
}

impl fmt::Display for User {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (pid {})", self.name, self.pid)
    }
}

/// A mount that cannot be taken off.
#[derive(Debug, Error)]
pub enum UnmountError {
    /// Someone uses it.
    #[error("busy: {}", users(.0))]
    Busy(Vec<User>),
    /// Nothing is mounted there.
    #[error("not mounted")]
    NotMounted,
    /// It is there, at this directory, and cannot be reached.
    #[error("{0} is covered by another mount: unmount that first")]
    Covered(String),
    /// Anything else.
    #[error("{0}")]
    Io(#[source] io::Error),
}

fn users(users: &[User]) -> String {
    const SHOWN: usize = 5;
    if users.is_empty() {
        return "in use by a process that cannot be seen from here".to_owned();
    }
    let shown: Vec<String> = users.iter().take(SHOWN).map(User::to_string).collect();
    let more = users.len().saturating_sub(SHOWN);
    let tail = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("in use by {}{tail}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_mount_names_its_users_but_not_hundreds() {
        let many = (1..=9).map(|pid| User { pid, name: "sh".to_owned() }).collect();
        let text = UnmountError::Busy(many).to_string();
        assert!(text.starts_with("busy: in use by sh (pid 1), "), "{text}");
        assert!(text.ends_with("and 4 more"), "{text}");
    }
}
