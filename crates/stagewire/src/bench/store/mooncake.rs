//! Mooncake Store from its wheel: a master, a process that may lend memory, and a client.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;

use super::Act;
use crate::bench::peers::Driver;

/// Where Mooncake's objects lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In memory that the client's own process lends.
    Own,
    /// In memory of another process.
    Foreign,
}

impl Place {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Own => "own segment",
            Self::Foreign => "another's segment",
        }
    }
}

/// What of the wheel's API does it.
pub(super) const fn call(act: Act, batch: bool) -> &'static str {
    match (act, batch) {
        (Act::Put, false) => "put_from",
        (Act::Put, true) => "batch_put_from",
        (Act::Get, false) => "get_into",
        (Act::Get, true) => "batch_get_into",
        (Act::Map, _) => "get_buffer",
    }
}

/// One store for each [`Place`], with a master each.
#[derive(Debug)]
pub(super) struct Peers {
    own: Side,
    foreign: Side,
}

#[derive(Debug)]
struct Side {
    lender: Driver,
    client: Driver,
}

impl Peers {
    /// The inner error is why there is none here.
    pub(super) async fn start(python: &Path, capacity: u64) -> anyhow::Result<Result<Self, String>> {
        let own = match Side::start(python, 0, capacity).await? {
            Ok(own) => own,
            Err(why) => return Ok(Err(why)),
        };
        let foreign = Side::start(python, capacity, 0).await?;
        Ok(foreign.map(|foreign| Self { own, foreign }))
    }

    fn client(&mut self, place: Place) -> &mut Driver {
        match place {
            Place::Own => &mut self.own.client,
            Place::Foreign => &mut self.foreign.client,
        }
    }

    /// Writes objects to be read, and proves that they come back.
    pub(super) async fn hold(&mut self, size: u64, count: usize) -> anyhow::Result<()> {
        for place in [Place::Own, Place::Foreign] {
            let order = json!({"do": "hold", "size": size, "count": count});
            let client = self.client(place);
            client.order(&order).await.with_context(|| format!("{place:?}"))?;
            for read in ["get", "get_batch"] {
                client.time(read).await?;
                client.check().await?;
            }
        }
        Ok(())
    }

    pub(super) async fn once(&mut self, place: Place, act: Act, batch: bool) -> anyhow::Result<Duration> {
        let order = match (act, batch) {
            (Act::Put, false) => "put",
            (Act::Put, true) => "put_batch",
            (Act::Get, false) => "get",
            (Act::Get, true) => "get_batch",
            (Act::Map, _) => "buffer",
        };
        self.client(place).time(order).await
    }

    pub(super) async fn end(self) {
        for side in [self.own, self.foreign] {
            side.client.end().await;
            side.lender.end().await;
        }
    }
}

impl Side {
    async fn start(python: &Path, lent: u64, owned: u64) -> anyhow::Result<Result<Self, String>> {
        let mut lender = match Driver::spawn(python, "lender", &[&lent.to_string()]).await? {
            Ok(lender) => lender,
            Err(why) => return Ok(Err(why)),
        };
        let reached = lender.order(&json!({"do": "reach"})).await?;
        let master = reached["master"].as_str().context("no address")?;
        let mut client = match Driver::spawn(python, "store", &[&owned.to_string(), master]).await? {
            Ok(client) => client,
            Err(why) => return Ok(Err(why)),
        };
        let warmed = client.order(&json!({"do": "warm"})).await?;
        ensure!(warmed["objects"].as_u64() > Some(0), "nothing could be put");
        Ok(Ok(Self { lender, client }))
    }
}
