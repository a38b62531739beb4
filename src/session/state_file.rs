//! Session files: the complete state of a session, from which it continues as if never interrupted, on disk or in memory. A file is [sealed](crate::base::sealed), and its
//! content is the tokens, the logits, the cache's pages, and the drafter's pages if there are any. Everything is checked against the file
//! size, the model and the checksum before it is used.

use std::io::Read;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::conversation::{Answering, Conversation};
use super::next::Next;
use super::{ChatOptions, Eviction, Session, SessionOptions};
use crate::base::error::{bail, err};
use crate::base::sealed::{self, Format, Reader, Writer};
use crate::base::{Error, ErrorKind, Result, alloc, file, memory};
use crate::engine::{Kept, LoadedAdapter, Sequence, Served};
use crate::model::KvType;
use crate::text::{Message, messages_from_json, messages_to_json};

/// Version 1 identified models by the first and last rows of their weights; version 2 had only the roles user and assistant; version 3 had
/// other checksums; version 4 had other fingerprints of models.
const FORMAT: Format = Format {
    magic: *b"NVFP4SES",
    version: 5,
    name: "a session file",
    older: "an older library wrote it; start the conversation anew, and save it again",
    newer: "a newer library wrote it; restore it with that one",
};

/// Most loaded adapters that a message names.
const MOST_NAMED: usize = 8;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    model: u64,
    activations: String,
    /// The adapter that the tokens were run with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<AdapterHeader>,
    context: usize,
    kv: String,
    system: Option<String>,
    /// Tokens that eviction keeps; `None` if eviction is off.
    keep: Option<usize>,
    /// Tokens that a sliding window evicts at a time; `None` for another policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drop: Option<usize>,
    tokens: usize,
    /// Number of tokens evicted before them.
    evicted: usize,
    /// Number of tokens in the cache.
    cached: usize,
    /// The first of them that each group of layers keeps, if windows have passed any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    kept_from: Vec<usize>,
    /// The numbers of tokens whose recurrent state is in the file, if the model has recurrent layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    states: Vec<usize>,
    /// Bytes of the drafter's keys and values, after everything else, if it has followed the tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    drafter: u64,
    /// Number of logits stored: all or none.
    logits: usize,
    /// The conversation as chat servers write it, if the tokens are one.
    messages: Option<Box<RawValue>>,
    answer: Option<AnswerHeader>,
    chat: ChatOptions,
}

/// The adapter of a session.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterHeader {
    identity: NonZeroU64,
    name: String,
}

/// The answer at the end of the tokens.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerHeader {
    start: usize,
    opening: String,
    whole: bool,
    /// The answer as a message, if it differs from the text of its tokens: a stop string was cut off.
    said: Option<Box<RawValue>>,
}

/// The state of a session, as it is written.
struct State<'a> {
    session: &'a Session,
    cache: &'a Sequence,
    logits: &'a [f32],
    /// The header as JSON.
    header: Vec<u8>,
    /// Bytes after the header and before the checksum.
    content: u64,
}

impl State<'_> {
    fn write(&self, mut out: Writer<'_>) -> Result<()> {
        out.words(self.session.tokens.iter().copied())?;
        out.words(self.logits.iter().map(|x| x.to_bits()))?;
        self.cache.for_each_page(|page| out.write(page))?;
        self.cache.for_each_drafter_page(|page| out.write(page))?;
        out.finish()
    }
}

impl Session {
    /// Writes the session to a file atomically: the file appears complete or not at all. Reports the bytes written to the thread's
    /// [`call`](crate::base::call). What older weights have computed is not in it, if a trainer has changed them; its step waits for this.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.with_state(|state| {
            state.write(Writer::create(path, &FORMAT, &state.header, state.content)?)
        })
    }

    /// Writes the bytes of a session file to memory that `room` gives for so many, as [`save`](Session::save) does to a file. Without room,
    /// which is `None`, nothing is written. Returns the number of bytes.
    pub fn save_to<'a>(
        &self,
        room: impl FnOnce(u64) -> Result<Option<&'a mut [u8]>>,
    ) -> Result<u64> {
        self.with_state(|state| {
            let size = sealed::size(state.header.len(), state.content);
            if let Some(room) = room(size)? {
                state.write(Writer::in_memory(
                    room,
                    &FORMAT,
                    &state.header,
                    state.content,
                )?)?;
            }
            Ok(size)
        })
    }

    /// Calls `write` with the state of the session, which no step of a trainer changes meanwhile.
    fn with_state<T>(&self, write: impl FnOnce(&State<'_>) -> Result<T>) -> Result<T> {
        let _held = self.model.hold()?;
        let empty = self.model.sequence(self.options.context, self.options.kv)?;
        let (cache, logits) = match self.cache.is_outdated() {
            true => (&empty, None),
            false => (&self.cache, self.next.logits()),
        };
        let conversation = &self.conversation;
        let kept = cache.kept();
        let _texts = alloc::Budget::json(self.text_bytes(), 0).set_aside()?;
        let header = Header {
            model: self.model.fingerprint(),
            activations: self.model.info().activations.to_owned(),
            adapter: self.adapter().map(|adapter| AdapterHeader {
                identity: adapter.identity(),
                name: adapter.name().to_owned(),
            }),
            context: self.options.context,
            kv: self.options.kv.name().to_owned(),
            system: self.options.system.clone(),
            keep: self.options.eviction.sizes().map(|(keep, _)| keep),
            drop: match self.options.eviction {
                Eviction::SlidingWindow { drop, .. } => Some(drop),
                _ => None,
            },
            tokens: self.tokens.len(),
            evicted: self.evicted,
            cached: cache.len(),
            kept_from: match kept.from {
                from if from.iter().all(|&first| first == 0) => Vec::new(),
                from => from,
            },
            states: kept.states,
            drafter: cache.drafter_bytes(),
            logits: logits.map_or(0, <[f32]>::len),
            messages: match conversation.begun {
                true => Some(raw(&conversation.messages)?),
                false => None,
            },
            answer: match &conversation.answer {
                None => None,
                Some(answer) => Some(AnswerHeader {
                    start: answer.start,
                    opening: answer.opening.clone(),
                    whole: answer.whole,
                    said: match &answer.said {
                        Some((len, said)) if *len == self.len() => {
                            Some(raw(std::slice::from_ref(said))?)
                        }
                        _ => None,
                    },
                }),
            },
            chat: conversation.options.clone(),
        };
        let json = serde_json::to_vec(&header)
            .map_err(|e| err!(Internal, "writing the session's header: {e}"))?;
        if u32::try_from(json.len()).is_err() {
            bail!(
                InvalidArgument,
                "the conversation's texts take {} bytes; a session file holds 4 GB of them",
                json.len()
            );
        }
        let content = header
            .content_bytes(cache)
            .ok_or_else(|| err!(InvalidArgument, "the session is too large for a file"))?;

        write(&State {
            session: self,
            cache,
            logits: logits.unwrap_or_default(),
            header: json,
            content,
        })
    }

    /// Restores a session from a file. `model` must be the model that ran it before, with the same weights. A session with an adapter gets
    /// that which is loaded for the model and has the same values. The step of a trainer waits for it.
    pub fn restore(model: Arc<Served>, path: &Path) -> Result<Session> {
        let file = file::open(path)
            .map_err(|e| Error::io(format_args!("opening {}", path.display()), e))?;
        Reader::open(file, &FORMAT)
            .and_then(|(input, header)| restore(model, input, &header))
            .map_err(|e| e.within(path.display()))
    }

    /// Restores a session from the bytes of a session file, like [`restore`](Session::restore).
    pub fn restore_from(model: Arc<Served>, bytes: &[u8]) -> Result<Session> {
        Reader::of_memory(bytes, &FORMAT)
            .and_then(|(input, header)| restore(model, input, &header))
            .map_err(|e| e.within("the bytes of a session"))
    }
}

fn restore<R: Read>(model: Arc<Served>, mut input: Reader<R>, json: &[u8]) -> Result<Session> {
    let _held = model.hold()?;
    let _texts = alloc::Budget::fields(json.len()).set_aside()?;
    let header: Header =
        serde_json::from_slice(json).map_err(|e| err!(CorruptFile, "its header: {e}"))?;
    header.check(&model)?;
    let options = SessionOptions {
        adapter: header.adapter(&model)?,
        ..header.options()?
    };
    let mut session =
        Session::new(model, &options).map_err(|e| err!(CorruptFile, "its header: {e}"))?;
    let kept = header.kept(&session.cache);
    session
        .cache
        .check_kept(header.cached, &kept)
        .map_err(|e| err!(CorruptFile, "its header: {e}"))?;
    let expected = header.content_bytes(&session.cache);
    if expected != Some(input.left()) {
        let other = input.size() - input.left();
        let expected = expected.and_then(|content| content.checked_add(other));
        bail!(
            CorruptFile,
            "it has {} bytes, but by its header it would have {}; it is damaged or cut off",
            input.size(),
            expected.map_or("too many".to_owned(), |n| n.to_string())
        );
    }
    session.tokens = input.words(header.tokens)?;
    session.evicted = header.evicted;
    let bits = input.words(header.logits)?;
    let mut logits = memory::with_room(bits.len())?;
    logits.extend(bits.into_iter().map(f32::from_bits));
    session.next = Next::of(logits);
    session
        .cache
        .fill(&session.tokens[..header.cached], &kept, |page| {
            input.read(page)
        })?;
    if header.drafter > 0 {
        session
            .cache
            .fill_drafter(header.drafter, |page| input.read(page))
            .map_err(|e| match e.kind() {
                ErrorKind::InvalidArgument => err!(CorruptFile, "its header: {e}"),
                _ => e,
            })?;
    }
    input.finish()?;
    session
        .model
        .check_tokens(&session.tokens)
        .map_err(|e| err!(CorruptFile, "{e}"))?;
    session.conversation = header.conversation()?;
    Ok(session)
}

impl Header {
    fn check(&self, model: &Served) -> Result<()> {
        if self.model != model.fingerprint() {
            bail!(
                InvalidArgument,
                "the session was run by another model: its fingerprint is {:016x}, this one's {:016x}",
                self.model,
                model.fingerprint()
            );
        }
        if self.activations != model.info().activations {
            bail!(
                InvalidArgument,
                "the session was run with {} activations; load the model with those, not with {}",
                self.activations,
                model.info().activations
            );
        }
        let vocabulary = model.spec().vocab_size;
        let flushed = self.logits == vocabulary && self.tokens > 0 && self.cached == self.tokens;
        let answer = self.answer.as_ref().map_or(0, |answer| answer.start);
        // Bounds the count: no session ever appends so many tokens.
        let evicted = match self.keep {
            Some(_) if self.tokens > 0 => self.evicted <= isize::MAX as usize,
            _ => self.evicted == 0,
        };
        if self.tokens > self.context
            || self.cached > self.tokens
            || !(flushed || self.logits == 0)
            || answer > self.tokens
            || (self.answer.is_some() && self.messages.is_none())
            || !evicted
        {
            bail!(
                CorruptFile,
                "its header contradicts itself: {} tokens in a context of {}, {} evicted, {} cached, {} logits, an answer from {answer} on",
                self.tokens,
                self.context,
                self.evicted,
                self.cached,
                self.logits
            );
        }
        Ok(())
    }

    fn options(&self) -> Result<SessionOptions> {
        let kv = KvType::ALL
            .into_iter()
            .find(|k| k.name() == self.kv)
            .ok_or_else(|| err!(CorruptFile, "its header names '{}' for keys", self.kv))?;
        Ok(SessionOptions {
            context: self.context,
            kv,
            system: self.system.clone(),
            eviction: match (self.keep, self.drop) {
                (None, None) => Eviction::Error,
                (Some(keep), None) => Eviction::DropOldest { keep },
                (Some(sinks), Some(drop)) => Eviction::SlidingWindow { sinks, drop },
                (None, Some(drop)) => bail!(
                    CorruptFile,
                    "its header contradicts itself: {drop} tokens dropped at a time, and none kept"
                ),
            },
            private: false,
            adapter: None,
        })
    }

    /// The loaded adapter that the session was run with.
    fn adapter(&self, model: &Served) -> Result<Option<Arc<LoadedAdapter>>> {
        let Some(wanted) = &self.adapter else {
            return Ok(None);
        };
        let loaded = model.loaded_adapters();
        if let Some(same) = loaded.iter().find(|a| a.identity() == wanted.identity) {
            return Ok(Some(same.clone()));
        }
        let named = |adapter: &Arc<LoadedAdapter>| {
            format!("'{}' ({:016x})", adapter.name(), adapter.identity())
        };
        let loaded: Vec<String> = loaded.iter().take(MOST_NAMED).map(named).collect();
        bail!(
            InvalidArgument,
            "the session was run with adapter '{}' ({:016x}), and the model has loaded {}; load that adapter first",
            wanted.name,
            wanted.identity,
            match &loaded[..] {
                [] => "none".to_owned(),
                loaded => loaded.join(", "),
            }
        )
    }

    fn conversation(&self) -> Result<Conversation> {
        let messages = |json: &RawValue| {
            messages_from_json(json.get()).map_err(|e| err!(CorruptFile, "its header: {e}"))
        };
        let answer = |answer: &AnswerHeader| {
            let said = match &answer.said {
                Some(said) => messages(said)?.pop(),
                None => None,
            };
            Ok(Answering {
                start: answer.start,
                opening: answer.opening.clone(),
                whole: answer.whole,
                said: said.map(|said| (self.tokens, said)),
            })
        };
        Ok(Conversation {
            begun: self.messages.is_some(),
            messages: match &self.messages {
                Some(json) => messages(json)?,
                None => Vec::new(),
            },
            answer: self.answer.as_ref().map(answer).transpose()?,
            options: self.chat.clone(),
        })
    }

    /// Bytes after the header and before the checksum; `None` if they overflow.
    fn content_bytes(&self, cache: &Sequence) -> Option<u64> {
        let numbers = (self.tokens as u64).checked_add(self.logits as u64)?;
        numbers
            .checked_mul(4)?
            .checked_add(cache.page_bytes(self.cached, &self.kept(cache))?)?
            .checked_add(self.drafter)
    }

    /// The positions that the sequence keeps.
    fn kept(&self, cache: &Sequence) -> Kept {
        Kept {
            from: match self.kept_from.is_empty() {
                true => cache.kept().from,
                false => self.kept_from.clone(),
            },
            states: self.states.clone(),
        }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Messages as JSON.
fn raw(messages: &[Message]) -> Result<Box<RawValue>> {
    serde_json::value::to_raw_value(&messages_to_json(messages))
        .map_err(|e| err!(Internal, "writing the conversation: {e}"))
}
