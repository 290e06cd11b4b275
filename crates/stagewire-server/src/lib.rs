//! Drives the scheduler: journal, gRPC for workers, HTTP for people, metrics.

mod config;
mod nearest;
mod process;
mod run_dir;
mod server;

pub use config::{
    Config, ConfigError, Delivery, Edge, ParamSpec, ParamType, Params, ParamsError, Pipeline, ServerSettings, Stage,
    StageKind, UnknownName,
};
pub use run_dir::OccupyError;
pub use server::{Server, ServerOptions, StartError};
pub use stagewire_api::{RunDir, RunDirError};
