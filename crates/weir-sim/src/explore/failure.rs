//! What is reported when a volume did not survive.

use serde::Serialize;

use crate::model::Outcome;
use crate::system::SystemError;

/// A finding, with all that is needed to understand and repeat it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// What is wrong, in one line.
    pub summary: String,
    /// What was expected and found, and where the crash was, outermost last.
    pub details: Vec<String>,
    /// The operations, as far as they were executed, with their results.
    pub operations: Vec<String>,
    /// The last device calls of the session that broke.
    pub trace: Vec<String>,
    /// The last device calls of the workload before the crash, where that is another session.
    pub workload_trace: Vec<String>,
}

impl Failure {
    /// A finding without context yet.
    pub fn new(summary: impl Into<String>) -> Self {
        Self {
            summary: summary.into(),
            details: Vec::new(),
            operations: Vec::new(),
            trace: Vec::new(),
            workload_trace: Vec::new(),
        }
    }

    /// Adds what was expected and found.
    #[must_use]
    pub fn with(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.details.extend(lines);
        self
    }

    /// Adds the device calls of a session; inner sessions come first.
    #[must_use]
    pub fn with_trace(mut self, device: &crate::device::SimDevice) -> Self {
        let calls = || device.trace().iter().map(ToString::to_string).collect();
        if self.trace.is_empty() {
            self.trace = calls();
        } else {
            self.workload_trace = calls();
        }
        self
    }
}

/// Runs `body`; a panic of the system under test becomes a finding.
pub fn guard<T>(what: &str, body: impl FnOnce() -> T) -> Result<T, Failure> {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    panics::quiet(|| catch_unwind(AssertUnwindSafe(body))).map_err(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("(no message)");
        Failure::new(format!("panic while {what}: {text}")).with(panics::last_place())
    })
}

/// Keeps panics that are caught as findings from being printed, thread by thread.
mod panics {
    use std::cell::{Cell, RefCell};
    use std::sync::Once;

    thread_local! {
        static QUIET: Cell<u32> = const { Cell::new(0) };
        static PLACE: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    pub fn quiet<T>(body: impl FnOnce() -> T) -> T {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                if QUIET.get() == 0 {
                    return previous(info);
                }
                let mut lines: Vec<String> =
                    info.location().map(|place| format!("at {place}")).into_iter().collect();
                lines.extend(callers());
                PLACE.set(lines);
            }));
        });
        QUIET.set(QUIET.get() + 1);
        let result = body();
        QUIET.set(QUIET.get() - 1);
        result
    }

    /// The engine's functions on the stack, innermost first.
    fn callers() -> Vec<String> {
        let backtrace = std::backtrace::Backtrace::force_capture().to_string();
        let frames = backtrace.lines().filter_map(|line| {
            let (_, name) = line.trim().split_once(": ")?;
            (name.starts_with("weir::") || name.starts_with("<weir::"))
                .then(|| format!("in {name}"))
        });
        frames.take(12).collect()
    }

    pub fn last_place() -> Vec<String> {
        PLACE.take()
    }
}

/// The result of an operation, for a report.
pub(super) fn describe(result: &Result<Outcome, SystemError>) -> String {
    match result {
        Ok(Outcome::Data(data)) => format!("{} bytes", data.len()),
        Ok(outcome) => format!("{outcome:?}"),
        Err(error) => error.to_string(),
    }
}

/// Where two contents part.
pub(super) fn first_difference(found: &[u8], expected: &[u8]) -> String {
    let place = found.iter().zip(expected).position(|(left, right)| left != right);
    place.map_or_else(
        || "the lengths differ".to_owned(),
        |place| {
            let start = place / 8 * 8;
            let end = |bytes: &[u8]| bytes.len().min(start + 64);
            format!(
                "first difference at {place}: {:02x?}, expected {:02x?}",
                &found[start..end(found)],
                &expected[start..end(expected)]
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_finding_with_its_text_and_place() {
        let failure = guard("testing", || {
            assert!(std::hint::black_box(false), "broken");
        })
        .unwrap_err();
        assert_eq!(failure.summary, "panic while testing: broken");
        assert!(failure.details[0].contains("failure.rs"));
        assert_eq!(guard("testing", || 7), Ok(7));
    }
}
