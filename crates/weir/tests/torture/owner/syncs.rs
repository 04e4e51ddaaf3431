//! How an owner makes its files durable, and what it is promised.

use super::{TICKETS, Verdict, Work};
use crate::model::{EVERYTHING, History, PAGE, Promise};
use weir::*;

impl Work<'_> {
    /// What the tickets promise that have ended.
    pub(super) fn hear_tickets(&mut self) {
        let mut waiting = Vec::new();
        for (ticket, then, promise) in std::mem::take(&mut self.owner.tickets) {
            match ticket.poll() {
                None => waiting.push((ticket, then, promise)),
                Some(result) => {
                    self.doing(&format!("hears of {promise:?} at {}", then.op));
                    if let Verdict::Done(()) = self.verdict("a ticket", result) {
                        self.owner.history.acknowledge(&then, &promise);
                    }
                }
            }
        }
        self.owner.tickets = waiting;
        if self.owner.tickets.len() > TICKETS {
            let (ticket, then, promise) = self.owner.tickets.remove(0);
            self.doing(&format!("waits for a ticket of {promise:?}"));
            let result = ticket.wait();
            if let Verdict::Done(()) = self.verdict("a ticket", result) {
                self.owner.history.acknowledge(&then, &promise);
            }
        }
    }

    /// A sync that waits.
    pub(super) fn sync(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let then = self.now().clone();
        let manner = self.below(12);
        let whole = |data_only| Promise::File { file, range: EVERYTHING, data_only };
        let promise = match manner {
            0 | 1 => Promise::All,
            2 => Promise::Directory,
            3..7 => whole(true),
            _ => whole(false),
        };
        self.doing(&format!("sync: {promise:?}"));
        let result = match (manner, &promise) {
            (0, _) => self.volume.checkpoint(),
            (_, Promise::All) => self.volume.sync(),
            (_, Promise::Directory) => self.volume.fsync_dir(self.dir),
            (_, Promise::File { data_only: true, .. }) => handle.fdatasync(),
            _ => handle.fsync(),
        };
        if let Verdict::Done(()) = self.verdict("sync", result) {
            self.owner.history.acknowledge(&then, &promise);
        }
    }

    /// One that does not.
    pub(super) fn submit(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let range = if self.below(2) == 0 { EVERYTHING } else { self.range(file, 4 * PAGE) };
        let data_only = self.below(2) == 0;
        let kind = if data_only { SyncKind::Data } else { SyncKind::Full };
        let then = self.now().clone();
        let promise = match self.below(12) {
            0 => Promise::All,
            1 => Promise::Directory,
            _ => Promise::File { file, range: range.clone(), data_only },
        };
        self.doing(&format!("submits {promise:?}"));
        let result = match promise {
            Promise::All => self.volume.sync_async(),
            Promise::Directory => self.volume.fsync_dir_async(self.dir),
            _ => handle.fsync_async(range, kind),
        };
        // The log may be too full for the attributes of a directory.
        if matches!((&promise, &result), (Promise::Directory, Err(Error::WouldBlock))) {
            return;
        }
        if let Verdict::Done(ticket) = self.verdict("submission", result)
            && self.below(8) > 0
        {
            self.owner.tickets.push((ticket, then, promise));
        }
    }

    /// Writeback that promises nothing.
    pub(super) fn hand_over(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let range = self.range(file, 8 * PAGE);
        self.doing(&format!("hands over {range:?} of {file}"));
        let result = match self.below(4) {
            0 => handle.expire(range),
            1 => handle.sync_range(range, SyncRangeFlags::WRITE),
            2 => handle.sync_range(range, SyncRangeFlags::WRITE | SyncRangeFlags::WAIT_AFTER),
            _ => handle.sync_range(range, SyncRangeFlags::WAIT_BEFORE | SyncRangeFlags::WRITE),
        };
        let _ = self.verdict("handing over", result);
    }

    /// What comes after it is there only if all before it is.
    pub(super) fn barrier(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let (_, mut world) = self.owner.history.begin();
        self.doing("barrier");
        let result = if self.below(2) == 0 {
            world.file(file).settle(&EVERYTHING);
            handle.barrier()
        } else {
            History::settle_all(&mut world, &EVERYTHING);
            self.volume.barrier()
        };
        match self.verdict("barrier", result) {
            Verdict::Done(lsn) => {
                self.owner.history.push(world.clone());
                if self.below(2) == 0 {
                    let result = self.volume.ticket_for(lsn);
                    if let Verdict::Done(ticket) = self.verdict("a ticket for a barrier", result) {
                        self.owner.tickets.push((ticket, world, Promise::Prefix));
                    }
                }
            }
            Verdict::Over => self.owner.history.push(world),
            Verdict::Refused => {}
        }
    }
}
