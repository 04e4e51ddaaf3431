//! How often the mappings of files have changed. Whoever reads the count of a file, then looks its mapping up, knows that the
//! answer holds for as long as the count is the same.
//!
//! **Invariant:** the count of a file moves within the commit that changes one of its extents, before anybody can see that.
//! Files may share a count.

use crate::format::{Key, Kind};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Counts: more than files whose mapping changes at the same time.
const COUNTS: usize = 4096;

/// Of a file's mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingMoment {
    count: usize,
    version: u64,
}

/// See the module's head.
pub struct MappingMoments(Box<[AtomicU64]>);

impl Default for MappingMoments {
    fn default() -> Self {
        Self((0..COUNTS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl MappingMoments {
    /// Now, for the file `inode`. Take it before looking.
    pub fn moment(&self, inode: u64) -> MappingMoment {
        let count = inode as usize % COUNTS;
        MappingMoment { count, version: self.0[count].load(Ordering::Acquire) }
    }

    /// The item `key` changes.
    pub(super) fn note(&self, key: &Key) {
        if key.kind == Kind::Extent {
            self.0[key.inode as usize % COUNTS].fetch_add(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
impl MappingMoments {
    /// As if the item `key` had changed.
    pub fn touch(&self, key: Key) {
        self.note(&key);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_of_an_extent_moves_the_count_of_its_file() {
        let moments = MappingMoments::default();
        let before: Vec<MappingMoment> = (0..5000).map(|inode| moments.moment(inode)).collect();
        moments.note(&Key::inode(7));
        moments.note(&Key::inline(7));
        assert!((0..5000).all(|inode| moments.moment(inode) == before[inode as usize]));
        moments.note(&Key::extent(7, 100));
        for inode in 0..5000 {
            let is_same = moments.moment(inode) == before[inode as usize];
            assert_eq!(is_same, inode as usize % COUNTS != 7);
        }
    }
}
