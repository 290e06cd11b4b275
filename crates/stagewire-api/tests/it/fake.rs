use std::net::SocketAddr;
use std::time::Duration;

use stagewire_api::v1::orchestrator_server::{Orchestrator, OrchestratorServer};
use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{RunDir, SERVER_FILE_SCHEMA, ServerFile, v1};
use stagewire_core::ProcessRef;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

pub(crate) const TOKEN: &str = "deployment-token";
pub(crate) const LINGER: Duration = Duration::from_millis(400);
/// Longest time that a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// One life of an orchestrator. Each attached stream is handed to the test.
pub(crate) struct Fake {
    pub(crate) streams: mpsc::Receiver<Attached>,
    serving: JoinHandle<()>,
}

/// The orchestrator's end of one worker's stream.
pub(crate) struct Attached {
    pub(crate) hello: v1::Hello,
    incoming: Streaming<v1::WorkerMessage>,
    outgoing: mpsc::Sender<Result<v1::ServerMessage, Status>>,
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
}

struct Service {
    epoch: u64,
    attached: mpsc::Sender<Attached>,
}

#[tonic::async_trait]
impl Orchestrator for Service {
    type AttachStream = ReceiverStream<Result<v1::ServerMessage, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let bearer = request
            .metadata()
            .get("authorization")
            .and_then(|value| value.to_str().ok());
        if bearer != Some(&format!("Bearer {TOKEN}")) {
            return Err(Status::unauthenticated("wrong worker token"));
        }
        let mut incoming = request.into_inner();
        let Some(ToServer::Hello(hello)) = incoming.message().await?.and_then(|message| message.message) else {
            return Err(Status::invalid_argument("no hello"));
        };
        let (outgoing, stream) = mpsc::channel(16);
        let welcome = v1::Welcome {
            epoch: self.epoch,
            renew_interval_ms: 50,
            linger_ms: u64::try_from(LINGER.as_millis()).expect("short"),
            store: Vec::new(),
        };
        let attached = Attached {
            hello,
            incoming,
            outgoing,
        };
        attached.send(FromServer::Welcome(welcome)).await;
        self.attached
            .send(attached)
            .await
            .map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl Fake {
    pub(crate) async fn start(run_dir: &RunDir, epoch: u64) -> Self {
        run_dir.create().expect("a run directory");
        run_dir
            .write_private("worker.token", TOKEN.as_bytes())
            .expect("written");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        announce(run_dir, listener.local_addr().expect("bound"), epoch);
        let (attached, streams) = mpsc::channel(4);
        let service = OrchestratorServer::new(Service { epoch, attached });
        let serving = tokio::spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .expect("serves");
        });
        Self { streams, serving }
    }

    pub(crate) async fn attached(&mut self) -> Attached {
        tokio::time::timeout(PATIENCE, self.streams.recv())
            .await
            .expect("a worker in time")
            .expect("the server lives")
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

pub(crate) fn announce(run_dir: &RunDir, address: SocketAddr, epoch: u64) {
    let process = ProcessRef {
        pid: std::process::id(),
        started: 0,
    };
    let (http, pipeline) = (address.to_string(), "test".to_owned());
    let file = ServerFile {
        schema: SERVER_FILE_SCHEMA,
        process,
        http,
        pipeline,
        epoch,
    };
    run_dir.announce(&file).expect("written");
}
