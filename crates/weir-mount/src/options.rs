//! Mount options: the `-o` list of a command line, parsed and checked.

use std::ffi::OsString;
use std::fmt;

/// What the transport negotiates with the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub struct TransportOptions {
    /// Threads that read requests; `None`: one per core, at least two.
    pub threads: Option<usize>,
    /// Largest write (and read) request.
    pub max_write_bytes: u32,
    /// Read-ahead and writeback requests the kernel may have in flight.
    pub max_background: u16,
    /// The kernel caches writes and sends them later in large pieces.
    pub writeback_cache: bool,
    /// What is written through a handle that made (or emptied) its file and is for writing only goes past the kernel's page cache: see
    /// [`TransportOptions::new_past_cache`].
    pub direct_new: bool,
    /// POSIX access control lists are enforced by the kernel and inherited by the server. Without, they can be neither read nor changed:
    /// a list that nobody enforces would promise what it does not hold.
    pub posix_acl: bool,
    /// There are extended attributes. Without, they can be neither read nor changed, and the kernel does not ask for `security.capability`
    /// when a file is first written: one round trip less for each new file.
    pub xattr: bool,
    /// Requests come over `io_uring` where the kernel offers it, or can be told to by this process.
    pub io_uring: bool,
}

impl TransportOptions {
    /// Whether the data of new files goes past the kernel's page cache. The cache of writes is for collecting them, so not with that.
    pub fn new_past_cache(&self) -> bool {
        self.direct_new && !self.writeback_cache
    }
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            threads: None,
            max_write_bytes: 1 << 20,
            max_background: 128,
            writeback_cache: false,
            direct_new: true,
            posix_acl: true,
            xattr: true,
            io_uring: true,
        }
    }
}

/// When reading a file through the mount changes its access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Atime {
    /// When it is older than the last change, or than a day.
    #[default]
    Relative,
    /// Never.
    Never,
    /// Always.
    Strict,
}

/// Everything a mount can be told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub struct MountOptions {
    /// The source shown by `mount` and `df`.
    pub fs_name: OsString,
    /// No writes.
    pub read_only: bool,
    /// Users other than the mounting one may enter; `None`: when mounted by root.
    pub allow_other: Option<bool>,
    /// Set-user-id programs work; `None`: when mounted by root.
    pub suid: Option<bool>,
    /// Device nodes work; `None`: when mounted by root.
    pub dev: Option<bool>,
    /// Programs may be run.
    pub exec: bool,
    /// Access times.
    pub atime: Atime,
    /// Every change is durable before it is answered; the file system has to be told as well: [`crate::weir_fs::Synchronous`].
    pub sync: bool,
    /// The same for every change of a directory.
    pub dirsync: bool,
    /// The kernel's side.
    pub transport: TransportOptions,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            fs_name: "weir".into(),
            read_only: false,
            allow_other: None,
            suid: None,
            dev: None,
            exec: true,
            atime: Atime::Relative,
            sync: false,
            dirsync: false,
            transport: TransportOptions::default(),
        }
    }
}

/// An option that is not one, or whose value is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadOption(String);

impl fmt::Display for BadOption {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "mount option '{}': use any of ro rw allow_other noallow_other suid nosuid dev nodev \
             exec noexec relatime noatime strictatime sync async dirsync acl noacl xattr noxattr writeback_cache \
             nowriteback_cache direct_new nodirect_new io_uring no_io_uring fsname=NAME threads=1..64 max_background=1..65535 \
             max_write=BYTES (4096..1048576)",
            self.0
        )
    }
}
impl std::error::Error for BadOption {}

impl MountOptions {
    /// Applies one comma-separated list.
    pub fn apply(&mut self, list: &str) -> Result<(), BadOption> {
        for option in list.split(',').filter(|option| !option.is_empty()) {
            self.apply_one(option).ok_or_else(|| BadOption(option.to_owned()))?;
        }
        Ok(())
    }

    fn apply_one(&mut self, option: &str) -> Option<()> {
        if is_for_others(option) || changes_nothing(option) {
            return Some(());
        }
        if let Some((name, value)) = option.split_once('=') {
            return self.apply_value(name, value);
        }
        match option {
            "defaults" => {}
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = Some(true),
            "noallow_other" => self.allow_other = Some(false),
            "suid" => self.suid = Some(true),
            "nosuid" => self.suid = Some(false),
            "dev" => self.dev = Some(true),
            "nodev" => self.dev = Some(false),
            "exec" => self.exec = true,
            "noexec" => self.exec = false,
            "nostrictatime" if self.atime != Atime::Strict => {}
            "relatime" | "atime" | "nostrictatime" => self.atime = Atime::Relative,
            "noatime" => self.atime = Atime::Never,
            "strictatime" => self.atime = Atime::Strict,
            "sync" => self.sync = true,
            "async" => self.sync = false,
            "dirsync" => self.dirsync = true,
            "acl" => self.transport.posix_acl = true,
            "noacl" => self.transport.posix_acl = false,
            "xattr" => self.transport.xattr = true,
            "noxattr" => {
                self.transport.xattr = false;
                self.transport.posix_acl = false;
            }
            "io_uring" => self.transport.io_uring = true,
            "no_io_uring" => self.transport.io_uring = false,
            "writeback_cache" => self.transport.writeback_cache = true,
            "direct_new" => self.transport.direct_new = true,
            "nodirect_new" => self.transport.direct_new = false,
            "nowriteback_cache" => self.transport.writeback_cache = false,
            _ => return None,
        }
        Some(())
    }

    fn apply_value(&mut self, name: &str, value: &str) -> Option<()> {
        match name {
            "fsname" if !value.is_empty() => self.fs_name = value.into(),
            "threads" => {
                let threads = value.parse().ok().filter(|threads| (1..=64).contains(threads))?;
                self.transport.threads = Some(threads);
            }
            "max_background" => {
                self.transport.max_background =
                    value.parse().ok().filter(|requests| *requests > 0)?;
            }
            "max_write" => {
                let bytes: u32 = value.parse().ok()?;
                if !(4096..=1 << 20).contains(&bytes) || !bytes.is_multiple_of(4096) {
                    return None;
                }
                self.transport.max_write_bytes = bytes;
            }
            _ => return None,
        }
        Some(())
    }
}

/// Whether and when to mount: a matter of those who read /etc/fstab.
fn is_for_others(option: &str) -> bool {
    option.starts_with("x-") || matches!(option, "auto" | "noauto" | "nofail" | "_netdev")
}

/// What mount(8) knows for any file system, and what is so here in any case, or cannot be had: access times of directories follow those of
/// files (who writes `noatime,nodiratime` has that), all times are written with what else is, files have change counters.
fn changes_nothing(option: &str) -> bool {
    matches!(
        option,
        "diratime"
            | "nodiratime"
            | "lazytime"
            | "nolazytime"
            | "iversion"
            | "noiversion"
            | "silent"
            | "loud"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(list: &str) -> Result<MountOptions, BadOption> {
        let mut options = MountOptions::default();
        options.apply(list).map(|()| options)
    }

    #[test]
    fn what_fstab_says_to_others_changes_nothing() {
        let list = "auto,noauto,nofail,_netdev,x-systemd.automount,x-systemd.requires=/srv,ro";
        let options = parsed(list).expect("all are known");
        assert!(options.read_only);
        assert!(parsed("nofail=1").is_err());
    }

    #[test]
    fn what_is_so_in_any_case_can_be_asked_for() {
        let list = "noatime,nodiratime,lazytime,noiversion,silent";
        assert_eq!(parsed(list).expect("all are known").atime, Atime::Never);
        assert_eq!(parsed("strictatime,nostrictatime").unwrap().atime, Atime::Relative);
        assert_eq!(parsed("noatime,nostrictatime").unwrap().atime, Atime::Never);
        // It would keep programs from something, and does not.
        assert!(parsed("nosymfollow").is_err());
    }

    #[test]
    fn a_later_option_wins_over_an_earlier_one() {
        let options = parsed("ro,nosuid,writeback_cache,rw,suid,nowriteback_cache").unwrap();
        assert!(!options.read_only && !options.transport.writeback_cache);
        assert_eq!(options.suid, Some(true));
    }

    #[test]
    fn an_unknown_option_or_a_value_out_of_range_is_named() {
        for bad in ["frobnicate", "threads=0", "threads=65", "max_write=4097", "fsname=", "ro=1"] {
            let error = parsed(&format!("rw,{bad}")).unwrap_err();
            assert!(error.to_string().starts_with(&format!("mount option '{bad}'")), "{error}");
        }
    }

    #[test]
    fn without_attributes_there_are_no_access_control_lists() {
        let options = parsed("noxattr").unwrap();
        assert!(!options.transport.xattr && !options.transport.posix_acl);
    }

    #[test]
    fn new_files_go_past_the_cache_unless_that_is_to_collect_writes() {
        for (list, past) in [("", true), ("nodirect_new", false), ("writeback_cache", false)] {
            assert_eq!(parsed(list).unwrap().transport.new_past_cache(), past, "{list}");
        }
    }

    #[test]
    fn values_are_taken() {
        let options =
            parsed("threads=3,max_background=9,max_write=65536,fsname=x,noatime").unwrap();
        assert_eq!(options.transport.threads, Some(3));
        assert_eq!(options.transport.max_background, 9);
        assert_eq!(options.transport.max_write_bytes, 65_536);
        assert_eq!((options.fs_name.to_str(), options.atime), (Some("x"), Atime::Never));
    }
}
