//! 64 consecutive pages of a file: slots, and one bit per page for each mark.
//!
//! The chunk knows nothing of the map's counts: [`super::PageMap`] compares the marks before and
//! after every change and keeps its counts and indexes from the difference.

use super::super::page::PageRef;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Pages of a chunk: the bits of a mark.
pub(super) const CHUNK_PAGES: u64 = 64;
/// Smallest slot array of a file's first chunk (most files are small).
const MIN_SLOTS: usize = 4;

/// One bit per page of a chunk, for every state a page can be in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// The slot holds a page.
    pub present: u64,
    /// A read from the device is under way; excludes `present`.
    pub reading: u64,
    /// The contents are newer than what is, or is on its way, home.
    pub dirty: u64,
    /// A version of the page is on its way home.
    pub writeback: u64,
    /// The contents equal what the log holds for this page.
    pub logged: u64,
    /// Chosen by a sync that is under way; within `dirty`.
    pub towrite: u64,
    /// The log holds a version of the page that is not home ([`Chunk::owed_lsn`]).
    pub owed: u64,
    /// The page went into the log after the version on its way home was taken; within `writeback`.
    pub relogged: u64,
    /// The log has the mapping of the version on its way home, and becomes durable with it; within `writeback`.
    pub mapped: u64,
    /// The version on its way home is in the log, and goes to where the page lives: whatever becomes of it, a newer one may go into the log
    /// meanwhile; within `writeback`.
    pub in_place: u64,
}

impl Marks {
    /// True when nothing is known about any page: the chunk need not exist.
    pub(super) fn is_vacant(self) -> bool {
        self.present | self.reading == 0
    }

    /// Pages that may be taken from the cache without loss.
    pub(super) fn clean(self) -> u64 {
        self.present & !(self.dirty | self.writeback | self.owed)
    }

    /// Dirty pages whose contents the log does not have.
    pub(super) fn fresh(self) -> u64 {
        self.dirty & !self.logged
    }

    /// Pages on their way home that a sync has to wait for: the log has neither their contents nor, unless they have changed since,
    /// their mapping, and that is about to change.
    pub(super) fn awaited(self) -> u64 {
        self.writeback & !self.logged & !self.in_place & !(self.mapped & !self.dirty)
    }

    /// Forgets everything about the pages of `mask`.
    pub(super) fn clear(&mut self, mask: u64) {
        for bits in [
            &mut self.present,
            &mut self.reading,
            &mut self.dirty,
            &mut self.writeback,
            &mut self.logged,
            &mut self.towrite,
            &mut self.owed,
            &mut self.relogged,
            &mut self.mapped,
            &mut self.in_place,
        ] {
            *bits &= !mask;
        }
    }
}

/// Which pages have which token: most often all of them the same, which takes no memory of its own.
#[derive(Debug, Default)]
struct Tokens {
    first: (u64, u64),
    others: Vec<(u64, u64)>,
}

impl Tokens {
    fn all(&self) -> impl Iterator<Item = (u64, u64)> {
        std::iter::once(self.first).chain(self.others.iter().copied())
    }

    fn get(&self, page: u64) -> Option<u64> {
        self.all().find(|(pages, _)| pages & page != 0).map(|(_, token)| token)
    }

    fn set(&mut self, page: u64, token: u64) {
        let known = std::iter::once(&mut self.first).chain(&mut self.others);
        let mut place = None;
        for entry in known {
            entry.0 &= !page;
            if place.is_none() && (entry.0 == 0 || entry.1 == token) {
                place = Some(entry);
            }
        }
        match place {
            Some(entry) => *entry = (entry.0 | page, token),
            None => self.others.push((page, token)),
        }
    }
}

/// LSNs in an order that the user keeps. Where syncs are small and scattered most chunks have one, which needs no memory of its own.
#[derive(Debug)]
enum Debts {
    One(u64),
    Many(Vec<u64>),
}

impl Default for Debts {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl Debts {
    fn all(&self) -> &[u64] {
        match self {
            Self::One(lsn) => std::slice::from_ref(lsn),
            Self::Many(lsns) => lsns,
        }
    }

    fn replace(&mut self, place: usize, lsn: u64) -> u64 {
        let all = match self {
            Self::One(only) => std::slice::from_mut(only),
            Self::Many(lsns) => lsns,
        };
        std::mem::replace(&mut all[place], lsn)
    }

    fn insert(&mut self, place: usize, lsn: u64) {
        match self {
            Self::Many(lsns) if lsns.is_empty() => *self = Self::One(lsn),
            Self::Many(lsns) => lsns.insert(place, lsn),
            Self::One(only) => {
                let mut both = vec![*only];
                both.insert(place, lsn);
                *self = Self::Many(both);
            }
        }
    }

    fn remove(&mut self, place: usize) -> u64 {
        match self {
            Self::One(only) => {
                debug_assert_eq!(place, 0);
                let lsn = *only;
                *self = Self::default();
                lsn
            }
            Self::Many(lsns) => {
                let lsn = lsns.remove(place);
                if let [only] = **lsns {
                    *self = Self::One(only);
                }
                lsn
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Many(lsns) => lsns.capacity() * size_of::<u64>(),
        }
    }
}

/// What a hit touches comes first.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Chunk {
    /// As long as the highest page that was ever present needs: a power of two.
    slots: Vec<Option<PageRef>>,
    /// How often each page was hit since it came or was last cooled: 0 to 3, in unary, so that
    /// concurrent hits need no more than an atomic `or`, and none at all once the third bit is set.
    heat: [AtomicU64; 3],
    /// Tokens of the reads and writebacks under way; empty when there are none.
    tokens: Tokens,
    pub(super) marks: Marks,
    /// LSN of the newest version in the log of every owed page, in the order of their bits.
    owed: Debts,
}

impl Chunk {
    #[inline]
    pub(super) fn page(&self, bit: u32) -> Option<&PageRef> {
        self.slots.get(bit as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn page_mut(&mut self, bit: u32) -> Option<&mut PageRef> {
        self.slots.get_mut(bit as usize)?.as_mut()
    }

    /// Puts `page` into the slot and marks it present; gives back what was there. A page that
    /// takes an empty slot starts cold. `small` asks for no more slots than needed.
    pub(super) fn put(&mut self, bit: u32, page: PageRef, small: bool) -> Option<PageRef> {
        let place = bit as usize;
        if place >= self.slots.len() {
            let wanted = if small { (place + 1).next_power_of_two() } else { CHUNK_PAGES as usize };
            let wanted = wanted.max(MIN_SLOTS);
            self.slots.reserve_exact(wanted - self.slots.len());
            self.slots.resize_with(wanted, || None);
        }
        let mask = 1 << bit;
        if self.marks.present & mask == 0 {
            self.marks.present |= mask;
            self.forget_heat(mask);
        }
        self.slots[place].replace(page)
    }

    /// Takes the pages of `mask` out, forgetting all about them.
    pub(super) fn take(&mut self, mask: u64, pages: &mut Vec<PageRef>) {
        bits(mask & self.marks.owed).for_each(|bit| {
            self.pay(bit);
        });
        for bit in bits(self.marks.present & mask) {
            pages.extend(self.slots[bit as usize].take());
        }
        self.forget_heat(mask);
        self.marks.clear(mask);
    }

    /// Place of page `bit` among the owed ones.
    fn owed_place(&self, bit: u32) -> usize {
        (self.marks.owed & ((1 << bit) - 1)).count_ones() as usize
    }

    /// LSN of the newest version of the page in the log, if that is owed to home.
    pub(super) fn owed_lsn(&self, bit: u32) -> Option<u64> {
        (self.marks.owed & (1 << bit) != 0).then(|| self.owed.all()[self.owed_place(bit)])
    }

    /// Pages with a debt of `lsn` or older.
    pub(super) fn owed_up_to(&self, lsn: u64) -> u64 {
        let owed = bits(self.marks.owed).zip(self.owed.all());
        let due = owed.filter(|&(_, &owed_lsn)| owed_lsn <= lsn);
        due.fold(0, |due, (bit, _)| due | 1 << bit)
    }

    /// The log holds the version of the page with `lsn`; answers the LSN of an older one, for which it is not needed any more.
    pub(super) fn owe(&mut self, bit: u32, lsn: u64) -> Option<u64> {
        let place = self.owed_place(bit);
        if self.marks.owed & (1 << bit) != 0 {
            return Some(self.owed.replace(place, lsn));
        }
        self.marks.owed |= 1 << bit;
        self.owed.insert(place, lsn);
        None
    }

    /// The log owes nothing for the page any more; answers the LSN of the version that it held.
    pub(super) fn pay(&mut self, bit: u32) -> Option<u64> {
        if self.marks.owed & (1 << bit) == 0 {
            return None;
        }
        let lsn = self.owed.remove(self.owed_place(bit));
        self.marks.owed &= !(1 << bit);
        Some(lsn)
    }

    /// The token of the read or writeback under way.
    pub(super) fn token(&self, bit: u32) -> Option<u64> {
        self.tokens.get(1 << bit)
    }

    pub(super) fn set_token(&mut self, bit: u32, token: u64) {
        self.tokens.set(1 << bit, token);
    }

    /// Frees the tokens when nothing is under way any more.
    pub(super) fn release_tokens(&mut self) {
        if self.marks.reading | self.marks.writeback == 0 {
            self.tokens = Tokens::default();
        }
    }

    /// Notes a hit.
    #[inline]
    pub(super) fn touch(&self, bit: u32) {
        let mask = 1_u64 << bit;
        let [first, second, third] = &self.heat;
        if third.load(Ordering::Relaxed) & mask != 0 {
            return;
        }
        let next = if first.load(Ordering::Relaxed) & mask == 0 {
            first
        } else if second.load(Ordering::Relaxed) & mask == 0 {
            second
        } else {
            third
        };
        next.fetch_or(mask, Ordering::Relaxed);
    }

    /// 0 to 3.
    pub(super) fn heat(&self, bit: u32) -> u8 {
        let mask = 1_u64 << bit;
        self.heat.iter().map(|plane| u8::from(plane.load(Ordering::Relaxed) & mask != 0)).sum()
    }

    /// Heat of the hottest page of `mask`.
    pub(super) fn max_heat(&self, mask: u64) -> u8 {
        self.heat.iter().map(|plane| u8::from(plane.load(Ordering::Relaxed) & mask != 0)).sum()
    }

    /// Pages of the chunk that were not hit since they were last cooled.
    pub(super) fn cold(&self) -> u64 {
        !self.heat[0].load(Ordering::Relaxed)
    }

    /// Takes one degree of heat from every page of `mask`.
    pub(super) fn cool(&self, mask: u64) {
        let [first, second, third] = &self.heat;
        let at_third = third.fetch_and(!mask, Ordering::Relaxed) & mask;
        let at_second = second.fetch_and(!(mask & !at_third), Ordering::Relaxed) & mask & !at_third;
        first.fetch_and(!(mask & !at_third & !at_second), Ordering::Relaxed);
    }

    /// Takes all heat from every page of `mask`.
    pub(super) fn forget_heat(&self, mask: u64) {
        for plane in &self.heat {
            if plane.load(Ordering::Relaxed) & mask != 0 {
                plane.fetch_and(!mask, Ordering::Relaxed);
            }
        }
    }

    /// Bytes of memory besides the chunk itself and the pages.
    pub(super) fn extra_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Option<PageRef>>()
            + self.owed.memory_bytes()
            + self.tokens.others.capacity() * size_of::<(u64, u64)>()
    }

    /// Asserts the invariants that concern one chunk.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn check(&self) {
        let Marks {
            present,
            reading,
            dirty,
            writeback,
            logged,
            towrite,
            owed,
            relogged,
            mapped,
            in_place,
        } = self.marks;
        for bit in 0..CHUNK_PAGES as u32 {
            assert_eq!(self.page(bit).is_some(), present & (1 << bit) != 0, "slot {bit}");
        }
        assert_eq!(present & reading, 0, "reading excludes present");
        assert_eq!((dirty | writeback | owed) & !present, 0, "marks need a page");
        assert_eq!(owed & !(dirty | writeback), 0, "what is owed to home is on its way or dirty");
        assert_eq!(logged & !owed, 0, "contents in the log are owed to home");
        assert_eq!(towrite & !dirty, 0, "only dirty pages are to be written");
        assert_eq!(relogged & !(writeback & owed), 0, "relogged concerns a writeback");
        assert_eq!((mapped | in_place) & !writeback, 0, "mapped and in place concern a writeback");
        assert_eq!(in_place & !owed, 0, "what is written in place is in the log");
        assert_eq!(self.owed.all().len(), owed.count_ones() as usize, "every debt has an LSN");
        let held = self.tokens.all().fold(0, |held, (pages, _)| {
            assert_eq!(held & pages, 0, "one token for each page");
            held | pages
        });
        assert_eq!((reading | writeback) & !held, 0, "tokens while under way");
        assert!(held == 0 || reading | writeback != 0, "no tokens when nothing is under way");
        assert_eq!(!self.cold() & !present, 0, "only pages are hot");
    }
}

/// The set bits, lowest first.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let bit = mask.trailing_zeros();
        mask &= mask - 1;
        Some(bit)
    })
}
