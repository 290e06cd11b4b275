//! Moving a KV cache between engines of different tensor-parallel size: who sends which bytes where.
//!
//! *What it is.* [`Component`]s describe the pools of an engine (full layers, sliding-window layers, latents, scales),
//! [`Engine`] how many ranks share them. [`handshake`] pairs a prefill engine with a decode engine, or says with
//! [`Incompatible`] why they cannot be paired, before anything moves. A [`Pair`] knows the routes and plans one room:
//! [`Pair::plan`] turns page tables into strided [`Record`](stagewire_core::Record)s.
//!
//! *What it is not.* It moves no byte, opens no connection, keeps no room. No I/O, no clock, no randomness, no runtime;
//! `clippy.toml` forbids them.
//!
//! *Guarantees.* A plan that comes out writes each needed byte of the destination exactly once, from the right byte of
//! the source, inside the pools where their sizes are given, and nothing else: [`Pair::plan`] proves that of the finished
//! plan from the request, both geometries and the definition of the layouts, without what the planner computed.
//! Whatever is wrong with one room is an error of that call. Page lists are never cut short.
//!
//! *Non-guarantees.* That the page tables are those of the room, and that both engines keep their pools as they say.
//!
//! ```
//! use stagewire_core::DType;
//! use stagewire_kv::{Component, Engine, Geometry, PlanRequest, handshake};
//!
//! let full = Component::mha("full", 18, 8, [64, 64], DType::BF16);
//! let swa = Component { window: Some(127), ..Component::mha("swa", 18, 8, [64, 64], DType::BF16) };
//! let prefill = Engine::new(Geometry::new(1, 64, vec![full.clone(), swa.clone()]))?;
//! let decode = Engine::new(Geometry::new(4, 64, vec![full, swa]))?;
//! let pair = handshake(&prefill, &decode)?;
//! assert_eq!(pair.routes(), [(0, 0), (0, 1), (0, 2), (0, 3)]);
//!
//! let request = PlanRequest::new(0, 2, 200)
//!     .pages("full", &[5, 6, 7, 9], &[3, 4, 8, 9])
//!     .pages("swa", &[-1, 2, 3, 4], &[-1, 5, 6, 7]);
//! let plan = pair.plan(&request)?;
//! // Two heads of eight: 256 bytes a token, 256 tokens of full layers and 192 of the window, K and V, 18 layers each.
//! assert_eq!(plan.nbytes(), 256 * (256 + 192) * 2 * 18);
//! assert_eq!(plan.records()?.len(), (3 + 1) * 2 * 18);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod buffers;
mod component;
mod dtype;
mod engine;
mod geometry;
mod handshake;
mod heads;
mod layers;
mod layout;
mod pair;
mod plan;
mod rank;
mod refusal;
mod window;
#[cfg(test)]
#[path = "../tests/it/world.rs"]
mod world;

#[cfg(test)]
extern crate self as stagewire_kv;

pub use component::Component;
pub use dtype::dtype;
pub use engine::{Engine, Geometry};
pub use geometry::GeometryError;
pub use handshake::handshake;
pub use heads::HeadSlice;
pub use layout::{Kind, Layout, UnknownName};
pub use pair::Pair;
pub use plan::{Descriptor, Packing, Plan, PlanError, PlanRequest, PlannedRecord, Section, Side};
pub use rank::RankBuffer;
pub use refusal::Incompatible;
pub use window::TokenRange;
