use console::{Style, Term};
use serde::Serialize;

use super::check::{Check, State};
use super::transports::{self, Way};
use super::wrap::wrap;
use crate::exit::Fault;
use crate::output::Output;

/// What every probe said, and what follows for the transports.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    checks: Vec<Check>,
    transports: Vec<Way>,
}

/// Where each check is shown, in order.
const AREAS: [(&str, &[&str]); 6] = [
    ("machine", &["kernel", "cores", "memory", "clock", "container"]),
    (
        "same host",
        &[
            "shm",
            "cma",
            "run-dir",
            "huge-pages",
            "shm-huge-pages",
            "hugetlb",
            "dev-shm",
        ],
    ),
    ("network", &["tcp", "mooncake", "nixl", "interfaces", "congestion"]),
    ("devices", &["rdma", "gpu"]),
    ("software", &["python", "mooncake-engine"]),
    ("limits", &["open-files", "memlock"]),
];

/// Columns of a text line, where the terminal has as many.
const WIDEST: usize = 100;

/// Narrower than this, what was found stands below its name.
const NARROW: usize = 72;

const NAME: usize = 15;
const STATE: usize = 7;

impl Report {
    pub(super) fn new(checks: Vec<Check>) -> Self {
        let transports = transports::conclude(&checks);
        Self {
            schema: 1,
            checks,
            transports,
        }
    }

    pub(crate) fn print(&self, output: &Output) -> Result<(), Fault> {
        let terminal = Term::stdout();
        let width = if terminal.is_term() {
            usize::from(terminal.size().1)
        } else {
            WIDEST
        };
        self.lines(width.min(WIDEST))
            .iter()
            .try_for_each(|line| output.data(line))
    }

    fn lines(&self, width: usize) -> Vec<String> {
        let bold = Style::new().bold();
        let mut lines = Vec::new();
        for (area, names) in AREAS {
            lines.push(bold.apply_to(area).to_string());
            let check = |name: &&str| self.checks.iter().find(|check| check.name == *name);
            lines.extend(names.iter().filter_map(check).flat_map(|check| entry(check, width)));
        }
        lines.push(bold.apply_to("transports").to_string());
        let reach = [
            ("same host", transports::listed(&self.transports, |way| way.same_host)),
            (
                "other hosts",
                transports::listed(&self.transports, |way| way.other_hosts),
            ),
        ];
        for (name, list) in reach {
            lines.extend(hang(&format!("  {name:<11}  "), 15, &list, width));
        }
        lines
    }
}

/// One check: state, name and value, then why and what to do.
fn entry(check: &Check, width: usize) -> Vec<String> {
    let state = format!("{:<STATE$}", check.state.name());
    let head = format!("  {}  {:<NAME$}", look(check.state).apply_to(state), check.name);
    let indent = if width < NARROW { 4 } else { 2 + STATE + 2 + NAME + 2 };
    let mut lines = if width < NARROW {
        let mut lines = vec![head.trim_end().to_owned()];
        lines.extend(hang("    ", indent, &check.value, width));
        lines
    } else {
        hang(&format!("{head}  "), indent, &check.value, width)
    };
    for (word, text) in [("why", &check.why), ("do", &check.advice)] {
        if let Some(text) = text {
            let text = format!("{word}: {text}");
            lines.extend(hang(&" ".repeat(indent), indent, &text, width));
        }
    }
    lines
}

/// The text behind a prefix of `indent` columns, later lines below it.
fn hang(prefix: &str, indent: usize, text: &str, width: usize) -> Vec<String> {
    let rest = " ".repeat(indent);
    let lines = wrap(text, width.saturating_sub(indent)).into_iter().enumerate();
    lines
        .map(|(at, line)| format!("{}{line}", if at == 0 { prefix } else { &rest }))
        .collect()
}

fn look(state: State) -> Style {
    match state {
        State::Ok => Style::new().green(),
        State::Note => Style::new().yellow(),
        State::Missing => Style::new().red(),
        State::Unknown => Style::new().magenta(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(vec![
            Check::ok("kernel", "Linux 6.18.44, x86_64"),
            Check::ok(
                "shm",
                "1.0 MiB mapped from another process's sealed memfd, every byte as sent",
            ),
            Check::missing(
                "cma",
                "does not work",
                "kernel.yama.ptrace_scope is 1: a process may not read one that it did not start",
                "as root: sysctl kernel.yama.ptrace_scope=0",
            )
            .with("ptrace_scope", 1),
        ])
    }

    #[test]
    fn columns_hang() {
        let text = report().lines(80).join("\n");
        assert_eq!(
            console::strip_ansi_codes(&text),
            "\
machine
  ok       kernel           Linux 6.18.44, x86_64
same host
  ok       shm              1.0 MiB mapped from another process's sealed memfd,
                            every byte as sent
  missing  cma              does not work
                            why: kernel.yama.ptrace_scope is 1: a process may
                            not read one that it did not start
                            do: as root: sysctl kernel.yama.ptrace_scope=0
network
devices
software
limits
transports
  same host    shm, tcp (cannot be told), mooncake (cannot be told),
               mooncake-engine (cannot be told), nixl (cannot be told)
  other hosts  tcp (cannot be told), mooncake (cannot be told), mooncake-engine
               (cannot be told), nixl (cannot be told)"
        );
    }

    #[test]
    fn a_narrow_terminal_has_no_line_that_is_wider() {
        for width in [40, 50, 71, 72, 100] {
            for line in report().lines(width) {
                assert!(console::measure_text_width(&line) <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn the_document_keeps_its_fields() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["schema"], 1);
        let check = &json["checks"][2];
        assert_eq!((&check["name"], &check["state"]), (&"cma".into(), &"missing".into()));
        for field in ["value", "why", "do"] {
            assert!(check[field].is_string(), "{field}");
        }
        assert_eq!(check["data"]["ptrace_scope"], 1);
        assert!(json["checks"][0]["why"].is_null());
        assert_eq!(json["transports"][1]["same_host"], false);
    }
}
