//! The owner's half.

use std::sync::Arc;
use std::time::Duration;

use crate::network::Placer;
use crate::table::Hold;
use crate::wire::Place;

/// How long memory that a lost or failed writer had pinned stays as it is. What it had sent may still be written, and
/// nobody can stop the engine from doing so: such a writer's last bytes are in the sockets of this host, and read at once.
pub(super) const QUARANTINE: Duration = Duration::from_secs(10);

pub(super) struct EnginePlacer;

impl Placer for EnginePlacer {
    fn place(&self, hold: &Arc<Hold>) -> Result<Place, String> {
        Ok(Place::Address(hold.memory().as_ptr().addr().get() as u64))
    }

    fn lost(&self, hold: &Arc<Hold>) {
        if hold.memory().is_writable() {
            let hold = hold.clone();
            tokio::spawn(async move {
                tokio::time::sleep(QUARANTINE).await;
                drop(hold);
            });
        }
    }
}
