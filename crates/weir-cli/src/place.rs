//! `VOL:/path`: a place inside a volume, as a command line names it.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};

/// A path inside a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The image file or device.
    pub volume: PathBuf,
    /// Absolute, without a trailing slash but for the root.
    pub path: Vec<u8>,
    /// A slash at its end said that it is a directory.
    pub must_be_directory: bool,
}

impl Place {
    /// Splits at the first `:/`; `VOL:` alone is the root. `None`: names no volume.
    pub fn parse(text: &OsStr) -> Option<Self> {
        let bytes = text.as_bytes();
        let at = bytes.windows(2).position(|pair| pair == b":/");
        let (volume, path) = match at {
            Some(at) => (&bytes[..at], &bytes[at + 1..]),
            None => (bytes.strip_suffix(b":")?, b"/".as_slice()),
        };
        if volume.is_empty() {
            return None;
        }
        let mut path = path.to_vec();
        let must_be_directory = path.ends_with(b"/");
        while path.len() > 1 && path.ends_with(b"/") {
            path.pop();
        }
        let volume = PathBuf::from(OsStr::from_bytes(volume));
        Some(Self { volume, path, must_be_directory })
    }

    /// As it was named: with a slash at its end where there was one, which the volume understands as the kernel does.
    pub fn named_path(&self) -> Vec<u8> {
        let mut path = self.path.clone();
        if self.must_be_directory && !path.ends_with(b"/") {
            path.push(b'/');
        }
        path
    }

    /// The place called `name` below this one.
    #[must_use]
    pub fn join(&self, name: &[u8]) -> Self {
        let mut path = self.path.clone();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self { volume: self.volume.clone(), path, must_be_directory: false }
    }

    /// The last component; `None` for the root and for `.`.
    pub fn name(&self) -> Option<&[u8]> {
        let name = self.path.rsplit(|&byte| byte == b'/').next()?;
        (!name.is_empty() && name != b"." && name != b"..").then_some(name)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.volume.display(), OsStr::from_bytes(&self.path).display())
    }
}

/// For clap: an argument that must be a place in a volume. Names are bytes, text or not.
pub fn place_parser() -> impl TypedValueParser<Value = Place> {
    OsStringValueParser::new().try_map(|text| {
        Place::parse(&text)
            .ok_or("names no place in a volume: write VOLUME:/path, such as disk.weir:/etc")
    })
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Side {
    /// In a volume.
    Volume(Place),
    /// On the host.
    Host(PathBuf),
}

impl Side {
    /// A host file of that very name wins, so that any file of the host can be named.
    pub fn parse(text: &OsStr) -> Self {
        if Path::new(text).symlink_metadata().is_ok() {
            return Self::Host(PathBuf::from(text));
        }
        Place::parse(text).map_or_else(|| Self::Host(PathBuf::from(text)), Self::Volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, String)> {
        Place::parse(OsStr::new(text)).map(|place| {
            (place.volume.display().to_string(), String::from_utf8(place.path).unwrap())
        })
    }

    #[test]
    fn the_first_colon_slash_ends_the_volume() {
        let two = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(parsed("v.weir:/a/b"), two("v.weir", "/a/b"));
        assert_eq!(parsed("/dev/sda:/"), two("/dev/sda", "/"));
        assert_eq!(parsed("v:"), two("v", "/"));
        assert_eq!(parsed("v:/a:/b/"), two("v", "/a:/b"));
        assert_eq!(parsed("plain"), None);
        assert_eq!(parsed(":/x"), None);
    }

    #[test]
    fn names_are_the_last_component() {
        let place = Place::parse(OsStr::new("v:/")).unwrap();
        assert_eq!(place.name(), None);
        assert_eq!(place.join(b"a").join(b"b").path, b"/a/b");
        assert_eq!(place.join(b"a").join(b"b").name(), Some(b"b".as_slice()));
        assert_eq!(place.join(b".").name(), None);
    }
}
