use stagewire_core::StageName;
use tokio::sync::oneshot;

use super::*;

/// Whoever stops waiting for a close: the next one goes on with it.
#[tokio::test]
async fn a_close_that_was_given_up_is_finished_by_the_next() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = ConnectorOptions::new(dir.path().join("run"), StageName::new("denoise").expect("a name"));
    let connector = Connector::start(options).await.expect("a connector");
    let (end, ended) = oneshot::channel::<()>();
    // On its way into a store.
    tokio::spawn(connector.shared().track_move(async move { drop(ended.await) }));
    for _ in 0..2 {
        let mut closing = Box::pin(connector.close());
        assert!(futures::poll!(&mut closing).is_pending(), "something moves");
    }
    drop(end);
    connector.close().await;
    assert!(connector.shared().moving.is_empty());
    let mut again = Box::pin(connector.close());
    assert!(futures::poll!(&mut again).is_ready());
}
