//! The measuring kernel: latencies, spreads, device truth, disturbance, reproducible randomness.

pub mod device;
pub mod hist;
pub mod rng;
pub mod standstill;
pub mod stats;
pub mod warm;

pub use device::{BlockDevice, DeviceCounters, Disturbance, DisturbanceWatch};
pub use hist::{PERCENTILES, Recorder, SERIES_STEP, SeriesPoint};
pub use rng::{Rng, Zipf};
pub use standstill::StandstillWatch;
pub use stats::{OfRound, Spread};
pub use warm::WarmMemory;
