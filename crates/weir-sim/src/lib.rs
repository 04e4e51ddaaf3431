//! weir-sim
