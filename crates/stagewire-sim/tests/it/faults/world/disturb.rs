//! What goes wrong.

use std::time::Duration;

use stagewire_core::Incarnation;
use stagewire_sched::{DrainScope, Holder, Input};

use super::super::agent::Word;
use super::{Happening, Source, World};

/// A stream on which nothing comes for so long is ended by the server.
const SILENCE: Duration = Duration::from_secs(30);

impl World {
    /// One thing goes wrong, and the next one some time later.
    pub(super) fn disturb(&mut self) {
        let Some(pause) = self.scenario.pause.filter(|_| !self.calm) else {
            return;
        };
        let next = self.random.exponential(pause);
        self.after(next, Happening::Disturb);
        let pick = self.random.index(self.agents.len());
        let agent = self.agents.keys().nth(pick).copied();
        match (self.random.below(20), agent) {
            (0..4, Some(agent)) => self.cut(agent, Duration::ZERO),
            (4..6, Some(agent)) => {
                let away = self.random.between(Duration::from_secs(1), Duration::from_secs(110));
                self.cut(agent, away);
            }
            (6..9, Some(agent)) => self.kill(agent),
            (9..11, Some(agent)) => self.freeze(agent),
            (11, Some(agent)) => {
                if let Some(agent) = self.agents.get_mut(&agent) {
                    agent.deaf = true;
                }
            }
            (12, Some(agent)) => {
                let slow = self.random.between(Duration::from_millis(300), Duration::from_secs(4));
                if let Some(agent) = self.agents.get_mut(&agent) {
                    agent.slow = slow;
                }
            }
            (13, Some(worker)) => {
                let scope = DrainScope::Worker(worker);
                self.reach(Source::Operator, Input::Drain { scope, within: None });
            }
            (14..16, _) => self.lose_bytes(),
            (16, _) => {
                let pause = self.random.between(Duration::from_secs(1), Duration::from_secs(70));
                self.server.stalled_until = self.now + pause;
            }
            (17..20, _) if self.server.sched().is_some() => {
                self.ledger.tally.crashes_otherwise += 1;
                let power = self.random.chance(0.5);
                self.crash(power);
            }
            _ => {}
        }
    }

    /// The connection breaks; the agent has no other one for a while.
    fn cut(&mut self, worker: Incarnation, away: Duration) {
        let Some(agent) = self.agents.get_mut(&worker) else {
            return;
        };
        let session = agent.session;
        agent.cut();
        agent.cut_off_until = self.now + away;
        self.after(away + Duration::from_millis(500), Happening::Connect(worker));
        self.tell_end(worker, session, Input::WorkerAway { worker });
    }

    /// The process dies.
    fn kill(&mut self, worker: Incarnation) {
        let Some(agent) = self.bury(worker) else { return };
        self.ledger.tally.deaths += 1;
        let notice = if self.random.chance(0.6) {
            Input::WorkerLost { worker }
        } else {
            Input::WorkerAway { worker }
        };
        self.tell_end(worker, agent.session, notice);
    }

    /// The process stands still, perhaps for so long that it is given up; then it goes on as if nothing had been.
    fn freeze(&mut self, worker: Incarnation) {
        let pause = self.random.between(Duration::from_secs(5), Duration::from_secs(150));
        let Some(agent) = self.agents.get_mut(&worker) else {
            return;
        };
        agent.stopped_until = self.now + pause;
        let session = agent.session;
        if pause > SILENCE {
            let away = Input::WorkerAway { worker };
            self.after(SILENCE, Happening::Reach(Source::System(worker, session), away));
            self.after(SILENCE, Happening::Hear(worker, session, Word::Closed));
        }
    }

    /// The server learns at once that a stream has ended, or from the silence on it.
    fn tell_end(&mut self, worker: Incarnation, session: u64, notice: Input) {
        let source = Source::System(worker, session);
        if self.random.chance(0.8) {
            self.post_surely(Duration::ZERO, Happening::Reach(source, notice));
        }
        let away = Input::WorkerAway { worker };
        self.after(SILENCE, Happening::Reach(source, away));
    }

    /// The bytes of some payload are gone, and sometimes the server is told.
    fn lose_bytes(&mut self) {
        let pick = self.random.index(self.shelf.len());
        let Some((payload, kept)) = self.shelf.iter().nth(pick) else {
            return;
        };
        let (payload, holder) = (*payload, kept.holder);
        self.shelf.remove(&payload);
        if holder == Holder::Store || self.random.chance(0.5) {
            self.reach(Source::Operator, Input::PayloadLost { payload });
        }
    }
}
