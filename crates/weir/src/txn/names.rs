//! Names that paths have led through or to, and how often the entries of directories have changed.
//!
//! Programs that work with paths walk through the same few directories all the time, and open what they have just made; in the
//! store each part of a path costs a descent of deltas and tree. So what was found is kept, one name for each bucket, with
//! the bucket's count: a name whose entry may have changed is not found.
//!
//! Entries are counted by bucket: those that a look-up of one name searches ([`crate::namespace::entry`]) share one, and others
//! may. Whoever reads the count, then looks up, knows that the answer holds for as long as the count is the same.
//!
//! **Invariant:** the count of an entry moves within the commit that changes the entry, before that commit returns.
//!
//! Locks: one for each bucket, a leaf.

use super::delta::name_bucket_hash;
use crate::format::{Key, Kind};
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::types::FileType;

/// What a cached name costs: its bucket.
pub const CACHED_NAME_BYTES: u64 = 128;
/// Longest name that is kept.
const MOST_NAME_BYTES: usize = 64;

#[cfg(not(feature = "shuttle"))]
const _: () = assert!(size_of::<Bucket>() == CACHED_NAME_BYTES as usize);

/// A name, and what it was when the bucket's count was `version`.
struct Known {
    dir: u64,
    version: u64,
    named: Named,
    /// In the bucket, so that to remember a name is neither to allocate memory nor to free some that has long been cold.
    name: [u8; MOST_NAME_BYTES],
    length: u8,
}

impl Known {
    fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.length)]
    }
}

/// What a name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    /// The inode.
    pub inode: u64,
    /// What that is.
    pub file_type: FileType,
}

/// Two cache lines; the name goes on in the second.
#[repr(align(128))]
struct Bucket {
    version: AtomicU64,
    known: RwLock<Option<Known>>,
}

/// Of a bucket, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    bucket: usize,
    version: u64,
}

/// See the module's head.
pub struct NameCache(Box<[Bucket]>);

impl NameCache {
    /// Nothing is known. `buckets`: how many, a power of two.
    pub fn new(buckets: usize) -> Self {
        debug_assert!(buckets.is_power_of_two());
        let bucket = || Bucket { version: AtomicU64::new(0), known: RwLock::new(None) };
        Self((0..buckets).map(|_| bucket()).collect())
    }

    /// The bucket of the entry `key`, and of all that share its hash but for the low byte.
    fn bucket(&self, key: &Key) -> usize {
        debug_assert!(key.kind == Kind::Dirent);
        (name_bucket_hash(key) >> 32) as usize % self.0.len()
    }

    /// What the bucket of the entry `key` is like now. Take it before looking.
    pub fn moment(&self, key: &Key) -> Moment {
        let bucket = self.bucket(key);
        Moment { bucket, version: self.0[bucket].version.load(Ordering::Acquire) }
    }

    /// No entry of the bucket has changed since `moment`.
    pub fn is_unchanged(&self, moment: Moment) -> bool {
        self.0[moment.bucket].version.load(Ordering::Acquire) == moment.version
    }

    /// The item `key` changes.
    pub(super) fn note(&self, key: &Key) {
        if key.kind == Kind::Dirent {
            self.0[self.bucket(key)].version.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// What `name` in `dir` is, if that is known as of `moment`, which is of its bucket.
    pub fn get(&self, moment: Moment, (dir, name): (u64, &[u8])) -> Option<Named> {
        let held = self.0[moment.bucket].known.read();
        let known = held.as_ref()?;
        let same = known.version == moment.version && known.dir == dir && known.name() == name;
        same.then_some(known.named)
    }

    /// A look-up that began at `moment` has found this. Names that take much memory are not kept.
    pub fn remember(&self, moment: Moment, (dir, name): (u64, &[u8]), named: Named) {
        if name.len() > MOST_NAME_BYTES {
            return;
        }
        let length = name.len() as u8;
        let mut known =
            Known { dir, version: moment.version, named, name: [0; MOST_NAME_BYTES], length };
        known.name[..name.len()].copy_from_slice(name);
        *self.0[moment.bucket].known.write() = Some(known);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn entry(offset: u64) -> Key {
        Key::new(7, Kind::Dirent, offset)
    }

    #[test]
    fn a_change_is_seen_where_its_name_is_looked_up_and_nowhere_else() {
        let names = NameCache::new(64);
        let keys: Vec<Key> = (0..1000_u64).map(|number| entry(number << 20)).collect();
        let before: Vec<Moment> = keys.iter().map(|key| names.moment(key)).collect();
        assert_eq!(names.moment(&entry(5 << 20 | 0xff)), before[5]);
        names.note(&entry(5 << 20 | 1));
        names.note(&Key::inode(7));
        for moment in &before {
            assert_eq!(names.is_unchanged(*moment), moment.bucket != before[5].bucket);
        }
    }

    #[test]
    fn a_name_is_known_in_its_directory_and_for_as_long_as_nothing_has_changed() {
        let names = NameCache::new(64);
        let (key, named) = (entry(0x4500), Named { inode: 9, file_type: FileType::Directory });
        let moment = names.moment(&key);
        assert_eq!(names.get(moment, (7, b"name")), None);
        names.remember(moment, (7, b"name"), named);
        assert_eq!(names.get(moment, (7, b"name")), Some(named));
        assert_eq!(names.get(moment, (6, b"name")), None);
        assert_eq!(names.get(moment, (7, b"nam")), None);
        names.note(&key);
        assert_eq!(names.get(names.moment(&key), (7, b"name")), None);
        // Whoever began to look before the change may be wrong.
        names.remember(moment, (7, b"name"), named);
        assert_eq!(names.get(names.moment(&key), (7, b"name")), None);
    }
}
