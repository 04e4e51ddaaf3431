//! What a run leaves behind: a table, JSON, HTML, and the comparison of two runs.

pub mod check;
pub mod claims_table;
pub mod compare;
pub mod html;
pub mod machine;
pub mod picture;
pub mod schema;
pub mod svg;
pub mod table;
