use std::collections::{HashMap, HashSet};
use std::ffi::CStr;

use tokio::sync::oneshot;

use super::Fault;
use super::job::Running;
use crate::nixl::agent::Agent;

/// What the thread knows of a peer, and what of that NIXL has loaded.
///
/// NIXL can forget a peer only as a whole. So it is forgotten, and what is still of use is loaded again with the next
/// request. While that is due, nothing is posted to the peer.
pub(super) struct Peer<K> {
    /// The control connection over which it was met.
    meeting: u64,
    connection: Option<Vec<u8>>,
    registrations: HashMap<u64, Vec<u8>>,
    /// Whether the connection is.
    loaded: bool,
    loaded_registrations: HashSet<u64>,
    settling: bool,
    parting: bool,
    told: Vec<oneshot::Sender<()>>,
    mourned: Vec<Running<K>>,
}

impl<K> Default for Peer<K> {
    fn default() -> Self {
        Self {
            meeting: 0,
            connection: None,
            registrations: HashMap::new(),
            loaded: false,
            loaded_registrations: HashSet::new(),
            settling: false,
            parting: false,
            told: Vec::new(),
            mourned: Vec::new(),
        }
    }
}

impl<K> Peer<K> {
    pub(super) fn meet(&mut self, meeting: u64, connection: Vec<u8>) {
        self.parting = false;
        if self.meeting != meeting {
            // Whatever was loaded over another control connection goes before this is.
            self.meeting = meeting;
            self.registrations.clear();
            self.connection = Some(connection);
            self.settling |= self.loaded;
        }
    }

    pub(super) fn learn(&mut self, number: u64, metadata: Vec<u8>) {
        self.registrations.insert(number, metadata);
    }

    pub(super) fn unlearn(&mut self, numbers: &[u64], done: oneshot::Sender<()>) {
        for number in numbers {
            self.registrations.remove(number);
            self.settling |= self.loaded_registrations.contains(number);
        }
        self.told.push(done);
        if !self.settling {
            self.tell();
        }
    }

    /// Nothing is to be left of the peer, unless it was met again since.
    pub(super) fn part(&mut self, meeting: u64) {
        if self.meeting == meeting {
            self.parting = true;
            self.settling = true;
            self.connection = None;
            self.registrations.clear();
        }
    }

    /// Takes a job whose bytes may still arrive while the connection stands.
    pub(super) fn mourn(&mut self, job: Running<K>) {
        self.mourned.push(job);
        self.settling = true;
    }

    /// Whether the peer is about to be forgotten, so that nothing may be posted.
    pub(super) fn is_settling(&self) -> bool {
        self.settling
    }

    pub(super) fn is_gone(&self) -> bool {
        self.parting && !self.settling
    }

    pub(super) fn knows(&self, number: u64) -> bool {
        self.connection.is_some() && self.registrations.contains_key(&number)
    }

    /// Has NIXL load what a request to this registration needs.
    pub(super) fn load(&mut self, agent: &Agent, number: u64) -> Result<(), Fault> {
        let load = |metadata: &[u8]| {
            let loaded = agent.load(metadata);
            loaded.map_err(Fault::nixl("load the metadata of the peer"))
        };
        if !self.loaded {
            let connection = self.connection.as_ref().ok_or(Fault::NotLoaded)?;
            load(connection)?;
            self.loaded = true;
        }
        if !self.loaded_registrations.contains(&number) {
            let metadata = self.registrations.get(&number).ok_or(Fault::NotLoaded)?;
            load(metadata)?;
            self.loaded_registrations.insert(number);
        }
        Ok(())
    }

    /// Has NIXL forget the peer, to which nothing may be in flight.
    pub(super) fn settle(&mut self, name: &CStr, agent: &Agent) {
        if std::mem::take(&mut self.loaded)
            && let Err(error) = agent.forget(name)
        {
            // It has forgotten it by itself, after an error of the connection.
            tracing::debug!(%error, peer = ?name, "NIXL forgets a peer");
        }
        self.loaded_registrations.clear();
        self.settling = false;
        for job in self.mourned.drain(..) {
            job.bury(agent);
        }
        self.tell();
    }

    fn tell(&mut self) {
        for done in self.told.drain(..) {
            // Nobody may wait any more.
            let _ = done.send(());
        }
    }
}
