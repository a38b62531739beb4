//! Several sessions advanced together, in one pass over the weights.

use std::sync::Arc;

use super::{SamplingOptions, Session};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::{Choice, KvCache, Logits, Model, Scratch};

/// Appends `tokens[i]` to `sessions[i]` and runs all of them in one pass over the weights. If anything fails, all of them are as
/// they were. Cancelled with the thread's
/// [`call`](crate::base::call).
pub fn step(sessions: &mut [&mut Session], tokens: &[u32]) -> Result<()> {
    let mut logits = Vec::new();
    stepped(sessions, tokens, &mut |model, caches, _, scratch| {
        model.forward_batch(tokens, caches, scratch, &mut logits)
    })?;
    if let Some(first) = sessions.first() {
        let rows = logits
            .chunks_exact(first.model.spec().vocab_size)
            .map(<[f32]>::to_vec)
            .collect::<Vec<_>>();
        for (session, row) in sessions.iter_mut().zip(rows) {
            session.logits = row;
        }
    }
    Ok(())
}

/// Like [`step`], and gives each session's next token, chosen by `options[i]` as a generation would choose it, without
/// appending it. On a GPU the logits stay on the device; with `look_ahead` it runs those tokens before it is asked to.
pub fn step_choose(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: &[&SamplingOptions],
    look_ahead: bool,
) -> Result<Vec<u32>> {
    if options.len() != sessions.len() {
        bail!(
            InvalidArgument,
            "{} sampling options for {} sessions; each session takes one",
            options.len(),
            sessions.len()
        );
    }
    for (i, options) in options.iter().enumerate() {
        options
            .check()
            .map_err(|e| e.within(format_args!("session {i}")))?;
    }
    let each = options.iter().zip(&*sessions);
    let options: Vec<SamplingOptions> = each.map(|(o, s)| o.seeded_by(s.seed)).collect();
    let mut next = Vec::new();
    stepped(sessions, tokens, &mut |model, caches, places, scratch| {
        let choices: Vec<Choice<'_>> = options
            .iter()
            .zip(places)
            .map(|(options, &(draw, history))| Choice {
                options,
                draw,
                history,
            })
            .collect();
        next = model.forward_choose(tokens, caches, &choices, scratch, look_ahead)?;
        Ok(())
    })?;
    for ((session, options), &token) in sessions.iter_mut().zip(&options).zip(&next) {
        session.argmax = options.is_greedy().then_some(token);
    }
    Ok(next)
}

/// One pass over the weights for several sessions' caches, given also how many tokens were appended to each session, and those it
/// holds.
type Pass<'a> =
    dyn FnMut(&Model, &mut [&mut KvCache], &[(u64, &[u32])], &mut Scratch) -> Result<()> + 'a;

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
    let _held = first.model.hold()?;
    // Only eviction changes a session in a way that truncating it cannot undo.
    let saved: Vec<_> = sessions
        .iter()
        .map(|s| Ok((s.len(), (!s.fits(1)).then(|| s.saved()).transpose()?)))
        .collect::<Result<_>>()?;
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
        let parts = sessions.iter_mut().map(|s| {
            let appended = s.appended() as u64;
            (&mut s.cache, (appended, &s.tokens[..]))
        });
        let (mut caches, places): (Vec<&mut KvCache>, Vec<_>) = parts.unzip();
        pass(&model, &mut caches, &places, &mut scratch)
    })();
    sessions[0].scratch = scratch;
    result
}
