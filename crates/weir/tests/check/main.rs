//! `weir::check`: undamaged volumes are clean, every kind of damage is found, nothing panics.

mod clean;
mod damage;
mod flips;
mod golden;
mod image;
mod sample;
mod seeds;
