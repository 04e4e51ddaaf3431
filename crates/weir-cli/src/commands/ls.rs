//! `weir ls`: lists a directory without a mount.

use std::io::IsTerminal;

use clap::Args;
use serde_json::{Value, json};
use weir::{Attr, DirEntry, Error, FileType, Volume};

use crate::failure::{Failure, Outcome, harmless};
use crate::open::{print, print_json, with_volume};
use crate::place::{Place, place_parser};
use crate::show;

/// Arguments of `weir ls`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  weir ls disk.weir:/\n  weir ls -l disk.weir:/etc\n  weir ls --json disk.weir:/"
)]
pub struct LsArgs {
    /// A directory or file in a volume
    #[arg(value_name = "VOL:/PATH", value_parser = place_parser(), default_value = None, required = true)]
    pub place: Place,
    /// One line each with mode, links, owner, size, time of change (UTC) and name
    #[arg(short, long)]
    pub long: bool,
    /// As JSON, with all attributes; times as RFC 3339 has them, in UTC
    #[arg(long)]
    pub json: bool,
}

struct Row {
    entry: DirEntry,
    attr: Option<Attr>,
    target: Option<Vec<u8>>,
}

/// Runs the command.
pub fn run(args: &LsArgs) -> Outcome {
    let rows = with_volume(&args.place.volume, true, |volume| collect(volume, args))?;
    if args.json {
        return print_json(&Value::Array(rows.iter().map(row_json).collect()));
    }
    let quote = std::io::stdout().is_terminal();
    let mut text = Vec::new();
    for row in &rows {
        if args.long {
            text.extend_from_slice(long_line(row).as_bytes());
        }
        push_name(&mut text, &row.entry.name, quote);
        if let Some(target) = row.target.as_ref().filter(|_| args.long) {
            text.extend_from_slice(b" -> ");
            push_name(&mut text, target, quote);
        }
        text.push(b'\n');
    }
    print(&text)
}

fn collect(volume: &Volume, args: &LsArgs) -> Outcome<Vec<Row>> {
    let place = &args.place;
    let fail = |error: weir::Error| Failure::inside(place, &error);
    let attr = match volume.metadata(place.named_path()) {
        // As ls(1): of a link that leads nowhere there is still the link.
        Err(Error::NotFound | Error::TooManySymlinks) if !place.must_be_directory => {
            volume.symlink_metadata(&place.path)
        }
        attr => attr,
    };
    let attr = attr.map_err(fail)?;
    let mut entries = if attr.file_type == FileType::Directory {
        volume.read_dir(&place.path).map_err(fail)?
    } else {
        let name = place.name().unwrap_or(b"/").to_vec();
        vec![DirEntry { name, ino: attr.ino, file_type: attr.file_type, cookie: 0 }]
    };
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    let row = |entry: DirEntry| {
        if !args.long && !args.json {
            return Ok(Row { entry, attr: None, target: None });
        }
        let attr = volume.getattr(entry.ino).map_err(fail)?;
        let is_link = entry.file_type == FileType::Symlink;
        let target = is_link.then(|| volume.readlink(entry.ino)).transpose().map_err(fail)?;
        Ok(Row { entry, attr: Some(attr), target })
    };
    entries.into_iter().map(row).collect()
}

fn long_line(row: &Row) -> String {
    let Some(attr) = &row.attr else { return String::new() };
    let size = match attr.file_type {
        FileType::CharDevice | FileType::BlockDevice => {
            let (major, minor) = show::device_numbers(attr.rdev);
            format!("{major}, {minor}")
        }
        _ => attr.size_bytes.to_string(),
    };
    let time = show::time_text(attr.mtime);
    // Minutes are enough for people; `weir stat` and --json have nanoseconds.
    let time = time.get(..16).unwrap_or(&time).replace('T', " ");
    format!(
        "{} {:>3} {:>5} {:>5} {size:>12} {time} ",
        show::mode_text(attr),
        attr.links,
        attr.uid,
        attr.gid
    )
}

/// The name, byte for byte; on a terminal without what that would obey, or show as something else.
fn push_name(text: &mut Vec<u8>, name: &[u8], quote: bool) {
    if !quote {
        text.extend_from_slice(name);
        return;
    }
    for chunk in name.utf8_chunks() {
        text.extend_from_slice(harmless(chunk.valid()).as_bytes());
        text.extend_from_slice(chunk.invalid().escape_ascii().to_string().as_bytes());
    }
}

fn row_json(row: &Row) -> Value {
    let mut value = row.attr.as_ref().map_or_else(|| json!({}), show::attr_json);
    value["name"] = show::text_json(&row.entry.name);
    if let Some(target) = &row.target {
        value["target"] = show::text_json(target);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_byte_of_a_name_that_it_would_obey_and_a_pipe_gets_all() {
        let name = b"a\x1b[2J\n\xc2\x9b1m\xc3\xbc\x9bz";
        let shown = |quote| {
            let mut text = Vec::new();
            push_name(&mut text, name, quote);
            text
        };
        assert_eq!(shown(false), name);
        assert_eq!(shown(true), b"a\\x1b[2J\\n\\x9b1m\xc3\xbc\\x9bz");
    }
}
