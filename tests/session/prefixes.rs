//! Sessions that begin with the same tokens share the blocks of these: each gets what a session gets that runs all of its tokens, and what is
//! shared is counted, bounded and freed.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;

use NVFP4::base::ErrorKind;
use NVFP4::base::memory::{self, Tag};
use NVFP4::engine::{Served, Statistics};
use NVFP4::format::random::bits;
use NVFP4::model::{KvType, LoadOptions};
use NVFP4::session::{GenerateOptions, Session, step};

use super::{drawn, file, fresh, generate, seen, session, state, with};
use crate::common::{Copy, cases, expect_kind, options, some_tokens, windows};

/// All kinds of layers: full attention, windows, recurrent ones, and a drafter.
const CASES: [&str; 7] = [
    "qwen3_tied",
    "gemma3_wide",
    "gptoss_dense",
    "gemma4_perlayer",
    "qwen35_tied",
    "nemotronh_dense",
    "qwen35_drafter",
];

/// Positions of a block on the CPU.
const BLOCK: usize = 16;

/// A model that takes long prompts. Its directory lives as long as the copy.
fn long(case: &str, change: impl FnOnce(&mut LoadOptions)) -> (Copy, Arc<Served>) {
    let dir = windows::lengthened(case);
    let mut options = options();
    change(&mut options);
    let model = Served::load(&dir.0, &options).unwrap();
    (dir, model)
}

fn prefilled(model: &Arc<Served>, tokens: &[u32]) -> Session {
    let mut session = session(model);
    session.prefill(tokens).unwrap();
    session
}

/// Tokens of prompts that were found in the cache while `work` ran.
fn found<T>(model: &Served, work: impl FnOnce() -> T) -> (u64, T) {
    let before = model.statistics().prompt_tokens_found;
    let done = work();
    (model.statistics().prompt_tokens_found - before, done)
}

/// Demands that a session has the logits, and then generates the tokens, of one that runs all of its tokens.
fn check(session: &mut Session, options: &GenerateOptions, what: &str) {
    let tokens = session.tokens().to_vec();
    let mut alone = with(session.model(), |o| o.private = true);
    alone.prefill(&tokens).unwrap();
    assert!(state(session) == state(&mut alone), "{what}");
    let (got, want) = (generate(session, options), generate(&mut alone, options));
    assert_eq!(got.tokens, want.tokens, "{what}");
    assert!(state(session) == state(&mut alone), "{what}");
}

#[test]
fn the_second_session_runs_only_the_rest_of_its_prompt() {
    for case in CASES {
        let (_dir, model) = long(case, |_| ());
        let tokens = some_tokens(&model, 307);
        let first = prefilled(&model, &tokens[..300]);
        let before = model.statistics();
        let mut second = prefilled(&model, &tokens);
        let after = model.statistics();
        let of_prompt = after.prompt_tokens - before.prompt_tokens;
        let of_cache = after.prompt_tokens_found - before.prompt_tokens_found;
        // The last full block before the last token of the first prompt.
        assert_eq!((of_prompt, of_cache), (307, 288), "{case}");
        check(&mut second, &drawn(40), case);
        // The first one goes on beside the blocks that it shares.
        let mut first = first;
        first.prefill(&[7; 20]).unwrap();
        check(&mut first, &drawn(5), case);
        drop((first, second));
        let end = model.statistics();
        assert_eq!((end.blocks.blocks_used, end.blocks.blocks_cached), (0, 0));
    }
}

/// A session that has ended leaves its blocks to later ones, within the bytes that were set aside for that.
#[test]
fn prefixes_outlive_their_sessions_as_far_as_memory_was_set_aside() {
    for case in CASES {
        let (_dir, model) = long(case, |o| o.prefix_bytes = 64 << 20);
        let tokens = some_tokens(&model, 307);
        drop(prefilled(&model, &tokens[..300]));
        let blocks = model.statistics().blocks;
        assert_eq!((model.blocks_used(), blocks.blocks_used), (0, 0), "{case}");
        assert!(blocks.cached_bytes > 0 && blocks.cached_bytes <= 64 << 20);
        let (count, mut second) = found(&model, || prefilled(&model, &tokens));
        assert_eq!(count, 288, "{case}");
        check(&mut second, &drawn(20), case);

        // A limit of a few blocks is kept, and what is kept is right.
        let block = blocks.cached_bytes / blocks.blocks_cached;
        let (_dir, model) = long(case, |o| o.prefix_bytes = 5 * block);
        for round in 0..4 {
            let mut session = prefilled(&model, &tokens[round..round + 150]);
            check(&mut session, &drawn(8), case);
            drop(session);
            let blocks = model.statistics().blocks;
            assert!(blocks.cached_bytes <= 5 * block, "{case}: {blocks:?}");
        }
        assert!(model.statistics().blocks.blocks_evicted > 0, "{case}");
    }
}

#[test]
fn without_the_option_only_forks_share() {
    let (_dir, model) = long("qwen3_tied", |o| {
        o.prefix_cache = false;
        o.prefix_bytes = 1 << 20;
    });
    let tokens = some_tokens(&model, 100);
    let first = prefilled(&model, &tokens);
    let one = model.blocks_used();
    let (count, second) = found(&model, || prefilled(&model, &tokens));
    assert_eq!((count, model.blocks_used()), (0, 2 * one));
    drop((first, second));
    let blocks = model.statistics().blocks;
    assert_eq!((blocks.blocks_used, blocks.blocks_cached), (0, 0));

    // Neither does a private session, in a model that has a cache.
    let (_dir, model) = long("qwen3_tied", |_| ());
    let _shared = prefilled(&model, &tokens);
    let private = || {
        let mut session = with(&model, |o| o.private = true);
        session.prefill(&tokens[..99]).unwrap();
        session
    };
    assert_eq!(found(&model, private).0, 0);
}

/// Formats and rotations decide keys beside the tokens.
#[test]
fn other_formats_and_rotations_are_other_prefixes() {
    let (_dir, model) = long("qwen3_tied", |_| ());
    let tokens = some_tokens(&model, 100);
    let of = |kv, context| {
        let mut session = with(&model, |o| {
            o.kv = kv;
            o.context = context;
        });
        session.prefill(&tokens).unwrap();
        session
    };
    let _f16 = of(KvType::F16, 0);
    let (count, _f32) = found(&model, || of(KvType::F32, 0));
    assert_eq!(count, 0);
    assert_eq!(found(&model, || of(KvType::F32, 0)).0, 96);
    // Contexts of other lengths rotate alike here.
    assert_eq!(found(&model, || of(KvType::F16, 300)).0, 96);

    // A longer context is rotated by another table.
    let dir = Copy::of("phi3_longrope", "rotations");
    let config = fs::read_to_string(dir.0.join("config.json")).unwrap();
    let original = "\"original_max_position_embeddings\": ";
    let config = config.replace(&format!("{original}16"), &format!("{original}64"));
    dir.write("config.json", config.as_bytes());
    let model = Served::load(&dir.0, &options()).unwrap();
    let (short, most) = (64, model.spec().max_positions);
    assert_ne!(
        model.spec().long_ropes(short),
        model.spec().long_ropes(most)
    );
    let tokens = some_tokens(&model, 60);
    let of = |context| {
        let mut session = with(&model, |o| o.context = context);
        session.prefill(&tokens).unwrap();
        session
    };
    let _long = of(most);
    let (count, mut other) = found(&model, || of(short));
    assert_eq!(count, 0);
    let want = {
        let mut private = with(&model, |o| {
            o.context = short;
            o.private = true;
        });
        private.prefill(&tokens).unwrap();
        state(&mut private)
    };
    assert!(state(&mut other) == want);
    assert_eq!(found(&model, || of(short)).0, 48);
}

/// A session whose positions the drafter follows begins only with positions that it has followed.
#[test]
fn the_drafter_has_followed_what_drafting_sessions_begin_with() {
    let (_dir, model) = long("qwen35_drafter", |_| ());
    let tokens = some_tokens(&model, 407);
    let of = |drafts: bool| {
        let mut session = session(&model);
        session.set_drafts(drafts).unwrap();
        session.prefill(&tokens).unwrap();
        session
    };
    let _plain = of(false);
    assert_eq!(found(&model, || of(false)).0, 400);
    let (count, mut drafting) = found(&model, || of(true));
    assert_eq!(count, 0);
    // Its blocks serve those that do not draft as well.
    let (count, mut second) = found(&model, || of(true));
    assert_eq!(count, 400);
    let options = GenerateOptions {
        drafts: Some(3),
        ..drawn(40)
    };
    check(&mut second, &options, "drafts after a prefix");
    check(&mut drafting, &options, "drafts of the first");
    assert_eq!(found(&model, || of(false)).0, 400);
}

/// Cut into a shared block, a session goes on with other tokens in blocks of its own.
#[test]
fn shared_blocks_are_not_written() {
    for case in CASES {
        let (_dir, model) = long(case, |_| ());
        let tokens = some_tokens(&model, 310);
        let mut first = prefilled(&model, &tokens[..300]);
        let mut second = prefilled(&model, &tokens);
        for len in [295, 289, 100, 17, 3] {
            second.truncate(len).unwrap();
            second.prefill(&[5, 9, 5]).unwrap();
            check(&mut second, &drawn(3), &format!("{case}, cut to {len}"));
            let mut fork = second.fork().unwrap();
            step(&mut [&mut fork, &mut second], &[3, 4]).unwrap();
            check(&mut fork, &drawn(3), case);
            check(&mut second, &drawn(3), case);
        }
        check(&mut first, &drawn(5), case);
        let mut third = prefilled(&model, &tokens);
        check(&mut third, &drawn(5), case);
    }
}

/// With memory reserved, the cache takes what is free, and every session gets what it gets without a cache.
#[test]
fn cached_blocks_give_way_to_sessions() {
    for case in ["qwen3_tied", "gemma3_wide", "qwen35_tied"] {
        let (_dir, model) = long(case, |_| ());
        let tokens = some_tokens(&model, 600);
        let mut largest = prefilled(&model, &tokens[..300]);
        generate(&mut largest, &drawn(30));
        let bytes = largest.kv_bytes() * 3 / 2;
        let before = memory::usage(Tag::KvCache).current;
        let (_dir, model) = long(case, |o| o.kv_bytes = Some(bytes));
        for round in 0..6 {
            let mut session = prefilled(&model, &tokens[40 * round..40 * round + 300]);
            let want = fresh(&largest, session.tokens());
            assert!(state(&mut session) == want, "{case}");
            generate(&mut session, &drawn(30));
            let tokens = session.tokens().to_vec();
            assert!(state(&mut session) == fresh(&largest, &tokens), "{case}");
            drop(session);
            let now: Statistics = model.statistics();
            assert_eq!(now.reserved_bytes, bytes);
            assert_eq!(now.blocks.cached_bytes + now.free_bytes, bytes, "{case}");
            assert!(now.blocks.blocks_cached > 0, "{case}");
        }
        assert!(model.statistics().blocks.blocks_evicted > 0, "{case}");
        // The last prompt is still there.
        let (count, last) = found(&model, || prefilled(&model, &tokens[200..500]));
        assert!(count > 0, "{case}");
        drop((last, model));
        assert_eq!(memory::usage(Tag::KvCache).current, before, "{case}");
    }
    // Blocks that sessions hold are not given up.
    let (_dir, unlimited) = long("qwen3_tied", |_| ());
    let block = prefilled(&unlimited, &[1]).kv_bytes();
    let (_dir, model) = long("qwen3_tied", |o| o.kv_bytes = Some(6 * block));
    let tokens = some_tokens(&model, 200);
    let mut first = prefilled(&model, &tokens[..4 * BLOCK]);
    let mut other = session(&model);
    expect_kind(
        other.prefill(&tokens[1..60]),
        ErrorKind::OutOfMemory,
        "reserved for keys and values are in use",
    );
    assert_eq!((other.len(), other.kv_bytes()), (0, 0));
    check_tokens(&mut first, &unlimited);
    // A shared beginning takes no memory.
    let mut same = prefilled(&model, &tokens[..4 * BLOCK + 9]);
    check_tokens(&mut same, &unlimited);
}

/// Demands the logits that a session of another model has for the same tokens.
fn check_tokens(session: &mut Session, model: &Arc<Served>) {
    let tokens = session.tokens().to_vec();
    let want = fresh(&super::session(model), &tokens);
    assert!(state(session) == want);
}

#[test]
fn many_sessions_of_one_prompt_take_little_more_than_one() {
    for case in ["qwen3_tied", "gemma3_wide"] {
        let (_dir, model) = long(case, |_| ());
        let tokens = some_tokens(&model, 2000);
        let first = prefilled(&model, &tokens);
        let one = model.blocks_used();
        let more: Vec<Session> = (0..63).map(|_| prefilled(&model, &tokens)).collect();
        // Each has a block of its own for its last tokens, in every group of layers.
        let own = 64 * model.kv().groups().len();
        let all = model.blocks_used();
        assert!(
            20 * all <= 21 * one + 20 * own,
            "{case}: {all} blocks, {one} for one"
        );
        drop((first, more));
        assert_eq!(model.blocks_used(), 0);
    }
}

/// Threads that begin at once with the same prompt: each gets what it gets alone, and later passes find what earlier ones ran.
#[test]
fn threads_share_what_they_run_at_once() {
    for case in ["qwen3_tied", "gemma3_wide", "qwen35_tied", "qwen35_drafter"] {
        let (_dir, model) = long(case, |o| o.prefix_bytes = 1 << 20);
        let tokens = some_tokens(&model, 1500);
        let mut alone = with(&model, |o| o.private = true);
        alone.prefill(&tokens).unwrap();
        let want = (
            alone.logits().unwrap().to_vec(),
            generate(&mut alone, &drawn(12)).tokens,
        );
        drop(alone);
        for _ in 0..3 {
            let barrier = Barrier::new(6);
            thread::scope(|scope| {
                for _ in 0..6 {
                    scope.spawn(|| {
                        let mut session = session(&model);
                        barrier.wait();
                        session.prefill(&tokens).unwrap();
                        let logits = session.logits().unwrap().to_vec();
                        let got = (logits, generate(&mut session, &drawn(12)).tokens);
                        assert!(got == want, "{case}");
                    });
                }
            });
            assert_eq!(model.blocks_used(), 0, "{case}");
        }
        let now = model.statistics();
        println!(
            "{case}: {} of {} tokens found",
            now.prompt_tokens_found, now.prompt_tokens
        );
        // The rounds after the first find the whole prompt but its last block, whatever the first shares.
        assert!(now.prompt_tokens_found >= 2 * 6 * 1400, "{case}: {now:?}");
        assert_eq!((now.generating, now.waiting), (0, 0));
    }
}

/// A file may hold anything: no session begins with its positions. A restored session begins with those of others.
#[test]
fn positions_of_a_file_are_shared_with_nobody() {
    let (_dir, model) = long("qwen35_tied", |_| ());
    let tokens = some_tokens(&model, 400);
    let path = file("prefixes");
    prefilled(&model, &tokens[..300]).save(&path.0).unwrap();
    let mut restored = Session::restore(model.clone(), &path.0).unwrap();
    restored.prefill(&tokens[300..390]).unwrap();
    let (count, first) = found(&model, || prefilled(&model, &tokens));
    assert_eq!(count, 0);
    let (count, ()) = found(&model, || restored.prefill(&tokens[390..]).unwrap());
    assert_eq!(count, 0);
    restored.truncate(10).unwrap();
    let rest = [&tokens[restored.len()..], &[1]].concat();
    // The other prompt ends with a full block, after which its state is kept.
    assert_eq!(found(&model, || restored.prefill(&rest).unwrap()).0, 400);
    check(&mut restored, &drawn(9), "a restored session");
    drop(first);
}

/// Statistics of a known course of calls.
#[test]
fn statistics_count_what_ran() {
    let (_dir, model) = long("qwen3_tied", |_| ());
    assert_eq!(model.statistics(), Statistics::default());
    let tokens = some_tokens(&model, 50);
    let mut first = prefilled(&model, &tokens);
    first.decode(3).unwrap();
    first.decode(4).unwrap();
    let now = model.statistics();
    assert_eq!((now.passes, now.requests), (3, 3));
    assert_eq!(
        (now.prompt_tokens, now.prompt_tokens_found, now.step_tokens),
        (50, 0, 2)
    );
    assert_eq!(
        (now.blocks.blocks_used, now.blocks.used_bytes),
        (4, first.kv_bytes())
    );
    let second = prefilled(&model, &tokens);
    let now = model.statistics();
    assert_eq!(
        (now.prompt_tokens, now.prompt_tokens_found, now.step_tokens),
        (100, 48, 2)
    );
    assert_eq!(now.blocks.blocks_used, 5);
    drop((first, second));
    let end = model.statistics();
    assert_eq!(
        (
            end.blocks.blocks_used,
            end.blocks.blocks_cached,
            end.blocks.blocks_evicted
        ),
        (0, 0, 0)
    );
}

/// One random program of sessions whose tokens begin alike. After each step, a session has the logits of one that runs all its tokens.
fn run_program(model: &Arc<Served>, path: &Path, seed: u64) {
    let prompts = [some_tokens(model, 700), vec![9; 700]];
    let mut sessions: Vec<Session> = Vec::new();
    for number in 0..14 {
        let drawn_bits = bits(seed, number);
        let index = (drawn_bits >> 8) as usize % sessions.len().max(1);
        let amount = (drawn_bits >> 16) as usize % 90;
        match drawn_bits % 9 {
            0 | 1 => {
                let prompt = &prompts[(drawn_bits >> 40) as usize % 4 / 3];
                sessions.push(prefilled(model, &prompt[..30 + 4 * amount]));
            }
            _ if sessions.is_empty() => {}
            2 | 3 => {
                let len = sessions[index].len();
                let rest = &prompts[0][len.min(600)..len.min(600) + amount];
                sessions[index].prefill(rest).unwrap();
            }
            4 => {
                generate(&mut sessions[index], &drawn(amount / 4));
            }
            5 => {
                let fork = sessions[index].fork().unwrap();
                sessions.push(fork);
            }
            6 => {
                let len = sessions[index].len().saturating_sub(amount / 2).max(1);
                sessions[index].truncate(len).unwrap();
            }
            7 => {
                sessions[index].save(path).unwrap();
                sessions[index] = Session::restore(model.clone(), path).unwrap();
            }
            _ => drop(sessions.swap_remove(index)),
        }
        sessions.truncate(5);
        for session in &sessions {
            assert!(
                seen(session) == fresh(session, session.tokens()),
                "{seed}, {number}"
            );
        }
    }
}

#[test]
fn whatever_sessions_share_each_is_its_tokens() {
    for (i, case) in CASES.into_iter().enumerate() {
        let before = memory::usage(Tag::KvCache).current;
        for prefix_bytes in [0, 30_000, 64 << 20] {
            let (_dir, model) = long(case, |o| o.prefix_bytes = prefix_bytes);
            let path = file(&format!("programs-{case}"));
            for program in 0..u64::from(cases(2)) {
                run_program(&model, &path.0, 100 * i as u64 + program);
                assert_eq!(model.blocks_used(), 0, "{case}");
            }
        }
        assert_eq!(memory::usage(Tag::KvCache).current, before, "{case}");
    }
}
