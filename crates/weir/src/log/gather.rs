//! How many callbacks that nobody waits for are gathered before the log is written for them. Pure; a part of
//! [`super::core`], where the rules are.

use super::core::Lsn;

/// Most patient callbacks that are gathered before their frame is written.
pub const MOST_GATHERED: usize = 512;

/// What is known of the callbacks that nobody waits for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Gathering {
    /// Callbacks up to here are waited for; those above are gathered.
    hurried: Lsn,
    /// Callbacks above `hurried`.
    count: usize,
    /// So many are enough.
    enough: usize,
    /// Somebody waits: what is gathered follows what is under way.
    waited: bool,
    /// A sleeping driver has set its alarm.
    alarm: bool,
}

impl Gathering {
    /// Nothing is gathered; one is enough.
    pub fn new(durable: Lsn) -> Self {
        Self { hurried: durable, count: 0, enough: 1, waited: false, alarm: false }
    }

    /// As if many had come at once before.
    #[cfg(test)]
    pub fn expect(&mut self, enough: usize) {
        self.enough = enough;
    }

    /// How many would be enough now.
    #[cfg(test)]
    pub fn enough(&self) -> usize {
        self.enough
    }

    /// Callbacks that are gathered.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Callbacks up to here are waited for.
    pub fn hurried(&self) -> Lsn {
        self.hurried
    }

    /// A callback for `lsn` has come. `busy`: the log is writing or flushing. True: all are to go out.
    pub fn arrive(&mut self, lsn: Lsn, patient: bool, busy: bool) -> bool {
        if lsn <= self.hurried {
            return false;
        }
        self.count += 1;
        if !patient {
            return true;
        }
        let full = self.count >= self.enough;
        if full && busy {
            self.enough = (2 * self.enough).min(MOST_GATHERED);
        }
        full
    }

    /// Somebody waits, while `pending` callbacks have not ended. True: all are to go out now, since nothing is under way
    /// that they could follow.
    pub fn hurry(&mut self, pending: usize) -> bool {
        if self.count == 0 {
            return false;
        }
        self.enough = (pending / 2).clamp(1, MOST_GATHERED);
        self.waited = self.count < pending;
        !self.waited
    }

    /// Callbacks up to `last` are waited for from now on: these are all.
    pub fn go_out(&mut self, last: Option<Lsn>) {
        self.hurried = self.hurried.max(last.unwrap_or(0));
        self.count = 0;
        self.waited = false;
    }

    /// Everything up to `durable` has ended; `left` callbacks are still gathered. True: all are to go out.
    pub fn advance(&mut self, durable: Lsn, left: usize) -> bool {
        self.hurried = self.hurried.max(durable);
        self.count = left;
        std::mem::take(&mut self.waited)
    }

    /// Gathered callbacks must not lie for ever: a driver that goes to sleep sets an alarm, unless one has.
    pub fn wants_alarm(&self) -> bool {
        self.count > 0 && !self.alarm
    }

    /// A driver goes to sleep; true when it sets the alarm.
    pub fn set_alarm(&mut self) -> bool {
        let sets = self.wants_alarm();
        self.alarm |= sets;
        sets
    }

    /// There is no alarm any more.
    pub fn alarm_off(&mut self) {
        self.alarm = false;
    }

    /// The alarm rings: what was gathered is all that comes. True: it is to go out.
    pub fn ring(&mut self) -> bool {
        self.alarm = false;
        self.enough = self.count.max(1);
        self.count > 0
    }
}
