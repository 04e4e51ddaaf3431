//! One mount, from attaching to the last answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::dispatch::Dispatcher;
use crate::error::{MountError, UnmountError};
use crate::fuser_transport::FuserTransport;
use crate::mount_point;
use crate::ops::FileSystemOps;
use crate::options::MountOptions;

/// A mount that is attached: requests wait until [`Session::serve`] runs. Dropping it unserved takes
/// it off.
pub struct Session {
    inner: Option<fuser::Session<FuserTransport>>,
    dispatcher: Arc<Dispatcher>,
    controller: Controller,
}

/// Takes a mount off from any thread.
#[derive(Debug, Clone)]
pub struct Controller {
    dir: PathBuf,
    device: String,
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
    let reporter = Arc::clone(&ops);
    let dispatcher = Dispatcher::new(threads, move |what| reporter.panicked(what));
    let transport = FuserTransport::new(ops, Arc::clone(&dispatcher), options.transport);

    let connection = mount_point::attach(&dir, options)?;
    // From here on an error must take the mount off again.
    let mounted = start(transport, connection, options, threads).and_then(|inner| {
        let entry = mount_point::mount_at(&dir).map_err(MountError::Session)?;
        let device = entry.map_or_else(String::new, |entry| entry.device);
        Ok((inner, device))
    });
    match mounted {
        Ok((inner, device)) => {
            mount_point::set_read_ahead(&device, options.transport.max_write_bytes);
            Ok(Session { inner: Some(inner), dispatcher, controller: Controller { dir, device } })
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
    connection: std::os::fd::OwnedFd,
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
    /// the operations any more.
    pub fn serve(mut self) -> Result<(), MountError> {
        let Some(inner) = self.inner.take() else { return Ok(()) };
        let result = inner.run();
        self.dispatcher.close();
        if result.is_err() {
            // A transport thread gave up: without it the mount would only look alive.
            let _ = self.controller.unmount(true);
        }
        result.map_err(MountError::Session)
    }
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
    /// and is served until its last user is done. Never touches another mount at the same place.
    pub fn unmount(&self, lazy: bool) -> Result<(), UnmountError> {
        let entry = mount_point::mount_at(&self.dir).map_err(UnmountError::Io)?;
        if entry.is_none_or(|entry| entry.device != self.device) {
            return Err(UnmountError::NotMounted);
        }
        mount_point::detach(&self.dir, lazy)
    }
}
