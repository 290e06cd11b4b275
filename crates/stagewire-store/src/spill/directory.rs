use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, flock, fstat, fsync, open, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::buffer::Buffer;
use super::{BLOCK, file};
use crate::SpillFault;

/// Names the store whose files are there.
const OWNER: &str = "store.id";

/// A directory that this process alone uses, for spill files.
#[derive(Debug)]
pub(super) struct Directory {
    /// Locked for as long as it is open.
    descriptor: OwnedFd,
    path: PathBuf,
    direct: bool,
}

impl Directory {
    pub(super) fn open(path: &Path) -> Result<Self, SpillFault> {
        let failed = |what| {
            move |error| SpillFault::Dir {
                what,
                path: path.to_owned(),
                error,
            }
        };
        match DirBuilder::new().mode(0o700).recursive(true).create(path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                let error = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return Err(failed("make")(error));
            }
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = open(path, flags, Mode::empty()).map_err(failed("open"))?;
        let found = fstat(&descriptor).map_err(failed("look at"))?;
        let insecure = |problem| SpillFault::Insecure {
            path: path.to_owned(),
            problem,
        };
        if found.st_uid != geteuid().as_raw() {
            return Err(insecure(format!("it belongs to user {}", found.st_uid)));
        }
        if found.st_mode & 0o077 != 0 {
            return Err(insecure(format!("its mode is {:o}", found.st_mode & 0o7777)));
        }
        match flock(&descriptor, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(SpillFault::InUse { path: path.to_owned() }),
            locked => locked.map_err(failed("lock"))?,
        }
        let mut directory = Self {
            descriptor,
            path: path.to_owned(),
            direct: true,
        };
        directory.direct = directory.try_direct()?;
        Ok(directory)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether files go around the page cache. Some file systems cannot.
    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    /// Tries out whether the file system takes direct writes and reads.
    fn try_direct(&self) -> Result<bool, SpillFault> {
        // Named as a spill file of nobody, so that it is swept when this process dies here.
        let name = file::name(stagewire_core::PayloadId(uuid::Uuid::nil()), rand::random());
        let mut buffer = Buffer::new(BLOCK);
        let tried = self.create(&name).and_then(|made| {
            rustix::io::pwrite(&made, buffer.bytes_mut(), 0)?;
            rustix::io::pread(self.find(&name)?, buffer.bytes_mut(), 0)
        });
        let _ = unlinkat(&self.descriptor, &name, AtFlags::empty());
        match tried {
            Ok(len) => Ok(len == BLOCK),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
            Err(error) => Err(self.fault("write", &name, error)),
        }
    }

    /// Makes it the directory of the store with this id; `None` is a store that leaves nothing behind.
    pub(super) fn claim(&self, id: Option<&str>) -> Result<(), SpillFault> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat(&self.descriptor, OWNER, flags | OFlags::RDONLY, Mode::empty()) {
            Ok(file) => {
                let mut found = String::new();
                let read = File::from(file).read_to_string(&mut found);
                read.map_err(|error| self.fault("read", OWNER, Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
                found
            }
            Err(Errno::NOENT) => {
                let Some(id) = id else { return Ok(()) };
                let flags = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
                let made = openat(&self.descriptor, OWNER, flags, Mode::RUSR | Mode::WUSR);
                let written = made.and_then(|file| rustix::io::write(&file, id.as_bytes()));
                return written.map(drop).map_err(|error| self.fault("write", OWNER, error));
            }
            Err(error) => return Err(self.fault("read", OWNER, error)),
        };
        if id == Some(found.as_str()) {
            return Ok(());
        }
        Err(SpillFault::Foreign {
            path: self.path.clone(),
            found,
            expected: id.unwrap_or("one that keeps nothing").to_owned(),
        })
    }

    /// Leaves it to any store.
    pub(super) fn disown(&self) -> Result<(), SpillFault> {
        self.remove(OWNER)
    }

    /// Removes spill files apart from those to keep; what has another name stays.
    pub(super) fn sweep(&self, keep: &BTreeSet<String>) -> Result<(), SpillFault> {
        let failed = |error| SpillFault::new("list", &self.path, error);
        for entry in Dir::read_from(&self.descriptor).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if let Ok(name) = entry.file_name().to_str()
                && file::parse(name).is_some()
                && !keep.contains(name)
            {
                self.remove(name)?;
            }
        }
        Ok(())
    }

    /// A new file, for writing.
    pub(super) fn create(&self, name: &str) -> Result<OwnedFd, Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        openat(&self.descriptor, name, flags | self.flags(), Mode::RUSR | Mode::WUSR)
    }

    /// A file that is there, for reading.
    pub(super) fn find(&self, name: &str) -> Result<OwnedFd, Errno> {
        openat(&self.descriptor, name, OFlags::RDONLY | self.flags(), Mode::empty())
    }

    fn flags(&self) -> OFlags {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if self.direct { flags | OFlags::DIRECT } else { flags }
    }

    /// Removes a file; gone already is as good.
    pub(super) fn remove(&self, name: &str) -> Result<(), SpillFault> {
        match unlinkat(&self.descriptor, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.fault("remove", name, error)),
        }
    }

    /// Has the names of the files on the disk.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        fsync(self.descriptor.as_fd())
    }

    pub(super) fn fault(&self, what: &'static str, name: &str, error: Errno) -> SpillFault {
        SpillFault::new(what, self.path.join(name), error)
    }

    /// What a panic that was reported where it happened is to who waits for the end.
    pub(super) fn panicked(&self, what: &'static str, name: &str) -> SpillFault {
        let path = self.path.join(name);
        SpillFault::Panicked { what, path }
    }
}
