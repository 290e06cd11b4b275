use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use stagewire_core::ErrorClass;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, ClientError, DeadLetter, DeadLetters, Job};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};

const EXAMPLES: &str = "\
Examples:
  stagewire dlq list
  stagewire dlq show 0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10
  stagewire dlq redrive --all                       once the cause is mended
  stagewire dlq discard 0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10";

/// Jobs that failed for good: look at them, try them again, or let them go
///
/// The server keeps such a job with its parameters, its inputs and what became of its attempts, until somebody decides.
/// It keeps 1000; beyond, it discards those that died first.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct DlqArgs {
    #[command(subcommand)]
    command: Dlq,
}

#[derive(Debug, Subcommand)]
enum Dlq {
    List(ListArgs),
    Show(ShowArgs),
    Redrive(RedriveArgs),
    Discard(DiscardArgs),
}

/// List the dead letters, newest first
#[derive(Debug, Args)]
struct ListArgs {
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u16,

    #[command(flatten)]
    server: ServerArgs,
}

/// Show one dead letter: what it died of, and what became of its attempts
#[derive(Debug, Args)]
struct ShowArgs {
    /// Id of the job
    #[arg(value_name = "JOB")]
    id: String,

    #[command(flatten)]
    server: ServerArgs,
}

/// Try dead letters again, under the same ids, as if submitted now
#[derive(Debug, Args)]
struct RedriveArgs {
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    server: ServerArgs,
}

/// Keep dead letters no longer: they are failed jobs like others
#[derive(Debug, Args)]
struct DiscardArgs {
    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Args)]
struct Which {
    /// Ids of the jobs
    #[arg(value_name = "JOB", required_unless_present = "all")]
    ids: Vec<String>,

    /// All that there are
    #[arg(long, conflicts_with = "ids")]
    all: bool,
}

impl DlqArgs {
    /// Whether a machine reads stdout.
    pub(crate) const fn json(&self) -> bool {
        match &self.command {
            Dlq::List(args) => args.server.json,
            Dlq::Show(args) => args.server.json,
            Dlq::Redrive(args) => args.server.json,
            Dlq::Discard(args) => args.server.json,
        }
    }
}

pub(crate) async fn run(args: DlqArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = |server: &ServerArgs| Client::new(global.run_dir.as_deref(), server);
    match args.command {
        Dlq::List(args) => list(&client(&args.server)?, args.limit, output).await,
        Dlq::Show(args) => show(&client(&args.server)?, &args.id, output).await,
        Dlq::Redrive(args) => settle(&client(&args.server)?, args.which, "redrive", output).await,
        Dlq::Discard(args) => settle(&client(&args.server)?, args.which, "discard", output).await,
    }
}

async fn list(client: &Client, limit: u16, output: &Output) -> Result<Exit, Fault> {
    let found: Value = client.get(&format!("/v1/dead-letters?limit={limit}")).await?;
    if output.json {
        output.document(&found)?;
        return Ok(Exit::Done);
    }
    let found: DeadLetters = serde_json::from_value(found)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let row = |letter: &DeadLetter| {
        let age = duration(now.saturating_sub(Duration::from_nanos(letter.died_ns)));
        let why = letter.failure.message.lines().next().unwrap_or_default().to_owned();
        [
            letter.id.clone(),
            letter.cause.clone(),
            age,
            letter.attempts.len().to_string(),
            why,
        ]
    };
    let rows: Vec<_> = found.dead_letters.iter().map(row).collect();
    output.table(["JOB", "CAUSE", "DEAD FOR", "ATTEMPTS", ""], &rows)?;
    Ok(Exit::Done)
}

async fn show(client: &Client, id: &str, output: &Output) -> Result<Exit, Fault> {
    let found: Value = client.dead_letter(id).await?;
    if output.json {
        output.document(&found)?;
        return Ok(Exit::Done);
    }
    let letter: DeadLetter = serde_json::from_value(found)?;
    output.data(format_args!("{}  {}", letter.id, letter.cause))?;
    let rows: Vec<_> = letter
        .attempts
        .iter()
        .map(|attempt| {
            let took = duration(Duration::from_nanos(attempt.ended_ns.saturating_sub(attempt.began_ns)));
            let why = attempt
                .failure
                .as_ref()
                .and_then(|failure| failure.message.lines().next());
            let why = why.unwrap_or_default().to_owned();
            [
                attempt.stage.clone(),
                attempt.worker.clone(),
                attempt.end.clone(),
                took,
                why,
            ]
        })
        .collect();
    output.table(["STAGE", "WORKER", "END", "TOOK", ""], &rows)?;
    output.data(&letter.failure)?;
    Ok(Exit::Done)
}

/// Redrives or discards each, and shows what they are then. One that is refused holds up no other; with `--all`, one that
/// somebody else has settled meanwhile is left out.
async fn settle(client: &Client, which: Which, what: &str, output: &Output) -> Result<Exit, Fault> {
    let ids = if which.all { all(client).await? } else { which.ids };
    let mut jobs: Vec<Job> = Vec::with_capacity(ids.len());
    let mut refused: Option<ClientError> = None;
    for id in ids {
        match client.settle(&id, what).await {
            Ok(job) => {
                if !output.json {
                    output.data(format_args!("{}  {}", job.id, job.state))?;
                }
                jobs.push(job);
            }
            Err(ClientError::Refused(failure))
                if which.all && matches!(failure.class, ErrorClass::Conflict | ErrorClass::NotFound) => {}
            Err(error) => {
                let gone = error.is_away();
                if let Some(before) = refused.replace(error) {
                    output.warn(before);
                }
                if gone {
                    break;
                }
            }
        }
    }
    if output.json {
        output.document(&json!({"jobs": jobs}))?;
    } else if jobs.is_empty() && refused.is_none() {
        output.say("there are no dead letters");
    }
    refused.map_or(Ok(Exit::Done), |error| Err(error.into()))
}

/// The ids of all dead letters, those that died while it asks left out.
async fn all(client: &Client) -> Result<Vec<String>, Fault> {
    let mut ids = Vec::new();
    let mut page: DeadLetters = client.get("/v1/dead-letters?limit=1000").await?;
    loop {
        ids.extend(page.dead_letters.into_iter().map(|letter| letter.id));
        let Some(next) = page.next else { return Ok(ids) };
        page = client
            .get(&format!("/v1/dead-letters?limit=1000&before={next}"))
            .await?;
    }
}
