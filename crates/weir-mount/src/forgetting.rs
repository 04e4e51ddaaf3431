//! The kernel is asked to forget inodes when it knows too many.
//!
//! What the kernel knows is held here, at some 900 bytes each, and the kernel forgets by itself only when *it* runs out of memory: a
//! backup that walks through ten million files would leave a server of 9 GB behind. So the kernel may know as many inodes as take as much
//! as the volume's memory again. Beyond that it is asked to forget those that the server was not asked about for the longest time
//! (in a second-chance order, see [`InodeTable::idle`]; what the kernel answers by itself is not seen here), a part of them at a time.
//! It keeps those that somebody uses: open files, directories with something in use below. Where it keeps most of what it is asked for,
//! it is asked again only when it has learned of many more.
//!
//! Asking may wait for requests that are being served, so a thread does it which holds nothing, and nobody waits for that thread. It is
//! started when there are too many, and ends when there are not. Kernels before 6.18 cannot be asked; the first refusal is the last question.
//!
//! No lock: `wake_at` says who may start that thread.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use weir::sync::without_signals;

use crate::ops::KernelCache;
use crate::tables::InodeTable;

/// What an inode that the kernel knows costs here.
const INODE_BYTES: u64 = 1024;
/// So many are always allowed.
const LEAST: usize = 1024;
/// Most that the kernel is asked about at once.
const BATCH: usize = 512;
/// The kernel is given so long to say what it has forgotten ...
const SETTLE: Duration = Duration::from_millis(20);
/// ... so many times, as long as it has not said so of most.
const SETTLE_ROUNDS: u32 = 50;
/// No number of inodes starts a round.
const NEVER: usize = usize::MAX;

/// When to ask, and about how many. Pure.
#[derive(Debug, Clone, Copy)]
struct Limits {
    most: usize,
}

impl Limits {
    fn of(memory_bytes: u64) -> Self {
        let most = usize::try_from(memory_bytes / INODE_BYTES).unwrap_or(NEVER);
        Self { most: most.clamp(LEAST, NEVER / 2) }
    }

    /// How many of `known` inodes are to be forgotten in one round: so many that the next is not due at once, and not so many that
    /// asking in vain, for inodes in use, costs more than a few questions for each new one.
    fn to_ask(self, known: usize) -> usize {
        known.saturating_sub(self.most - self.step()).min(4 * self.step())
    }

    /// How many make the next round, when one has left `known`.
    fn next(self, known: usize) -> usize {
        self.most.max(known.saturating_add(self.step()))
    }

    fn step(self) -> usize {
        self.most / 8
    }
}

struct Shared {
    limits: Limits,
    /// More inodes than this start a round; [`NEVER`] while one is under way, and where there will be no other.
    wake_at: AtomicUsize,
    kernel: OnceLock<Weak<dyn KernelCache>>,
    is_closing: AtomicBool,
}

/// See the module's head.
pub struct Forgetting(Arc<Shared>);

impl Forgetting {
    /// For a volume with so much memory. Nothing is asked before [`Self::ask`].
    pub fn new(memory_bytes: u64) -> Self {
        let limits = Limits::of(memory_bytes);
        Self(Arc::new(Shared {
            limits,
            wake_at: AtomicUsize::new(NEVER),
            kernel: OnceLock::new(),
            is_closing: AtomicBool::new(false),
        }))
    }

    /// From now on `kernel` is asked.
    pub fn ask(&self, kernel: Weak<dyn KernelCache>) {
        if self.0.kernel.set(kernel).is_ok() {
            self.0.wake_at.store(self.0.limits.most, Ordering::Relaxed);
        }
    }

    /// The kernel knows one more of `inodes`. Does not wait.
    pub fn known(&self, inodes: &Arc<InodeTable>) {
        if inodes.count() > self.0.wake_at.load(Ordering::Relaxed) {
            self.start(inodes);
        }
    }

    #[cold]
    fn start(&self, inodes: &Arc<InodeTable>) {
        if self.0.wake_at.swap(NEVER, Ordering::Relaxed) == NEVER {
            return; // Somebody else was first.
        }
        let (shared, table) = (Arc::clone(&self.0), Arc::clone(inodes));
        let builder = std::thread::Builder::new().name("weir-forget".to_owned());
        if without_signals(|| builder.spawn(move || shared.rounds(&table))).is_err() {
            // No thread now: perhaps later.
            self.0.rest(inodes.count());
        }
    }

    /// No round begins any more; one that is under way ends with the answer it waits for, which may come after this.
    pub fn close(&self) {
        self.0.is_closing.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// Asks until the kernel knows few enough, or keeps most of what it is asked for.
    fn rounds(&self, inodes: &InodeTable) {
        loop {
            let before = inodes.forgotten();
            let Some(asked) = self.round(inodes) else { return };
            // It keeps most of them, or is slow to say that it does not.
            let keeps_most = || inodes.forgotten() - before < asked / 2;
            let mut waits = 0..SETTLE_ROUNDS;
            while waits.next().is_some() && keeps_most() {
                std::thread::sleep(SETTLE);
            }
            if inodes.count() <= self.limits.most || keeps_most() {
                return self.rest(inodes.count());
            }
        }
    }

    /// For how many it asked; `None`: nobody is to be asked any more.
    fn round(&self, inodes: &InodeTable) -> Option<u64> {
        let to_ask = self.limits.to_ask(inodes.count());
        let mut asked = 0;
        while asked < to_ask {
            let idle = idle(inodes, BATCH.min(to_ask - asked));
            if idle.is_empty() {
                break;
            }
            asked += idle.len();
            let kernel = self.kernel.get().and_then(Weak::upgrade)?;
            if self.is_closing.load(Ordering::Relaxed) || !kernel.forget(&idle) {
                return None;
            }
        }
        Some(asked as u64)
    }

    /// The next round comes when many more than `known` are.
    fn rest(&self, known: usize) {
        self.wake_at.store(self.limits.next(known), Ordering::Relaxed);
    }
}

/// Where all were used since the last round, they are looked at once more: somebody has to go.
fn idle(inodes: &InodeTable, most: usize) -> Vec<u64> {
    let idle = inodes.idle(most);
    if idle.is_empty() { inodes.idle(most) } else { idle }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use weir::device::Device;
    use weir::device::memory::MemoryDevice;
    use weir::{CreateOptions, FileType, NewInode, Volume, VolumeOptions};

    use super::*;

    #[test]
    fn a_round_makes_room_for_the_next_and_asks_little_in_vain() {
        for memory_bytes in [0, 1 << 20, 16 << 20, 1 << 30, u64::MAX] {
            let limits = Limits::of(memory_bytes);
            let (most, step) = (limits.most, limits.step());
            assert!(most >= LEAST && step > 0);
            assert_eq!(limits.to_ask(most - step), 0);
            assert_eq!(limits.to_ask(most + 1), step + 1);
            // What was forgotten brings the limit back; where nothing was, it moves on.
            assert_eq!(limits.next(most - step), most);
            assert_eq!(limits.next(most + 1), most + 1 + step);
            assert!(limits.to_ask(100 * (most / 64)) <= 4 * step);
            assert!(limits.to_ask(NEVER) <= 4 * step && limits.next(NEVER) == NEVER);
        }
    }

    /// Forgets all that it is asked to but what is in use, and tells what it was asked.
    struct Kernel {
        asked: mpsc::Sender<Vec<u64>>,
        inodes: Arc<InodeTable>,
        in_use: u64,
        can: bool,
    }

    impl KernelCache for Kernel {
        fn attributes_changed(&self, _ino: u64) {}
        fn content_changed(&self, _ino: u64) {}
        fn name_changed(&self, _dir: u64, _name: &[u8]) {}
        fn forget(&self, inodes: &[u64]) -> bool {
            if self.can {
                let forgotten = inodes.iter().filter(|ino| **ino > self.in_use);
                forgotten.for_each(|ino| self.inodes.forget(*ino, 1));
            }
            self.asked.send(inodes.to_vec()).unwrap();
            self.can
        }
    }

    struct Mount {
        volume: Volume,
        inodes: Arc<InodeTable>,
        forgetting: Forgetting,
        _kernel: Arc<dyn KernelCache>,
        asked: mpsc::Receiver<Vec<u64>>,
    }

    impl Mount {
        /// Inodes up to number `in_use` are never forgotten.
        fn new(in_use: u64, can: bool) -> Self {
            let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
            Volume::format_device(&device, &CreateOptions::default()).unwrap();
            let volume = Volume::open_device(device, VolumeOptions::default()).unwrap();
            let inodes = Arc::new(InodeTable::default());
            inodes.acquire(&volume, Volume::ROOT).unwrap();
            let (sender, asked) = mpsc::channel();
            let kernel: Arc<dyn KernelCache> =
                Arc::new(Kernel { asked: sender, inodes: Arc::clone(&inodes), in_use, can });
            let forgetting = Forgetting::new(0);
            forgetting.ask(Arc::downgrade(&kernel));
            Self { volume, inodes, forgetting, _kernel: kernel, asked }
        }

        /// Makes `count` files that the kernel knows.
        fn make(&self, first: usize, count: usize) -> Vec<u64> {
            let make = |number: usize| {
                let name = format!("file {number}");
                let new = NewInode {
                    file_type: FileType::Regular,
                    permissions: 0o644,
                    uid: 0,
                    gid: 0,
                    rdev: 0,
                };
                let made = self.volume.make(Volume::ROOT, name.as_bytes(), &new).unwrap();
                self.inodes.acquire(&self.volume, made.ino).unwrap();
                self.forgetting.known(&self.inodes);
                made.ino
            };
            (first..first + count).map(make).collect()
        }

        /// Waits until a round is over, and answers what it asked.
        fn round(&self) -> Vec<u64> {
            let mut asked = self.asked.recv().unwrap();
            while self.forgetting.0.wake_at.load(Ordering::Relaxed) == NEVER {
                std::thread::yield_now();
            }
            asked.extend(self.asked.try_iter().flatten());
            asked
        }

        fn close(self) {
            self.inodes.clear();
            self.volume.close().unwrap();
        }
    }

    #[test]
    fn the_kernel_is_asked_for_the_oldest_and_never_for_the_root_or_what_was_used() {
        let mount = Mount::new(0, true);
        let made = mount.make(0, LEAST - 1);
        assert_eq!(mount.inodes.count(), LEAST);
        assert!(mount.asked.try_recv().is_err(), "asked too early");
        // Somebody opens the first two.
        made[..2].iter().for_each(|ino| drop(mount.inodes.facts(*ino)));
        mount.make(LEAST, 1);
        let asked = mount.round();
        assert_eq!(asked.len(), LEAST / 8 + 1);
        assert!(!asked.contains(&Volume::ROOT) && !asked.contains(&made[0]));
        assert!(!asked.contains(&made[1]));
        assert_eq!(mount.inodes.count(), LEAST - LEAST / 8);
        mount.close();
    }

    #[test]
    fn what_the_kernel_keeps_is_not_asked_for_again_and_again() {
        let mount = Mount::new(u64::MAX, true);
        mount.make(0, LEAST);
        assert_eq!(mount.round().len(), LEAST / 8 + 1);
        let more = LEAST / 8;
        mount.make(LEAST, more);
        assert!(mount.asked.try_recv().is_err(), "asked too early");
        mount.make(LEAST + more, 1);
        assert_eq!(mount.round().len(), 2 * (LEAST / 8) + 2);
        mount.close();
    }

    #[test]
    fn a_kernel_that_cannot_be_asked_is_asked_once() {
        let mount = Mount::new(0, false);
        mount.make(0, 3 * LEAST);
        // It counted while more were made.
        assert!(mount.asked.recv().unwrap().len() > LEAST / 8);
        mount.make(3 * LEAST, LEAST);
        assert!(mount.asked.try_recv().is_err());
        mount.close();
    }
}
