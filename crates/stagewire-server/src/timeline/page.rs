//! The page: one file that needs nothing else, in which everything that came from outside is escaped.

use std::fmt::Write;
use std::time::Duration;

use stagewire_core::{ByteCount, StageName, Timestamp, TransferMode};

use super::{AttemptBar, ChunkMark, End, StageLane, Timeline};

const STYLE: &str = include_str!("page.css");
/// Colours that lanes share.
const COLOURS: usize = 6;
/// Height of a lane, and where in it a bar ends and its chunks begin. `page.css` says the same.
const LANE: usize = 88;
const BAR_END: usize = 42;
const CHUNK_BEGIN: usize = 54;
/// Chunks above which the lines between lanes would hide what they connect.
const MOST_LINKS: usize = 128;
/// Rows of the table of chunks.
const MOST_ROWS: usize = 2048;
/// Longest parameters that are shown, in bytes.
const MOST_PARAMS: usize = 64 << 10;

/// Text as it may stand in HTML, in elements as well as in quoted attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Three digits and a unit; minutes from 120 s on.
fn shown(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let digits = |value: f64, unit: &str| match value {
        v if v < 10.0 => format!("{v:.2} {unit}"),
        v if v < 100.0 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    };
    match seconds {
        s if s < 1e-3 => digits(s * 1e6, "µs"),
        s if s < 1.0 => digits(s * 1e3, "ms"),
        s if s < 120.0 => digits(s, "s"),
        _ => format!("{} min {:02} s", duration.as_secs() / 60, duration.as_secs() % 60),
    }
}

/// Where times lie on the axis, in percent of its width.
struct Axis {
    begin: Timestamp,
    span: Duration,
}

impl Axis {
    #[expect(clippy::cast_precision_loss, reason = "a position on a screen")]
    fn at(&self, time: Timestamp) -> f64 {
        let part = time.since(self.begin).as_nanos() as f64 / self.span.as_nanos() as f64;
        (part * 100.0).clamp(0.0, 100.0)
    }

    /// Round times to mark: 1, 2 or 5 times a power of ten, at most 8 of them.
    fn ticks(&self) -> Vec<Duration> {
        let rough = self.span.as_secs_f64() / 7.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * power)
            .find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let ticks = (0..9).map(|n| Duration::from_secs_f64(f64::from(n) * step));
        ticks.take_while(|tick| *tick <= self.span).collect()
    }
}

/// The page of a timeline.
pub(crate) fn page(timeline: &Timeline, pipeline: &str, params: &str) -> String {
    let last = timeline
        .lanes
        .iter()
        .flat_map(|lane| &lane.attempts)
        .filter_map(|bar| bar.end)
        .max();
    let until = last.map_or(timeline.until, |last| last.max(timeline.until));
    let axis = Axis {
        begin: timeline.begin,
        span: until.since(timeline.begin).max(Duration::from_micros(1)),
    };
    let mut html = String::with_capacity(16 << 10);
    let written = write_page(&mut html, timeline, &axis, pipeline, params);
    written.expect("writing into a string does not fail");
    html
}

fn write_page(html: &mut String, timeline: &Timeline, axis: &Axis, pipeline: &str, params: &str) -> std::fmt::Result {
    let (job, pipeline) = (timeline.job, escape(pipeline));
    let mood = match timeline.state {
        "succeeded" => "good",
        "failed" | "cancelled" => "bad",
        _ => "busy",
    };
    write!(
        html,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{pipeline}: timeline of job {job}</title><style>{STYLE}</style></head><body><main>\
         <header><h1>{pipeline}</h1><span class=\"state {mood}\">{}</span>\
         <span class=\"soft mono\">{job}</span></header>",
        timeline.state
    )?;
    tiles(html, timeline)?;
    if let Some(failure) = &timeline.failure {
        write!(
            html,
            "<section class=\"card failure\"><h2>Why it failed</h2><span class=\"tag mono\">{}: {}</span><p>{}</p></section>",
            failure.class,
            escape(&failure.reason),
            escape(&failure.message)
        )?;
    }
    chart(html, timeline, axis)?;
    table(html, timeline)?;
    let cut = params.char_indices().map(|(at, _)| at).find(|at| *at >= MOST_PARAMS);
    write!(
        html,
        "<section class=\"card\"><details><summary>Parameters</summary><pre class=\"mono\">{}{}</pre></details></section>",
        escape(&params[..cut.unwrap_or(params.len())]),
        if cut.is_some() { "\n… cut here" } else { "" }
    )?;
    html.push_str(
        "<footer>Bars are in the server’s clock, chunks in that of the worker that received them. \
         Made by Stagewire.</footer></main></body></html>\n",
    );
    Ok(())
}

fn tiles(html: &mut String, timeline: &Timeline) -> std::fmt::Result {
    let total = timeline.until.since(timeline.begin);
    let bytes: u64 = timeline.chunks.iter().map(|mark| mark.handover.nbytes).sum();
    let waited: Duration = timeline.chunks.iter().map(took).sum();
    let attempts = timeline.lanes.iter().flat_map(|lane| &lane.attempts);
    let again = attempts.clone().filter(|bar| bar.how == End::Requeued).count();
    let last = timeline.lanes.last().map(|lane| &lane.stage);
    let first = timeline
        .chunks
        .iter()
        .filter(|mark| Some(&mark.to) == last)
        .map(|mark| mark.handover.end)
        .min();
    let first = first.map_or_else(|| "–".to_owned(), |first| shown(first.since(timeline.begin)));
    let tiles = [
        (
            shown(total),
            if timeline.ended {
                "from submission to the end"
            } else {
                "so far"
            }
            .to_owned(),
        ),
        (first, "until the first chunk was at the last stage".to_owned()),
        (
            ByteCount(bytes).to_string(),
            format!("handed over in {} chunks", timeline.chunks.len()),
        ),
        (shown(waited), "waited for the bytes of visible chunks".to_owned()),
        (
            attempts.count().to_string(),
            match again {
                0 => "attempts, none had to be repeated".to_owned(),
                n => format!("attempts, {n} of them repeated"),
            },
        ),
    ];
    html.push_str("<section class=\"tiles\">");
    for (value, what) in tiles {
        write!(html, "<div class=\"tile\"><b>{value}</b><span>{what}</span></div>")?;
    }
    html.push_str("</section>");
    Ok(())
}

fn took(mark: &ChunkMark) -> Duration {
    mark.handover.end.since(mark.handover.begin)
}

fn chart(html: &mut String, timeline: &Timeline, axis: &Axis) -> std::fmt::Result {
    html.push_str(
        "<section class=\"card\"><h2>Stages</h2><div class=\"legend\">\
         <span><i class=\"key\"></i>attempt</span><span><i class=\"key void\"></i>attempt without effect</span>\
         <span><i class=\"key idle\"></i>waits for a worker</span><span><i class=\"key mark\"></i>first chunk published</span>\
         <span><i class=\"key p2p\"></i>chunk received, P2P</span><span><i class=\"key store\"></i>chunk received, through the store</span>\
         </div><div class=\"chart\"><div class=\"names\">",
    );
    for lane in &timeline.lanes {
        let ran: Duration = lane
            .attempts
            .iter()
            .filter_map(|bar| Some(bar.end?.since(bar.begin)))
            .sum();
        let worker = lane
            .attempts
            .last()
            .and_then(|bar| bar.worker.as_deref())
            .unwrap_or(if lane.cached.is_some() { "cached" } else { "did not run" });
        write!(
            html,
            "<div class=\"name\"><b>{}</b><small>{}</small><small>{}</small></div>",
            escape(lane.stage.as_str()),
            escape(worker),
            if lane.attempts.is_empty() {
                String::new()
            } else {
                shown(ran)
            }
        )?;
    }
    html.push_str("</div><div class=\"plot\">");
    for tick in axis.ticks() {
        let left = axis.at(axis.begin + tick);
        let end = if left > 92.0 { " end" } else { "" };
        let label = if tick.is_zero() { "0".to_owned() } else { shown(tick) };
        write!(
            html,
            "<div class=\"tick{end}\" style=\"left:{left:.3}%\"><span>{label}</span></div>"
        )?;
    }
    for (index, lane) in timeline.lanes.iter().enumerate() {
        html.push_str("<div class=\"lane\">");
        for (n, bar) in lane.attempts.iter().enumerate() {
            let next = lane.attempts.get(n + 1).map_or(until(axis), |next| next.begin);
            attempt(html, axis, index, lane, bar, timeline.until, next)?;
        }
        for mark in timeline.chunks.iter().filter(|mark| mark.to == lane.stage) {
            chunk(html, axis, colour(timeline, &mark.handover.from), mark)?;
        }
        html.push_str("</div>");
    }
    links(html, timeline, axis)?;
    html.push_str("</div></div></section>");
    Ok(())
}

/// Where the axis ends.
fn until(axis: &Axis) -> Timestamp {
    axis.begin + axis.span
}

/// The colour of a stage is that of its lane.
fn colour(timeline: &Timeline, stage: &StageName) -> usize {
    timeline.lanes.iter().position(|lane| lane.stage == *stage).unwrap_or(0)
}

fn attempt(
    html: &mut String,
    axis: &Axis,
    index: usize,
    lane: &StageLane,
    bar: &AttemptBar,
    until: Timestamp,
    next: Timestamp,
) -> std::fmt::Result {
    let (left, right) = (axis.at(bar.begin), axis.at(bar.end.unwrap_or(until)));
    let width = right - left;
    if let Some(queued) = bar.queued.filter(|queued| *queued < bar.begin) {
        let from = axis.at(queued);
        let waited = shown(bar.begin.since(queued));
        write!(
            html,
            "<i class=\"wait\" title=\"waited {waited} for a worker\" style=\"left:{from:.3}%;width:{:.3}%\"></i>",
            left - from
        )?;
    }
    let class = match bar.how {
        End::Done => "",
        End::Running => " running",
        End::Requeued | End::Stopped => " void",
    };
    let number = bar
        .attempt
        .map_or_else(String::new, |attempt| format!("attempt {attempt}"));
    let duration = shown(bar.end.unwrap_or(until).since(bar.begin));
    let mut title = format!(
        "{} {number} on {}: {duration}",
        lane.stage,
        bar.worker.as_deref().unwrap_or("?")
    );
    if let Some(failure) = &bar.failure {
        write!(title, ", {} because {}", bar.how.name(), failure.message)?;
    }
    write!(
        html,
        "<i class=\"bar s{}{class}\" title=\"{}\" style=\"left:{left:.3}%;width:{width:.3}%\"></i>",
        index % COLOURS,
        escape(&title)
    )?;
    if let Some(published) = bar.published {
        let at = axis.at(published);
        let after = shown(published.since(bar.begin));
        write!(
            html,
            "<i class=\"first\" title=\"first chunk published after {after}\" style=\"left:{at:.3}%\"></i>"
        )?;
    }
    let label = if bar.how == End::Done {
        duration
    } else {
        format!("{duration}, {}", bar.how.name())
    };
    let place = match (width, right) {
        _ if class == " void" => format!("under\" style=\"left:{left:.3}%;width:{:.3}%", axis.at(next) - left),
        (12.0.., _) => format!("in\" style=\"left:{left:.3}%;width:{width:.3}%"),
        (_, ..80.0) => format!("out\" style=\"left:{right:.3}%"),
        _ => format!("out\" style=\"right:{:.3}%", 100.0 - left),
    };
    write!(html, "<span class=\"text {place}\">{label}</span>")
}

fn chunk(html: &mut String, axis: &Axis, colour: usize, mark: &ChunkMark) -> std::fmt::Result {
    let handover = &mark.handover;
    let (left, right) = (axis.at(handover.begin), axis.at(handover.end));
    let title = format!(
        "chunk {} of {} from {}: {}, {} over {}, {}",
        handover.chunk + 1,
        handover.chunks,
        handover.from,
        ByteCount(handover.nbytes),
        handover.mode,
        handover.path,
        shown(took(mark))
    );
    let store = if handover.mode == TransferMode::Store {
        " store"
    } else {
        ""
    };
    write!(
        html,
        "<i class=\"chunk s{}{store}\" title=\"{}\" style=\"left:min({left:.3}%, 100% - 7px);width:{:.3}%\"></i>",
        colour % COLOURS,
        escape(&title),
        right - left
    )
}

/// A line from the producer's bar to each chunk.
fn links(html: &mut String, timeline: &Timeline, axis: &Axis) -> std::fmt::Result {
    if timeline.chunks.len() > MOST_LINKS {
        return Ok(());
    }
    write!(
        html,
        "<svg class=\"links\" height=\"{}\" aria-hidden=\"true\">",
        timeline.lanes.len() * LANE
    )?;
    for mark in &timeline.chunks {
        let (from, to) = (colour(timeline, &mark.handover.from), colour(timeline, &mark.to));
        // A producer that was done before the chunk was asked for: from where its bar ends.
        let bars = timeline.lanes[from].attempts.iter().rev();
        let ended = bars.filter(|bar| bar.how == End::Done).find_map(|bar| bar.end);
        let left = ended.map_or(mark.handover.begin, |ended| ended.min(mark.handover.begin));
        let (x1, x2) = (axis.at(left), axis.at(mark.handover.end));
        let (y1, y2) = (from * LANE + BAR_END, to * LANE + CHUNK_BEGIN);
        write!(html, "<line x1=\"{x1:.3}%\" y1=\"{y1}\" x2=\"{x2:.3}%\" y2=\"{y2}\"/>")?;
    }
    html.push_str("</svg>");
    Ok(())
}

fn table(html: &mut String, timeline: &Timeline) -> std::fmt::Result {
    html.push_str("<section class=\"card\"><h2>Hand-overs</h2>");
    if timeline.chunks.is_empty() {
        html.push_str("<p class=\"soft\">No chunk has been handed over yet: they are reported when their consumer is done.</p></section>");
        return Ok(());
    }
    html.push_str(
        "<div class=\"scroll\"><table><thead><tr><th>From</th><th>To</th><th class=\"n\">Chunk</th><th class=\"n\">Bytes</th>\
         <th>Mode</th><th>Path</th><th class=\"n\">Received at</th><th class=\"n\">Took</th></tr></thead><tbody>",
    );
    for mark in timeline.chunks.iter().take(MOST_ROWS) {
        let handover = &mark.handover;
        write!(
            html,
            "<tr><td><i class=\"dot s{}\"></i>{}</td><td>{}</td><td class=\"n\">{} / {}</td><td class=\"n\">{}</td>\
             <td><span class=\"tag\">{}</span></td><td><span class=\"tag mono\">{}</span></td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            colour(timeline, &handover.from) % COLOURS,
            escape(handover.from.as_str()),
            escape(mark.to.as_str()),
            handover.chunk + 1,
            handover.chunks,
            ByteCount(handover.nbytes),
            handover.mode,
            escape(&handover.path),
            shown(handover.end.since(timeline.begin)),
            shown(took(mark)),
        )?;
    }
    html.push_str("</tbody></table></div>");
    if let Some(more) = timeline.chunks.len().checked_sub(MOST_ROWS).filter(|more| *more > 0) {
        write!(
            html,
            "<p class=\"soft\">… and {more} more; the JSON timeline has all of them.</p>"
        )?;
    }
    html.push_str("</section>");
    Ok(())
}
