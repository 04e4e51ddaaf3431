//! The map against a model of it that is too simple to be wrong.

use super::super::page::{PAGE_BYTES, PageMut, PagePool, PageRef};
use super::*;
use proptest::prelude::*;

/// A page of the model, its contents reduced to one byte.
#[derive(Debug, Clone, Default)]
struct ModelPage {
    contents: u8,
    dirty: bool,
    towrite: bool,
    /// Token, contents and the log's LSN when the writeback began.
    writeback: Option<(u64, u8, Option<u64>)>,
    /// LSN and contents of the newest version in the log.
    owed: Option<(u64, u8)>,
    /// No write since that version went into the log.
    logged: bool,
}

#[derive(Debug, Clone)]
enum ModelSlot {
    Present(ModelPage),
    Reading(u64),
}

#[derive(Debug, Clone)]
enum Step {
    BeginRead(u64, u64),
    FinishRead(usize, bool),
    InsertDirty(u64),
    InsertClean(u64),
    Write(u64, bool),
    MarkDirty(u64),
    MarkToWrite(u64, u64),
    BeginWriteback(u64, u64),
    EndWriteback(usize, bool),
    SetLogged(u64),
    Remove(u64, u64),
    Truncate(u64),
    TakeClean(u64),
    TakeCold(u64),
    Hit(u64),
    HoldForReading(u64),
    DropHeld,
}

/// Indices that exercise one chunk, chunk borders, the vector, and far away places.
fn index() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..8_u64,
        4 => 56..72_u64,
        3 => 0..2000_u64,
        1 => (1 << 40)..(1 << 40) + 130_u64,
        1 => (0..40_u64).prop_map(|n| n * 9999),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..6_u64, 1 => 0..300_u64]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (index(), length()).prop_map(|(i, n)| Step::BeginRead(i, n)),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(n, ok)| Step::FinishRead(n, ok)),
        4 => index().prop_map(Step::InsertDirty),
        1 => index().prop_map(Step::InsertClean),
        4 => (index(), any::<bool>()).prop_map(|(i, keep)| Step::Write(i, keep)),
        1 => index().prop_map(Step::MarkDirty),
        1 => (index(), length()).prop_map(|(i, n)| Step::MarkToWrite(i, n)),
        2 => (index(), length()).prop_map(|(i, n)| Step::BeginWriteback(i, n)),
        4 => (any::<usize>(), prop::bool::weighted(0.7)).prop_map(|(n, ok)| Step::EndWriteback(n, ok)),
        3 => index().prop_map(Step::SetLogged),
        1 => (index(), length()).prop_map(|(i, n)| Step::Remove(i, n)),
        1 => index().prop_map(Step::Truncate),
        2 => index().prop_map(Step::TakeClean),
        1 => index().prop_map(Step::TakeCold),
        2 => index().prop_map(Step::Hit),
        1 => index().prop_map(Step::HoldForReading),
        1 => Just(Step::DropHeld),
    ]
}

struct Harness {
    pool: PagePool,
    map: PageMap,
    model: BTreeMap<u64, ModelSlot>,
    reads: Vec<(u64, u64)>,
    flights: Vec<(u64, WritebackPage, u8)>,
    held: Vec<(PageRef, u8)>,
    next_contents: u8,
    next_lsn: u64,
}

impl Harness {
    fn new() -> Self {
        Self {
            pool: PagePool::new(8192 * PAGE_BYTES),
            map: PageMap::new(),
            model: BTreeMap::new(),
            reads: Vec::new(),
            flights: Vec::new(),
            held: Vec::new(),
            next_contents: 0,
            next_lsn: 0,
        }
    }

    fn contents(&mut self) -> u8 {
        self.next_contents = self.next_contents.wrapping_add(1);
        self.next_contents
    }

    fn page_of(&self, contents: u8) -> PageMut {
        let mut page = self.pool.alloc_for_overwrite().unwrap();
        page.fill(contents);
        page
    }

    fn model_page(&mut self, index: u64) -> Option<&mut ModelPage> {
        match self.model.get_mut(&index) {
            Some(ModelSlot::Present(page)) => Some(page),
            _ => None,
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::BeginRead(index, length) => self.begin_read(index..index + length),
            Step::FinishRead(which, ok) => self.finish_read(which, ok),
            Step::InsertDirty(index) => self.insert_dirty(index),
            Step::InsertClean(index) => self.insert_clean(index),
            Step::Write(index, keep) => self.write(index, keep),
            Step::MarkDirty(index) => {
                let expected = self.model_page(index).is_some_and(|page| {
                    page.logged = false;
                    !std::mem::replace(&mut page.dirty, true)
                });
                assert_eq!(self.map.mark_dirty(index), expected);
            }
            Step::MarkToWrite(index, length) => {
                let mut chosen = 0;
                for (_, slot) in self.model.range_mut(index..index + length) {
                    if let ModelSlot::Present(page) = slot
                        && page.dirty
                    {
                        page.towrite = true;
                        chosen += 1;
                    }
                }
                assert_eq!(self.map.mark_towrite(index..index + length), chosen);
            }
            Step::BeginWriteback(index, length) => self.begin_writeback(index..index + length),
            Step::EndWriteback(which, ok) => self.end_writeback(which, ok),
            Step::SetLogged(index) => self.set_logged(index),
            Step::Remove(index, length) => self.remove(index..index + length),
            Step::Truncate(index) => self.remove(index..u64::MAX),
            Step::TakeClean(index) => {
                let clean = self.is_clean(index);
                let contents = self.model_page(index).map(|page| page.contents);
                let taken = self.map.take_clean(index);
                assert_eq!(taken.map(|page| page[17]), contents.filter(|_| clean));
                if clean {
                    self.model.remove(&index);
                }
            }
            Step::TakeCold(index) => self.take_cold(index),
            Step::Hit(index) => {
                let before = self.map.state(index).heat;
                let hit = self.map.get(index).is_some();
                let after = if hit { (before + 1).min(3) } else { 0 };
                assert_eq!(self.map.state(index).heat, after);
            }
            Step::HoldForReading(index) => {
                if let Some(page) = self.map.peek(index) {
                    self.held.push((page.clone(), page[17]));
                }
            }
            Step::DropHeld => self.held.clear(),
        }
    }

    fn begin_read(&mut self, range: Range<u64>) {
        let plan = self.map.begin_read(range.clone());
        let absent: Vec<u64> = range.filter(|index| !self.model.contains_key(index)).collect();
        assert!(plan.runs.iter().cloned().flatten().eq(absent.iter().copied()));
        assert!(plan.runs.windows(2).all(|pair| pair[0].end < pair[1].start), "runs are maximal");
        for index in absent {
            self.model.insert(index, ModelSlot::Reading(plan.token));
            self.reads.push((index, plan.token));
        }
    }

    fn finish_read(&mut self, which: usize, ok: bool) {
        if self.reads.is_empty() {
            return;
        }
        let (index, token) = self.reads.swap_remove(which % self.reads.len());
        let current =
            matches!(self.model.get(&index), Some(ModelSlot::Reading(read)) if *read == token);
        if ok {
            let contents = self.contents();
            let finished = self.map.finish_read(index, token, self.page_of(contents).freeze());
            assert_eq!(finished.is_ok(), current);
            if current {
                let page = ModelPage { contents, ..ModelPage::default() };
                self.model.insert(index, ModelSlot::Present(page));
            }
        } else {
            assert_eq!(self.map.abort_read(index, token), current);
            if current {
                self.model.remove(&index);
            }
        }
    }

    fn chunk_is_empty(&self, index: u64) -> bool {
        let base = index / CHUNK_PAGES * CHUNK_PAGES;
        let mut slots = self.model.range(base..base + CHUNK_PAGES);
        !slots.any(|(_, slot)| matches!(slot, ModelSlot::Present(_)))
    }

    fn insert_dirty(&mut self, index: u64) {
        let contents = self.contents();
        let new_chunk = self.chunk_is_empty(index);
        let inserted = self.map.insert_dirty(index, self.page_of(contents).freeze());
        assert_eq!(inserted.new_chunk, new_chunk);
        if let Some(page) = self.model_page(index) {
            assert_eq!(inserted.newly_dirty, !page.dirty);
            assert_eq!(inserted.replaced.unwrap()[17], page.contents);
            (page.contents, page.dirty, page.logged) = (contents, true, false);
        } else {
            assert!(inserted.newly_dirty && inserted.replaced.is_none());
            let page = ModelPage { contents, dirty: true, ..ModelPage::default() };
            self.model.insert(index, ModelSlot::Present(page));
        }
    }

    fn insert_clean(&mut self, index: u64) {
        let contents = self.contents();
        let inserted = self.map.insert_clean(index, self.page_of(contents).freeze());
        assert_eq!(inserted.is_ok(), !self.model.contains_key(&index));
        let page = ModelPage { contents, ..ModelPage::default() };
        self.model.entry(index).or_insert(ModelSlot::Present(page));
    }

    fn write(&mut self, index: u64, keep: bool) {
        let contents = self.contents();
        let old = if keep { OldContents::Keep } else { OldContents::Discard };
        match (self.map.page_for_write(index, &self.pool, old), self.model.get_mut(&index)) {
            (Ok(writable), Some(ModelSlot::Present(page))) => {
                if keep {
                    assert!(writable.bytes.iter().all(|&byte| byte == page.contents));
                }
                assert_eq!(writable.newly_dirty, !page.dirty);
                writable.bytes.fill(contents);
                (page.contents, page.dirty, page.logged) = (contents, true, false);
            }
            (Err(WriteRefused::Reading), Some(ModelSlot::Reading(_)))
            | (Err(WriteRefused::Absent), None) => {}
            (answer, slot) => panic!("{answer:?} for {slot:?}"),
        }
    }

    fn begin_writeback(&mut self, range: Range<u64>) {
        let writeback = self.map.begin_writeback(range.clone());
        let mut selected = writeback.pages.into_iter();
        for (&index, slot) in self.model.range_mut(range) {
            let ModelSlot::Present(page) = slot else { continue };
            if !page.dirty || page.writeback.is_some() {
                continue;
            }
            let taken = selected.next().unwrap();
            assert_eq!((taken.index, taken.page[17]), (index, page.contents));
            assert_eq!(taken.logged_lsn, page.owed.map(|(lsn, _)| lsn));
            assert_eq!(taken.is_logged, page.logged);
            page.writeback = Some((writeback.token, page.contents, taken.logged_lsn));
            (page.dirty, page.towrite) = (false, false);
            self.flights.push((writeback.token, taken, page.contents));
        }
        assert!(selected.next().is_none());
    }

    fn end_writeback(&mut self, which: usize, ok: bool) {
        if self.flights.is_empty() {
            return;
        }
        let (token, flight, contents) = self.flights.swap_remove(which % self.flights.len());
        assert!(flight.page.iter().all(|&byte| byte == contents), "changed on its way");
        let end = self.map.end_writeback(flight.index, token, ok);
        let page = self.model_page(flight.index);
        let Some(page) = page.filter(|page| page.writeback.is_some_and(|(t, _, _)| t == token))
        else {
            assert_eq!(end, WritebackEnd { stale: true, ..WritebackEnd::default() });
            return;
        };
        let (_, home_contents, home_lsn) = page.writeback.take().unwrap();
        assert!(!end.stale);
        assert_eq!(end.newly_dirty, !ok && !page.dirty);
        page.dirty |= !ok;
        page.towrite |= !ok;
        // A debt is paid when the log has nothing newer than what went home.
        let paid = ok && page.owed.is_some_and(|(lsn, _)| Some(lsn) == home_lsn || !page.dirty);
        assert_eq!(end.home_lsn, page.owed.filter(|_| paid).map(|(lsn, _)| lsn));
        if paid {
            (page.owed, page.logged) = (None, false);
        }
        if !page.dirty {
            assert_eq!(page.contents, home_contents, "a clean page equals home");
        }
    }

    fn set_logged(&mut self, index: u64) {
        // Callers log pages that are dirty or under writeback.
        let lsn = self.next_lsn + 1;
        let Some(page) = self.model_page(index) else { return };
        let old = page.owed.replace((lsn, page.contents));
        page.logged = true;
        page.towrite = false;
        page.dirty |= page.writeback.is_none();
        self.next_lsn = lsn;
        assert_eq!(self.map.set_logged(index, lsn), old.map(|(lsn, _)| lsn));
    }

    fn remove(&mut self, range: Range<u64>) {
        let removed = self.map.remove_range(range.clone());
        let indices: Vec<u64> = self.model.range(range).map(|(&index, _)| index).collect();
        let mut expected = Removed::default();
        let mut contents = Vec::new();
        for index in indices {
            if let Some(ModelSlot::Present(page)) = self.model.remove(&index) {
                contents.push(page.contents);
                expected.dirty += usize::from(page.dirty);
                expected.writeback += usize::from(page.writeback.is_some());
                expected.logged.extend(page.owed.map(|(lsn, _)| (index, lsn)));
            }
        }
        assert_eq!((removed.dirty, removed.writeback), (expected.dirty, expected.writeback));
        assert_eq!(removed.logged, expected.logged);
        assert!(removed.pages.iter().map(|page| page[17]).eq(contents));
    }

    fn is_clean(&mut self, index: u64) -> bool {
        self.model_page(index)
            .is_some_and(|page| !page.dirty && page.writeback.is_none() && page.owed.is_none())
    }

    fn take_cold(&mut self, index: u64) {
        let number = PageMap::chunk_of(index);
        let pages = number * CHUNK_PAGES..(number + 1) * CHUNK_PAGES;
        let heat: Vec<u8> = pages.clone().map(|index| self.map.state(index).heat).collect();
        let mut taken = Vec::new();
        let left = self.map.take_cold(number, &mut taken);
        let mut expected = Vec::new();
        for (index, heat) in pages.clone().zip(heat) {
            if heat == 0 && self.is_clean(index) {
                expected.extend(self.model_page(index).map(|page| page.contents));
                self.model.remove(&index);
            } else {
                assert_eq!(self.map.state(index).heat, heat.saturating_sub(1));
            }
        }
        assert!(taken.iter().map(|page| page[17]).eq(expected));
        let slots = self.model.range(pages);
        assert_eq!(left, slots.filter(|(_, slot)| matches!(slot, ModelSlot::Present(_))).count());
    }

    fn compare(&self) {
        self.map.check();
        let mut counts = Counts::default();
        for (&index, slot) in &self.model {
            let state = self.map.state(index);
            match slot {
                ModelSlot::Reading(_) => {
                    counts.reading += 1;
                    assert!(self.map.is_reading(index) && state.reading && !state.present);
                }
                ModelSlot::Present(page) => {
                    counts.present += 1;
                    counts.dirty += usize::from(page.dirty);
                    counts.writeback += usize::from(page.writeback.is_some());
                    counts.owed += usize::from(page.owed.is_some());
                    let expected = PageState {
                        present: true,
                        reading: false,
                        dirty: page.dirty,
                        writeback: page.writeback.is_some(),
                        logged: page.logged,
                        towrite: page.towrite,
                        logged_lsn: page.owed.map(|(lsn, _)| lsn),
                        heat: state.heat,
                    };
                    assert_eq!(state, expected, "page {index}");
                    assert_eq!(self.map.peek(index).unwrap()[17], page.contents);
                    if let Some((_, contents)) = page.owed.filter(|_| page.logged) {
                        assert_eq!(contents, page.contents, "logged means as in the log");
                    }
                }
            }
        }
        assert_eq!(self.map.counts(), counts);
        for (page, contents) in &self.held {
            assert!(page.iter().all(|byte| byte == contents), "a held page changed");
        }
    }

    fn compare_walks(&self, range: &Range<u64>, max_pages: u64) {
        for skip_writeback in [false, true] {
            for only_towrite in [false, true] {
                let half = self.next_lsn / 2;
                for logged in
                    [LoggedFilter::Any, LoggedFilter::NotLogged, LoggedFilter::OwedUpTo(half)]
                {
                    let filter = RunFilter { logged, only_towrite, skip_writeback };
                    let expected: Vec<u64> = self
                        .model
                        .range(range.clone())
                        .filter(|(_, slot)| selects(&filter, slot))
                        .map(|(&index, _)| index)
                        .collect();
                    let runs: Vec<_> =
                        self.map.dirty_runs(range.clone(), max_pages, filter).collect();
                    assert!(
                        runs.iter().all(|run| (1..=max_pages).contains(&(run.end - run.start)))
                    );
                    assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start
                        || pair[0].end == pair[1].start
                            && pair[0].end - pair[0].start == max_pages));
                    assert!(runs.into_iter().flatten().eq(expected));
                }
            }
        }
        let slots = || self.model.range(range.clone());
        let present = |slot: &ModelSlot| matches!(slot, ModelSlot::Present(_));
        let in_flight =
            |slot: &ModelSlot| matches!(slot, ModelSlot::Present(p) if p.writeback.is_some());
        assert_eq!(
            self.map.first_present(range.clone()),
            slots().find(|(_, slot)| present(slot)).map(|(&index, _)| index)
        );
        assert_eq!(
            self.map.first_writeback(range.clone()),
            slots().find(|(_, slot)| in_flight(slot)).map(|(&index, _)| index)
        );
        assert_eq!(
            self.map.first_absent(range.clone()),
            range.clone().find(|index| !self.model.get(index).is_some_and(present))
        );
        assert!(self.map.logged(range.clone()).eq(slots().filter_map(
            |(&index, slot)| match slot {
                ModelSlot::Present(page) => page.owed.map(|(lsn, _)| (index, lsn)),
                ModelSlot::Reading(_) => None,
            }
        )));
    }
}

fn selects(filter: &RunFilter, slot: &ModelSlot) -> bool {
    let ModelSlot::Present(page) = slot else { return false };
    page.dirty
        && (!filter.only_towrite || page.towrite)
        && (!filter.skip_writeback || page.writeback.is_none())
        && match filter.logged {
            LoggedFilter::Any => true,
            LoggedFilter::NotLogged => !page.logged,
            LoggedFilter::OwedUpTo(limit) => page.owed.is_some_and(|(lsn, _)| lsn <= limit),
        }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn map_behaves_like_its_model(
        steps in prop::collection::vec(step(), 1..150),
        walks in prop::collection::vec((index(), 0..3000_u64, 1..200_u64), 1..4),
    ) {
        let mut harness = Harness::new();
        for step in &steps {
            harness.apply(step);
            harness.compare();
        }
        for (index, length, max_pages) in walks {
            harness.compare_walks(&(index..index + length), max_pages);
        }
        // Nothing leaks: what is left goes with the map.
        let Harness { pool, map, flights, held, .. } = harness;
        drop((map, flights, held));
        prop_assert_eq!(pool.in_use_pages(), 0);
    }
}

fn dirty_map(pool: &PagePool, indices: impl IntoIterator<Item = u64>) -> PageMap {
    let mut map = PageMap::new();
    for index in indices {
        map.insert_dirty(index, pool.alloc_zeroed().unwrap().freeze());
    }
    map
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Long and short ones, that fill chunks, end with them or begin in their midst, with pages in the log among them.
    #[test]
    fn a_run_ends_where_it_must_and_nowhere_else(
        stretches in prop::collection::vec(stretch(), 1..20),
        walk in (0..1500_u64, prop_oneof![0..3000_u64, Just(u64::MAX >> 1)]),
        max_pages in prop_oneof![1..8_u64, Just(64), 1..300_u64, Just(u64::MAX)],
        logged in prop_oneof![
            Just(LoggedFilter::Any),
            Just(LoggedFilter::NotLogged),
            (0..20_u64).prop_map(LoggedFilter::OwedUpTo)
        ],
    ) {
        let pool = PagePool::new(6000 * PAGE_BYTES);
        let mut map = PageMap::new();
        let range = walk.0..walk.0 + walk.1;
        let mut expected: Vec<Range<u64>> = Vec::new();
        let mut at = 0;
        for (number, (gap, length, is_whole, is_logged)) in (0_u64..).zip(stretches) {
            let unit = if is_whole { CHUNK_PAGES } else { 1 };
            let start = (at + gap).next_multiple_of(unit);
            at = (start + length).next_multiple_of(unit);
            for index in start..at {
                map.insert_dirty(index, pool.alloc_zeroed().unwrap().freeze());
                if is_logged {
                    map.set_logged(index, number);
                }
                let is_selected = match logged {
                    LoggedFilter::Any => true,
                    LoggedFilter::NotLogged => !is_logged,
                    LoggedFilter::OwedUpTo(lsn) => is_logged && number <= lsn,
                };
                if !is_selected || !range.contains(&index) {
                    continue;
                }
                match expected.last_mut() {
                    Some(run) if run.end == index && run.end - run.start < max_pages => run.end += 1,
                    _ => expected.push(index..index + 1),
                }
            }
        }
        let filter = RunFilter { logged, ..RunFilter::default() };
        let runs: Vec<_> = map.dirty_runs(range, max_pages, filter).collect();
        prop_assert_eq!(runs, expected);
    }
}

/// How far behind the last, how many pages, whole chunks only, in the log.
fn stretch() -> impl Strategy<Value = (u64, u64, bool, bool)> {
    let gap = prop_oneof![2 => Just(0), 4 => 1..5_u64, 2 => 1..200_u64];
    let length = prop_oneof![4 => 1..5_u64, 2 => 1..200_u64];
    (gap, length, prop::bool::weighted(0.3), any::<bool>())
}

#[test]
fn memory_is_proportional_to_what_is_cached() {
    let pool = PagePool::new(64 * PAGE_BYTES);
    let mut map = dirty_map(&pool, [0]);
    assert!(map.memory_bytes() <= 256, "{} bytes for a small file", map.memory_bytes());
    map.insert_dirty(1 << 45, pool.alloc_zeroed().unwrap().freeze());
    assert!(map.memory_bytes() <= 1024, "{} bytes for two pages", map.memory_bytes());
    // A window slides over a file of 4 TiB.
    let mut map = PageMap::new();
    for step in 0..20_000_u64 {
        map.insert_clean(step * 50_000, pool.alloc_zeroed().unwrap().freeze()).unwrap();
        if step >= 32 {
            assert!(map.take_clean((step - 32) * 50_000).is_some());
        }
        assert!(map.memory_bytes() < 64 << 10);
    }
    map.check();
}

#[test]
fn sequential_streaming_keeps_only_the_window() {
    let pool = PagePool::new(300 * PAGE_BYTES);
    let mut map = PageMap::new();
    for index in 0..100_000_u64 {
        map.insert_clean(index, pool.alloc_for_overwrite().unwrap().freeze()).unwrap();
        if index >= 256 {
            assert!(map.take_clean(index - 256).is_some());
        }
    }
    map.check();
    assert!(map.memory_bytes() < 32 << 10, "{}", map.memory_bytes());
}

#[test]
fn chunks_that_come_in_any_order_end_up_in_the_vector() {
    let pool = PagePool::new(512 * PAGE_BYTES);
    let order = (0..500_u64).map(|step| step * 377 % 500 * CHUNK_PAGES);
    let mut map = dirty_map(&pool, order);
    map.check();
    assert!(map.sparse.len() < 50, "{} strays", map.sparse.len());
    assert!(map.dirty_runs(0..u64::MAX, 8, RunFilter::default()).count() == 500);
    map.truncate(0);
    map.check();
    assert!(map.dense.len() <= DENSE_KEEP);
}

#[test]
fn relogged_page_stays_owed_when_the_older_version_gets_home() {
    let pool = PagePool::new(8 * PAGE_BYTES);
    let mut map = dirty_map(&pool, [3]);
    assert_eq!(map.set_logged(3, 10), None);
    let writeback = map.begin_writeback(0..8);
    assert!(writeback.pages[0].is_logged);
    map.page_for_write(3, &pool, OldContents::Keep).unwrap().bytes[0] = 1;
    assert_eq!(map.set_logged(3, 20), Some(10));
    let end = map.end_writeback(3, writeback.token, true);
    assert_eq!(end.home_lsn, None);
    let again = map.begin_writeback(0..8);
    assert_eq!(again.pages[0].logged_lsn, Some(20));
    assert_eq!(map.end_writeback(3, again.token, true).home_lsn, Some(20));
    assert!(map.take_clean(3).is_some());
}

#[test]
fn debt_survives_redirtying_until_home() {
    let pool = PagePool::new(8 * PAGE_BYTES);
    let mut map = dirty_map(&pool, [3]);
    map.set_logged(3, 10);
    map.page_for_write(3, &pool, OldContents::Discard).unwrap();
    let state = map.state(3);
    assert_eq!((state.logged, state.logged_lsn), (false, Some(10)));
    let writeback = map.begin_writeback(3..4);
    assert!(map.take_clean(3).is_none());
    let end = map.end_writeback(3, writeback.token, false);
    assert!(end.newly_dirty && map.state(3).logged_lsn == Some(10));
    let writeback = map.begin_writeback(3..4);
    assert_eq!(map.end_writeback(3, writeback.token, true).home_lsn, Some(10));
}

#[test]
fn write_without_memory_for_a_clone_changes_nothing() {
    let pool = PagePool::new(PAGE_BYTES);
    let mut map = dirty_map(&pool, [0]);
    let writeback = map.begin_writeback(0..1);
    let before = map.state(0);
    let refused = map.page_for_write(0, &pool, OldContents::Keep).unwrap_err();
    assert_eq!(refused, WriteRefused::NoMemory);
    assert_eq!(map.state(0), before);
    drop(writeback);
    assert!(map.page_for_write(0, &pool, OldContents::Keep).unwrap().newly_dirty);
}

#[test]
fn concurrent_hits_only_ever_raise_heat() {
    let pool = PagePool::new(64 * PAGE_BYTES);
    let map = dirty_map(&pool, 0..64);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for index in (0..64).chain(0..64) {
                    assert!(map.get(index).is_some());
                }
            });
        }
    });
    map.check();
    assert!((0..64).all(|index| map.state(index).heat == 3));
}

#[test]
fn chunk_heat_is_that_of_the_hottest_page() {
    let pool = PagePool::new(8 * PAGE_BYTES);
    let mut map = PageMap::new();
    assert_eq!(map.chunk_heat(1), None);
    for index in 64..67 {
        map.insert_clean(index, pool.alloc_zeroed().unwrap().freeze()).unwrap();
    }
    map.mark_dirty(66);
    map.get(64);
    for _ in 0..5 {
        map.get(65);
    }
    assert_eq!(map.chunk_heat(1), Some((3, 2)));
    map.cool_chunk(1);
    assert_eq!((map.state(64).heat, map.state(65).heat), (0, 2));
    assert_eq!(map.chunk_heat(1), Some((2, 2)));
    map.chill_chunk(1);
    assert_eq!(map.chunk_heat(1), Some((0, 2)));
    let mut taken = Vec::new();
    assert_eq!(map.take_cold(1, &mut taken), 1);
    assert_eq!((taken.len(), map.resident_chunks().collect::<Vec<_>>()), (2, vec![1]));
}

#[test]
fn ends_of_what_a_truncation_cut_off_do_not_touch_its_successor() {
    let pool = PagePool::new(8 * PAGE_BYTES);
    let mut map = dirty_map(&pool, [3]);
    let old = map.begin_writeback(0..8);
    assert_eq!(map.truncate(0).writeback, 1);
    map.insert_dirty(3, pool.alloc_zeroed().unwrap().freeze());
    let new = map.begin_writeback(0..8);
    assert!(map.end_writeback(3, old.token, true).stale);
    assert!(map.state(3).writeback);
    assert!(!map.end_writeback(3, new.token, true).stale);

    let old = map.begin_read(5..6);
    map.truncate(0);
    let new = map.begin_read(5..6);
    assert!(!map.abort_read(5, old.token));
    let late = map.finish_read(5, old.token, pool.alloc_zeroed().unwrap().freeze());
    assert!(late.is_err() && map.is_reading(5));
    assert!(map.finish_read(5, new.token, pool.alloc_zeroed().unwrap().freeze()).is_ok());
    map.check();
}
