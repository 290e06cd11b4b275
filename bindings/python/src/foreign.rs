//! `MooncakeStore` of this package as a [`Store`], for the conformance suite.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyByteArrayMethods, PyDict};
use stagewire_core::{ByteCount, ErrorClass, Failure, PayloadId, RegionRef, Token};
use stagewire_store::{Draft, NewObject, Object, Reservation, Store, StoreAbilities, StoreError, Usage};
use stagewire_transfer::{Filling, Target, TargetError};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::tensor::Tensor;

const NAME: &str = "mooncake";

/// Longest time that a writer can wait for room; a clock of Python reaches no further than so many years.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// A store of Mooncake, whose Python object does the work.
#[derive(Debug)]
pub(crate) struct ForeignStore {
    store: Arc<Py<PyAny>>,
    /// Drafts that are being aborted. Their keys are free once that has ended.
    ending: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

/// A Python call failed.
enum Fault {
    /// There is one of this key.
    Exists,
    Other(StoreError),
}

impl ForeignStore {
    pub(crate) fn new(store: Arc<Py<PyAny>>) -> Self {
        Self {
            store,
            ending: Arc::default(),
        }
    }

    /// Runs `call` with the GIL on a thread that may wait for it, after the drafts that were dropped before have ended.
    async fn call<T: Send + 'static>(
        &self,
        payload: PayloadId,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T, Fault> {
        let ending = std::mem::take(&mut *self.ending.lock().unwrap_or_else(PoisonError::into_inner));
        for draft in ending {
            // One that panicked has ended, too.
            let _ = draft.await;
        }
        with_gil(payload, Arc::clone(&self.store), call).await
    }

    /// What a payload consists of: the object that stands for it, and the bytes of its parts.
    async fn find(&self, payload: PayloadId) -> Result<(Py<PyAny>, Vec<u64>), StoreError> {
        let found = self.call(payload, move |store| {
            let placed = store.call_method1("find", (payload.to_string(),))?;
            let parts = placed.getattr("parts")?.extract()?;
            Ok((placed.unbind(), parts))
        });
        found.await.map_err(|fault| fault.of(payload))
    }

    async fn read(&self, payload: PayloadId, placed: Py<PyAny>, parts: Vec<u64>) -> Result<Vec<Vec<u8>>, StoreError> {
        let read = self.call(payload, move |store| {
            let py = store.py();
            let into = parts.iter().map(|nbytes| {
                let nbytes = usize::try_from(*nbytes)?;
                PyByteArray::new_with(py, nbytes, |bytes| {
                    bytes.fill(0);
                    Ok(())
                })
            });
            let into = into.collect::<PyResult<Vec<_>>>()?;
            store.call_method1("read", (placed, into.clone()))?;
            Ok(into.iter().map(PyByteArrayMethods::to_vec).collect())
        });
        read.await.map_err(|fault| fault.of(payload))
    }
}

#[async_trait]
impl Store for ForeignStore {
    fn name(&self) -> &'static str {
        NAME
    }

    fn abilities(&self) -> StoreAbilities {
        StoreAbilities {
            // Only the master knows, and it does not say in the client's API.
            bound: false,
            // The master evicts what was not read for the longest time, before the store is full.
            retention: false,
            // Who wrote a payload removes it when its time is over.
            deadlines: false,
            // The master keeps a key until its writer ends, or is taken for dead.
            deletes_drafts: false,
        }
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    async fn create(&self, object: NewObject) -> Result<Box<dyn Draft>, StoreError> {
        let payload = object.payload;
        let parts: Vec<u64> = object.parts.iter().map(|part| part.0).collect();
        let wait = object.wait.min(LONGEST).as_secs_f64();
        let sizes = parts.clone();
        let created = self.call(payload, move |store| {
            let options = PyDict::new(store.py());
            options.set_item("payload_id", payload.to_string())?;
            options.set_item("wait", wait)?;
            Ok(store.call_method("create", (sizes,), Some(&options))?.unbind())
        });
        match created.await {
            Ok(draft) => Ok(Box::new(ForeignDraft {
                payload,
                draft: Some(Arc::new(draft)),
                parts: parts
                    .into_iter()
                    .map(|nbytes| Part::Bytes(vec![0; nbytes as usize]))
                    .collect(),
                ending: Arc::clone(&self.ending),
            })),
            Err(Fault::Exists) => {
                let sealed = self.find(payload).await.is_ok();
                Err(StoreError::Exists { payload, sealed })
            }
            Err(fault) => Err(fault.of(payload)),
        }
    }

    async fn get(&self, payload: PayloadId) -> Result<Arc<dyn Object>, StoreError> {
        let (placed, parts) = self.find(payload).await?;
        let parts = Arc::new(self.read(payload, placed, parts).await?);
        Ok(Arc::new(ForeignObject { payload, parts }))
    }

    async fn fetch(&self, payload: PayloadId, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
        let (placed, parts) = self.find(payload).await?;
        if parts.len() != destinations.len() {
            return Err(StoreError::Destinations {
                payload,
                parts: parts.len(),
                destinations: destinations.len(),
            });
        }
        let misfit = |part: usize, source| StoreError::Target {
            payload,
            part,
            wanted: ByteCount(parts[part]),
            found: ByteCount(destinations[part].len()),
            source,
        };
        for (part, destination) in destinations.iter().enumerate() {
            let (end, len) = (parts[part], destination.len());
            if end != len {
                return Err(misfit(part, TargetError::OutOfBounds { start: 0, end, len }));
            }
        }
        let begin = |(part, destination): (usize, &Arc<Target>)| {
            let filling = destination.begin();
            filling.map_err(|source| misfit(part, source))
        };
        let fillings = destinations
            .iter()
            .enumerate()
            .map(begin)
            .collect::<Result<Vec<Filling>, _>>()?;
        let read = self.read(payload, placed, parts.clone()).await?;
        for (mut filling, bytes) in fillings.into_iter().zip(read) {
            filling.bytes_mut().copy_from_slice(&bytes);
            filling.commit();
        }
        Ok(())
    }

    async fn reserve(&self, nbytes: ByteCount, _wait: Duration) -> Result<Reservation, StoreError> {
        Err(StoreError::Unreserved {
            wanted: nbytes,
            waited: Duration::ZERO,
            usage: Box::default(),
        })
    }

    async fn delete(&self, payload: PayloadId, _token: Option<Token>) -> Result<(), StoreError> {
        let (placed, _) = self.find(payload).await?;
        let removed = self.call(payload, move |store| {
            store.call_method1("remove", (placed,))?.extract::<bool>()
        });
        match removed.await.map_err(|fault| fault.of(payload))? {
            true => Ok(()),
            false => Err(StoreError::NotFound { payload }),
        }
    }
}

/// One part of a draft.
#[derive(Debug)]
enum Part {
    Bytes(Vec<u8>),
    Target(Arc<Target>),
}

/// A payload that is being written. Its bytes go to the store when it is sealed.
#[derive(Debug)]
struct ForeignDraft {
    payload: PayloadId,
    /// `None` once it is being sealed.
    draft: Option<Arc<Py<PyAny>>>,
    parts: Vec<Part>,
    ending: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl ForeignDraft {
    fn part(&mut self, part: usize) -> Result<&mut Part, StoreError> {
        let (payload, parts) = (self.payload, self.parts.len());
        let found = self.parts.get_mut(part);
        found.ok_or(StoreError::NoSuchPart { payload, part, parts })
    }

    /// The bytes of every part, which nobody writes any more.
    fn freeze(&mut self) -> Result<Vec<Vec<u8>>, StoreError> {
        let payload = self.payload;
        let freeze = |(part, bytes)| match bytes {
            Part::Bytes(bytes) => Ok(bytes),
            Part::Target(target) => {
                let target = Arc::try_unwrap(target).map_err(|_| StoreError::Busy { payload, part })?;
                let bytes = target.as_slice().map(<[u8]>::to_vec);
                bytes.map_err(|_| StoreError::Unwritten { payload, part })
            }
        };
        std::mem::take(&mut self.parts)
            .into_iter()
            .enumerate()
            .map(freeze)
            .collect()
    }
}

#[async_trait]
impl Draft for ForeignDraft {
    fn payload(&self) -> PayloadId {
        self.payload
    }

    fn bytes_mut(&mut self, part: usize) -> Result<&mut [u8], StoreError> {
        let payload = self.payload;
        match self.part(part)? {
            Part::Bytes(bytes) => Ok(bytes),
            Part::Target(_) => Err(StoreError::Busy { payload, part }),
        }
    }

    fn target(&mut self, part: usize) -> Result<Arc<Target>, StoreError> {
        let (payload, parts) = (self.payload, self.parts.len());
        let place = self.part(part)?;
        if let Part::Bytes(bytes) = place {
            let len = bytes.len() as u64;
            if len == 0 {
                return Err(StoreError::NoSuchPart { payload, part, parts });
            }
            let target = Target::allocate(len).map_err(|source| StoreError::Target {
                payload,
                part,
                wanted: ByteCount(len),
                found: ByteCount(0),
                source,
            })?;
            *place = Part::Target(Arc::new(target));
        }
        match place {
            Part::Target(target) => Ok(Arc::clone(target)),
            Part::Bytes(_) => unreachable!("made a target above"),
        }
    }

    async fn seal(mut self: Box<Self>) -> Result<Arc<dyn Object>, StoreError> {
        let payload = self.payload;
        let parts = Arc::new(self.freeze()?);
        let (draft, bytes) = (self.draft.take().expect("sealed once"), Arc::clone(&parts));
        let sealed = with_gil(payload, draft, move |draft| {
            for (part, bytes) in bytes.iter().enumerate() {
                let tensor = draft.call_method1("part", (part,))?;
                let tensor = tensor.cast::<Tensor>()?.get();
                tensor.overwrite(draft.py(), bytes)?;
            }
            draft.call_method0("seal").map(drop)
        });
        sealed.await.map_err(|fault| fault.of(payload))?;
        Ok(Arc::new(ForeignObject { payload, parts }))
    }
}

impl Drop for ForeignDraft {
    fn drop(&mut self) {
        let Some(draft) = self.draft.take() else { return };
        let abort = spawn_blocking(move || {
            // A draft that cannot be aborted now is given up by the master later.
            Python::attach(|py| drop(draft.bind(py).call_method0("abort")));
        });
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).push(abort);
    }
}

/// The bytes of a payload, in memory of this process.
#[derive(Debug)]
struct ForeignObject {
    payload: PayloadId,
    parts: Arc<Vec<Vec<u8>>>,
}

impl Object for ForeignObject {
    fn payload(&self) -> PayloadId {
        self.payload
    }

    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn part(&self, part: usize) -> Option<&[u8]> {
        self.parts.get(part).map(Vec::as_slice)
    }

    fn regions(&self) -> Vec<Option<RegionRef>> {
        // What Mooncake holds, Mooncake shows.
        vec![None; self.parts.len()]
    }
}

/// Runs `call` with the GIL on a thread that may wait for it.
async fn with_gil<T: Send + 'static>(
    payload: PayloadId,
    object: Arc<Py<PyAny>>,
    call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
) -> Result<T, Fault> {
    let called = spawn_blocking(move || {
        Python::attach(|py| {
            let called = call(object.bind(py));
            // The last reference may go here, where the GIL is held.
            drop(object);
            called.map_err(|error| Fault::new(py, payload, &error))
        })
    });
    called
        .await
        .unwrap_or_else(|error| Err(Fault::internal(payload, error.to_string())))
}

impl Fault {
    /// What an exception says; those of this package say it in their attributes.
    fn new(py: Python<'_>, payload: PayloadId, error: &PyErr) -> Self {
        let text = |name: &str| error.value(py).getattr(name)?.extract::<String>();
        let (Ok(class), Ok(reason), Ok(message)) = (text("error_class"), text("reason"), text("message")) else {
            return Self::internal(payload, error.to_string());
        };
        match reason.as_str() {
            "store.exists" => Self::Exists,
            "payload.gone" => Self::Other(StoreError::NotFound { payload }),
            "store.not_sealed" => Self::Other(StoreError::NotSealed { payload }),
            _ => {
                let class = ErrorClass::from_name(&class).unwrap_or(ErrorClass::Internal);
                Self::failed(payload, Failure::new(class, &reason, message))
            }
        }
    }

    fn internal(payload: PayloadId, message: String) -> Self {
        Self::failed(payload, Failure::new(ErrorClass::Internal, "store.backend", message))
    }

    const fn failed(payload: PayloadId, failure: Failure) -> Self {
        Self::Other(StoreError::Backend {
            payload,
            store: NAME,
            failure,
        })
    }

    fn of(self, payload: PayloadId) -> StoreError {
        match self {
            Self::Exists => StoreError::Exists { payload, sealed: false },
            Self::Other(error) => error,
        }
    }
}
