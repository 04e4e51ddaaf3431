//! The namespace by path, for programs that link the engine: `/`-separated, from the root.
//!
//! A look-up holds no lock of what it has found. What a rename or a batch replaces meanwhile may be gone when its inode is asked for;
//! then its name has another inode, and is looked up again ([`on_named`]). So **invariant:** a name that has something at all
//! times is never found to have nothing.

use super::check_name;
use super::entry::{FreePlace, Lookup};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::item::name_hash;
use crate::format::{Key, Kind, MAX_SYMLINK_BYTES};
use crate::txn::names::Named;
use crate::types::FileType;
use std::borrow::Cow;

/// Symbolic links followed before a path is given up on, as in Linux.
const MAX_SYMLINKS: usize = 40;

/// What a path leads to.
#[derive(Debug)]
pub enum Located<'p> {
    /// This inode.
    Present(u64),
    /// Nothing, but a directory in which the last component could be made; of the path, or of where a symbolic link at its end
    /// leads.
    Absent {
        /// The directory.
        dir: u64,
        /// The last component.
        name: Cow<'p, [u8]>,
        /// The entry's place there.
        place: FreePlace,
    },
    /// Nothing, and a slash at the end: only a directory could be made.
    AbsentDirectory,
}

impl Engine {
    /// The inode that `path` names. `follow_last`: a symbolic link at the end is followed.
    pub fn resolve(&self, path: &[u8], follow_last: bool) -> Result<u64> {
        if path.is_empty() {
            return Err(Error::NotFound);
        }
        Ok(self.walk(crate::Volume::ROOT, path, follow_last, &mut 0)?.0)
    }

    /// What `path` names, or where it could be made: one look-up of each component.
    pub fn locate<'p>(&self, path: &'p [u8], follow_last: bool) -> Result<Located<'p>> {
        self.locate_from(crate::Volume::ROOT, path, follow_last, &mut 0)
    }

    fn locate_from<'p>(
        &self,
        start: u64,
        path: &'p [u8],
        follow_last: bool,
        links: &mut usize,
    ) -> Result<Located<'p>> {
        if path.is_empty() {
            return Err(Error::NotFound);
        }
        if path.len() > MAX_SYMLINK_BYTES {
            return Err(Error::NameTooLong);
        }
        let (dir, name) = match self.split_parent(start, path, links) {
            Ok(split) => split,
            // The root, `.`, `..`, or nothing.
            Err(no_name) => match self.walk(start, path, follow_last, links) {
                Err(Error::NotFound) => return Err(no_name),
                other => return Ok(Located::Present(other?.0)),
            },
        };
        let must_be_directory = path.last() == Some(&b'/');
        let (named, target) = match self.step(dir, name, follow_last)? {
            Step::Absent(_) if must_be_directory => return Ok(Located::AbsentDirectory),
            Step::Absent(place) => {
                return Ok(Located::Absent { dir, name: Cow::Borrowed(name), place });
            }
            Step::Present(named, target) => (named, target),
        };
        if must_be_directory && named.file_type != FileType::Directory {
            return Ok(Located::Present(self.walk(start, path, follow_last, links)?.0));
        }
        let Some(target) = target else { return Ok(Located::Present(named.inode)) };
        // What does not exist may be made where the link leads.
        count_link(links)?;
        Ok(match self.locate_from(dir, &target, true, links)? {
            Located::Present(number) => Located::Present(number),
            Located::Absent { dir, name, place } => {
                Located::Absent { dir, name: Cow::Owned(name.into_owned()), place }
            }
            Located::AbsentDirectory => Located::AbsentDirectory,
        })
    }

    /// The directory that the last component of `path` is in, and that component.
    pub fn resolve_parent(&self, path: &[u8]) -> Result<(u64, Vec<u8>)> {
        let (dir, name) = self.split_parent(crate::Volume::ROOT, path, &mut 0)?;
        Ok((dir, name.to_vec()))
    }

    fn split_parent<'p>(
        &self,
        start: u64,
        path: &'p [u8],
        links: &mut usize,
    ) -> Result<(u64, &'p [u8])> {
        let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
        let path = &path[..end];
        let name_at = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let (parent, name) = path.split_at(name_at);
        check_name(name)?;
        match self.walk(start, parent, true, links)? {
            (dir, FileType::Directory) => Ok((dir, name)),
            _ => Err(Error::NotDirectory),
        }
    }

    /// What `path` names, from the directory `start` on, and what that is.
    fn walk(
        &self,
        start: u64,
        path: &[u8],
        follow: bool,
        links: &mut usize,
    ) -> Result<(u64, FileType)> {
        if path.len() > MAX_SYMLINK_BYTES {
            return Err(Error::NameTooLong);
        }
        let start = if path.first() == Some(&b'/') { crate::Volume::ROOT } else { start };
        let mut at = (start, FileType::Directory);
        let mut parts = path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()).peekable();
        let must_be_directory = path.last() == Some(&b'/');
        while let Some(part) = parts.next() {
            let (dir, FileType::Directory) = at else { return Err(Error::NotDirectory) };
            let follows = parts.peek().is_some() || follow || must_be_directory;
            at = match part {
                b"." => at,
                b".." => (self.directory(dir)?.meta.lock().item.parent, FileType::Directory),
                name if name.len() > crate::format::MAX_NAME_BYTES => {
                    return Err(Error::NameTooLong);
                }
                name => match self.step(dir, name, follows)? {
                    Step::Absent(_) => return Err(Error::NotFound),
                    Step::Present(named, None) => (named.inode, named.file_type),
                    Step::Present(_, Some(target)) => {
                        count_link(links)?;
                        self.walk(dir, &target, true, links)?
                    }
                },
            };
        }
        if must_be_directory && at.1 != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        Ok(at)
    }

    /// Looks `name` up in `dir` as part of a path, and reads the symbolic link that it may be, if `follows` says so.
    fn step(&self, dir: u64, name: &[u8], follows: bool) -> Result<Step> {
        let mut absent = None;
        let find = || match self.look_up(dir, name)? {
            LookedUp::Present(named) => Ok(named),
            LookedUp::Absent(place) => {
                absent = Some(place);
                Err(Error::NotFound)
            }
        };
        let found = on_named(find, |named| {
            let leads_on = follows && named.file_type == FileType::Symlink;
            let target = leads_on.then(|| self.readlink(named.inode)).transpose()?;
            Ok(Step::Present(*named, target))
        });
        match (found, absent) {
            (Err(Error::NotFound), Some(place)) => Ok(Step::Absent(place)),
            (found, _) => found,
        }
    }

    /// Looks `name` up in `dir` as part of a path. Remembers what is there.
    fn look_up(&self, dir: u64, name: &[u8]) -> Result<LookedUp> {
        let names = &self.store.names;
        let moment = names.moment(&bucket_key(dir, name));
        if let Some(named) = names.get(moment, (dir, name)) {
            return Ok(LookedUp::Present(named));
        }
        Ok(match self.find_entry(dir, name)? {
            Lookup::Absent(key) => LookedUp::Absent(FreePlace { key, moment }),
            Lookup::Present(found) => {
                let named = found.named();
                names.remember(moment, (dir, name), named);
                LookedUp::Present(named)
            }
        })
    }
}

/// One more symbolic link is followed.
fn count_link(links: &mut usize) -> Result<()> {
    *links += 1;
    if *links > MAX_SYMLINKS { Err(Error::TooManySymlinks) } else { Ok(()) }
}

/// Has `act` done with what `find` finds under a name. If that is gone meanwhile because something else has taken its name, it is
/// looked up again.
///
/// # Errors
/// Those of `find` and `act`; [`Error::NotFound`] of `act` if the name still has what it was done with.
pub fn on_named<N: PartialEq, R>(
    mut find: impl FnMut() -> Result<N>,
    mut act: impl FnMut(&N) -> Result<R>,
) -> Result<R> {
    let mut named = find()?;
    loop {
        match act(&named) {
            Err(Error::NotFound) => {
                let now = find()?;
                if now == named {
                    return Err(Error::NotFound);
                }
                named = now;
            }
            done => return done,
        }
    }
}

/// What a component of a path is.
enum Step {
    /// This, and where it leads if it is a symbolic link that is followed.
    Present(Named, Option<Vec<u8>>),
    Absent(FreePlace),
}

/// What a path leads to from a directory.
enum LookedUp {
    Present(Named),
    Absent(FreePlace),
}

/// A key of the bucket that the entry `name` of `dir` is in, if it exists.
fn bucket_key(dir: u64, name: &[u8]) -> Key {
    Key::new(dir, Kind::Dirent, name_hash(name))
}
