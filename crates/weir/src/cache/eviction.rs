//! Which part of the cache to give up: the S3-FIFO policy.
//!
//! Three first-in-first-out queues of keys: *small* takes what is new, *main* what proved its worth,
//! *ghost* remembers keys (without contents) that small gave up recently. What small gives up was hit
//! less than twice there: a scan passes through the small tenth of the cache and leaves main
//! alone. A key that comes back while it is a ghost goes to main at once.
//!
//! The policy is pure: it has no locks, no clock, and does not know what a key stands for (the
//! engine uses 64-page chunks: one key per 256 KiB, so that writing a page does not cost a queue
//! operation). Hits are not reported to it. It asks for the heat that hits left at the object itself
//! ([`Residents::inspect`]) only when the key is at the head of a queue. The owner of the policy wraps
//! it in a leaf lock.
//!
//! **Invariants** (checked by `check`): a key is in one queue at most; ghosts are no more than
//! residents (but at least [`MIN_GHOSTS`] are allowed); a victim is in no queue until
//! [`Eviction::finish`].

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Residents that were hit this often in small move to main.
const PROMOTION_HEAT: u8 = 2;
/// Small gives up first when it holds more than this share of all residents.
const SMALL_SHARE_PERCENT: usize = 10;
/// Ghosts remembered however few residents there are.
const MIN_GHOSTS: usize = 16;
/// No node.
const NONE: u32 = u32::MAX;

/// What the policy evicts: a part of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The object, for example an inode.
    pub owner: u64,
    /// The part of it, for example a chunk of pages.
    pub part: u64,
}

/// What has become of a key that the policy considers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Nothing of it is cached any more: forget it.
    Gone,
    /// Nothing of it can be evicted now (dirty, under writeback, locked): come back later.
    Busy,
    /// Evictable, hit this often (at most 3 counts).
    Heat(u8),
}

/// The cache, as the policy sees it.
pub trait Residents {
    /// State and heat of a key.
    fn inspect(&mut self, key: Key) -> Residency;
    /// Takes one degree of heat from the key.
    fn cool(&mut self, key: Key);
    /// Takes all heat from the key: it starts again in main.
    fn chill(&mut self, key: Key);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Small,
    Main,
    Ghost,
}

/// A key to evict; hand it back to [`Eviction::finish`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a victim that is not finished is forgotten by the policy"]
pub struct Victim {
    /// What to evict.
    pub key: Key,
    from: Queue,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    key: Key,
    previous: u32,
    next: u32,
    queue: Queue,
}

/// A doubly linked list through the nodes; the head is the oldest.
#[derive(Debug, Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }
}

/// A fixed hash: the same keys give the same table in every run.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        // A 64 by 64 bit product folded: every input bit reaches high and low bits.
        let product = u128::from(self.0 ^ value ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Eviction {
    nodes: Vec<Node>,
    /// Head of the chain (through `next`) of unused nodes, one more than its number; 0 is none.
    unused: u32,
    places: HashMap<Key, u32, BuildHasherDefault<KeyHasher>>,
    /// The node that [`Eviction::forget_gone`] has looked at last.
    hand: usize,
    small: List,
    main: List,
    ghost: List,
}

impl Eviction {
    /// An empty policy; allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keys that may become victims.
    pub fn resident_count(&self) -> usize {
        self.small.len + self.main.len
    }

    /// True when the key may become a victim.
    pub fn is_resident(&self, key: Key) -> bool {
        self.places.get(&key).is_some_and(|&place| self.nodes[place as usize].queue != Queue::Ghost)
    }

    /// The key is in the cache now. Nothing changes when it was already.
    pub fn insert(&mut self, key: Key) {
        let queue = match self.places.get(&key).copied() {
            None => Queue::Small,
            Some(place) if self.nodes[place as usize].queue == Queue::Ghost => {
                self.take(place);
                Queue::Main
            }
            Some(_) => return,
        };
        self.append(key, queue);
    }

    /// Looks at the next `looks` places, wherever they are in the queues, and forgets the keys of which nothing is cached any more. Whoever
    /// removes objects does not tell, and where memory is never short nobody asks for a victim: without this such keys would pile up.
    pub fn forget_gone(&mut self, residents: &mut impl Residents, looks: usize) {
        for _ in 0..looks.min(self.nodes.len()) {
            self.hand = if self.hand + 1 < self.nodes.len() { self.hand + 1 } else { 0 };
            let Node { key, queue, .. } = self.nodes[self.hand];
            // An unused node has the key that it had.
            let is_used = self.places.get(&key).is_some_and(|&place| place as usize == self.hand);
            if is_used && queue != Queue::Ghost && residents.inspect(key) == Residency::Gone {
                self.take(self.hand as u32);
            }
        }
        self.bound_ghosts();
    }

    /// The key is not in the cache any more, and will not be missed (its object is gone).
    pub fn remove(&mut self, key: Key) {
        if let Some(&place) = self.places.get(&key) {
            self.take(place);
        }
        self.bound_ghosts();
    }

    /// Chooses what to give up, looking at no more than `max_visits` keys (this bounds the time
    /// under the lock; what was looked at is at the far end of its queue afterwards). `None` when
    /// none of them could be given up.
    pub fn victim(&mut self, residents: &mut impl Residents, max_visits: usize) -> Option<Victim> {
        // Busy keys met in each queue since it last made progress: as many as the queue is long mean
        // that it has nothing to give.
        let (mut small_busy, mut main_busy) = (0, 0);
        for _ in 0..max_visits {
            let main_spent = self.main.len <= main_busy;
            let small_due = self.small.len * 100 >= self.resident_count() * SMALL_SHARE_PERCENT;
            let from_small = self.small.len > small_busy && (main_spent || small_due);
            if !from_small && main_spent {
                return None;
            }
            let (queue, place) = if from_small {
                (Queue::Small, self.small.head)
            } else {
                (Queue::Main, self.main.head)
            };
            let key = self.nodes.get(place as usize)?.key;
            self.take(place);
            match residents.inspect(key) {
                Residency::Gone => {}
                Residency::Busy => {
                    self.append(key, queue);
                    *(if from_small { &mut small_busy } else { &mut main_busy }) += 1;
                }
                Residency::Heat(heat) if from_small && heat >= PROMOTION_HEAT => {
                    residents.chill(key);
                    self.append(key, Queue::Main);
                    main_busy = 0;
                }
                Residency::Heat(heat) if !from_small && heat > 0 => {
                    residents.cool(key);
                    self.append(key, Queue::Main);
                    main_busy = 0;
                }
                Residency::Heat(_) => return Some(Victim { key, from: queue }),
            }
        }
        None
    }

    /// Ends an eviction. With `some_left` (part of it was hit or dirtied meanwhile) the key goes to
    /// the end of the queue it came from. A key that was inserted again meanwhile stays where it is.
    #[allow(clippy::needless_pass_by_value, reason = "a victim can be finished only once")]
    pub fn finish(&mut self, victim: Victim, some_left: bool) {
        let Victim { key, from } = victim;
        if self.places.contains_key(&key) {
            return;
        }
        if some_left {
            self.append(key, from);
        } else if from == Queue::Small {
            self.append(key, Queue::Ghost);
        }
        self.bound_ghosts();
    }

    fn bound_ghosts(&mut self) {
        while self.ghost.len > self.resident_count().max(MIN_GHOSTS) {
            self.take(self.ghost.head);
        }
    }

    fn list(&mut self, queue: Queue) -> &mut List {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
            Queue::Ghost => &mut self.ghost,
        }
    }

    fn append(&mut self, key: Key, queue: Queue) {
        let tail = self.list(queue).tail;
        let node = Node { key, previous: tail, next: NONE, queue };
        let place = if self.unused > 0 {
            let place = self.unused - 1;
            self.unused = self.nodes[place as usize].next;
            self.nodes[place as usize] = node;
            place
        } else {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        if tail != NONE {
            self.nodes[tail as usize].next = place;
        }
        let list = self.list(queue);
        if tail == NONE {
            list.head = place;
        }
        list.tail = place;
        list.len += 1;
        self.places.insert(key, place);
    }

    /// Takes a node out of its queue and the table.
    fn take(&mut self, place: u32) {
        let Node { key, previous, next, queue } = self.nodes[place as usize];
        match self.nodes.get_mut(previous as usize) {
            Some(node) => node.next = next,
            None => self.list(queue).head = next,
        }
        match self.nodes.get_mut(next as usize) {
            Some(node) => node.previous = previous,
            None => self.list(queue).tail = previous,
        }
        self.list(queue).len -= 1;
        self.places.remove(&key);
        self.nodes[place as usize].next = self.unused;
        self.unused = place + 1;
    }

    /// Asserts the invariants.
    #[cfg(test)]
    fn check(&self) {
        let mut seen = 0;
        for (list, queue) in
            [(&self.small, Queue::Small), (&self.main, Queue::Main), (&self.ghost, Queue::Ghost)]
        {
            let (mut place, mut previous, mut len) = (list.head, NONE, 0);
            while place != NONE {
                let node = self.nodes[place as usize];
                assert_eq!((node.queue, node.previous), (queue, previous));
                assert_eq!(self.places[&node.key], place);
                (previous, place, len) = (place, node.next, len + 1);
            }
            assert_eq!((list.tail, list.len), (previous, len));
            seen += len;
        }
        assert_eq!(self.places.len(), seen);
        assert!(self.ghost.len <= self.resident_count().max(MIN_GHOSTS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    /// Contents and heat of a cache.
    #[derive(Default)]
    struct Cache {
        heat: BTreeMap<Key, u8>,
        busy: Option<Key>,
    }

    impl Residents for Cache {
        fn inspect(&mut self, key: Key) -> Residency {
            if self.busy == Some(key) {
                return Residency::Busy;
            }
            self.heat.get(&key).map_or(Residency::Gone, |&heat| Residency::Heat(heat))
        }
        fn cool(&mut self, key: Key) {
            *self.heat.get_mut(&key).unwrap() -= 1;
        }
        fn chill(&mut self, key: Key) {
            *self.heat.get_mut(&key).unwrap() = 0;
        }
    }

    fn key(part: u64) -> Key {
        Key { owner: part % 3, part }
    }

    /// A cache of `capacity` keys under this policy.
    struct Simulated {
        policy: Eviction,
        cache: Cache,
        capacity: usize,
    }

    impl Simulated {
        fn new(capacity: usize) -> Self {
            Self { policy: Eviction::new(), cache: Cache::default(), capacity }
        }

        /// True for a hit.
        fn access(&mut self, part: u64) -> bool {
            if let Some(heat) = self.cache.heat.get_mut(&key(part)) {
                *heat = (*heat + 1).min(3);
                return true;
            }
            while self.cache.heat.len() >= self.capacity {
                let visits = 6 * self.policy.resident_count();
                let victim = self.policy.victim(&mut self.cache, visits).expect("none is busy");
                assert!(self.cache.heat.remove(&victim.key).is_some());
                self.policy.finish(victim, false);
            }
            self.cache.heat.insert(key(part), 0);
            self.policy.insert(key(part));
            false
        }
    }

    struct Lru {
        order: VecDeque<u64>,
        capacity: usize,
    }

    impl Lru {
        fn access(&mut self, part: u64) -> bool {
            let found = self.order.iter().position(|&other| other == part);
            if let Some(place) = found {
                self.order.remove(place);
            } else if self.order.len() >= self.capacity {
                self.order.pop_front();
            }
            self.order.push_back(part);
            found.is_some()
        }
    }

    fn xorshift(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    /// Skewed accesses to 2,000 keys, with a long scan of keys that never come back now and then.
    fn trace() -> Vec<(u64, bool)> {
        let mut state = 88_172_645_463_325_252;
        let mut trace = Vec::new();
        let mut scanned = 1 << 20;
        for round in 0..30_000 {
            // The product of two uniform numbers is skewed towards 0.
            let (a, b) = (xorshift(&mut state) % 2000, xorshift(&mut state) % 2000);
            trace.push((a * b / 2000, true));
            if round % 3000 > 2000 {
                trace.push((scanned, false));
                scanned += 1;
            }
        }
        trace
    }

    #[test]
    fn what_is_gone_is_forgotten_and_nothing_else_changes_its_place() {
        let (mut policy, mut cache) = (Eviction::new(), Cache::default());
        for part in 0..1000 {
            policy.insert(key(part));
            if part % 10 == 0 {
                cache.heat.insert(key(part), 0);
            }
            policy.forget_gone(&mut cache, 4);
            policy.check();
            assert!(policy.resident_count() <= 2 * cache.heat.len() + 8);
        }
        policy.forget_gone(&mut cache, 1000);
        policy.check();
        assert_eq!(policy.resident_count(), 100);
        for part in (0..1000).step_by(10) {
            let victim = policy.victim(&mut cache, 1).expect("the oldest");
            assert_eq!(victim.key, key(part));
            policy.finish(victim, false);
        }
    }

    #[test]
    fn scans_do_not_displace_the_working_set() {
        let (mut cache, mut lru) =
            (Simulated::new(300), Lru { order: VecDeque::new(), capacity: 300 });
        let (mut hits, mut lru_hits, mut asked) = (0, 0, 0);
        for (part, counts) in trace() {
            let (hit, lru_hit) = (cache.access(part), lru.access(part));
            if counts {
                asked += 1;
                hits += usize::from(hit);
                lru_hits += usize::from(lru_hit);
            }
        }
        // Keeping the 300 hottest keys for ever would hit 43 %.
        assert!(hits * 100 > asked * 33, "{hits} hits of {asked}, LRU {lru_hits}");
        assert!(hits * 10 > lru_hits * 14, "{hits} against {lru_hits} of LRU");
    }

    #[test]
    fn one_long_scan_costs_a_hot_set_nothing() {
        let mut cache = Simulated::new(100);
        for _ in 0..4 {
            (0..80).for_each(|part| {
                cache.access(part);
            });
        }
        // The hot set reaches main once new keys press on small.
        (1000..1040).for_each(|part| {
            cache.access(part);
        });
        (0..80).for_each(|part| {
            cache.access(part);
        });
        (2000..12_000).for_each(|part| {
            cache.access(part);
        });
        let kept = (0..80).filter(|&part| cache.cache.heat.contains_key(&key(part))).count();
        assert_eq!(kept, 80);
    }

    #[test]
    fn a_ghost_that_comes_back_goes_to_main() {
        let mut cache = Simulated::new(20);
        (0..21).for_each(|part| {
            cache.access(part);
        });
        assert!(!cache.policy.is_resident(key(0)), "the first was given up");
        cache.access(0);
        assert_eq!(cache.policy.main.len, 1);
    }

    #[test]
    fn busy_keys_in_one_queue_do_not_hide_the_other() {
        let mut cache = Simulated::new(20);
        (0..21).for_each(|part| {
            cache.access(part);
        });
        cache.access(0);
        // Main holds key 0 only; small is due but has one key, which is busy.
        (1..=20).for_each(|part| {
            cache.cache.heat.remove(&key(part));
            cache.policy.remove(key(part));
        });
        cache.access(30);
        cache.cache.busy = Some(key(30));
        let victim = cache.policy.victim(&mut cache.cache, 100).unwrap();
        assert_eq!(victim.key, key(0));
    }

    /// A policy with these keys of these heats in small, in that order.
    fn small(parts: &[(u64, u8)]) -> (Eviction, Cache) {
        let (mut policy, mut cache) = (Eviction::new(), Cache::default());
        for &(part, heat) in parts {
            policy.insert(key(part));
            cache.heat.insert(key(part), heat);
        }
        (policy, cache)
    }

    #[test]
    fn two_hits_in_small_lead_to_main_without_their_heat_and_one_leads_out() {
        let (mut policy, mut cache) = small(&[(1, 2), (2, 1), (3, 0)]);
        let victim = policy.victim(&mut cache, 100).expect("one that was hit once");
        assert_eq!(victim.key, key(2));
        assert_eq!((policy.main.len, cache.heat[&key(1)]), (1, 0));
        policy.finish(victim, false);
        policy.check();
    }

    #[test]
    fn what_is_left_of_a_victim_of_main_stays_in_main() {
        let (mut policy, mut cache) = small(&[(1, 2)]);
        let victim = policy.victim(&mut cache, 100).expect("it has cooled in main");
        assert_eq!(victim, Victim { key: key(1), from: Queue::Main });
        policy.finish(victim, true);
        assert_eq!((policy.small.len, policy.main.len), (0, 1));
        policy.check();
    }

    #[test]
    fn small_gives_up_first_only_while_it_has_more_than_its_share_of_all() {
        let hot: Vec<(u64, u8)> = (0..19).map(|part| (part, 2)).collect();
        let (mut policy, mut cache) = small(&hot);
        cache.busy = Some(key(0));
        // All but the one that is busy go to main, where it finds them.
        let victim = policy.victim(&mut cache, 1000).expect("the oldest of main");
        policy.finish(victim, true);
        assert_eq!((policy.small.len, policy.main.len), (1, 18));
        // A twentieth: main's turn. (Of main alone it would be more than a twentieth still, and less than a tenth.)
        (cache.busy, _) = (None, cache.heat.insert(key(0), 0));
        let victim = policy.victim(&mut cache, 1).expect("the oldest of main");
        assert_eq!(victim.from, Queue::Main);
        policy.finish(victim, true);
        // Two of twenty are a tenth.
        policy.insert(key(100));
        cache.heat.insert(key(100), 0);
        let victim = policy.victim(&mut cache, 1).expect("the oldest of small");
        assert_eq!(victim, Victim { key: key(0), from: Queue::Small }, "two of twenty");
        policy.finish(victim, false);
        policy.check();
    }

    #[test]
    fn nothing_evictable_ends_within_the_visits_allowed() {
        let mut policy = Eviction::new();
        let mut cache = Cache { busy: Some(key(1)), ..Cache::default() };
        policy.insert(key(1));
        assert_eq!(policy.victim(&mut cache, 10), None);
        assert!(policy.is_resident(key(1)));
        assert_eq!(Eviction::new().victim(&mut cache, 10), None);
    }

    #[test]
    fn any_resident_is_given_up_within_six_rounds() {
        let mut cache = Simulated::new(50);
        (0..50).for_each(|part| {
            cache.access(part);
            cache.cache.heat.insert(key(part), 3);
        });
        for _ in 0..50 {
            let visits = 6 * cache.policy.resident_count();
            let victim = cache.policy.victim(&mut cache.cache, visits).unwrap();
            cache.cache.heat.remove(&victim.key);
            cache.policy.finish(victim, false);
        }
        assert_eq!(cache.policy.resident_count(), 0);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u64),
        Remove(u64),
        Vanish(u64),
        Hit(u64),
        Busy(Option<u64>),
        Evict { some_left: bool, return_first: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        let part = || 0..40_u64;
        prop_oneof![
            4 => part().prop_map(Step::Insert),
            1 => part().prop_map(Step::Remove),
            1 => part().prop_map(Step::Vanish),
            4 => part().prop_map(Step::Hit),
            1 => prop::option::of(part()).prop_map(Step::Busy),
            4 => (prop::bool::weighted(0.2), prop::bool::weighted(0.1))
                .prop_map(|(some_left, return_first)| Step::Evict { some_left, return_first }),
        ]
    }

    /// The victims of a run; checks every promise on the way.
    fn run(steps: &[Step]) -> Vec<Option<Key>> {
        let mut policy = Eviction::new();
        let mut cache = Cache::default();
        let mut victims = Vec::new();
        for step in steps {
            match *step {
                Step::Insert(part) => {
                    cache.heat.entry(key(part)).or_insert(0);
                    policy.insert(key(part));
                }
                Step::Remove(part) => {
                    cache.heat.remove(&key(part));
                    policy.remove(key(part));
                    assert!(!policy.is_resident(key(part)));
                }
                // The cache lost it and did not tell.
                Step::Vanish(part) => drop(cache.heat.remove(&key(part))),
                Step::Hit(part) => {
                    if let Some(heat) = cache.heat.get_mut(&key(part)) {
                        *heat = (*heat + 1).min(3);
                    }
                }
                Step::Busy(part) => cache.busy = part.map(key),
                Step::Evict { some_left, return_first } => {
                    let visits = 6 * policy.resident_count();
                    let victim = policy.victim(&mut cache, visits);
                    victims.push(victim.as_ref().map(|victim| victim.key));
                    let Some(victim) = victim else {
                        let busy = cache.busy;
                        assert!(cache.heat.keys().all(|&key| busy == Some(key)));
                        continue;
                    };
                    let key = victim.key;
                    assert!(cache.heat.contains_key(&key), "a key that was removed");
                    assert_ne!(cache.busy, Some(key));
                    assert!(!policy.is_resident(key));
                    if !some_left {
                        cache.heat.remove(&key);
                    }
                    if return_first {
                        cache.heat.insert(key, 0);
                        policy.insert(key);
                    }
                    policy.finish(victim, some_left);
                    assert_eq!(policy.is_resident(key), some_left || return_first);
                }
            }
            policy.check();
            assert!(cache.heat.keys().all(|&key| policy.is_resident(key)), "all can be evicted");
        }
        victims
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn victims_are_resident_and_the_choice_is_deterministic(
            steps in prop::collection::vec(step(), 1..300),
        ) {
            prop_assert_eq!(run(&steps), run(&steps));
        }
    }
}
