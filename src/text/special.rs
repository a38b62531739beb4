//! Special tokens of a model with their roles: by the names in the tokenizer's files, by what the tokenizer adds around texts, by the chat
//! template, and by the form of answers.

use super::turn_end::{turn_begins, turn_ends};
use super::{AnswerForm, ChatTemplate, TokenRole, Tokenizer};
use crate::base::Result;

/// A token that is special or has a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub token: u32,
    /// Its roles in ascending order, each once; empty if none is known.
    pub roles: Vec<TokenRole>,
}

/// The tokens that `tokenizer` marks as special or that have a role, in order of their ids. `template` renders conversations, and is the
/// model's own if `is_own`; `form` is the one of its answers. `known` are roles from elsewhere.
pub fn special_tokens(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    is_own: bool,
    form: &AnswerForm,
    known: &[(TokenRole, u32)],
) -> Result<Vec<SpecialToken>> {
    let mut found = known.to_vec();
    let (before, after) = tokenizer.around()?;
    found.extend(
        [before, after]
            .concat()
            .iter()
            .map(|&id| (TokenRole::Added, id)),
    );
    let marks = form.roles_of_marks().into_iter();
    found.extend(marks.filter_map(|(role, mark)| Some((role, tokenizer.id_of(mark)?))));
    let ends = turn_ends(tokenizer, is_own.then_some(template))?;
    found.extend(ends.iter().map(|&id| (TokenRole::EndsTurn, id)));
    if !found.iter().any(|&(role, _)| role == TokenRole::BeginsTurn) {
        let others: Vec<u32> = found.iter().map(|&(_, id)| id).collect();
        let begins = turn_begins(tokenizer, template, &others)?.into_iter();
        found.extend(begins.map(|id| (TokenRole::BeginsTurn, id)));
    }
    let mut ids: Vec<u32> = tokenizer
        .special()
        .chain(found.iter().map(|&(_, id)| id))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    found.sort_unstable_by_key(|&(role, id)| (id, role));
    found.dedup();
    let of = |token: u32| {
        let start = found.partition_point(|&(_, id)| id < token);
        let own = found[start..].iter().take_while(|&&(_, id)| id == token);
        SpecialToken {
            token,
            roles: own.map(|&(role, _)| role).collect(),
        }
    };
    Ok(ids.into_iter().map(of).collect())
}
