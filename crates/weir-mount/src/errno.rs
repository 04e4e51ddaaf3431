//! POSIX error numbers, the only error a transport can carry to a program.

/// A POSIX error number (Linux values, always positive).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

impl Errno {
    /// No such file or directory.
    pub const ENOENT: Self = Self(libc::ENOENT);
    /// Input/output error: also the answer to a request whose handler panicked.
    pub const EIO: Self = Self(libc::EIO);
    /// The call would have to wait.
    pub const EAGAIN: Self = Self(libc::EAGAIN);
    /// It exists already.
    pub const EEXIST: Self = Self(libc::EEXIST);
    /// Invalid argument.
    pub const EINVAL: Self = Self(libc::EINVAL);
    /// The handle is not one of ours.
    pub const EBADF: Self = Self(libc::EBADF);
    /// Operation not permitted.
    pub const EPERM: Self = Self(libc::EPERM);
    /// The command is not one of ours.
    pub const ENOTTY: Self = Self(libc::ENOTTY);
    /// A directory cannot be used for this.
    pub const EISDIR: Self = Self(libc::EISDIR);
    /// No memory, or no thread, for it.
    pub const ENOMEM: Self = Self(libc::ENOMEM);
    /// It did not happen in time.
    pub const ETIMEDOUT: Self = Self(libc::ETIMEDOUT);
    /// What was referred to is gone.
    pub const ESTALE: Self = Self(libc::ESTALE);
    /// Not offered at all; kernels stop asking.
    pub const ENOSYS: Self = Self(libc::ENOSYS);
    /// Not offered for this object or with these flags.
    pub const EOPNOTSUPP: Self = Self(libc::EOPNOTSUPP);
    /// The result does not fit into the caller's buffer.
    pub const ERANGE: Self = Self(libc::ERANGE);
    /// No such attribute.
    pub const ENODATA: Self = Self(libc::ENODATA);
    /// No such device or address: `lseek` beyond the last data.
    pub const ENXIO: Self = Self(libc::ENXIO);

    /// The error with this number; 0 and negative numbers become [`Errno::EIO`].
    pub const fn from_raw(number: i32) -> Self {
        if number > 0 { Self(number) } else { Self::EIO }
    }
    /// The number.
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl From<weir::Error> for Errno {
    fn from(error: weir::Error) -> Self {
        Self::from_raw(error.errno())
    }
}
impl From<&weir::Error> for Errno {
    fn from(error: &weir::Error) -> Self {
        Self::from_raw(error.errno())
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_error_reaches_the_program_as_its_own_number() {
        assert_eq!(Errno::from(weir::Error::NoSpace).raw(), libc::ENOSPC);
        assert_eq!(Errno::from(weir::Error::NotEmpty).raw(), libc::ENOTEMPTY);
        assert_eq!(Errno::from(weir::Error::Corrupt(String::new())), Errno::EIO);
    }

    #[test]
    fn a_number_that_is_no_error_becomes_eio() {
        assert_eq!(Errno::from_raw(0), Errno::EIO);
        assert_eq!(Errno::from_raw(-2), Errno::EIO);
    }
}
