//! The limits: offsets up to 8 EiB - 1, sparse files far larger than the volume, a volume of 16 TiB, long logs of extents.

mod common;

use common::*;
use weir::*;

const TIB: u64 = 1 << 40;
const MAX: u64 = i64::MAX as u64;

#[test]
fn a_file_reaches_to_8_eib_minus_1() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let file = create(&volume, "/f");
    file.truncate(MAX).expect("truncate");
    assert_eq!((file.size(), file.attr().expect("attr").blocks), (MAX, 0));
    assert_eq!(file.seek_data(0), Err(Error::NoSuchExtent));
    assert_eq!(file.seek_hole(12_345), Ok(12_345));
    let last = b"the very last bytes";
    let at = MAX - last.len() as u64;
    assert_eq!(file.write_at(at, last), Ok(last.len()));
    assert_eq!(file.write_at(MAX, b"x"), Err(Error::FileTooLarge));
    assert_eq!(file.append(b"x"), Err(Error::FileTooLarge));
    let mut read = [0; 64];
    assert_eq!(file.read_at(at, &mut read), Ok(last.len()));
    assert_eq!(&read[..last.len()], last);
    assert_eq!(file.read_at(MAX, &mut read), Ok(0));
    assert_eq!(file.read_at(u64::MAX, &mut read), Ok(0));
    let page = MAX / 4096 * 4096;
    assert_eq!(file.seek_data(0), Ok(page));
    assert_eq!(file.seek_hole(page), Ok(MAX));
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    drop((file, volume));
    let volume = open(&device, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    assert_eq!(file.seek_data(1), Ok(page));
    assert_eq!(file.read_at(at, &mut read), Ok(last.len()));
    assert_eq!(&read[..last.len()], last);
    file.allocate(AllocateMode::PunchHole, 0, MAX).expect("punch");
    assert_eq!(file.seek_data(0), Err(Error::NoSuchExtent));
    file.truncate(0).expect("truncate");
    assert_eq!(file.attr().expect("attr").blocks, 0);
}

#[test]
fn a_sparse_file_of_17_tib_is_written_all_over() {
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, manual(2 * MIB));
    let file = create(&volume, "/f");
    let offsets: Vec<u64> =
        (0..400_u64).map(|number| number * 17 * TIB / 400 + number * 1111).collect();
    for (number, &offset) in offsets.iter().enumerate() {
        file.write_at(offset, &pattern(number as u64, 5000)).expect("write");
    }
    file.fsync().expect("fsync");
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, manual(2 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    let mut at = 0;
    for (number, &offset) in offsets.iter().enumerate() {
        let data = file.seek_data(at).expect("data");
        assert_eq!(data, offset / 4096 * 4096);
        let mut read = vec![1; 5000];
        file.read_at(offset, &mut read).expect("read");
        assert!(read == pattern(number as u64, 5000));
        at = file.seek_hole(offset).expect("hole");
        let mut zeros = [1; 100];
        if number + 1 < offsets.len() {
            file.read_at(at + TIB / 100, &mut zeros).expect("read");
            assert_eq!(zeros, [0; 100]);
        }
    }
    let insert_at = 10 * TIB / 4096 * 4096;
    file.allocate(AllocateMode::InsertRange, insert_at, TIB).expect("insert");
    let last = offsets[399];
    let mut read = vec![1; 5000];
    file.read_at(last + TIB, &mut read).expect("read");
    assert!(read == pattern(399, 5000));
    file.allocate(AllocateMode::CollapseRange, insert_at, TIB).expect("collapse");
    file.read_at(last, &mut read).expect("read");
    assert!(read == pattern(399, 5000));
    let too_far = (MAX / 4096 - 1) * 4096;
    assert_eq!(file.allocate(AllocateMode::InsertRange, 0, too_far), Err(Error::FileTooLarge));
}

#[test]
fn a_volume_of_16_tib_works_where_only_what_is_written_takes_memory() {
    let device = formatted(16 * TIB, 4096);
    {
        let volume = open(&device, manual(8 * MIB));
        let stat = volume.statfs();
        assert!(stat.available_blocks * 4096 > 15 * TIB);
        let file = create(&volume, "/f");
        file.write_at(3 * TIB, &pattern(1, 3_000_000)).expect("write");
        // Blocks of many groups are taken, and the last ones of the volume too.
        file.allocate(AllocateMode::Extend, 4 * TIB, 40 << 30).expect("allocate");
        volume.close().expect("close");
    }
    let volume = open(&device, manual(8 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    assert_eq!(file.attr().expect("attr").blocks, (40 << 18) + 733);
    let mut read = vec![0; 3_000_000];
    file.read_at(3 * TIB, &mut read).expect("read");
    assert!(read == pattern(1, 3_000_000));
    drop(file);
    volume.remove_file("/f").expect("unlink");
    while volume.background_step(BackgroundWork::Purge).expect("purge") {}
    volume.close().expect("close");
}

#[test]
fn more_extents_than_the_log_can_move_at_once_are_refused_and_nothing_changes() {
    let device = formatted(32 * MIB, 64);
    let volume = open(&device, manual(MIB));
    let file = create(&volume, "/f");
    let mut expected = vec![0; 6000 * 4096];
    for number in 0..3000_usize {
        let data = [number as u8; 4096];
        file.write_at(number as u64 * 8192, &data).expect("write");
        expected[number * 8192..][..4096].copy_from_slice(&data);
    }
    let size = file.size() as usize;
    expected.truncate(size);
    let refused = file.allocate(AllocateMode::InsertRange, 4096, 4096);
    assert_eq!(refused.expect_err("refused").errno(), libc::EOPNOTSUPP);
    assert!(contents(&file) == expected);
    // Near the end there is less to move.
    let at = (size as u64 - 40 * 4096) / 4096 * 4096;
    file.allocate(AllocateMode::InsertRange, at, 8192).expect("insert");
    expected.splice(at as usize..at as usize, [0; 8192]);
    assert!(contents(&file) == expected);
    // A cut through all of them takes several operations.
    file.allocate(AllocateMode::PunchHole, 5000, 20 << 20).expect("punch");
    expected[5000..5000 + (20 << 20)].fill(0);
    assert!(contents(&file) == expected);
    file.truncate(6000).expect("truncate");
    expected.truncate(6000);
    assert!(contents(&file) == expected);
    assert!(file.attr().expect("attr").blocks <= 2);
}

#[test]
fn an_attribute_of_every_size_up_to_the_limit_is_kept() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let ino = create(&volume, "/f").ino();
    let name =
        |number: usize| format!("user.{number:0>width$}", width = 1 + number % 250).into_bytes();
    let sizes: Vec<usize> = (0..4096).step_by(97).chain([4095, 4096]).collect();
    for &size in &sizes {
        volume
            .setxattr(ino, &name(size), &pattern(size as u64, size), XattrMode::Set)
            .expect("set");
    }
    volume.close().expect("close");
    let volume = open(&device, manual(4 * MIB));
    assert_eq!(volume.listxattr(ino).expect("list").len(), sizes.len());
    for &size in &sizes {
        assert_eq!(volume.getxattr(ino, &name(size)), Ok(pattern(size as u64, size)));
        volume.removexattr(ino, &name(size)).expect("remove");
    }
    assert_eq!(volume.listxattr(ino), Ok(vec![]));
    let long = [&b"user."[..], &[b'x'; 251]].concat();
    let refused = volume.setxattr(ino, &long, b"", XattrMode::Set).expect_err("256 bytes of name");
    assert_eq!((refused.errno(), refused.to_string().contains("name too long")), (34, true));
    assert_eq!(volume.setxattr(ino, &long[..255], b"", XattrMode::Set), Ok(()));
}

#[test]
fn a_copy_into_a_file_of_another_volume_is_refused() {
    let (first, second) = (small_volume(), small_volume());
    let source = create(&first, "/s");
    source.write_at(0, &vec![7; 40_000]).expect("write");
    let victim = create(&first, "/victim");
    victim.write_at(0, &[1; 5000]).expect("write");
    create(&second, "/x");
    let target = create(&second, "/t");
    assert_eq!(target.ino(), victim.ino());
    assert!(matches!(source.copy_range(0, &target, 0, 40_000), Err(Error::Invalid(_))));
    first.sync().and(second.sync()).expect("sync");
    assert!(contents(&victim) == [1; 5000] && contents(&target).is_empty());
}
