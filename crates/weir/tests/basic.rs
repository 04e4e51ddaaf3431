//! The main job through the public API: what is written is read, what is synced survives, what is removed is gone.

use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::*;

const MIB: u64 = 1 << 20;

fn device(size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(MemoryDevice::new(size_bytes))
}

fn formatted(size_bytes: u64) -> Arc<dyn Device> {
    let device = device(size_bytes);
    let options = CreateOptions { volume_id: Some([7; 16]), ..CreateOptions::default() };
    Volume::format_device(&device, &options).expect("format");
    device
}

fn manual() -> VolumeOptions {
    VolumeOptions {
        background: BackgroundMode::Manual,
        memory_bytes: Some(8 * MIB),
        ..VolumeOptions::default()
    }
}

fn open(device: &Arc<dyn Device>) -> Volume {
    Volume::open_device(device.clone(), manual()).expect("open")
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length).map(|index| (seed.wrapping_mul(31) + index as u64 * 7 / 3) as u8).collect()
}

#[test]
fn a_synced_file_survives_without_close() {
    let device = formatted(16 * MIB);
    let data = pattern(1, 10_000);
    {
        let volume = open(&device);
        let file = volume.open_file("/a", OpenFlags::CREATE).expect("create");
        assert_eq!(file.write_at(0, &data), Ok(data.len()));
        file.fsync().expect("fsync");
    }
    let volume = open(&device);
    let file = volume.open_file("/a", OpenFlags::READ).expect("open");
    let mut read = vec![0; 20_000];
    assert_eq!(file.read_at(0, &mut read), Ok(data.len()));
    assert_eq!(&read[..data.len()], &data[..]);
}

#[test]
fn large_files_survive_close_and_crash() {
    for close in [false, true] {
        let device = formatted(64 * MIB);
        let data = pattern(2, 20 << 20);
        {
            let volume = open(&device);
            let file = volume.open_file("/big", OpenFlags::CREATE).expect("create");
            assert_eq!(file.write_at(12_345, &data), Ok(data.len()));
            file.fsync().expect("fsync");
            if close {
                volume.close().expect("close");
            }
        }
        let volume = open(&device);
        let file = volume.open_file("/big", OpenFlags::READ).expect("open");
        let mut read = vec![1; data.len()];
        assert_eq!(file.read_at(12_345, &mut read), Ok(data.len()));
        assert!(read == data);
        let mut hole = [1; 12_345];
        assert_eq!(file.read_at(0, &mut hole), Ok(12_345));
        assert!(hole.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn overwrites_through_log_and_checkpoint_keep_the_newest() {
    let device = formatted(32 * MIB);
    let mut expected = vec![0_u8; 300 * 4096];
    {
        let volume = open(&device);
        let file = volume.open_file("/db", OpenFlags::CREATE).expect("create");
        file.write_at(0, &expected).expect("write");
        file.fsync().expect("fsync");
        for round in 0_u64..200 {
            let page = (round * 37) % 300;
            let data = pattern(round, 4096);
            file.write_at(page * 4096, &data).expect("write");
            expected[page as usize * 4096..][..4096].copy_from_slice(&data);
            file.fdatasync().expect("fdatasync");
            if round % 50 == 49 {
                volume.checkpoint().expect("checkpoint");
            }
        }
    }
    let volume = open(&device);
    let file = volume.open_file("/db", OpenFlags::READ).expect("open");
    let mut read = vec![1; expected.len()];
    assert_eq!(file.read_at(0, &mut read), Ok(expected.len()));
    assert!(read == expected);
}

#[test]
fn names_links_and_attributes_behave() {
    let device = formatted(16 * MIB);
    let volume = open(&device);
    volume.create_dir("/d", 0o755).expect("mkdir");
    volume.create_dir("/d/e", 0o700).expect("mkdir");
    let file = volume.open_file("/d/f", OpenFlags::CREATE).expect("create");
    file.write_at(0, b"hello").expect("write");
    assert_eq!(volume.metadata("/d").expect("stat").links, 3);
    let dir = volume.resolve("/d", true).expect("resolve");
    volume.link(file.ino(), dir, b"g").expect("link");
    assert_eq!(file.attr().expect("attr").links, 2);
    assert_eq!(volume.rmdir(Volume::ROOT, b"d"), Err(Error::NotEmpty));
    volume.rename_path("/d/g", "/h").expect("rename");
    volume.symlink(Volume::ROOT, b"s", b"d/f", 0, 0).expect("symlink");
    assert_eq!(volume.metadata("/s").expect("stat").size_bytes, 5);
    volume.remove_file("/d/f").expect("unlink");
    volume.remove_file("/h").expect("unlink");
    let mut read = [0; 5];
    assert_eq!(file.read_at(0, &mut read), Ok(5), "an open file outlives its names");
    drop(file);
    volume.remove_dir("/d/e").expect("rmdir");
    volume.remove_dir("/d").expect("rmdir");
    let names: Vec<_> = volume.read_dir("/").expect("list").into_iter().map(|e| e.name).collect();
    assert_eq!(names, vec![b"s".to_vec()]);
    volume.close().expect("close");
    let volume = open(&device);
    assert_eq!(volume.statfs().inodes, 2);
}

#[test]
fn many_files_come_back() {
    let device = formatted(64 * MIB);
    {
        let volume = open(&device);
        for number in 0..5000 {
            let file = volume.open_file(format!("/f{number}"), OpenFlags::CREATE).expect("create");
            file.write_at(0, format!("content {number}").as_bytes()).expect("write");
        }
        volume.sync().expect("sync");
        for number in (0..5000).step_by(3) {
            volume.remove_file(format!("/f{number}")).expect("unlink");
        }
        volume.close().expect("close");
    }
    let volume = open(&device);
    for number in 0..5000 {
        let found = volume.open_file(format!("/f{number}"), OpenFlags::READ);
        if number % 3 == 0 {
            assert_eq!(found.map(|_| ()), Err(Error::NotFound));
        } else {
            let mut read = [0; 64];
            let file = found.expect("open");
            let count = file.read_at(0, &mut read).expect("read");
            assert_eq!(&read[..count], format!("content {number}").as_bytes());
        }
    }
}

#[test]
fn truncation_in_a_block_leaves_zeros_behind() {
    let device = formatted(16 * MIB);
    {
        let volume = open(&device);
        let file = volume.open_file("/t", OpenFlags::CREATE).expect("create");
        file.write_at(0, &vec![0xaa; 40_000]).expect("write");
        file.fsync().expect("fsync");
        volume.checkpoint().expect("checkpoint");
        file.truncate(10_000).expect("truncate");
        file.truncate(30_000).expect("grow");
        file.fsync().expect("fsync");
    }
    let volume = open(&device);
    let file = volume.open_file("/t", OpenFlags::READ).expect("open");
    let mut read = vec![1; 40_000];
    assert_eq!(file.read_at(0, &mut read), Ok(30_000));
    assert!(read[..10_000].iter().all(|&byte| byte == 0xaa));
    assert!(read[10_000..30_000].iter().all(|&byte| byte == 0));
}

#[test]
fn a_full_volume_can_be_emptied_and_filled_again() {
    let device = formatted(8 * MIB);
    let volume = open(&device);
    let mut written = Vec::new();
    for round in 0..3 {
        let mut total = 0_u64;
        let mut number = 0;
        'fill: loop {
            let Ok(file) = volume.open_file(format!("/x{number}"), OpenFlags::CREATE) else {
                break;
            };
            number += 1;
            for part in 0..64 {
                match file.write_at(part * 16_384, &vec![round as u8 + 1; 16_384]) {
                    Ok(count) => total += count as u64,
                    Err(error) => {
                        assert_eq!(error, Error::NoSpace);
                        break 'fill;
                    }
                }
            }
        }
        volume.sync().expect("sync a full volume");
        written.push(total);
        for file in volume.read_dir("/").expect("list") {
            volume.unlink(Volume::ROOT, &file.name).expect("unlink on a full volume");
        }
        volume.sync().expect("sync");
    }
    assert!(written.iter().all(|&total| total > 4 * MIB), "{written:?}");
    let first = written[0] as f64;
    assert!(written.iter().all(|&total| total as f64 > 0.9 * first), "{written:?}");
}

#[test]
fn threads_do_the_background_work() {
    let device = formatted(64 * MIB);
    let options = VolumeOptions { memory_bytes: Some(8 * MIB), ..VolumeOptions::default() };
    let volume = Volume::open_device(device.clone(), options).expect("open");
    let writers: Vec<_> = (0..4_u64)
        .map(|writer| {
            let volume = volume.clone();
            std::thread::spawn(move || {
                for round in 0..50_u64 {
                    let path = format!("/w{writer}-{}", round % 10);
                    let file = volume.open_file(path, OpenFlags::CREATE).expect("create");
                    file.write_at(round * 1000, &pattern(round, 60_000)).expect("write");
                    file.fsync().expect("fsync");
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().expect("writer");
    }
    volume.close().expect("close");
    drop(volume);
    let volume = open(&device);
    let file = volume.open_file("/w3-9", OpenFlags::READ).expect("open");
    let mut read = vec![0; 60_000];
    assert_eq!(file.read_at(49_000, &mut read), Ok(60_000));
    assert!(read == pattern(49, 60_000));
}

#[test]
fn a_fragmented_file_is_purged_although_the_checkpoint_still_has_all_its_extents() {
    let device = formatted(64 * MIB);
    let volume = open(&device);
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
    // Every other page: one extent each, several batches of the purge.
    for page in 0..600 {
        file.write_at(page * 8192, &[page as u8; 4096]).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
    let empty = volume.statfs();
    drop(file);
    volume.remove_file("/f").expect("unlink");
    volume.checkpoint().expect("checkpoint");
    assert_eq!(volume.statfs().inodes, empty.inodes - 1);
    assert!(volume.statfs().free_blocks >= empty.free_blocks + 600);
}
