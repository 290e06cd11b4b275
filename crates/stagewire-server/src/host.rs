//! The embedded host store: payloads that workers put into the server's memory.

use std::sync::Arc;

use stagewire_api::RunDir;
use stagewire_connector::{Connector, ConnectorOptions, StartError, StoreService};
use stagewire_core::{ByteCount, PayloadId, StageName, Token};
use stagewire_store::{DurableOptions, HostStore, OpenError, Store, StoreOptions, Survivor, TokenGate, Usage};

/// The server as a holder of payloads. What it holds is there again when the next server opens the same store, however
/// this one ends, unless nobody kept the memory meanwhile: the scheduler then has it made again.
#[derive(Debug)]
pub(crate) struct StoreHost {
    connector: Arc<Connector>,
    service: Arc<StoreService>,
    survivors: Vec<Survivor>,
}

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreHostError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl StoreHost {
    /// Starts the transports of the server and serves a store of at most `limit` bytes, with what the server before had.
    /// Nobody may write into it until [`StoreHost::grant`].
    pub(crate) async fn start(
        run_dir: &RunDir,
        limit: ByteCount,
        durable: Option<DurableOptions>,
    ) -> Result<Self, StoreHostError> {
        let role = StageName::new("store").expect("the name is allowed");
        let mut options = ConnectorOptions::new(run_dir.path(), role);
        options.arena_limit = HostStore::arena_limit(limit);
        let connector = Connector::start(options).await?;
        let mut options = StoreOptions::new(limit, Arc::new(TokenGate::closed()));
        options.durable = durable;
        match StoreService::open(&connector, options).await {
            Ok((service, recovery)) => {
                if !recovery.survivors.is_empty() || recovery.lost.objects > 0 {
                    let (survivors, lost) = (recovery.survivors.len(), recovery.lost.objects);
                    tracing::info!(survivors, lost, took = ?recovery.took, "opened the store of the server before");
                }
                Ok(Self {
                    connector,
                    service,
                    survivors: recovery.survivors,
                })
            }
            Err(error) => {
                connector.close().await;
                Err(error.into())
            }
        }
    }

    /// What the server before had put in.
    pub(crate) fn survivors(&self) -> Vec<Survivor> {
        self.survivors.clone()
    }

    /// For reading what workers publish.
    pub(crate) const fn connector(&self) -> &Arc<Connector> {
        &self.connector
    }

    /// How workers reach the store, as the protocol carries it.
    pub(crate) fn address(&self) -> Vec<u8> {
        postcard::to_stdvec(self.connector.peer()).expect("a peer has nothing that postcard cannot encode")
    }

    /// Lets an attempt put its output.
    pub(crate) fn grant(&self, token: Token) {
        self.service.store().gate().grant(token);
    }

    /// Lets an attempt that has ended put nothing more, and drops what it put, but for what is still needed of it.
    pub(crate) fn discard(&self, token: Token, kept: &[PayloadId]) {
        self.service.discard(token, kept);
    }

    /// Lets go of a payload that nobody needs any more.
    pub(crate) fn release(&self, payload: PayloadId) {
        self.connector.release(payload);
    }

    /// Whether it has a payload, or is about to.
    pub(crate) fn has(&self, payload: PayloadId) -> bool {
        self.service.store().has(payload)
    }

    pub(crate) fn usage(&self) -> Usage {
        self.service.store().usage()
    }

    /// Serves nothing any more.
    pub(crate) async fn close(&self) {
        self.connector.close().await;
    }

    /// Ends it, once it serves nothing, however the server ends. Payloads are those of jobs that have not ended: they are left to the next
    /// server. Without any nothing stays behind.
    pub(crate) async fn leave(&self) {
        match self.service.store().leave().await {
            Ok(left) if left.objects > 0 => {
                tracing::info!(payloads = left.objects, nbytes = %left.nbytes, "left the store to the next server");
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "stages of jobs that have not ended will run again"),
        }
    }
}
