//! A kernel that knows too many files is asked to forget some, and nobody notices. Skipped, with a word, where this machine cannot
//! mount, or its kernel cannot be asked.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::TestMount;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::{CreateOptions, Volume, VolumeOptions};
use weir_mount::WeirFs;

const DIRECTORIES: usize = 6;
const FILES: usize = 1000;
/// What a volume with this little memory allows, and an eighth more before somebody is asked.
const MOST: usize = 1024 + 128;

/// Linux 6.18 is the first that can be asked.
fn kernel_can_be_asked() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).flat_map(str::parse::<u32>);
    (numbers.next(), numbers.next()) >= (Some(6), Some(18))
}

fn the_kernel_knows_few_files_at_a_time_and_all_of_them_stay_what_they_are(options: &str) {
    if !kernel_can_be_asked() {
        eprintln!("skipped: this kernel cannot be asked to forget inodes (Linux 6.18 can)");
        return;
    }
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
    Volume::format_device(&device, &CreateOptions::default()).unwrap();
    let with = VolumeOptions { memory_bytes: Some(1 << 20), ..VolumeOptions::default() };
    let volume = Volume::open_device(device, with).unwrap();
    let fs = Arc::new(WeirFs::new(volume, true, Box::new(|_| {})).unwrap());
    let Some(mount) = TestMount::new(fs.clone(), options) else { return };

    let mut unlinked = File::create_new(mount.path().join("unlinked")).unwrap();
    fs::remove_file(mount.path().join("unlinked")).unwrap();
    let mut kept = File::create_new(mount.path().join("kept")).unwrap();
    let kept_ino = kept.metadata().unwrap().ino();
    let name = |number: usize| format!("d{}/f{number}", number % DIRECTORIES);
    for number in 0..DIRECTORIES {
        fs::create_dir(mount.path().join(format!("d{number}"))).unwrap();
    }
    let mut inodes = Vec::new();
    for number in 0..FILES * DIRECTORIES {
        let mut file = File::create_new(mount.path().join(name(number))).unwrap();
        file.write_all(name(number).as_bytes()).unwrap();
        inodes.push(file.metadata().unwrap().ino());
    }

    // It says what it has forgotten when it finds the time.
    let deadline = Instant::now() + Duration::from_secs(30);
    while fs.in_use().0 > MOST && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let known = fs.in_use().0;
    assert!(known <= MOST, "the kernel still knows {known} files");

    // A second walk meets files it has to look up again, while others are forgotten.
    for (number, ino) in inodes.iter().enumerate() {
        let path = mount.path().join(name(number));
        assert_eq!(fs::metadata(&path).unwrap().ino(), *ino);
        assert_eq!(fs::read_to_string(&path).unwrap(), name(number));
    }
    for file in [&mut unlinked, &mut kept] {
        file.write_all(b"still here").unwrap();
        file.sync_all().unwrap();
    }
    assert_eq!(fs::metadata(mount.path().join("kept")).unwrap().ino(), kept_ino);
    let mut content = String::new();
    File::open(mount.path().join("kept")).unwrap().read_to_string(&mut content).unwrap();
    assert_eq!(content, "still here");
}

#[test]
fn over_rings_the_kernel_knows_few_files_at_a_time_and_all_of_them_stay_what_they_are() {
    the_kernel_knows_few_files_at_a_time_and_all_of_them_stay_what_they_are("");
}

#[test]
fn over_dev_fuse_the_kernel_knows_few_files_at_a_time_and_all_of_them_stay_what_they_are() {
    the_kernel_knows_few_files_at_a_time_and_all_of_them_stay_what_they_are("no_io_uring");
}
