//! `weir stat`: attributes without a mount.

use clap::Args;
use serde_json::{Value, json};
use weir::{Attr, FileType, Volume};

use crate::failure::{Failure, Outcome};
use crate::open::{print, print_json, with_volume};
use crate::place::{Place, parse_place};
use crate::show;

/// Arguments of `weir stat`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  weir stat disk.weir:/etc/fstab\n  weir stat --json disk.weir:/"
)]
pub struct StatArgs {
    /// A file in a volume; a symbolic link is shown, not followed
    #[arg(value_name = "VOL:/PATH", value_parser = parse_place)]
    pub place: Place,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

struct Found {
    attr: Attr,
    target: Option<Vec<u8>>,
    xattrs: Vec<(Vec<u8>, usize)>,
}

fn look(volume: &Volume, place: &Place) -> weir::Result<Found> {
    let attr = volume.symlink_metadata(&place.path)?;
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
    let place = &args.place;
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
        format!("    path: {place}"),
        format!("    type: {}", show::type_name(attr.file_type)),
        format!("   inode: {}  links: {}", attr.ino, attr.links),
        format!("    mode: {} ({:04o})", show::mode_text(attr), attr.permissions),
        format!("   owner: {}:{}", attr.uid, attr.gid),
        format!("    size: {}  allocated: {}", attr.size_bytes, attr.blocks * 4096),
    ];
    if let Some(target) = &found.target {
        lines.push(format!("  target: {}", String::from_utf8_lossy(target)));
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
        lines.push(format!("   xattr: {} ({bytes} bytes)", String::from_utf8_lossy(name)));
    }
    lines.join("\n") + "\n"
}
