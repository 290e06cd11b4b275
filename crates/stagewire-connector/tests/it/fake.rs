//! An orchestrator that does what the test says.

use std::time::Duration;

use stagewire_api::v1::orchestrator_server::{Orchestrator, OrchestratorServer};
use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{RunDir, SERVER_FILE_SCHEMA, ServerFile, v1};
use stagewire_core::{ErrorClass, Failure, Handle, PayloadId, Peer, ProcessRef, Token};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::PATIENCE;

/// How long its workers live on without it.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

/// One life of the orchestrator. Dropped, it is gone, with all its streams.
pub(crate) struct Fake {
    streams: mpsc::Receiver<Attached>,
    serving: JoinHandle<()>,
}

/// The orchestrator's end of one worker's stream.
pub(crate) struct Attached {
    pub(crate) hello: v1::Hello,
    incoming: Streaming<v1::WorkerMessage>,
    outgoing: mpsc::Sender<Result<v1::ServerMessage, Status>>,
}

struct Service {
    store: Option<Peer>,
    attached: mpsc::Sender<Attached>,
}

#[tonic::async_trait]
impl Orchestrator for Service {
    type AttachStream = ReceiverStream<Result<v1::ServerMessage, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut incoming = request.into_inner();
        let Some(ToServer::Hello(hello)) = incoming.message().await?.and_then(|message| message.message) else {
            return Err(Status::invalid_argument("no hello"));
        };
        let (outgoing, stream) = mpsc::channel(16);
        let attached = Attached {
            hello,
            incoming,
            outgoing,
        };
        let store = self
            .store
            .as_ref()
            .map(|peer| postcard::to_stdvec(peer).expect("plain data"));
        attached
            .send(FromServer::Welcome(v1::Welcome {
                epoch: 1,
                renew_interval_ms: 50,
                linger_ms: u64::try_from(LINGER.as_millis()).expect("short"),
                store: store.unwrap_or_default(),
            }))
            .await;
        let over = |_| Status::unavailable("the test is over");
        self.attached.send(attached).await.map_err(over)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl Fake {
    pub(crate) async fn start(run_dir: &RunDir, store: Option<Peer>) -> Self {
        run_dir.create().expect("a run directory");
        run_dir
            .write_private("worker.token", b"deployment-token")
            .expect("written");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let file = ServerFile {
            schema: SERVER_FILE_SCHEMA,
            process: ProcessRef {
                pid: std::process::id(),
                started: 0,
            },
            http: listener.local_addr().expect("bound").to_string(),
            pipeline: "test".to_owned(),
            epoch: 1,
        };
        run_dir.announce(&file).expect("written");
        let (attached, streams) = mpsc::channel(4);
        let service = OrchestratorServer::new(Service { store, attached });
        let server = tonic::transport::Server::builder().add_service(service);
        let serving = tokio::spawn(async move {
            server
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .expect("serves");
        });
        Self { streams, serving }
    }

    pub(crate) async fn attached(&mut self) -> Attached {
        let attached = tokio::time::timeout(PATIENCE, self.streams.recv()).await;
        attached.expect("a worker in time").expect("the server lives")
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Attached {
    pub(crate) async fn send(&self, message: FromServer) {
        let message = v1::ServerMessage { message: Some(message) };
        self.outgoing.send(Ok(message)).await.expect("the worker reads");
    }

    /// The next message that is not a renewal.
    pub(crate) async fn said(&mut self) -> ToServer {
        loop {
            match self.next().await {
                ToServer::Renew(_) => {}
                message => return message,
            }
        }
    }

    pub(crate) async fn next(&mut self) -> ToServer {
        let message = tokio::time::timeout(PATIENCE, self.incoming.message())
            .await
            .expect("a message in time");
        message
            .expect("no error")
            .expect("the stream goes on")
            .message
            .expect("a known message")
    }

    /// Offers an attempt and grants it.
    pub(crate) async fn grant(&mut self, offer: v1::Offer) {
        let token = offer.token.clone();
        self.send(FromServer::Offer(offer)).await;
        match self.said().await {
            ToServer::Accept(accepted) => assert_eq!(Some(&accepted), token.as_ref()),
            other => panic!("not accepted: {other:?}"),
        }
        self.send(FromServer::Grant(token.expect("an offer has a token"))).await;
    }

    pub(crate) async fn published(&mut self, token: Token) -> (v1::Payload, Handle) {
        match self.said().await {
            ToServer::Published(v1::Published {
                token: Some(said),
                payload: Some(payload),
            }) => {
                assert_eq!(said, token.into());
                let handle = Handle::from_bytes(&payload.handle).expect("a handle");
                (payload, handle)
            }
            other => panic!("not published: {other:?}"),
        }
    }

    pub(crate) async fn completed(&mut self, token: Token) -> v1::Completed {
        match self.said().await {
            ToServer::Completed(completed) => {
                assert_eq!(completed.token, Some(token.into()));
                completed
            }
            other => panic!("not completed: {other:?}"),
        }
    }

    pub(crate) async fn failed(&mut self, token: Token) -> (Failure, Vec<u8>) {
        match self.said().await {
            ToServer::Failed(v1::Failed {
                token: Some(said),
                failure: Some(failure),
                lost_payload,
            }) => {
                assert_eq!(said, token.into());
                (failure.into(), lost_payload)
            }
            other => panic!("not failed: {other:?}"),
        }
    }

    pub(crate) async fn stopped(&mut self, token: Token) {
        match self.said().await {
            ToServer::Stopped(said) => assert_eq!(said, token.into()),
            other => panic!("not stopped: {other:?}"),
        }
    }

    pub(crate) async fn checkpoint(&mut self, token: Token) -> (v1::Checkpoint, Handle) {
        match self.said().await {
            ToServer::Checkpoint(checkpoint) => {
                assert_eq!(checkpoint.token, Some(token.into()));
                let payload = checkpoint.payload.as_ref().expect("a payload");
                let handle = Handle::from_bytes(&payload.handle).expect("a handle");
                (checkpoint, handle)
            }
            other => panic!("no checkpoint: {other:?}"),
        }
    }

    pub(crate) async fn yielded(&mut self, token: Token) -> v1::Yielded {
        match self.said().await {
            ToServer::Yielded(yielded) => {
                assert_eq!(yielded.token, Some(token.into()));
                yielded
            }
            other => panic!("not yielded: {other:?}"),
        }
    }

    pub(crate) async fn ask_to_yield(&self, token: Token) {
        let failure = Failure::new(
            ErrorClass::Unavailable,
            "attempt.preempted",
            "somebody more urgent waits",
        );
        let asked = v1::Yield {
            token: Some(token.into()),
            failure: Some(failure.into()),
        };
        self.send(FromServer::Yield(asked)).await;
    }

    pub(crate) async fn accept(&self, token: Token) {
        self.send(FromServer::Accepted(token.into())).await;
    }

    pub(crate) async fn cancel(&self, token: Token) {
        let failure = Failure::new(ErrorClass::Cancelled, "job.cancelled", "nobody wants it any more");
        let cancel = v1::Cancel {
            token: Some(token.into()),
            failure: Some(failure.into()),
        };
        self.send(FromServer::Cancel(cancel)).await;
    }

    pub(crate) async fn refuse(&self, token: Token) {
        let failure = Failure::new(ErrorClass::Fenced, "attempt.superseded", "it came too late");
        let refused = v1::Refused {
            token: Some(token.into()),
            failure: Some(failure.into()),
        };
        self.send(FromServer::Refused(refused)).await;
    }

    pub(crate) async fn release(&self, payload: PayloadId) {
        self.send(FromServer::Release(payload.0.as_bytes().to_vec())).await;
    }
}
