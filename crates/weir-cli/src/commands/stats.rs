//! The statistics half of `weir stat`: of a mount, from its server; of a volume nobody uses, what the superblock says.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use weir::stats::Report;
use weir_mount::{client, stats};

use crate::asking::check_unless;
use crate::commands::info;
use crate::commands::sync::{open_asked, refused};
use crate::failure::{Failure, Outcome};
use crate::open::{mounted_at, print, print_json};

/// Between two differences.
const INTERVAL: Duration = Duration::from_secs(1);
/// How soon Ctrl-C is noticed.
const PATIENCE: Duration = Duration::from_millis(20);

/// How statistics are shown.
#[derive(Debug, Clone, Copy)]
pub struct Show {
    /// As JSON: one object, with `watch` one a line.
    pub json: bool,
    /// Every second what was added, until Ctrl-C.
    pub watch: bool,
    /// Ends after so many differences; 0: never.
    pub count: u64,
}

/// The statistics of the mount that `file` is on.
pub fn of_mount(path: &Path, file: &File) -> Outcome<Value> {
    let text = client::stats(file).map_err(|error| refused(path, &error))?;
    serde_json::from_slice(&text)
        .map_err(|error| Failure::new(path.display(), format!("unexpected statistics: {error}")))
}

/// Shows the statistics of a mount, given any directory of it.
pub fn show_mount(path: &Path, show: Show) -> Outcome {
    let dir = open_asked(path)?;
    let first = of_mount(path, &dir)?;
    if !show.watch {
        if show.json {
            return print_json(&first);
        }
        return print(stats::from_json(&first).to_string().as_bytes());
    }
    watch(path, &dir, &stats::from_json(&first), show)
}

fn watch(path: &Path, dir: &File, first: &Report, show: Show) -> Outcome {
    // Ctrl-C ends between two reports, not in the middle of one.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ended))
            .map_err(|error| Failure::new("signals", error))?;
    }
    let began = Instant::now();
    let mut before = first.clone();
    for round in 1_u32.. {
        while began.elapsed() < INTERVAL * round {
            if ended.load(Ordering::Relaxed) {
                return Ok(());
            }
            sleep(PATIENCE.min((INTERVAL * round).saturating_sub(began.elapsed())));
        }
        // It may have been stopped since; and who is asked in the kernel hears no Ctrl-C.
        let is_ended = || ended.load(Ordering::Relaxed);
        check_unless(path, path, is_ended)?;
        if is_ended() {
            return Ok(());
        }
        let now = stats::from_json(&of_mount(path, dir)?);
        let added = now.since(&before);
        if show.json {
            print(format!("{}\n", stats::to_json(&added)).as_bytes())?;
        } else {
            print(format!("--- {} s\n{added}", began.elapsed().as_secs()).as_bytes())?;
        }
        if u64::from(round) == show.count {
            break;
        }
        before = now;
    }
    Ok(())
}

/// Shows a volume: the statistics of its mount if it has one, what is on the disk if nobody uses it.
pub fn show_volume(path: &Path, show: Show) -> Outcome {
    if let Some(dir) = mounted_at(path) {
        check_unless(path, &dir, || false)?;
        return show_mount(&dir, show);
    }
    if show.watch {
        // Also when it is in use: only that program could tell.
        info::check_free(path, "its statistics are kept by the program that has it open")?;
        let shown = path.display();
        return Err(Failure::new(
            shown,
            "not in use: there is nothing to watch: mount it, then: weir stat --watch DIR",
        ));
    }
    info::check_free(
        path,
        "only that program knows its statistics (Volume::stats); of a mount: weir stat DIR",
    )?;
    info::run(&info::InfoArgs { volume: path.to_owned(), json: show.json })
}
