use std::collections::{BTreeSet, HashMap};

use super::super::tests::vocabulary;
use super::super::{Grammar, GrammarSource};
use super::parse::{Node, Rules, parse};
use crate::format::random::bits;

/// Where texts of each rule that begin at each character may end, as far as this is known.
struct Recognizer<'a> {
    rules: &'a [Node],
    text: &'a [char],
    ends: HashMap<(usize, usize), BTreeSet<usize>>,
}

impl Recognizer<'_> {
    /// Whether the whole text is one of a grammar: all ways to read it are followed until no rule has a new end.
    fn fits(rules: &Rules, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let mut recognizer = Recognizer {
            rules: &rules.rules,
            text: &text,
            ends: HashMap::from([((rules.root, 0), BTreeSet::new())]),
        };
        loop {
            let (known, count) = (recognizer.ends.clone(), recognizer.ends.len());
            for &(rule, from) in known.keys() {
                let ends = recognizer.after(&recognizer.rules[rule], from);
                recognizer.ends.insert((rule, from), ends);
            }
            let is_stable = |(key, ends): (&_, &_)| recognizer.ends[key] == *ends;
            if recognizer.ends.len() == count && known.iter().all(is_stable) {
                return recognizer.ends[&(rules.root, 0)].contains(&text.len());
            }
        }
    }

    fn after(&mut self, node: &Node, from: usize) -> BTreeSet<usize> {
        match node {
            Node::Class { ranges, is_negated } => {
                let is_in = |c: &char| {
                    ranges
                        .iter()
                        .any(|(first, last)| (first..=last).contains(&c))
                };
                let c = self.text.get(from).filter(|c| is_in(c) != *is_negated);
                c.map(|_| from + 1).into_iter().collect()
            }
            Node::Literal(literal) => {
                let literal: Vec<char> = literal.chars().collect();
                let starts = self.text[from..].starts_with(&literal);
                starts.then_some(from + literal.len()).into_iter().collect()
            }
            Node::Rule(rule) => self.ends.entry((*rule, from)).or_default().clone(),
            Node::Sequence(all) => all.iter().fold(BTreeSet::from([from]), |ends, node| {
                ends.into_iter()
                    .flat_map(|end| self.after(node, end))
                    .collect()
            }),
            Node::Alternatives(all) => all.iter().flat_map(|node| self.after(node, from)).collect(),
            Node::Repeated { node, least, most } => {
                let (mut found, mut ends) = (BTreeSet::new(), BTreeSet::from([from]));
                // More repetitions than there are characters end nowhere else.
                let most = most
                    .unwrap_or(u32::MAX)
                    .min(least + self.text.len() as u32 + 1);
                for count in 0..=most {
                    if count >= *least {
                        found.extend(&ends);
                    }
                    ends = ends
                        .into_iter()
                        .flat_map(|end| self.after(node, end))
                        .collect();
                }
                found
            }
        }
    }
}

/// Texts that are made by masks alone, at random, fit the grammar as it is written.
#[test]
fn texts_by_masks_fit_the_grammar() {
    let vocabulary = vocabulary();
    let tokenizer = vocabulary.tokenizer();
    for (source, least) in [
        (
            "root ::= \"a\" ws [b-d]{1,3} ws? \"!\"\nws ::= ([ \\t] ws)?",
            20,
        ),
        (
            "root ::= sum\nsum ::= sum [-+] product | product\nproduct ::= product \"*\" one | one\none ::= [0-9]{1,2} | \"(\" sum \")\"",
            10,
        ),
        (
            "root ::= tree\ntree ::= \"{\" (leaf (\",\" leaf)*)? \"}\"\nleaf ::= name \":\" (tree | \"true\" | name)\nname ::= [a-c]+",
            10,
        ),
        (
            "root ::= a \"b\"?\na ::= \"ab\" a | \"a\" a \"b\" | \"\"",
            10,
        ),
        (
            "root ::= [^ab{}]? x \"ab\" x\nx ::= \"c\" x \"c\" | \"ab\"? \"d\"",
            10,
        ),
    ] {
        let rules = parse(source).unwrap();
        let grammar = Grammar::new(&vocabulary, GrammarSource::Gbnf(source)).unwrap();
        let mut whole = 0;
        for text in 0..60 {
            let (mut state, mut bytes) = (grammar.begin().unwrap(), Vec::new());
            for step in 0..40 {
                let ends = state.is_over() || state.is_accepting().unwrap();
                if state.is_over() || ends && bits(text, 2 * step).is_multiple_of(4) {
                    let text = String::from_utf8(bytes).unwrap();
                    assert!(Recognizer::fits(&rules, &text), "{source}: {text:?}");
                    whole += 1;
                    break;
                }
                let mask = state.mask().unwrap().to_vec();
                let allowed: Vec<u32> = (0..32 * mask.len() as u32)
                    .filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
                    .filter(|id| !tokenizer.is_special(*id))
                    .collect();
                let token = allowed[bits(text, 2 * step + 1) as usize % allowed.len()];
                bytes.extend(tokenizer.bytes_of(token).unwrap());
                state.push(token).unwrap();
            }
        }
        assert!(whole >= least, "{source}: {whole} texts");
    }
}

#[test]
fn the_recognizer_follows_all_ways() {
    let rules = parse("root ::= [a-c]* \"c\" | root \"d\"{2,3}").unwrap();
    for (text, fits) in [
        ("abc", true),
        ("cc", true),
        ("ab", false),
        ("cdd", true),
        ("cddddd", true),
        ("cd", false),
        ("", false),
    ] {
        assert_eq!(Recognizer::fits(&rules, text), fits, "{text}");
    }
}
