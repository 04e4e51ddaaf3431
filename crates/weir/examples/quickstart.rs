//! The whole life of a volume in one page: create it, write a file and make it durable, read it back after opening it again.
//!
//! ```text
//! cargo run -p weir --example quickstart
//! ```

use weir::{CreateOptions, OpenFlags, Volume, VolumeOptions};

fn main() -> weir::Result<()> {
    // A volume lives in an image file, as here, or on a block device.
    let directory = std::env::temp_dir().join(format!("weir-quickstart-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let image = directory.join("volume.weir");

    // `create` never replaces anything that is there. The size is the volume's; the image file is sparse.
    let size_bytes = Some(64 << 20);
    Volume::create(&image, &CreateOptions { size_bytes, ..CreateOptions::default() })?;

    {
        // One process at a time may have a volume open. A `Volume` can be cloned and used from any thread.
        let volume = Volume::open(&image, VolumeOptions::default())?;

        // Changes of the namespace are atomic and ordered, but none is durable by itself.
        volume.create_dir("/notes", 0o755)?;
        let file = volume.open_file("/notes/today", OpenFlags::CREATE)?;

        // A write goes to the cache ...
        file.write_at(0, b"The weir holds.\n")?;
        file.append(b"So does the data.\n")?;

        // ... and is durable when `fsync` returns, together with all changes of the namespace before: also the
        // directory and the file's name. This is one write and one flush of the device, shared with whoever
        // else syncs at the same moment.
        file.fsync()?;

        // `close` leaves an empty log. Without it, the next `open` replays what was synced: pull the plug
        // here, if you like.
        drop(file);
        volume.close()?;
    }

    let volume = Volume::open(&image, VolumeOptions::default())?;
    let file = volume.open_file("/notes/today", OpenFlags::READ)?;
    let mut text = vec![0; file.size() as usize];
    // Every block that comes from the device is checked against its checksum.
    file.read_at(0, &mut text)?;
    print!("{}", String::from_utf8_lossy(&text));

    for entry in volume.read_dir("/notes")? {
        let attr = volume.getattr(entry.ino)?;
        println!("{}: {} bytes", String::from_utf8_lossy(&entry.name), attr.size_bytes);
    }
    let space = volume.statfs();
    println!("{} of {} blocks are free", space.free_blocks, space.total_blocks);

    drop(file);
    volume.close()?;
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}
