use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};
use stagewire_core::Timestamp;

use super::lines::describe;
use crate::client::Event;
use crate::output::{Output, duration};

/// One bar for each stage, in the order of the pipeline.
#[derive(Debug)]
pub(crate) struct Bars {
    bars: Vec<Bar>,
    // Bars are drawn for as long as this lives.
    _all: MultiProgress,
}

#[derive(Debug)]
struct Bar {
    stage: String,
    began: Option<Timestamp>,
    bar: ProgressBar,
}

impl Bars {
    pub(super) fn new(stages: &[String], output: &Output) -> Self {
        let all = MultiProgress::new();
        output.around(&all);
        let width = stages.iter().map(String::len).max().unwrap_or(0);
        let style = ProgressStyle::with_template("{prefix:.bold} {bar:30.green/dim} {msg}")
            .expect("the template is right")
            .progress_chars("━╸━");
        let bar = |stage: &String| {
            let bar = all.add(ProgressBar::new(1).with_finish(ProgressFinish::Abandon));
            bar.set_style(style.clone());
            bar.set_prefix(format!("{stage:<width$}"));
            bar.set_message("waits for its input");
            bar.enable_steady_tick(Duration::from_millis(250));
            Bar {
                stage: stage.clone(),
                began: None,
                bar,
            }
        };
        Self {
            bars: stages.iter().map(bar).collect(),
            _all: all,
        }
    }

    pub(super) fn show(&mut self, event: &Event) {
        let of_stage = |bar: &&mut Bar| event.stage.as_deref() == Some(bar.stage.as_str());
        let Some(Bar { began, bar, .. }) = self.bars.iter_mut().find(of_stage) else {
            return;
        };
        match event.kind.as_str() {
            "running" => {
                *began = Some(event.at_ns);
                bar.set_position(0);
            }
            "progress" => {
                if let Some(progress) = &event.progress {
                    bar.set_length(progress.total.max(1));
                    bar.set_position(progress.done);
                }
            }
            "stage_done" => {
                bar.set_position(bar.length().unwrap_or(1));
                let took = began.map_or_else(String::new, |began| {
                    format!(" after {}", duration(event.at_ns.since(began)))
                });
                bar.abandon_with_message(format!("done{took}"));
                return;
            }
            "requeued" => {
                bar.reset();
                *began = None;
            }
            "yielded" => *began = None,
            // What the producer says of its payload, the consumer's bar shows better.
            "published" => return,
            _ => {}
        }
        if let Some(text) = describe(event) {
            bar.set_message(text);
        }
    }

    pub(super) fn end(&mut self) {
        for bar in &self.bars {
            if !bar.bar.is_finished() {
                bar.bar.abandon();
            }
        }
    }
}
