//! A cluster that always has as many jobs waiting, as the scheduler sees it: events alone, no network and no journal.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{
    ByteCount, Epoch, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token, TransferMode,
};
use stagewire_sched::{
    EdgeSpec, Effect, Event, Flow, Input, Limits, PayloadInfo, Place, ResultInfo, Sched, StageKind, StageSpec,
    Topology, Urgency, WorkerInfo,
};
use uuid::Uuid;

/// Workers by stage: encode, denoise, decode.
const WORKERS: [(&str, u32); 3] = [("encode", 512), ("denoise", 2560), ("decode", 1024)];
/// Hosts that the workers of each stage are spread over.
const HOSTS: u32 = 512;
/// Classes of the jobs, in this order again and again.
const CLASSES: [&str; 4] = ["batch", "standard", "interactive", "standard"];
/// How often an attempt reports progress.
const REPORTS: u64 = 3;
/// What passes between two inputs.
const TICK: Duration = Duration::from_micros(10);

/// An attempt that somebody runs.
struct Attempt {
    worker: Incarnation,
    token: Token,
    publishes: bool,
}

/// Workers and clients of a scheduler.
pub(super) struct Load {
    sched: Sched,
    now: Timestamp,
    ids: u64,
    /// Attempts that run, the one that ends next first.
    running: VecDeque<Attempt>,
    /// Jobs that have to be submitted to keep the number of those that wait.
    missing: usize,
    /// Events applied so far.
    pub(super) events: u64,
    params: Arc<str>,
}

impl Load {
    /// All workers busy, and so many jobs waiting behind them.
    pub(super) fn new(queued: usize) -> Self {
        let limits = Limits {
            max_queued: usize::MAX,
            max_queued_bytes: ByteCount(u64::MAX),
            max_ended: 1000,
            ..Limits::default()
        };
        let mut load = Self {
            sched: Sched::new(topology(), limits),
            now: Timestamp(1_000_000_000),
            ids: 0,
            running: VecDeque::new(),
            missing: queued,
            events: 0,
            params: r#"{"prompt":"a red cat","width":832,"height":480,"frames":81,"steps":40}"#.into(),
        };
        let (epoch, stored) = (Epoch(1), Default::default());
        load.input(Input::Restarted { epoch, stored });
        for (stage, count) in WORKERS {
            for number in 0..count {
                let worker = WorkerInfo {
                    incarnation: Incarnation(load.id()),
                    stage: name(stage),
                    slots: 1,
                    max_batch: 1,
                    name: format!("{stage}-{number}"),
                    member: None,
                    place: Place {
                        host: Some(u64::from(number % HOSTS)),
                        ..Place::default()
                    },
                };
                load.input(Input::WorkerAttached {
                    worker,
                    running: vec![],
                    holding: vec![],
                });
            }
        }
        let workers: u32 = WORKERS.iter().map(|stage| stage.1).sum();
        load.missing += workers as usize;
        load.submit_missing();
        // Until jobs have reached the last stage, and each has its workers busy.
        for _ in 0..4 * workers {
            load.step();
        }
        load
    }

    /// One attempt reports progress and ends; what follows from that follows.
    pub(super) fn step(&mut self) {
        let Some(attempt) = self.running.pop_front() else {
            return;
        };
        let Attempt {
            worker,
            token,
            publishes,
        } = attempt;
        for sequence in 1..=REPORTS {
            let progress = Some(Progress {
                done: sequence,
                total: REPORTS,
                unit: String::new(),
            });
            self.input(Input::Renew {
                worker,
                token,
                sequence,
                progress,
            });
        }
        if publishes {
            let payload = PayloadInfo {
                id: PayloadId(self.id()),
                nbytes: ByteCount(14_300_000),
                chunks: 1,
                stored: false,
                handle: vec![0; 64].into(),
            };
            self.input(Input::Published { worker, token, payload });
        }
        self.input(Input::Completed {
            worker,
            token,
            result: (!publishes).then(ResultInfo::default),
            handovers: vec![],
        });
        self.submit_missing();
    }

    /// Number of jobs that have not ended.
    pub(super) fn jobs(&self) -> usize {
        self.sched.active_jobs()
    }

    /// An id without order, as those of workers and payloads are.
    fn id(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(u128::from(self.ids).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn submit_missing(&mut self) {
        while self.missing > 0 {
            self.missing -= 1;
            self.ids += 1;
            let class = CLASSES[usize::try_from(self.ids % 4).unwrap_or_default()];
            let urgency = Urgency {
                class: Some(class.to_owned()),
                queue_deadline: (class == "interactive").then_some(Duration::from_secs(3600)),
                shape: self.ids % 16,
                ..Urgency::default()
            };
            self.input(Input::Submit {
                // Ids of jobs sort by time.
                job: JobId(Uuid::from_u128(u128::from(self.ids) << 64)),
                params: self.params.clone(),
                key: None,
                urgency,
            });
        }
    }

    /// Decides, applies, and does what is due, as the server does but for the journal.
    fn input(&mut self, input: Input) {
        self.now = self.now + TICK;
        let mut next = self.sched.decide(self.now, input);
        while let Ok(decision) = next {
            if decision.events.is_empty() && decision.effects.is_empty() {
                break;
            }
            for event in &decision.events {
                self.sched.apply(self.now, event);
                self.missing += usize::from(matches!(event, Event::JobEnded { .. }));
            }
            self.events += decision.events.len() as u64;
            for effect in decision.effects {
                if let Effect::Offer(offer) = effect {
                    self.accept(offer.worker, offer.token, offer.output.publish);
                }
            }
            next = self.sched.decide(self.now, Input::Poll);
        }
    }

    fn accept(&mut self, worker: Incarnation, token: Token, publishes: bool) {
        if let Ok(decision) = self.sched.decide(self.now, Input::Accept { worker, token }) {
            for event in &decision.events {
                self.sched.apply(self.now, event);
            }
            self.events += decision.events.len() as u64;
            self.running.push_back(Attempt {
                worker,
                token,
                publishes,
            });
        }
    }
}

fn name(name: &str) -> StageName {
    StageName::new(name).expect("these names are allowed")
}

/// Encode, denoise, decode, handed over whole from memory to memory.
fn topology() -> Topology {
    let spec = |(stage, _)| StageSpec {
        max_held: 8192,
        kind: if stage == "denoise" {
            StageKind::Admission
        } else {
            StageKind::WorkQueue
        },
        ..StageSpec::new(name(stage))
    };
    let edge = |(from, to)| EdgeSpec {
        from: name(from),
        to: name(to),
        flow: Flow::Whole,
        mode: TransferMode::P2p,
    };
    let edges = [("encode", "denoise"), ("denoise", "decode")].map(edge);
    Topology::new(WORKERS.map(spec).into(), edges.into()).expect("an allowed pipeline")
}
