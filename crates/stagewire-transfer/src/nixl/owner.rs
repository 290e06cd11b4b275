//! The owner's half: answers readers over the control connection.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;

use super::message::{Answer, NUMBERS, Part, Question};
use super::registry::Registry;
use super::version::NixlVersion;
use crate::network::Placer;
use crate::process::{ProcessWatch, host_id};
use crate::table::{Hold, RegionKey};
use crate::wire::{self, Place};

/// How long memory stays after the control connection of a reader broke that held its metadata, unless the reader's
/// process is known to have ended. The reader posts nothing from the same moment on; what it had posted before is over,
/// or its connections are broken, long before.
const LINGER: Duration = Duration::from_secs(60);

/// How long memory that a reader could write stays after its process ended: over TCP, its last bytes may still be in the
/// sockets of this host.
const LAST_BYTES: Duration = Duration::from_secs(10);

/// Answers for this process.
pub(super) struct Owner {
    registry: Arc<Registry>,
    name: String,
    version: NixlVersion,
    connection: Vec<u8>,
    host: String,
    regions: Mutex<HashMap<RegionKey, u64>>,
    /// Readers that are processes of this host.
    readers: Mutex<HashMap<u128, ProcessWatch>>,
}

impl Owner {
    pub(super) fn new(registry: Arc<Registry>, name: String, version: NixlVersion, connection: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            registry,
            name,
            version,
            connection,
            host: host_id(),
            regions: Mutex::default(),
            readers: Mutex::default(),
        })
    }

    /// What ends a registration together with its region, and where that region's key goes once it is known.
    pub(super) fn guard(self: &Arc<Self>, number: u64) -> (EndGuard, Arc<OnceLock<RegionKey>>) {
        let key = Arc::new(OnceLock::new());
        let guard = EndGuard {
            owner: self.clone(),
            number,
            key: key.clone(),
        };
        (guard, key)
    }

    /// Tells which registration is behind a region.
    pub(super) fn announce(&self, key: RegionKey, number: u64) {
        lock(&self.regions).insert(key, number);
    }

    fn number(&self, hold: &Hold) -> Option<u64> {
        lock(&self.regions).get(&hold.key()).copied()
    }

    fn answer(&self, session: u128, question: Question) -> Result<Answer, String> {
        match question {
            Question::Greet { process, host } => {
                if host == self.host
                    && let Ok(watch) = ProcessWatch::open(process)
                {
                    lock(&self.readers).insert(session, watch);
                }
                Ok(Answer::Greeted {
                    agent: self.name.clone(),
                    version: self.version.clone(),
                })
            }
            Question::Connection { from } => Ok(Answer::Connection(Part::of(&self.connection, from))),
            Question::Registration { number, from } => {
                let (span, metadata) = self.registry.hold(session, number)?;
                Ok(Answer::Registration {
                    span,
                    part: Part::of(&metadata, from),
                })
            }
            Question::Unused { numbers } => {
                let numbers = &numbers[..numbers.len().min(NUMBERS)];
                Ok(Answer::Wanted {
                    numbers: self.registry.ended(numbers),
                })
            }
            Question::Forgotten { numbers } => {
                self.registry.forgotten(session, &numbers);
                Ok(Answer::Done)
            }
        }
    }
}

impl Placer for Owner {
    fn place(&self, hold: &Arc<Hold>) -> Result<Place, String> {
        let number = self
            .number(hold)
            .ok_or("it does not know the registration of this region")?;
        self.registry.pinned(hold.session(), number);
        Ok(Place::Address(number))
    }

    fn unpinned(&self, hold: &Arc<Hold>) {
        if let Some(number) = self.number(hold) {
            self.registry.unpinned(hold.session(), number);
        }
    }

    fn asked(&self, session: u128, message: Vec<u8>) -> BoxFuture<'static, Result<Vec<u8>, String>> {
        let question = wire::decode(&message).map_err(|error| error.to_string());
        let answer = question.and_then(|question| self.answer(session, question));
        let answer = answer.map(|answer| wire::encode(&answer));
        Box::pin(async move { answer })
    }

    fn ended(&self, session: u128) {
        let reader = lock(&self.readers).remove(&session);
        let registry = self.registry.clone();
        if !registry.is_holder(session) {
            return registry.cut_off(session);
        }
        tokio::spawn(async move {
            let died = async {
                match &reader {
                    Some(reader) => reader.died().await,
                    None => std::future::pending().await,
                }
            };
            if tokio::time::timeout(LINGER, died).await.is_ok() {
                // There is no process that could still read the memory.
                registry.cut_off_from_reading(session);
                if registry.is_holder(session) {
                    tokio::time::sleep(LAST_BYTES).await;
                }
            }
            registry.cut_off(session);
        });
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// Part of a region: dropped, its registration ends as soon as no peer has its metadata.
pub(super) struct EndGuard {
    owner: Arc<Owner>,
    number: u64,
    key: Arc<OnceLock<RegionKey>>,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        if let Some(key) = self.key.get() {
            lock(&self.owner.regions).remove(key);
        }
        self.owner.registry.end(self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
