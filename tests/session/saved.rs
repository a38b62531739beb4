//! Prefixes that outlive the process: a model that is loaded anew finds what a file has of another one's prompts, computes the same from there,
//! and takes nothing from a file that is damaged or of another model.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use NVFP4::base::ErrorKind;
use NVFP4::base::call::{Cancel, Watch};
use NVFP4::base::memory::{self, Tag};
use NVFP4::engine::{PrefixCounts, RestoredPrefixes, Served};
use NVFP4::model::{Activations, KvType, LoadOptions};
use NVFP4::session::{GenerateOptions, Session};
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use super::{Place, drawn, file, generate, rewritten, state, with, with_another_row};
use crate::common::{expect_kind, golden, options, some_tokens, windows};

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

/// Room for all prefixes of a test.
const ENOUGH: usize = 64 << 20;

/// Loads a model as a new process does.
fn loaded(dir: &Path, change: impl FnOnce(&mut LoadOptions)) -> Arc<Served> {
    let mut options = options();
    options.prefix_bytes = ENOUGH;
    change(&mut options);
    Served::load(dir, &options).unwrap()
}

fn session(model: &Arc<Served>, kv: KvType) -> Session {
    with(model, |o| o.kv = kv)
}

/// Runs a prompt in a session that ends.
fn run(model: &Arc<Served>, kv: KvType, tokens: &[u32]) {
    session(model, kv).prefill(tokens).unwrap();
}

/// The tokens of a prompt that are found, and what the session then computes and generates.
fn continued(
    model: &Arc<Served>,
    kv: KvType,
    tokens: &[u32],
) -> (u64, (Vec<u32>, Vec<f32>), Vec<u32>) {
    let before = model.statistics().prompt_tokens_found;
    let mut session = session(model, kv);
    session.prefill(tokens).unwrap();
    let found = model.statistics().prompt_tokens_found - before;
    let state = state(&mut session);
    (found, state, generate(&mut session, &drawn(12)).tokens)
}

fn cached(model: &Served) -> PrefixCounts {
    let blocks = model.statistics().blocks;
    PrefixCounts {
        blocks: blocks.blocks_cached,
        bytes: blocks.cached_bytes as u64,
    }
}

#[test]
fn a_later_process_finds_what_an_earlier_one_ran() {
    for case in CASES {
        let dir = windows::lengthened(case);
        let before = memory::usage(Tag::KvCache).current;
        let formats = match case {
            "qwen3_tied" | "gemma3_wide" | "qwen35_tied" => &KvType::ALL[..],
            _ => &[KvType::F16],
        };
        for &kv in formats {
            let path = file(&format!("prefixes-{case}-{}", kv.name()));
            let first = loaded(&dir.0, |_| ());
            let tokens = some_tokens(&first, 700);
            let prompts = [
                &tokens[..307],
                &[&tokens[..150], &[9; 160]].concat(),
                &tokens[300..600],
            ];
            for prompt in prompts {
                let mut session = session(&first, kv);
                session.prefill(prompt).unwrap();
                generate(&mut session, &drawn(20));
            }
            let all = cached(&first);
            assert_eq!(first.save_prefixes(&path.0).unwrap(), all, "{case}");
            assert_eq!(cached(&first), all, "{case}");

            let later = loaded(&dir.0, |_| ());
            let restored = later.restore_prefixes(&path.0).unwrap();
            let want = RestoredPrefixes {
                in_file: all,
                filled: all,
            };
            assert_eq!(restored, want, "{case}");
            assert_eq!(cached(&later), all, "{case}");
            assert_eq!(later.statistics().passes, 0);
            for prompt in prompts {
                // One token more, so that all of the prompt can be found.
                let prompt = [prompt, &[5]].concat();
                let (found, state, generated) = continued(&later, kv, &prompt);
                assert_eq!(found, continued(&first, kv, &prompt).0, "{case}");
                assert!(found >= 100, "{case}: {found} tokens found");
                let mut alone = with(&later, |o| {
                    o.kv = kv;
                    o.private = true;
                });
                alone.prefill(&prompt).unwrap();
                assert!(state == super::state(&mut alone), "{case}");
                let want = generate(&mut alone, &drawn(12)).tokens;
                assert_eq!(generated, want, "{case}");
            }
        }
        assert_eq!(memory::usage(Tag::KvCache).current, before, "{case}");
    }
}

/// Sessions of several formats, some of which hold their blocks while the file is written.
#[test]
fn a_file_has_all_formats_and_what_sessions_hold() {
    let dir = windows::lengthened("qwen3_tied");
    let path = file("prefixes-formats");
    let first = loaded(&dir.0, |o| o.prefix_bytes = 0);
    let tokens = some_tokens(&first, 100);
    let held = KvType::ALL.map(|kv| {
        let mut session = session(&first, kv);
        session.prefill(&tokens).unwrap();
        session
    });
    let saved = first.save_prefixes(&path.0).unwrap();
    // The last four tokens are in a block that is not full.
    assert_eq!(saved.blocks, 3 * 6);
    assert_eq!(cached(&first), PrefixCounts::default());
    drop(held);
    let later = loaded(&dir.0, |_| ());
    assert_eq!(later.restore_prefixes(&path.0).unwrap().filled, saved);
    for kv in KvType::ALL {
        assert_eq!(continued(&later, kv, &tokens).0, 96, "{kv:?}");
    }
    // A model that keeps nothing writes a file of nothing.
    assert_eq!(
        first.save_prefixes(&path.0).unwrap(),
        PrefixCounts::default()
    );
    let restored = later.restore_prefixes(&path.0).unwrap();
    assert_eq!(restored, RestoredPrefixes::default());
}

/// Sessions that draft begin with positions of the file that the drafter has followed, and draft as in the process before.
#[test]
fn the_drafter_goes_on_with_the_positions_of_a_file() {
    let dir = windows::lengthened("qwen35_drafter");
    let path = file("prefixes-drafter");
    let options = GenerateOptions {
        drafts: Some(3),
        ..drawn(40)
    };
    let drafting = |model: &Arc<Served>, tokens: &[u32]| {
        let before = model.statistics().prompt_tokens_found;
        let mut session = session(model, KvType::F16);
        session.set_drafts(true).unwrap();
        session.prefill(tokens).unwrap();
        let found = model.statistics().prompt_tokens_found - before;
        let made = generate(&mut session, &options);
        (found, made.tokens, made.drafts)
    };
    let first = loaded(&dir.0, |_| ());
    let tokens = some_tokens(&first, 407);
    drafting(&first, &tokens);
    first.save_prefixes(&path.0).unwrap();
    let later = loaded(&dir.0, |_| ());
    later.restore_prefixes(&path.0).unwrap();
    let (want, got) = (drafting(&first, &tokens), drafting(&later, &tokens));
    assert_eq!((got.0, &got), (400, &want));
    // Sessions that draft do not begin with positions that the drafter has not followed.
    let plain = loaded(&dir.0, |_| ());
    let mut without = session(&plain, KvType::F16);
    without.set_drafts(false).unwrap();
    without.prefill(&tokens).unwrap();
    plain.save_prefixes(&path.0).unwrap();
    let later = loaded(&dir.0, |_| ());
    later.restore_prefixes(&path.0).unwrap();
    let before = later.statistics().prompt_tokens_found;
    let mut without = session(&later, KvType::F16);
    without.set_drafts(false).unwrap();
    without.prefill(&tokens).unwrap();
    assert_eq!(later.statistics().prompt_tokens_found - before, 400);
    assert_eq!(drafting(&later, &tokens).0, 0);
}

/// With less room than the file needs, what was used last is kept, and nothing gives way.
#[test]
fn less_room_keeps_what_was_used_last() {
    for case in CASES {
        let dir = windows::lengthened(case);
        let path = file(&format!("prefixes-room-{case}"));
        let first = loaded(&dir.0, |_| ());
        let tokens = some_tokens(&first, 1000);
        let prompts = [&tokens[..300], &tokens[310..610], &tokens[620..920]];
        for prompt in prompts {
            run(&first, KvType::F16, prompt);
        }
        // The first is used again.
        run(&first, KvType::F16, &tokens[..301]);
        let all = first.save_prefixes(&path.0).unwrap();
        let found = |model: &Arc<Served>, prompt: &[u32]| {
            let prompt = [prompt, &[5]].concat();
            continued(model, KvType::F16, &prompt).0
        };
        for tenths in [0, 1, 4, 7, 10] {
            let room = all.bytes as usize * tenths / 10;
            let reserved = |o: &mut LoadOptions| o.kv_bytes = Some(room.max(1));
            let limited = |o: &mut LoadOptions| o.prefix_bytes = room.max(1);
            for later in [loaded(&dir.0, reserved), loaded(&dir.0, limited)] {
                let restored = later.restore_prefixes(&path.0).unwrap();
                assert_eq!(restored.in_file, all);
                assert_eq!(cached(&later), restored.filled, "{case}");
                assert!(restored.filled.bytes <= room as u64, "{case}");
                let is_full = restored.filled.bytes + all.bytes / 10 >= room as u64;
                assert!(is_full, "{case}: {restored:?} in {room} bytes");
                assert_eq!(later.statistics().blocks.blocks_evicted, 0);
            }
            // Prompts run in a model with room, so that what one takes is not that of the next.
            let later = loaded(&dir.0, limited);
            later.restore_prefixes(&path.0).unwrap();
            let again = file(&format!("prefixes-room-again-{case}"));
            later.save_prefixes(&again.0).unwrap();
            let later = loaded(&dir.0, |_| ());
            later.restore_prefixes(&again.0).unwrap();
            let by_use = [prompts[0], prompts[2], prompts[1]].map(|prompt| found(&later, prompt));
            assert!(by_use.is_sorted_by(|a, b| a >= b), "{case}: {by_use:?}");
            match tenths {
                0 => assert_eq!(by_use, [0; 3], "{case}"),
                10 => assert!(by_use[2] >= 288, "{case}: {by_use:?}"),
                4 | 7 => assert!(by_use[0] >= 288, "{case}: {by_use:?}"),
                _ => {}
            }
        }
        // A full cache stays as it is.
        let own = loaded(&dir.0, |_| ());
        run(&own, KvType::F16, &tokens[90..390]);
        let bytes = cached(&own).bytes as usize;
        let full = loaded(&dir.0, |o| o.prefix_bytes = bytes);
        run(&full, KvType::F16, &tokens[90..390]);
        let restored = full.restore_prefixes(&path.0).unwrap();
        assert_eq!(restored.filled, PrefixCounts::default(), "{case}");
        assert_eq!(full.statistics().blocks.blocks_evicted, 0);
        assert_eq!(
            found(&full, &tokens[90..390]),
            found(&own, &tokens[90..390])
        );
    }
}

/// Blocks that are there stay, in use or not, and only what is missing is filled.
#[test]
fn a_second_restore_fills_what_is_missing() {
    for case in CASES {
        let dir = windows::lengthened(case);
        let path = file(&format!("prefixes-twice-{case}"));
        let first = loaded(&dir.0, |_| ());
        let tokens = some_tokens(&first, 400);
        run(&first, KvType::F16, &tokens[..300]);
        let all = first.save_prefixes(&path.0).unwrap();
        let restored = first.restore_prefixes(&path.0).unwrap();
        assert_eq!(restored.filled, PrefixCounts::default(), "{case}");
        assert_eq!((restored.in_file, cached(&first)), (all, all), "{case}");

        // The other model has run a part of the prompt, and holds it.
        let later = loaded(&dir.0, |_| ());
        let mut held = session(&later, KvType::F16);
        held.prefill(&tokens[..100]).unwrap();
        for round in 0..3 {
            let filled = later.restore_prefixes(&path.0).unwrap().filled;
            assert_eq!(filled.blocks > 0, round == 0, "{case}");
        }
        let prompt = &tokens[..301];
        let (found, state, made) = continued(&later, KvType::F16, prompt);
        assert_eq!(found, continued(&first, KvType::F16, prompt).0, "{case}");
        let alone = continued(&loaded(&dir.0, |_| ()), KvType::F16, prompt);
        assert!((state, made) == (alone.1, alone.2), "{case}");
        held.prefill(&tokens[100..120]).unwrap();
        let again = super::fresh(&held, &tokens[..120]);
        assert!(super::state(&mut held) == again, "{case}");
        drop(held);
        assert_eq!(later.blocks_used(), 0, "{case}");
    }
}

/// A file of two records, and its model.
fn small(name: &str) -> (Place, Arc<Served>) {
    let path = file(name);
    let model = loaded(&golden("qwen3_tied"), |_| ());
    run(&model, KvType::F16, &some_tokens(&model, 40));
    assert_eq!(model.save_prefixes(&path.0).unwrap().blocks, 2);
    (path, loaded(&golden("qwen3_tied"), |_| ()))
}

/// A file with the checksum of its content.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let content = bytes.len() - 8;
    let sum = XxHash3_64::oneshot(&bytes[..content]);
    bytes[content..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Every length, and a flipped bit in every byte: one line says what was wrong, and the model keeps what it had.
#[test]
fn damaged_files_change_nothing() {
    let (path, model) = small("prefixes-damaged");
    let bytes = fs::read(&path.0).unwrap();
    let kept = some_tokens(&model, 20);
    run(&model, KvType::F32, &kept);
    let before = model.statistics();
    let refused = |bytes: &[u8], what: &str| {
        fs::write(&path.0, bytes).unwrap();
        let e = match model.restore_prefixes(&path.0) {
            Ok(restored) => panic!("{what}: {restored:?}"),
            Err(e) => e,
        };
        let kinds = [
            ErrorKind::CorruptFile,
            ErrorKind::Unsupported,
            ErrorKind::InvalidArgument,
        ];
        assert!(kinds.contains(&e.kind()), "{what}: {e}");
        let message = e.message();
        assert!(message.contains(path.0.to_str().unwrap()) && message.lines().count() == 1);
        assert_eq!(model.statistics(), before, "{what}: {e}");
    };
    for len in 0..bytes.len() {
        refused(&bytes[..len], &format!("cut to {len} bytes"));
    }
    refused(&[&bytes[..], &[0]].concat(), "a byte more");
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        refused(&flipped, &format!("a flipped bit in byte {at}"));
    }
    fs::write(&path.0, &bytes).unwrap();
    assert_eq!(model.restore_prefixes(&path.0).unwrap().filled.blocks, 2);
}

/// Files whose checksum is right and whose content is not.
#[test]
fn files_that_lie_are_refused() {
    let (path, model) = small("prefixes-lies");
    let bytes = fs::read(&path.0).unwrap();
    let refused = |bytes: &[u8], kind: ErrorKind, part: &str| {
        fs::write(&path.0, bytes).unwrap();
        expect_kind(model.restore_prefixes(&path.0), kind, part);
        assert_eq!(cached(&model), PrefixCounts::default(), "{part}");
    };
    let lie = |name: &str, value: Value, kind: ErrorKind, part: &str| {
        refused(&rewritten(&bytes, |h| h[name] = value), kind, part);
    };
    let (corrupt, other) = (ErrorKind::CorruptFile, ErrorKind::InvalidArgument);
    lie(
        "model",
        json!(7),
        other,
        "another model: its fingerprint is 0000000000000007",
    );
    lie(
        "activations",
        json!("int8"),
        other,
        "run with int8 activations",
    );
    lie("groups", json!(2), other, "2 groups of layers");
    for unit in [0, 8, 24, 128, u64::MAX] {
        lie(
            "unit",
            json!(unit),
            corrupt,
            &format!("a record has {unit} tokens"),
        );
    }
    lie("unit", json!(64), corrupt, "its record 0: ");
    lie(
        "trees",
        json!([]),
        corrupt,
        "its record 0: it is of tree 0, and the header has 0",
    );
    let tree = |kv: &str| json!([{"kv": kv, "long_ropes": 0}]);
    lie("trees", tree("f4"), corrupt, "names 'f4' for keys");
    lie("trees", tree("f32"), corrupt, "its record 1");
    lie("surprise", json!(1), corrupt, "surprise");

    // The numbers of the first record: parent, tree, drafter, sixteen tokens, and two times.
    let first = 16 + u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let record = (bytes.len() - 8 - first) / 2;
    let word = |at: usize, value: u32, part: &str| {
        let mut wrong = bytes.clone();
        wrong[at..at + 4].copy_from_slice(&value.to_le_bytes());
        refused(&sealed(wrong), corrupt, part);
    };
    word(first, 0, "its record 0: it comes after record 0");
    word(first + record, 1, "its record 1: it comes after record 1");
    word(first + record, 77, "its record 1: it comes after record 77");
    word(first + 4, 1, "it is of tree 1");
    word(first + 8, u32::MAX, "damaged or cut off");
    word(first + 12, 320, "token 320");
    word(
        first + 12 + 64 + 8,
        1,
        "a recurrent state, and the model has none",
    );
    let mut twice = bytes[..first + record].to_vec();
    twice.extend(&bytes[first..first + record]);
    refused(
        &sealed([&twice[..], &[0; 8]].concat()),
        corrupt,
        "the same tokens",
    );
    let mut version = bytes.clone();
    for (number, advice) in [(1, "save their prefixes"), (9, "a newer library")] {
        version[8] = number;
        refused(&version, ErrorKind::Unsupported, advice);
    }
    let mut long = bytes.clone();
    long[12..16].fill(0xff);
    refused(&long, corrupt, "header of 4294967295 bytes");
    let session = super::filled(&model, 20);
    session.save(&path.0).unwrap();
    drop(session);
    let of_session = fs::read(&path.0).unwrap();
    let emptied = loaded(&golden("qwen3_tied"), |_| ());
    fs::write(&path.0, of_session).unwrap();
    expect_kind(
        emptied.restore_prefixes(&path.0),
        corrupt,
        "not a file of prefixes",
    );
}

#[test]
fn other_models_and_models_without_a_cache_are_refused() {
    let (path, model) = small("prefixes-others");
    let restored = |model: &Served| model.restore_prefixes(&path.0);
    let other = with_another_row("qwen3_tied", "model.layers.1.self_attn.q_proj.weight", 1);
    let keeps_nothing = "load it with prefix_bytes or kv_bytes";
    expect_kind(restored(&other), ErrorKind::InvalidArgument, keeps_nothing);
    let dir = windows::lengthened("qwen3_tied");
    let other = loaded(&dir.0, |_| ());
    expect_kind(
        restored(&other),
        ErrorKind::InvalidArgument,
        "another model",
    );
    let in_8_bits = loaded(&golden("qwen3_tied"), |o| o.activations = Activations::Int8);
    let activations = "load the model with those";
    expect_kind(
        restored(&in_8_bits),
        ErrorKind::InvalidArgument,
        activations,
    );
    let without = loaded(&golden("qwen3_tied"), |o| o.prefix_cache = false);
    let no_cache = "without a prefix cache";
    expect_kind(restored(&without), ErrorKind::InvalidArgument, no_cache);
    let saved = without.save_prefixes(&path.0);
    expect_kind(saved, ErrorKind::InvalidArgument, no_cache);
    let nowhere = model.restore_prefixes(Path::new("/nowhere"));
    expect_kind(nowhere, ErrorKind::NotFound, "/nowhere");
    assert_eq!(restored(&model).unwrap().filled.blocks, 2);
}

/// A save that ends early leaves the file that was there, and a restore what it has restored.
#[test]
fn cancelled_calls_leave_no_part() {
    let (path, model) = small("prefixes-cancelled");
    let before = fs::read(&path.0).unwrap();
    run(&model, KvType::F16, &some_tokens(&model, 90));
    let all = cached(&model);
    let cancel = Cancel::new();
    cancel.cancel();
    let saved = cancel.watching(|| model.save_prefixes(&path.0));
    expect_kind(saved, ErrorKind::Cancelled, "cancelled");
    assert!(fs::read(&path.0).unwrap() == before);
    let folder = path.0.parent().unwrap();
    let name = path.0.file_name().unwrap().to_str().unwrap();
    let names = fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: Vec<String> = names.filter(|n| n.contains(name)).collect();
    assert_eq!(left, [name]);
    assert_eq!((cached(&model), model.blocks_used()), (all, 0));

    let later = loaded(&golden("qwen3_tied"), |_| ());
    let restored = cancel.watching(|| later.restore_prefixes(&path.0));
    expect_kind(restored, ErrorKind::Cancelled, "cancelled");
    assert_eq!(
        (cached(&later), later.blocks_used()),
        (PrefixCounts::default(), 0)
    );
    let into_nothing = model.save_prefixes(&path.0.join("below"));
    assert!(into_nothing.is_err());
    assert_eq!((cached(&model), model.blocks_used()), (all, 0));
}

/// Files are saved and restored while threads generate in memory that is short: each session gets what it gets alone, and so does one that
/// begins with the last file.
#[test]
fn other_threads_go_on_meanwhile() {
    for case in ["qwen3_tied", "gemma3_wide", "qwen35_tied"] {
        let dir = windows::lengthened(case);
        let reference = loaded(&dir.0, |_| ());
        let tokens = some_tokens(&reference, 600);
        let prompt = |thread: usize, round: usize| {
            let first = 40 * (thread % 2);
            let own = (1 + thread + 3 * (round % 2)) as u32;
            [&tokens[first..first + 280], &[own; 30]].concat()
        };
        let alone = |prompt: &[u32]| {
            let mut session = with(&reference, |o| o.private = true);
            session.prefill(prompt).unwrap();
            (
                state(&mut session),
                generate(&mut session, &drawn(12)).tokens,
            )
        };
        let want: Vec<Vec<_>> = (0..3)
            .map(|thread| (0..2).map(|round| alone(&prompt(thread, round))).collect())
            .collect();
        let mut largest = session(&reference, KvType::F16);
        largest.prefill(&tokens[..330]).unwrap();
        // Three sessions always fit, with all states that they keep.
        let bytes = 8 * largest.kv_bytes();
        let before = memory::usage(Tag::KvCache).current;
        let model = loaded(&dir.0, |o| o.kv_bytes = Some(bytes));
        let path = file(&format!("prefixes-busy-{case}"));
        let is_done = AtomicBool::new(false);
        let (mut saved, mut restored) = (0, 0);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    let (model, want) = (&model, &want[thread]);
                    scope.spawn(move || {
                        for round in 0..4 {
                            let prompt = prompt(thread, round);
                            let (_, state, made) = continued(model, KvType::F16, &prompt);
                            assert!((state, made) == want[round % 2], "{case}");
                        }
                    })
                })
                .collect();
            let (model, path, is_done) = (&model, &path.0, &is_done);
            let files = scope.spawn(move || {
                let mut counts = (0, 0);
                while !is_done.load(Ordering::Relaxed) {
                    counts.0 += model.save_prefixes(path).unwrap().blocks;
                    counts.1 += model.restore_prefixes(path).unwrap().in_file.blocks;
                }
                counts
            });
            let ends = threads.into_iter().map(|thread| thread.join());
            let ends: Vec<_> = ends.collect();
            is_done.store(true, Ordering::Relaxed);
            (saved, restored) = files.join().unwrap();
            ends.into_iter().for_each(|end| end.unwrap());
        });
        assert!(
            saved > 0 && restored == saved,
            "{case}: {saved}, {restored}"
        );
        assert_eq!(model.blocks_used(), 0, "{case}");
        let now = model.statistics();
        assert_eq!(now.blocks.cached_bytes + now.free_bytes, bytes, "{case}");
        model.save_prefixes(&path.0).unwrap();
        let later = loaded(&dir.0, |_| ());
        later.restore_prefixes(&path.0).unwrap();
        for (thread, want) in want.iter().enumerate() {
            for (round, want) in want.iter().enumerate() {
                let (_, state, made) = continued(&later, KvType::F16, &prompt(thread, round));
                assert!((state, made) == *want, "{case}");
            }
        }
        drop((model, later));
        assert_eq!(memory::usage(Tag::KvCache).current, before, "{case}");
    }
}

/// Where a restore calls back it holds nothing: a callback that runs the model out of memory does not wait for the end of its own call.
#[test]
fn a_callback_of_a_restore_finds_no_memory() {
    let dir = windows::lengthened("qwen3_tied");
    let path = file("prefixes-callback");
    let first = loaded(&dir.0, |_| ());
    let tokens = some_tokens(&first, 160);
    run(&first, KvType::F16, &tokens);
    first.save_prefixes(&path.0).unwrap();
    let bytes = first.statistics().blocks.cached_bytes;
    let later = loaded(&dir.0, |o| o.kv_bytes = Some(bytes));
    let (calls, is_inside) = (AtomicUsize::new(0), AtomicBool::new(false));
    let calls_back = || {
        if !is_inside.swap(true, Ordering::Relaxed) {
            // Once a block is filled, from then on.
            let is_filled = later.statistics().blocks.blocks_cached > 0;
            if is_filled || calls.load(Ordering::Relaxed) > 0 {
                calls.fetch_add(1, Ordering::Relaxed);
                let mut session = with(&later, |o| o.private = true);
                session.prefill(&tokens).unwrap();
                let refused = with(&later, |o| o.private = true).prefill(&tokens);
                expect_kind(refused, ErrorKind::OutOfMemory, "in use");
            }
            is_inside.store(false, Ordering::Relaxed);
        }
        false
    };
    let watch = Watch {
        flags: &[&calls_back],
        ..Watch::default()
    };
    watch.during(|| later.restore_prefixes(&path.0)).unwrap();
    assert!(calls.into_inner() > 0);
}
