//! Moments in which a disk stands still: requests are in flight, and none of them ends.
//!
//! A disk that is busy ends something every millisecond, since nobody's requests are larger than a megabyte. The disk of a virtual machine now and then
//! ends nothing for 20 to 300 ms, whoever uses it and through whatever file system. A single such moment is the p99.9 of half a minute of
//! open-loop operations. So they are watched for, reported, and percentiles are given with and without the operations that they struck.
//! What a file system makes others wait for is not hidden by that: as long as its own requests end, the disk moves. A shorter pause counts
//! too, if so little is in flight that it takes a disk of 3 GiB/s no such time, however large each request is.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::BlockDevice;

/// A shorter pause is none ...
const LEAST: Duration = Duration::from_millis(15);
/// ... but where at most so many requests were in flight all the time, which are 20 MiB if the kernel has made each as large as it can, ...
const FEW: u64 = 5;
/// ... it is one from here on.
const LEAST_OF_FEW: Duration = Duration::from_millis(8);
/// How often is looked.
const STEP: Duration = Duration::from_millis(1);

/// What `/sys/block/*/stat` says that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    ended: u64,
    in_flight: u64,
}

/// Reads, writes, discards and flushes that have ended, and what is in flight.
fn parse(line: &str) -> Option<Progress> {
    let f: Vec<u64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    let later = |at: usize| f.get(at).copied().unwrap_or(0);
    let ended = *f.first()? + *f.get(4)? + later(11) + later(15);
    Some(Progress { ended, in_flight: *f.get(8)? })
}

/// Finds standstills in what was seen. Pure.
struct Tracker {
    /// When the disk was last seen to move or to be idle.
    since: Instant,
    last: Progress,
    /// Most that was in flight since then.
    most_in_flight: u64,
    found: Vec<Range<Instant>>,
}

impl Tracker {
    fn new(at: Instant, progress: Progress) -> Self {
        let most_in_flight = progress.in_flight;
        Tracker { since: at, last: progress, most_in_flight, found: Vec::new() }
    }

    fn see(&mut self, at: Instant, progress: Progress) {
        let was_idle = self.last.in_flight == 0;
        let moves = progress.ended != self.last.ended;
        self.last = progress;
        if moves && !was_idle {
            self.close(at);
        }
        if moves || was_idle {
            self.since = at;
            self.most_in_flight = 0;
        }
        self.most_in_flight = self.most_in_flight.max(progress.in_flight);
    }

    fn close(&mut self, at: Instant) {
        let least = if self.most_in_flight <= FEW { LEAST_OF_FEW } else { LEAST };
        if at.saturating_duration_since(self.since) >= least {
            self.found.push(self.since..at);
        }
    }
}

/// Looks at a disk until it is stopped.
pub struct StandstillWatch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<Range<Instant>>>>,
}

impl StandstillWatch {
    /// Begins to look at `disk`; at nothing where there is none.
    pub fn start(disk: Option<&BlockDevice>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let path = disk.map(|disk| PathBuf::from("/sys/block").join(&disk.name).join("stat"));
        let ask = move || parse(&fs::read_to_string(path.as_ref()?).ok()?);
        let asked = Arc::clone(&stop);
        let watch = move || {
            let Some(first) = ask() else { return Vec::new() };
            let mut tracker = Tracker::new(Instant::now(), first);
            while !asked.load(Ordering::Relaxed) {
                std::thread::sleep(STEP);
                if let Some(progress) = ask() {
                    tracker.see(Instant::now(), progress);
                }
            }
            if tracker.last.in_flight > 0 {
                tracker.close(Instant::now());
            }
            tracker.found
        };
        // Without a thread nothing is seen, which is what a disk that moves looks like.
        let thread = std::thread::Builder::new().name("standstills".into()).spawn(watch).ok();
        Self { stop, thread }
    }

    /// From when to when it stood still.
    pub fn stop(mut self) -> Vec<Range<Instant>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_stands_still_when_requests_are_in_flight_and_none_ends() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let mut tracker = Tracker::new(begun, Progress { ended: 5, in_flight: 1 });
        // (ms, ended, in flight): a short pause of many, a long one, idleness, a long one that begins after idleness, short ones of few.
        let seen = [
            (2, 6, 1),
            (14, 6, 6),
            (16, 7, 2),
            (30, 7, 3),
            (50, 7, 40),
            (52, 9, 0),
            (100, 9, 0),
            (102, 9, 1),
            (140, 9, 1),
            (141, 10, 1),
            (148, 11, 5),
            (152, 11, 5),
            (156, 12, 6),
            (163, 13, 0),
        ];
        for (ms, ended, in_flight) in seen {
            tracker.see(at(ms), Progress { ended, in_flight });
        }
        assert_eq!(tracker.found, [at(16)..at(52), at(102)..at(141), at(148)..at(156)]);
    }

    #[test]
    fn every_kind_of_request_counts_as_movement() {
        let line = "1 0 8 0 2 0 16 0 7 0 0 3 0 0 0 4 0";
        assert_eq!(parse(line), Some(Progress { ended: 10, in_flight: 7 }));
        assert_eq!(parse("1 0 8 0 2 0 16 0 7 0 0"), Some(Progress { ended: 3, in_flight: 7 }));
        assert_eq!(parse("1 2"), None);
    }

    #[test]
    fn without_a_disk_nothing_stands_still() {
        assert_eq!(StandstillWatch::start(None).stop(), []);
        let gone = BlockDevice { name: "no-such-disk".into() };
        assert_eq!(StandstillWatch::start(Some(&gone)).stop(), []);
    }
}
