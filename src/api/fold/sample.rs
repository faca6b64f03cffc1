//! One choice in the making.

use crate::delta::{Delta, Finish};
use crate::line_limits::{LineLimits, LineScan};
use crate::request::AnswerOptions;
use crate::timings::TokenClock;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::PositionLogprobs;
use pagetide_text::chat_output::{ChatParser, ChatPiece};
use pagetide_text::output::{OutputText, Piece, StopMatch};
use pagetide_text::tokenizer::Tokenizer;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// One choice in the making.
pub(super) struct SampleFold {
    text: OutputText,
    /// Reads the text of a chat.
    chat: Option<ChatParser>,
    pub(super) num_tokens: usize,
    /// How many of the tokens are reasoning.
    pub(super) num_reasoning: usize,
    counts_reasoning_end: bool,
    /// Characters of the echoed prompt, which stands before the output.
    echo_chars: usize,
    output_chars: usize,
    /// Where the answer says how long it took, or must not take longer.
    pub(super) clock: Option<TokenClock>,
    lines: Option<(LineLimits, LineScan)>,
    /// Tokens whose text is not wholly out.
    pub(super) held: VecDeque<(TokenId, Option<PositionLogprobs>)>,
    /// Tokens that went out before their text.
    num_ahead: usize,
    /// What goes out with the next delta.
    pub(super) pending: Delta,
    pub(super) ended: bool,
}

/// Why the text of a sample ends before the engine ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TextEnd {
    /// A stop string or a match was found.
    Stop(StopMatch),
    /// The chat has as many tool calls as it may have.
    EnoughCalls,
    /// A line does not keep to [`LineLimits`].
    Line,
}

impl TextEnd {
    pub(super) fn finish(self, options: &AnswerOptions) -> Finish {
        match self {
            TextEnd::Stop(StopMatch::String(index)) => Finish::by_text(options.text.stop[index].clone()),
            TextEnd::Stop(StopMatch::Regex(index)) => {
                Finish::by_text(options.text.stop_regexes.pattern(index).to_owned())
            }
            TextEnd::EnoughCalls => Finish::stop(),
            TextEnd::Line => Finish::length(),
        }
    }
}

impl SampleFold {
    /// `echo`: the text before the output.
    pub(super) fn new(
        choice: u32,
        options: &AnswerOptions,
        tokenizer: &Arc<Tokenizer>,
        prompt: &[TokenId],
        echo: &str,
    ) -> Self {
        let echo_piece = (options.chat.is_some() && !echo.is_empty()).then(|| ChatPiece::Content(echo.to_owned()));
        Self {
            text: OutputText::new(Arc::clone(tokenizer), prompt, &options.text),
            chat: options.chat.as_ref().map(|reading| ChatParser::new(reading, tokenizer, prompt)),
            num_tokens: 0,
            num_reasoning: 0,
            counts_reasoning_end: options.counts_reasoning_end,
            echo_chars: echo.chars().count(),
            output_chars: 0,
            clock: (options.timings || options.verbose || options.lines.max_time.is_some()).then(TokenClock::start),
            lines: (options.lines != LineLimits::default()).then(|| (options.lines.clone(), LineScan::default())),
            held: VecDeque::new(),
            num_ahead: 0,
            pending: Delta {
                choice,
                text: echo.to_owned(),
                pieces: echo_piece.into_iter().collect(),
                ..Delta::default()
            },
            ended: false,
        }
    }

    /// Takes a token that is a part of the text, and is in `held` already.
    pub(super) fn push(&mut self, token: TokenId) -> Option<TextEnd> {
        let mut piece = self.text.push(token);
        let (stopped, line_ended) = (piece.stopped, self.cut_at_line(&mut piece));
        let was_reasoning = self.is_reasoning();
        self.take(piece);
        // A token that is a mark is not counted.
        self.num_reasoning += usize::from(was_reasoning && (self.is_reasoning() || self.counts_reasoning_end));
        if line_ended {
            return Some(TextEnd::Line);
        }
        if let Some(stop) = stopped {
            return Some(TextEnd::Stop(stop));
        }
        self.chat.as_ref().is_some_and(ChatParser::is_full).then_some(TextEnd::EnoughCalls)
    }

    /// The engine has ended the output: takes the text that was held back.
    pub(super) fn finish_text(&mut self) -> Option<TextEnd> {
        let mut piece = self.text.finish();
        let (stopped, line_ended) = (piece.stopped, self.cut_at_line(&mut piece));
        self.take(piece);
        if line_ended { Some(TextEnd::Line) } else { stopped.map(TextEnd::Stop) }
    }

    /// Cuts the text where a line does not keep to the limits; true if one does not.
    fn cut_at_line(&mut self, piece: &mut Piece) -> bool {
        let Some((limits, scan)) = &mut self.lines else { return false };
        let elapsed = self.clock.map_or(Duration::ZERO, |clock| clock.generating());
        let Some(end) = scan.end(&piece.text, limits, elapsed) else { return false };
        piece.text.truncate(end);
        true
    }

    /// The last delta, with the finish that is pending. `named_tool`: see [`AnswerOptions::named_tool`].
    pub(super) fn end(&mut self, named_tool: bool) -> Delta {
        self.ended = true;
        self.push_held();
        if let Some(chat) = &mut self.chat {
            chat.finish(&mut self.pending.pieces);
            if let Some(finish) = &mut self.pending.finish
                && finish.reason == "stop"
                && chat.num_calls() > 0
                && !named_tool
            {
                finish.reason = "tool_calls";
            }
        }
        self.next_delta()
    }

    /// Moves the tokens whose text is not wholly out to what goes out next.
    fn push_held(&mut self) {
        let offset = self.echo_chars + self.output_chars;
        self.num_ahead += self.held.len();
        for (token, logprobs) in std::mem::take(&mut self.held) {
            self.pending.push_token(token, offset, logprobs);
        }
    }

    /// The next delta, with those tokens.
    pub(super) fn take_held(&mut self) -> Delta {
        self.push_held();
        self.next_delta()
    }

    /// Moves text that is certain, and the tokens that are wholly in it, to what goes out next.
    fn take(&mut self, piece: Piece) {
        self.output_chars += piece.text.chars().count();
        self.pending.text.push_str(&piece.text);
        if let Some(chat) = &mut self.chat {
            chat.push(&piece.text, &mut self.pending.pieces);
        }
        let ahead = self.num_ahead.min(piece.token_offsets.len());
        self.num_ahead -= ahead;
        for offset in piece.token_offsets.into_iter().skip(ahead) {
            let (token, logprobs) = self.held.pop_front().expect("every token pushed was put here before");
            self.pending.push_token(token, self.echo_chars + offset, logprobs);
        }
    }

    fn is_reasoning(&self) -> bool {
        self.chat.as_ref().is_some_and(ChatParser::is_reasoning)
    }

    pub(super) fn next_delta(&mut self) -> Delta {
        let next = Delta { choice: self.pending.choice, ..Delta::default() };
        std::mem::replace(&mut self.pending, next)
    }
}
