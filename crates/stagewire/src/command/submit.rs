mod artefacts;
mod inputs;
mod params;

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::artefacts::Outputs;
use crate::args::{Global, ServerArgs};
use crate::client::{Client, ClientError, Job, Pipeline};
use crate::command::up::seconds;
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};
use crate::progress::Progress;
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  stagewire submit \"a red cat\" --out cat.mp4
  stagewire submit \"a red cat\" --param steps=8 --param seed=7 --out results/      every artefact
  stagewire submit \"a red cat\" --out cat.mp4 --timeline cat.html
  stagewire submit - --out cat.mp4 <prompt.txt
  stagewire submit \"a red cat\" --class interactive --queue-deadline 30 --out cat.mp4
  stagewire submit \"it waves\" --param image=cat.png --out cat.mp4
  job=$(stagewire submit \"a red cat\" --no-wait); stagewire job $job

`stagewire stages` lists the parameters that the pipeline takes.";

/// Ask for something to be made, watch it being made, save what comes out
///
/// Ctrl-C cancels the job. When the server restarts in between, the command waits up to a minute for it and goes on.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct SubmitArgs {
    /// The parameter `prompt`; - reads it from stdin
    #[arg(value_name = "PROMPT")]
    prompt: Option<String>,

    /// Another parameter of the pipeline, a file for one of type input; may be repeated
    #[arg(long = "param", short = 'p', value_name = "NAME=VALUE")]
    params: Vec<String>,

    /// Its class: which share of the workers it gets. Default: standard
    #[arg(long, value_name = "CLASS")]
    class: Option<String>,

    /// Drop the job if it has not begun after so many seconds. Default: what the class says
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    queue_deadline: Option<Duration>,

    /// Save the artefact of this extension here; a directory takes all artefacts. May be repeated
    #[arg(long = "out", short = 'o', value_name = "FILE", conflicts_with = "no_wait")]
    out: Vec<PathBuf>,

    /// Save the timeline, as a page (.html) or as data (.json)
    #[arg(long, value_name = "FILE", conflicts_with = "no_wait")]
    timeline: Option<PathBuf>,

    /// Print the id of the job and leave
    #[arg(long)]
    no_wait: bool,

    /// Stop waiting after so many seconds; the job goes on
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_wait")]
    timeout: Option<Duration>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// How long the command goes on without a server: as long as the workers do.
const AWAY: Duration = Duration::from_secs(60);

pub(crate) async fn run(args: SubmitArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let outputs = Outputs::check(&args.out, args.timeline.as_deref())?;
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let mut signals = Signals::listen()?;
    let pipeline = client.pipeline().await?;
    let params = params::collect(prompt(args.prompt)?, &args.params, &pipeline)?;
    let params = inputs::send(&client, params, &pipeline).await?;
    // The key makes it safe to ask again when the answer is lost: there is one job, whatever happens.
    let key = uuid::Uuid::new_v4().to_string();
    let mut body = json!({ "params": params });
    if let Some(class) = &args.class {
        body["class"] = json!(class);
    }
    if let Some(deadline) = args.queue_deadline {
        body["queue_deadline_s"] = json!(deadline.as_secs_f64());
    }
    let job = patiently(|| client.submit(&body, &key)).await?;
    if args.no_wait {
        if output.json {
            output.document(&job)?;
        } else {
            output.data(&job.id)?;
        }
        return Ok(Exit::Done);
    }
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let watched = tokio::select! {
        job = follow(&client, &job.id, &pipeline, output) => job?,
        () = until(deadline) => {
            let waited = duration(args.timeout.unwrap_or_default());
            let text = format!("job {0} has not ended within {waited}; it goes on: stagewire job {0}", job.id);
            return Err(Fault::new(Exit::Deadline, text));
        }
        _ = signals.next() => return interrupted(&client, &job, output).await,
    };
    match watched.state.as_str() {
        "succeeded" => {
            outputs.save(&client, &watched, output).await?;
            Ok(Exit::Done)
        }
        state => {
            // The timeline tells why, so it is written for a job that failed, too.
            outputs.save_timeline(&client, &watched.id, output).await?;
            if output.json {
                output.document(&watched)?;
            }
            let reason = watched
                .failure
                .as_ref()
                .map_or_else(String::new, |failure| format!(": {failure}"));
            Err(Fault::failed(format!("job {} {state}{reason}", watched.id)))
        }
    }
}

fn prompt(given: Option<String>) -> Result<Option<String>, Fault> {
    if given.as_deref() != Some("-") {
        return Ok(given);
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| Fault::usage(format!("cannot read the prompt from stdin: {error}")))?;
    Ok(Some(text.trim_end_matches('\n').to_owned()))
}

/// Shows the job until it has ended, over restarts of the server.
async fn follow(client: &Client, id: &str, pipeline: &Pipeline, output: &Output) -> Result<Job, Fault> {
    let mut progress = Progress::new(&pipeline.stage_names(), output);
    let mut seen: Option<String> = None;
    let ended = loop {
        match watch(client, id, &mut seen, &mut progress).await {
            Ok(()) => {}
            Err(error) if error.is_away() => {}
            Err(error) => break Err(error.into()),
        }
        // The stream ends with the job, and with the server.
        match patiently(|| client.job(id)).await {
            Ok(job) if job.has_ended() => break Ok(job),
            Ok(_) => sleep(Duration::from_millis(100)).await,
            Err(fault) => break Err(fault),
        }
    };
    progress.end();
    ended
}

async fn watch(
    client: &Client,
    id: &str,
    seen: &mut Option<String>,
    progress: &mut Progress,
) -> Result<(), ClientError> {
    let mut events = client.events(id, seen.as_deref()).await?;
    loop {
        let next = {
            let mut next = std::pin::pin!(events.next());
            match timeout(Progress::QUIET, next.as_mut()).await {
                Ok(next) => next,
                Err(_) => {
                    progress.settle();
                    next.await
                }
            }
        };
        let Some(event) = next? else { break };
        *seen = events.last_id().map(str::to_owned);
        progress.show(&event);
        if event.is_last() {
            break;
        }
    }
    Ok(())
}

/// Asks again while the server is away, up to a minute.
async fn patiently<T, E: Into<Fault>, F: Future<Output = Result<T, E>>>(ask: impl Fn() -> F) -> Result<T, Fault> {
    let give_up = Instant::now() + AWAY;
    loop {
        match ask().await.map_err(E::into) {
            Ok(answer) => return Ok(answer),
            Err(fault) if fault.is_away() && Instant::now() < give_up => sleep(Duration::from_millis(250)).await,
            Err(fault) => return Err(fault),
        }
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn interrupted(client: &Client, job: &Job, output: &Output) -> Result<Exit, Fault> {
    match timeout(Duration::from_secs(5), client.cancel(&job.id)).await {
        Ok(Ok(_)) => output.say(format_args!("job {} is being cancelled", job.id)),
        _ => output.warn(format_args!("could not cancel: stagewire cancel {}", job.id)),
    }
    Ok(Exit::Interrupted)
}
