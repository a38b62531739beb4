//! Rewrites operators and literals that the template engine lacks as calls of functions: `a % b` becomes `__percent__(a , b)`, and
//! `(a, b)` becomes `__tuple__(a, b)`. A source with unmatched marks stays unchanged, so that the engine reports the fault.

use std::borrow::Cow;
use std::ops::Range;

/// The function that stands for the operator `%`.
pub(super) const PERCENT: &str = "__percent__";
/// The function that makes a tuple.
pub(super) const TUPLE: &str = "__tuple__";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Name,
    /// A text or a number.
    Literal,
    Operator,
}

#[derive(Clone, Debug)]
struct Token<'a> {
    kind: Kind,
    text: &'a str,
    range: Range<usize>,
}

/// A replacement of a range of the source. `rank` orders replacements at the same position.
struct Change {
    range: Range<usize>,
    rank: u8,
    text: String,
}

/// `source` with calls in place of `%` and of tuples.
pub(super) fn with_calls(source: &str) -> Cow<'_, str> {
    let mut changes = Vec::new();
    if find_changes(source, &mut changes).is_none() || changes.is_empty() {
        return Cow::Borrowed(source);
    }
    changes.sort_by_key(|change| (change.range.start, change.rank));
    let mut out = String::with_capacity(source.len() + 16 * changes.len());
    let mut from = 0;
    for change in changes {
        out.push_str(&source[from..change.range.start]);
        out.push_str(&change.text);
        from = change.range.end;
    }
    out.push_str(&source[from..]);
    Cow::Owned(out)
}

/// The changes of all tags. `None` for a source that ends within one.
fn find_changes(source: &str, changes: &mut Vec<Change>) -> Option<()> {
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        at += found;
        let (end, is_statement) = match source.as_bytes().get(at + 1) {
            Some(b'#') => {
                at += 2 + source[at + 2..].find("#}")? + 2;
                continue;
            }
            Some(b'{') => ("}}", false),
            Some(b'%') => ("%}", true),
            _ => {
                at += 1;
                continue;
            }
        };
        let (tokens, after) = tag(source, at + 2, end)?;
        at = after;
        if is_statement && tokens.first().is_some_and(|t| t.text == "raw") {
            at = after_raw(source, at)?;
            continue;
        }
        Tag::new(&tokens, is_statement)?.changes(changes);
    }
    Some(())
}

/// The position after the tag that ends a raw block.
fn after_raw(source: &str, mut at: usize) -> Option<usize> {
    loop {
        at += source[at..].find("{%")? + 2;
        let inside = source[at..].trim_start_matches(['-', '+']).trim_start();
        if inside.starts_with("endraw") {
            return Some(at + source[at..].find("%}")? + 2);
        }
    }
}

/// The tokens of the tag whose inside begins at `at`, and the position after it.
fn tag<'a>(source: &'a str, mut at: usize, end: &str) -> Option<(Vec<Token<'a>>, usize)> {
    if source[at..].starts_with(['-', '+']) {
        at += 1;
    }
    let mut tokens = Vec::new();
    let mut depth = 0usize;
    loop {
        let rest = &source[at..];
        let first = rest.chars().next()?;
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        if depth == 0 {
            if rest.starts_with(end) {
                return Some((tokens, at + end.len()));
            }
            if rest.starts_with(['-', '+']) && rest[1..].starts_with(end) {
                return Some((tokens, at + 1 + end.len()));
            }
        }
        let (kind, len) = match first {
            '\'' | '"' => (Kind::Literal, text_len(rest, first)?),
            '0'..='9' => (Kind::Literal, number_len(rest)),
            c if c.is_alphabetic() || c == '_' => {
                let is_part = |c: char| c.is_alphanumeric() || c == '_';
                let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                (Kind::Name, len)
            }
            _ => {
                let double = ["==", "!=", "<=", ">=", "//", "**"];
                let is_double = double.iter().any(|operator| rest.starts_with(operator));
                (Kind::Operator, if is_double { 2 } else { first.len_utf8() })
            }
        };
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        tokens.push(Token {
            kind,
            text: &rest[..len],
            range: at..at + len,
        });
        at += len;
    }
}

/// Bytes of the quoted text that `rest` begins with.
fn text_len(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    let end = rest.char_indices().skip(1).find(|&(_, c)| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map(|(at, _)| at + 1)
}

/// Bytes of the number that `rest` begins with.
fn number_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let is_part = |i: usize| match bytes[i] {
        b'.' => bytes.get(i + 1).is_some_and(u8::is_ascii_digit),
        b'+' | b'-' => matches!(bytes[i - 1], b'e' | b'E') && !rest.starts_with("0x"),
        byte => byte.is_ascii_alphanumeric() || byte == b'_',
    };
    (1..bytes.len())
        .find(|&i| !is_part(i))
        .unwrap_or(bytes.len())
}

/// The tokens of a tag, with their structure.
struct Tag<'a> {
    tokens: &'a [Token<'a>],
    /// The matching bracket of each bracket. Other tokens have their own index.
    partner: Vec<usize>,
    /// Index of the first token after the name of a statement and its assignment targets.
    first: usize,
}

impl<'a> Tag<'a> {
    /// `None` if its brackets do not match.
    fn new(tokens: &'a [Token<'a>], is_statement: bool) -> Option<Self> {
        let mut partner: Vec<usize> = (0..tokens.len()).collect();
        let mut open = Vec::new();
        for (i, token) in tokens.iter().enumerate() {
            match token.text {
                "(" | "[" | "{" => open.push(i),
                ")" | "]" | "}" => {
                    let start = open.pop()?;
                    (partner[start], partner[i]) = (i, start);
                }
                _ => {}
            }
        }
        let mut tag = Tag {
            tokens,
            partner,
            first: usize::from(is_statement),
        };
        let is_call = is_statement && tokens.first().is_some_and(|t| t.text == "call");
        if is_call && tokens.get(1).is_some_and(|t| t.text == "(") {
            // The arguments of the block.
            tag.first = tag.partner[1] + 1;
        }
        let assigns = match tokens.first().map(|t| t.text) {
            Some("set") if is_statement => Some("="),
            Some("for") if is_statement => Some("in"),
            _ => None,
        };
        if let Some(assigns) = assigns {
            let mut at = 1;
            while at < tokens.len() && tokens[at].text != assigns {
                at = tag.partner[at].max(at) + 1;
            }
            tag.first = (at + 1).min(tokens.len());
        }
        Some(tag)
    }

    fn changes(&self, changes: &mut Vec<Change>) {
        for i in self.first..self.tokens.len() {
            let token = &self.tokens[i];
            match token.text {
                "(" if self.begins_value(i) && self.is_tuple(i) => changes.push(Change {
                    range: token.range.start..token.range.start,
                    rank: 2,
                    text: TUPLE.to_owned(),
                }),
                "%" if i > self.first && i + 1 < self.tokens.len() => {
                    let (start, end) = (self.left_of(i), self.right_of(i));
                    let start = self.tokens[start].range.start;
                    let end = self.tokens[end].range.end;
                    changes.push(Change {
                        range: start..start,
                        rank: 1,
                        text: format!("{PERCENT}("),
                    });
                    changes.push(Change {
                        range: token.range.clone(),
                        rank: 0,
                        text: ",".to_owned(),
                    });
                    changes.push(Change {
                        range: end..end,
                        rank: 0,
                        text: ")".to_owned(),
                    });
                }
                _ => {}
            }
        }
    }

    /// Whether token `i` is a word between expressions, rather than the name of a variable or of a test.
    fn is_word(&self, i: usize) -> bool {
        let words = ["in", "not", "and", "or", "if", "else"];
        let before = |n: usize| i.checked_sub(n).map(|i| self.tokens[i].text);
        let names_test =
            before(1) == Some("is") || (before(1) == Some("not") && before(2) == Some("is"));
        let is_attribute = before(1) == Some(".");
        self.tokens[i].kind == Kind::Name
            && words.contains(&self.tokens[i].text)
            && !names_test
            && !is_attribute
    }

    /// Whether a value begins at token `i`, so that a bracket there is not a call.
    fn begins_value(&self, i: usize) -> bool {
        if i == self.first {
            return true;
        }
        let before = &self.tokens[i - 1];
        match before.kind {
            Kind::Name => self.is_word(i - 1),
            Kind::Literal => false,
            Kind::Operator => !matches!(before.text, ")" | "]" | "}"),
        }
    }

    /// Whether the brackets at token `i` hold a tuple: nothing, or a comma that is in no other brackets.
    fn is_tuple(&self, i: usize) -> bool {
        let end = self.partner[i];
        let mut at = i + 1;
        while at < end {
            if self.tokens[at].text == "," {
                return true;
            }
            at = self.partner[at].max(at) + 1;
        }
        end == i + 1
    }

    /// Whether token `i` ends the right operand of `%`, as an operator of the same or lower precedence.
    fn ends_operand(&self, i: usize) -> bool {
        let token = &self.tokens[i];
        match token.kind {
            Kind::Name => self.is_word(i),
            Kind::Literal => false,
            Kind::Operator => !matches!(token.text, "." | "|" | "**" | "(" | "[" | "{"),
        }
    }

    /// First token of the left operand of the `%` at token `i`, which includes products and quotients before it.
    fn left_of(&self, i: usize) -> usize {
        let mut start = i;
        while start > self.first {
            let at = start - 1;
            let token = &self.tokens[at];
            let continues = match token.text {
                ")" | "]" | "}" => true,
                "*" | "/" | "//" | "%" => true,
                // A sign belongs to the operand; a sum does not.
                "+" | "-" => self.begins_value(at),
                _ => !self.ends_operand(at) && !matches!(token.text, "(" | "[" | "{"),
            };
            if !continues {
                break;
            }
            start = self.partner[at].min(at);
        }
        start
    }

    /// The last token of the right operand of the `%` at token `i`.
    fn right_of(&self, i: usize) -> usize {
        let mut at = i + 1;
        let mut end = at;
        let mut wants_value = true;
        while at < self.tokens.len() {
            let token = &self.tokens[at];
            if wants_value && matches!(token.text, "+" | "-") {
                at += 1;
                continue;
            }
            if self.ends_operand(at) {
                break;
            }
            wants_value = token.text == "**";
            end = self.partner[at].max(at);
            at = end + 1;
        }
        end.min(self.tokens.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_and_tuples_become_calls() {
        for (source, expected) in [
            ("{{ '%s' % x }}", "{{ __percent__('%s' , x) }}"),
            ("{{'%d}}'%x}}", "{{__percent__('%d}}',x)}}"),
            (
                "{% if a - b * c % -d ** 2 + 1 == 0 %}",
                "{% if a - __percent__(b * c , -d ** 2) + 1 == 0 %}",
            ),
            (
                "{%- set x = a % b % c -%}",
                "{%- set x = __percent__(__percent__(a , b) , c) -%}",
            ),
            (
                "{{ '%s-%s' % (a, 'b') }}",
                "{{ __percent__('%s-%s' , __tuple__(a, 'b')) }}",
            ),
            (
                "{{ (loop.index0 % 2 == 0) != f(x, y)[1] % g(2)|int }}",
                "{{ (__percent__(loop.index0 , 2) == 0) != __percent__(f(x, y)[1] , g(2)|int) }}",
            ),
            (
                "{{ x if y is not none and a.in % b else () }}",
                "{{ x if y is not none and __percent__(a.in , b) else __tuple__() }}",
            ),
            (
                "{{ f((1,), key=(2, 3)) in ((1, 2), [(4), x(5, 6)]) }}",
                "{{ f(__tuple__(1,), key=__tuple__(2, 3)) in __tuple__(__tuple__(1, 2), [(4), x(5, 6)]) }}",
            ),
            (
                "{% for (a, b) in ((1, 2), (3, 4)) %}",
                "{% for (a, b) in __tuple__(__tuple__(1, 2), __tuple__(3, 4)) %}",
            ),
            (
                "{{ -a % {'x': 5 % 2}['x'] ~ 'y' }}",
                "{{ __percent__(-a , {'x': __percent__(5 , 2)}['x']) ~ 'y' }}",
            ),
        ] {
            assert_eq!(with_calls(source), expected);
        }
    }

    #[test]
    fn everything_else_stays() {
        for source in [
            "100 % of (a, b) {# {{ a % b }} #} {",
            "{% raw %}{{ a % b }}{%- endraw -%} (1, 2)",
            "{{ \"a % (b, c) \\\" % d\" }}",
            "{% call(a, b) f(a, b) %}{% endcall %}",
            "{% macro f(a, b=1) %}{{ f(a, b) | join(', ', x) }}{% endmacro %}",
            "{% set a, b = x %}{{ x is in(y) }}",
            // The engine refuses these.
            "{{ a % }}",
            "{{ % a }}",
            "{{ (a, b }}",
            "{% if x % y",
            "{{ 'a % b }}",
        ] {
            assert_eq!(with_calls(source), source);
        }
    }
}
