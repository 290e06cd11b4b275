//! Metrics that are read off the state when somebody asks.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use stagewire_connector::ConnectorStats;
use stagewire_store::Usage;

use super::Metrics;
use crate::snapshot::Snapshot;

type Level = Gauge<u64, AtomicU64>;
type Labels = Vec<(&'static str, String)>;

/// The state at one time.
#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) snapshot: Snapshot,
    pub(crate) store: Usage,
    pub(crate) connector: ConnectorStats,
    pub(crate) streams: usize,
    pub(crate) epoch: u64,
}

impl Scrape {
    /// The whole text of a scrape, in the OpenMetrics format.
    pub(crate) fn encode(&self, metrics: &Metrics) -> String {
        let mut registry = Registry::with_prefix("stagewire");
        self.stages(&mut registry);
        self.counters(&mut registry);
        self.server(&mut registry);
        let mut text = String::new();
        let encoded = encode_registry(&mut text, &metrics.registry)
            .and_then(|()| encode_registry(&mut text, &registry))
            .and_then(|()| encode_eof(&mut text));
        encoded.expect("writing into a string does not fail");
        text
    }

    fn stages(&self, registry: &mut Registry) {
        let jobs = Family::<Labels, Level>::default();
        for (state, count) in &self.snapshot.jobs {
            jobs.get_or_create(&vec![("state", (*state).to_owned())]).set(*count);
        }
        let [phases, queued, workers, slots, payloads, payload_bytes, oldest] =
            std::array::from_fn(|_| Family::<Labels, Level>::default());
        for stage in &self.snapshot.stages {
            let label = |name, value: &str| vec![("stage", stage.name.to_string()), (name, value.to_owned())];
            for (phase, count) in &stage.phases {
                phases.get_or_create(&label("phase", phase)).set(*count);
            }
            for (class, count) in &stage.queued {
                queued.get_or_create(&label("class", class.as_str())).set(*count);
            }
            let attached = stage.workers.iter().filter(|worker| worker.attached).count() as u64;
            workers.get_or_create(&label("link", "attached")).set(attached);
            workers
                .get_or_create(&label("link", "away"))
                .set(stage.workers.len() as u64 - attached);
            for (used, count) in stage.slots().by_use() {
                slots.get_or_create(&label("use", used)).set(count);
            }
            let stage_only = vec![("stage", stage.name.to_string())];
            payloads.get_or_create(&stage_only).set(stage.payloads);
            payload_bytes.get_or_create(&stage_only).set(stage.payload_bytes);
            let waited = stage.oldest.map_or(0, |since| self.snapshot.at.since(since).as_secs());
            oldest.get_or_create(&stage_only).set(waited);
        }
        let (cached_bytes, cache) = (Family::<Labels, Level>::default(), self.snapshot.cache);
        for (used, bytes) in [("used", cache.used_bytes), ("idle", cache.idle_bytes)] {
            let label = vec![("use", used.to_owned())];
            cached_bytes.get_or_create(&label).set(bytes);
        }
        let families = [
            (
                "sched_cached_bytes",
                "Bytes of cached payloads, by whether a job needs them",
                cached_bytes,
            ),
            ("sched_jobs_count", "Jobs that are remembered, by state", jobs),
            (
                "sched_stage_jobs_count",
                "Stages of jobs that have not ended, by phase",
                phases,
            ),
            (
                "sched_queued_count",
                "Jobs that wait for a worker or a credit, by class",
                queued,
            ),
            ("sched_workers_count", "Workers, by whether their stream is up", workers),
            ("sched_slots_count", "Slots of workers, by use", slots),
            ("sched_payloads_held_count", "Payloads that are not released", payloads),
            (
                "sched_payloads_held_bytes",
                "Bytes of payloads that are not released",
                payload_bytes,
            ),
            (
                "sched_oldest_wait_seconds",
                "How long the longest has waited for a worker",
                oldest,
            ),
        ];
        for (name, help, family) in families {
            registry.register(name, help, family);
        }
    }

    fn counters(&self, registry: &mut Registry) {
        let c = &self.snapshot.counters;
        let family = |label: &'static str, values: &[(&str, u64)]| {
            let family = Family::<Labels, Counter>::default();
            for (value, count) in values {
                family.get_or_create(&vec![(label, (*value).to_owned())]).inc_by(*count);
            }
            family
        };
        let jobs = family(
            "event",
            &[
                ("submitted", c.jobs_submitted),
                ("succeeded", c.jobs_succeeded),
                ("failed", c.jobs_failed),
                ("dropped", c.jobs_dropped),
                ("cancelled", c.jobs_cancelled),
            ],
        );
        let dead_letters = family(
            "event",
            &[
                ("died", c.dead_letters),
                ("redriven", c.dead_letters_redriven),
                ("discarded", c.dead_letters_discarded),
                ("crowded_out", c.dead_letters_crowded_out),
            ],
        );
        let offers = family(
            "event",
            &[
                ("made", c.offers),
                ("declined", c.offers_declined),
                ("unanswered", c.offers_unanswered),
                ("withdrawn", c.offers_withdrawn),
                ("near", c.offers_near),
                ("far", c.offers_far),
            ],
        );
        let attempts = family(
            "event",
            &[
                ("granted", c.attempts_granted),
                ("completed", c.attempts_completed),
                ("failed", c.attempts_failed),
                ("fenced", c.attempts_fenced),
                ("yielded", c.attempts_yielded),
                ("preempted", c.attempts_preempted),
                ("resumed", c.attempts_resumed),
                ("lost_with_worker", c.attempts_lost_with_worker),
                ("not_running", c.attempts_not_running),
                ("expired", c.attempts_expired),
                ("without_progress", c.attempts_without_progress),
                ("stopped", c.attempts_stopped),
                ("without_input", c.attempts_without_input),
            ],
        );
        let payloads = family(
            "event",
            &[
                ("published", c.payloads_published),
                ("released", c.payloads_released),
                ("lost", c.payloads_lost),
            ],
        );
        let stages = family(
            "event",
            &[
                ("reopened", c.stages_reopened),
                ("skipped", c.stages_skipped),
                ("cached", c.stages_cached),
                ("awaited", c.stages_awaited),
            ],
        );
        let cache = family("event", &[("kept", c.cache_kept), ("dropped", c.cache_dropped)]);
        let workers = family("event", &[("lost", c.workers_lost)]);
        let checkpoints = Counter::<u64>::default();
        checkpoints.inc_by(c.checkpoints);
        let steps_saved = Counter::<u64>::default();
        steps_saved.inc_by(c.steps_saved);
        registry.register("sched_jobs", "What has happened to jobs since the journal began", jobs);
        registry.register("sched_dead_letters", "What has happened to dead letters", dead_letters);
        registry.register("sched_offers", "What has happened to offers", offers);
        registry.register("sched_attempts", "What has happened to attempts", attempts);
        registry.register("sched_payloads", "What has happened to payloads", payloads);
        registry.register("sched_stages", "What has happened to stages of jobs", stages);
        registry.register("sched_cache", "What has happened to cached payloads", cache);
        registry.register("sched_workers", "What has happened to workers", workers);
        registry.register(
            "sched_checkpoints",
            "Checkpoints that attempts have handed over",
            checkpoints,
        );
        registry.register(
            "sched_steps_saved",
            "Steps that attempts did not have to do again, as they went on from a checkpoint",
            steps_saved,
        );
    }

    fn server(&self, registry: &mut Registry) {
        let host = &self.connector.host;
        let levels = [
            ("server_epoch_count", "Starts on this journal", self.epoch),
            (
                "worker_streams_count",
                "Streams of workers that are up",
                self.streams as u64,
            ),
            (
                "sched_dead_letters_count",
                "Jobs that failed and are kept to be redriven or discarded",
                self.snapshot.dead_letters,
            ),
            (
                "store_payloads_count",
                "Payloads that the server holds",
                self.connector.live_payloads,
            ),
            ("store_used_bytes", "Bytes that the store holds", self.store.used().0),
            ("store_limit_bytes", "Bytes that the store may hold", self.store.limit.0),
            (
                "store_spilled_payloads_count",
                "Payloads that the store has in files",
                self.store.spilled.objects,
            ),
            (
                "store_spilled_bytes",
                "Bytes of payloads that the store has in files",
                self.store.spilled.nbytes.0,
            ),
            ("transfer_pins_count", "Pins on memory of the server", host.pins_held),
            ("transfer_regions_count", "Regions of the server", host.regions),
            (
                "transfer_segments_bytes",
                "Shared memory of the server",
                host.segment_bytes,
            ),
        ];
        for (name, help, value) in levels {
            let gauge = Level::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
    }
}
