use std::fmt;
use std::time::Duration;

use stagewire_core::{ByteCount, PayloadId};

use crate::SpillFault;

/// What an object in a store is doing with its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectState {
    /// It is being written; nobody can read it.
    Draft,
    /// It is complete and can be read.
    Sealed,
    /// It is deleted, or moved to a file, but somebody still reads it, so that its bytes are not free yet.
    Draining,
}

impl ObjectState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Draft, Self::Sealed, Self::Draining];
}

impl fmt::Display for ObjectState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draft => "being written",
            Self::Sealed => "sealed",
            Self::Draining => "gone but still read",
        })
    }
}

/// One object and the bytes that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The object.
    pub payload: PayloadId,
    /// Its bytes.
    pub nbytes: ByteCount,
    /// What it is doing with them.
    pub state: ObjectState,
}

/// A process that reads objects which are gone, so that their bytes are not free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The process; `None` for those of other hosts, together.
    pub pid: Option<u32>,
    /// Whether a signal or a debugger has stopped it, so that it lets go of nothing before it is continued, or killed.
    pub stopped: bool,
    /// Objects that it reads.
    pub objects: u64,
    /// Their bytes.
    pub nbytes: ByteCount,
    /// How long it has read the one that it has read longest.
    pub since: Duration,
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}")?,
            None => f.write_str("other hosts")?,
        }
        if self.stopped {
            f.write_str(", which is stopped: continue or kill it,")?;
        }
        write!(f, " for {:.1} s ({})", self.since.as_secs_f64(), self.nbytes)
    }
}

/// Number and bytes of the objects in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub nbytes: ByteCount,
}

impl Share {
    /// One object more.
    pub(crate) fn add(&mut self, nbytes: ByteCount) {
        self.objects += 1;
        self.nbytes += nbytes;
    }

    /// One object less.
    pub(crate) const fn take(&mut self, nbytes: ByteCount) {
        self.objects -= 1;
        self.nbytes.0 -= nbytes.0;
    }
}

/// What a store has in files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillUsage {
    /// Bytes of files at most.
    pub quota: ByteCount,
    /// Bytes of files, those included that are being written or removed.
    pub used: ByteCount,
    /// Objects that are being written, or wait for it.
    pub queue: u64,
    /// Whether the files go around the page cache. Where the file system cannot do that, reading and writing them takes
    /// memory besides.
    pub direct: bool,
    /// Why the last write failed, until another one goes well.
    pub fault: Option<SpillFault>,
}

impl fmt::Display for SpillUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} of files", self.used, self.quota)?;
        if self.queue > 0 {
            write!(f, ", {} being moved there", self.queue)?;
        }
        if !self.direct {
            f.write_str(", through the page cache")?;
        }
        match &self.fault {
            Some(fault) => write!(f, ", the last write failed: {fault}"),
            None => Ok(()),
        }
    }
}

/// What holds the space of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes that the store may hold.
    pub limit: ByteCount,
    /// Objects being written.
    pub drafts: Share,
    /// Objects that can be read.
    pub sealed: Share,
    /// Deleted objects whose bytes are not free yet.
    pub draining: Share,
    /// Room that is reserved; `objects` counts the reservations.
    pub reserved: Share,
    /// Objects in files, which take none of the limit.
    pub spilled: Share,
    /// The files; `None` where the store has none.
    pub spill: Option<SpillUsage>,
    /// The largest holders, largest first, at most [`Usage::LARGEST`].
    pub largest: Vec<Holding>,
    /// Who reads the objects that are gone, those with most bytes first, at most [`Usage::LARGEST`].
    pub readers: Vec<Reading>,
}

impl Usage {
    /// Length of [`Usage::largest`] and [`Usage::readers`].
    pub const LARGEST: usize = 5;

    /// Bytes held, in whatever state.
    pub fn used(&self) -> ByteCount {
        self.drafts.nbytes + self.sealed.nbytes + self.draining.nbytes + self.reserved.nbytes
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} held", self.used(), self.limit)?;
        let shares = [
            ("sealed", self.sealed),
            ("being written", self.drafts),
            ("gone but still read", self.draining),
            ("reserved", self.reserved),
            ("in files", self.spilled),
        ];
        for (what, share) in shares.into_iter().filter(|(_, share)| share.objects > 0) {
            write!(f, ", {} {what} ({})", share.objects, share.nbytes)?;
        }
        if let Some(spill) = &self.spill {
            write!(f, "; {spill}")?;
        }
        for (rank, holding) in self.largest.iter().enumerate() {
            let lead = if rank == 0 { "; largest: " } else { ", " };
            write!(f, "{lead}{} ({}, {})", holding.payload, holding.nbytes, holding.state)?;
        }
        for (rank, reading) in self.readers.iter().enumerate() {
            let lead = if rank == 0 {
                "; what is gone is still read by "
            } else {
                ", "
            };
            write!(f, "{lead}{reading}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_says_what_holds_the_space() {
        let share = |objects, mib: u64| Share {
            objects,
            nbytes: ByteCount(mib << 20),
        };
        let usage = Usage {
            limit: ByteCount(8 << 20),
            drafts: share(1, 1),
            sealed: share(1, 2),
            draining: share(1, 3),
            reserved: share(2, 1),
            spilled: share(4, 3),
            spill: Some(SpillUsage {
                quota: ByteCount(9 << 20),
                used: ByteCount(4 << 20),
                queue: 1,
                direct: false,
                fault: Some(SpillFault::new("write", "x.spill", rustix::io::Errno::NOSPC)),
            }),
            largest: vec![Holding {
                payload: "00000000-0000-0000-0000-000000000003".parse().expect("an id"),
                nbytes: ByteCount(3 << 20),
                state: ObjectState::Draining,
            }],
            readers: vec![Reading {
                pid: Some(7),
                stopped: true,
                objects: 1,
                nbytes: ByteCount(3 << 20),
                since: Duration::from_millis(1500),
            }],
        };
        assert_eq!(usage.used(), ByteCount(7 << 20));
        let text = usage.to_string();
        assert!(
            text.starts_with("7.0 MiB of 8.0 MiB held, 1 sealed (2.0 MiB), 1 being written"),
            "{text}"
        );
        assert!(
            text.contains("2 reserved (1.0 MiB), 4 in files (3.0 MiB); 4.0 MiB of 9.0 MiB of files"),
            "{text}"
        );
        assert!(
            text.contains(
                "1 being moved there, through the page cache, the last write failed: cannot write x.spill: No space"
            ),
            "{text}"
        );
        assert!(
            text.contains("largest: 00000000-0000-0000-0000-000000000003 (3.0 MiB, gone but still read)"),
            "{text}"
        );
        let reader =
            "; what is gone is still read by process 7, which is stopped: continue or kill it, for 1.5 s (3.0 MiB)";
        assert!(text.ends_with(reader), "{text}");
    }
}
