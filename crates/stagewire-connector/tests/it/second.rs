//! A second process: this test binary runs again, as the one test below, and does what it is asked over its pipes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use stagewire_connector::{
    Carrier, Connector, ConnectorOptions, ConsumeOptions, Consumer, Owner, Publication, PublishSpec, StoreService,
};
use stagewire_core::{ByteCount, Classify, Failure, Handle, PayloadId, Peer, StageName, Token};
use stagewire_store::{HostStore, Store, TokenGate};
use stagewire_transfer::{NetworkOptions, Secret};

use crate::PATIENCE;
use crate::bundle::Bundle;
use crate::process::{self, Process};

const RUN_DIR: &str = "STAGEWIRE_TEST_SECOND_PROCESS";
const TRANSPORTS: &str = "STAGEWIRE_TEST_TRANSPORTS";
const TOKEN: &str = "STAGEWIRE_TEST_TOKEN";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    Peer,
    Publish {
        bundle: Bundle,
        owner: Owner,
        open: bool,
        deadline: Option<Duration>,
    },
    Ready {
        payload: PayloadId,
        chunk: u32,
    },
    Fail {
        payload: PayloadId,
        failure: Failure,
    },
    Abandon {
        payload: PayloadId,
    },
    Release {
        payload: PayloadId,
    },
    Consume {
        handle: Vec<u8>,
        chunks: u32,
    },
    /// Lets go of every consumer, whatever it is at.
    DropConsumers,
    ServeStore {
        limit: ByteCount,
        closed: bool,
    },
    Grant {
        token: Token,
    },
    Discard {
        token: Token,
    },
    UseStore {
        peer: Peer,
    },
    Store {
        payload: PayloadId,
        token: Option<Token>,
        wait: Duration,
    },
    Stats,
    Close,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Peer(Peer),
    Handle(Vec<u8>),
    Leftovers(Vec<(String, u64)>),
    Failed(Failure),
}

/// The second process, as the first sees it. Dropped, it is killed.
pub(crate) struct Second(Process);

impl Second {
    pub(crate) async fn start(run_dir: &Path, transports: &[Carrier]) -> Self {
        Self::start_by(&[], run_dir, transports, None).await
    }

    /// By a command that runs it, such as `unshare --pid`, and with a token for its network.
    pub(crate) async fn start_by(by: &[&str], run_dir: &Path, transports: &[Carrier], token: Option<&str>) -> Self {
        let transports: Vec<_> = transports.iter().map(|carrier| carrier.name()).collect();
        let mut env = vec![(RUN_DIR, run_dir.into()), (TRANSPORTS, transports.join(",").into())];
        env.extend(token.map(|token| (TOKEN, token.into())));
        Self(Process::start(by, "second::second_process", &env))
    }

    /// Asks without waiting for the answer.
    pub(crate) async fn tell(&mut self, ask: &Ask) {
        self.0.tell(ask).await;
    }

    pub(crate) async fn ask(&mut self, ask: Ask) -> Answer {
        self.0.ask(&ask, PATIENCE).await
    }

    pub(crate) async fn done(&mut self, ask: Ask) {
        let shown = format!("{ask:?}");
        match self.ask(ask).await {
            Answer::Done => {}
            other => panic!("{shown}: {other:?}"),
        }
    }

    /// Asks for something that must be refused.
    pub(crate) async fn refused(&mut self, ask: Ask) -> Failure {
        match self.ask(ask).await {
            Answer::Failed(failure) => failure,
            other => panic!("it was done: {other:?}"),
        }
    }

    pub(crate) async fn peer(&mut self) -> Peer {
        match self.ask(Ask::Peer).await {
            Answer::Peer(peer) => peer,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn handle(&mut self, ask: Ask) -> Handle {
        match self.ask(ask).await {
            Answer::Handle(handle) => Handle::from_bytes(&handle).expect("its own handle"),
            other => panic!("{other:?}"),
        }
    }

    /// Publishes a complete bundle for an orchestrator.
    pub(crate) async fn publish(&mut self, bundle: &Bundle, owner: Owner) -> Handle {
        let ask = Ask::Publish {
            bundle: bundle.clone(),
            owner,
            open: false,
            deadline: None,
        };
        self.handle(ask).await
    }

    pub(crate) async fn open(&mut self, bundle: &Bundle, owner: Owner) -> Handle {
        let ask = Ask::Publish {
            bundle: bundle.clone(),
            owner,
            open: true,
            deadline: None,
        };
        self.handle(ask).await
    }

    pub(crate) async fn ready(&mut self, handle: &Handle, chunk: u32) {
        self.done(Ask::Ready {
            payload: handle.payload,
            chunk,
        })
        .await;
    }

    /// Waits until nothing is left there.
    pub(crate) async fn all_gone(&mut self) {
        let begin = tokio::time::Instant::now();
        loop {
            match self.ask(Ask::Stats).await {
                Answer::Leftovers(left) if left.is_empty() => return,
                Answer::Leftovers(left) => assert!(begin.elapsed() < PATIENCE, "left over: {left:?}"),
                other => panic!("{other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.0.signal(signal);
    }

    /// `kill -9`, and waits until it is dead.
    pub(crate) async fn kill(self) {
        self.0.kill().await;
    }
}

struct Served {
    connector: Arc<Connector>,
    publications: BTreeMap<PayloadId, Publication>,
    consumers: Vec<Consumer>,
    store: Option<Arc<StoreService>>,
}

#[test]
#[ignore = "the second process of the other tests"]
fn second_process() {
    let Some(run_dir) = std::env::var_os(RUN_DIR) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let transports = std::env::var(TRANSPORTS).expect("told by the first process");
        let transports = transports.split(',').map(|name| name.parse().expect("a transport"));
        let options = ConnectorOptions {
            arena_limit: ByteCount(64 << 20),
            transports: transports.collect(),
            network: NetworkOptions {
                token: std::env::var(TOKEN).ok().map(Secret::new),
                ..NetworkOptions::default()
            },
            ..ConnectorOptions::new(run_dir, StageName::new("denoise").expect("a name"))
        };
        let mut served = Served {
            connector: Connector::start(options).await.expect("a connector"),
            publications: BTreeMap::new(),
            consumers: Vec::new(),
            store: None,
        };
        process::serve(async |ask| served.answer(ask).await.unwrap_or_else(Answer::Failed)).await;
    });
}

impl Served {
    async fn answer(&mut self, ask: Ask) -> Result<Answer, Failure> {
        let connector = &self.connector;
        match ask {
            Ask::Peer => return Ok(Answer::Peer(connector.peer().clone())),
            Ask::Publish {
                bundle,
                owner,
                open,
                deadline,
            } => {
                let mut spec = PublishSpec::new("request", bundle.manifest(), owner);
                spec.deadline = deadline.or(spec.deadline);
                let memory = bundle.memory(connector.host().arena());
                let publication = if open {
                    connector.open(spec, memory)
                } else {
                    connector.publish(spec, memory)
                };
                let publication = publication.map_err(|error| error.to_failure())?;
                let handle = publication.handle().clone();
                self.publications.insert(handle.payload, publication);
                return Ok(Answer::Handle(handle.to_bytes()));
            }
            Ask::Ready { payload, chunk } => {
                self.publications[&payload]
                    .ready(chunk)
                    .map_err(|error| error.to_failure())?;
            }
            Ask::Fail { payload, failure } => self.publications[&payload].fail(failure),
            Ask::Abandon { payload } => drop(self.publications.remove(&payload)),
            Ask::Release { payload } => connector.release(payload),
            Ask::Consume { handle, chunks } => {
                let handle = Handle::from_bytes(&handle).map_err(|error| error.to_failure())?;
                let consumer = connector.consume(handle, ConsumeOptions::within(PATIENCE));
                let mut consumer = consumer.map_err(|error| error.to_failure())?;
                for _ in 0..chunks {
                    consumer.next().await.map_err(|error| error.to_failure())?;
                }
                self.consumers.push(consumer);
            }
            Ask::DropConsumers => self.consumers.clear(),
            Ask::ServeStore { limit, closed } => {
                let gate = if closed { TokenGate::closed() } else { TokenGate::open() };
                let store = HostStore::new(connector.host(), limit, Arc::new(gate));
                self.store = Some(StoreService::serve(connector, store));
                return Ok(Answer::Peer(connector.peer().clone()));
            }
            Ask::Grant { token } => self.store.as_ref().expect("served").store().gate().grant(token),
            Ask::Discard { token } => self.store.as_ref().expect("served").discard(token, &[]),
            Ask::UseStore { peer } => connector.set_store(Some(peer)),
            Ask::Store { payload, token, wait } => {
                let handle = self.publications[&payload].handle().clone();
                let stored = connector.store(&handle, token, wait).await;
                return Ok(Answer::Handle(stored.map_err(|error| error.to_failure())?.to_bytes()));
            }
            Ask::Stats => {
                self.publications
                    .retain(|payload, _| connector.live().contains(payload));
                let mut left = crate::leftovers(&connector.stats());
                let store = self.store.as_ref().map(|service| service.store().usage());
                // Also room that is reserved, and no object's.
                let used = store.map_or(0, |usage| usage.used().0);
                left.extend((used > 0).then_some(("store bytes", used)));
                let left = left.into_iter();
                return Ok(Answer::Leftovers(
                    left.map(|(name, count)| (name.to_owned(), count)).collect(),
                ));
            }
            Ask::Close => connector.close().await,
        }
        Ok(Answer::Done)
    }
}
