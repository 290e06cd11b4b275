//! The embedded host store: payloads that workers put into the server's memory.

use std::sync::Arc;

use stagewire_api::RunDir;
use stagewire_connector::{Connector, ConnectorOptions, StartError, StoreService};
use stagewire_core::{ByteCount, PayloadId, StageName, Token};
use stagewire_store::{HostStore, Store, TokenGate, Usage};

/// The server as a holder of payloads. What it holds dies with it: the scheduler then has it made again.
#[derive(Debug)]
pub(crate) struct StoreHost {
    connector: Arc<Connector>,
    service: Arc<StoreService>,
}

impl StoreHost {
    /// Starts the transports of the server and serves a store of at most `limit` bytes. Nobody may write into it until
    /// [`StoreHost::grant`].
    pub(crate) async fn start(run_dir: &RunDir, limit: ByteCount) -> Result<Self, StartError> {
        let role = StageName::new("store").expect("the name is allowed");
        let mut options = ConnectorOptions::new(run_dir.path(), role);
        options.arena_limit = HostStore::arena_limit(limit);
        let connector = Connector::start(options).await?;
        let store = HostStore::new(connector.host(), limit, Arc::new(TokenGate::closed()));
        let service = StoreService::serve(&connector, store);
        Ok(Self { connector, service })
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

    /// Lets an attempt that is done put nothing more.
    pub(crate) fn revoke(&self, token: Token) {
        self.service.store().gate().revoke(token);
    }

    /// Lets an attempt that ended badly put nothing more, and drops what it put.
    pub(crate) fn discard(&self, token: Token) {
        self.service.discard(token);
    }

    /// Lets go of a payload that nobody needs any more.
    pub(crate) fn release(&self, payload: PayloadId) {
        self.connector.release(payload);
    }

    pub(crate) fn usage(&self) -> Usage {
        self.service.store().usage()
    }

    pub(crate) async fn close(&self) {
        self.connector.close().await;
    }
}
