//! Checks of regular expressions before they are compiled.

use regex_syntax::hir::{Hir, HirKind};

use super::limits::MOST_PARTS;
use crate::base::Result;
use crate::base::error::{bail, err};

/// Refuses a text that is no regular expression, with the place, and one whose repetitions make it too large.
pub(super) fn check(text: &str) -> Result<()> {
    let hir = regex_syntax::parse(text).map_err(|e| {
        let (what, at) = match &e {
            regex_syntax::Error::Parse(e) => (e.kind().to_string(), e.span().start.offset),
            regex_syntax::Error::Translate(e) => (e.kind().to_string(), e.span().start.offset),
            other => (other.to_string(), 0),
        };
        err!(InvalidArgument, "byte {at}: {what}")
    })?;
    check_parts(&hir)
}

/// Refuses a regular expression whose repetitions make it too large; leaves what is none to the compiler.
pub(super) fn check_repetitions(text: &str) -> Result<()> {
    regex_syntax::parse(text).map_or(Ok(()), |hir| check_parts(&hir))
}

fn check_parts(hir: &Hir) -> Result<()> {
    let parts = parts(hir);
    if parts > MOST_PARTS {
        bail!(
            InvalidArgument,
            "the repetitions make {parts} parts, and at most {MOST_PARTS} are compiled"
        );
    }
    Ok(())
}

/// The parts of an expression, with those of what it repeats counted as often.
fn parts(hir: &Hir) -> usize {
    match hir.kind() {
        HirKind::Empty | HirKind::Class(_) | HirKind::Look(_) => 1,
        HirKind::Literal(literal) => literal.0.len(),
        HirKind::Repetition(repeated) => {
            let times = repeated.max.unwrap_or(repeated.min).max(1);
            parts(&repeated.sub).saturating_mul(times as usize)
        }
        HirKind::Capture(group) => parts(&group.sub),
        HirKind::Concat(all) | HirKind::Alternation(all) => {
            all.iter().map(parts).fold(0, usize::saturating_add)
        }
    }
}
