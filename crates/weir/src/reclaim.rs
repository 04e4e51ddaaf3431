//! Reclaim: freeing page frames of the cache. Only ever takes clean pages, so it never waits for I/O.
//!
//! The policy (`cache::eviction`) works on chunks of 64 pages; this module shows it the page maps.
//! Lock order: the policy's lock, then an inode's `pages` (tried, never waited for).

use crate::cache::eviction::{Eviction, Key, Residency, Residents};
use crate::cache::map::PageMap;
use crate::engine::Engine;
use crate::sync::Mutex;

/// Pages that one call tries to free.
pub const BATCH_PAGES: usize = 64;
/// Keys that one victim search looks at.
const MAX_VISITS: usize = 256;

/// What may be evicted.
#[derive(Default)]
pub struct Reclaim {
    policy: Mutex<Eviction>,
}

impl Reclaim {
    /// The chunk of page `index` of inode `number` has its first page in the cache.
    pub fn insert(&self, number: u64, index: u64) {
        self.policy.lock().insert(Key { owner: number, part: PageMap::chunk_of(index) });
    }

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
    /// Frees about `wanted` clean pages. Answers how many were freed; 0 if everything is dirty or busy.
    pub fn evict(&self, wanted: usize) -> usize {
        let mut freed = 0;
        let mut policy = self.reclaim.policy.lock();
        // A victim with pages that were hit lately gives nothing but cools: each needs a few visits.
        let mut patience = 4 * policy.resident_count() + 4;
        while freed < wanted && patience > 0 {
            patience -= 1;
            let Some(victim) = policy.victim(&mut View(self), MAX_VISITS) else { break };
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
