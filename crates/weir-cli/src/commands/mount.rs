//! `weir mount`: serves a volume at a directory.
//!
//! In the foreground the process prints one line when the mount is usable and ends when it is taken
//! off. With `--background` the command starts itself again as the server, and returns when that
//! says it is ready. Nothing is forked after threads exist: the server is a fresh process, and what
//! it writes to standard output until it is ready is its report:
//!
//! - `ready LINE`: the mount is usable; the starter prints LINE and ends with 0. If that is gone by
//!   then, interrupted say, the server unmounts and ends;
//! - anything else is passed on to standard error (progress of a recovery, an error).
//!
//! A log that cannot be written is no reason to stop serving: lines for people are lost then
//! ([`say`]), nothing else.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use weir::{AtimePolicy, Volume, VolumeOptions};
use weir_mount::weir_fs::Synchronous;
use weir_mount::{
    Atime, Controller, FileSystemOps, MountError, MountOptions, UnmountError, WeirFs, mount_point,
};

use crate::commands::create::{self, FormatArgs};
use crate::failure::{FAILED, Failure, Outcome, USAGE, harmless, say};
use crate::open;
use crate::signals;
use crate::size;

/// How long a server that was detached may go on before it says who keeps it.
const PATIENCE: Duration = Duration::from_millis(500);
/// First word of the server's report when it is usable.
const READY: &str = "ready ";
/// The engine takes as much where it is given less.
const MIN_MEMORY_BYTES: u64 = 256 << 10;

/// Arguments of `weir mount`.
#[derive(Debug, Args)]
#[command(
    long_about = "Mount a volume. In the foreground one line tells when the mount is usable; \
                  Ctrl-C or SIGTERM unmounts it (and syncs it, where it cannot be \
                  unmounted), and so does a hangup, but under nohup. With --background the \
                  command returns when the mount is usable, or prints why it is not.",
    after_long_help = "Options for -o (comma-separated, may be repeated):\n  \
        ro rw                      read-only or not\n  \
        allow_other noallow_other  other users may enter (default: when mounted by root)\n  \
        suid nosuid dev nodev exec noexec\n  \
        relatime noatime strictatime\n  \
        async sync dirsync         nothing, every change, every change of a directory is durable\n  \
        \x20                          before the call that makes it returns: a flush each\n  \
        \x20                          (default: async)\n  \
        acl noacl                  POSIX access control lists (default: acl; without, they are\n  \
        \x20                          refused)\n  \
        xattr noxattr              extended attributes (without, they are refused, and new files\n  \
        \x20                          are made faster)\n  \
        io_uring no_io_uring       requests come through a ring for each core instead of\n  \
        \x20                          /dev/fuse, where the kernel offers that (Linux 6.14; for\n  \
        \x20                          others than root only while\n  \
        \x20                          /sys/module/fuse/parameters/enable_uring is Y)\n  \
        \x20                          (default: io_uring)\n  \
        writeback_cache nowriteback_cache\n  \
        \x20                          the kernel collects small writes, or does not (the default)\n  \
        direct_new nodirect_new    what is written to new files goes past the kernel's page cache,\n  \
        \x20                          or stays there too (default: direct_new; not with\n  \
        \x20                          writeback_cache)\n  \
        auto noauto nofail _netdev x-...   for others that read /etc/fstab: ignored\n  \
        diratime nodiratime lazytime nolazytime iversion noiversion silent loud\n  \
        \x20                          ignored: directories are as noatime says for files, and the\n  \
        \x20                          others are as it is in any case\n  \
        fsname=NAME                what mount and df show\n  \
        threads=N max_background=N max_write=BYTES   tuning of the connection\n\n\
        Examples:\n  \
        weir mount disk.weir /mnt\n  \
        weir mount --create --size 8G disk.weir /mnt --background\n  \
        weir mount disk.weir /mnt --read-only --memory 256M\n  \
        weir mount disk.weir /mnt -o noatime,nosuid --background --log /var/log/weir.log\n  \
        mount -i -o remount,ro /mnt      # from now on; -i: no helper, it is the kernel's matter\n\n\
        Exit codes: 0 unmounted cleanly, 1 failed or errors were seen, 2 wrong usage, 130 ended \
        by a third Ctrl-C"
)]
#[allow(clippy::struct_excessive_bools)]
pub struct MountArgs {
    /// A file or block device
    #[arg(value_name = "VOL")]
    pub volume: PathBuf,
    /// An existing directory
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Make the volume first if it does not exist (needs --size)
    #[arg(long)]
    pub create: bool,
    /// How it looks
    #[command(flatten)]
    pub format: FormatArgs,
    /// Most memory for cached data and metadata; by default 1/8 of the machine's, or of what
    /// its control group may have, at most 1G. Files that the kernel knows can take as much again
    /// (without limit before Linux 6.18)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory: Option<u64>,
    /// Return when the mount is usable
    #[arg(long, short)]
    pub background: bool,
    /// Write nothing at all; a log that was left is replayed in memory
    #[arg(long, short)]
    pub read_only: bool,
    /// Mount options, see below
    #[arg(short = 'o', value_name = "OPT,...")]
    pub options: Vec<String>,
    /// Where a server in the background tells about errors
    #[arg(long, value_name = "FILE", requires = "background")]
    pub log: Option<PathBuf>,
    /// This process is the server in the background
    #[arg(long, hide = true)]
    pub serve: bool,
}

/// Runs the command.
pub fn run(args: &MountArgs) -> Result<ExitCode, Failure> {
    let options = mount_options(args)?;
    check_dir(&args.dir)?;
    if args.background && !args.serve {
        // Before anything happens in a process that nobody watches.
        return start_server(args);
    }
    serve(args, &options).or_else(|failure| {
        if args.serve {
            // The starter passes it on if it still listens; the log has it in any case.
            let _ = report(&format!("weir: {failure}"));
        }
        say(&failure);
        Ok(ExitCode::from(failure.code))
    })
}

fn mount_options(args: &MountArgs) -> Outcome<MountOptions> {
    let mut options = MountOptions {
        fs_name: args
            .volume
            .canonicalize()
            .unwrap_or_else(|_| std::path::absolute(&args.volume).unwrap_or_default())
            .into_os_string(),
        ..MountOptions::default()
    };
    for list in &args.options {
        options.apply(list).map_err(|error| Failure::bare(error.to_string()).with_code(USAGE))?;
    }
    options.read_only |= args.read_only;
    check_sizes(args)?;
    Ok(options)
}

/// Refuses what would be taken for granted and have no effect.
fn check_sizes(args: &MountArgs) -> Outcome {
    let usage = |what: String| Err(Failure::new(args.volume.display(), what).with_code(USAGE));
    let format = &args.format;
    let formatted = format.size.is_some()
        || format.log_size.is_some()
        || format.prewrite
        || !format.label.is_empty();
    if formatted && !args.create {
        return usage("--size, --log-size, --prewrite and --label need --create".to_owned());
    }
    match args.memory {
        Some(memory_bytes) if memory_bytes < MIN_MEMORY_BYTES => usage(format!(
            "--memory: {memory_bytes} bytes are too few: give at least {}",
            size::show(MIN_MEMORY_BYTES)
        )),
        _ => Ok(()),
    }
}

fn check_dir(dir: &Path) -> Outcome {
    // The kernel may still answer stat(2) of a dead mount from what it remembers; statfs(2) asks the server. One that ends just then
    // takes the question with it: ECONNABORTED, ECANCELED, EIO. Whatever it is, nobody is there.
    let is_fuse = |entry: mount_point::MountEntry| entry.fs_type.starts_with("fuse");
    let is_left = || {
        let at = dir.canonicalize().or_else(|_| mount_point::canonical_unasked(dir));
        at.and_then(|at| mount_point::mount_at(&at)).is_ok_and(|entry| entry.is_some_and(is_fuse))
    };
    let asked = dir.metadata().and_then(|meta| {
        rustix::fs::statvfs(dir)?;
        Ok(meta)
    });
    let metadata =
        asked.map_err(|error| if is_left() { rustix::io::Errno::NOTCONN.into() } else { error });
    match metadata {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Failure::new(
            dir.display(),
            format!("no such directory: make it first: mkdir {}", dir.display()),
        )),
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => Err(Failure::new(
            dir.display(),
            format!(
                "a mount without a server is left here: take it off: weir umount --lazy {}",
                dir.display()
            ),
        )),
        Err(error) => Err(Failure::host(dir, &error)),
        Ok(meta) if !meta.is_dir() => {
            Err(Failure::new(dir.display(), "not a directory: give a directory to mount at"))
        }
        Ok(_) => Ok(()),
    }
}

/// Starts the server and waits for its report.
fn start_server(args: &MountArgs) -> Result<ExitCode, Failure> {
    let fail = |what: &str, error: std::io::Error| {
        if is_descriptor_limit(&error) {
            return Failure::new(what, no_descriptor(&error));
        }
        Failure::new(what, error)
    };
    let program =
        std::env::current_exe().map_err(|error| fail("cannot find this program again", error))?;
    let log = match &args.log {
        None => Stdio::null(),
        Some(path) => OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|error| Failure::host(path, &error))?
            .into(),
    };
    // After the command's name: what comes behind a `--` is no option.
    let mut arguments = std::env::args_os().skip(1);
    let mut server = Command::new(program)
        .args(arguments.next())
        .arg("--serve")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|error| fail("cannot start the server", error))?;
    let lines = server.stdout.take().map(BufReader::new);
    for line in lines.into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(|error| fail("the server's report", error))?;
        if let Some(ready) = line.strip_prefix(READY) {
            // Who has closed standard output does not want to read it, and has the mount.
            if open::check_output().is_ok() {
                open::print(format!("{ready}\n").as_bytes())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
    // It ended without being ready, and has said why.
    let status = server.wait().map_err(|error| fail("the server", error))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0);
    match code {
        Some(code) => Ok(ExitCode::from(code)),
        None => {
            Err(Failure::bare(format!("the server ended before the mount was usable ({status})")))
        }
    }
}

/// A line for whoever waits for this server to be ready. False: nobody is left to read it.
fn report(line: &str) -> bool {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).is_ok()
}

/// From now on standard output belongs to nobody.
fn let_go_of_starter() -> Outcome {
    let fail = |error: std::io::Error| Failure::new("/dev/null", error);
    let null = File::options().write(true).open("/dev/null").map_err(fail)?;
    rustix::stdio::dup2_stdout(null).map_err(|error| fail(error.into()))?;
    std::env::set_current_dir("/").map_err(fail)
}

fn open_volume(args: &MountArgs, options: &MountOptions) -> Outcome<Volume> {
    if args.create && !args.volume.exists() {
        create::create(&args.volume, &args.format, false)?;
    }
    let volume_options = VolumeOptions {
        memory_bytes: args.memory,
        read_only: options.read_only,
        atime: match options.atime {
            Atime::Relative => AtimePolicy::Relative,
            Atime::Never => AtimePolicy::Never,
            Atime::Strict => AtimePolicy::Strict,
        },
        ..VolumeOptions::default()
    };
    open::open_with(&args.volume, &volume_options)
}

fn serve(args: &MountArgs, options: &MountOptions) -> Result<ExitCode, Failure> {
    if args.serve {
        // A session of its own: the terminal of the starter means nothing to it.
        rustix::process::setsid().map_err(|error| Failure::new("setsid", error))?;
    }
    let signals = signals::ending()?;
    let volume = open_volume(args, options)?;
    let shown = args.dir.display().to_string();
    let log = Box::new(move |text: &str| say(format_args!("{shown}: {text}")));
    let posix_acl = options.transport.posix_acl;
    let fs = WeirFs::new(volume.clone(), posix_acl, log)
        .map_err(|error| Failure::volume(&args.volume, &error));
    let attached = fs.and_then(|fs| {
        let synchronous = Synchronous { all: options.sync, names: options.dirsync };
        let fs = Arc::new(fs.synchronous(synchronous));
        let session = weir_mount::mount(&args.dir, Arc::clone(&fs) as _, options)
            .map_err(|error| mount_failure(&args.dir, &error))?;
        Ok((fs, session))
    });
    let (fs, session) = match attached {
        Ok(attached) => attached,
        Err(failure) => {
            open::close(&args.volume, &volume)?;
            return Err(failure);
        }
    };
    let has_ended = Arc::new(AtomicBool::new(false));
    let ending = Ending {
        fs: Arc::clone(&fs),
        controller: session.controller(),
        dir: args.dir.display().to_string(),
        has_ended: Arc::clone(&has_ended),
    };
    std::thread::spawn(move || ending.watch(signals));
    if let Err(failure) = announce(args, &volume) {
        drop(session);
        has_ended.store(true, Ordering::Relaxed);
        fs.close().map_err(|error| Failure::volume(&args.volume, &error))?;
        return Err(failure);
    }
    let served = session.serve();
    has_ended.store(true, Ordering::Relaxed);
    conclude(args, &fs, served)
}

fn mount_failure(dir: &Path, error: &MountError) -> Failure {
    match error {
        MountError::FuseDevice(cause) | MountError::Mount(cause) | MountError::Session(cause)
            if is_descriptor_limit(cause) =>
        {
            Failure::new(dir.display(), no_descriptor(cause))
        }
        MountError::NoFuse
        | MountError::FuseDevice(_)
        | MountError::NoHelper
        | MountError::Directory(_) => Failure::bare(error.to_string()),
        error => Failure::new(dir.display(), error),
    }
}

fn is_descriptor_limit(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

fn no_descriptor(error: &std::io::Error) -> weir::Error {
    weir::Error::NoDescriptor(error.to_string())
}

/// The one line that says the mount is usable.
fn announce(args: &MountArgs, volume: &Volume) -> Outcome {
    let space = volume.statfs();
    let line = format!(
        "{} mounted at {} ({} free of {}{})",
        args.volume.display(),
        args.dir.display(),
        size::show(space.available_blocks * 4096),
        size::show(space.total_blocks * 4096),
        if volume.is_read_only() { ", read-only" } else { "" },
    );
    // One line, which is all that a starter reads.
    let line = harmless(line);
    if args.serve {
        if !report(&format!("{READY}{line}")) {
            // Interrupted: who does not get a mount is not left with one.
            let what = "whoever started this has not waited for it: unmounted again";
            return Err(Failure::new(args.dir.display(), what));
        }
        return let_go_of_starter();
    }
    let hint = if std::io::stdout().is_terminal() { ", Ctrl-C unmounts" } else { "" };
    // Who mounts in the foreground can see that it is there.
    let _ = report(&format!("{line}{hint}"));
    Ok(())
}

/// Nobody uses the mount any more: close the volume, and say how it went.
fn conclude(
    args: &MountArgs,
    fs: &WeirFs,
    served: Result<(), MountError>,
) -> Result<ExitCode, Failure> {
    let shutdown = fs.volume().shutdown_reason();
    let closed = fs.close().map_err(|error| Failure::volume(&args.volume, &error));
    let trouble = fs.trouble();
    if let Some(first) = trouble.first_panic {
        let volume = args.volume.display();
        say(format_args!(
            "{volume}: {} internal errors while mounted, the first: {first}: run weir fsck {volume}",
            trouble.panics,
        ));
    }
    served.map_err(|error| mount_failure(&args.dir, &error))?;
    closed?;
    if let Some(reason) = shutdown {
        return Err(Failure::volume(&args.volume, &weir::Error::Shutdown(reason)));
    }
    Ok(ExitCode::from(if trouble.panics > 0 { FAILED } else { 0 }))
}

/// What a signal asks for, by how often it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    /// Unmount if nobody uses it.
    Politely,
    /// Detach now; its users may finish.
    Lazily,
    /// Close the volume and end, whoever uses it.
    End,
}

/// The first Ctrl-C asks, the second insists, the third ends it. SIGTERM and SIGHUP come from
/// someone who cannot press it again: they insist at once.
fn next_ask(before: Option<Ask>, signal: i32) -> Ask {
    match (before, signal) {
        (None, SIGINT) => Ask::Politely,
        (None | Some(Ask::Politely), _) => Ask::Lazily,
        (Some(Ask::Lazily | Ask::End), _) => Ask::End,
    }
}

/// What signals are answered with.
#[derive(Clone)]
struct Ending {
    fs: Arc<WeirFs>,
    controller: Controller,
    dir: String,
    /// Nobody uses the mount any more.
    has_ended: Arc<AtomicBool>,
}

impl Ending {
    fn watch(&self, mut signals: Signals) {
        let mut asked = None;
        for signal in signals.forever() {
            let ask = next_ask(asked, signal);
            asked = Some(ask);
            match ask {
                Ask::Politely => self.unmount(),
                Ask::Lazily => self.detach(),
                Ask::End => self.end(),
            }
        }
    }

    fn say(&self, what: impl Display) {
        say(format_args!("{}: {what}", self.dir));
    }

    fn unmount(&self) {
        match self.controller.unmount(false) {
            Ok(()) | Err(UnmountError::NotMounted) => self.say_later_who_keeps_it(),
            Err(error @ UnmountError::Busy(_)) => {
                self.say(format_args!("{error}: Ctrl-C again detaches it"));
            }
            Err(error) => self.say(format_args!("cannot unmount: {error}")),
        }
    }

    fn detach(&self) {
        // Clean if it can be, and away in any case.
        let detached = self.controller.unmount(false).or_else(|_| self.controller.unmount(true));
        match detached {
            Ok(()) | Err(UnmountError::NotMounted) => {
                if self.open_files() > 0 {
                    self.sync();
                }
                self.say_later_who_keeps_it();
            }
            Err(error) => {
                self.say(format_args!("cannot detach: {error}; Ctrl-C again ends it now"));
                self.sync();
            }
        }
    }

    /// Whoever asked may take the machine away next.
    fn sync(&self) {
        let (has_ended, dir) = (Arc::clone(&self.has_ended), self.dir.clone());
        self.fs.sync_with_mapped(
            false,
            Box::new(move |synced| match synced {
                Err(error) if !has_ended.load(Ordering::Relaxed) => {
                    say(format_args!("{dir}: cannot sync: {error}"));
                }
                // What cannot be synced because the volume is being closed is told by the close.
                Ok(()) | Err(_) => {}
            }),
        );
    }

    fn open_files(&self) -> usize {
        self.fs.in_use().1
    }

    /// It cannot be seen here any more. As a rule that ends it, but others may see it still, or have files open. Who it is cannot be
    /// told at once: the kernel says that a file was closed after `close(2)` has returned.
    fn say_later_who_keeps_it(&self) {
        let ending = self.clone();
        std::thread::spawn(move || {
            std::thread::sleep(PATIENCE);
            if ending.has_ended.load(Ordering::Relaxed) {
                return;
            }
            // Where others see it, it does not end with the files that are open now.
            let what = match (ending.controller.held_by(), ending.open_files()) {
                (Some(who), _) => format!("but still {who}: ends when that does"),
                (None, 0) => "but still in use by somebody who cannot be seen: ends when that does"
                    .to_owned(),
                (None, files) => format!("{files} files still open: ends when they are closed"),
            };
            ending.say(format_args!("detached, {what}; Ctrl-C again ends it now"));
            ending.sync();
        });
    }

    fn end(&self) {
        let code = match self.fs.close() {
            Ok(()) => 130,
            Err(error) => {
                self.say(&error);
                FAILED.into()
            }
        };
        std::process::exit(code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGHUP, SIGTERM};

    #[test]
    fn the_first_interrupt_asks_the_second_insists_and_the_third_ends() {
        let first = next_ask(None, SIGINT);
        let second = next_ask(Some(first), SIGINT);
        let third = next_ask(Some(second), SIGINT);
        assert_eq!((first, second, third), (Ask::Politely, Ask::Lazily, Ask::End));
    }

    #[test]
    fn a_signal_that_nobody_can_repeat_insists_at_once() {
        assert_eq!(next_ask(None, SIGTERM), Ask::Lazily);
        assert_eq!(next_ask(None, SIGHUP), Ask::Lazily);
        assert_eq!(next_ask(Some(Ask::Lazily), SIGTERM), Ask::End);
    }
}
