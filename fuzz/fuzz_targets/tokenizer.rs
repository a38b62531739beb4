//! Any bytes as a tokenizer.json: what loads encodes and decodes, and what it gives as its own file loads again.
#![no_main]

use NVFP4::text::{Detokenizer, Tokenizer};

const TEXT: &str = "Hello, <|im_start|>w\u{f6}rld 12\n  \u{1f600}\u{4f60}<|im_end|>";

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_json(bytes) else {
        return;
    };
    let mut known = vec![0, 1, 5, u32::MAX];
    for tokens in [tokenizer.encode(TEXT, true), tokenizer.encode_plain(TEXT)] {
        known.extend(tokens.unwrap_or_default());
    }
    let _ = tokenizer.decode(&known, true);
    let tokenizer = std::sync::Arc::new(tokenizer);
    let mut pieces = Detokenizer::new(&tokenizer).with_special(true);
    for token in known {
        let _ = pieces.push(token);
    }
    pieces.finish();
    if let Ok(file) = tokenizer.to_json() {
        let _ = Tokenizer::from_json(file.as_bytes());
    }
});
