use reqwest::Response;

use super::{ClientError, Event};

/// The events of one job as the server sends them: `text/event-stream`.
#[derive(Debug)]
pub(crate) struct Events {
    answer: Response,
    parser: Parser,
}

impl Events {
    pub(super) fn new(answer: Response) -> Self {
        Self {
            answer,
            parser: Parser::default(),
        }
    }

    /// The next event; `None` when the server has ended the stream, as it does after the last event of a job.
    ///
    /// # Cancel safety
    /// Nothing is lost: what has been read is kept.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            if let Some(data) = self.parser.next() {
                let url = self.answer.url().to_string();
                let status = self.answer.status();
                return match serde_json::from_str(&data) {
                    Ok(event) => Ok(Some(event)),
                    Err(_) => Err(ClientError::Foreign { url, status }),
                };
            }
            match self.answer.chunk().await {
                Ok(Some(piece)) => self.parser.push(&piece),
                Ok(None) => return Ok(None),
                Err(source) => {
                    let url = self.answer.url().to_string();
                    return Err(ClientError::Broken { url, source });
                }
            }
        }
    }

    /// The id of the last event that had one: where another stream goes on.
    pub(crate) fn last_id(&self) -> Option<&str> {
        self.parser.id.as_deref()
    }
}

/// Cuts a stream into the `data` of its events.
#[derive(Debug, Default)]
struct Parser {
    text: Vec<u8>,
    data: Vec<String>,
    id: Option<String>,
}

impl Parser {
    fn push(&mut self, piece: &[u8]) {
        self.text.extend_from_slice(piece);
    }

    fn next(&mut self) -> Option<String> {
        while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.text.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() && !self.data.is_empty() {
                return Some(std::mem::take(&mut self.data).join("\n"));
            }
            match line.split_once(':') {
                Some(("data", value)) => self.data.push(value.strip_prefix(' ').unwrap_or(value).to_owned()),
                Some(("id", value)) => self.id = Some(value.trim().to_owned()),
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pieces: &[&str]) -> Vec<String> {
        let mut parser = Parser::default();
        let mut found = Vec::new();
        for piece in pieces {
            parser.push(piece.as_bytes());
            found.extend(std::iter::from_fn(|| parser.next()));
        }
        found
    }

    #[test]
    fn events_are_cut_wherever_the_network_cuts() {
        let whole = ": hello\n\nid: 1\nevent: queued\ndata: {\"a\":1}\n\nid: 2\r\ndata:one\r\ndata: two\r\n\r\n";
        let expected = ["{\"a\":1}", "one\ntwo"];
        assert_eq!(parse(&[whole]), expected);
        for cut in 0..whole.len() {
            assert_eq!(parse(&[&whole[..cut], &whole[cut..]]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_event_without_its_empty_line_is_not_given() {
        assert!(parse(&["data: {}\n"]).is_empty());
    }

    #[test]
    fn the_last_id_is_kept() {
        let mut parser = Parser::default();
        parser.push(b"id: 3.17\ndata: {}\n\ndata: {}\n\n");
        assert_eq!(std::iter::from_fn(|| parser.next()).count(), 2);
        assert_eq!(parser.id.as_deref(), Some("3.17"));
    }
}
