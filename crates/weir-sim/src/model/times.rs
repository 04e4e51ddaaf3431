//! The times of a model inode: when something may have happened, and what a crash may leave of it.
//!
//! The model does not read the engine's clock: it knows between which two readings a call ran. A change of names or
//! attributes has its times in the log with it. A write moves times in memory, and a later operation of the inode logs
//! them: until one has, or a full sync has returned, a crash may leave what there was before.

use weir::Timestamp;

/// Between two moments, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Not before.
    pub first: Timestamp,
    /// Not after.
    pub last: Timestamp,
}

impl Span {
    /// Nobody knows when.
    pub const ANY: Self = Self {
        first: Timestamp { seconds: i64::MIN, nanoseconds: 0 },
        last: Timestamp { seconds: i64::MAX, nanoseconds: Timestamp::MAX_NANOSECONDS },
    };

    /// At this moment.
    pub const fn exactly(at: Timestamp) -> Self {
        Self { first: at, last: at }
    }

    /// It may have been then.
    pub fn holds(&self, at: Timestamp) -> bool {
        self.first <= at && at <= self.last
    }
}

/// One value of a time.
#[derive(Debug, Clone, Copy)]
struct Value {
    span: Span,
    /// The operation that set it.
    step: u64,
    /// It was set for certain: what came before is past.
    certain: bool,
}

/// What a time is, and what a crash may leave of it.
#[derive(Debug, Clone)]
pub struct Times {
    /// Oldest first; the first of all is certain.
    values: Vec<Value>,
}

impl Times {
    /// Set by operation `step`, in the log with it.
    pub fn new(span: Span, step: u64) -> Self {
        Self { values: vec![Value { span, step, certain: true }] }
    }

    /// Operation `step` sets it, and has it in the log.
    pub fn set(&mut self, span: Span, step: u64) {
        self.values.clear();
        self.values.push(Value { span, step, certain: true });
    }

    /// Operation `step` sets it in memory.
    pub fn set_in_memory(&mut self, span: Span, step: u64) {
        self.values.push(Value { span, step, certain: true });
    }

    /// Operation `step` sets it, or does not.
    pub fn may_set(&mut self, span: Span, step: u64) {
        self.values.push(Value { span, step, certain: false });
    }

    fn newest(&self) -> usize {
        self.values.iter().rposition(|value| value.certain).unwrap_or(0)
    }

    /// What it may be now.
    pub fn now(&self) -> impl Iterator<Item = Span> + '_ {
        self.values[self.newest()..].iter().map(|value| value.span)
    }

    /// It may be this: now, if `exact`, or after a crash.
    pub fn may_be(&self, at: Timestamp, exact: bool) -> bool {
        let first = if exact { self.newest() } else { 0 };
        self.values[first..].iter().any(|value| value.span.holds(at))
    }

    /// What is in memory is in the log as well.
    pub fn settle(&mut self) {
        self.values.drain(..self.newest());
    }

    /// The operation whose value is the newest.
    pub fn newest_step(&self) -> u64 {
        self.values[self.newest()].step
    }

    /// There is anything to do for [`Self::settle_from`].
    pub fn is_affected(&self, step: u64) -> bool {
        self.values.iter().skip(1).any(|value| value.certain && value.step == step)
    }

    /// What operation `step` has set is in the log: what was set before it is past.
    pub fn settle_from(&mut self, step: u64) {
        let place = self.values.iter().rposition(|value| value.certain && value.step == step);
        self.values.drain(..place.unwrap_or(0));
    }

    /// For people.
    pub fn describe(&self, exact: bool) -> String {
        let first = if exact { self.newest() } else { 0 };
        let text = |time: Timestamp| format!("{}.{:09}", time.seconds, time.nanoseconds);
        let texts = self.values[first..].iter().map(|Value { span, .. }| {
            if span.first == span.last {
                text(span.first)
            } else {
                format!("{} to {}", text(span.first), text(span.last))
            }
        });
        texts.collect::<Vec<_>>().join(" | or ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanoseconds: 0 }
    }

    fn may_be(times: &Times, exact: bool) -> Vec<i64> {
        (0..10).filter(|seconds| times.may_be(at(*seconds), exact)).collect()
    }

    #[test]
    fn a_crash_may_take_back_what_is_in_memory_only() {
        let mut times = Times::new(Span::exactly(at(1)), 1);
        times.set_in_memory(Span { first: at(2), last: at(3) }, 2);
        times.may_set(Span::exactly(at(5)), 3);
        assert_eq!(may_be(&times, false), [1, 2, 3, 5]);
        assert_eq!(may_be(&times, true), [2, 3, 5]);
        let mut later = times.clone();
        later.set_in_memory(Span::exactly(at(7)), 4);
        later.settle_from(times.newest_step());
        assert_eq!(may_be(&later, false), [2, 3, 5, 7]);
        times.set(Span::exactly(at(9)), 5);
        assert_eq!(may_be(&times, false), [9]);
    }
}
