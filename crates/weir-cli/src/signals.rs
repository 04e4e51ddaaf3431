//! Signals that end a command in its own way.

use std::fs;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::{Failure, Outcome};

/// Hears those that ask for the end of this process. A hangup is not among them where whoever started it had it ignored (`nohup`): that
/// would be heard again by being listened for.
pub fn ending() -> Outcome<Signals> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let heard = [SIGINT, SIGTERM, SIGHUP].into_iter();
    let heard = heard.filter(|&signal| signal != SIGHUP || !is_ignored(&status, signal));
    Signals::new(heard).map_err(|error| Failure::new("signals", error))
}

/// Whether a process with this `/proc/PID/status` ignores `signal`.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_ignores_is_a_mask_of_its_status() {
        let status = "Name:\tweir\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, SIGHUP));
        assert!(!is_ignored(status, SIGINT) && !is_ignored(status, SIGTERM));
        assert!(!is_ignored("", SIGHUP));
    }
}
