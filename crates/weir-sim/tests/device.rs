//! The simulated disk does what a disk may do, and what was planned to go wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use weir::device::buffer::AlignedBuf;
use weir::device::{Buffers, Device, IoClass, Operation, Request};
use weir_sim::device::{Completion, DeviceConfig, SimDevice};
use weir_sim::disk::DiskState;
use weir_sim::fault::{Fault, FaultKind, FaultPlan};
use weir_sim::image::Image;

const BLOCK: u64 = 4096;

fn block(fill: u8) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(4096);
    buffer.fill(fill);
    buffer
}

fn device(config: DeviceConfig) -> SimDevice {
    SimDevice::new(Image::zeroed(16), config)
}

fn with_fault(fault: Fault) -> SimDevice {
    device(DeviceConfig { faults: FaultPlan::new([fault]), ..DeviceConfig::default() })
}

fn write(device: &SimDevice, at: u64, fill: u8) -> bool {
    device.write(at * BLOCK, &[&block(fill)], IoClass::Log, false).is_ok()
}

fn read(device: &SimDevice, at: u64) -> Option<u8> {
    let mut buffer = AlignedBuf::zeroed(4096);
    device.read(at * BLOCK, &mut [&mut buffer], IoClass::SyncRead).ok().map(|()| buffer[0])
}

fn durable(device: &SimDevice, at: u64) -> u8 {
    device.disk_state().durable().block(at).bytes()[0]
}

#[test]
fn writes_are_visible_at_once_and_durable_after_a_flush() {
    let device = device(DeviceConfig::default());
    assert!(write(&device, 3, 7));
    assert_eq!((read(&device, 3), durable(&device, 3)), (Some(7), 0));
    device.flush().unwrap();
    assert_eq!(durable(&device, 3), 7);
    let mut disk = DiskState::new(Image::zeroed(16));
    for event in device.take_events() {
        disk.apply(&event);
    }
    assert_eq!(disk.durable(), device.disk_state().durable(), "the events tell the same story");
}

#[test]
fn forced_writes_and_disks_without_a_cache_need_no_flush() {
    let forced = device(DeviceConfig { fua: true, ..DeviceConfig::default() });
    forced.write(0, &[&block(1)], IoClass::Log, true).unwrap();
    forced.write(BLOCK, &[&block(1)], IoClass::Log, false).unwrap();
    assert_eq!((durable(&forced, 0), durable(&forced, 1)), (1, 0));
    let uncached = device(DeviceConfig { volatile_cache: false, ..DeviceConfig::default() });
    assert!(write(&uncached, 0, 1));
    assert_eq!(durable(&uncached, 0), 1);
}

#[test]
fn submitted_writes_complete_when_polled_and_flushes_before_do_not_cover_them() {
    let config = DeviceConfig { completion: Completion::Queued(5), ..DeviceConfig::default() };
    let device = device(config);
    let done = Arc::new(AtomicUsize::new(0));
    for at in 0..3 {
        let request = Request {
            operation: Operation::Write { fua: false },
            offset_bytes: at * BLOCK,
            buffers: Buffers::Owned(block(9)),
            class: IoClass::Writeback,
        };
        let done = Arc::clone(&done);
        device.submit(
            request,
            Box::new(move |result, _| {
                assert!(result.is_ok());
                done.fetch_add(1, Ordering::Relaxed);
            }),
        );
    }
    assert_eq!((device.in_flight(), done.load(Ordering::Relaxed)), (3, 0));
    assert_eq!(read(&device, 0), Some(0), "not completed, not visible");
    device.flush().unwrap();
    assert_eq!(device.disk_state().pending_count(), 3);
    assert!(device.poll() && device.poll() && device.poll() && !device.poll());
    assert_eq!((done.load(Ordering::Relaxed), read(&device, 2)), (3, Some(9)));
    device.flush().unwrap();
    assert_eq!(device.disk_state().pending_count(), 0);
}

#[test]
fn unaligned_and_outside_requests_are_refused() {
    let device = device(DeviceConfig::default());
    let buffer = block(1);
    assert!(device.write(512, &[&buffer], IoClass::Log, false).is_err());
    assert!(device.write(0, &[&buffer[..512]], IoClass::Log, false).is_err());
    assert!(device.write(16 * BLOCK, &[&buffer], IoClass::Log, false).is_err());
}

#[test]
fn planned_errors_strike_and_pass() {
    let device = with_fault(Fault::once(FaultKind::ReadError, 0));
    assert_eq!((read(&device, 0), read(&device, 0)), (None, Some(0)));
    let device = with_fault(Fault::sticky(FaultKind::WriteError, 1));
    assert_eq!([1, 2, 3].map(|at| write(&device, at, 1)), [true, false, false]);
    let device = with_fault(Fault::once(FaultKind::WriteNoSpace, 0));
    let error = device.write(0, &[&block(1)], IoClass::Log, false).unwrap_err();
    assert!(error.no_space);
    assert_eq!(read(&device, 0), Some(0));
    assert_eq!(device.faults_struck(), 1);
}

#[test]
fn lies_are_told_silently() {
    let device = with_fault(Fault::once(FaultKind::MisdirectedWrite { distance_blocks: 2 }, 0));
    assert!(write(&device, 1, 5));
    assert_eq!((read(&device, 1), read(&device, 3)), (Some(0), Some(5)));
    let device = with_fault(Fault::once(FaultKind::StaleRead, 0));
    assert!(write(&device, 1, 5) && write(&device, 1, 6));
    assert_eq!((read(&device, 1), read(&device, 1)), (Some(5), Some(6)));
    let device = with_fault(Fault::once(FaultKind::BitRot { bit: 1 }, 0));
    assert!(write(&device, 1, 8));
    device.flush().unwrap();
    assert_eq!((read(&device, 1), read(&device, 1)), (Some(10), Some(10)));
    let device = with_fault(Fault::once(FaultKind::LostWrite, 0));
    assert!(write(&device, 1, 5));
    assert_eq!(read(&device, 1), Some(0));
}

#[test]
fn a_failed_flush_may_lose_what_it_should_have_covered() {
    let device = with_fault(Fault::once(FaultKind::FlushError, 0));
    for at in 0..12 {
        assert!(write(&device, at, 1));
    }
    assert!(device.flush().is_err());
    let kept = (0..12).filter(|at| read(&device, *at) == Some(1)).count();
    let settled = (0..12).filter(|at| durable(&device, *at) == 1).count();
    assert!(settled > 0 && settled < kept && kept < 12, "{settled} durable, {kept} visible of 12");
}

#[test]
fn a_disk_that_stays_up_keeps_its_cache() {
    let first = device(DeviceConfig::default());
    assert!(write(&first, 1, 5));
    let second = SimDevice::with_disk(first.disk_state(), DeviceConfig::default());
    assert_eq!((read(&second, 1), durable(&second, 1)), (Some(5), 0));
    second.flush().unwrap();
    assert_eq!(durable(&second, 1), 5);
}
