//! What a run leaves behind: a table, JSON, HTML, and the comparison of two runs.

pub mod machine;
pub mod schema;
pub mod table;
