use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stagewire_core::{Device, Record};
use tokio::time::timeout;

use super::MooncakeError;
use super::data::{ExchangeError, Job, Local, Operation, Pool, PoolError, Unsettled};
use super::handshake::{Alive, AskError, Descriptor, DescriptorError, MessageKind, Notification, ask, to_json};
use crate::budget::Budget;
use crate::copy::{Plan, Shape};
use crate::host::Counters;
use crate::transport::Direction;
use crate::wire::Kind;
use crate::{ConnectOptions, Memory, Target, TransferError, TransferOptions};

const KIND: Kind = Kind::Mooncake;

/// One request per run of bytes, however long.
pub(super) const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// Memory of a Mooncake peer, by its address there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentBuffer {
    /// Address of the first byte, in that process.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

/// A peer that speaks Mooncake, be it a Transfer Engine or this crate, and what it listed when it was opened.
///
/// The protocol has no capabilities, generations or incarnations: whoever reaches the peer may read and write all memory
/// registered there, and an address means whatever is registered at it now. Exchange digests where that matters.
pub struct Segment {
    name: String,
    buffers: Vec<SegmentBuffer>,
    pool: Pool,
    budget: Budget,
    counters: Arc<Counters>,
    lost: OnceLock<String>,
}

impl Segment {
    /// Asks a peer how to reach its memory.
    pub(super) async fn open(
        name: &str,
        connections: usize,
        counters: &Arc<Counters>,
        options: &ConnectOptions,
    ) -> Result<Self, MooncakeError> {
        let answer = said(name, MessageKind::Metadata, b"{}", options.deadline).await?;
        let descriptor = Descriptor::parse(&answer).map_err(|error| match error {
            DescriptorError::Version { found } => MooncakeError::Version {
                segment: name.to_owned(),
                found,
            },
            error => MooncakeError::Descriptor {
                segment: name.to_owned(),
                problem: error.to_string(),
            },
        })?;
        let buffers = descriptor.buffers.iter().map(|buffer| SegmentBuffer {
            address: buffer.addr,
            len: buffer.length,
        });
        let host = descriptor.data_host.unwrap_or_else(|| host_of(name).to_owned());
        Ok(Self {
            name: name.to_owned(),
            buffers: buffers.collect(),
            pool: Pool::new(host, descriptor.data_port, connections),
            budget: Budget::new(counters.in_flight_limit(), counters.clone()),
            counters: counters.clone(),
            lost: OnceLock::new(),
        })
    }

    /// `host:port` of its handshake port.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The memory that it listed when it was opened. What it registers later can be used too, at the address that the
    /// peer tells by other means.
    pub fn buffers(&self) -> &[SegmentBuffer] {
        &self.buffers
    }

    /// Why it is of no use any more: its data port does not answer. Opening the name again asks the peer anew.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Copies records of the peer's memory into `dst`. Either all of them arrive, or there is an error and no byte counts
    /// as written. What the peer changes meanwhile may arrive mixed.
    ///
    /// # Errors
    /// [`MooncakeError`].
    ///
    /// # Cancel safety
    /// A dropped future writes nothing any more.
    pub async fn pull(
        &self,
        src: SegmentBuffer,
        records: &[Record],
        dst: &Target,
        options: TransferOptions,
    ) -> Result<(), MooncakeError> {
        let attempt = self.counters.meter(KIND).begin(Direction::Pull);
        host_memory(dst.device())?;
        self.addressable(src)?;
        let (plan, written) = Plan::new(records, src.len, dst.len(), SHAPE)?;
        let mut claim = dst.claim(written).map_err(TransferError::from)?;
        let job = Job {
            operation: Operation::Read,
            remote: src.address,
            local: Local(claim.base()),
            pieces: &plan.pieces(),
        };
        let unsettled = Unsettled::default();
        let running = async {
            claim.spend(self.budget.spend(KIND, plan.bytes()).await);
            // SAFETY: the plan was made for these lengths; the claim reserves the bytes and outlives the future.
            unsafe { self.pool.run(&job, &unsettled) }.await
        };
        within(&options, running)
            .await
            .ok_or_else(|| self.late("the pull", &options))?
            .map_err(|error| self.failed(error))?;
        claim.commit();
        attempt.succeeded(plan.bytes());
        Ok(())
    }

    /// Copies records of `src` into the peer's memory: their source offsets are in `src`, their destination offsets in
    /// `dst`. Succeeds once the peer said that the last byte is in place.
    ///
    /// # Errors
    /// [`MooncakeError::InDoubt`] where the peer was sent bytes and did not answer, in time or at all: they may be written
    /// much later. Else [`MooncakeError`]; part of the bytes may have been written, and no more will be.
    ///
    /// # Cancel safety
    /// As after [`MooncakeError::InDoubt`]. `src` is not read any more.
    pub async fn push(
        &self,
        dst: SegmentBuffer,
        records: &[Record],
        src: &Memory,
        options: TransferOptions,
    ) -> Result<(), MooncakeError> {
        let attempt = self.counters.meter(KIND).begin(Direction::Push);
        host_memory(src.device())?;
        self.addressable(dst)?;
        let (plan, _) = Plan::new(records, src.len(), dst.len, SHAPE)?;
        let job = Job {
            operation: Operation::Write,
            remote: dst.address,
            local: Local(src.as_ptr()),
            pieces: &plan.pieces(),
        };
        let unsettled = Unsettled::default();
        let running = async {
            let _spent = self.budget.spend(KIND, plan.bytes()).await;
            // SAFETY: the plan was made for these lengths; `src` is borrowed until the future is done or dropped.
            unsafe { self.pool.run(&job, &unsettled) }.await
        };
        let error = match within(&options, running).await {
            Some(Ok(())) => {
                attempt.succeeded(plan.bytes());
                return Ok(());
            }
            Some(Err(error)) => self.failed(error),
            None => self.late("the push", &options),
        };
        if !unsettled.any() {
            return Err(error);
        }
        Err(MooncakeError::InDoubt {
            segment: self.name.clone(),
            bytes: plan.bytes(),
            how: error.to_string(),
        })
    }

    /// Sends a notification, and waits until the peer has taken it.
    ///
    /// # Errors
    /// [`MooncakeError`]; with [`MooncakeError::HandshakeDeadline`] the peer may have taken it, or take it later.
    ///
    /// # Cancel safety
    /// As after that error.
    pub async fn notify(&self, notification: &Notification, options: ConnectOptions) -> Result<(), MooncakeError> {
        let kind = MessageKind::Notify;
        let answer = said(&self.name, kind, &to_json(notification), options.deadline).await?;
        match Notification::parse(&answer) {
            Ok(answer) if answer == Notification::taken() => Ok(()),
            Ok(answer) => Err(unanswered(&self.name, kind, format!("it says {:?}", answer.message))),
            Err(error) => Err(unanswered(&self.name, kind, error.to_string())),
        }
    }

    /// Asks whether the peer lives.
    ///
    /// # Errors
    /// [`MooncakeError`] where it does not answer.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn probe(&self, options: ConnectOptions) -> Result<(), MooncakeError> {
        let kind = MessageKind::Probe;
        let answer = said(&self.name, kind, b"{}", options.deadline).await?;
        match Alive::parse(&answer) {
            Ok(alive) if alive == Alive::success() => Ok(()),
            Ok(alive) => Err(unanswered(&self.name, kind, format!("{alive:?}"))),
            Err(error) => Err(unanswered(&self.name, kind, error.to_string())),
        }
    }

    /// Refuses memory that leaves 64-bit addresses, as the peer would.
    fn addressable(&self, buffer: SegmentBuffer) -> Result<(), MooncakeError> {
        let SegmentBuffer { address, len } = buffer;
        let rejected = || MooncakeError::Rejected {
            segment: self.name.clone(),
            address,
            len,
        };
        address.checked_add(len).map(drop).ok_or_else(rejected)
    }

    fn late(&self, what: &'static str, options: &TransferOptions) -> MooncakeError {
        MooncakeError::Deadline {
            segment: self.name.clone(),
            what,
            after: options.deadline.unwrap_or_default(),
        }
    }

    fn failed(&self, error: PoolError) -> MooncakeError {
        let segment = self.name.clone();
        match error {
            PoolError::Exchange(ExchangeError::Rejected { addr: address, len }) => {
                MooncakeError::Rejected { segment, address, len }
            }
            PoolError::Exchange(error @ (ExchangeError::Status(_) | ExchangeError::Version)) => {
                MooncakeError::Protocol {
                    segment,
                    problem: error.to_string(),
                }
            }
            PoolError::Exchange(error) => MooncakeError::Lost {
                segment,
                how: chain(&error),
            },
            PoolError::Connect { .. } => {
                let how = format!("{}; open it again once it is back", chain(&error));
                // The first reason stands.
                let _ = self.lost.set(how.clone());
                MooncakeError::Lost { segment, how }
            }
        }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("name", &self.name)
            .field("buffers", &self.buffers)
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

fn host_memory(device: Device) -> Result<(), TransferError> {
    let transport = KIND.name();
    match device {
        Device::Cpu => Ok(()),
        device => Err(TransferError::Device { transport, device }),
    }
}

async fn within<T>(options: &TransferOptions, future: impl Future<Output = T>) -> Option<T> {
    match options.deadline {
        Some(deadline) => timeout(deadline, future).await.ok(),
        None => Some(future.await),
    }
}

/// What a peer's handshake port answers.
async fn said(name: &str, kind: MessageKind, json: &[u8], deadline: Duration) -> Result<Vec<u8>, MooncakeError> {
    ask(name, kind, json, deadline).await.map_err(|error| match error {
        AskError::NoAnswer(_) | AskError::NoConnection(_) => MooncakeError::HandshakeDeadline {
            segment: name.to_owned(),
            what: kind.name(),
            problem: error.to_string(),
        },
        error => unanswered(name, kind, error.to_string()),
    })
}

fn unanswered(name: &str, kind: MessageKind, problem: String) -> MooncakeError {
    MooncakeError::Handshake {
        segment: name.to_owned(),
        what: kind.name(),
        problem,
    }
}

/// An error and what caused it, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}

/// The host in `host:port`; of an IPv6 address, what is inside the brackets.
fn host_of(name: &str) -> &str {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_names() {
        assert_eq!(host_of("127.0.0.1:80"), "127.0.0.1");
        assert_eq!(host_of("[::1]:80"), "::1");
        assert_eq!(host_of("node-7"), "node-7");
    }
}
