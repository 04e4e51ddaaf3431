//! One module per command.

pub mod barrier;
pub mod cat;
pub mod cp;
pub mod create;
pub mod dump;
pub mod fsck;
pub mod info;
pub mod ls;
pub mod mkdir;
pub mod mount;
pub mod rm;
pub mod stat;
pub mod stats;
pub mod sync;
pub mod umount;
