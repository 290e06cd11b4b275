use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

#[cfg(test)]
use super::faults::{Disk, Image};

/// The file of a journal. Tests have its writes and syncs fail, and take the power away.
pub(super) struct JournalFile {
    file: File,
    #[cfg(test)]
    image: Image,
}

impl JournalFile {
    /// Opens the file for this user alone; never through a symbolic link.
    pub(super) fn open(path: &Path, anew: bool, #[cfg(test)] disk: &Disk) -> io::Result<Self> {
        let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).expect("a flag of open(2)");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(anew)
            .mode(0o600)
            .custom_flags(no_follow)
            .open(path)?;
        Ok(Self {
            #[cfg(test)]
            image: disk.image(&file)?,
            file,
        })
    }

    pub(super) fn read_to_end(&mut self, bytes: &mut Vec<u8>) -> io::Result<()> {
        self.file.read_to_end(bytes).map(drop)
    }

    pub(super) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    pub(super) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.image.before_write(&self.file, bytes, offset)?;
        self.file.write_all_at(bytes, offset)
    }

    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        #[cfg(test)]
        self.image.before_cut()?;
        self.file.set_len(len)
    }

    pub(super) fn sync_data(&self) -> io::Result<()> {
        #[cfg(test)]
        return self.image.sync(&self.file);
        #[cfg(not(test))]
        self.file.sync_data()
    }

    /// The file has the journal's name from now on, which a loss of power may take back.
    pub(super) fn named(&self) {
        #[cfg(test)]
        self.image.named();
    }
}

/// Has the names of files on the disk.
pub(super) fn sync_dir(dir: &Path, #[cfg(test)] disk: &Disk) -> io::Result<()> {
    #[cfg(test)]
    disk.sync_dir()?;
    File::open(dir)?.sync_all()
}
