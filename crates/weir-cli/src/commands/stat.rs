//! `weir stat`: statistics of a mount or volume; attributes of a file without a mount.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use weir::{Attr, FileType, Volume};

use crate::asking::check_answers;
use crate::commands::info::read_unlocked;
use crate::commands::stats::{Show, show_mount, show_volume};
use crate::failure::{Failure, Outcome, USAGE, harmless};
use crate::open::{mount_above, print, print_json, with_volume};
use crate::place::Place;
use crate::show;

/// Arguments of `weir stat`.
#[derive(Debug, Args)]
#[command(
    long_about = "Of a directory of a mount: its statistics since it was mounted, with a histogram of \
                  every wait on the way to durability. Of a volume: the same if it is mounted, else \
                  what its superblock says. Of VOL:/PATH: the attributes of a file, without a mount. \
                  Times are in UTC.\n\n\
                  With --json: of a mount, and of a volume that is mounted, the groups of counters; \
                  of one that is not mounted what `weir info --json` prints; of a file its \
                  attributes, with times as RFC 3339 has them.",
    after_help = "Examples:\n  weir stat /mnt\n  weir stat --watch /mnt   # each second what was added\n  \
                  weir stat --json /mnt | jq .durability.flush_ns\n  \
                  weir stat disk.weir:/etc/fstab"
)]
pub struct StatArgs {
    /// A mounted directory, a volume, or a file in an unmounted volume (a symbolic link is shown,
    /// not followed)
    #[arg(value_name = "DIR|VOL|VOL:/PATH")]
    pub what: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Each second what was added since the last, until Ctrl-C
    #[arg(long, short)]
    pub watch: bool,
    /// With --watch: end after so many
    #[arg(long, value_name = "N", default_value_t = 0, requires = "watch")]
    pub count: u64,
}

/// What there is to show.
enum What<'a> {
    Mount(&'a Path),
    Volume(&'a Path),
    File(Place),
    Nothing(&'a Path),
}

/// A file or directory of that very name wins, so that any can be named.
fn what(path: &Path) -> What<'_> {
    match path.metadata() {
        Ok(meta) if meta.is_dir() => What::Mount(path),
        Ok(_) => What::Volume(path),
        Err(_) => match Place::parse(path.as_os_str()) {
            Some(place) => What::File(place),
            None => What::Nothing(path),
        },
    }
}

struct Found {
    attr: Attr,
    target: Option<Vec<u8>>,
    xattrs: Vec<(Vec<u8>, usize)>,
}

fn look(volume: &Volume, place: &Place) -> weir::Result<Found> {
    let attr = volume.symlink_metadata(place.named_path())?;
    let is_link = attr.file_type == FileType::Symlink;
    let target = is_link.then(|| volume.readlink(attr.ino)).transpose()?;
    let mut xattrs = Vec::new();
    for name in volume.listxattr(attr.ino)? {
        let value_bytes = volume.getxattr(attr.ino, &name)?.len();
        xattrs.push((name, value_bytes));
    }
    Ok(Found { attr, target, xattrs })
}

/// Runs the command.
pub fn run(args: &StatArgs) -> Outcome {
    let show = Show { json: args.json, watch: args.watch, count: args.count };
    check_answers(&args.what)?;
    match what(&args.what) {
        What::Mount(dir) => show_mount(dir, show),
        What::Volume(volume) => {
            // A volume can be on a mount of another one.
            if let Some(dir) = mount_above(volume).filter(|_| read_unlocked(volume).is_err()) {
                return Err(Failure::new(
                    volume.display(),
                    format!(
                        "is a file of a mount: its attributes: stat {}; statistics: weir stat {}",
                        volume.display(),
                        dir.display()
                    ),
                ));
            }
            show_volume(volume, show)
        }
        What::Nothing(path) => {
            path.metadata().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Failure::new(
                    path.display(),
                    "no such file or directory: give a mount, a volume, or VOL:/path",
                ),
                _ => Failure::host(path, &error),
            })?;
            show_volume(path, show)
        }
        What::File(place) if args.watch => {
            let what = "is a file: --watch is for mounts";
            Err(Failure::new(place, what).with_code(USAGE))
        }
        What::File(place) => show_file(&place, args),
    }
}

fn show_file(place: &Place, args: &StatArgs) -> Outcome {
    let found = with_volume(&place.volume, true, |volume| {
        look(volume, place).map_err(|error| Failure::inside(place, &error))
    })?;
    if args.json {
        let mut value = show::attr_json(&found.attr);
        value["path"] = show::text_json(&place.path);
        if let Some(target) = &found.target {
            value["target"] = show::text_json(target);
        }
        let xattrs = found
            .xattrs
            .iter()
            .map(|(name, bytes)| json!({ "name": show::text_json(name), "value_bytes": bytes }));
        value["xattrs"] = Value::Array(xattrs.collect());
        return print_json(&value);
    }
    print(text(place, &found).as_bytes())
}

fn text(place: &Place, found: &Found) -> String {
    let attr = &found.attr;
    let mut lines = vec![
        format!("    path: {}", harmless(place)),
        format!("    type: {}", show::type_name(attr.file_type)),
        format!("   inode: {}  links: {}", attr.ino, attr.links),
        format!("    mode: {} ({:04o})", show::mode_text(attr), attr.permissions),
        format!("   owner: {}:{}", attr.uid, attr.gid),
        format!("    size: {}  allocated: {}", attr.size_bytes, attr.blocks * 4096),
    ];
    if let Some(target) = &found.target {
        lines.push(format!("  target: {}", harmless(String::from_utf8_lossy(target))));
    }
    if matches!(attr.file_type, FileType::CharDevice | FileType::BlockDevice) {
        let (major, minor) = show::device_numbers(attr.rdev);
        lines.push(format!("  device: {major}, {minor}"));
    }
    for (name, time) in [
        ("  access", attr.atime),
        ("  modify", attr.mtime),
        ("  change", attr.ctime),
        ("   birth", attr.btime),
    ] {
        lines.push(format!("{name}: {}", show::time_text(time)));
    }
    for (name, bytes) in &found.xattrs {
        let name = harmless(String::from_utf8_lossy(name));
        lines.push(format!("   xattr: {name} ({bytes} bytes)"));
    }
    lines.join("\n") + "\n"
}
