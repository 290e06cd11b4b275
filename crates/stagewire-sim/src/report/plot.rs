//! Two simple pictures, without a library for it.

use std::fmt::Write;

use crate::record::{JobRecord, Sample};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;
/// Told apart also by those who do not tell red from green (Okabe and Ito, 2008).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// A line of a picture: its name and its points.
type Line = (String, Vec<(f64, f64)>);

pub(super) fn latencies(jobs: &[JobRecord]) -> String {
    let line = |name: &str, times: Vec<f64>| {
        let mut times = times;
        times.sort_by(f64::total_cmp);
        let count = times.len() as f64;
        let points = times
            .iter()
            .enumerate()
            .map(|(rank, time)| (*time, (rank + 1) as f64 / count * 100.0));
        (name.to_owned(), points.collect())
    };
    let result = jobs
        .iter()
        .filter_map(|job| Some(job.latency()?.as_secs_f64()))
        .collect();
    let first = jobs
        .iter()
        .filter_map(|job| Some(job.to_first()?.as_secs_f64()))
        .collect();
    let lines = [line("result", result), line("first piece", first)];
    picture(
        "Jobs that took no longer",
        "seconds since submission",
        "% of jobs",
        &lines,
    )
}

pub(super) fn queues(samples: &[Sample], stages: &[String]) -> String {
    let lines = stages.iter().enumerate().map(|(stage, name)| {
        let points = samples
            .iter()
            .map(|sample| (sample.at.0 as f64 / 1e9, sample.queued[stage] as f64));
        (name.clone(), points.collect())
    });
    let lines: Vec<Line> = lines.collect();
    picture("Jobs that wait for a worker", "seconds", "jobs", &lines)
}

fn picture(title: &str, x_name: &str, y_name: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|line| &line.1);
    let most = |value: fn(&(f64, f64)) -> f64| round_up(points().map(value).fold(0.0, f64::max));
    let (x_most, y_most) = (most(|point| point.0), most(|point| point.1));
    let x = |value: f64| LEFT + value / x_most * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / y_most * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"15\" font-weight=\"bold\">{title}</text>\n"
    );
    for tick in 0..=4 {
        let part = f64::from(tick) / 4.0;
        let (at, up) = (x(part * x_most), y(part * y_most));
        let (left, right, bottom) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{up:.1}\" x2=\"{right}\" y2=\"{up:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            left - 6.0,
            up + 4.0,
            part * y_most,
            bottom + 16.0,
            part * x_most
        );
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{x_name}</text>",
        HEIGHT - 10.0
    );
    let _ = writeln!(
        svg,
        "<text x=\"12\" y=\"{}\" transform=\"rotate(-90 12 {0})\" text-anchor=\"middle\">{y_name}</text>",
        HEIGHT / 2.0
    );
    for (number, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let path: Vec<_> = points
            .iter()
            .map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1)))
            .collect();
        let (path, row) = (path.join(" "), TOP + 16.0 * (number as f64 + 1.0));
        let _ = writeln!(
            svg,
            "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\
             <text x=\"{}\" y=\"{row}\" fill=\"{colour}\">{name}</text>",
            WIDTH - RIGHT + 10.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The next number that has one digit, or 1.5 or 2.5 of a power of ten.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= value);
    step.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, expected) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (37.0, 40.0),
            (101.0, 150.0),
            (0.23, 0.25),
            (999.0, 1000.0),
        ] {
            let found = round_up(value);
            assert!((found - expected).abs() < 1e-9, "{value} gives {found}, not {expected}");
        }
    }

    #[test]
    fn a_picture_has_its_lines_and_ends() {
        let lines = vec![
            ("one".to_owned(), vec![(0.0, 0.0), (10.0, 5.0)]),
            ("none".to_owned(), vec![]),
        ];
        let svg = picture("title", "x", "y", &lines);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
