//! The page cache's building blocks.

pub mod map;
pub mod page;
