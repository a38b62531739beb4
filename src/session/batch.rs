//! Several sessions advanced together, in one pass over the weights.

use std::sync::Arc;

use super::next::Next;
use super::{SamplingOptions, Session};
use crate::base::error::bail;
use crate::base::{Error, Result};
use crate::engine::NewTokens;
use crate::model::{Choice, Output, Wanted};

/// Appends `tokens[i]` to `sessions[i]` and runs all sessions in one pass over the weights. If the pass fails, every session is as it was
/// before. Cancelled with the thread's [`call`](crate::base::call).
pub fn step(sessions: &mut [&mut Session], tokens: &[u32]) -> Result<()> {
    let (rows, logits) = stepped(sessions, tokens, None, false)?;
    for (session, row) in sessions.iter_mut().zip(rows) {
        let vocabulary = session.model.spec().vocab_size;
        if let Output::Logits(rows) = row {
            let logits = &logits[rows.start * vocabulary..rows.end * vocabulary];
            session.next = Next::of(logits.to_vec());
        }
    }
    Ok(())
}

/// Like [`step`], and returns each session's next token, chosen by `options[i]` as a generation would choose it, without appending it. On a
/// GPU the logits stay on the device; with `look_ahead` the device starts to run those tokens before the next call asks for it.
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
    let (outputs, _) = stepped(sessions, tokens, Some(&options), look_ahead)?;
    let tokens = outputs.into_iter().map(|output| match output {
        Output::Token(token) => Ok(token),
        other => bail!(Internal, "{other:?} in the place of a token"),
    });
    let next: Vec<u32> = tokens.collect::<Result<_>>()?;
    for ((session, options), &token) in sessions.iter_mut().zip(&options).zip(&next) {
        if options.is_greedy() {
            session.next.set_argmax(token);
        }
    }
    Ok(next)
}

/// Appends a token to each session and runs it, with any pending tokens before it. Returns the logits, or with `options` the next tokens.
fn stepped(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: Option<&[SamplingOptions]>,
    look_ahead: bool,
) -> Result<(Vec<Output>, Vec<f32>)> {
    if sessions.len() != tokens.len() {
        bail!(
            InvalidArgument,
            "{} tokens for {} sessions; each session takes one",
            tokens.len(),
            sessions.len()
        );
    }
    let Some((first, rest)) = sessions.split_first() else {
        return Ok((Vec::new(), Vec::new()));
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
    // Truncating a session undoes every change except eviction.
    let saved: Vec<_> = sessions
        .iter()
        .map(|s| Ok((s.len(), (!s.fits(1)).then(|| s.saved()).transpose()?)))
        .collect::<Result<_>>()?;
    let result = run(sessions, tokens, options, look_ahead);
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

fn run(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: Option<&[SamplingOptions]>,
    look_ahead: bool,
) -> Result<(Vec<Output>, Vec<f32>)> {
    let model = sessions[0].model.clone();
    let numbered = |i: usize, e: Error| e.within(format_args!("session {i}"));
    for (i, (session, &token)) in sessions.iter_mut().zip(tokens).enumerate() {
        session.make_room(1).map_err(|e| numbered(i, e))?;
        session.push(&[token]);
        // The previous token may be pending too.
        let cached = session.cache.len().min(session.len() - 1);
        session.cache.truncate(cached)?;
        // Steps draft nothing.
        session.cache.set_drafts(false)?;
    }
    let mut scratch = std::mem::take(&mut sessions[0].scratch);
    let mut logits = Vec::new();
    let work = sessions.iter_mut().enumerate().map(|(i, session)| {
        let appended = session.appended() as u64;
        let history = &session.tokens[..];
        NewTokens {
            tokens: &history[session.cache.len()..],
            sequence: &mut session.cache,
            wanted: match options {
                None => Wanted::Last,
                Some(options) => Wanted::Token(Choice {
                    options: &options[i],
                    draw: appended,
                    history,
                    allowed: None,
                }),
            },
        }
    });
    let outputs = model.run(work.collect(), look_ahead, &mut scratch, &mut logits);
    sessions[0].scratch = scratch;
    let alone = sessions.len() == 1;
    let outputs = outputs?
        .into_iter()
        .enumerate()
        .map(|(i, output)| output.map_err(|fault| if alone { fault } else { numbered(i, fault) }));
    Ok((outputs.collect::<Result<_>>()?, logits))
}
