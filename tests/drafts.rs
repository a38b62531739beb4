//! Drafters: their logits against transformers, and generations with drafts against those without: the same tokens, logits and states.
//! Goldens and the script that made them (`drafter.py`) are in `tests/golden/model`.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::memory;
use NVFP4::base::threads::Pool;
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::{Container, ConvertOptions, ConvertProgress, convert};
use NVFP4::model::{self, Choice, KvType, Logits, Output, Scratch, Verification, Wanted};
use NVFP4::session::{
    ChatOptions, Finish, GenerateOptions, MOST_DRAFTS, Piece, SamplingOptions, Session,
};
use common::drafters::{
    Guess, drawn, greedy, logits, made, program_equals_fresh_sessions, same, served, session,
    texts_end_alike,
};
use common::{
    Copy, DEVICE_CASES, GEMMA4_CASES, MAMBA_CASES, RECURRENT_CASES, cases, expect_kind, golden,
    load, load_gguf, options, some_tokens, windows,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// The bar of the parity tests.
const TOLERANCE: f32 = 2e-4;

const CASES: [&str; 3] = ["qwen35_drafter", "qwen35moe_drafter", "qwen3next_drafter"];

/// How a generation drafts.
#[derive(Clone, Copy, Debug)]
enum Drafting {
    None,
    /// By the drafter: as many as are fastest, or so many a step.
    Adapts,
    Guesses(usize),
    /// By prompt lookup, so many a step at most.
    LooksUp(usize),
}

/// The ways to use a drafter.
const DRAFTS: [Drafting; 4] = [
    Drafting::Guesses(1),
    Drafting::Guesses(3),
    Drafting::Guesses(7),
    Drafting::Adapts,
];

const ALL: [Drafting; 5] = {
    let [a, b, c, d] = DRAFTS;
    [a, b, c, d, Drafting::LooksUp(7)]
};

fn run(model: &Served, sequence: &mut Sequence, tokens: &[u32]) {
    let work = NewTokens {
        tokens,
        sequence,
        wanted: Wanted::Nothing,
    };
    let done = model.run(vec![work], false, &mut Scratch::new(), &mut Vec::new());
    done.unwrap().pop().unwrap().unwrap();
}

/// The drafter's logits at the last positions whose next token is known, after runs of `step` tokens.
fn drafted(model: &Served, tokens: &[u32], step: usize, kept: usize) -> Vec<f32> {
    let mut sequence = model.sequence(tokens.len(), KvType::F32).unwrap();
    sequence.set_drafts(true).unwrap();
    let mut scratch = Scratch::new();
    let (before, after) = tokens.split_at(tokens.len() - kept);
    for part in before.chunks(step) {
        run(model, &mut sequence, part);
    }
    let logits = after.iter().map(|&next| {
        let logits = model.drafter_logits(&mut sequence, next, &mut scratch);
        run(model, &mut sequence, &[next]);
        logits.unwrap()
    });
    logits.collect::<Vec<_>>().concat()
}

#[test]
fn drafters_agree_with_transformers() {
    let stored = CASES.map(|case| (case, load(case)));
    let gguf = ["qwen35_drafter", "qwen35moe_drafter"].map(|case| (case, load_gguf(case)));
    for (case, model) in stored.into_iter().chain(gguf) {
        assert!(model.has_drafter());
        let bytes = fs::read(golden(case).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for length in [7, 33, 100] {
            let tokens = file.tensor(&format!("tokens_{length}")).unwrap();
            let (tokens, _) = tokens.data().as_chunks::<8>();
            let tokens: Vec<u32> = tokens
                .iter()
                .map(|b| i64::from_le_bytes(*b) as u32)
                .collect();
            let want = file.tensor(&format!("drafted_{length}")).unwrap();
            let (want, _) = want.data().as_chunks::<4>();
            let kept = want.len() / model.spec().vocab_size;
            let mut same = Vec::new();
            for step in [1, 5, 100] {
                let got = drafted(&model, &tokens, step, kept);
                let differences = got.iter().zip(want);
                let worst = differences
                    .map(|(a, b)| (a - f32::from_le_bytes(*b)).abs())
                    .fold(0.0, f32::max);
                println!("{case}, {length} tokens by {step}: {worst:e}");
                assert_eq!(got.len(), want.len());
                assert!(worst <= TOLERANCE, "{case}, {length} tokens: {worst}");
                same.push(got);
            }
            assert!(same.windows(2).all(|pair| pair[0] == pair[1]), "{case}");
        }
    }
}

fn with(options: &GenerateOptions, drafting: Drafting) -> GenerateOptions {
    let (drafts, prompt_lookup) = match drafting {
        Drafting::None => (Some(0), 0),
        Drafting::Adapts => (None, 0),
        Drafting::Guesses(most) => (Some(most), 0),
        Drafting::LooksUp(most) => (None, most),
    };
    GenerateOptions {
        drafts,
        prompt_lookup,
        ..options.clone()
    }
}

#[test]
fn drafts_change_no_token_and_no_logit() {
    for case in CASES {
        for guess in [Guess::Random, Guess::Right, Guess::Near, Guess::Wrong] {
            let model = served(&made(case, guess));
            for (drafts, options) in DRAFTS
                .into_iter()
                .zip([greedy(41), drawn(41)].iter().cycle())
            {
                let (mut without, mut drafting) = (session(&model, 128), session(&model, 128));
                for session in [&mut without, &mut drafting] {
                    session.prefill(&some_tokens(&model, 21)).unwrap();
                }
                let options = with(options, drafts);
                let got = same(&mut without, &mut drafting, &options, usize::MAX);
                let what = format!("{case}, {guess:?}, {drafts:?}: {:?}", got.drafts);
                println!("{what}");
                match (guess, drafts) {
                    (Guess::Right, Drafting::Guesses(most)) => {
                        assert_eq!(got.drafts.accepted, got.drafts.drafted, "{what}");
                        // The first token is chosen before any draft.
                        assert!(
                            got.drafts.accepted >= 40 * most / (most + 1) - most,
                            "{what}"
                        );
                    }
                    (Guess::Wrong, Drafting::Guesses(_)) => {
                        assert_eq!(got.drafts.accepted, 0, "{what}")
                    }
                    (Guess::Near, Drafting::Guesses(_)) => {
                        assert!(got.drafts.accepted < got.drafts.drafted, "{what}");
                    }
                    _ => {}
                }
                assert!(got.drafts.drafted > 0, "{what}");
                assert_eq!(logits(&mut without), logits(&mut drafting), "{what}");
                // Both go on alike.
                same(&mut without, &mut drafting, &options, usize::MAX);
                assert_eq!(logits(&mut without), logits(&mut drafting), "{what}");
            }
            drop(model);
        }
    }
}

/// Models of every family, with a drafter and without, after prompts that say things twice.
#[test]
fn looked_up_tokens_change_no_token_and_no_logit() {
    let mut counts = [0, 0];
    let cases = DEVICE_CASES
        .iter()
        .chain(&RECURRENT_CASES)
        .chain(&MAMBA_CASES);
    for case in cases.chain(&GEMMA4_CASES).chain(&CASES) {
        let model = load(case);
        let said = some_tokens(&model, 17);
        for (most, options) in [(1, drawn(30)), (4, greedy(40)), (16, greedy(40))] {
            let (mut without, mut drafting) = (session(&model, 128), session(&model, 128));
            for session in [&mut without, &mut drafting] {
                session.prefill(&said.repeat(2)).unwrap();
            }
            for _ in 0..2 {
                let options = with(&options, Drafting::LooksUp(most));
                let got = same(&mut without, &mut drafting, &options, usize::MAX);
                assert_eq!(
                    logits(&mut without),
                    logits(&mut drafting),
                    "{case}, {most}"
                );
                counts[0] += got.drafts.drafted;
                counts[1] += got.drafts.accepted;
            }
        }
    }
    // Drafts that are right and others; how many there are depends on how long steps take.
    println!("{} of {} tokens accepted", counts[1], counts[0]);
    assert!(counts[1] > 100 && counts[0] > counts[1] + 100, "{counts:?}");
}

#[test]
fn texts_end_among_drafts_as_they_do_without() {
    let right = served(&made("qwen35_drafter", Guess::Right));
    for model in [right, load("qwen35_drafter")] {
        for drafts in ALL {
            let ends = [1, 2, 3, 5, 6, 7, 12];
            texts_end_alike(&model, &ends, |options| with(&options, drafts));
        }
    }
}

/// Tokens that are drafted past the end leave nothing behind: the same blocks and states, and the same memory once all is dropped.
#[test]
fn drafts_leave_the_states_and_blocks_of_a_sequence_without_them() {
    let model = served(&made("qwen35_drafter", Guess::Near));
    let [mut without, mut drafting] = [(); 2].map(|()| session(&model, 256));
    for session in [&mut without, &mut drafting] {
        session.prefill(&some_tokens(&model, 40)).unwrap();
    }
    for _ in 0..4 {
        let options = with(&drawn(33), Drafting::Guesses(3));
        same(&mut without, &mut drafting, &options, usize::MAX);
        // The state before the last token is left, and a block for the next.
        let states = model.spec().blocks.iter().filter_map(|b| b.recurrent());
        let state: usize = states.map(|shape| 4 * shape.state_floats()).sum();
        assert!(drafting.kv_bytes() <= without.kv_bytes() + state);
        let fork = drafting.fork().unwrap();
        // A fork holds what is kept alone: no blocks for coming states.
        assert_eq!(fork.kv_bytes(), without.fork().unwrap().kv_bytes());
    }
    drop((without, drafting));
    assert_eq!(model.blocks_used(), 0);
}

/// Random programs of a session with drafts.
#[test]
fn programs_with_drafts_equal_fresh_sessions() {
    for case in CASES {
        let model = served(&made(case, Guess::Near));
        for program in 0..u64::from(cases(6)) {
            println!("{case}, {program}");
            program_equals_fresh_sessions(&model, program, |options, draw| {
                with(&options, ALL[draw(5)])
            });
        }
        assert_eq!(model.blocks_used(), 0);
    }
}

/// The states of verified positions are staged beside those that are kept, and none stays.
#[test]
fn long_sequences_keep_the_states_that_they_keep_without_drafts() {
    let model = served(&windows::lengthened("qwen35_drafter"));
    let [mut without, mut drafting] = [(); 2].map(|()| session(&model, 4096));
    let files = ["without", "with"].map(|name| {
        std::env::temp_dir().join(format!("nvfp4-states-{}-{name}", std::process::id()))
    });
    for session in [&mut without, &mut drafting] {
        session.prefill(&some_tokens(&model, 1000)).unwrap();
    }
    for _ in 0..2 {
        let options = with(&drawn(1100), Drafting::Guesses(3));
        same(&mut without, &mut drafting, &options, usize::MAX);
        let sizes = [(&without, &files[0]), (&drafting, &files[1])].map(|(session, file)| {
            session.save(file).unwrap();
            header(file)["states"].to_string()
        });
        assert!(sizes[0].contains("1024"), "{sizes:?}");
        assert_eq!(sizes[0], sizes[1]);
        without.prefill(&[5, 6, 7]).unwrap();
        drafting.prefill(&[5, 6, 7]).unwrap();
        without.truncate(1500).unwrap();
        drafting.truncate(1500).unwrap();
        assert_eq!(logits(&mut without), logits(&mut drafting));
    }
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
}

/// The header of a session file.
fn header(file: &Path) -> Value {
    let bytes = fs::read(file).unwrap();
    let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    serde_json::from_slice(&bytes[16..16 + length]).unwrap()
}

#[test]
fn refusals_name_what_is_wrong() {
    let with_drafter = load("qwen35_drafter");
    let without = load("qwen35_tied");
    assert!(!without.has_drafter());
    let generate = |model: &Arc<Served>, drafts| {
        let mut session = session(model, 64);
        session.prefill(&some_tokens(model, 5)).unwrap();
        session.generate(
            &with(&greedy(3), drafts),
            &mut |_| ControlFlow::Continue(()),
        )
    };
    expect_kind(
        generate(&without, Drafting::Guesses(2)),
        ErrorKind::Unsupported,
        "drafts of a qwen3_5 model without a drafter (tensors mtp.*); leave the number of drafted tokens out",
    );
    assert!(
        generate(&without, Drafting::Adapts).is_ok() && generate(&without, Drafting::None).is_ok()
    );
    expect_kind(
        generate(&with_drafter, Drafting::Guesses(MOST_DRAFTS + 1)),
        ErrorKind::InvalidArgument,
        "17 drafted tokens in a step; expected at most 16",
    );
    expect_kind(
        generate(&without, Drafting::LooksUp(MOST_DRAFTS + 1)),
        ErrorKind::InvalidArgument,
        "prompt lookup drafts 17 tokens in a step; expected at most 16",
    );
    let both = GenerateOptions {
        prompt_lookup: 4,
        ..with(&greedy(3), Drafting::Guesses(2))
    };
    expect_kind(
        session(&with_drafter, 64).generate(&both, &mut |_| ControlFlow::Continue(())),
        ErrorKind::InvalidArgument,
        "2 tokens of the drafter and 4 of prompt lookup in a step; choose one of them",
    );
    for (key, value, words) in [
        (
            "mtp_use_dedicated_embeddings",
            json!(true),
            "mtp_use_dedicated_embeddings is true",
        ),
        (
            "mtp_num_hidden_layers",
            json!(2),
            "mtp_num_hidden_layers is 2",
        ),
    ] {
        let dir = Copy::of("qwen35_drafter", "refused");
        let config = fs::read(dir.0.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        config[key] = value;
        dir.write("config.json", config.to_string().as_bytes());
        expect_kind(
            Served::load(&dir.0, &options()),
            ErrorKind::Unsupported,
            words,
        );
    }
    let dir = Copy::of("qwen35_drafter", "missing");
    rewrite(&dir, |name| {
        name != "mtp.norm.weight" && !name.contains("q_proj")
    });
    expect_kind(
        Served::load(&dir.0, &options()),
        ErrorKind::NotFound,
        "mtp.layers.0.self_attn.q_proj.weight, mtp.norm.weight",
    );
    // Without any of its tensors there is no drafter, whatever the config says.
    let dir = Copy::of("qwen35_drafter", "none");
    rewrite(&dir, |name| !name.starts_with("mtp."));
    assert!(!served(&dir).has_drafter());
    // It changes no result, so that the model is the same.
    assert_eq!(served(&dir).fingerprint(), with_drafter.fingerprint());
}

/// Keeps some tensors of a copy.
fn rewrite(dir: &Copy, keeps: impl Fn(&str) -> bool) {
    let bytes = fs::read(dir.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept = file.tensors().into_iter().filter(|(name, _)| keeps(name));
    let written = safetensors::serialize(kept, None).unwrap();
    dir.write("model.safetensors", &written);
}

/// Without memory for the states of drafted positions, a generation goes on without drafts. The budget belongs to the process.
#[test]
fn a_lack_of_memory_ends_drafts_and_not_the_text() {
    let model = served(&made("qwen35_drafter", Guess::Right));
    let [mut without, mut drafting] = [(); 2].map(|()| session(&model, 64));
    for session in [&mut without, &mut drafting] {
        session.prefill(&some_tokens(&model, 9)).unwrap();
        session.logits().unwrap();
    }
    let want = without.generate(&with(&greedy(9), Drafting::None), &mut |_| {
        ControlFlow::Continue(())
    });
    // Room for blocks of keys and values, and for some states of the eight.
    let shapes = model.spec().blocks.iter().filter_map(|b| b.recurrent());
    let state: usize = shapes.map(|shape| 4 * shape.state_floats()).sum();
    memory::set_budget(Some(
        memory::total().current + 3 * state as u64 + (24 << 10),
    ));
    let got = drafting.generate(&with(&greedy(9), Drafting::Guesses(7)), &mut |_| {
        ControlFlow::Continue(())
    });
    memory::set_budget(None);
    let (want, got) = (want.unwrap(), got.unwrap());
    assert_eq!((got.tokens, got.drafts.drafted), (want.tokens, 0));
}

/// Segments that are verified beside others in a batch: right drafts stay up to the first wrong one, or to a token that ends the text.
#[test]
fn segments_of_a_batch_are_verified_apart() {
    for case in CASES {
        let model = load(case);
        let greedy = SamplingOptions::default();
        let prompt = some_tokens(&model, 30);
        let mut text = prompt.clone();
        let mut whole = session(&model, 128);
        whole.prefill(&prompt).unwrap();
        for _ in 0..6 {
            let next = whole.argmax().unwrap();
            text.push(next);
            whole.decode(next).unwrap();
        }
        let chosen = &text[30..];
        let wrong = |token: u32| (token + 1) % model.spec().vocab_size as u32;
        let drafts = [
            vec![chosen[1], chosen[2], chosen[3]],
            vec![chosen[1], wrong(chosen[2]), chosen[3], chosen[4]],
            vec![wrong(chosen[1])],
            vec![chosen[1], chosen[2], chosen[3]],
        ];
        // All but the last hold the prompt; a token of the last ends its text.
        let expected = [&chosen[1..5], &chosen[1..3], &chosen[1..2], &chosen[1..3]];
        let mut sequences: Vec<Sequence> = drafts
            .iter()
            .map(|_| {
                let mut sequence = model.sequence(64, KvType::F32).unwrap();
                sequence.set_drafts(true).unwrap();
                run(&model, &mut sequence, &prompt);
                sequence
            })
            .collect();
        let tokens: Vec<Vec<u32>> = drafts
            .iter()
            .map(|drafts| [&[chosen[0]], &drafts[..]].concat())
            .collect();
        let histories: Vec<Vec<u32>> = tokens.iter().map(|t| [&prompt[..], t].concat()).collect();
        let mut plain = model.sequence(64, KvType::F32).unwrap();
        run(&model, &mut plain, &prompt);
        let work = tokens
            .iter()
            .zip(&histories)
            .zip(&mut sequences)
            .enumerate();
        let mut work: Vec<NewTokens<'_>> = work
            .map(|(i, ((tokens, history), sequence))| NewTokens {
                tokens,
                sequence,
                wanted: Wanted::Verified(Verification {
                    choice: Choice {
                        options: &greedy,
                        draw: 0,
                        history,
                        allowed: None,
                    },
                    stops: if i == 3 { &chosen[2..3] } else { &[] },
                }),
            })
            .collect();
        work.push(NewTokens {
            tokens: &chosen[..1],
            sequence: &mut plain,
            wanted: Wanted::Nothing,
        });
        let outputs = model.run(work, false, &mut Scratch::new(), &mut Vec::new());
        let outputs: Vec<Output> = outputs.unwrap().into_iter().map(|o| o.unwrap()).collect();
        for ((output, want), sequence) in outputs.iter().zip(expected).zip(&mut sequences) {
            assert_eq!(output, &Output::Verified(want.to_vec()), "{case}");
            assert_eq!(sequence.len(), 30 + want.len());
            // It goes on as the text does.
            let rest = &chosen[want.len()..want.len() + 1];
            let mut got = Vec::new();
            let scratch = &mut Scratch::new();
            model
                .forward(rest, sequence, scratch, Logits::Last, &mut got)
                .unwrap();
            let mut fresh = model.sequence(64, KvType::F32).unwrap();
            let mut expected = Vec::new();
            let all = &text[..31 + want.len()];
            model
                .forward(all, &mut fresh, scratch, Logits::Last, &mut expected)
                .unwrap();
            assert_eq!(got, expected, "{case}");
        }
        assert_eq!(outputs[4], Output::Cached);
    }
}

#[test]
fn stop_strings_end_a_text_among_drafts() {
    let dir = made("qwen35_drafter", Guess::Right);
    let tokenizer = fs::read(golden("qwen3_tied").join("tokenizer.json")).unwrap();
    dir.write("tokenizer.json", &tokenizer);
    let model = served(&dir);
    let pair = || {
        [(); 2].map(|()| {
            let mut session = session(&model, 128);
            session.prefill(&some_tokens(&model, 9)).unwrap();
            session
        })
    };
    let [mut all, _] = pair();
    let text = all.generate(&drawn(40), &mut |_| ControlFlow::Continue(()));
    let text: Vec<char> = text.unwrap().text.chars().collect();
    for at in [3, 8, 11, 20] {
        let options = GenerateOptions {
            stop_strings: vec![text[at..at + 2].iter().collect()],
            ..drawn(40)
        };
        for drafts in DRAFTS {
            let [mut without, mut drafting] = pair();
            let options = with(&options, drafts);
            let got = same(&mut without, &mut drafting, &options, usize::MAX);
            assert_eq!(got.finish, Finish::StopString);
            assert_eq!(logits(&mut without), logits(&mut drafting), "{at}");
        }
    }
}

/// A chat whose reasoning is ended early, which puts given tokens in the place of verified ones, and the turn after it.
#[test]
fn reasoning_ends_early_among_drafts() {
    let dir = made("qwen35_drafter", Guess::Right);
    let tokenizer = fs::read(golden("qwen3_tied").join("tokenizer.json")).unwrap();
    dir.write("tokenizer.json", &tokenizer);
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
    dir.write("chat_template.jinja", template.as_bytes());
    let model = served(&dir);
    for (drafts, budget) in DRAFTS.into_iter().zip([5, 6, 7, 8]) {
        let chat = ChatOptions {
            reasoning_budget: Some(budget),
            ..ChatOptions::default()
        };
        let [mut without, mut drafting] = [(); 2].map(|()| session(&model, 256));
        for question in ["How?", "Why?"] {
            let turn = |session: &mut Session, drafts| {
                let mut options = with(&drawn(100), drafts);
                // The model would say one token again and again.
                options.sampling.repetition_penalty = 10.0;
                let go = &mut |_: Piece<'_>| ControlFlow::Continue(());
                session.chat(question, Some(&chat), &options, go).unwrap()
            };
            let want = turn(&mut without, Drafting::None);
            let got = turn(&mut drafting, drafts);
            assert!(
                !want.reasoning.is_empty() && !want.text.is_empty(),
                "{want:?}"
            );
            assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish));
            assert_eq!((&got.reasoning, &got.text), (&want.reasoning, &want.text));
            assert_eq!(without.tokens(), drafting.tokens());
            assert_eq!(logits(&mut without), logits(&mut drafting));
        }
    }
}

/// A session file has the drafter's keys and values if there are any, and a model without a drafter does without them.
#[test]
fn session_files_hold_what_the_drafter_knows() {
    let model = load("qwen35_drafter");
    let none = Copy::of("qwen35_drafter", "none");
    rewrite(&none, |name| !name.starts_with("mtp."));
    let none = served(&none);
    let file = std::env::temp_dir().join(format!("nvfp4-drafter-file-{}", std::process::id()));
    let page = {
        let attention = model.spec().drafter.as_ref().unwrap().block.attention();
        4 * 16 * attention.unwrap().kv_width() as u64
    };
    for (drafts, pages) in [(true, 3), (false, 0)] {
        let mut session = session(&model, 128);
        session.set_drafts(drafts).unwrap();
        session.prefill(&some_tokens(&model, 40)).unwrap();
        session.save(&file).unwrap();
        let written = header(&file)["drafter"].as_u64().unwrap_or(0);
        assert_eq!(written, pages * page);
        let restored = [&model, &none].map(|m| Session::restore(m.clone(), &file).unwrap());
        for mut restored in restored {
            assert_eq!(logits(&mut restored), logits(&mut session));
            let [mut a, mut b] = [session.fork().unwrap(), restored];
            let drafts = match b.model().has_drafter() {
                true => Drafting::Guesses(3),
                false => Drafting::None,
            };
            same(&mut a, &mut b, &with(&drawn(20), drafts), usize::MAX);
        }
    }
    // A restored drafter guesses what it would have guessed.
    let mut before = session(&model, 128);
    before.prefill(&some_tokens(&model, 40)).unwrap();
    before.decode(3).unwrap();
    before.save(&file).unwrap();
    let after = Session::restore(model.clone(), &file).unwrap();
    assert_eq!(after.kv_bytes(), before.kv_bytes());
    after.save(&file).unwrap();
    let again = Session::restore(model.clone(), &file).unwrap();
    assert_eq!(again.tokens(), before.tokens());
    // A page less than the positions take.
    let mut bytes = fs::read(&file).unwrap();
    let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let json = String::from_utf8(bytes[16..16 + length].to_vec()).unwrap();
    let sizes = [3, 2].map(|pages| (pages * page).to_string());
    // Padded to the same length: nothing else moves.
    let padded = format!("\"drafter\":{:>1$}", sizes[1], sizes[0].len());
    let shorter = json.replace(&format!("\"drafter\":{}", sizes[0]), &padded);
    assert_ne!(json, shorter);
    bytes.splice(16..16 + length, shorter.into_bytes());
    let end = bytes.len() - page as usize;
    fs::write(&file, &bytes[..end]).unwrap();
    expect_kind(
        Session::restore(model.clone(), &file),
        ErrorKind::CorruptFile,
        "bytes of the drafter's keys and values; 41 positions take",
    );
    fs::remove_file(&file).unwrap();
}

/// Conversion quantizes the drafter's block like the others, and keeps the projection of its inputs.
#[test]
fn conversion_quantizes_the_drafter() {
    let out = Copy::of("qwen35_nested", "converted");
    let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
    options.replace = true;
    let source = model::open(&golden("qwen35_nested")).unwrap();
    let (pool, go) = (Pool::new(2).unwrap(), &mut |_: ConvertProgress<'_>| {
        ControlFlow::Continue(())
    });
    convert(&*source, &out.0, &options, &pool, go).unwrap();
    let made = model::open(&out.0).unwrap();
    for (name, encoding) in [
        ("mtp.layers.0.self_attn.q_proj.weight", "NVFP4"),
        ("mtp.layers.0.mlp.down_proj.weight", "NVFP4"),
        ("mtp.fc.weight", "BF16"),
        ("mtp.norm.weight", "BF16"),
    ] {
        assert_eq!(source.find(name).unwrap().encoding.name(), "BF16");
        assert_eq!(made.find(name).unwrap().encoding.name(), encoding, "{name}");
    }
    let (stored, converted) = (load("qwen35_nested"), served(&out));
    assert!(converted.has_drafter());
    let coded = |model: &Served| model.info().formats["nvfp4"].tensors;
    // Query and gate are apart in memory.
    assert_eq!(coded(&converted), coded(&stored) + 8);
}
