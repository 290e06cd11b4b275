//! Finding the server and opening a stream to it.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status, Streaming};

use super::{AttachError, SessionOptions, Shared};
use crate::v1::orchestrator_client::OrchestratorClient;
use crate::v1::server_message::Message as FromServer;
use crate::v1::worker_message::Message as ToServer;
use crate::{PROTOCOL, host_id, v1};

/// Messages in flight to the server. More means that the server has stopped reading: the stream is given up.
const IN_FLIGHT: usize = 1024;
/// Longest message of the server: an offer with several handles, each with metadata of up to 16 MiB.
const LONGEST_MESSAGE: usize = 128 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_BACK_OFF: Duration = Duration::from_millis(50);
const LAST_BACK_OFF: Duration = Duration::from_secs(1);

/// One connected stream.
pub(super) struct Stream {
    pub(super) sender: mpsc::Sender<v1::WorkerMessage>,
    pub(super) receiver: Streaming<v1::ServerMessage>,
    pub(super) welcome: v1::Welcome,
}

/// Why one try to connect failed, and whether another makes sense.
enum Try {
    Again(AttachError),
    Final(AttachError),
}

/// Looks for the server until `within` is over, again and again.
pub(super) async fn connect(
    options: &SessionOptions,
    shared: &Shared,
    within: Duration,
) -> Result<Stream, AttachError> {
    let begin = Instant::now();
    let mut back_off = FIRST_BACK_OFF;
    loop {
        let error = match try_connect(options, shared, begin).await {
            Ok(stream) => return Ok(stream),
            Err(Try::Final(error)) => return Err(error),
            Err(Try::Again(error)) => error,
        };
        if begin.elapsed() + back_off > within {
            return Err(error);
        }
        tokio::time::sleep(back_off).await;
        back_off = (back_off * 2).min(LAST_BACK_OFF);
    }
}

async fn try_connect(options: &SessionOptions, shared: &Shared, begin: Instant) -> Result<Stream, Try> {
    let no_server = |source| {
        Try::Again(AttachError::NoServer {
            waited: begin.elapsed(),
            source,
        })
    };
    let file = options.run_dir.server().map_err(no_server)?;
    let token = options.run_dir.worker_token().map_err(no_server)?;
    let address = file.http;
    let unreachable = |error: String| {
        Try::Again(AttachError::Unreachable {
            address: address.clone(),
            waited: begin.elapsed(),
            error,
        })
    };
    let refused = |status: Status| {
        let (code, message) = (status.code(), status.message().to_owned());
        let worker = options.name.clone();
        Try::Final(AttachError::Refused {
            address: address.clone(),
            worker,
            stage: options.stage.clone(),
            code,
            message,
        })
    };
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|error| unreachable(error.to_string()))?;
    let channel = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .connect()
        .await
        .map_err(|error| unreachable(chain(&error)))?;

    let (sender, outgoing) = mpsc::channel(IN_FLIGHT);
    sender
        .try_send(wrap(ToServer::Hello(hello(options, shared))))
        .expect("the channel is new and not empty of room");
    let mut request = Request::new(ReceiverStream::new(outgoing));
    let bearer: MetadataValue<Ascii> = format!("Bearer {token}")
        .parse()
        .map_err(|_| unreachable("the worker token is not text".to_owned()))?;
    request.metadata_mut().insert("authorization", bearer);
    let judge = |status: Status| match status.code() {
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::DeadlineExceeded => {
            unreachable(status.message().to_owned())
        }
        _ => refused(status),
    };
    let answer = async {
        let mut receiver = OrchestratorClient::new(channel)
            .max_decoding_message_size(LONGEST_MESSAGE)
            .attach(request)
            .await?
            .into_inner();
        match receiver.message().await?.and_then(|message| message.message) {
            Some(FromServer::Welcome(welcome)) => Ok((receiver, welcome)),
            _ => Err(Status::failed_precondition(
                "the server did not begin with a welcome; is it another version?",
            )),
        }
    };
    match tokio::time::timeout(CONNECT_TIMEOUT, answer).await {
        Ok(Ok((receiver, welcome))) => Ok(Stream {
            sender,
            receiver,
            welcome,
        }),
        Ok(Err(status)) => Err(judge(status)),
        Err(_) => Err(unreachable(format!("no welcome within {CONNECT_TIMEOUT:?}"))),
    }
}

fn hello(options: &SessionOptions, shared: &Shared) -> v1::Hello {
    let mut state = shared.lock();
    // What waited for the old stream is in the outbox as well, or was an answer to an offer that is void now.
    state.queue.retain(|message| matches!(message, ToServer::Stopped(_)));
    v1::Hello {
        protocol: PROTOCOL,
        incarnation: options.incarnation.0.as_bytes().to_vec(),
        pipeline: options.pipeline.clone(),
        stage: options.stage.to_string(),
        name: options.name.clone(),
        slots: options.slots,
        max_batch: options.max_batch,
        member: options.member.clone().map(v1::Member::from),
        numa: options.numa,
        rail: options.rail,
        pid: options.process.pid,
        started: options.process.started,
        host: host_id(),
        running: state.outbox.running(),
        holding: state.holding.iter().map(|id| id.0.as_bytes().to_vec()).collect(),
    }
}

pub(super) fn wrap(message: ToServer) -> v1::WorkerMessage {
    v1::WorkerMessage { message: Some(message) }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}
