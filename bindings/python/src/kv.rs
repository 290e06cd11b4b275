//! `stagewire.kv`: geometry, handshake, plans and rooms of KV caches. `python/stagewire/kv` gives them their public names.

mod columns;
mod held;
mod receiver;
mod room;
mod sender;

pub(crate) use receiver::{KvReceiver, KvReceiverRoom};
pub(crate) use sender::{KvSender, KvSenderRoom};

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use stagewire_kv::{
    Component, Engine, Geometry, GeometryError, Pair, Plan, PlanRequest, UnknownName, dtype, handshake,
};

use crate::error::raise_from;

/// A `stagewire.kv.Component`, by its attributes.
#[derive(FromPyObject)]
struct ComponentArguments {
    name: String,
    kind: String,
    layout: String,
    layers: u32,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    dtype: String,
    window: Option<u64>,
    layer_ids: Option<Vec<u32>>,
    scales: Option<u32>,
}

impl ComponentArguments {
    fn component(self, py: Python<'_>) -> PyResult<Component> {
        let wrong = |field, value: &str, expected| {
            let error = GeometryError::Field {
                component: self.name.clone(),
                field,
                value: format!("{value:?}"),
                expected,
            };
            raise_from(py, &error)
        };
        let one_of = |error: UnknownName| format!("one of {}", error.known);
        Ok(Component {
            kind: (self.kind.parse()).map_err(|error| wrong("kind", &self.kind, one_of(error)))?,
            layout: (self.layout.parse()).map_err(|error| wrong("layout", &self.layout, one_of(error)))?,
            dtype: dtype(&self.dtype)
                .map_err(|_| wrong("dtype", &self.dtype, "a type of PyTorch, as it is stored".to_owned()))?,
            name: self.name,
            layers: self.layers,
            kv_heads: self.kv_heads,
            k_dim: self.k_dim,
            v_dim: self.v_dim,
            window: self.window,
            layer_ids: self.layer_ids,
            scales: self.scales,
        })
    }
}

/// An engine whose geometry was checked.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvEngine(Engine);

#[pymethods]
impl KvEngine {
    #[new]
    #[pyo3(signature = (sizes, components, num_pages))]
    fn new(
        py: Python<'_>,
        sizes: (u32, u32, u32, u32),
        components: Vec<ComponentArguments>,
        num_pages: BTreeMap<String, u64>,
    ) -> PyResult<Self> {
        let (tp_size, page_size, pp_size, cp_size) = sizes;
        let components = components.into_iter().map(|arguments| arguments.component(py));
        let geometry = Geometry {
            tp_size,
            page_size,
            pp_size,
            cp_size,
            components: components.collect::<PyResult<_>>()?,
            num_pages,
        };
        Engine::new(geometry).map(Self).map_err(|error| raise_from(py, &error))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }
}

/// Two engines that can hand over to each other.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvPair(Pair);

/// Pairs two engines, each as [`KvEngine::to_bytes`] gave it, here or in another process.
#[pyfunction]
pub(crate) fn kv_handshake(py: Python<'_>, prefill: &[u8], decode: &[u8]) -> PyResult<KvPair> {
    let paired = Engine::from_bytes(prefill)
        .and_then(|prefill| Engine::from_bytes(decode).and_then(|decode| handshake(&prefill, &decode)));
    paired.map(KvPair).map_err(|error| raise_from(py, &error))
}

/// Page tables by component.
type Tables = BTreeMap<String, Vec<i64>>;

#[pymethods]
impl KvPair {
    fn routes(&self) -> Vec<(u32, u32)> {
        self.0.routes()
    }

    fn writers(&self, dst_rank: u32) -> Vec<u32> {
        self.0.writers(dst_rank)
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python call")]
    fn plan(
        &self,
        py: Python<'_>,
        route: (u32, u32),
        seq_len: u64,
        src_pages: Tables,
        dst_pages: Tables,
        prefix: BTreeMap<String, u64>,
        tokens: Option<(u64, u64)>,
        components: Option<Vec<String>>,
        exact_window: bool,
    ) -> PyResult<KvPlan> {
        let request = PlanRequest {
            prefix: prefix.iter().map(|(name, &tokens)| (name.as_str(), tokens)).collect(),
            tokens,
            components: components
                .as_ref()
                .map(|names| names.iter().map(String::as_str).collect()),
            exact_window,
            ..PlanRequest::new(route.0, route.1, seq_len).tables(&src_pages, &dst_pages)
        };
        let planned = py.detach(|| self.0.plan(&request));
        planned.map(KvPlan).map_err(|error| raise_from(py, &error))
    }
}

/// A plan. Tables come as the bytes of C structures.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvPlan(Plan);

#[pymethods]
impl KvPlan {
    fn descriptors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        columns::descriptors(py, &self.0)
    }

    fn records<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        columns::records(py, &self.0)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    #[getter]
    fn ranks(&self) -> (u32, u32) {
        (self.0.src_rank(), self.0.dst_rank())
    }

    /// For each component: name, token range, which side packs.
    fn sections(&self) -> Vec<(String, (u64, u64, u64), &'static str)> {
        let sections = self.0.sections().iter().map(|section| {
            let range = section.token_range();
            let range = (range.page_start, range.start, range.end);
            (section.name().to_owned(), range, section.packing().name())
        });
        sections.collect()
    }
}
