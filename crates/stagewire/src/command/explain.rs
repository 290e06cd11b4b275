use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::args::{Global, ServerArgs};
use crate::client::{Choice, ChoiceClass, ChoiceWorker, Client, Waiting};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};

const EXAMPLES: &str = "\
Examples:
  stagewire explain 0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10
  stagewire explain $job --json | jq '.waiting[].ahead'";

/// Say what a job waits for, stage by stage, with all numbers
///
/// Of each stage that is not done: the cause, in words, and the numbers behind it, such as its rank in its class, slots
/// that are in use, and bytes that are missing. Of each stage that was offered since the server started: why this job, and
/// why to this worker.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct ExplainArgs {
    /// Id of the job, as `submit` and `jobs` print it
    #[arg(value_name = "JOB")]
    id: String,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: ExplainArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let job = client.job(&args.id).await?;
    if output.json {
        output.document(&json!({"id": job.id, "state": job.state, "waiting": job.waiting, "choices": job.choices}))?;
        return Ok(Exit::Done);
    }
    output.data(format_args!("{}  {}", job.id, job.state))?;
    let rows: Vec<_> = job.waiting.iter().flat_map(rows).collect();
    if !rows.is_empty() {
        output.table(["STAGE", "CAUSE", "FOR", ""], &rows)?;
    }
    let choices: Vec<_> = job.choices.iter().flat_map(chosen).collect();
    if !choices.is_empty() {
        output.table(["STAGE", "OFFERED TO", "WHY"], &choices)?;
    }
    if let Some(failure) = &job.failure {
        output.data(failure)?;
    }
    Ok(Exit::Done)
}

/// Who got it and why, and under that why this job was next.
fn chosen(choice: &Choice) -> Vec<[String; 3]> {
    let list = |of: &mut dyn Iterator<Item = String>| of.collect::<Vec<_>>().join(", ");
    let workers = |chosen: bool| choice.workers.iter().filter(move |worker| worker.chosen == chosen);
    let mut why = list(&mut workers(true).map(place));
    if workers(false).next().is_some() {
        let others = workers(false).map(|worker| format!("{} {}", worker.worker, place(worker)));
        why = format!("{why}; not {}", list(&mut others.into_iter()));
    }
    let who = list(&mut workers(true).map(|worker| worker.worker.clone()));
    let classes = choice.classes.iter().map(turn);
    let turn = match (&*choice.because, &choice.along) {
        (_, Some(job)) => format!("it came along with job {job}"),
        ("oldest", _) => "nothing else went on: it is the oldest of those that hold what others wait for".to_owned(),
        _ => list(&mut classes.into_iter()),
    };
    vec![[choice.stage.clone(), who, why], [String::new(), String::new(), turn]]
}

/// How a worker compares with others.
fn place(worker: &ChoiceWorker) -> String {
    let steps = worker.steps.map(|steps| match steps {
        1 => "1 step away, ".to_owned(),
        steps => format!("{steps} steps away, "),
    });
    format!(
        "({}{} of {} slots in use, costs {})",
        steps.unwrap_or_default(),
        worker.used,
        worker.slots,
        duration(Duration::from_nanos(worker.cost_ns))
    )
}

/// When a class would have started its first job.
fn turn(class: &ChoiceClass) -> String {
    let predicted = duration(Duration::from_nanos(class.predicted_ns));
    let when = match (class.owed, class.turns) {
        (true, _) => "is owed a start".to_owned(),
        (false, 0) => "has its turn".to_owned(),
        (false, 1) => "in 1 turn".to_owned(),
        (false, turns) => format!("in {turns} turns"),
    };
    let chosen = if class.chosen { ", chosen" } else { "" };
    format!("class {} {when} (predicted {predicted}{chosen})", class.class)
}

/// The words, and under them the numbers.
fn rows(waiting: &Waiting) -> Vec<[String; 4]> {
    let stage = waiting.stage.clone().unwrap_or_default();
    let waited = waiting.waited_ns.map(Duration::from_nanos);
    let waited = waited.map(duration).unwrap_or_default();
    let numbers: Vec<String> = waiting
        .numbers()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    let mut rows = vec![[stage, waiting.cause.clone(), waited, waiting.message.clone()]];
    if !numbers.is_empty() {
        rows.push([String::new(), String::new(), String::new(), numbers.join(", ")]);
    }
    rows
}
