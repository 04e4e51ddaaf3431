//! Opening volumes for commands.

use std::ffi::OsStr;
use std::fs::File;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use weir::{Error, Volume, VolumeOptions};
use weir_mount::mount_point::{self, MountEntry};
use weir_mount::servers::{self, Identity, MOUNT_TYPE, Server};

use crate::failure::{Failure, Outcome, say};
use crate::show;
use crate::streams;

/// Longest wait for a mount that is just closing its volume.
const CLOSING_LIMIT: Duration = Duration::from_secs(10);

/// Runs `open` until the volume is free, when the one who has it is a mount on its way out: after
/// `umount` from outside, the server still writes what is left. A volume that is mounted, or used
/// by another program, is refused at once.
pub fn once_closed<T>(path: &Path, open: impl Fn() -> weir::Result<T>) -> weir::Result<T> {
    let began = Instant::now();
    loop {
        match open() {
            Err(Error::InUse(who)) => {
                let closing = may_be_closing(&who) && mounted_at(path).is_none();
                if !closing || began.elapsed() > CLOSING_LIMIT {
                    let who = match mounted_at(path) {
                        Some(dir) => format!("mounted at {}", dir.display()),
                        None => who,
                    };
                    return Err(Error::InUse(who));
                }
                sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Whether the process in the engine's text ("process 123 ...") is a `weir mount`, or just gone.
fn may_be_closing(who: &str) -> bool {
    let pid = who.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty());
    let Some(pid) = pid else { return true };
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
        line.is_empty() || line.split(|&byte| byte == 0).any(|argument| argument == b"mount")
    })
}

/// Where the volume is mounted, if it is: by what the servers of mounts have open, whatever it was called when it was mounted. A mount
/// whose server cannot be looked into is known by its source alone, which is the volume's name of then.
pub fn mounted_at(volume: &Path) -> Option<PathBuf> {
    let mounts = weir_mounts();
    if mounts.is_empty() {
        return None;
    }
    let servers = servers::servers();
    let identity = Identity::of(volume)?;
    let is_named = by_source(volume);
    let (seen, unseen): (Vec<_>, Vec<_>) =
        mounts.into_iter().partition(|mount| servers.iter().any(|server| server.serves(mount)));
    let has = |mount: &MountEntry| {
        servers.iter().any(|server| server.serves(mount) && server.has_open(identity))
    };
    let served: Vec<_> = seen.into_iter().filter(has).collect();
    // One process may serve several, each with a volume of its own.
    let is_one = served.iter().all(|mount| mount.device == served[0].device);
    let served = served.into_iter().filter(|mount| is_one || is_named(&mount.source));
    let unseen = unseen.into_iter().filter(|mount| is_named(&mount.source));
    served.chain(unseen).next().map(|mount| mount.dir)
}

/// Every Weir mount that this process can see, oldest first.
fn weir_mounts() -> Vec<MountEntry> {
    let mounts = mount_point::mounts().unwrap_or_default();
    mounts.into_iter().filter(|entry| entry.fs_type == MOUNT_TYPE).collect()
}

/// Whether the source of a mount names the volume, or what shows it.
fn by_source(volume: &Path) -> impl Fn(&OsStr) -> bool {
    let volume = volume.canonicalize().ok();
    let behind = volume.as_deref().and_then(behind_loop);
    move |source| {
        let source = Path::new(source);
        volume.as_deref() == Some(source)
            || behind.as_deref() == Some(source)
            || behind_loop(source).is_some_and(|file| volume.as_ref() == Some(&file))
    }
}

/// The file behind a loop device: that may be opened as a volume as well.
fn behind_loop(device: &Path) -> Option<PathBuf> {
    // Whatever else the source of a mount says is a name at most.
    device.strip_prefix("/dev").ok()?;
    Identity::of(device)?.file_behind()
}

/// The volume of a mount: what it is called, and the file itself where it can be opened.
pub fn volume_of(mount: &MountEntry) -> (PathBuf, Option<File>) {
    let servers = servers::servers();
    let server = servers.iter().find(|server| server.serves(mount));
    if let Some(open) = server.and_then(Server::volume)
        && let Some(path) = open.path()
    {
        return (path, open.open().ok());
    }
    let source = PathBuf::from(&mount.source);
    // By another name (-o fsname), or one that is no longer its own.
    let file = if source.is_absolute() { File::open(&source).ok() } else { None };
    (source, file)
}

/// The volume that is mounted at `dir`, if that is a Weir mount.
pub fn mounted_on(dir: &Path) -> Option<PathBuf> {
    let entry = mount_point::mount_at(&dir.canonicalize().ok()?).ok()??;
    (entry.fs_type == MOUNT_TYPE).then(|| volume_of(&entry).0)
}

/// Where the Weir mount is that a path is on, without asking its server, which may be dead.
pub fn mount_above(path: &Path) -> Option<PathBuf> {
    mount_entry_above(path).map(|entry| entry.dir)
}

/// The same mount, as the kernel lists it.
pub fn mount_entry_above(path: &Path) -> Option<MountEntry> {
    let path = std::path::absolute(path).ok()?;
    let above = weir_mounts().into_iter().filter(|entry| path.starts_with(&entry.dir));
    above.max_by_key(|entry| entry.dir.as_os_str().len())
}

/// Opens `path` for one command.
pub fn open(path: &Path, read_only: bool) -> Outcome<Volume> {
    let options = VolumeOptions { read_only, ..VolumeOptions::default() };
    open_with(path, &options)
}

/// Opens `path`; tells about a recovery that takes long.
pub fn open_with(path: &Path, options: &VolumeOptions) -> Outcome<Volume> {
    let options =
        VolumeOptions { on_recovery_progress: Some(recovery_reporter(path)), ..options.clone() };
    once_closed(path, || Volume::open(path, options.clone()))
        .map_err(|error| Failure::volume(path, &error))
}

/// A line every two seconds.
fn recovery_reporter(path: &Path) -> Arc<dyn Fn(u64, u64) + Send + Sync> {
    const EVERY_MS: u64 = 2_000;
    let (shown, began) = (path.display().to_string(), Instant::now());
    let next_ms = AtomicU64::new(EVERY_MS);
    Arc::new(move |read_blocks, all_blocks| {
        let now_ms = began.elapsed().as_millis() as u64;
        let due_ms = next_ms.load(Ordering::Relaxed);
        let claim = |from, to| {
            next_ms.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if now_ms >= due_ms && claim(due_ms, now_ms + EVERY_MS) {
            let percent = read_blocks.saturating_mul(100) / all_blocks.max(1);
            say(format_args!("{shown}: recovering, {percent}%"));
        }
    })
}

/// Closes a volume that was written.
pub fn close(path: &Path, volume: &Volume) -> Outcome {
    volume.close().map_err(|error| Failure::volume(path, &error))
}

/// Runs `work` on the volume at `path`, opened for writing, and closes it. The first error wins.
pub fn with_volume<T>(
    path: &Path,
    read_only: bool,
    work: impl FnOnce(&Volume) -> Outcome<T>,
) -> Outcome<T> {
    let volume = open(path, read_only)?;
    let result = work(&volume);
    let closed = close(path, &volume);
    let value = result?;
    closed.map(|()| value)
}

/// Writes to standard output; a reader that went away (`| head`) is not an error worth a word.
pub fn print(bytes: &[u8]) -> Outcome {
    check_output()?;
    write_out(bytes).map_err(|error| unprinted(&error))
}

/// What could not be written to standard output, and why.
pub fn unprinted(error: &std::io::Error) -> Failure {
    match error.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::bare("").with_code(141),
        _ => Failure::host(Path::new("standard output"), error),
    }
}

/// Past the standard library's own output, which takes what it writes to a descriptor that is not open for writing as written.
fn write_out(mut bytes: &[u8]) -> std::io::Result<()> {
    let out = std::io::stdout().lock();
    while !bytes.is_empty() {
        match rustix::io::write(&out, bytes) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Refuses a standard output that nothing can be written to (`>&-`).
pub fn check_output() -> Outcome {
    if streams::was_closed(streams::OUTPUT) {
        let error = std::io::Error::from_raw_os_error(libc::EBADF);
        return Err(Failure::host(Path::new("standard output"), &error));
    }
    Ok(())
}

/// Prints a JSON value, indented on a terminal.
pub fn print_json(value: &serde_json::Value) -> Outcome {
    print(show::json_text(value, std::io::stdout().is_terminal()).as_bytes())
}
