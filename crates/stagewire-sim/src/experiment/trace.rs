use std::time::Duration;

use super::{Arrival, SimError};

/// Reads recorded arrivals: CSV with the columns `at_s`, `class` and, optionally, `scale`.
pub(super) fn parse(text: &str, classes: &[&str]) -> Result<Vec<Arrival>, SimError> {
    let mut rows = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = rows
        .next()
        .map(|(_, line)| line.split(',').map(str::trim).collect::<Vec<_>>());
    let header = header.unwrap_or_default();
    let column = |name| header.iter().position(|column| *column == name);
    let (Some(at), Some(class)) = (column("at_s"), column("class")) else {
        return Err(wrong(
            "the header of the trace",
            &header.join(","),
            "at_s,class or at_s,class,scale",
        ));
    };
    let scale = column("scale");
    let mut arrivals = Vec::new();
    for (number, line) in rows {
        let cells: Vec<_> = line.split(',').map(str::trim).collect();
        let line_is = |must: &str| wrong(&format!("line {} of the trace", number + 1), line, must);
        let number = |cell: usize, least: f64, most: f64| {
            let value = cells.get(cell)?.parse::<f64>().ok();
            value.filter(|value| (least..=most).contains(value))
        };
        let when = number(at, 0.0, 1e9).ok_or_else(|| line_is("a line whose at_s is a number of seconds"))?;
        let position = cells
            .get(class)
            .and_then(|cell| classes.iter().position(|class| class == cell));
        let class = position.ok_or_else(|| line_is(&format!("of one of the classes {}", classes.join(", "))))?;
        let scale = match scale {
            Some(scale) => number(scale, 1e-6, 1e6)
                .ok_or_else(|| line_is("a line whose scale is a number of 0.000001 to 1000000"))?,
            None => 1.0,
        };
        let at = Duration::from_secs_f64(when);
        arrivals.push(Arrival { at, class, scale });
    }
    if arrivals.is_empty() {
        return Err(wrong("the trace", text.trim(), "a header and at least one line"));
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    Ok(arrivals)
}

fn wrong(key: &str, value: &str, must: &str) -> SimError {
    SimError::Value {
        key: key.to_owned(),
        value: format!("{value:?}"),
        must: must.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_in_order_of_time() {
        let text = "class,at_s,scale\nbatch, 3.5,2\n\ninteractive,0.25,1\n";
        let arrivals = parse(text, &["interactive", "batch"]).expect("a good trace");
        assert_eq!(arrivals[0].at, Duration::from_millis(250));
        assert_eq!((arrivals[1].class, arrivals[1].scale), (1, 2.0));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, place) in [
            ("when,class\n", "header"),
            ("at_s,class\n1,nobody\n", "line 2"),
            ("at_s,class\n1,batch\n-1,batch\n", "line 3"),
            ("at_s,class,scale\n1,batch,x\n", "line 2"),
            ("at_s,class,scale\n1,batch,0\n", "line 2"),
            ("at_s,class\n", "at least one line"),
            ("", "header"),
        ] {
            let error = parse(text, &["batch"]).expect_err(text).to_string();
            assert!(error.contains(place), "{error}");
        }
    }
}
