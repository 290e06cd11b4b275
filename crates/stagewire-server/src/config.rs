//! `stagewire.toml`: the pipeline, its stages and edges, and the server's own settings.

mod caches;
mod error;
mod file;
mod params;
mod parse;
mod skips;
mod values;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stagewire_core::{ByteCount, StageName};
use stagewire_sched::{Backoff, StageKind, Topology};

pub use caches::Caches;
pub use error::{ConfigError, UnknownName};
pub use params::{ParamSpec, ParamType, Params, ParamsError};
pub use skips::Skips;

/// A checked `stagewire.toml`. Relative paths in it are relative to the file.
///
/// Every key of the file, with its default:
///
/// ```toml
/// [pipeline]
/// name = "wan"                      # a name: a-z, 0-9, '-', '_'
/// module = "pipeline.py"            # Python file with the stage functions
///
/// [pipeline.params.prompt]          # one table for each parameter that a job may give
/// type = "string"                   # string | integer | number | boolean | input (a file sent to /v1/inputs before)
/// help = "What to paint"            # optional
/// [pipeline.params.steps]
/// type = "integer"
/// default = 4                       # optional: a parameter without default must be given
/// min = 1                           # optional, numbers only, inclusive
/// max = 100                         # optional, numbers only, inclusive
///
/// [[stage]]                         # one for each stage
/// name = "denoise"
/// kind = "admission"                # work-queue (any worker takes any item) | admission (a job stays with its worker)
/// workers = 1                       # processes that `stagewire up` starts
/// slots = 1                         # attempts at once in each worker
/// world = 1                         # processes of each worker, which run every attempt together; admission only, with one slot
/// max-batch = 1                     # jobs of one shape that a worker runs together; work queues only, with one slot
/// max-held = 16                     # payloads not yet released, above which the stage gets no more work
/// max-payload = "16MiB"             # most bytes of one, which the first one of a shape is taken to have
/// no-progress = "300s"              # a running attempt without progress for so long is lost
/// max-attempts = 1                  # failures of the stage's own code before the job fails
/// backoff = "1s"                    # after a failure the stage waits for so long at most, twice as long with each
/// max-backoff = "60s"               # further one, and never longer than this
/// # checkpoint = true               # of kind admission: it can stop at a step boundary, and go on from there elsewhere
/// threads = 1                       # optional: compute threads of each worker
/// skip-if = "latents"               # optional: jobs that give this parameter, or for which it is true, skip the stage
/// # cache = ["prompt"]              # optional: what the stage makes depends on these parameters alone, and is made once for all jobs
/// # cache-version = "1"             # with cache: another one where it comes out otherwise than before, such as with other weights
/// [[stage]]
/// name = "decode"
///
/// [[edge]]                          # what a stage hands to the next
/// from = "denoise"
/// to = "decode"
/// handover = "stream"               # whole (the default) | stream (chunk by chunk)
/// chunks = 3                        # with stream: at most so many chunks
/// chunk-dim = 2                     # with stream: dimension that is cut
/// mode = "p2p"                      # p2p (from the producer's memory, the default) | store (through the host store)
///
/// [server]
/// listen = "127.0.0.1:0"            # HTTP and gRPC; port 0 takes a free one
/// # token-file = "api.token"        # bearer token that clients must send; required where listen is not a loopback address
/// # allowed-hosts = ["gpu1.lan"]    # Host names that requests may carry, besides the loopback names
/// store-bytes = "256MiB"            # bound of the host store
/// arena-bytes = "1GiB"              # bound of each worker's shared-memory arena
/// # data-dir = "state"              # journal and results; default: $XDG_STATE_HOME/stagewire/<pipeline>
/// max-body = "1MiB"                 # longest body of a request, at most 16MiB
/// max-queued = 10000                # jobs that have not ended, above which a submit is refused
/// max-input = "256MiB"              # largest input
/// input-bytes = "4GiB"              # bound of all inputs together, each of which counts as at least 64 KiB
/// input-idle = "1h"                 # an input that no job has referred to for so long is dropped
/// affinity-step = "20ms"            # what each step costs that a worker is further away from what it reads
/// ```
///
/// ```
/// # let text = "[pipeline]\nname = 'wan'\nmodule = 'p.py'\n[[stage]]\nname = 'encode'\nmax-hold = 4\n";
/// let error = stagewire_server::Config::parse(text, "stagewire.toml").unwrap_err();
/// assert!(error.to_string().starts_with(r#"stagewire.toml:6: unknown key "max-hold" in [[stage]]; did you mean "max-held"?"#));
/// ```
#[derive(Debug, Clone)]
pub struct Config {
    /// The file that was read.
    pub path: PathBuf,
    /// What is served.
    pub pipeline: Pipeline,
    /// The stages, in the order of the file.
    pub stages: Vec<Stage>,
    /// The stages and edges as the scheduler takes them: a connected graph without cycles.
    pub topology: Topology,
    /// The server's own settings.
    pub server: ServerSettings,
}

/// `[pipeline]`.
#[derive(Debug, Clone)]
pub struct Pipeline {
    /// `name`.
    pub name: StageName,
    /// `module`, made relative to the file's directory.
    pub module: PathBuf,
    /// `[pipeline.params.*]`.
    pub params: Params,
    /// `skip-if` of the stages.
    pub skips: Skips,
    /// `cache` and `cache-version` of the stages.
    pub caches: Caches,
}

/// `[[stage]]`.
#[derive(Debug, Clone)]
pub struct Stage {
    /// `name`.
    pub name: StageName,
    /// `kind`, default work-queue.
    pub kind: StageKind,
    /// `workers`: processes that `stagewire up` starts, default 1.
    pub workers: u32,
    /// `slots`: attempts at once in each worker, default 1.
    pub slots: u32,
    /// `world`: processes of each worker, which run every attempt together, default 1.
    pub world: u32,
    /// `max-batch`: jobs of one shape that a worker runs together, default 1.
    pub max_batch: u32,
    /// `max-held`: payloads not yet released above which the stage gets no more work, default 16.
    pub max_held: u32,
    /// `max-payload`: most bytes of an output, which the first one of a shape is taken to have; default no bound, and a share of
    /// `store-bytes`.
    pub max_payload: Option<ByteCount>,
    /// `no-progress`: silence after which a running attempt is lost, default 300 s.
    pub no_progress: Duration,
    /// `max-attempts`: failures of the stage's own code before the job fails, default 1.
    pub max_attempts: u32,
    /// `backoff` and `max-backoff`: how long to wait between them, default 1 s up to 60 s.
    pub backoff: Backoff,
    /// `checkpoint`: its attempts may hand over checkpoints, yield at step boundaries, and go on from there; for stages of kind
    /// admission, default false.
    pub checkpoint: bool,
    /// `threads`: compute threads of each worker; `None` leaves the choice to the libraries.
    pub threads: Option<u32>,
}

/// `[server]`.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// `listen`, default `127.0.0.1:0`.
    pub listen: SocketAddr,
    /// `token-file`: file whose trimmed content clients must send as bearer token.
    pub token_file: Option<PathBuf>,
    /// `allowed-hosts`: names that the `Host` header may carry, besides the loopback names.
    pub allowed_hosts: Vec<String>,
    /// `store-bytes`: bound of the host store, default 256 MiB.
    pub store_bytes: ByteCount,
    /// `arena-bytes`: bound of each worker's arena, default 1 GiB.
    pub arena_bytes: ByteCount,
    /// `data-dir`: journal and results.
    pub data_dir: Option<PathBuf>,
    /// `max-body`: longest body of a request, default 1 MiB.
    pub max_body: ByteCount,
    /// `max-queued`: jobs that have not ended above which a submit is refused, default 10,000.
    pub max_queued: u64,
    /// `max-input`: largest input, default 256 MiB.
    pub max_input: ByteCount,
    /// `input-bytes`: bound of all inputs together, each of which counts as at least 64 KiB; default 4 GiB.
    pub input_bytes: ByteCount,
    /// `input-idle`: how long an input stays that no job refers to, default 1 h.
    pub input_idle: Duration,
    /// `affinity-step`: what each step costs that a worker is further away from what it reads, default 20 ms.
    pub affinity_step: Option<Duration>,
}

impl Config {
    /// Reads and checks a file, and that the module it names exists.
    ///
    /// # Errors
    /// [`ConfigError`]; its message starts with `FILE:LINE:` and says what to write instead.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let config = Self::parse(&text, path)?;
        if !config.pipeline.module.is_file() {
            return Err(parse::module_missing(&text, path, &config.pipeline.module));
        }
        Ok(config)
    }

    /// Checks the text of a file. `path` stands in messages, and relative paths are relative to its directory.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(text: &str, path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        parse::parse(text, path.as_ref())
    }

    /// The stage of this name.
    pub fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.name.as_str() == name)
    }
}

impl ServerSettings {
    /// Whether only processes of this host can reach the server.
    pub fn is_loopback(&self) -> bool {
        self.listen.ip().is_loopback()
    }
}
