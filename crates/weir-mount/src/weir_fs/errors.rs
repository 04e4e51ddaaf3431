//! Trouble of the device on its way to programs: counted, and told to people.
//!
//! Whoever meets an error may be a thread of the log: that nobody can be told must not end it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use weir::Error;
use weir::sync::Mutex;

use crate::errno::Errno;

/// Device errors told to the log before it falls silent.
const MAX_LOGGED_ERRORS: u64 = 100;

/// Hears lines for people. Called by threads that serve others: it should wait for little.
pub type LogSink = Box<dyn Fn(&str) + Send + Sync>;

/// Counts device trouble and tells the log of it.
pub(super) struct Errors {
    count: AtomicU64,
    logged: Mutex<Logged>,
    log: LogSink,
}

impl Errors {
    /// Nothing has happened yet; `log` hears of what does.
    pub(super) fn new(log: LogSink) -> Self {
        Self { count: AtomicU64::new(0), logged: Mutex::default(), log }
    }

    /// Requests that failed for trouble of the device.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// A line for people; lost where they cannot be told.
    pub(super) fn tell(&self, line: &str) {
        let _ = catch_unwind(AssertUnwindSafe(|| (self.log)(line)));
    }

    /// An engine error on its way to a program; device trouble is told to the log too.
    pub(super) fn fail(&self, error: Error) -> Errno {
        if is_trouble(&error) {
            self.count.fetch_add(1, Ordering::Relaxed);
            self.note(&error);
        }
        error.into()
    }

    /// What went wrong where no program has heard of it, or not yet: told to the log, if it is trouble of the device and news.
    pub(super) fn note(&self, error: &Error) {
        let text = error.to_string();
        if is_trouble(error) && self.logged.lock().is_news(error, &text) {
            self.tell(&text);
        }
    }
}

const fn is_trouble(error: &Error) -> bool {
    matches!(error, Error::Io(_) | Error::HostFull(_) | Error::Corrupt(_) | Error::Shutdown(_))
}

/// What the log was told of device trouble: the same thing once, and not without end. A host that is full is the same thing wherever it is
/// written to.
#[derive(Debug, Default)]
struct Logged {
    last: String,
    host_was_full: bool,
    lines: u64,
}

impl Logged {
    fn is_news(&mut self, error: &Error, text: &str) -> bool {
        let host_is_full = matches!(error, Error::HostFull(_));
        let is_known = self.last == text || self.host_was_full && host_is_full;
        if is_known || self.lines >= MAX_LOGGED_ERRORS {
            return false;
        }
        text.clone_into(&mut self.last);
        self.host_was_full = host_is_full;
        self.lines += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_hears_of_the_same_trouble_once_and_of_new_trouble_up_to_a_limit() {
        let mut logged = Logged::default();
        let mut is_news = |error: Error| logged.is_news(&error, &error.to_string());
        let read = |place: u64| Error::Io(format!("read at {place}"));
        assert!(is_news(read(1)));
        assert!(!is_news(read(1)));
        assert!(is_news(Error::HostFull("write at 1".into())));
        assert!(!is_news(Error::HostFull("write at 2".into())));
        assert!(is_news(read(1)));
        let told = (2..1000).filter(|place| is_news(read(*place))).count();
        assert_eq!(told as u64 + 3, MAX_LOGGED_ERRORS);
    }

    #[test]
    fn an_error_reaches_the_program_where_people_cannot_be_told() {
        let errors = Errors::new(Box::new(|_| panic!("the log is full")));
        assert_eq!(errors.fail(Error::Io("read at 1".into())), Errno::EIO);
        assert_eq!(errors.count(), 1);
    }
}
