//! Recurrent layers keep the state of the end and of a few earlier positions, on either device: memory, rewinding, forks and session files.

use std::path::Path;
use std::sync::Arc;

use NVFP4::engine::{SNAPSHOTS, Served};
use NVFP4::session::Session;

use super::some_tokens;
use super::windows::{Same, fresh, session};

/// States that a session holds besides earlier ones: that of its end, and blocks for the next two.
const HELD: usize = 3;

/// Bytes of the recurrent state of a model.
fn state_bytes(model: &Served) -> usize {
    let shapes = model.spec().blocks.iter().filter_map(|b| b.recurrent());
    shapes.map(|shape| 4 * shape.state_floats()).sum()
}

/// Bytes of keys and values of `len` positions, rounded up to whole blocks of at most 64.
fn most_kv_bytes(model: &Served, len: usize) -> usize {
    let groups = model.kv().groups().iter();
    let each = groups.map(|g| g.layers.len() * 4 * g.kv_heads * g.head_dim);
    each.sum::<usize>() * len.next_multiple_of(64)
}

/// Checks a model of [`lengthened`](super::windows::lengthened) with recurrent layers; `path` is for a session file.
pub(crate) fn check(model: &Arc<Served>, path: &Path, same: &Same<'_>) {
    let tokens = some_tokens(model, 3000);
    let compare = |session: &mut Session, len: usize, what: &str| {
        assert_eq!(session.len(), len);
        let want = fresh(model, &tokens[..len]);
        same(session.logits().unwrap(), &want, what);
    };
    let state = state_bytes(model);
    let check_bytes = |session: &Session| {
        let states = session
            .kv_bytes()
            .saturating_sub(most_kv_bytes(model, session.len()));
        assert!(
            states <= (SNAPSHOTS + HELD) * state,
            "{states} bytes at {}",
            session.len()
        );
    };

    // However long it is, and however it grew.
    let mut whole = session(model);
    whole.prefill(&tokens).unwrap();
    check_bytes(&whole);
    compare(&mut whole, 3000, "at once");
    let mut session = session(model);
    for (i, part) in tokens.chunks(150).enumerate() {
        match i % 3 {
            0 => part
                .iter()
                .for_each(|&token| session.decode(token).unwrap()),
            _ => session.prefill(part).unwrap(),
        }
        check_bytes(&session);
    }
    compare(&mut session, 3000, "in parts");

    // A fork shares the states that are kept; both go on, and back to any position.
    let before = model.blocks_used();
    let mut fork = session.fork().unwrap();
    assert_eq!(model.blocks_used(), before);
    for len in [2999, 2990, 2048, 1500, 1, 3] {
        let more = &tokens[fork.len().min(len)..len];
        fork.truncate(fork.len().min(len)).unwrap();
        if !more.is_empty() {
            fork.prefill(more).unwrap();
        }
        compare(&mut fork, len, &format!("a fork, cut to {len}"));
        check_bytes(&fork);
    }
    compare(&mut session, 3000, "beside a fork");

    session.save(path).unwrap();
    let size = std::fs::metadata(path).unwrap().len() as usize;
    let most = most_kv_bytes(model, 3000) + (SNAPSHOTS + 1) * state + 50_000;
    assert!(size < most, "{size} bytes");
    let mut restored = Session::restore(model.clone(), path).unwrap();
    assert!(restored.kv_bytes() <= session.kv_bytes());
    restored.decode(9).unwrap();
    let after = [&tokens[..], &[9]].concat();
    same(
        restored.logits().unwrap(),
        &fresh(model, &after),
        "a restored session",
    );
    restored.truncate(2900).unwrap();
    compare(&mut restored, 2900, "a restored session, cut");
    drop((whole, session, fork, restored));
    assert_eq!(model.blocks_used(), 0);
}
