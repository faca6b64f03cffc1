//! Limits of a text by its lines: editors that complete code ask for them, through llama.cpp's fields.

use std::time::Duration;

/// What ends a text before the model ends it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineLimits {
    /// Spaces and tabs that each line but the first begins with, at least. The text ends where a line has fewer, empty
    /// lines included.
    pub min_indent: usize,
    /// The text ends with the first line, or part of a line after another, that is complete later than this after the
    /// first token.
    pub max_time: Option<Duration>,
}

/// Where a text is, in lines.
#[derive(Debug, Default)]
pub struct LineScan {
    /// Spaces and tabs since the line began; `None` behind them, and in the first line.
    indent: Option<usize>,
}

impl LineScan {
    /// How many bytes of `text`, which goes on from earlier texts, stay if the lines are to keep to `limits`. `None`:
    /// all, and the output goes on. `elapsed`: since the first token.
    pub fn end(&mut self, text: &str, limits: &LineLimits, elapsed: Duration) -> Option<usize> {
        if limits.min_indent > 0 {
            for (at, char) in text.char_indices() {
                match (self.indent, char) {
                    (Some(indent), ' ' | '\t') => self.indent = Some(indent + 1),
                    (Some(indent), _) if indent < limits.min_indent => return Some(at),
                    (_, '\n') => self.indent = Some(0),
                    _ => self.indent = None,
                }
            }
        }
        let is_late = limits.max_time.is_some_and(|most| elapsed > most);
        (is_late && text.contains('\n')).then_some(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&str], min_indent: usize) -> String {
        let (mut scan, limits) = (LineScan::default(), LineLimits { min_indent, max_time: None });
        let mut text = String::new();
        for piece in pieces {
            match scan.end(piece, &limits, Duration::ZERO) {
                Some(end) => return text + &piece[..end],
                None => text += piece,
            }
        }
        text
    }

    #[test]
    fn a_line_that_is_indented_less_ends_the_text_before_its_first_word() {
        assert_eq!(cut(&["a\n  b\n", " ", " c\n d"], 2), "a\n  b\n  c\n ");
        assert_eq!(cut(&["a\n", "\n  b"], 2), "a\n");
        assert_eq!(cut(&["a\n\t\tb"], 2), "a\n\t\tb");
        assert_eq!(cut(&["a\nb"], 0), "a\nb");
        assert_eq!(cut(&["a\n", " "], 2), "a\n ", "a line that has not ended may go on");
    }

    #[test]
    fn a_line_that_is_complete_too_late_ends_the_text() {
        let limits = LineLimits { min_indent: 0, max_time: Some(Duration::from_millis(5)) };
        let mut scan = LineScan::default();
        assert_eq!(scan.end("a\n", &limits, Duration::from_millis(5)), None);
        assert_eq!(scan.end("b", &limits, Duration::from_millis(6)), None);
        assert_eq!(scan.end("c\nd", &limits, Duration::from_millis(6)), Some(3));
    }
}
