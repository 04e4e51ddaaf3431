//! weir-mount
