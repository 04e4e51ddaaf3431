//! When memory is prepared, and that the thread does it.

use super::*;
use crate::cache::page::{Growth, PAGE_BYTES as PAGE, PageMut};

const PLENTY: usize = 1 << 20;

#[test]
fn a_pool_without_room_is_left_alone() {
    for figures in [
        Figures { capacity: SLAB_FRAMES - 1, total: 0, in_use: 0, ready: 0 },
        Figures { capacity: PLENTY, total: PLENTY, in_use: PLENTY, ready: 0 },
        Figures { capacity: 0, total: 0, in_use: 0, ready: 0 },
    ] {
        assert!(!Preparation::new().wants_slab(figures), "{figures:?}");
    }
}

#[test]
fn the_preparer_counts_for_nothing_unless_somebody_is_short_of_frames_or_it_was_starved() {
    let many = Figures { capacity: PLENTY, total: PLENTY / 2, in_use: 0, ready: FEW_FRAMES };
    let few = Figures { ready: FEW_FRAMES - 1, ..many };
    // Nor where few frames are ready because a burst's worth is in use: then used ones are taken again.
    let recycling = Figures { in_use: PLENTY / 2, ..few };
    let mut modesty = Modesty { is_possible: true, ordinary_slabs: 0 };
    assert_eq!(modesty.class(many), SchedulingClass::Idle);
    assert_eq!(modesty.class(few), SchedulingClass::Ordinary);
    assert_eq!(modesty.class(recycling), SchedulingClass::Idle);
    modesty.note(SchedulingClass::Idle, STARVED_NS);
    assert_eq!(modesty.class(many), SchedulingClass::Idle);
    modesty.note(SchedulingClass::Idle, STARVED_NS + 1);
    for _ in 0..ORDINARY_SLABS {
        assert_eq!(modesty.class(many), SchedulingClass::Ordinary);
        // An ordinary thread that waits says nothing.
        modesty.note(SchedulingClass::Ordinary, u64::MAX);
    }
    assert_eq!(modesty.class(many), SchedulingClass::Idle);
    let never = Modesty { is_possible: false, ordinary_slabs: 0 };
    assert_eq!(never.class(many), SchedulingClass::Ordinary);
}

/// The preparer, alone, has worked for so long: how long it rests.
fn rest_after(pool: &PagePool, took_ns: u64) -> u64 {
    pool.note_slab_cost(took_ns);
    let state = pool.0.state.lock();
    state.preparation.rest_us(took_ns, false, state.figures())
}

#[test]
fn while_fresh_memory_is_dear_those_who_can_recycle_are_told_to() {
    let slabs = 8;
    let pool = PagePool::new(slabs * SLAB_FRAMES * PAGE);
    let ahead = slabs * AHEAD_EIGHTHS / 8 * SLAB_FRAMES;
    let take = |pages: &mut Vec<PageMut>, growth| pool.alloc_batch_for_overwrite(1, growth, pages);
    let mut pages = Vec::new();
    // Nobody knows what it costs, or it is cheap: the pool grows.
    assert_eq!(rest_after(&pool, DEAR_SLAB_NS / 2), 0);
    pool.alloc_batch_for_overwrite(ahead - 1, Growth::IfCheap, &mut pages);
    for _ in 0..100 {
        assert_eq!(rest_after(&pool, DEAR_SLAB_NS * 2), 0, "a burst's worth is prepared at once");
    }
    // Up to a burst's worth it grows all the same.
    assert_eq!(take(&mut pages, Growth::IfCheap), 1);
    assert_eq!(take(&mut pages, Growth::IfCheap), 0);
    assert_eq!(rest_after(&pool, DEAR_SLAB_NS * 2), DEAR_SLAB_NS * 2 * DEAR_REST / 1000);
    // Whoever has nothing to recycle gets it, and so does everybody once it is prepared or cheap.
    assert_eq!(take(&mut pages, Growth::Allowed), 1);
    let rest = pool.stats().ready;
    assert_eq!(pool.alloc_batch_for_overwrite(rest, Growth::IfCheap, &mut pages), rest);
    assert_eq!(take(&mut pages, Growth::IfCheap), 0);
    assert!(pool.prepare_slab());
    assert_eq!(take(&mut pages, Growth::IfCheap), 1);
    for _ in 0..100 {
        pool.note_slab_cost(DEAR_SLAB_NS / 2);
    }
    let rest = pool.stats().ready;
    pool.alloc_batch_for_overwrite(rest + 1, Growth::IfCheap, &mut pages);
    assert_eq!(pages.len(), pool.in_use_pages());
    assert!(pool.in_use_pages() > ahead + SLAB_FRAMES);
}

#[test]
fn who_wants_many_frames_gets_a_slab_made_outside_of_the_lock_and_within_the_limits() {
    let slabs = 8;
    let pool = PagePool::with_reserve(slabs * SLAB_FRAMES * PAGE, SLAB_FRAMES * PAGE);
    for _ in 0..100 {
        pool.note_slab_cost(DEAR_SLAB_NS * 2);
    }
    let take = |pages: &mut Vec<PageMut>, growth| {
        pool.alloc_batch_for_overwrite(MANY_FRAMES, growth, pages)
    };
    let mut pages = Vec::new();
    assert_eq!(take(&mut pages, Growth::IfCheap), MANY_FRAMES);
    assert_eq!(pool.stats().allocated, SLAB_FRAMES);
    let neighbours = |pair: &[PageMut]| pair[0].as_ptr_range().end == pair[1].as_ptr();
    assert!(pages.windows(2).all(neighbours), "one segment");
    while take(&mut pages, Growth::IfCheap) == MANY_FRAMES {}
    let ahead = slabs * AHEAD_EIGHTHS / 8 * SLAB_FRAMES;
    assert!((ahead..ahead + SLAB_FRAMES).contains(&pages.len()), "{}", pages.len());
    assert!(pool.stats().ready < MANY_FRAMES);
    while take(&mut pages, Growth::Allowed) == MANY_FRAMES {}
    assert_eq!(pages.len(), (slabs - 1) * SLAB_FRAMES, "the reserve is not for everybody");
    assert_eq!(pool.stats().allocated, (slabs - 1) * SLAB_FRAMES);
}

#[test]
fn dear_memory_that_nobody_is_short_of_is_prepared_at_leisure() {
    let pool = PagePool::new(4 * FEW_FRAMES * PAGE);
    let learn = |nanoseconds| rest_after(&pool, nanoseconds);
    while pool.stats().ready < FEW_FRAMES {
        for _ in 0..100 {
            assert_eq!(learn(DEAR_SLAB_NS * 2), 0, "few are ready");
        }
        assert!(pool.prepare_slab());
    }
    assert_eq!(learn(DEAR_SLAB_NS * 2), DEAR_SLAB_NS * 2 * DEAR_REST / 1000);
    let page = pool.alloc_zeroed();
    assert_eq!(learn(DEAR_SLAB_NS * 2), 0, "one less");
    drop(page);
    for _ in 0..100 {
        learn(DEAR_SLAB_NS / 2);
    }
    assert_eq!(learn(DEAR_SLAB_NS / 2), 0, "cheap memory is prepared at once");
}

#[test]
fn beside_syncs_dear_memory_is_prepared_rarely_unless_somebody_is_short_of_it() {
    let mut preparation = Preparation::new();
    let plenty = Figures { capacity: PLENTY, total: PLENTY / 2, in_use: 0, ready: PLENTY / 4 };
    let few = Figures { ready: FEW_FRAMES - 1, ..plenty };
    let recycling = Figures { in_use: PLENTY / 2, ..few };
    let took_ns = DEAR_SLAB_NS * 2;
    assert_eq!(preparation.rest_us(took_ns, true, plenty), 0, "nobody knows what it costs");
    for _ in 0..100 {
        preparation.note_slab_cost(took_ns);
    }
    for pool in [plenty, recycling] {
        assert_eq!(preparation.rest_us(took_ns, false, pool), took_ns * DEAR_REST / 1000);
        let beside_us = preparation.rest_us(took_ns, true, pool);
        assert_eq!(beside_us, took_ns * DEAR_REST_BESIDE_SYNCS / 1000);
        assert_eq!(preparation.rest_us(u64::MAX, true, pool), MAX_REST_US);
    }
    assert_eq!(preparation.rest_us(took_ns, true, few), 0);
}

#[cfg(not(any(miri, feature = "shuttle")))]
#[test]
fn a_rest_ends_when_nobody_syncs_any_more_or_it_is_told_to_go() {
    use crate::sync::SystemClock;
    use std::cell::Cell;
    let pool = PagePool::new(8 * SLAB_FRAMES * PAGE);
    for _ in 0..100 {
        pool.note_slab_cost(MAX_REST_US * 1000 / DEAR_REST_BESIDE_SYNCS);
    }
    // A burst's worth is in use, so nobody is short of frames.
    let _used: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed())
        .take(8 * SLAB_FRAMES * AHEAD_EIGHTHS / 8)
        .collect();
    let clock = SystemClock::default();
    let (asked, told) = (Cell::new(0), Cell::new(0));
    // Others sync when it is asked first, and not any more then.
    let others = || asked.replace(asked.get() + 1) == 0;
    pool.rest(REST_STEP_US, &clock, || true, others);
    assert_eq!(asked.get(), 2, "it rests for a step, which is more than its rest when it is alone");
    let go_on = || told.replace(told.get() + 1) == 0;
    pool.rest(u64::MAX, &clock, go_on, || true);
    assert_eq!(told.get(), 2);
}

#[cfg(not(any(miri, feature = "shuttle")))]
#[test]
fn the_preparer_fills_up_to_the_end_and_then_leaves_bursts_alone_until_few_are_left() {
    let pool = PagePool::new(64 * SLAB_FRAMES * PAGE);
    let wants = || {
        let mut state = pool.0.state.lock();
        let figures = state.figures();
        state.preparation.wants_slab(figures)
    };
    let ahead = 64 * AHEAD_EIGHTHS / 8;
    for _ in 0..ahead {
        assert!(wants(), "nothing is ready yet");
        assert!(pool.prepare_slab());
    }
    assert!(!wants(), "all is ready");
    let mut used: Vec<PageMut> = Vec::new();
    let mut begin_slab = || used.extend((0..SLAB_FRAMES).filter_map(|_| pool.alloc_zeroed()));
    for left in (0..ahead).rev() {
        begin_slab();
        assert_eq!(wants(), left < ahead / LOW_PART, "{left} slabs are left");
    }
    while wants() {
        assert!(pool.prepare_slab());
    }
    assert_eq!(pool.stats().ready, ahead * SLAB_FRAMES, "what was begun is finished");
    begin_slab();
    assert!(!wants());
    // The burst is over.
    pool.await_slab_taken(&mut pool.0.state.lock(), true);
    assert!(wants());
}

#[test]
fn nobody_waits_for_a_huge_page_while_these_are_dear() {
    let pool = PagePool::new(4 * SLAB_FRAMES * PAGE);
    assert_eq!(pool.0.state.lock().preparation.backing(), Backing::Huge);
    for _ in 0..100 {
        pool.note_slab_cost(DEAR_SLAB_NS * 2);
    }
    assert_eq!(pool.0.state.lock().preparation.backing(), Backing::Ordinary);
    // Pages of both kinds are pages.
    let mut pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    for page in &mut pages {
        page.fill(7);
    }
    assert_eq!(pages.len(), 4 * SLAB_FRAMES);
    drop(pages);
    pool.trim();
    assert_eq!(pool.stats().allocated, 0);
}

#[cfg(not(any(miri, feature = "shuttle")))]
#[test]
fn the_preparer_keeps_slabs_ahead_within_the_capacity_and_stops_when_told() {
    use crate::sync::SystemClock;
    use std::sync::atomic::{AtomicBool, Ordering};
    let slabs = 16;
    let pool = PagePool::new(slabs * SLAB_FRAMES * PAGE);
    let go_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let preparer = scope.spawn(|| {
            let go_on = || go_on.load(Ordering::Relaxed);
            pool.run_preparer(&SystemClock::default(), go_on, || false);
        });
        let ahead = slabs * AHEAD_EIGHTHS / 8 * SLAB_FRAMES;
        while pool.stats().ready < ahead {
            std::thread::yield_now();
        }
        let at_first = pool.stats().allocated;
        // Using frames up makes it prepare more, up to the capacity.
        let some: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_for_overwrite())
            .take(slabs * SLAB_FRAMES / 2)
            .collect();
        while pool.stats().ready < ahead {
            std::thread::yield_now();
        }
        let rest: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_for_overwrite()).collect();
        let at_last = pool.stats().allocated;
        // Nothing is asserted before the preparer has been told: the scope waits for it.
        go_on.store(false, Ordering::Relaxed);
        pool.wake_preparer();
        assert!((ahead..=ahead + SLAB_FRAMES).contains(&at_first), "{at_first}");
        assert_eq!(some.len() + rest.len(), slabs * SLAB_FRAMES);
        // A slab may be in preparation while somebody needs the last one.
        assert!((slabs..=slabs + 1).contains(&(at_last / SLAB_FRAMES)), "{at_last}");
        preparer.join().expect("the preparer ends");
    });
}
