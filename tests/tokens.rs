//! Our own tokenizer against the crate `tokenizers`, token for token, on seeded texts that mean harm.
//!
//! `NVFP4_TOKENIZERS` names further `tokenizer.json` files to compare, with colons between them, and `NVFP4_FUZZ_CHARS` how many
//! characters each of them gets.

use std::path::Path;
use std::time::{Duration, Instant};

use NVFP4::text::Tokenizer;
use serde_json::{Value, json};
use tokenizers::normalizers::NFC;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A character of one of `ranges`.
    fn char(&mut self, ranges: &[(u32, u32)]) -> char {
        let (first, last) = self.of(ranges);
        let code = first + self.below((last - first + 1) as usize) as u32;
        char::from_u32(code).unwrap_or('\u{fffd}')
    }

    fn chars(&mut self, most: usize, ranges: &[(u32, u32)], out: &mut String) {
        for _ in 0..=self.below(most) {
            out.push(self.char(ranges));
        }
    }
}

const SPACES: &[char] = &[
    ' ', ' ', ' ', ' ', '\t', '\n', '\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{a0}', '\u{1680}',
    '\u{2003}', '\u{2028}', '\u{202f}', '\u{3000}', '\u{200b}', '\u{feff}',
];

const WORDS: &[&str] = &[
    "the",
    " The",
    " don't",
    "it's",
    "I'LL",
    "we'Ve",
    "x'ſ",
    "'tis",
    "'S",
    "o'clock",
    "McDonald's",
    "camelCaseWord",
    "HTTPServer",
    "snake_case",
    "fn main() {\n    ",
    "\r\n\r\n",
    "\n\t\tif (a != b) ",
    "/* */",
    "//",
    "...",
    "!?",
    "$x",
    "<=",
    "->",
    "=== ",
    "''",
    "été",
    "cafe\u{301}",
    "Å",
    "\u{212b}",
    "\u{2126}",
    "ﬁ",
    "ǅ",
    "ŉ",
    "straße",
    "İstanbul",
    "ΑΒΓ",
    "ὀδός",
    "привет",
    "שָׁלוֹם",
    "नमस्ते",
    "ภาษาไทย",
    "한국어",
    "日本語",
    "東京都",
    "中文，",
    "ｆｕｌｌ",
    "😀",
    "👩‍👩‍👧‍👦",
    "🇫🇷",
    "❤️",
    "👍🏽",
    "½",
    "Ⅷ",
    "²",
    "٣٤",
    "१२",
    "1",
    "22",
    "333",
    "4444",
    "12345678901",
    "3.14",
    "0x1F",
];

/// Characters that Unicode's normal forms are about: marks, letters with marks, parts of Hangul, and forms that never stay.
const NORMAL: &[(u32, u32)] = &[
    (0x41, 0x5a),
    (0x61, 0x7a),
    (0xc0, 0x17f),
    (0x300, 0x362),
    (0x591, 0x5c7),
    (0x64b, 0x65f),
    (0x93c, 0x94d),
    (0x958, 0x95f),
    (0x9be, 0x9cd),
    (0xbc6, 0xbcc),
    (0xf71, 0xf80),
    (0x1100, 0x1112),
    (0x1161, 0x1175),
    (0x11a7, 0x11c2),
    (0x1e00, 0x1fff),
    (0x2000, 0x2003),
    (0x2adc, 0x2adc),
    (0x3041, 0x309a),
    (0xac00, 0xac40),
    (0xf900, 0xfa6d),
    (0xfb1d, 0xfb4e),
    (0x1d15e, 0x1d164),
    (0x11099, 0x110ba),
    (0x2f800, 0x2fa1d),
];

/// One piece of a text.
fn piece(random: &mut Random, special: &[String], out: &mut String) {
    match random.below(22) {
        0..=5 => out.push_str(random.of(WORDS)),
        6 => random.chars(12, &[(0x20, 0x7e)], out),
        7 => random.chars(10, &[(0x61, 0x7a), (0x41, 0x5a)], out),
        8 => (0..=random.below(6)).for_each(|_| out.push(random.of(SPACES))),
        9 => out.extend(std::iter::repeat_n(random.of(SPACES), random.below(40))),
        10 => random.chars(8, &[(0x30, 0x39)], out),
        11 => random.chars(20, &[(0x4e00, 0x9fff)], out),
        12 => random.chars(
            20,
            &[(0x3040, 0x30ff), (0xac00, 0xd7a3), (0x400, 0x4ff)],
            out,
        ),
        13 => random.chars(10, &[(0x590, 0x6ff), (0x900, 0xdff), (0xe00, 0xe7f)], out),
        14 => random.chars(6, NORMAL, out),
        15 => random.chars(6, &[(0x300, 0x36f), (0x61, 0x7a)], out),
        16 => random.chars(
            6,
            &[(0x1f300, 0x1faff), (0x200d, 0x200d), (0xfe0f, 0xfe0f)],
            out,
        ),
        17 => random.chars(4, &[(0, 0x1f), (0x7f, 0xa0)], out),
        18 => random.chars(
            4,
            &[(0x80, 0xd7ff), (0xe000, 0x3ffff), (0xe0000, 0x10ffff)],
            out,
        ),
        19 | 20 if !special.is_empty() => {
            let name = &special[random.below(special.len())];
            let cut = random.below(4 * name.len() + 1);
            out.push_str(name.get(..cut).unwrap_or(name));
        }
        _ if random.below(40) == 0 => {
            let c = random.char(&[(0x61, 0x7a), (0x300, 0x310), (0x4e00, 0x4e10), (0x20, 0x2f)]);
            out.extend(std::iter::repeat_n(c, random.below(3000)));
        }
        _ => random.chars(3, &[(0x21, 0x2f), (0x3a, 0x40)], out),
    }
}

/// Compares the two on some `chars` characters.
fn compare(what: &str, json: &[u8], chars: usize, seed: u64) {
    let ours = Tokenizer::from_json(json).unwrap();
    let mut theirs = tokenizers::Tokenizer::from_bytes(json).unwrap();
    let special: Vec<String> = theirs
        .get_added_tokens_decoder()
        .into_values()
        .map(|t| t.content)
        .collect();
    let mut random = Random(seed);
    let mut done = 0;
    while done < chars {
        let mut text = String::new();
        for _ in 0..random.of(&[1, 3, 10, 100]) {
            piece(&mut random, &special, &mut text);
        }
        done += text.chars().count().max(1);
        let add_special = random.below(4) == 0;
        let expected = theirs.encode_fast(&*text, add_special).unwrap();
        let tokens = ours.encode(&text, add_special).unwrap();
        assert_eq!(tokens, expected.get_ids(), "{what}, seed {seed}: {text:?}");
        if random.below(8) == 0 {
            theirs.set_encode_special_tokens(true);
            let expected = theirs.encode_fast(&*text, false).unwrap();
            theirs.set_encode_special_tokens(false);
            // A special token that only merges lead to is refused.
            if let Ok(tokens) = ours.encode_plain(&text) {
                assert_eq!(
                    tokens,
                    expected.get_ids(),
                    "{what}, seed {seed}, plain: {text:?}"
                );
            }
        }
    }
    println!("{what}: {done} characters");
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/text/tokenizer.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn chars(usual: usize) -> usize {
    let chars = std::env::var("NVFP4_FUZZ_CHARS");
    chars.map_or(usual, |chars| chars.parse().unwrap())
}

const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const DEEPSEEK: &str = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";

/// Isolated splits by `patterns`, then bytes.
fn splits(patterns: &[&str]) -> Value {
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let mut steps: Vec<Value> = patterns.iter().map(split).collect();
    steps.push(bytes(false, false));
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn bytes(prefix: bool, regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex})
}

/// The golden tokenizer under every rule.
fn rules() -> Vec<(&'static str, Value)> {
    let llama = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|");
    let marks = QWEN
        .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
        .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]");
    let tekken = O200K
        .replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
        .replace("{1,3}", "");
    let digits = json!({"type": "Digits", "individual_digits": true});
    vec![
        ("qwen2", splits(&[QWEN])),
        ("llama-bpe", splits(&[&llama])),
        ("qwen35", splits(&[&marks])),
        ("gpt-4o", splits(&[O200K])),
        ("tekken", splits(&[&tekken])),
        ("gpt-2", splits(&[GPT2])),
        ("smollm", splits(&[r"\p{N}", GPT2])),
        (
            "default",
            splits(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        ),
        (
            "deepseek",
            splits(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK]),
        ),
        ("bytes", bytes(false, true)),
        ("bytes behind a space", bytes(true, true)),
        (
            "digits",
            json!({"type": "Sequence", "pretokenizers": [digits, bytes(false, true)]}),
        ),
    ]
}

#[test]
fn tokens_are_those_of_the_crate_under_every_rule() {
    let rules = rules();
    let share = chars(300_000) / rules.len();
    for (seed, (name, rule)) in rules.into_iter().enumerate() {
        let mut file = golden();
        file["pre_tokenizer"] = rule;
        if seed % 2 == 1 {
            file["normalizer"] = Value::Null;
        }
        compare(name, file.to_string().as_bytes(), share, seed as u64);
    }
}

#[test]
fn tokens_are_those_of_the_crate_under_every_setting() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 7] = [
        ("whole words", |file| {
            file["model"]["ignore_merges"] = json!(true)
        }),
        ("merges as text", |file| {
            for merge in file["model"]["merges"].as_array_mut().unwrap() {
                *merge = json!(format!(
                    "{} {}",
                    merge[0].as_str().unwrap(),
                    merge[1].as_str().unwrap()
                ));
            }
        }),
        ("no letter e", |file| {
            // It has no token, and is left out.
            let vocab = file["model"]["vocab"].as_object_mut().unwrap();
            let id = vocab.remove("e").unwrap();
            vocab.insert("no byte".to_owned(), id);
            let merges = file["model"]["merges"].as_array_mut().unwrap();
            merges.retain(|merge| merge[0] != "e" && merge[1] != "e");
        }),
        ("stripped", |file| {
            for (i, token) in file["added_tokens"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .enumerate()
            {
                token["lstrip"] = json!(i % 2 == 0);
                token["rstrip"] = json!(i % 3 == 0);
            }
        }),
        ("found in normal form", |file| {
            for (name, special) in [("\u{2126}hm", false), ("cafe\u{301}", false), ("e", false)] {
                let added = file["added_tokens"].as_array_mut().unwrap();
                added.push(json!({
                    "id": 700, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": true,
                    "special": special,
                }));
            }
        }),
        ("single words", |file| {
            file["added_tokens"][0]["single_word"] = json!(true)
        }),
        ("ends", |file| {
            file["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {
                    "<|im_start|>": {"id": "<|im_start|>", "ids": [616], "tokens": ["<|im_start|>"]},
                    "<|im_end|>": {"id": "<|im_end|>", "ids": [617], "tokens": ["<|im_end|>"]},
                },
            });
        }),
    ];
    let share = chars(300_000) / changes.len() / 2;
    for (seed, (name, change)) in changes.into_iter().enumerate() {
        let mut file = golden();
        change(&mut file);
        compare(name, file.to_string().as_bytes(), share, seed as u64 + 100);
    }
}

#[test]
fn tokens_of_named_tokenizers_are_those_of_the_crate() {
    let Ok(files) = std::env::var("NVFP4_TOKENIZERS") else {
        println!("SKIPPED no tokenizer.json of a published model: NVFP4_TOKENIZERS names none");
        return;
    };
    for file in files.split(':') {
        compare(file, &std::fs::read(file).unwrap(), chars(300_000), 7);
    }
}

/// A quadratic step anywhere would take minutes.
#[test]
fn a_word_of_a_million_characters_takes_no_longer_than_as_many_words() {
    for (name, rule) in rules() {
        let mut file = golden();
        file["pre_tokenizer"] = rule;
        file["normalizer"] = serde_json::to_value(NFC).unwrap();
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        for word in [
            "a", "A", " ", "\n", "1", "\u{301}", "中", "!", "日A", " \n", "\u{1}", "<|im_", "'",
        ] {
            let text = word.repeat(1_000_000 / word.len());
            let start = Instant::now();
            let tokens = tokenizer.encode(&text, false).unwrap();
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{name}, {word:?}: {:?}",
                start.elapsed()
            );
            if word != "\u{301}" {
                // One of the rules puts a space in front.
                let decoded = tokenizer.decode(&tokens, false).unwrap();
                assert!(decoded.ends_with(&text), "{name}, {word:?}");
            }
        }
    }
}
