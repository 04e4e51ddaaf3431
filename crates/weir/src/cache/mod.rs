//! The page cache's building blocks.

pub mod page;
