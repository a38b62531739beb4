//! Rules as a regular expression, or as a Lark grammar with regular expressions for all that is regular.
//!
//! A rule that refers to no other, or only to such rules, is regular, and so is one that refers to itself at its end alone, as lists and white
//! space are often written. Others become rules of Lark: a parser splits the text between their regular parts by the longest match.

use std::fmt::Write;

use super::parse::{Node, Rules, parse};
use crate::base::Result;
use crate::base::error::bail;

/// Most bytes of a regular expression, into which the rules that it refers to are copied.
const LONGEST: usize = 256 << 10;
/// Most bytes of all texts that are made on the way.
const MOST_BYTES: usize = 4 << 20;

/// A grammar that `llguidance` compiles.
#[derive(Debug, PartialEq)]
pub(crate) enum Lowered {
    /// The only regular expression.
    Regex(String),
    /// A Lark grammar, and the regular expressions in it.
    Lark(String, Vec<String>),
}

/// How tightly the parts of an expression hold together.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Binding {
    Alternatives,
    Sequence,
    Atom,
}

/// An expression, regular or of Lark.
#[derive(Clone)]
struct Text {
    text: String,
    binding: Binding,
}

impl Text {
    fn atom(text: &str) -> Text {
        Text {
            text: text.to_owned(),
            binding: Binding::Atom,
        }
    }

    /// The text, in parentheses that begin with `open` unless it binds as tightly as `binding`.
    fn within(&self, binding: Binding, open: &str) -> String {
        if self.binding >= binding {
            self.text.clone()
        } else {
            format!("{open}{})", self.text)
        }
    }

    fn repeated(&self, open: &str, least: u32, most: Option<u32>) -> Text {
        let operator = match (least, most) {
            (0, None) => "*".to_owned(),
            (1, None) => "+".to_owned(),
            (0, Some(1)) => "?".to_owned(),
            (least, None) => format!("{{{least},}}"),
            (least, Some(most)) => format!("{{{least},{most}}}"),
        };
        Text {
            text: self.within(Binding::Atom, open) + &operator,
            binding: Binding::Sequence,
        }
    }

    fn joined(mut all: Vec<Text>, binding: Binding, between: &str, open: &str) -> Text {
        if all.len() == 1 {
            return all.remove(0);
        }
        let all: Vec<String> = all.iter().map(|one| one.within(binding, open)).collect();
        Text {
            text: all.join(between),
            binding,
        }
    }
}

/// Opens a group of a regular expression.
const GROUP: &str = "(?:";

/// The regular expression of no character.
fn empty() -> Text {
    Text::atom("(?:)")
}

fn sequence(all: Vec<Text>) -> Text {
    if all.is_empty() {
        empty()
    } else {
        Text::joined(all, Binding::Sequence, "", GROUP)
    }
}

fn alternatives(all: Vec<Text>) -> Text {
    Text::joined(all, Binding::Alternatives, "|", GROUP)
}

/// A character in a regular expression, also in one between slashes.
fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() {
        c.to_string()
    } else {
        format!("\\x{{{:x}}}", u32::from(c))
    }
}

struct Lowering {
    rules: Vec<Node>,
    /// The regular rules.
    regular: Vec<Option<Text>>,
    /// The regular expressions between slashes.
    pieces: Vec<String>,
    /// Bytes of texts that may still be made.
    room: usize,
}

pub(crate) fn lower(text: &str) -> Result<Lowered> {
    let Rules { rules, root } = parse(text)?;
    let mut lowering = Lowering {
        regular: vec![None; rules.len()],
        rules,
        pieces: Vec::new(),
        room: MOST_BYTES,
    };
    lowering.find_regular()?;
    if let Some(text) = lowering.regular[root].take() {
        return Ok(Lowered::Regex(text.text));
    }
    let mut grammar = format!("start: r{root}\n");
    let mut is_reached = vec![false; lowering.rules.len()];
    is_reached[root] = true;
    let (mut reached, mut next) = (vec![root], 0);
    while let Some(&rule) = reached.get(next) {
        next += 1;
        let node = std::mem::replace(&mut lowering.rules[rule], Node::Sequence(Vec::new()));
        let _ = writeln!(grammar, "r{rule}: {}", lowering.lark(&node)?.text);
        let mut named = Vec::new();
        references(&node, &mut named);
        named.retain(|&rule| lowering.regular[rule].is_none());
        for rule in named {
            if !std::mem::replace(&mut is_reached[rule], true) {
                reached.push(rule);
            }
        }
    }
    Ok(Lowered::Lark(grammar, lowering.pieces))
}

/// Adds the rules that a node refers to.
fn references(node: &Node, to: &mut Vec<usize>) {
    match node {
        Node::Class { .. } | Node::Literal(_) => {}
        Node::Rule(rule) => to.push(*rule),
        Node::Sequence(all) | Node::Alternatives(all) => {
            all.iter().for_each(|one| references(one, to));
        }
        Node::Repeated { node, .. } => references(node, to),
    }
}

fn refers_to(node: &Node, rule: usize) -> bool {
    let mut named = Vec::new();
    references(node, &mut named);
    named.contains(&rule)
}

impl Lowering {
    /// Fills `regular`, a rule after those that it refers to.
    fn find_regular(&mut self) -> Result<()> {
        let mut users = vec![Vec::new(); self.rules.len()];
        let mut open = vec![0; self.rules.len()];
        for (rule, node) in self.rules.iter().enumerate() {
            let mut named = Vec::new();
            references(node, &mut named);
            named.sort_unstable();
            named.dedup();
            named.retain(|&other| other != rule);
            open[rule] = named.len();
            for other in named {
                users[other].push(rule);
            }
        }
        let mut ready: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = ready.pop() {
            let node = std::mem::replace(&mut self.rules[rule], Node::Sequence(Vec::new()));
            self.regular[rule] = if refers_to(&node, rule) {
                self.repeating(&node, rule)?
            } else {
                self.regular(&node)?
            };
            self.rules[rule] = node;
            if self.regular[rule].is_some() {
                for &user in &users[rule] {
                    open[user] -= 1;
                    if open[user] == 0 {
                        ready.push(user);
                    }
                }
            }
        }
        Ok(())
    }

    /// The regular expression of a rule that refers to itself; None if it does so elsewhere than at its end.
    fn repeating(&mut self, node: &Node, rule: usize) -> Result<Option<Text>> {
        let (mut again, mut last) = (Vec::new(), Vec::new());
        if !self.ends(node, rule, &[], &mut again, &mut last)? || last.is_empty() {
            return Ok(None);
        }
        let again = alternatives(again).repeated(GROUP, 0, None);
        self.counted(sequence(vec![again, alternatives(last)]))
            .map(Some)
    }

    /// Counts the bytes of a text that was made.
    fn counted(&mut self, text: Text) -> Result<Text> {
        let bytes = text.text.len();
        match self.room.checked_sub(bytes) {
            Some(left) if bytes <= LONGEST => {
                self.room = left;
                Ok(text)
            }
            _ => bail!(
                InvalidArgument,
                "each rule has the text of those that it refers to in it, which makes a regular expression of more than {LONGEST} bytes, or {MOST_BYTES} in all; refer to large rules less often"
            ),
        }
    }

    /// Divides the texts of a node after `before`: those that `rule` follows go to `again`, and those that it does not follow to `last`. False
    /// if the rule stands elsewhere.
    fn ends(
        &mut self,
        node: &Node,
        rule: usize,
        before: &[Text],
        again: &mut Vec<Text>,
        last: &mut Vec<Text>,
    ) -> Result<bool> {
        if !refers_to(node, rule) {
            let Some(text) = self.regular(node)? else {
                return Ok(false);
            };
            last.push(self.counted(sequence([before, &[text]].concat()))?);
            return Ok(true);
        }
        match node {
            Node::Rule(_) => again.push(self.counted(sequence(before.to_vec()))?),
            Node::Alternatives(all) => {
                for one in all {
                    if !self.ends(one, rule, before, again, last)? {
                        return Ok(false);
                    }
                }
            }
            Node::Sequence(all) => {
                let Some((end, start)) = all.split_last() else {
                    return Ok(false);
                };
                let mut before = before.to_vec();
                for one in start {
                    match self.regular(one)? {
                        Some(text) => before.push(text),
                        None => return Ok(false),
                    }
                }
                return self.ends(end, rule, &before, again, last);
            }
            Node::Repeated {
                node,
                least: 0,
                most: Some(1),
            } => {
                last.push(self.counted(sequence(before.to_vec()))?);
                return self.ends(node, rule, before, again, last);
            }
            Node::Class { .. } | Node::Literal(_) | Node::Repeated { .. } => return Ok(false),
        }
        Ok(true)
    }

    /// The regular expression of a node, unless it refers to a rule that has none.
    fn regular(&mut self, node: &Node) -> Result<Option<Text>> {
        let text = match node {
            Node::Class { ranges, is_negated } => Text::atom(&class(ranges, *is_negated)),
            Node::Literal(text) => {
                sequence(text.chars().map(|c| Text::atom(&escaped(c))).collect())
            }
            Node::Rule(rule) => match &self.regular[*rule] {
                Some(text) => text.clone(),
                None => return Ok(None),
            },
            Node::Sequence(all) | Node::Alternatives(all) => {
                let mut texts = Vec::with_capacity(all.len());
                for one in all {
                    match self.regular(one)? {
                        Some(text) => texts.push(text),
                        None => return Ok(None),
                    }
                }
                if matches!(node, Node::Sequence(_)) {
                    sequence(texts)
                } else {
                    alternatives(texts)
                }
            }
            Node::Repeated { node, least, most } => match self.regular(node)? {
                Some(text) => text.repeated(GROUP, *least, *most),
                None => return Ok(None),
            },
        };
        self.counted(text).map(Some)
    }

    /// A regular expression as a part of a Lark grammar.
    fn piece(&mut self, text: Text) -> Text {
        if text.text == empty().text {
            return Text::atom("\"\"");
        }
        let piece = Text::atom(&format!("/{}/", text.text));
        self.pieces.push(text.text);
        piece
    }

    /// A node in Lark, with parts beside each other that are regular as one expression.
    fn lark(&mut self, node: &Node) -> Result<Text> {
        if let Some(text) = self.regular(node)? {
            return Ok(self.piece(text));
        }
        Ok(match node {
            Node::Rule(rule) => Text::atom(&format!("r{rule}")),
            Node::Repeated { node, least, most } => self.lark(node)?.repeated("(", *least, *most),
            Node::Alternatives(all) => {
                let (mut parts, mut regular) = (Vec::new(), Vec::new());
                for one in all {
                    match self.regular(one)? {
                        Some(text) => regular.push(text),
                        None => parts.push(self.lark(one)?),
                    }
                }
                if !regular.is_empty() {
                    parts.push(self.piece(alternatives(regular)));
                }
                Text::joined(parts, Binding::Alternatives, " | ", "(")
            }
            Node::Sequence(all) => {
                let (mut parts, mut regular) = (Vec::new(), Vec::new());
                for one in all {
                    match self.regular(one)? {
                        Some(text) => regular.push(text),
                        None => {
                            if !regular.is_empty() {
                                parts.push(self.piece(sequence(std::mem::take(&mut regular))));
                            }
                            parts.push(self.lark(one)?);
                        }
                    }
                }
                if !regular.is_empty() {
                    parts.push(self.piece(sequence(regular)));
                }
                Text::joined(parts, Binding::Sequence, " ", "(")
            }
            Node::Class { .. } | Node::Literal(_) => unreachable!("they are regular"),
        })
    }
}

fn class(ranges: &[(char, char)], is_negated: bool) -> String {
    if ranges.is_empty() {
        return "[\\x{0}-\\x{10ffff}]".to_owned();
    }
    let mut text = String::from(if is_negated { "[^" } else { "[" });
    for &(first, last) in ranges {
        text += &escaped(first);
        if last != first {
            text.push('-');
            text += &escaped(last);
        }
    }
    text + "]"
}
