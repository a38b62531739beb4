//! Several sessions advanced together, in one pass over the weights.

use std::sync::Arc;

use super::Session;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::{KvCache, Logits, Model, Scratch};

/// Appends `tokens[i]` to `sessions[i]` and runs all of them in one pass over the weights. Each session gets the bits that
/// decoding it alone would give. If anything fails, all of them are as they were. The first session's canceller ends the
/// call.
pub fn step(sessions: &mut [&mut Session], tokens: &[u32]) -> Result<()> {
    let mut logits = Vec::new();
    stepped(sessions, tokens, &mut |model, caches, scratch| {
        model.forward_batch(tokens, caches, scratch, &mut logits)
    })?;
    if let Some(first) = sessions.first() {
        let rows = logits
            .chunks_exact(first.model.config().vocab_size)
            .map(<[f32]>::to_vec)
            .collect::<Vec<_>>();
        for (session, row) in sessions.iter_mut().zip(rows) {
            session.logits = row;
        }
    }
    Ok(())
}

/// Like [`step`], and gives the likeliest token to come of each session, the first of equals; on a GPU the logits stay there.
/// With `ahead` the device goes on with those tokens before it is asked to.
pub fn step_likeliest(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    ahead: bool,
) -> Result<Vec<u32>> {
    let mut next = Vec::new();
    stepped(sessions, tokens, &mut |model, caches, scratch| {
        next = model.forward_likeliest(tokens, caches, scratch, ahead)?;
        Ok(())
    })?;
    for (session, &token) in sessions.iter_mut().zip(&next) {
        session.likeliest = Some(token);
    }
    Ok(next)
}

/// One pass over the weights for several sessions' caches.
type Pass<'a> = dyn FnMut(&Model, &mut [&mut KvCache], &mut Scratch) -> Result<()> + 'a;

fn stepped(sessions: &mut [&mut Session], tokens: &[u32], pass: &mut Pass<'_>) -> Result<()> {
    if sessions.len() != tokens.len() {
        bail!(
            InvalidArgument,
            "{} tokens for {} sessions; each session takes one",
            tokens.len(),
            sessions.len()
        );
    }
    let Some((first, rest)) = sessions.split_first() else {
        return Ok(());
    };
    if let Some(i) = rest
        .iter()
        .position(|s| !Arc::ptr_eq(&s.model, &first.model))
    {
        bail!(
            InvalidArgument,
            "session {} runs another model than session 0; sessions of a batch share one",
            i + 1
        );
    }
    first.model.check_tokens(tokens)?;
    first.canceller.clear();
    // Only evicting changes a session in a way that cutting it cannot undo.
    let saved: Vec<_> = sessions
        .iter()
        .map(|s| (s.len(), (!s.fits(1)).then(|| s.saved())))
        .collect();
    let result = run(sessions, tokens, pass);
    if result.is_err() {
        for (session, (len, saved)) in sessions.iter_mut().zip(saved) {
            match saved {
                Some(saved) => session.go_back(saved),
                None => session.tokens.truncate(len),
            }
        }
    }
    result
}

fn run(sessions: &mut [&mut Session], tokens: &[u32], pass: &mut Pass<'_>) -> Result<()> {
    let first = &mut *sessions[0];
    let model = first.model.clone();
    let mut scratch = std::mem::take(&mut first.scratch);
    let mut logits = Vec::new();
    let result = (|| {
        for (i, (session, &token)) in sessions.iter_mut().zip(tokens).enumerate() {
            let numbered = |e: crate::base::Error| e.within(format_args!("session {i}"));
            session.make_room(1).map_err(numbered)?;
            let pending = session.cache.len().min(session.tokens.len());
            if pending < session.tokens.len() {
                model
                    .forward(
                        &session.tokens[pending..],
                        &mut session.cache,
                        &mut scratch,
                        Logits::None,
                        &mut logits,
                    )
                    .map_err(numbered)?;
            }
            session.push(&[token]);
        }
        let mut caches: Vec<&mut KvCache> = sessions.iter_mut().map(|s| &mut s.cache).collect();
        pass(&model, &mut caches, &mut scratch)
    })();
    sessions[0].scratch = scratch;
    result
}
