//! `mount.weir`: what `mount -t weir`, and so `/etc/fstab`, starts.
//!
//! mount(8) runs `/sbin/mount.TYPE SPEC DIR [-sfnv] [-t TYPE] [-o OPTIONS]` for types that the kernel cannot mount by itself. A link of that
//! name to the `weir` program makes it this helper, which runs `weir mount --background` and answers with the exit codes of mount(8).
//! `mount -o remount` changes what is the kernel's: read-only or not, what works there.
//! What mount(8) has no words for goes by two options more than `weir mount -o` has: `memory=SIZE` and `log=FILE`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Parser;
use clap::error::ErrorKind;
use weir_mount::{MountOptions, mount_point};

use crate::failure::{Failure, USAGE, say};

/// The name that makes the program this helper.
const NAME: &str = "mount.weir";
/// Not to mount, but to change how it is mounted.
const REMOUNT: &str = "remount";
/// Exit codes of mount(8).
const WRONG_INVOCATION: u8 = 1;
const SYSTEM_ERROR: u8 = 2;
const MOUNT_FAILED: u8 = 32;

/// What mount(8) gives to a helper.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Parser)]
#[command(
    name = NAME,
    version,
    about = "Mount a Weir volume: what mount -t weir starts",
    after_help = "Example of a line in /etc/fstab:\n  \
        /srv/data.weir  /data  weir  noatime,memory=2G,log=/var/log/weir.log,nofail  0 0\n\n\
        Exit codes are those of mount(8): 0 mounted, 1 wrong usage, 2 system error, 32 failed"
)]
struct Arguments {
    /// A file or block device
    #[arg(value_name = "VOL")]
    volume: PathBuf,
    /// An existing directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Options of weir mount -o; memory=SIZE; log=FILE
    #[arg(short, value_name = "OPT,...")]
    options: Vec<String>,
    /// Ignore options that are unknown
    #[arg(short)]
    sloppy: bool,
    /// Do everything but mount
    #[arg(short)]
    fake: bool,
    /// For helpers that keep a list of mounts: ignored
    #[arg(short)]
    no_list: bool,
    /// Say where it is mounted
    #[arg(short)]
    verbose: bool,
    /// Type of the file system: ignored
    #[arg(short = 't', value_name = "TYPE")]
    file_system_type: Option<String>,
}

/// Whether the program was started as this helper.
pub fn is_meant(program: Option<&OsStr>) -> bool {
    program.map(Path::new).and_then(Path::file_name) == Some(OsStr::new(NAME))
}

/// Runs the helper with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error)
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) =>
        {
            return error.print().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or(&text).trim_start_matches("error: ");
            say(format_args!("{first}: see {NAME} --help"));
            return ExitCode::from(WRONG_INVOCATION);
        }
    };
    if arguments.fake {
        return ExitCode::SUCCESS;
    }
    let options = arguments.options.iter().flat_map(|list| list.split(','));
    let is_remount = options.into_iter().any(|option| option == REMOUNT);
    let done = if is_remount { remount(&arguments) } else { mount(&arguments) };
    done.unwrap_or_else(|failure| {
        say(&failure);
        ExitCode::from(failure.code)
    })
}

/// Changes what the kernel does by itself. What the server was told when it began stays so.
fn remount(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let shown = arguments.dir.display();
    let mut options = MountOptions::default();
    for option in kernel_options(arguments) {
        let applied = options.apply(option);
        applied.map_err(|error| Failure::bare(error.to_string()).with_code(WRONG_INVOCATION))?;
    }
    let failed = |what: String| Failure::new(&shown, what).with_code(MOUNT_FAILED);
    let dir = arguments.dir.canonicalize().map_err(|error| failed(error.to_string()))?;
    let entry = mount_point::mount_at(&dir).map_err(|error| failed(error.to_string()))?;
    if entry.is_none_or(|entry| entry.fs_type != "fuse.weir") {
        return Err(failed("not a Weir mount: leave out remount".to_owned()));
    }
    mount_point::remount(&dir, &options).map_err(|error| match error.kind() {
        std::io::ErrorKind::ResourceBusy => {
            failed("files are open for writing: end who writes them (fuser -m)".to_owned())
        }
        _ => failed(error.to_string()),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Without those for mount(8), and those that only a server that begins can take.
fn kernel_options(arguments: &Arguments) -> impl Iterator<Item = &str> {
    let all = arguments.options.iter().flat_map(|list| list.split(','));
    all.filter(|option| {
        let is_servers = option.starts_with("memory=") || option.starts_with("log=");
        let is_left_out = *option == REMOUNT || is_servers || is_for_mount(option);
        !(is_left_out || arguments.sloppy && is_unknown(option))
    })
}

fn mount(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let fail = |error| Failure::new(NAME, error).with_code(SYSTEM_ERROR);
    let program = std::env::current_exe().map_err(fail)?;
    let mut command = Command::new(program);
    command.args(command_line(arguments));
    if !arguments.verbose {
        command.stdout(Stdio::null());
    }
    let status = command.status().map_err(fail)?;
    Ok(ExitCode::from(match status.code() {
        Some(0) => 0,
        Some(code) if code == i32::from(USAGE) => WRONG_INVOCATION,
        Some(_) => MOUNT_FAILED,
        None => SYSTEM_ERROR,
    }))
}

/// The arguments of `weir` that do what mount(8) asks for.
fn command_line(arguments: &Arguments) -> Vec<OsString> {
    let mut line: Vec<OsString> = vec!["mount".into(), "--background".into()];
    let mut kept = Vec::new();
    for option in arguments.options.iter().flat_map(|list| list.split(',')) {
        if let Some(size) = option.strip_prefix("memory=") {
            line.extend(["--memory".into(), size.into()]);
        } else if let Some(file) = option.strip_prefix("log=") {
            line.extend(["--log".into(), file.into()]);
        } else if !(is_for_mount(option) || arguments.sloppy && is_unknown(option)) {
            kept.push(option);
        }
    }
    if !kept.is_empty() {
        line.extend(["-o".into(), kept.join(",").into()]);
    }
    // A name may begin with a dash.
    line.extend(["--".into(), arguments.volume.clone().into(), arguments.dir.clone().into()]);
    line
}

/// Who may mount, and remarks: mount(8) has looked at them already.
fn is_for_mount(option: &str) -> bool {
    let name = option.split_once('=').map_or(option, |(name, _)| name);
    matches!(name, "user" | "nouser" | "users" | "owner" | "group" | "comment" | "uhelper")
}

fn is_unknown(option: &str) -> bool {
    MountOptions::default().apply(option).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    fn line(given: &[&str]) -> String {
        let arguments = Arguments::try_parse_from([&[NAME][..], given].concat()).unwrap();
        let line = command_line(&arguments);
        line.iter().map(|part| part.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn only_the_name_of_the_helper_makes_it_one() {
        for (name, is) in [("/sbin/mount.weir", true), ("mount.weir", true), ("/bin/weir", false)] {
            assert_eq!(is_meant(Some(OsStr::new(name))), is, "{name}");
        }
        assert!(!is_meant(None) && !is_meant(Some(OsStr::from_bytes(b"/"))));
    }

    #[test]
    fn what_mount_gives_becomes_a_command_line_of_weir() {
        assert_eq!(line(&["/v", "/d"]), "mount --background -- /v /d");
        assert_eq!(
            line(&["/v", "/d", "-n", "-v", "-o", "rw,noatime,user=jo,memory=1G,log=/l,nofail"]),
            "mount --background --memory 1G --log /l -o rw,noatime,nofail -- /v /d"
        );
        // Together, and before, as other programs write them.
        assert_eq!(
            line(&["-sn", "-o", "ro,sparkling", "v", "d"]),
            "mount --background -o ro -- v d"
        );
        assert_eq!(line(&["v", "d", "-o", "glitter"]), "mount --background -o glitter -- v d");
    }
}
