//! Reclaim: freeing page frames of the cache. Eviction only ever takes clean pages, so it never waits for I/O; an operation that
//! finds no memory waits for writeback to clean some ([`Engine::make_room`]).
//!
//! The policy (`cache::eviction`) works on chunks of 64 pages; this module shows it the page maps.
//! Lock order: the policy's lock, then an inode's `pages` (tried, never waited for).

use crate::cache::eviction::{Eviction, Key, Residency, Residents};
use crate::cache::map::PageMap;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Pages that one call tries to free.
pub const BATCH_PAGES: usize = 64;
/// Keys that one victim search looks at.
const MAX_VISITS: usize = 256;
/// Keys that are looked at for each that comes, where some must be of what is gone: more go than come.
const LOOKS: usize = 4;

/// How long an operation goes on without memory while nobody frees any. Pages in others' hands come back as soon as those get
/// the processor, so attempts say nothing: they are as many as others get on with something else meanwhile.
const PATIENCE_NS: u64 = 10_000_000_000;
/// Attempts after which it gives up all the same: where the clock stands still.
const MAX_ATTEMPTS: u32 = 1_000_000;
/// From this attempt on it leaves the processor to those who can free something.
const POLITE_ATTEMPTS: u32 = 16;
/// For so long each time.
const PAUSE_US: u64 = 100;
/// Nothing fails, and nobody gives anything back.
const NOTHING_FREE: &str = "no page of the cache can be freed: raise the memory cap";

/// An operation that finds no memory: since when, and how often. Pure.
#[derive(Debug, Default)]
pub struct Shortage {
    began_ns: u64,
    attempts: u32,
    /// How often something had not gone home before.
    failures_before: u64,
}

impl Shortage {
    /// Some page was freed, for this operation or a faster one.
    fn relieved(&mut self) {
        self.attempts = 0;
    }

    /// Nothing could be freed at `now_ns`, when something has not gone home so often. True: nothing will be.
    fn is_hopeless(&mut self, now_ns: u64, failures: u64) -> bool {
        if self.attempts == 0 {
            (self.began_ns, self.failures_before) = (now_ns, failures);
        }
        self.attempts = self.attempts.saturating_add(1);
        now_ns.saturating_sub(self.began_ns) >= PATIENCE_NS || self.attempts > MAX_ATTEMPTS
    }

    fn is_polite(&self) -> bool {
        self.attempts > POLITE_ATTEMPTS
    }
}

/// What may be evicted.
#[derive(Default)]
pub struct Reclaim {
    policy: Mutex<Eviction>,
}

impl Reclaim {
    /// Chunks that may become victims.
    pub fn resident_count(&self) -> usize {
        self.policy.lock().resident_count()
    }
}

struct View<'a>(&'a Engine);

impl Residents for View<'_> {
    fn inspect(&mut self, key: Key) -> Residency {
        let Some(inode) = self.0.inodes.peek(key.owner) else { return Residency::Gone };
        let Some(pages) = inode.pages.try_read() else { return Residency::Busy };
        match pages.chunk_heat(key.part) {
            None => Residency::Gone,
            Some((_, 0)) => Residency::Busy,
            Some((heat, _)) => Residency::Heat(heat),
        }
    }

    fn cool(&mut self, key: Key) {
        if let Some(inode) = self.0.inodes.peek(key.owner)
            && let Some(pages) = inode.pages.try_read()
        {
            pages.cool_chunk(key.part);
        }
    }

    fn chill(&mut self, key: Key) {
        if let Some(inode) = self.0.inodes.peek(key.owner)
            && let Some(pages) = inode.pages.try_read()
        {
            pages.chill_chunk(key.part);
        }
    }
}

impl Engine {
    /// The chunk of page `index` of inode `number` has its first page in the cache. The caller may hold `pages` of that inode.
    ///
    /// Chunks of files that were removed, cut or forgotten stay with the policy until it comes across them. Each that is there has a page at
    /// least: where there are more chunks than pages, some are looked at.
    pub fn note_resident(&self, number: u64, index: u64) {
        let mut policy = self.reclaim.policy.lock();
        policy.insert(Key { owner: number, part: PageMap::chunk_of(index) });
        if policy.resident_count() > self.pool.in_use_pages() {
            policy.forget_gone(&mut View(self), LOOKS);
        }
    }

    /// Evicts something, or waits for writeback to make something evictable. The caller holds no lock that writeback needs.
    ///
    /// # Errors
    /// What has kept pages from going home meanwhile, or else [`Error::Io`]: for some seconds nobody could free anything.
    pub fn make_room(&self, shortage: &mut Shortage) -> Result<()> {
        if self.evict(BATCH_PAGES) > 0 {
            shortage.relieved();
            return Ok(());
        }
        let (failures, last) = self.background.failures();
        if shortage.is_hopeless(self.clock.monotonic_ns(), failures) {
            // More memory would be as full soon of what cannot be written.
            let failed = last.filter(|_| failures > shortage.failures_before);
            return Err(failed.unwrap_or_else(|| Error::Io(NOTHING_FREE.into())));
        }
        if shortage.is_polite() {
            self.clock.sleep_us(PAUSE_US);
        }
        self.relieve_memory()
    }

    /// Frees about `wanted` clean pages. Answers how many were freed; 0 if everything is dirty or busy.
    pub fn evict(&self, wanted: usize) -> usize {
        let mut freed = 0;
        let mut policy = self.reclaim.policy.lock();
        // A victim with pages that were hit lately gives nothing but cools: each needs a few visits.
        let mut patience = 4 * policy.resident_count() + 4;
        while freed < wanted && patience > 0 {
            patience -= 1;
            let before = policy.resident_count();
            let Some(victim) = policy.victim(&mut View(self), MAX_VISITS) else {
                if policy.resident_count() < before {
                    // Some were gone; there may be others behind them.
                    continue;
                }
                break;
            };
            let mut taken = Vec::new();
            let mut some_left = false;
            if let Some(inode) = self.inodes.peek(victim.key.owner) {
                match inode.pages.try_write() {
                    Some(mut pages) => {
                        some_left = pages.take_cold(victim.key.part, &mut taken) > 0;
                    }
                    None => some_left = true,
                }
            }
            freed += taken.len();
            policy.finish(victim, some_left);
        }
        self.counters.evicted_pages.add(freed as u64);
        freed
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::cache::page::PageMut;
    use crate::device::Device;
    use crate::device::memory::MemoryDevice;
    use crate::sync::Arc;
    use crate::{
        BackgroundMode, BackgroundWork, CreateOptions, File, OpenFlags, Volume, VolumeOptions,
    };
    use std::sync::mpsc;
    use std::time::Duration;

    /// A file with a page that is not in the cache, and all of the cache's memory, taken by others.
    fn without_memory() -> (Volume, File, Vec<PageMut>) {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let options = || VolumeOptions { memory_bytes: Some(1 << 20), ..VolumeOptions::default() };
        let volume = Volume::open_device(device.clone(), options()).expect("open");
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &vec![7; 4096 * 5]).expect("write");
        volume.close().expect("close");
        drop((file, volume));
        let volume = Volume::open_device(device, options()).expect("open again");
        let file = volume.open_file("/f", OpenFlags::READ).expect("open the file");
        // What reading needs besides the page.
        file.read_at(0, &mut [0; 10]).expect("read");
        let engine = file.engine();
        engine.evict(usize::MAX);
        let taken = std::iter::from_fn(|| engine.pool.alloc_for_overwrite()).collect();
        (volume, file, taken)
    }

    #[test]
    fn files_that_are_gone_leave_nothing_in_the_eviction_policy() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let background = BackgroundMode::Manual;
        let options = VolumeOptions { background, ..VolumeOptions::default() };
        let volume = Volume::open_device(device, options).expect("open");
        let kept = volume.open_file("/kept", OpenFlags::CREATE).expect("create");
        kept.write_at(0, &[7; 4096 * 3]).expect("write");
        let engine = kept.engine();
        for _ in 0..2000 {
            let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
            file.write_at(0, &[7; 100]).expect("write");
            drop(file);
            volume.remove_file("/f").expect("remove");
            while volume.background_step(BackgroundWork::Purge).expect("purge") {}
        }
        // Memory was never short: nobody has asked for a victim.
        assert_eq!(engine.counters.evicted_pages.get(), 0);
        let chunks = engine.reclaim.resident_count();
        let pages = engine.pool.in_use_pages();
        assert!(chunks <= pages + 8, "{chunks} chunks of {pages} pages");
        // What is there is still known.
        kept.fsync().expect("sync");
        volume.checkpoint().expect("checkpoint");
        assert_eq!(engine.evict(usize::MAX), 3);
        assert_eq!(engine.reclaim.resident_count(), 0);
    }

    #[test]
    fn pages_that_somebody_has_in_hand_are_evicted_later() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let background = BackgroundMode::Manual;
        let options = VolumeOptions { background, ..VolumeOptions::default() };
        let volume = Volume::open_device(device, options).expect("open");
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &[7; 4096 * 3]).expect("write");
        file.fsync().expect("sync");
        volume.checkpoint().expect("checkpoint");
        let engine = file.engine();
        let inode = engine.inodes.peek(file.ino()).expect("it is open");
        let reader = inode.pages.try_read().expect("nobody else is there");
        assert_eq!(engine.evict(usize::MAX), 0);
        drop(reader);
        assert_eq!(engine.evict(usize::MAX), 3);
        assert_eq!(engine.counters.evicted_pages.get(), 3);
    }

    #[test]
    fn a_shortage_is_hopeless_after_a_time_without_relief_and_not_after_attempts() {
        let mut shortage = Shortage::default();
        let attempts = 100_000;
        for attempt in 0..attempts {
            assert!(!shortage.is_hopeless(5 + attempt * (PATIENCE_NS - 1) / attempts, 0));
        }
        shortage.relieved();
        assert!(!shortage.is_hopeless(PATIENCE_NS + 5, 0));
        assert!(!shortage.is_hopeless(2 * PATIENCE_NS + 4, 0));
        assert!(shortage.is_hopeless(2 * PATIENCE_NS + 5, 0));
        // Where the clock stands still, it ends too.
        let mut shortage = Shortage::default();
        assert!((0..=MAX_ATTEMPTS).any(|_| shortage.is_hopeless(7, 0)));
    }

    #[test]
    fn who_gives_up_waiting_for_memory_says_what_has_kept_pages_from_going_home() {
        let (_volume, file, _taken) = without_memory();
        let engine = file.engine();
        let given_up = |fails: bool| {
            // What failed before this began is nobody's reason.
            engine.background.note_failure(&Error::Io("long ago".into()));
            let mut shortage = Shortage::default();
            engine.make_room(&mut shortage).expect("others may free some");
            if fails {
                engine.background.note_failure(&Error::HostFull("as a flusher has met".into()));
            }
            shortage.attempts = MAX_ATTEMPTS;
            engine.make_room(&mut shortage)
        };
        assert_eq!(given_up(true), Err(Error::HostFull("as a flusher has met".into())));
        assert_eq!(given_up(false), Err(Error::Io(NOTHING_FREE.into())));
    }

    #[test]
    fn a_writer_hopes_for_a_clean_page_only_while_some_are_coming_and_not_for_long() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        for background in [BackgroundMode::Threads, BackgroundMode::Manual] {
            let options = VolumeOptions { background, ..VolumeOptions::default() };
            let volume = Volume::open_device(device.clone(), options).expect("open");
            let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
            file.write_at(0, &vec![7; 4096 * 5]).expect("write");
            assert!(!file.engine().await_clean_page(&mut 0), "nothing is on its way home");
            file.expire(0..u64::MAX).expect("hand over");
            let mut pauses = 0;
            while file.engine().await_clean_page(&mut pauses) {}
            assert!(pauses <= 20, "{pauses}");
            assert!(pauses == 0 || background == BackgroundMode::Threads);
            volume.close().expect("close");
        }
    }

    #[test]
    fn a_read_waits_for_memory_however_often_others_get_on_meanwhile() {
        let (_volume, file, taken) = without_memory();
        let engine = file.engine().clone();
        let (told, answer) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = [0; 4096];
                let result = file.read_at(4096 * 4, &mut bytes).map(|count| (count, bytes[0]));
                told.send(result).expect("the test waits for it");
            });
            // Others dirty and clean pages all the time, and each of them wakes whoever waits.
            while engine.counters.memory_stalls.get() < 3000 {
                engine.background.progress();
                let answer = answer.try_recv();
                assert!(answer.is_err(), "without memory: {answer:?}");
            }
            drop(taken);
            engine.background.progress();
            let result = answer.recv_timeout(Duration::from_secs(60)).expect("it ends");
            assert_eq!(result, Ok((4096, 7)));
        });
    }
}
