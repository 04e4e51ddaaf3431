//! What is replaced by a rename is there all the time: whoever opens, stats or reads its path meanwhile finds the old one or the new one. So
//! does whoever looks after a crash.

mod common;

use common::volatile::Volatile;
use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use weir::device::Device;
use weir::*;

/// `replace` puts something new in the place of "/current", again and again, while `look` looks at it.
fn looked_at_while_replaced(
    replace: impl Fn(&Volume, u64) -> Result<()> + Sync,
    look: impl Fn(&Volume) -> Result<()> + Sync,
) {
    for options in [threads(16 * MIB), manual(16 * MIB)] {
        let device = formatted(64 * MIB, 2048);
        let volume = open(&device, options);
        replace(&volume, 0).expect("made");
        let (done, looks) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let looking: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while !done.load(Ordering::Acquire) {
                            let seen = look(&volume);
                            looks.fetch_add(1, Ordering::AcqRel);
                            seen?;
                        }
                        Ok(())
                    })
                })
                .collect();
            let mut number = 1;
            let has_failed = || looking.iter().any(ScopedJoinHandle::is_finished);
            while number < 3000 || looks.load(Ordering::Acquire) < 3000 && !has_failed() {
                replace(&volume, number).expect("replaced");
                number += 1;
            }
            done.store(true, Ordering::Release);
            for thread in looking {
                let seen: Result<()> = thread.join().expect("looked");
                seen.expect("found each time");
            }
        });
    }
}

fn replace_file(volume: &Volume, number: u64) -> Result<()> {
    volume.open_file("/new", OpenFlags::CREATE)?.write_at(0, &number.to_le_bytes())?;
    volume.rename(Volume::ROOT, b"new", Volume::ROOT, b"current", RenameMode::Replace)
}

#[test]
fn a_file_that_is_replaced_can_be_opened_at_any_time() {
    looked_at_while_replaced(replace_file, |volume| {
        let bytes = contents(&volume.open_file("/current", OpenFlags::READ)?);
        assert_eq!(bytes.len(), 8);
        Ok(())
    });
}

#[test]
fn a_file_that_is_replaced_has_attributes_at_any_time() {
    looked_at_while_replaced(replace_file, |volume| {
        volume.metadata("/current")?;
        volume.lookup(Volume::ROOT, b"current")?;
        Ok(())
    });
}

#[test]
fn a_symbolic_link_that_is_replaced_leads_somewhere_at_any_time() {
    let replace = |volume: &Volume, number: u64| {
        let release = format!("release-{}", number % 2);
        if number < 2 {
            volume.create_dir(format!("/{release}"), 0o755)?;
            create(volume, &format!("/{release}/f")).write_at(0, &number.to_le_bytes())?;
        }
        volume.symlink(Volume::ROOT, b"new", release.as_bytes(), 0, 0)?;
        volume.rename(Volume::ROOT, b"new", Volume::ROOT, b"current", RenameMode::Replace)
    };
    looked_at_while_replaced(replace, |volume| {
        let bytes = contents(&volume.open_file("/current/f", OpenFlags::READ)?);
        assert_eq!(bytes.len(), 8);
        volume.symlink_metadata("/current")?;
        Ok(())
    });
}

#[test]
fn a_file_that_may_be_made_is_opened_whoever_removes_it_meanwhile() {
    let remove = |volume: &Volume, _| match volume.remove_file("/current") {
        Err(Error::NotFound) => Ok(()),
        removed => removed,
    };
    looked_at_while_replaced(remove, |volume| {
        volume.open_file("/current", OpenFlags::CREATE)?.write_at(0, b"here")?;
        Ok(())
    });
}

#[test]
fn a_name_that_is_replaced_is_listed_once_at_any_time() {
    looked_at_while_replaced(replace_file, |volume| {
        let entries = volume.read_dir("/")?;
        assert_eq!(entries.iter().filter(|entry| entry.name == b"current").count(), 1);
        Ok(())
    });
}

#[test]
fn names_that_are_exchanged_are_both_there_at_any_time() {
    let exchange = |volume: &Volume, number: u64| {
        if number == 0 {
            volume.create_dir("/current", 0o755)?;
            volume.create_dir("/other", 0o755)?;
            create(volume, "/current/f").write_at(0, b"one")?;
            create(volume, "/other/f").write_at(0, b"three")?;
        }
        volume.rename(Volume::ROOT, b"current", Volume::ROOT, b"other", RenameMode::Exchange)
    };
    looked_at_while_replaced(exchange, |volume| {
        for path in ["/current/f", "/other/f"] {
            let bytes = contents(&volume.open_file(path, OpenFlags::READ)?);
            assert!(bytes == b"one" || bytes == b"three");
        }
        let up = volume.lookup(volume.resolve("/current", true)?, b"..")?;
        assert_eq!(up.ino, Volume::ROOT);
        Ok(())
    });
}

/// Programs that do not sync what they have written: another one's sync makes the rename durable, and with it the data.
#[test]
fn a_file_renamed_over_another_one_has_its_data_after_a_crash_or_the_other_one_is_there() {
    let old = pattern(1, 3000);
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        for length in [0, 100, 5000, 32 * 4096] {
            let new = pattern(2, length);
            for seed in 0..8 {
                let volatile = Volatile::new(16 * MIB);
                let device: Arc<dyn Device> = volatile.clone();
                format(&device, 256);
                let volume = open(&device, VolumeOptions { background, ..manual(8 * MIB) });
                create(&volume, "/f").write_at(0, &old).expect("write");
                volume.sync().expect("sync");
                create(&volume, "/new").write_at(0, &new).expect("write");
                volume.rename_path("/new", "/f").expect("rename");
                let syncs = seed % 2 == 0;
                if syncs {
                    create(&volume, "/other").fsync().expect("fsync");
                }
                let crashed = open(&volatile.after_crash(seed), manual(8 * MIB));
                let file = crashed.open_file("/f", OpenFlags::READ).expect("there is one");
                let found = contents(&file);
                assert!(found == new || found == old && !syncs, "{length} bytes, seed {seed}");
            }
        }
    }
}

/// What is too much for that is on its way at once.
#[test]
fn a_large_file_renamed_over_another_one_is_handed_to_writeback() {
    let device = formatted(64 * MIB, 256);
    let volume = open(&device, threads(32 * MIB));
    create(&volume, "/f");
    let new = create(&volume, "/new");
    new.write_at(0, &pattern(1, 4 << 20)).expect("write");
    volume.rename_path("/new", "/f").expect("rename");
    with_watchdog(60, || {
        while volume.stats().handed_over_pages < 1024 {
            std::thread::yield_now();
        }
    });
}
