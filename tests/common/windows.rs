//! Layers with a window keep what they see and a little more, on either device: memory, rewinding, forks and session files.

use std::sync::Arc;

use NVFP4::engine::{Kept, REWIND, Served};
use NVFP4::session::{Session, SessionOptions};

use super::{Copy, some_tokens};

/// Positions that the models of [`lengthened`] take.
pub(crate) const POSITIONS: usize = 4096;
/// The most positions that are freed together.
const FREED: usize = 64;

/// A golden model with a window of a few positions, made for [`POSITIONS`].
pub(crate) fn lengthened(case: &str) -> Copy {
    let dir = Copy::of(case, "long");
    let config = std::fs::read(dir.0.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    text["max_position_embeddings"] = POSITIONS.into();
    dir.write("config.json", config.to_string().as_bytes());
    dir
}

/// Demands that logits are the expected ones; the text says whose they are.
pub(crate) type Same<'a> = dyn Fn(&[f32], &[f32], &str) + 'a;

pub(crate) fn session(model: &Arc<Served>) -> Session {
    Session::new(model.clone(), &SessionOptions::default()).unwrap()
}

/// The logits after `tokens` in a new session, which runs all of them.
pub(crate) fn fresh(model: &Arc<Served>, tokens: &[u32]) -> Vec<f32> {
    let private = SessionOptions {
        private: true,
        ..SessionOptions::default()
    };
    let mut session = Session::new(model.clone(), &private).unwrap();
    session.prefill(tokens).unwrap();
    session.logits().unwrap().to_vec()
}

/// The bytes that a session of `len` tokens takes if every layer keeps all of them.
fn whole_bytes(model: &Served, len: usize) -> usize {
    let kept = Kept {
        from: vec![0; model.kv().groups().len()],
        ..Kept::default()
    };
    let sequence = model.sequence(POSITIONS, Default::default()).unwrap();
    sequence.page_bytes(len, &kept).unwrap() as usize
}

/// A session of 3,000 tokens, appended in parts.
fn long_session(model: &Arc<Served>, tokens: &[u32]) -> Session {
    let mut session = session(model);
    tokens
        .chunks(700)
        .for_each(|part| session.prefill(part).unwrap());
    session
}

/// Checks a model of [`lengthened`]; `path` is for a session file.
pub(crate) fn check(model: &Arc<Served>, path: &std::path::Path, same: &Same<'_>) {
    let tokens = some_tokens(model, 3000);
    let mut session = long_session(model, &tokens);
    let compare = |session: &mut Session, len: usize, what: &str| {
        assert_eq!(session.len(), len);
        let want = fresh(model, &tokens[..len]);
        same(session.logits().unwrap(), &want, what);
    };
    compare(&mut session, 3000, "after parts");

    // Layers with a window keep a bounded number of positions, and the others all.
    let groups = model.kv().groups();
    let kept = |group: &NVFP4::model::kv::KvGroup, len: usize| match group.window {
        Some(window) => len.min(window + REWIND + 2 * FREED),
        None => len + FREED,
    };
    let page = |group: &NVFP4::model::kv::KvGroup| 4 * group.kv_heads * group.head_dim;
    let most = |len| {
        let each = groups.iter();
        each.map(|group| group.layers.len() * page(group) * kept(group, len))
            .sum::<usize>()
    };
    assert!(
        session.kv_bytes() <= most(3000),
        "{} bytes",
        session.kv_bytes()
    );
    assert!(
        2 * most(3000) < 3 * whole_bytes(model, 3000),
        "the test shows nothing"
    );

    // A fork shares all blocks, and both go on.
    let mut fork = session.fork().unwrap();
    fork.truncate(2990).unwrap();
    session.decode(5).unwrap();
    let after = [&tokens[..], &[5]].concat();
    same(
        session.logits().unwrap(),
        &fresh(model, &after),
        "beside a fork",
    );
    compare(&mut fork, 2990, "a fork, cut a little");

    // As much as is kept past the window, and more, after which everything is computed again.
    for len in [3000 - REWIND, 1500, 7] {
        fork.truncate(len).unwrap();
        compare(&mut fork, len, &format!("cut to {len}"));
    }
    session.save(path).unwrap();
    let size = std::fs::metadata(path).unwrap().len() as usize;
    assert!(size < most(3001) + 200_000, "{size} bytes");
    let mut restored = Session::restore(model.clone(), path).unwrap();
    assert_eq!(restored.kv_bytes(), session.kv_bytes());
    restored.decode(9).unwrap();
    let after = [&after[..], &[9]].concat();
    same(
        restored.logits().unwrap(),
        &fresh(model, &after),
        "a restored session",
    );
    restored.truncate(100).unwrap();
    compare(&mut restored, 100, "a restored session, cut");
    drop((session, fork, restored));
    assert_eq!(model.blocks_used(), 0);
}
