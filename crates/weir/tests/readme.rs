//! The Rust of the README: what stands there is what is compiled and run here, line by line.
#![allow(missing_docs)]
#![cfg(not(feature = "shuttle"))]

use weir::{File, RenameMode, Result, SyncKind, SyncRangeFlags};

const README: &str = include_str!("../../../README.md");
const THIS: &str = include_str!("readme.rs");
/// Lines that enclose what the README has.
const BEGIN: &str = "// README {";
const END: &str = "// }";

fn first_steps() -> Result<()> {
    // README {
    use weir::{CreateOptions, OpenFlags, Volume, VolumeOptions};

    let path = std::path::Path::new("my.weir");
    Volume::create(path, &CreateOptions { size_bytes: Some(1 << 30), ..CreateOptions::default() })?;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let file = volume.open_file("/journal", OpenFlags::CREATE)?;
    file.append(b"first entry\n")?;
    file.fsync()?; // one device write, one flush
    volume.close()?;
    // }
    Ok(())
}

#[rustfmt::skip]
fn without_waiting() -> Result<()> {
    use weir::{OpenFlags, Volume, VolumeOptions};

    let volume = Volume::open(std::path::Path::new("my.weir"), VolumeOptions::default())?;
    let open = |name: &str| -> Result<File> { volume.open_file(name, OpenFlags::CREATE) };
    let (file, table, index) = (open("/journal")?, open("/table")?, open("/index")?);
    open("/manifest.new")?;
    let (dir, page, root) = (Volume::ROOT, [7; 4096], [8; 64]);
    // README {
    // A ticket: wait for it, poll it, await it on any executor, or have it delivered to a queue with an eventfd.
    let ticket = file.fsync_async(0..65536, SyncKind::Data)?; // this range only; shares its flush with everybody
    ticket.wait()?;

    let lsn = volume.barrier()?; // all before is durable before anything after; waits for neither
    volume.ticket_for(lsn)?.wait()?; // durable now; without it, with whoever syncs next

    let mut batch = volume.batch(); // all or nothing, also across a crash
    batch.write_at(&table, 8192, &page)?;
    batch.write_at(&index, 0, &root)?;
    batch.rename(dir, b"manifest.new", dir, b"manifest", RenameMode::Replace)?;
    let ticket = batch.commit_async()?;

    file.sync_range(0..1 << 20, SyncRangeFlags::WRITE)?; // writeback begins; makes nothing durable
    // }
    ticket.wait()?;
    let mut read = [0; 64];
    assert_eq!(index.read_at(0, &mut read)?, 64);
    assert_eq!(read, root);
    assert_eq!(table.size(), 8192 + 4096);
    assert!(volume.lookup(dir, b"manifest").is_ok());
    assert!(volume.lookup(dir, b"manifest.new").is_err());
    drop((file, table, index));
    volume.close()
}

/// What stands between the lines that begin with `begin` and `end`, each time.
fn between(text: &str, begin: &str, end: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while lines.any(|line| line.trim() == begin) {
        let taken = lines.by_ref().take_while(|line| line.trim() != end);
        found.push(
            taken
                .map(|line| line.strip_prefix("    ").unwrap_or(line))
                .collect::<Vec<_>>()
                .join("\n"),
        );
    }
    found
}

#[test]
fn the_rust_of_the_readme_compiles_and_does_what_it_says() {
    let in_readme = between(README, "```rust", "```");
    assert_eq!(in_readme.len(), 2);
    assert_eq!(between(THIS, BEGIN, END), in_readme);

    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let dir = dir.join(format!("readme-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::env::set_current_dir(&dir).unwrap();
    first_steps().unwrap();
    without_waiting().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
