//! The pool and its pages, also under threads (and under miri).

use super::pool::SMALL_SLAB_FRAMES;
use super::slab::SLAB_FRAMES;
use super::*;

const PAGE: usize = PAGE_BYTES;

#[test]
fn capacity_bounds_pages_in_use_and_drop_returns_them() {
    for capacity in [1, 2, 15, 16, 17, 40, 511, 512, 600] {
        let pool = PagePool::new(capacity * PAGE);
        let pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_for_overwrite()).collect();
        assert_eq!(pages.len(), capacity);
        assert_eq!(pool.in_use_pages(), capacity);
        assert!(pages.iter().all(|page| page.as_ptr().addr() % PAGE == 0));
        let mut addresses: Vec<_> = pages.iter().map(|page| page.as_ptr()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1].addr() - pair[0].addr() >= PAGE));
        drop(pages);
        assert_eq!(pool.stats().in_use, 0);
        assert_eq!(pool.stats().peak, capacity);
        assert!(pool.alloc_zeroed().is_some());
    }
    assert!(PagePool::new(PAGE - 1).alloc_emergency().is_none());
}

#[test]
fn zeroed_pages_are_zero_even_when_recycled() {
    let pool = PagePool::new(3 * PAGE);
    for _ in 0..3 {
        let mut pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
        assert!(pages.iter().all(|page| page.iter().all(|&byte| byte == 0)));
        for page in &mut pages {
            page.fill(0xa5);
        }
    }
}

#[test]
fn reserve_is_for_emergencies_only() {
    let pool = PagePool::with_reserve(10 * PAGE, 3 * PAGE);
    let mut pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    assert_eq!(pages.len(), 7);
    pages.extend(std::iter::from_fn(|| pool.alloc_emergency()));
    assert_eq!(pages.len(), 10);
    pages.truncate(7);
    assert!(pool.alloc_zeroed().is_none());
    pages.truncate(6);
    assert!(pool.alloc_zeroed().is_some());
}

#[test]
fn small_pools_take_small_slabs() {
    let pool = PagePool::new(40 * PAGE);
    let _page = pool.alloc_zeroed();
    assert_eq!(pool.stats().allocated, SMALL_SLAB_FRAMES);
    let _pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    assert_eq!(pool.stats().allocated, 40);
}

#[test]
fn a_shared_page_is_immutable_and_the_last_holder_may_write() {
    let pool = PagePool::new(PAGE);
    let mut page = pool.alloc_zeroed().unwrap();
    page[7] = 1;
    let mut first = page.freeze();
    let second = first.clone();
    assert!(first.same_page(&second));
    assert!(first.get_mut().is_none());
    let mut first = first.try_into_mut().unwrap_err();
    drop(second);
    first.get_mut().unwrap()[7] = 2;
    let page = first.try_into_mut().unwrap();
    assert_eq!(page[7], 2);
    assert!(pool.alloc_zeroed().is_none());
    drop(page);
    assert!(pool.alloc_zeroed().is_some());
}

#[test]
fn pages_outlive_every_handle_of_their_pool() {
    let pool = PagePool::new(2 * PAGE);
    let mut page = pool.alloc_zeroed().unwrap();
    drop(pool);
    page.fill(9);
    let page = page.freeze();
    let copy = page.clone();
    drop(page);
    assert!(copy.iter().all(|&byte| byte == 9));
}

#[test]
fn batch_takes_what_the_capacity_allows() {
    let pool = PagePool::with_reserve(10 * PAGE, PAGE);
    let mut pages = Vec::new();
    assert_eq!(pool.alloc_batch_for_overwrite(6, Growth::Allowed, &mut pages), 6);
    assert_eq!(pool.alloc_batch_for_overwrite(6, Growth::Allowed, &mut pages), 3);
    assert_eq!((pages.len(), pool.in_use_pages()), (9, 9));
}

#[test]
fn shrinking_gives_free_slabs_back_and_keeps_pages_in_use() {
    let pool = PagePool::new(4 * SLAB_FRAMES * PAGE);
    let mut pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    for (number, page) in pages.iter_mut().enumerate() {
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
    // One page of the second slab stays.
    let kept = pages.swap_remove(SLAB_FRAMES + 3);
    drop(pages);
    pool.set_capacity(2 * SLAB_FRAMES * PAGE);
    assert_eq!(pool.stats().allocated, SLAB_FRAMES);
    assert_eq!(kept[..8], (SLAB_FRAMES + 3).to_le_bytes());
    let again: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_for_overwrite()).collect();
    assert_eq!(again.len(), 2 * SLAB_FRAMES - 1);
    drop((kept, again));
    pool.trim();
    assert_eq!(pool.stats().allocated, 0);
    assert!(pool.alloc_zeroed().is_some());
}

#[test]
fn trim_keeps_the_never_used_tail_usable() {
    let pool = PagePool::new(40 * PAGE);
    let first = pool.alloc_zeroed().unwrap();
    pool.trim();
    let rest: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    assert_eq!(rest.len(), 39);
    assert!(rest.iter().all(|page| page.iter().all(|&byte| byte == 0)));
    drop(first);
}

#[test]
fn threads_sharing_pages_never_see_another_pages_bytes() {
    let pool = PagePool::new(8 * PAGE);
    let rounds = if cfg!(miri) { 20 } else { 2000 };
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..rounds {
                    let Some(mut page) = pool.alloc_for_overwrite() else { continue };
                    page.fill(thread);
                    let page = page.freeze();
                    let clones: Vec<PageRef> = (0..round % 3).map(|_| page.clone()).collect();
                    std::thread::scope(|inner| {
                        if round % 50 == 0 {
                            let copy = page.clone();
                            inner.spawn(move || assert!(copy.iter().all(|&b| b == thread)));
                        }
                    });
                    drop(clones);
                    let mut page = page.try_into_mut().unwrap();
                    assert!(page.iter().all(|&byte| byte == thread));
                    page.fill(0xff);
                }
            });
        }
    });
    assert_eq!(pool.stats().in_use, 0);
}

#[test]
fn prepared_slabs_are_used_before_new_ones_and_freed_by_trim() {
    let pool = PagePool::new(3 * SLAB_FRAMES * PAGE);
    assert!(pool.prepare_slab() && pool.prepare_slab() && pool.prepare_slab());
    assert!(!pool.prepare_slab(), "the pool has all its memory");
    assert_eq!(pool.stats().ready, 3 * SLAB_FRAMES);
    let mut pages: Vec<PageMut> = std::iter::from_fn(|| pool.alloc_zeroed()).collect();
    assert_eq!((pages.len(), pool.stats().ready), (3 * SLAB_FRAMES, 0));
    assert_eq!(pool.stats().allocated, 3 * SLAB_FRAMES);
    pages.truncate(5);
    assert_eq!(pool.stats().ready, 3 * SLAB_FRAMES - 5);
    drop(pages);
    pool.trim();
    assert!(pool.prepare_slab());
    pool.trim();
    assert_eq!((pool.stats().allocated, pool.stats().ready), (0, 0));
    assert!(!PagePool::new(SLAB_FRAMES * PAGE - 1).prepare_slab(), "too small for a full slab");
}

#[test]
fn frames_freed_in_order_come_back_in_order() {
    let pool = PagePool::new(100 * PAGE);
    let mut pages = Vec::new();
    pool.alloc_batch_for_overwrite(100, Growth::Allowed, &mut pages);
    let addresses = |pages: &[PageMut]| -> Vec<usize> {
        pages.iter().map(|page| page.as_ptr().addr()).collect()
    };
    let expected = addresses(&pages[30..50]);
    pages.drain(30..50);
    let mut again = Vec::new();
    assert_eq!(pool.alloc_batch_for_overwrite(20, Growth::Allowed, &mut again), 20);
    assert_eq!(addresses(&again), expected);
}
