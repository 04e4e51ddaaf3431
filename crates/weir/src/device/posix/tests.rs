use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::device::request::Outcome;
use crate::device::{Buffers, Operation};

/// A path of its own in the temporary directory, removed at the end.
struct TempPath(PathBuf);

impl TempPath {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weir-posix-test-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn pattern(len: usize, seed: u32) -> AlignedBuf {
    let bytes: Vec<u8> =
        (0..len as u32).map(|i| ((i ^ seed).wrapping_mul(97) >> 5) as u8).collect();
    AlignedBuf::from_slice(&bytes)
}

fn read_back(device: &PosixDevice, offset: u64, len: usize) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(len);
    device.read(offset, &mut [&mut buffer], IoClass::SyncRead).unwrap();
    buffer
}

#[test]
fn content_survives_reopening() {
    let path = TempPath::new();
    let written = pattern(8192, 1);
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap();
    assert_eq!(device.info().size_bytes, 1 << 20);
    device.write(4096, &[&written], IoClass::Log, true).unwrap();
    let counters = device.stats().counters();
    assert_eq!((counters.writes, counters.write_bytes, counters.flushes), (1, 8192, 1));
    drop(device);
    let device = PosixDevice::open(&path.0, OpenMode::ReadOnly).unwrap();
    assert_eq!(read_back(&device, 4096, 8192), written);
    assert_eq!(read_back(&device, 12288, 4096), AlignedBuf::zeroed(4096));
    assert!(device.write(0, &[&written], IoClass::Log, false).is_err());
}

#[test]
fn more_segments_than_one_system_call_takes_keep_their_order() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 16 << 20).unwrap();
    let written = pattern(2500 * 4096, 2);
    let mut slices: Vec<&[u8]> = written.chunks(4096).collect();
    slices.insert(1000, &[]);
    device.write(4096, &slices, IoClass::Writeback, false).unwrap();
    let mut target = AlignedBuf::zeroed(written.len());
    let mut slices: Vec<&mut [u8]> = target.chunks_mut(4096).collect();
    device.read(4096, &mut slices, IoClass::SyncRead).unwrap();
    assert!(target == written);
}

#[test]
fn a_second_opening_is_refused_and_names_the_holder() {
    let path = TempPath::new();
    let writer = PosixDevice::create(&path.0, 1 << 20).unwrap();
    for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
        let Err(Error::InUse(holder)) = PosixDevice::open(&path.0, mode) else {
            panic!("{mode:?} was not refused");
        };
        assert!(holder.contains(&std::process::id().to_string()), "{holder}");
    }
    drop(writer);
    let reader = PosixDevice::open(&path.0, OpenMode::ReadOnly).unwrap();
    let second = PosixDevice::open(&path.0, OpenMode::ReadOnly).unwrap();
    assert!(matches!(PosixDevice::open(&path.0, OpenMode::ReadWrite), Err(Error::InUse(_))));
    drop((reader, second));
    assert!(PosixDevice::open(&path.0, OpenMode::ReadWrite).is_ok());
}

#[test]
fn the_holder_is_found_among_other_locks() {
    let locks = "1: POSIX  ADVISORY  WRITE 11 fe:00:42 0 EOF\n\
                 2: FLOCK  ADVISORY  WRITE 12 fe:00:43 0 EOF\n\
                 2: -> FLOCK  ADVISORY  WRITE 13 fe:00:42 0 EOF\n\
                 3: FLOCK  ADVISORY  WRITE 14 fe:00:42 0 EOF\n";
    let device = libc::makedev(0xfe, 0);
    assert_eq!(lock::holder_in(locks, device, 42), Some(14));
    assert_eq!(lock::holder_in(locks, device, 4), None);
    assert_eq!(lock::holder_in("nonsense\n\n1: FLOCK", device, 42), None);
}

#[test]
fn a_file_that_shrank_gives_an_error_not_zeros() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap();
    OpenOptions::new().write(true).open(&path.0).unwrap().set_len(8192).unwrap();
    let (mut first, mut second) = (AlignedBuf::zeroed(8192), AlignedBuf::zeroed(8192));
    assert!(device.read(4096, &mut [&mut first], IoClass::SyncRead).is_err());
    assert!(device.read(0, &mut [&mut first, &mut second], IoClass::SyncRead).is_err());
    assert_eq!(device.stats().counters().errors, 2);
}

#[test]
fn an_image_that_gets_another_size_is_locked_all_the_while() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap();
    let device = device.resized(&path.0, 3 << 20).unwrap();
    assert_eq!(device.info().size_bytes, 3 << 20);
    let again = PosixDevice::open(&path.0, OpenMode::ReadWrite).map(drop);
    assert!(matches!(again, Err(Error::InUse(_))), "{again:?}");
    let last = pattern(4096, 7);
    device.write((3 << 20) - 4096, &[&last], IoClass::SyncWrite, false).unwrap();
    drop(device);
    let device = PosixDevice::open(&path.0, OpenMode::ReadWrite).unwrap();
    assert_eq!(device.info().size_bytes, 3 << 20);
    assert!(read_back(&device, (3 << 20) - 4096, 4096) == last);
}

#[test]
fn a_child_that_was_forked_does_not_keep_a_volume_in_use_that_its_parent_has_left() {
    let path = TempPath::new();
    for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
        let device = match mode {
            OpenMode::ReadWrite => PosixDevice::create(&path.0, 1 << 20),
            OpenMode::ReadOnly => PosixDevice::open(&path.0, mode),
        };
        let device = device.unwrap();
        // What a child gets: a descriptor of the same open file.
        let inherited = device.disk.file.try_clone().unwrap();
        drop(device);
        drop(PosixDevice::open(&path.0, OpenMode::ReadWrite).unwrap());
        drop(inherited);
    }
}

#[test]
fn a_size_that_is_not_whole_blocks_is_rounded_down() {
    let path = TempPath::new();
    std::fs::write(&path.0, [1; 10_000]).unwrap();
    let device = PosixDevice::open(&path.0, OpenMode::ReadOnly).unwrap();
    assert_eq!(device.info().size_bytes, 8192);
    assert!(matches!(PosixDevice::create(&path.0, 4096), Err(Error::Exists)));
    assert!(matches!(PosixDevice::create(&path.0, 100), Err(Error::Invalid(_))));
}

#[test]
fn unaligned_requests_are_refused_before_the_host_sees_them() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap();
    let buffer = AlignedBuf::zeroed(8192);
    let write = |offset, slice: &[u8]| device.write(offset, &[slice], IoClass::Log, false);
    assert!(write(512, &buffer).is_err());
    assert!(write(0, &buffer[512..4608]).is_err());
    assert!(write(0, &buffer[..100]).is_err());
    assert!(write((1 << 20) - 4096, &buffer).is_err());
    assert!(write((1 << 20) - 8192, &buffer).is_ok());
}

#[test]
fn things_that_cannot_be_a_volume_are_told_apart() {
    let missing = TempPath::new();
    let open = |path: &Path| PosixDevice::open(path, OpenMode::ReadWrite).err();
    assert_eq!(open(&missing.0), Some(Error::NotFound));
    assert!(matches!(open(&std::env::temp_dir()), Some(Error::NotAVolume(_))));
    assert!(matches!(open(Path::new("/dev/null")), Some(Error::NotAVolume(_))));
}

#[test]
fn image_files_are_punched_only_when_asked() {
    let path = TempPath::new();
    let written = pattern(1 << 20, 3);
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap();
    device.write(0, &[&written], IoClass::Writeback, false).unwrap();
    device.discard(4096, 8192).unwrap();
    assert!(read_back(&device, 0, 1 << 20) == written);
    assert_eq!(device.stats().counters().discards, 0);
    drop(device);
    let device = PosixDevice::open(&path.0, OpenMode::ReadWrite).unwrap().with_discard(true);
    device.discard(4096, 8192).unwrap();
    if device.stats().counters().discards == 1 {
        assert_eq!(read_back(&device, 4096, 8192), AlignedBuf::zeroed(8192));
    }
    assert_eq!(read_back(&device, 0, 4096)[..], written[..4096]);
    assert_eq!(device.info().size_bytes, 1 << 20);
}

#[test]
fn prewriting_allocates_the_whole_range_and_can_be_stopped() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 8 << 20).unwrap();
    let block = pattern(4096, 4);
    device.write(0, &[&block], IoClass::Log, false).unwrap();
    let mut steps = Vec::new();
    let range = 4096..(2 << 20) + 8192;
    device
        .prewrite(range, &mut |done| {
            steps.push(done);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(steps, [1 << 20, 2 << 20, (2 << 20) + 4096]);
    assert_eq!(read_back(&device, 0, 4096), block);
    let allocated_bytes = std::fs::metadata(&path.0).unwrap().blocks() * 512;
    assert!(allocated_bytes >= (2 << 20) + 4096, "{allocated_bytes}");
    let writes = device.stats().counters().writes;
    device.prewrite(0..8 << 20, &mut |_| ControlFlow::Break(())).unwrap();
    assert_eq!(device.stats().counters().writes, writes + 1);
    assert!(device.prewrite(0..16 << 20, &mut |_| ControlFlow::Continue(())).is_err());
}

/// Submits a request whose result is sent to `sender` under `tag`.
fn submit(
    device: &PosixDevice,
    class: IoClass,
    operation: Operation,
    offset_bytes: u64,
    buffers: Buffers,
    tag: u64,
    sender: &mpsc::Sender<(u64, DeviceResult<()>, Buffers)>,
) {
    let sender = sender.clone();
    let request = Request { operation, offset_bytes, buffers, class };
    let on_done: OnDone = Box::new(move |result, buffers| {
        // The receiver may be gone on purpose.
        let _ = sender.send((tag, result, buffers));
    });
    device.submit(request, on_done);
}

#[test]
fn submitted_requests_all_complete_with_their_data() {
    let path = TempPath::new();
    for threads in [1, 2, 8] {
        let device =
            PosixDevice::create(&path.0, 4 << 20).unwrap().with_threads(threads).with_discard(true);
        let (sender, receiver) = mpsc::channel();
        let classes = [IoClass::Background, IoClass::Log, IoClass::ReadAhead, IoClass::SyncWrite];
        for tag in 0..200_u64 {
            let buffers = Buffers::Owned(pattern(8192, tag as u32));
            let class = classes[tag as usize % 4];
            let write = Operation::Write { fua: tag % 50 == 0 };
            submit(&device, class, write, tag * 8192, buffers, tag, &sender);
        }
        let mut seen: Vec<u64> = (0..200).map(|_| receiver.recv().unwrap().0).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        submit(&device, IoClass::Log, Operation::Flush, 0, Buffers::None, 0, &sender);
        assert_eq!(receiver.recv().unwrap().1, Ok(()));
        for tag in 0..200_u64 {
            let buffers = Buffers::Owned(AlignedBuf::zeroed(8192));
            submit(&device, IoClass::SyncRead, Operation::Read, tag * 8192, buffers, tag, &sender);
        }
        for (tag, result, buffers) in receiver.iter().take(200) {
            assert_eq!(result, Ok(()));
            let Buffers::Owned(buffer) = buffers else { panic!("other buffers came back") };
            assert!(buffer == pattern(8192, tag as u32));
        }
        drop(device);
        std::fs::remove_file(&path.0).unwrap();
    }
}

/// A lock that a process has taken on an open file that others have, too, and that is gone since: as one is whose I/O the kernel has not
/// ended yet.
#[test]
fn a_lock_of_a_process_that_is_gone_is_waited_for_and_of_one_that_runs_is_not() {
    let path = TempPath::new();
    drop(PosixDevice::create(&path.0, 1 << 20).unwrap());
    let file = File::options().read(true).write(true).open(&path.0).unwrap();
    let locks = Command::new("flock").args(["-x", "0"]).stdin(file.try_clone().unwrap()).status();
    if !locks.is_ok_and(|status| status.success()) {
        eprintln!("skipped: flock(1) is not installed");
        return;
    }
    let freed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Only to meet the opening while it waits.
            std::thread::sleep(Duration::from_millis(100));
            freed.store(true, Ordering::SeqCst);
            drop(file);
        });
        let _device = PosixDevice::open(&path.0, OpenMode::ReadWrite).unwrap();
        assert!(freed.load(Ordering::SeqCst));
        let again = PosixDevice::open(&path.0, OpenMode::ReadWrite);
        assert!(matches!(again, Err(Error::InUse(_))), "{again:?}");
        assert_eq!(lock::claim_patience(&path.0.metadata().unwrap()), Duration::ZERO);
    });
}

#[test]
fn a_process_runs_unless_it_has_ended() {
    for (stat, runs) in [
        ("1 (weir) S 0 1", true),
        ("1 (a) Z) R 0", true),
        ("1 (weir) D 0", true),
        ("1 (weir) Z 0", false),
        ("1 (a) S) X 0", false),
        ("", false),
    ] {
        assert_eq!(lock::is_alive(stat), runs, "{stat}");
    }
}

#[test]
fn dropping_the_device_completes_what_was_submitted_and_releases_the_lock() {
    let path = TempPath::new();
    drop(PosixDevice::create(&path.0, 4 << 20).unwrap());
    let (sender, receiver) = mpsc::channel();
    for _ in 0..20 {
        let device = PosixDevice::open(&path.0, OpenMode::ReadWrite).unwrap().with_threads(3);
        for tag in 0..20_u64 {
            let buffers = Buffers::Owned(pattern(4096, 5));
            let write = Operation::Write { fua: false };
            submit(&device, IoClass::Writeback, write, tag * 4096, buffers, tag, &sender);
        }
        drop(device);
        assert_eq!(receiver.try_iter().count(), 20);
    }
}

#[test]
fn the_last_reference_may_be_dropped_by_a_completion() {
    let path = TempPath::new();
    let device = Arc::new(PosixDevice::create(&path.0, 1 << 20).unwrap());
    let (sender, receiver) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let held = Arc::clone(&device);
    let request = Request {
        operation: Operation::Flush,
        offset_bytes: 0,
        buffers: Buffers::None,
        class: IoClass::Log,
    };
    let on_done: OnDone = Box::new(move |_, _| {
        wait.recv().unwrap();
        drop(held);
        sender.send(()).unwrap();
    });
    device.submit(request, on_done);
    drop(device);
    go.send(()).unwrap();
    receiver.recv().unwrap();
}

#[test]
fn background_requests_leave_a_thread_for_urgent_ones() {
    let path = TempPath::new();
    let device = PosixDevice::create(&path.0, 1 << 20).unwrap().with_threads(2);
    let (release, gate) = mpsc::channel::<()>();
    let gate = Arc::new(crate::sync::Mutex::new(gate));
    for _ in 0..4 {
        // Each of these holds its thread until it is released.
        let gate = Arc::clone(&gate);
        let request = Request {
            operation: Operation::Flush,
            offset_bytes: 0,
            buffers: Buffers::None,
            class: IoClass::Background,
        };
        device.submit(request, Box::new(move |_, _| gate.lock().recv().unwrap()));
    }
    let (sender, receiver) = mpsc::channel();
    let buffers = Buffers::Owned(AlignedBuf::zeroed(4096));
    submit(&device, IoClass::SyncRead, Operation::Read, 0, buffers, 7, &sender);
    assert_eq!(receiver.recv().unwrap().0, 7);
    for _ in 0..4 {
        release.send(()).unwrap();
    }
}

/// Performs requests.
type Run = fn(&Arc<PosixDevice>, Vec<Request>) -> Vec<Outcome>;

const ALL_AT_ONCE: Run = |device, requests| device.run_all(requests);
const BEGUN: Run = |device, requests| device.clone().begin_all(requests).wait();
const BEGUN_IN_TWO: Run = |device, mut requests| {
    let rest = requests.split_off(requests.len() / 3);
    let first = device.clone().begin_all(requests);
    let rest = device.clone().begin_all(rest).wait();
    first.wait().into_iter().chain(rest).collect()
};

/// Writes `count` scattered pieces in one batch, reads them back in another, and compares.
fn batches_round_trip(device: &Arc<PosixDevice>, count: u64, run: Run) {
    let place = |number: u64| (number * 11 % count) * 16384;
    let length = |number: u64| if number.is_multiple_of(5) { 12288 } else { 4096 };
    let pool = crate::cache::page::PagePool::new(4 << 20);
    let before = device.stats().counters();
    let writes = (0..count).map(|number| {
        let bytes = pattern(length(number), number as u32);
        let buffers = if number.is_multiple_of(3) {
            let page = |piece: &[u8]| {
                let mut page = pool.alloc_zeroed().unwrap();
                page.copy_from_slice(piece);
                page.freeze()
            };
            Buffers::Pages(bytes.chunks(4096).map(page).collect())
        } else {
            Buffers::Owned(bytes)
        };
        let operation = Operation::Write { fua: number == 4 };
        Request { operation, offset_bytes: place(number), buffers, class: IoClass::Writeback }
    });
    let results = run(device, writes.collect());
    assert!(results.iter().all(|(result, _)| result.is_ok()), "{results:?}");
    let reads = (0..count).map(|number| {
        let length = length(number);
        let buffers = if number.is_multiple_of(3) {
            Buffers::Fill((0..length / 4096).map(|_| pool.alloc_zeroed().unwrap()).collect())
        } else {
            Buffers::Owned(AlignedBuf::zeroed(length))
        };
        let offset_bytes = place(number);
        Request { operation: Operation::Read, offset_bytes, buffers, class: IoClass::SyncRead }
    });
    for (number, (result, buffers)) in run(device, reads.collect()).into_iter().enumerate() {
        assert_eq!(result, Ok(()));
        let bytes = match buffers {
            Buffers::Owned(buffer) => buffer.to_vec(),
            Buffers::Fill(pages) => pages.iter().flat_map(|page| page.to_vec()).collect(),
            other => panic!("other buffers came back: {other:?}"),
        };
        assert!(bytes == pattern(length(number as u64), number as u32)[..], "piece {number}");
    }
    let counted = device.stats().counters().since(&before);
    let bytes: usize = (0..count).map(length).sum();
    assert_eq!((counted.reads, counted.writes), (count, count));
    assert_eq!((counted.read_bytes, counted.write_bytes), (bytes as u64, bytes as u64));
}

#[test]
fn batches_do_every_request_and_give_the_memory_back_in_order() {
    for io_uring in [true, false] {
        let path = TempPath::new();
        let device =
            Arc::new(PosixDevice::create(&path.0, 8 << 20).unwrap().with_io_uring(io_uring));
        for count in [0, 1, 2, 63, 64, 65, 300] {
            batches_round_trip(&device, count, ALL_AT_ONCE);
            batches_round_trip(&device, count, BEGUN);
            batches_round_trip(&device, count, BEGUN_IN_TWO);
        }
        assert!(io_uring || !device.uses_io_uring());
        drop(device);
        std::fs::remove_file(&path.0).unwrap();
    }
}

#[test]
fn a_batch_that_nobody_waits_for_has_let_go_of_its_memory_when_it_goes_away() {
    let path = TempPath::new();
    let device = Arc::new(PosixDevice::create(&path.0, 8 << 20).unwrap());
    let pool = crate::cache::page::PagePool::new(1 << 20);
    let page = || {
        let mut page = pool.alloc_zeroed().unwrap();
        page.fill(3);
        Buffers::Pages(vec![page.freeze()])
    };
    let operation = Operation::Write { fua: false };
    let class = IoClass::Writeback;
    let request =
        |number: u64| Request { operation, offset_bytes: number * 8192, buffers: page(), class };
    drop(device.clone().begin_all((0..20).map(request).collect()));
    if device.uses_io_uring() {
        assert_eq!(pool.in_use_pages(), 0, "the kernel may read what is not ours any more");
    }
    // Nothing is left of it that the next one could meet.
    batches_round_trip(&device, 65, BEGUN);
}

#[test]
fn a_request_of_a_batch_fails_alone() {
    for io_uring in [true, false] {
        let path = TempPath::new();
        let device = PosixDevice::create(&path.0, 1 << 20).unwrap().with_io_uring(io_uring);
        let write = |offset_bytes: u64, buffers: Buffers| Request {
            operation: Operation::Write { fua: false },
            offset_bytes,
            buffers,
            class: IoClass::SyncWrite,
        };
        let page = || Buffers::Owned(pattern(4096, 1));
        let results = device.run_all(vec![
            write(0, page()),
            write(1 << 20, page()),
            write(100, page()),
            write(4096, Buffers::None),
            write(8192, page()),
        ]);
        let ok: Vec<bool> = results.iter().map(|(result, _)| result.is_ok()).collect();
        assert_eq!(ok, [true, false, false, false, true]);
        assert_eq!(device.stats().counters().writes, 2);
        drop(device);
        // A device that may not be written: the host refuses each.
        let device =
            PosixDevice::open(&path.0, OpenMode::ReadOnly).unwrap().with_io_uring(io_uring);
        let results = device.run_all(vec![write(0, page()), write(4096, page())]);
        assert!(results.iter().all(|(result, _)| result.is_err()));
        assert_eq!(device.stats().counters().errors, 2);
        drop(device);
        std::fs::remove_file(&path.0).unwrap();
    }
}

/// Makes the host refuse `io_uring_setup` to the calling thread with `error`, as a sandbox does.
fn refuse_io_uring(error: i32) {
    let statement =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    // Load the number of the system call; if it is io_uring_setup (425 everywhere), answer the error; else allow.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 425),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: plain arguments, and a program that lives across the calls; it binds only this thread.
    let answers = unsafe {
        let privileges = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        (privileges, libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program))
    };
    assert_eq!(answers, (0, 0));
}

#[test]
fn a_host_that_refuses_io_uring_is_served_by_threads() {
    for error in [libc::ENOSYS, libc::EPERM] {
        let refused = std::thread::spawn(move || {
            refuse_io_uring(error);
            let path = TempPath::new();
            let device = Arc::new(PosixDevice::create(&path.0, 2 << 20).unwrap());
            assert!(device.uses_io_uring());
            batches_round_trip(&device, 40, ALL_AT_ONCE);
            batches_round_trip(&device, 40, BEGUN);
            assert!(!device.uses_io_uring());
            batches_round_trip(&device, 40, ALL_AT_ONCE);
            batches_round_trip(&device, 40, BEGUN);
        });
        refused.join().unwrap();
    }
    let out_of_luck = std::thread::spawn(|| {
        refuse_io_uring(libc::ENOMEM);
        let path = TempPath::new();
        let device = Arc::new(PosixDevice::create(&path.0, 2 << 20).unwrap());
        batches_round_trip(&device, 40, BEGUN);
        assert!(device.uses_io_uring(), "the next batch may have more luck");
    });
    out_of_luck.join().unwrap();
}
