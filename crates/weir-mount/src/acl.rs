//! POSIX access control lists: pure arithmetic on the extended-attribute form.
//!
//! With `FUSE_POSIX_ACL` the kernel enforces lists, and leaves to the server what a disk file system
//! does inside the kernel: a new inode inherits its directory's default list, a list that is set
//! shows in the permission bits, and `chmod` changes the list. The rules are those of POSIX.1e
//! draft 17 as Linux implements them.

/// Name of the attribute with the list that governs access.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute with the list that new entries of a directory inherit.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// One entry of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// A well-formed list: exactly one owner, group and other entry, and a mask if there are named ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

impl Acl {
    /// Parses the extended-attribute form; `None` when it is not well-formed.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (version, mut rest) = value.split_first_chunk::<4>()?;
        if u32::from_le_bytes(*version) != VERSION {
            return None;
        }
        let mut entries = Vec::with_capacity(rest.len() / 8);
        while let Some((raw, tail)) = rest.split_first_chunk::<8>() {
            let [t0, t1, p0, p1, i0, i1, i2, i3] = *raw;
            entries.push(Entry {
                tag: u16::from_le_bytes([t0, t1]),
                permissions: u16::from_le_bytes([p0, p1]),
                id: u32::from_le_bytes([i0, i1, i2, i3]),
            });
            rest = tail;
        }
        let acl = Self(entries);
        (rest.is_empty() && acl.is_well_formed()).then_some(acl)
    }

    fn is_well_formed(&self) -> bool {
        let count = |tag| self.0.iter().filter(|entry| entry.tag == tag).count();
        let known = USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER;
        let named = count(USER) + count(GROUP);
        self.0.iter().all(|e| e.tag.is_power_of_two() && e.tag & known != 0 && e.permissions <= 7)
            && [USER_OBJ, GROUP_OBJ, OTHER].into_iter().all(|tag| count(tag) == 1)
            && (count(MASK) == 1 || (count(MASK) == 0 && named == 0))
    }

    /// The extended-attribute form.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            value.extend_from_slice(&entry.tag.to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    fn permissions_of(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|entry| entry.tag == tag).map(|entry| entry.permissions.into())
    }

    fn entry_mut(&mut self, tag: u16) -> Option<&mut Entry> {
        self.0.iter_mut().find(|entry| entry.tag == tag)
    }

    /// The nine permission bits this list shows as: the mask stands for the group if there is one.
    pub fn mode_bits(&self) -> u32 {
        let group = self.permissions_of(MASK).or_else(|| self.permissions_of(GROUP_OBJ));
        self.permissions_of(USER_OBJ).unwrap_or(0) << 6
            | group.unwrap_or(0) << 3
            | self.permissions_of(OTHER).unwrap_or(0)
    }

    /// The permission bits of an inode that is to have this list and does not yet: whoever asks then gets no more than from the list. (The
    /// bits that show the list give the group what the mask allows to somebody.)
    pub fn mode_bits_without(&self) -> u32 {
        let mask = self.permissions_of(MASK).unwrap_or(7);
        let all_of = |tags: &[u16]| {
            let named = self.0.iter().filter(|entry| tags.contains(&entry.tag));
            named.fold(7, |bits, entry| bits & u32::from(entry.permissions) & mask)
        };
        let group = self.permissions_of(GROUP_OBJ).unwrap_or(0) & mask & all_of(&[USER]);
        let other = self.permissions_of(OTHER).unwrap_or(0) & all_of(&[USER, GROUP]);
        self.permissions_of(USER_OBJ).unwrap_or(0) << 6 | group << 3 | other
    }

    /// Whether the permission bits say all that the list says.
    pub fn is_only_mode_bits(&self) -> bool {
        self.0.len() == 3
    }

    /// `chmod`: the list follows the bits.
    pub fn set_mode_bits(&mut self, mode: u32) {
        let group_tag = if self.permissions_of(MASK).is_some() { MASK } else { GROUP_OBJ };
        for (tag, shift) in [(USER_OBJ, 6), (group_tag, 3), (OTHER, 0)] {
            if let Some(entry) = self.entry_mut(tag) {
                entry.permissions = (mode >> shift & 7) as u16;
            }
        }
    }

    /// What a new inode asked for with `mode` gets from this default list: its permission bits
    /// (other bits of `mode` unchanged), and its access list if the bits do not say it all.
    pub fn inherit(&self, mode: u32) -> (u32, Option<Self>) {
        let mut access = self.clone();
        access.set_mode_bits(self.mode_bits() & mode);
        let mode = mode & !0o777 | access.mode_bits();
        let list = (!access.is_only_mode_bits()).then_some(access);
        (mode, list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries.iter().map(|&(tag, permissions, id)| Entry { tag, permissions, id }).collect())
    }
    const ANYONE: u32 = u32::MAX;

    fn with_named_user() -> Acl {
        acl(&[
            (USER_OBJ, 7, ANYONE),
            (USER, 6, 1000),
            (GROUP_OBJ, 5, ANYONE),
            (MASK, 7, ANYONE),
            (OTHER, 1, ANYONE),
        ])
    }

    #[test]
    fn encoding_and_parsing_are_inverse() {
        let list = with_named_user();
        assert_eq!(Acl::parse(&list.encode()), Some(list));
    }

    #[test]
    fn malformed_lists_are_refused() {
        let good = with_named_user().encode();
        assert!(Acl::parse(&good[..good.len() - 1]).is_none(), "cut entry");
        assert!(Acl::parse(&good[..4]).is_none(), "no entries");
        assert!(Acl::parse(&[]).is_none());
        let mut version = good.clone();
        version[0] = 3;
        assert!(Acl::parse(&version).is_none());
        let mut unknown_tag = good.clone();
        unknown_tag[4] = 0x40;
        assert!(Acl::parse(&unknown_tag).is_none());
        let no_mask = acl(&[
            (USER_OBJ, 7, ANYONE),
            (USER, 6, 1000),
            (GROUP_OBJ, 5, ANYONE),
            (OTHER, 1, ANYONE),
        ]);
        assert!(Acl::parse(&no_mask.encode()).is_none());
    }

    #[test]
    fn the_mask_shows_as_the_group_bits() {
        assert_eq!(with_named_user().mode_bits(), 0o771);
    }

    #[test]
    fn without_the_list_nobody_gets_what_it_does_not_give_to_him() {
        // The group has less than the mask, and both named ones have less than all others.
        let list = acl(&[
            (USER_OBJ, 6, ANYONE),
            (USER, 2, 1000),
            (GROUP_OBJ, 4, ANYONE),
            (GROUP, 6, 2000),
            (MASK, 6, ANYONE),
            (OTHER, 5, ANYONE),
        ]);
        assert_eq!(list.mode_bits(), 0o665);
        // In the group, user 1000 would get what he is not to read; and as one of the others.
        assert_eq!(list.mode_bits_without(), 0o600);
        let plain = acl(&[(USER_OBJ, 7, ANYONE), (GROUP_OBJ, 5, ANYONE), (OTHER, 1, ANYONE)]);
        assert_eq!(plain.mode_bits_without(), plain.mode_bits());
    }

    #[test]
    fn chmod_changes_the_mask_and_not_the_group_entry() {
        let mut list = with_named_user();
        list.set_mode_bits(0o640);
        assert_eq!(list.mode_bits(), 0o640);
        assert_eq!(list.permissions_of(GROUP_OBJ), Some(5));
        assert_eq!(list.permissions_of(MASK), Some(4));
    }

    #[test]
    fn inheriting_never_grants_what_the_creator_did_not_ask_for() {
        for mode in 0..=0o777 {
            let (bits, list) = with_named_user().inherit(0o2000 | mode);
            assert_eq!(bits & !0o777, 0o2000);
            assert_eq!(bits & 0o777 & !mode, 0);
            assert_eq!(list.map(|list| list.mode_bits()), Some(bits & 0o777));
        }
    }

    #[test]
    fn a_list_that_the_bits_express_is_not_stored() {
        let plain = acl(&[(USER_OBJ, 7, ANYONE), (GROUP_OBJ, 5, ANYONE), (OTHER, 0, ANYONE)]);
        assert_eq!(plain.inherit(0o666), (0o640, None));
    }
}
