//! One mount, from attaching to the last answer.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::dispatch::Dispatcher;
use crate::error::{MountError, UnmountError};
use crate::fuser_transport::FuserTransport;
use crate::kernel_cache::FuserKernelCache;
use crate::mount_point;
use crate::ops::FileSystemOps;
use crate::options::MountOptions;
use crate::uring::serve::Server;
use crate::uring::{Rings, Switch};

/// A mount that is attached: requests wait until [`Session::serve`] runs. Dropping it unserved takes
/// it off.
pub struct Session {
    inner: Option<fuser::Session<FuserTransport>>,
    /// Keeps the way to the kernel open for [`FileSystemOps::mounted`].
    _kernel: Arc<FuserKernelCache>,
    /// Rings that are to be served, and the connection they belong to.
    rings: Option<(Rings, OwnedFd, Arc<Server>)>,
    dispatcher: Arc<Dispatcher>,
    controller: Controller,
    /// Given back when it is served: see [`SPARE_DESCRIPTORS`].
    spare: Vec<OwnedFd>,
}

/// Descriptors for what a mount looks up while it is served (its place, who uses it), besides one for each of its threads. Who has no room for
/// these has no mount: it would end, or could not be ended, when it first needs one.
const SPARE_DESCRIPTORS: usize = 8;

/// Takes a mount off from any thread.
#[derive(Debug, Clone)]
pub struct Controller {
    dir: PathBuf,
    /// Its number, which the kernel gives to the next mount once this one is gone.
    device: String,
    /// The number that no other mount will have; `None`: the kernel has none.
    unique_id: Option<u64>,
    connection: Weak<OwnedFd>,
}

/// One thread per core, and never one alone: it could not read a request while it waits.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// Mounts `ops` at `dir`.
pub fn mount(
    dir: &Path,
    ops: Arc<dyn FileSystemOps>,
    options: &MountOptions,
) -> Result<Session, MountError> {
    let shown = dir.display();
    let dir = dir.canonicalize().map_err(|error| {
        MountError::Directory(format!("{shown}: {error}: the mount point must exist"))
    })?;
    if !dir.is_dir() {
        return Err(MountError::Directory(format!("{shown}: not a directory")));
    }
    let threads = options.transport.threads.unwrap_or_else(default_threads);
    let transport_options = options.transport;
    // The parameter is turned last: who cannot have rings leaves it alone.
    let rings = if transport_options.io_uring {
        Rings::new(transport_options.max_write_bytes).and_then(|rings| Some((rings, Switch::on()?)))
    } else {
        None
    };
    let (rings, switch) = rings.unzip();
    let taken = Arc::new(AtomicBool::new(rings.is_some()));
    let own_threads = threads + rings.as_ref().map_or(0, Rings::count);
    let (reporter, served) = (Arc::clone(&ops), Arc::clone(&ops));
    let dispatcher = Dispatcher::new(threads, move |what| reporter.panicked(what));
    let transport =
        FuserTransport::new(ops, Arc::clone(&dispatcher), transport_options, Arc::clone(&taken));

    let connection = mount_point::attach(&dir, options)?;
    let (for_rings, for_notes) = (connection.try_clone(), connection.try_clone());
    // From here on an error must take the mount off again.
    let mounted = start(transport, connection, options, threads).and_then(|inner| {
        let for_notes = for_notes.map_err(MountError::Session)?;
        let entry = mount_point::mount_at(&dir).map_err(MountError::Session)?;
        let device = entry.map_or_else(String::new, |entry| entry.device);
        let spare = (0..own_threads + SPARE_DESCRIPTORS).map(|_| for_notes.try_clone());
        let spare = spare.collect::<io::Result<_>>().map_err(MountError::Session)?;
        Ok((inner, device, Arc::new(for_notes), spare))
    });
    // The kernel has said what it offers.
    drop(switch);
    match mounted {
        Ok((inner, device, for_notes, spare)) => {
            mount_point::set_read_ahead(&device, options.transport.max_write_bytes);
            let unique_id = mount_point::unique_id(&dir);
            let connection = Arc::downgrade(&for_notes);
            let kernel = Arc::new(FuserKernelCache::new(
                inner.notifier(),
                for_notes,
                transport_options.writeback_cache,
            ));
            let weak: Weak<FuserKernelCache> = Arc::downgrade(&kernel);
            served.mounted(weak);
            let controller = Controller { dir, device, unique_id, connection };
            let rings = match (rings, for_rings) {
                (Some(rings), Ok(connection)) if taken.load(Ordering::Relaxed) => {
                    let server = Server::new(served, transport_options, rings.count());
                    Some((rings, connection, Arc::new(server)))
                }
                _ => None,
            };
            let inner = Some(inner);
            Ok(Session { inner, _kernel: kernel, rings, dispatcher, controller, spare })
        }
        Err(error) => {
            // The first error is the one to report.
            let _ = mount_point::detach(&dir, true);
            Err(error)
        }
    }
}

fn start(
    transport: FuserTransport,
    connection: OwnedFd,
    options: &MountOptions,
    threads: usize,
) -> Result<fuser::Session<FuserTransport>, MountError> {
    let mut config = fuser::Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    let privileged = rustix::process::geteuid().is_root();
    config.acl = if options.allow_other.unwrap_or(privileged) {
        fuser::SessionACL::All
    } else {
        fuser::SessionACL::Owner
    };
    let acl = config.acl;
    fuser::Session::from_fd(transport, connection, acl, config).map_err(MountError::Session)
}

impl Session {
    /// The mount point, canonical.
    pub fn dir(&self) -> &Path {
        &self.controller.dir
    }

    /// Something that can end this mount from another thread.
    pub fn controller(&self) -> Controller {
        self.controller.clone()
    }

    /// Serves requests until the mount is taken off, by whomever. When this returns, nobody calls
    /// the operations any more. The threads that read `/dev/fuse` take the signals that the calling one takes; the others
    /// take none of the program's.
    pub fn serve(mut self) -> Result<(), MountError> {
        let Some(inner) = self.inner.take() else { return Ok(()) };
        self.spare.clear();
        let rings = self.rings.take();
        let server = rings.as_ref().map(|(_, _, server)| Arc::clone(server));
        let controller = self.controller.clone();
        let running = rings.map(|(rings, connection, server)| {
            rings.start(&connection, &server, move || controller.abort())
        });
        let running = match running.transpose() {
            Ok(running) => running,
            Err(error) => {
                // The kernel waits for rings that will not come.
                let _ = self.controller.abort();
                let _ = self.controller.unmount(true);
                return Err(MountError::Session(error));
            }
        };
        let mut result = unless_ended(inner.run());
        if let Some(running) = running {
            result = result.and(running.join());
        }
        if let Some(server) = server {
            server.close();
        }
        self.dispatcher.close();
        if result.is_err() {
            // A transport thread gave up: without it the mount would only look alive.
            let _ = self.controller.unmount(true);
        }
        result.map_err(MountError::Session)
    }
}

/// The end of the mount is no error. Who waits for a request then gets `ENODEV`, which the transport knows; who is just taking one from the
/// kernel, the last that nobody waits for, gets `ECONNABORTED`.
fn unless_ended(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| match error.raw_os_error() {
        Some(libc::ECONNABORTED) => Ok(()),
        _ => Err(error),
    })
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            let _ = self.controller.unmount(true);
            self.dispatcher.close();
        }
    }
}

impl Controller {
    /// The mount point, canonical.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unmounts; refused when someone uses it, unless `lazy`: then it disappears from the tree now,
    /// and is served until its last user is done. Never touches another mount at the same place, and
    /// finds its own where a directory above it was renamed.
    pub fn unmount(&self, lazy: bool) -> Result<(), UnmountError> {
        let places = self.places()?;
        // Where it was mounted, rather than where somebody has bound it to.
        let place = places.iter().find(|dir| **dir == self.dir).or(places.first());
        let Some(dir) = place else { return Err(UnmountError::NotMounted) };
        let covered = || UnmountError::Covered(dir.display().to_string());
        let on_top = mount_point::mount_at(dir).map_err(UnmountError::Io)?;
        if on_top.is_none_or(|entry| entry.device != self.device) {
            return Err(covered());
        }
        match mount_point::detach(dir, lazy) {
            // Something is mounted above it; or somebody else was faster.
            Err(UnmountError::NotMounted | UnmountError::Io(_)) if self.is_at(dir) => {
                Err(covered())
            }
            detached => detached,
        }
    }

    /// Where this mount can be seen now, by this process.
    fn places(&self) -> Result<Vec<PathBuf>, UnmountError> {
        let entries = mount_point::mounts_of(&self.device).map_err(UnmountError::Io)?;
        let places: Vec<_> = entries.into_iter().map(|entry| entry.dir).collect();
        // Asked for behind the list: whose connection lives then had the number while the list was made.
        let is_ours = self.is_connected() || places.iter().any(|place| self.has_our_id(place));
        Ok(if is_ours { places } else { Vec::new() })
    }

    /// Whether the kernel still sends requests. It ends that before it gives the device's number away.
    fn is_connected(&self) -> bool {
        self.connection.upgrade().is_some_and(|connection| mount_point::is_connected(&connection))
    }

    /// What is aborted stays where it is until it is taken off. Without numbers of their own (before Linux 6.8) the device's has to do.
    fn has_our_id(&self, place: &Path) -> bool {
        self.unique_id.is_none_or(|ours| mount_point::unique_id(place) == Some(ours))
    }

    fn is_at(&self, dir: &Path) -> bool {
        self.places().is_ok_and(|places| places.iter().any(|place| place == dir))
    }

    /// Through which other mount it can be reached still, for people; `None`: none is known.
    pub fn held_by(&self) -> Option<String> {
        self.is_connected().then(|| mount_point::held_by(&self.device)).flatten()
    }

    /// Ends the connection to the kernel: whoever uses the mount gets errors.
    pub fn abort(&self) -> io::Result<()> {
        if !self.is_connected() {
            return Ok(());
        }
        mount_point::abort(&self.dir, &self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_the_end_of_the_mount_overtakes_is_no_error_and_all_else_is() {
        let run = |number| unless_ended(Err(io::Error::from_raw_os_error(number)));
        assert!(unless_ended(Ok(())).is_ok() && run(libc::ECONNABORTED).is_ok());
        for number in [libc::EIO, libc::EPERM, libc::EINVAL] {
            assert_eq!(run(number).unwrap_err().raw_os_error(), Some(number));
        }
    }
}
