//! `weir::check`: undamaged volumes are clean, every kind of damage is found, nothing panics.

mod clean;
#[allow(dead_code)]
mod image;
mod sample;
