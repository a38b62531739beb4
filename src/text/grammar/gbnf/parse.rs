//! Reads GBNF.

use std::collections::HashMap;

use crate::base::Result;
use crate::base::error::{Error, err};

/// Most groups within each other, and most operators after a part.
const DEEPEST: usize = 50;

/// A part of a rule.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    /// A character of these inclusive ranges, or of none of them.
    Class {
        ranges: Vec<(char, char)>,
        is_negated: bool,
    },
    /// A text, which may be empty.
    Literal(String),
    /// The number of a rule.
    Rule(usize),
    Sequence(Vec<Node>),
    Alternatives(Vec<Node>),
    Repeated {
        node: Box<Node>,
        least: u32,
        most: Option<u32>,
    },
}

/// The rules of a grammar, of which the one with the number `root` is the text.
#[derive(Debug)]
pub(super) struct Rules {
    pub rules: Vec<Node>,
    pub root: usize,
}

/// A rule's name, with where it is first met and what it is defined as.
struct Named<'a> {
    name: &'a str,
    at: usize,
    node: Option<Node>,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    rules: Vec<Named<'a>>,
    numbers: HashMap<&'a str, usize>,
}

pub(super) fn parse(text: &str) -> Result<Rules> {
    let mut reader = Reader {
        text,
        at: 0,
        depth: 0,
        rules: Vec::new(),
        numbers: HashMap::new(),
    };
    reader.skip(true);
    while reader.peek().is_some() {
        reader.rule()?;
    }
    let Reader { rules, numbers, .. } = reader;
    let Some(&root) = numbers.get("root") else {
        return Err(err!(
            InvalidArgument,
            "no rule is named 'root', which is the rule of the whole text"
        ));
    };
    let rules = rules
        .into_iter()
        .map(|rule| {
            rule.node.ok_or_else(|| {
                let what = format!("rule '{}' is not defined", rule.name);
                wrong(text, rule.at, &what)
            })
        })
        .collect::<Result<_>>()?;
    Ok(Rules { rules, root })
}

/// An error at a byte of the text.
fn wrong(text: &str, at: usize, what: &str) -> Error {
    let before = &text[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    err!(InvalidArgument, "line {line}, column {column}: {what}")
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

impl<'a> Reader<'a> {
    fn wrong(&self, what: &str) -> Error {
        wrong(self.text, self.at, what)
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    /// Takes `what` if it comes next.
    fn takes(&mut self, what: &str) -> bool {
        let is_next = self.rest().starts_with(what);
        if is_next {
            self.at += what.len();
        }
        is_next
    }

    /// Skips spaces and comments, and with `over_lines` ends of lines.
    fn skip(&mut self, over_lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                '#' => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if over_lines => self.at += 1,
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let length = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        self.at += length;
        (length > 0).then(|| &rest[..length])
    }

    fn number_of(&mut self, name: &'a str) -> usize {
        let at = self.at - name.len();
        let rules = &mut self.rules;
        *self.numbers.entry(name).or_insert_with(|| {
            rules.push(Named {
                name,
                at,
                node: None,
            });
            rules.len() - 1
        })
    }

    fn rule(&mut self) -> Result<()> {
        let at = self.at;
        let name = self
            .name()
            .ok_or_else(|| self.wrong("the name of a rule is expected"))?;
        let number = self.number_of(name);
        self.skip(false);
        if !self.takes("::=") {
            return Err(self.wrong(&format!("'::=' is expected after the name '{name}'")));
        }
        if self.rules[number].node.is_some() {
            let what = format!("rule '{name}' is defined a second time");
            return Err(wrong(self.text, at, &what));
        }
        let node = self.alternatives(false)?;
        self.rules[number].node = Some(node);
        if self.peek().is_some_and(|c| !matches!(c, '\r' | '\n')) {
            return Err(self
                .wrong("a literal, a class, a rule, '(', '|' or the end of the line is expected"));
        }
        self.skip(true);
        Ok(())
    }

    /// Alternatives up to the end of the line, or `within` a group up to its end.
    fn alternatives(&mut self, within: bool) -> Result<Node> {
        let mut all = Vec::new();
        loop {
            self.skip(true);
            all.push(self.sequence(within)?);
            if !self.takes("|") {
                break;
            }
        }
        Ok(if all.len() == 1 {
            all.remove(0)
        } else {
            Node::Alternatives(all)
        })
    }

    fn sequence(&mut self, within: bool) -> Result<Node> {
        let mut all = Vec::new();
        while let Some(node) = self.atom()? {
            all.push(self.repeated(node, within)?);
            self.skip(within);
        }
        Ok(if all.len() == 1 {
            all.remove(0)
        } else {
            Node::Sequence(all)
        })
    }

    fn atom(&mut self) -> Result<Option<Node>> {
        Ok(match self.peek() {
            Some('"') => Some(self.literal()?),
            Some('[') => Some(self.class()?),
            Some('.') => {
                self.at += 1;
                Some(Node::Class {
                    ranges: Vec::new(),
                    is_negated: true,
                })
            }
            Some('(') => Some(self.group()?),
            Some('<' | '!') => {
                return Err(self.wrong("tokens of a model are not supported; write their text"));
            }
            Some(c) if is_name(c) => {
                let name = self.name().unwrap_or_default();
                Some(Node::Rule(self.number_of(name)))
            }
            _ => None,
        })
    }

    fn group(&mut self) -> Result<Node> {
        let start = self.at;
        if self.depth == DEEPEST {
            return Err(self.wrong(&format!("more than {DEEPEST} groups are within each other")));
        }
        self.depth += 1;
        self.at += 1;
        let node = self.alternatives(true)?;
        self.skip(true);
        self.depth -= 1;
        if !self.takes(")") {
            return Err(match self.peek() {
                None => wrong(self.text, start, "this group has no end"),
                Some(_) => self.wrong("a literal, a class, a rule, '(', '|' or ')' is expected"),
            });
        }
        Ok(node)
    }

    /// `node` with the operators after it, between which there may be space, and `within` a group ends of lines.
    fn repeated(&mut self, mut node: Node, within: bool) -> Result<Node> {
        for _ in 0..DEEPEST {
            self.skip(within);
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.bounds()?,
                _ => return Ok(node),
            };
            self.at += 1;
            node = Node::Repeated {
                node: Box::new(node),
                least,
                most,
            };
        }
        Err(self.wrong(&format!("more than {DEEPEST} operators follow each other")))
    }

    /// The numbers in braces, up to the closing one.
    fn bounds(&mut self) -> Result<(u32, Option<u32>)> {
        let start = self.at;
        let inner = self.rest()[1..].split_once('}').map(|(inner, _)| inner);
        let read = inner.and_then(|inner| {
            let number = |text: &str| text.trim().parse().ok();
            let (least, most) = match inner.split_once(',') {
                None => (number(inner)?, Some(number(inner)?)),
                Some((least, most)) if most.trim().is_empty() => (number(least)?, None),
                Some((least, most)) if least.trim().is_empty() => (0, Some(number(most)?)),
                Some((least, most)) => (number(least)?, Some(number(most)?)),
            };
            (most.is_none_or(|most| least <= most)).then_some((inner.len(), least, most))
        });
        let Some((length, least, most)) = read else {
            let what = "a repetition is written {3}, {3,}, {,5} or {3,5}";
            return Err(wrong(self.text, start, what));
        };
        self.at += 1 + length;
        Ok((least, most))
    }

    fn literal(&mut self) -> Result<Node> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        while !self.takes("\"") {
            text.push(self.character(start, "this literal has no end")?);
        }
        Ok(Node::Literal(text))
    }

    fn class(&mut self) -> Result<Node> {
        let start = self.at;
        let endless = "this class has no end";
        self.at += 1;
        let is_negated = self.takes("^");
        let mut ranges = Vec::new();
        while !self.takes("]") {
            let first = self.character(start, endless)?;
            let mut last = first;
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                let at = self.at;
                last = self.character(start, endless)?;
                if last < first {
                    let what = format!("a range from {first:?} to {last:?} has no character");
                    return Err(wrong(self.text, at, &what));
                }
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() {
            return Err(wrong(self.text, start, "this class has no character"));
        }
        Ok(Node::Class { ranges, is_negated })
    }

    /// A character, of which `\` may escape the next ones. `start` is where the literal or class begins that `endless` says to have no end.
    fn character(&mut self, start: usize, endless: &str) -> Result<char> {
        let none = |reader: &Self| wrong(reader.text, start, endless);
        let at = self.at;
        let c = self.next().ok_or_else(|| none(self))?;
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next().ok_or_else(|| none(self))? {
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'n' => return Ok('\n'),
            c @ ('\\' | '"' | '[' | ']' | '-') => return Ok(c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c => {
                let what = format!(
                    "'\\{c}' is no escape; they are \\n, \\r, \\t, \\\\, \\\", \\[, \\], \\-, \\x41, \\u0041 and \\U00000041"
                );
                return Err(wrong(self.text, at, &what));
            }
        };
        let number = self.rest().get(..digits);
        let number = number.filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()));
        let c = number
            .and_then(|text| u32::from_str_radix(text, 16).ok())
            .and_then(char::from_u32);
        let c = c.ok_or_else(|| {
            let what = format!("{digits} hexadecimal digits of a character are expected");
            wrong(self.text, at, &what)
        })?;
        self.at += digits;
        Ok(c)
    }
}
