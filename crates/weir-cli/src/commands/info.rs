//! `weir info`: what a volume is, from its superblock, and how full, from an open of it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use weir::device::posix::{OpenMode, PosixDevice};
use weir::format::geometry::{Geometry, TAIL_BLOCKS};
use weir::format::superblock::{Superblock, choose_superblock};
use weir::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use weir::{Error, StatFs, Timestamp};
use weir_mount::stats::METRICS;

use crate::asking::{check_answers, check_unless};
use crate::commands::stats;
use crate::commands::sync::open_asked;
use crate::failure::{Failure, Outcome, harmless};
use crate::open::{mounted_at, once_closed, open, print, print_json};
use crate::show;
use crate::size;

/// Arguments of `weir info`.
#[derive(Debug, Args)]
#[command(
    long_about = "Show what a volume is, whether it was closed cleanly, and how full it is. Of a \
                  volume in use by another program only what the superblock says is shown; of a \
                  mounted one also the counters since it was mounted.",
    after_help = "Examples:\n  weir info disk.weir\n  weir info --json disk.weir | jq .free_bytes"
)]
pub struct InfoArgs {
    /// A file or block device
    #[arg(value_name = "VOL")]
    pub volume: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &InfoArgs) -> Outcome {
    let path = args.volume.as_path();
    let fail = |error: Error| Failure::volume(path, &error);
    check_answers(path)?;
    let locked = once_closed(path, || {
        let device = PosixDevice::open(path, OpenMode::ReadOnly)?;
        choose_superblock(&device).map(|(superblock, _)| superblock)
    });
    let (superblock, in_use) = match locked {
        Err(Error::InUse(who)) => (read_unlocked(path)?, Some(who)),
        result => (result.map_err(fail)?, None),
    };
    let mounted = in_use.as_ref().and_then(|_| mounted_at(path));
    if let Some(dir) = &mounted {
        check_unless(path, dir, || false)?;
    }
    let space = if in_use.is_some() {
        mounted.as_deref().and_then(live_space)
    } else {
        let volume = open(path, true)?;
        let space = volume.statfs();
        volume.close().map_err(fail)?;
        Some(space)
    };
    let counters = mounted.and_then(|dir| live_counters(path, &dir));
    // A mount that was shut down is still in use, and that is not all there is to say.
    let in_use =
        in_use.map(|who| match counters.as_ref().map(|counters| &counters["volume"]["state"]) {
            Some(Value::String(state)) if state != "ok" => format!("{who}: {state}"),
            _ => who,
        });
    if args.json {
        let mut value = as_json(path, &superblock, in_use.as_deref(), space.as_ref());
        if let Some(counters) = counters {
            value["counters"] = counters;
        }
        return print_json(&value);
    }
    let mut text = as_text(path, &superblock, in_use.as_deref(), space.as_ref());
    if let Some(counters) = counters {
        text.push_str(&counters_text(&counters));
    }
    print(text.as_bytes())
}

/// The newest valid superblock of a volume that someone else writes: a copy caught half written
/// fails its checksum, and another one is valid.
pub(super) fn read_unlocked(path: &Path) -> Outcome<Superblock> {
    let file = File::open(path).map_err(|error| Failure::host(path, &error))?;
    newest_superblock(&file, path)
}

/// The same of a file that is open, and called `path`.
pub(super) fn newest_superblock(file: &File, path: &Path) -> Outcome<Superblock> {
    let fail = |error: io::Error| Failure::host(path, &error);
    let end_block = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))
        .map_err(|error| fail(error.into()))?
        / BLOCK_BYTES_U64;
    let tail = end_block.saturating_sub(TAIL_BLOCKS);
    let slots = [0, 1].map(Geometry::superblock_block);
    let mut block = [0; BLOCK_BYTES];
    let mut best: Option<Superblock> = None;
    for place in slots.into_iter().chain(slots.map(|slot| tail + slot)) {
        if file.read_exact_at(&mut block, place * BLOCK_BYTES_U64).is_err() {
            continue;
        }
        let Ok(found) = Superblock::decode(&block, place) else { continue };
        if best.as_ref().is_none_or(|best| best.generation < found.generation) {
            best = Some(found);
        }
    }
    best.ok_or_else(|| Failure::new(path.display(), "in use, and no superblock could be read"))
}

/// What the mount of a volume in use says of its space.
fn live_space(dir: &Path) -> Option<StatFs> {
    let space = rustix::fs::statvfs(dir).ok()?;
    Some(StatFs {
        total_blocks: space.f_blocks,
        free_blocks: space.f_bfree,
        available_blocks: space.f_bavail,
        inodes: space.f_files.saturating_sub(space.f_ffree),
        free_inodes: space.f_ffree,
        max_name_bytes: space.f_namemax as u32,
    })
}

/// The counters of the mount at `dir` of a volume in use.
fn live_counters(path: &Path, dir: &Path) -> Option<Value> {
    stats::of_mount(path, &open_asked(dir).ok()?).ok()
}

/// Refuses a volume that a program has open; `hint` says what that means.
pub(super) fn check_free(path: &Path, hint: &str) -> Outcome {
    match once_closed(path, || PosixDevice::open(path, OpenMode::ReadOnly).map(drop)) {
        Ok(()) => Ok(()),
        Err(Error::InUse(who)) => {
            Err(Failure::new(path.display(), format!("in use: {who}: {hint}")))
        }
        Err(error) => Err(Failure::volume(path, &error)),
    }
}

/// How far a line of counters reaches, if it is no single one.
const LINE_COLUMNS: usize = 80;
/// Where what is said of something begins.
const VALUE_COLUMN: usize = 12;

/// Each group of counters: `name value`, histograms by their count and bounds.
fn counters_text(counters: &Value) -> String {
    let Some(groups) = counters.as_object() else { return String::new() };
    let one = |name: &str, value: &Value| match value.as_object() {
        Some(histogram) if histogram.get("count").and_then(Value::as_u64) > Some(0) => format!(
            "{name} {}x mean {} p99<{}",
            histogram.get("count").unwrap_or(&Value::Null),
            histogram.get("mean").unwrap_or(&Value::Null),
            histogram.get("p99_below").unwrap_or(&Value::Null)
        ),
        Some(_) => format!("{name} never"),
        None => format!("{name} {}", value.to_string().trim_matches('"')),
    };
    let line = |(group, values): (&String, &Value)| {
        let shown = values.as_object().map_or_else(
            || vec![values.to_string()],
            |values| values.iter().map(|(name, value)| one(name, value)).collect(),
        );
        lines_of(group, &shown)
    };
    groups.iter().filter(|(name, _)| *name != METRICS).map(line).collect()
}

/// `name`, and behind it `shown`, one after the other, in lines of their own column.
fn lines_of(name: &str, shown: &[String]) -> String {
    let mut text = String::new();
    let mut line = format!("{name:<width$}", width = VALUE_COLUMN - 1);
    for (number, part) in shown.iter().enumerate() {
        let part = if number + 1 < shown.len() { format!("{part},") } else { part.clone() };
        if line.len() > VALUE_COLUMN && line.len() + 1 + part.len() > LINE_COLUMNS {
            text = text + &line + "\n";
            line = " ".repeat(VALUE_COLUMN - 1);
        }
        line = line + " " + &part;
    }
    text + &line + "\n"
}

/// The identity of a volume, as people write it.
pub(super) fn id_text(superblock: &Superblock) -> String {
    let digits = show::hex(&superblock.volume_id);
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    parts.map(|part| digits.get(part).unwrap_or_default().to_owned()).join("-")
}

fn state_text(superblock: &Superblock, in_use: Option<&str>) -> String {
    let state = match (in_use, superblock.clean) {
        (Some(who), _) => format!("in use: {who}"),
        (None, true) => "clean".to_owned(),
        (None, false) => {
            "not closed: the next open replays what is in the log, if anything".to_owned()
        }
    };
    if superblock.errors_seen {
        format!("{state}; damage was met in the last use: run weir fsck")
    } else {
        state
    }
}

fn as_text(
    path: &Path,
    superblock: &Superblock,
    in_use: Option<&str>,
    space: Option<&StatFs>,
) -> String {
    let geometry = &superblock.geometry;
    let created = show::time_text(Timestamp::from_ns(superblock.created_ns as i64));
    let features = &superblock.features;
    let mut lines = vec![
        format!("volume      {}", harmless(path.display())),
        format!("id          {}", id_text(superblock)),
        format!("label       {}", harmless(&superblock.label)),
        format!("state       {}", harmless(state_text(superblock, in_use))),
        format!("size        {}", size::show(geometry.total_blocks() * BLOCK_BYTES_U64)),
        format!("log         {}", size::show(geometry.log_blocks() * BLOCK_BYTES_U64)),
        format!("groups      {}", geometry.group_count()),
        format!("created     {created}"),
        format!("checkpoint  generation {}", superblock.root.generation),
        format!("durable lsn {} (when the superblock was written)", superblock.durable_lsn),
        format!(
            "features    compat {:#x}, ro-compat {:#x}, incompat {:#x}",
            features.compat, features.ro_compat, features.incompat
        ),
    ];
    if let Some(space) = space {
        let used_blocks = space.total_blocks.saturating_sub(space.free_blocks);
        let shown = |blocks: u64| size::show(blocks * BLOCK_BYTES_U64);
        lines.push(format!(
            "space       {} used, {} free of {}",
            shown(used_blocks),
            shown(space.free_blocks),
            shown(space.total_blocks)
        ));
        lines.push(format!("inodes      {}", space.inodes));
    }
    lines.join("\n") + "\n"
}

fn as_json(
    path: &Path,
    superblock: &Superblock,
    in_use: Option<&str>,
    space: Option<&StatFs>,
) -> Value {
    let geometry = &superblock.geometry;
    let features = &superblock.features;
    let mut value = json!({
        "volume": path.display().to_string(),
        "id": id_text(superblock),
        "label": superblock.label,
        "clean": superblock.clean,
        "errors_seen": superblock.errors_seen,
        "in_use": in_use,
        "size_bytes": geometry.total_blocks() * BLOCK_BYTES_U64,
        "log_bytes": geometry.log_blocks() * BLOCK_BYTES_U64,
        "groups": geometry.group_count(),
        "created_ns": superblock.created_ns,
        "superblock_generation": superblock.generation,
        "checkpoint_generation": superblock.root.generation,
        "durable_lsn": superblock.durable_lsn,
        "log_epoch": superblock.log_epoch,
        "features": {
            "compat": features.compat,
            "ro_compat": features.ro_compat,
            "incompat": features.incompat,
        },
    });
    if let Some(space) = space {
        value["total_bytes"] = json!(space.total_blocks * BLOCK_BYTES_U64);
        value["free_bytes"] = json!(space.free_blocks * BLOCK_BYTES_U64);
        value["available_bytes"] = json!(space.available_blocks * BLOCK_BYTES_U64);
        value["inodes"] = json!(space.inodes);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_lines_that_fit_a_terminal() {
        let histogram = |count: u64| json!({ "count": count, "mean": 7, "p99_below": 16 });
        let many: serde_json::Map<String, Value> =
            (0..40).map(|number| (format!("some_counter_{number}"), json!(number))).collect();
        let waits = json!({ "queue_ns": histogram(0), "flush_ns": histogram(3), "state": "ok" });
        let text = counters_text(&json!({ "many": many, "durability": waits, METRICS: [] }));
        assert!(text.lines().all(|line| line.len() <= LINE_COLUMNS), "{text}");
        assert_eq!(text.matches("some_counter_").count(), 40);
        assert!(text.lines().all(|line| line.as_bytes()[VALUE_COLUMN - 1] == b' '), "{text}");
        let waits = "durability  flush_ns 3x mean 7 p99<16, queue_ns never, state ok";
        assert!(text.lines().any(|line| line == waits), "{text}");
    }
}
