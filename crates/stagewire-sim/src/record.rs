use std::time::Duration;

use stagewire_core::Timestamp;
use stagewire_sched::Event;
use xxhash_rust::xxh3::xxh3_64;

use crate::experiment::Experiment;

/// What became of one job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobRecord {
    /// Position of its class.
    pub class: usize,
    /// How its service times compare with those of the stages.
    pub scale: f64,
    /// When it was submitted.
    pub submitted: Timestamp,
    /// When the first piece of its result was there.
    pub first: Option<Timestamp>,
    /// When it ended.
    pub ended: Option<Timestamp>,
    /// Whether it ended with a result.
    pub succeeded: bool,
}

/// Levels at one point of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sample {
    /// When.
    pub(crate) at: Timestamp,
    /// Jobs that wait for a worker, by stage.
    pub(crate) queued: Vec<usize>,
    /// Bytes of payloads that are held.
    pub(crate) resident: u64,
}

/// Everything that one simulation gives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    /// Jobs in the order in which they came.
    pub(crate) jobs: Vec<JobRecord>,
    /// Levels over time.
    pub(crate) samples: Vec<Sample>,
    /// From the start to the end of the last job.
    pub(crate) span: Duration,
    /// Time that workers had an attempt, by stage.
    pub(crate) busy: Vec<Duration>,
    /// Attempts that were completed, by stage.
    pub(crate) attempts: Vec<u64>,
    /// Most bytes of payloads that were held at once.
    pub(crate) peak_resident: u64,
    /// Bytes that went over the network.
    pub(crate) moved: u64,
    /// Outputs that had to wait for room in the store.
    pub(crate) puts_that_waited: u64,
    /// Workers that were lost.
    pub(crate) deaths: u64,
    /// Attempts that have yielded.
    pub(crate) yields: u64,
    /// Steps that were not done again, as an attempt went on from a checkpoint.
    pub(crate) steps_saved: u64,
    /// Events of the scheduler.
    pub(crate) events: u64,
    /// All of them and their times in one number: the same seed gives the same one.
    pub(crate) hash: u64,
    resident: u64,
}

impl JobRecord {
    pub(crate) const fn new(class: usize, scale: f64, submitted: Timestamp) -> Self {
        Self {
            class,
            scale,
            submitted,
            first: None,
            ended: None,
            succeeded: false,
        }
    }

    /// From submission to result, where there is one.
    pub fn latency(&self) -> Option<Duration> {
        Some(self.ended.filter(|_| self.succeeded)?.since(self.submitted))
    }

    /// From submission to the first piece of the result, where there is one.
    pub fn to_first(&self) -> Option<Duration> {
        Some(self.first.filter(|_| self.succeeded)?.since(self.submitted))
    }
}

impl Run {
    pub(crate) fn new(experiment: &Experiment) -> Self {
        let stages = experiment.stages.len();
        Self {
            jobs: Vec::new(),
            samples: Vec::new(),
            span: Duration::ZERO,
            busy: vec![Duration::ZERO; stages],
            attempts: vec![0; stages],
            peak_resident: 0,
            moved: 0,
            puts_that_waited: 0,
            deaths: 0,
            yields: 0,
            steps_saved: 0,
            events: 0,
            hash: 0,
            resident: 0,
        }
    }

    pub(crate) fn note(&mut self, at: Timestamp, event: &Event) {
        self.events += 1;
        match event {
            Event::AttemptYielded { .. } => self.yields += 1,
            Event::AttemptGranted { saved, .. } => self.steps_saved += saved,
            _ => (),
        }
        let bytes =
            postcard::to_stdvec(&(self.hash, at, event)).expect("events have nothing that postcard cannot encode");
        self.hash = xxh3_64(&bytes);
    }

    pub(crate) fn hold(&mut self, nbytes: u64) {
        self.resident += nbytes;
        self.peak_resident = self.peak_resident.max(self.resident);
    }

    pub(crate) const fn let_go(&mut self, nbytes: u64) {
        self.resident -= nbytes;
    }

    pub(crate) fn sample(&mut self, at: Timestamp, queued: Vec<usize>) {
        let resident = self.resident;
        self.samples.push(Sample { at, queued, resident });
    }
}
