//! Keeps idle processors from sleeping during a run, for every target alike.
//!
//! A processor that sleeps has to be woken before it can serve an interrupt. On a virtual machine that takes up to 30 µs, twice or
//! three times in each sync, and differs from hour to hour: the run then measures the machine. This asks the kernel for processors
//! that answer at once, as the latency profiles of `tuned` do, through its interface for that (`/dev/cpu_dma_latency`, "PM
//! QoS"): the request stands for as long as the file is open, and ends with the process whatever becomes of it.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

use crate::error::{IoContext, LabError, LabResult};

const REQUESTS: &str = "/dev/cpu_dma_latency";
/// Longest time to wake up, in µs, as a 32-bit integer: none.
const AT_ONCE: i32 = 0;

/// No processor sleeps for as long as this lives.
#[derive(Debug)]
pub struct Awake {
    _request: File,
}

impl Awake {
    /// Asks for it. Needs root.
    pub fn begin() -> LabResult<Self> {
        Self::begin_at(Path::new(REQUESTS))
    }

    fn begin_at(path: &Path) -> LabResult<Self> {
        let opened = File::options().write(true).open(path);
        let mut request = match opened {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(LabError::BadOption(
                    "--awake needs root: run as root, or without it".into(),
                ));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(LabError::BadOption(format!(
                    "--awake needs {}, which this kernel does not have: run without it",
                    path.display()
                )));
            }
            opened => opened.during(|| format!("opening {}", path.display()))?,
        };
        request
            .write_all(&AT_ONCE.to_ne_bytes())
            .during(|| format!("writing {}", path.display()))?;
        Ok(Self { _request: request })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_four_bytes_of_zero_and_a_kernel_without_the_file_is_told_apart() {
        let path = std::env::temp_dir().join(format!("weir-awake-{}", std::process::id()));
        let missing = Awake::begin_at(&path).unwrap_err().to_string();
        assert!(missing.contains("run without it"), "{missing}");
        std::fs::write(&path, "").unwrap();
        let awake = Awake::begin_at(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), [0; 4]);
        drop(awake);
        std::fs::remove_file(&path).unwrap();
    }
}
