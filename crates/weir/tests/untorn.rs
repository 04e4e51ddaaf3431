//! Untorn writes: an aligned write within a unit is old or new after a crash at any device write, never a mixture.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::Mutex;
use weir::device::memory::MemoryDevice;
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request};
use weir::*;

const VOLUME_BYTES: u64 = 16 * MIB;
const PAGES: u64 = 700;
const PAGE: usize = 4096;

/// Notes every write, to be repeated up to any of them.
struct Recorder {
    inner: MemoryDevice,
    writes: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Device for Recorder {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.writes.lock().expect("lock").push((offset, buffers.concat()));
        self.inner.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        // In manual mode: a frame, and the data beside it.
        if matches!(request.operation, Operation::Write { .. }) {
            let bytes = request.buffers.slices().concat();
            self.writes.lock().expect("lock").push((request.offset_bytes, bytes));
        }
        self.inner.submit(request, on_done);
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }
}

/// A page that tells which write it is of.
fn stamped(id: u64, page: u64) -> Vec<u8> {
    let mut bytes = vec![id as u8; PAGE];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    bytes[8..16].copy_from_slice(&page.to_le_bytes());
    bytes
}

/// What the file was made to hold, write by write.
#[derive(Default)]
struct History {
    /// Pages of every write; its place is its number.
    writes: Vec<std::ops::Range<u64>>,
    /// After this many device writes, all of the writes before this one were acknowledged.
    acknowledged: Vec<(usize, usize)>,
}

fn check(image: &[u8], history: &History, device_writes: usize) {
    let device = MemoryDevice::new(VOLUME_BYTES);
    for (number, block) in image.chunks(1 << 20).enumerate() {
        if block.iter().any(|&byte| byte != 0) {
            write_all(&device, (number as u64) << 20, block);
        }
    }
    let device: Arc<dyn Device> = Arc::new(device);
    let volume = open(&device, VolumeOptions { read_only: true, ..manual(8 * MIB) });
    let bytes = contents(&volume.open_file("/f", OpenFlags::READ).expect("open"));
    let found: Vec<u64> = bytes
        .chunks(PAGE)
        .enumerate()
        .map(|(page, bytes)| {
            let id = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            assert_eq!(bytes, stamped(id, page as u64), "page {page} itself");
            id
        })
        .collect();
    for (id, pages) in history.writes.iter().enumerate() {
        let ids = &found[pages.start as usize..pages.end as usize];
        let is_new = ids.contains(&(id as u64));
        let is_old = ids.iter().any(|&found| found < id as u64);
        assert!(!(is_new && is_old), "write {id} of {pages:?} is torn: {ids:?}");
    }
    for &(after, writes) in &history.acknowledged {
        if after <= device_writes {
            for (id, pages) in history.writes[..writes].iter().enumerate() {
                let ids = &found[pages.start as usize..pages.end as usize];
                assert!(ids.iter().all(|&found| found >= id as u64), "write {id} is lost");
            }
        }
    }
}

/// Aligned copies for the device.
fn write_all(device: &dyn Device, offset: u64, bytes: &[u8]) {
    let mut aligned = weir::device::buffer::AlignedBuf::zeroed(bytes.len());
    aligned.copy_from_slice(bytes);
    device.write(offset, &[&aligned], IoClass::Log, false).expect("write");
}

fn crash_everywhere(seed: u64, log_blocks: u64, steps: usize) {
    let recorder = Arc::new(Recorder {
        inner: MemoryDevice::new(VOLUME_BYTES),
        writes: Mutex::new(Vec::new()),
    });
    let device: Arc<dyn Device> = recorder.clone();
    format(&device, log_blocks);
    let volume = open(&device, manual(8 * MIB));
    let untorn_pages = u64::from(volume.capabilities().untorn_write_bytes) / PAGE as u64;
    assert_eq!(untorn_pages, 32);
    let file = create(&volume, "/f");
    let mut history = History::default();
    history.writes.push(0..0);
    for page in 0..PAGES {
        file.write_at(page * PAGE as u64, &stamped(0, page)).expect("write");
    }
    volume.sync().expect("sync");
    let first_write = recorder.writes.lock().expect("lock").len();
    let mut random = Random(seed * 2 + 1);
    for _ in 0..steps {
        match random.below(12) {
            0..7 => {
                let length = 1 << random.below(6);
                let first = random.below(PAGES / length) * length;
                write_pages(&file, &mut history, first..first + length);
            }
            7 => {
                // A long run that does not begin where a unit does: many writes side by side.
                let mut at = random.below(200);
                for _ in 0..12 {
                    let unit_end = (at / untorn_pages + 1) * untorn_pages;
                    write_pages(&file, &mut history, at..unit_end);
                    at = unit_end;
                }
            }
            8 | 9 => {
                file.fsync().expect("fsync");
                let device_writes = recorder.writes.lock().expect("lock").len();
                history.acknowledged.push((device_writes, history.writes.len()));
            }
            10 => {
                volume.background_step(BackgroundWork::Writeback).expect("writeback");
            }
            _ => {
                for _ in 0..random.below(8) {
                    volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint");
                }
            }
        }
    }
    let writes = std::mem::take(&mut *recorder.writes.lock().expect("lock"));
    assert!(writes.len() - first_write > steps / 8, "the workload writes");
    let mut image = vec![0; VOLUME_BYTES as usize];
    for (number, (offset, bytes)) in writes.iter().enumerate() {
        image[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
        if number + 1 >= first_write {
            check(&image, &history, number + 1);
        }
    }
}

fn write_pages(file: &File, history: &mut History, pages: std::ops::Range<u64>) {
    let id = history.writes.len() as u64;
    let bytes: Vec<u8> = pages.clone().flat_map(|page| stamped(id, page)).collect();
    file.write_at(pages.start * PAGE as u64, &bytes).expect("write");
    history.writes.push(pages);
}

#[test]
fn an_aligned_write_is_old_or_new_after_every_crash() {
    for seed in 0..6 {
        crash_everywhere(seed, 512, 60);
    }
}

#[test]
fn with_a_log_that_cannot_carry_a_whole_write_it_is_old_or_new_too() {
    for seed in 10..14 {
        crash_everywhere(seed, 64, 60);
    }
}

#[test]
fn capabilities_shrink_with_the_memory() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(256 * KIB));
    let capabilities = volume.capabilities();
    assert!(capabilities.untorn_write_bytes.is_power_of_two());
    assert!(capabilities.untorn_write_bytes < 128 << 10);
    assert_eq!(capabilities.untorn_boundary_bytes, capabilities.untorn_write_bytes);
    assert_eq!(capabilities.untorn_alignment_bytes, 4096);
    drop(volume);
    let volume = open(&device, manual(64 * MIB));
    assert_eq!(volume.capabilities().untorn_write_bytes, 128 << 10);
    assert_eq!(volume.capabilities().max_log_payload_bytes, 128 << 10);
}
