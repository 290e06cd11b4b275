//! Moving a payload into the store.

use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Handle, Token};
use tokio::time::Instant;

use crate::PutError;
use crate::connector::Shared;
use crate::live::Gone;
use crate::wire::{Refusal, Reply, Request};

/// How much longer the answer may take than what the store itself waits.
const GRACE: Duration = Duration::from_secs(5);

pub(crate) async fn put(
    shared: &Arc<Shared>,
    handle: &Handle,
    token: Option<Token>,
    wait: Duration,
) -> Result<Handle, PutError> {
    let payload = handle.payload;
    let live = shared.table().get(payload).ok_or(PutError::NotHeld { payload })?;
    let store = shared.store().ok_or(PutError::NoStore { payload })?;
    let begin = Instant::now();
    let exchange = async {
        let link = shared.links().to(&store).await?;
        let left = wait.saturating_sub(begin.elapsed());
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let request = |id| Request::Put {
            id,
            handle: live.handle().to_bytes(),
            token,
            owner: live.owner(),
            expires_ms: live.left().map(millis),
            wait_ms: millis(left),
        };
        Ok(link.ask(request).await)
    };
    let waited = wait.saturating_add(GRACE);
    let reply = tokio::time::timeout(waited, exchange).await;
    let reply = reply.map_err(|_| PutError::Deadline { payload, waited })?;
    match reply.map_err(|source| PutError::Link { payload, source })? {
        None => Err(PutError::StoreLost { payload }),
        Some(Reply::Stored { handle, .. }) => {
            let answer = "with a handle that does not decode";
            let stored = Handle::from_bytes(&handle).map_err(|_| PutError::Protocol { payload, answer })?;
            shared.table().release_this(&live, Gone::Released);
            Ok(stored)
        }
        Some(Reply::Refused { refusal, .. }) => Err(match refusal {
            Refusal::Put(failure) => PutError::Refused { payload, failure },
            Refusal::NoStore => PutError::Protocol {
                payload,
                answer: "that it keeps none",
            },
            _ => PutError::Protocol {
                payload,
                answer: "with a refusal that is not about a put",
            },
        }),
        Some(Reply::State { .. } | Reply::Finished { .. }) => Err(PutError::Protocol {
            payload,
            answer: "to something else",
        }),
    }
}
