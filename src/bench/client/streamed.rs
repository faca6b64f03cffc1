//! A streamed answer of the API: its tokens as they come, and its usage.

use super::clock::Clock;
use futures_util::StreamExt;
use memchr::memchr;
use serde::Deserialize;
use serde_json::Value;

/// What a server-sent event stream has told so far.
#[derive(Default)]
pub struct StreamedAnswer {
    pub usage: Value,
    /// The beginning of a line whose end has not come.
    buffer: Vec<u8>,
    /// Only what has text in it is a token: others announce the role or the end in events of their own.
    only_text: bool,
    /// A choice has said why it ended: some servers say nothing after that.
    is_finished: bool,
}

/// What counts of an event. The rest is read over and not kept: the client shares the processors with what it measures.
#[derive(Deserialize)]
struct StreamedChunk {
    error: Option<Value>,
    usage: Option<Value>,
    choices: Option<Vec<StreamedChoice>>,
}

/// Whether there is text in it: of a completion, or of a chat, thoughts too.
#[derive(Deserialize)]
struct StreamedChoice {
    text: Option<StreamedText>,
    delta: Option<StreamedDelta>,
    finish_reason: Option<StreamedText>,
}

#[derive(Deserialize)]
struct StreamedDelta {
    content: Option<StreamedText>,
    reasoning_content: Option<StreamedText>,
    reasoning: Option<StreamedText>,
}

impl StreamedChoice {
    fn has_text(&self) -> bool {
        let delta = self.delta.as_ref();
        let texts = [
            self.text.as_ref(),
            delta.and_then(|delta| delta.content.as_ref()),
            delta.and_then(|delta| delta.reasoning_content.as_ref()),
            delta.and_then(|delta| delta.reasoning.as_ref()),
        ];
        texts.into_iter().flatten().any(|text| text.is_some)
    }
}

/// A text that is read over.
struct StreamedText {
    is_some: bool,
}

impl<'de> Deserialize<'de> for StreamedText {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Length;
        impl serde::de::Visitor<'_> for Length {
            type Value = StreamedText;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E>(self, text: &str) -> Result<StreamedText, E> {
                Ok(StreamedText { is_some: !text.is_empty() })
            }
        }
        deserializer.deserialize_str(Length)
    }
}

impl StreamedAnswer {
    pub fn new(only_text: bool) -> Self {
        Self { only_text, ..Self::default() }
    }

    pub async fn read(&mut self, response: reqwest::Response, clock: &mut Clock) -> Result<(), String> {
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            return Err(format!("{status}: {}", text.chars().take(300).collect::<String>()));
        }
        let mut chunks = response.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            if self.feed(&chunk.map_err(|error| causes(&error))?, clock)? {
                return Ok(());
            }
        }
        self.end(clock)
    }

    /// The next bytes of the stream. True at its end.
    pub fn feed(&mut self, bytes: &[u8], clock: &mut Clock) -> Result<bool, String> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.extend_from_slice(bytes);
        let mut rest = buffer.as_slice();
        while let Some(end) = memchr(b'\n', rest) {
            if self.line(&rest[..end], clock)? {
                return Ok(true);
            }
            rest = &rest[end + 1..];
        }
        self.buffer.extend_from_slice(rest);
        Ok(false)
    }

    /// There are no more bytes.
    pub fn end(&mut self, clock: &mut Clock) -> Result<(), String> {
        // The last line may have no end.
        let last = std::mem::take(&mut self.buffer);
        if self.line(&last, clock)? || self.only_text && self.is_finished {
            return Ok(());
        }
        Err("the stream ended before [DONE]".into())
    }

    /// True at the end of the stream.
    fn line(&mut self, line: &[u8], clock: &mut Clock) -> Result<bool, String> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(false) };
        if data == b"[DONE]" {
            return Ok(true);
        }
        let event: StreamedChunk =
            serde_json::from_slice(data).map_err(|error| format!("an event is not a chunk: {error}"))?;
        if let Some(error) = event.error {
            return Err(error.to_string());
        }
        if let Some(usage) = event.usage {
            self.usage = usage;
        }
        let choices = event.choices.as_deref().unwrap_or_default();
        self.is_finished |=
            choices.iter().any(|choice| choice.finish_reason.as_ref().is_some_and(|reason| reason.is_some));
        let is_token = match self.only_text {
            true => choices.iter().any(StreamedChoice::has_text),
            false => !choices.is_empty(),
        };
        if is_token {
            clock.tokens();
        }
        Ok(false)
    }
}

/// The error and all its causes.
pub fn causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
