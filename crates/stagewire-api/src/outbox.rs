use std::collections::BTreeMap;

use stagewire_core::{Progress, Token};

use crate::v1;
use crate::v1::worker_message::Message;

/// What a worker has to say of its attempts, kept until the server has answered.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    attempts: BTreeMap<Token, Attempt>,
}

#[derive(Debug, Default)]
struct Attempt {
    progress: Progress,
    sequence: u64,
    /// Sequence of the report that was sent last.
    sent: u64,
    /// Said on this attempt and not answered: repeated after a reconnect.
    said: Vec<Message>,
}

impl Outbox {
    /// Whether nothing that was said waits for an answer.
    pub(crate) fn is_answered(&self) -> bool {
        self.attempts.values().all(|attempt| attempt.said.is_empty())
    }

    /// The attempt was granted.
    pub(crate) fn begin(&mut self, token: Token) {
        self.attempts.entry(token).or_default();
    }

    /// The server answered for good: nothing of the attempt is repeated or renewed any more.
    pub(crate) fn end(&mut self, token: Token) {
        self.attempts.remove(&token);
    }

    /// Notes progress of a running attempt.
    pub(crate) fn progress(&mut self, token: Token, progress: Progress) {
        if let Some(attempt) = self.attempts.get_mut(&token) {
            attempt.progress = progress;
            attempt.sequence += 1;
        }
    }

    /// Keeps a message of a running attempt for repetition, of checkpoints the newest. Returns false where the attempt has
    /// ended.
    pub(crate) fn say(&mut self, token: Token, message: &Message) -> bool {
        let Some(attempt) = self.attempts.get_mut(&token) else {
            return false;
        };
        if matches!(message, Message::Checkpoint(_)) {
            attempt.said.retain(|said| !matches!(said, Message::Checkpoint(_)));
        }
        attempt.said.push(message.clone());
        true
    }

    /// Tokens of all attempts that have not ended.
    pub(crate) fn running(&self) -> Vec<v1::Token> {
        self.attempts.keys().map(|token| (*token).into()).collect()
    }

    /// Every message that has not been answered, in the order in which each attempt said them.
    pub(crate) fn unanswered(&self) -> Vec<Message> {
        self.attempts
            .values()
            .flat_map(|attempt| attempt.said.iter().cloned())
            .collect()
    }

    /// A renewal: of all attempts, or of those with news.
    pub(crate) fn renewal(&mut self, all: bool) -> Option<Message> {
        let mut attempts = Vec::new();
        for (token, attempt) in &mut self.attempts {
            if all || attempt.sequence > attempt.sent {
                attempt.sent = attempt.sequence;
                attempts.push(v1::renew::Attempt {
                    token: Some((*token).into()),
                    progress: Some(attempt.progress.clone().into()),
                    sequence: attempt.sequence,
                });
            }
        }
        (all || !attempts.is_empty()).then_some(Message::Renew(v1::Renew { attempts }))
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt as Number, Epoch, JobId};

    use super::*;

    fn token(attempt: u32) -> Token {
        let job = "00000000-0000-0000-0000-000000000001".parse::<JobId>().expect("an id");
        Token {
            epoch: Epoch(1),
            job,
            attempt: Number(attempt),
        }
    }

    #[test]
    fn what_was_said_is_repeated_in_order_until_the_attempt_ends() {
        let mut outbox = Outbox::default();
        outbox.begin(token(1));
        let first = Message::Published(v1::Published {
            token: Some(token(1).into()),
            payload: None,
        });
        let second = Message::Completed(v1::Completed {
            token: Some(token(1).into()),
            ..Default::default()
        });
        assert!(outbox.say(token(1), &first));
        assert!(outbox.say(token(1), &second));
        assert!(!outbox.say(token(2), &first), "an attempt that never began");
        assert_eq!(outbox.unanswered(), [first, second]);
        outbox.end(token(1));
        assert!(outbox.unanswered().is_empty() && outbox.running().is_empty());
    }

    #[test]
    fn of_checkpoints_the_newest_is_repeated() {
        let mut outbox = Outbox::default();
        outbox.begin(token(1));
        let checkpoint = |done| {
            let progress = Progress {
                done,
                ..Progress::default()
            };
            Message::Checkpoint(v1::Checkpoint {
                token: Some(token(1).into()),
                payload: None,
                progress: Some(progress.into()),
            })
        };
        assert!(outbox.say(token(1), &checkpoint(1)) && outbox.say(token(1), &checkpoint(2)));
        assert_eq!(outbox.unanswered(), [checkpoint(2)]);
    }

    #[test]
    fn only_news_is_sent_between_renewals() {
        let mut outbox = Outbox::default();
        outbox.begin(token(1));
        outbox.begin(token(2));
        assert_eq!(outbox.renewal(false), None);
        outbox.progress(
            token(2),
            Progress {
                done: 1,
                total: 4,
                unit: "step".to_owned(),
            },
        );
        let Some(Message::Renew(renew)) = outbox.renewal(false) else {
            panic!("no news")
        };
        assert_eq!(renew.attempts.len(), 1);
        assert_eq!(renew.attempts[0].sequence, 1);
        assert_eq!(outbox.renewal(false), None, "the same news twice");
        let Some(Message::Renew(renew)) = outbox.renewal(true) else {
            panic!("no renewal")
        };
        assert_eq!(renew.attempts.len(), 2);
    }
}
