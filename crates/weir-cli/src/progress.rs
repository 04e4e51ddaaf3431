//! A progress bar for what takes longer than two seconds, on a terminal only.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::failure::harmless;

const PATIENCE: Duration = Duration::from_secs(2);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things.
    Items,
}

/// See the module's head.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    shown: AtomicBool,
}

impl Progress {
    /// A bar up to `total`, or a counter where it is not known.
    pub fn new(what: &'static str, unit: Unit, total: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        let template = match (unit, total) {
            (Unit::Bytes, Some(_)) => {
                "{prefix} [{wide_bar}] {bytes}/{total_bytes} {binary_bytes_per_sec} eta {eta}"
            }
            (Unit::Bytes, None) => "{spinner} {prefix} {bytes} {binary_bytes_per_sec} {wide_msg}",
            (Unit::Items, Some(_)) => "{prefix} [{wide_bar}] {pos}/{len} eta {eta}",
            (Unit::Items, None) => "{spinner} {prefix} {pos} {wide_msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(what);
        Self { bar, began: Instant::now(), shown: AtomicBool::new(false) }
    }

    fn show_when_due(&self) {
        let due = !self.shown.load(Ordering::Relaxed) && self.began.elapsed() > PATIENCE;
        if due && !self.shown.swap(true, Ordering::Relaxed) && std::io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// `amount` more.
    pub fn add(&self, amount: u64) {
        self.bar.inc(amount);
        self.show_when_due();
    }

    /// `position` in all.
    pub fn set(&self, position: u64) {
        self.bar.set_position(position);
        self.show_when_due();
    }

    /// How far it will go.
    pub fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }

    /// What is worked on.
    pub fn message(&self, message: impl std::fmt::Display) {
        if self.shown.load(Ordering::Relaxed) {
            self.bar.set_message(harmless(message));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
