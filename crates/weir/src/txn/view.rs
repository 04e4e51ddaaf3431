//! Looking items up: in the store as it is, or as it will be when changes that are being put together are committed.

use super::mapping_moments::MappingMoment;
use super::op::Op;
use super::store::{Item, Store, predecessor};
use crate::error::Result;
use crate::format::Key;
use crate::tree::Value;
use std::collections::BTreeMap;

/// Items that a scan collects at a time where it has to.
const SCAN_BATCH: usize = 257;

/// An ordered map of items that can be read.
pub trait View {
    /// The value of `key`.
    fn get(&self, key: Key) -> Result<Option<Value>>;

    /// The item with the greatest key `<= key` that is `>= floor`.
    fn get_le(&self, key: Key, floor: Key) -> Result<Option<Item>>;

    /// How often the mapping of file `inode` has changed underneath. Take it before looking.
    fn mapping_moment(&self, inode: u64) -> MappingMoment;

    /// About `limit` items with `from <= key <= to` in order, and the key to go on from if there may be more. Perhaps fewer, or none, where
    /// there are more.
    fn collect(&self, from: Key, to: Key, limit: usize) -> Result<(Vec<Item>, Option<Key>)>;

    /// Shows the items with `from <= key <= to` in order to `visit` until it answers false.
    fn scan(
        &self,
        from: Key,
        to: Key,
        visit: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        scan_collected(self, from, to, visit)
    }
}

/// [`View::scan`] by way of [`View::collect`].
pub(super) fn scan_collected<V: View + ?Sized>(
    view: &V,
    from: Key,
    to: Key,
    visit: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
) -> Result<()> {
    let mut next = Some(from);
    while let Some(start) = next {
        let (items, more) = view.collect(start, to, SCAN_BATCH)?;
        for (key, value) in items {
            if !visit(key, &value)? {
                return Ok(());
            }
        }
        next = more;
    }
    Ok(())
}

impl View for Store {
    fn get(&self, key: Key) -> Result<Option<Value>> {
        Self::get(self, key)
    }
    fn get_le(&self, key: Key, floor: Key) -> Result<Option<Item>> {
        Self::get_le(self, key, floor)
    }
    fn mapping_moment(&self, inode: u64) -> MappingMoment {
        self.mappings.moment(inode)
    }
    fn collect(&self, from: Key, to: Key, limit: usize) -> Result<(Vec<Item>, Option<Key>)> {
        Self::collect(self, from, to, limit)
    }
    fn scan(
        &self,
        from: Key,
        to: Key,
        visit: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        Self::scan(self, from, to, visit)
    }
}

/// Changes over a view that nobody else sees yet.
pub struct Overlay<'a> {
    base: &'a dyn View,
    changes: BTreeMap<Key, Option<Value>>,
}

impl<'a> Overlay<'a> {
    /// Nothing is changed yet.
    pub fn new(base: &'a dyn View) -> Self {
        Self { base, changes: BTreeMap::new() }
    }

    /// From here on look-ups see what `op` does.
    pub fn absorb(&mut self, op: &Op) {
        self.absorb_from(op, 0);
    }

    /// The same, for what was added to `op` since it had `from` changes ([`Op::change_count`]).
    pub fn absorb_from(&mut self, op: &Op, from: usize) {
        let changes = op.changes().skip(from);
        self.changes.extend(changes.map(|(key, value)| (key, value.map(Value::from))));
    }
}

impl View for Overlay<'_> {
    fn get(&self, key: Key) -> Result<Option<Value>> {
        match self.changes.get(&key) {
            Some(value) => Ok(value.clone()),
            None => self.base.get(key),
        }
    }

    fn get_le(&self, key: Key, floor: Key) -> Result<Option<Item>> {
        if floor > key {
            return Ok(None);
        }
        let mut upper = key;
        let below = loop {
            let found = self.base.get_le(upper, floor)?;
            match found {
                Some((found, _)) if self.changes.contains_key(&found) => {
                    match predecessor(found).filter(|next| *next >= floor) {
                        Some(next) => upper = next,
                        None => break None,
                    }
                }
                other => break other,
            }
        };
        let mut changed = self.changes.range(floor..=key).rev();
        let changed = changed.find_map(|(key, value)| Some((*key, value.clone()?)));
        Ok(match (below, changed) {
            (Some(below), Some(changed)) if changed.0 > below.0 => Some(changed),
            (None, changed) => changed,
            (below, _) => below,
        })
    }

    fn mapping_moment(&self, inode: u64) -> MappingMoment {
        self.base.mapping_moment(inode)
    }

    fn collect(&self, from: Key, to: Key, limit: usize) -> Result<(Vec<Item>, Option<Key>)> {
        if from > to {
            return Ok((Vec::new(), None));
        }
        let (mut items, next) = self.base.collect(from, to, limit)?;
        items.retain(|(key, _)| !self.changes.contains_key(key));
        // The base speaks for the keys before `next`.
        let changed =
            self.changes.range(from..=to).filter(|(key, _)| next.is_none_or(|next| **key < next));
        items.extend(changed.filter_map(|(key, value)| Some((*key, value.clone()?))));
        items.sort_unstable_by_key(|(key, _)| *key);
        Ok((items, next))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::super::mapping_moments::MappingMoments;
    use super::*;
    use proptest::prelude::*;

    impl View for BTreeMap<Key, Value> {
        fn get(&self, key: Key) -> Result<Option<Value>> {
            Ok(Self::get(self, &key).cloned())
        }
        fn get_le(&self, key: Key, floor: Key) -> Result<Option<Item>> {
            if floor > key {
                return Ok(None);
            }
            Ok(self.range(floor..=key).next_back().map(|(key, value)| (*key, value.clone())))
        }
        fn mapping_moment(&self, inode: u64) -> MappingMoment {
            MappingMoments::default().moment(inode)
        }
        fn collect(&self, from: Key, to: Key, limit: usize) -> Result<(Vec<Item>, Option<Key>)> {
            if from > to {
                return Ok((Vec::new(), None));
            }
            let mut range = self.range(from..=to);
            let items = range.by_ref().take(limit).map(|(k, v)| (*k, v.clone())).collect();
            Ok((items, range.next().map(|(key, _)| *key)))
        }
    }

    fn key(number: u64) -> Key {
        Key::extent(number / 8, number % 8)
    }

    proptest! {
        /// An overlay answers as a map to which the changes were made.
        #[test]
        fn an_overlay_answers_as_if_the_changes_were_made(
            base in prop::collection::btree_map(0..40_u64, any::<u8>(), 0..30),
            changes in prop::collection::vec((0..40_u64, any::<Option<u8>>()), 0..30),
            (from, to, limit) in (0..40_u64, 0..40_u64, 1..8_usize),
        ) {
            let value = |byte: u8| Value::from(vec![byte]);
            let mut model: BTreeMap<Key, Value> =
                base.iter().map(|(k, v)| (key(*k), value(*v))).collect();
            let base = model.clone();
            let mut overlay = Overlay::new(&base);
            for (number, change) in changes {
                let mut op = Op::new();
                if let Some(byte) = change {
                    op.put(key(number), &[byte]);
                    model.insert(key(number), value(byte));
                } else {
                    op.delete(key(number));
                    model.remove(&key(number));
                }
                overlay.absorb(&op);
            }
            let (from, to) = (key(from), key(to));
            prop_assert_eq!(overlay.get(from), View::get(&model, from));
            prop_assert_eq!(overlay.get_le(to, from), model.get_le(to, from));
            let mut all = Vec::new();
            let mut next = Some(from);
            while let Some(start) = next {
                let (items, more) = overlay.collect(start, to, limit).unwrap();
                prop_assert!(more.is_none_or(|more| more > start));
                all.extend(items);
                next = more;
            }
            prop_assert_eq!(all, model.collect(from, to, usize::MAX).unwrap().0);
        }
    }
}
