//! A model with its text side: tokenizer, chat template, answer form, sampling defaults and stop tokens. Sessions run it. A trainer serves the
//! weights that it trains in one too: a lease keeps its steps and the passes of the sessions apart, and the model follows each step.

use std::any::Any;
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use serde::Serialize;
use serde_json::Value;

use super::adapters::{Adapters, LoadedAdapter};
use super::blocks::{BlockCounts, Blocks};
use super::chat_text::{ChatText, HostTemplates};
use super::grammars::Grammars;
use super::leased::Leased;
use super::pass::NewTokens;
use super::runner::{Generating, PassCounts, Runner, Work};
use super::same_tokens::Alike;
use super::saved::{self, PrefixCounts, RestoredPrefixes};
use super::sequence::Sequence;
use super::times::PromptShare;
use crate::base::error::{Error, bail};
use crate::base::files::GivenFiles;
use crate::base::lease::{Change, Held, Lease};
use crate::base::{Result, call, fork};
use crate::checkpoint::{Checkpoint, Metadata, no_tokenizer};
use crate::model::generation::{self, Generation};
use crate::model::training::{Layout, Source};
use crate::model::{
    Device, EmbeddingSettings, KvType, LoadOptions, Model, ModelInfo, SamplingOptions, Spec,
    Trained, Tuning, Wanted, open, open_given, text,
};
use crate::text::{
    AnswerForm, ChatTemplate, Grammar, GrammarSource, GrammarVocabulary, SpecialToken, TextFiles,
    TokenRole, Tokenizer, special_tokens,
};

/// A served model, for reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServedInfo {
    /// The model.
    #[serde(flatten)]
    pub model: ModelInfo,
    /// Whether there is a tokenizer.
    pub tokenizer: bool,
    /// Whether the model brought its own chat template, if a broken one; ChatML is used where it did not.
    pub chat_template: bool,
    /// How the model embeds texts.
    pub embedding: EmbeddingSettings,
}

/// The work of a served model since it was loaded, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statistics {
    /// Passes over the weights.
    pub passes: u64,
    /// Requests in them, counted once for each pass: `requests / passes` callers shared a pass on average.
    pub requests: u64,
    /// Tokens of prompts, run or found: those of requests for more than one token of a sequence, other than verifications of drafts.
    pub prompt_tokens: u64,
    /// Prompt tokens that did not run, because the prefix cache had their blocks.
    pub prompt_tokens_found: u64,
    /// Tokens that ran one at a time, and drafted tokens that were right.
    pub step_tokens: u64,
    /// Sequences that generate now.
    pub generating: usize,
    /// Requests that are in no pass now, of those whose callers wait.
    pub waiting: usize,
    /// Generations that gave up their blocks to others, waited, and ran their tokens again.
    pub preemptions: u64,
    /// Tokens that ran again, or were found, because a trainer had changed the weights since. They are among the prompt tokens.
    pub recomputed_tokens: u64,
    /// Tokens that full contexts have evicted, in calls too that have failed since and were undone.
    pub evicted_tokens: u64,
    /// Blocks of keys, values and recurrent states.
    #[serde(flatten)]
    pub blocks: BlockCounts,
    /// Bytes reserved for blocks when the model was loaded.
    pub reserved_bytes: usize,
    /// Reserved bytes that neither sequences nor the prefix cache take.
    pub free_bytes: usize,
}

/// A model that sessions run, shared by all of them. Immutable but for the weights, if a trainer trains them.
pub struct Served {
    model: Arc<Model>,
    blocks: Arc<Blocks>,
    runner: Runner,
    tokenizer: Option<Arc<Tokenizer>>,
    /// The file with a tokenizer that is not read.
    unread_tokenizer: Option<&'static str>,
    chat: Arc<ChatText>,
    templates: HostTemplates,
    sampling: SamplingOptions,
    embedding: EmbeddingSettings,
    stop_tokens: Vec<u32>,
    /// Roles of tokens by the model's files.
    roles: Vec<(TokenRole, u32)>,
    special: OnceLock<Vec<SpecialToken>>,
    grammars: Grammars,
    adapters: Adapters,
    alike: Alike,
    /// Tokens that full contexts have evicted.
    evicted: AtomicU64,
    /// Whether long prompts beside steps were prepared.
    expects_long: AtomicBool,
    /// For weights that are trained: the lease that keeps their trainer out.
    leased: Option<Leased>,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Served({:?})", self.model)
    }
}

/// Two names of one model in memory.
impl PartialEq for Served {
    fn eq(&self, other: &Served) -> bool {
        std::ptr::eq(self, other)
    }
}

/// The model that is served.
impl Deref for Served {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.model
    }
}

impl Served {
    /// Loads the model at `path`: a directory, or a `.safetensors`, `.dat` or `.gguf` file. Reports the bytes read to the thread's
    /// [`call`](crate::base::call), and is cancelled with it.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Arc<Served>> {
        let checkpoint = Arc::from(open(path)?);
        Self::from_checkpoint(checkpoint, options).map_err(|e| e.within(path.display()))
    }

    /// Loads the model whose files the host gives, otherwise as [`Served::load`]. Threads of the library read them; on the CPU tables of
    /// embeddings are read from them as long as the model lives.
    pub fn load_given(files: &GivenFiles, options: &LoadOptions) -> Result<Arc<Served>> {
        Self::from_checkpoint(Arc::from(open_given(files)?), options)
    }

    /// Loads the model in an opened checkpoint, and its text side on one of the threads that load.
    pub fn from_checkpoint(
        checkpoint: Arc<dyn Checkpoint>,
        options: &LoadOptions,
    ) -> Result<Arc<Served>> {
        let metadata = checkpoint.metadata();
        let (text, model) = text::beside(&metadata.tokenizer, |read| {
            Model::from_checkpoint_beside(checkpoint.clone(), options, read)
        });
        Self::new(model?, Some(options), metadata, text?, None)
    }

    /// The model that training began with at `source`, with the weights as they are now. It takes no memory for matrices. Passes and the
    /// trainer's steps wait for each other by `lease`; after a step that has changed weights, the trainer calls [`Served::renew`].
    pub fn of_trained(
        device: &Device,
        source: &Source,
        trained: &dyn Trained,
        lease: &Arc<Lease>,
    ) -> Result<Arc<Served>> {
        let text = source.text_files()?;
        let model = Model::of_trained(device, source, trained, new_fingerprint())?;
        let metadata = source.checkpoint().metadata();
        Self::new(model, None, metadata, text, Some(Leased::new(lease)))
    }

    /// Follows weights that a trainer has changed. Sequences keep their tokens, and run them again when they next run; no prefix of the
    /// weights before is found again. If it fails, passes do until a later call succeeds.
    pub fn renew(&self, layout: &Layout, trained: &dyn Trained, change: &Change) -> Result<()> {
        let Some(leased) = &self.leased else {
            bail!(Internal, "a model that no trainer serves, renewed");
        };
        self.blocks.forget_prefixes();
        self.model.renew(layout, trained, new_fingerprint())?;
        leased.renewed(change);
        Ok(())
    }

    fn new(
        model: Arc<Model>,
        options: Option<&LoadOptions>,
        metadata: &Metadata,
        text: TextFiles,
        leased: Option<Leased>,
    ) -> Result<Arc<Served>> {
        if let Some(tokenizer) = &text.tokenizer {
            warn_of_ids_without_rows(tokenizer, model.spec().vocab_size);
        }
        let Generation {
            stop_tokens,
            sampling,
        } = generation::read(model.spec(), &metadata.tokenizer, &text)?;
        let chat = ChatText::of_model(text.template, text.tokenizer.as_deref());
        let mut served = Served {
            blocks: Blocks::new(&model, options),
            runner: Runner::new(options.map_or_else(PromptShare::default, prompt_share)),
            roles: roles(model.spec(), text.roles),
            embedding: EmbeddingSettings::read(&metadata.embedding, model.spec().hidden_size),
            model,
            tokenizer: text.tokenizer,
            unread_tokenizer: metadata.tokenizer.unread(),
            chat: Arc::new(chat),
            templates: HostTemplates::new(text.bos, text.eos),
            sampling,
            stop_tokens,
            special: OnceLock::new(),
            grammars: Grammars::default(),
            adapters: Adapters::default(),
            alike: Alike::default(),
            evicted: AtomicU64::new(0),
            expects_long: AtomicBool::new(false),
            leased,
        };
        if let (None, Some(options)) = (&served.leased, options)
            && served.prepare_beside(options)
        {
            served.runner.run_prompts_beside();
        }
        let served = Arc::new(served);
        let weak: Weak<Served> = Arc::downgrade(&served);
        fork::keep_owner_whole(weak);
        Ok(served)
    }

    /// Whether prompts run beside steps. Where all of them do, the place for them is prepared; if that fails, as without room, they do not.
    /// Where only long ones do, [`Served::sequence`] prepares it.
    fn prepare_beside(&self, options: &LoadOptions) -> bool {
        let Some(rows) = self.model.rows_beside() else {
            return false;
        };
        if options.tuning == Tuning::Throughput {
            return true;
        }
        let rows = prompt_share(options).part_beside(rows);
        let prepared = self.run_first_beside(rows, KvType::default());
        if let Err(e) = &prepared {
            tracing::warn!("prompts do not run beside steps: {e}");
        }
        prepared.is_ok()
    }

    /// Runs a prompt of up to `rows` tokens beside steps, so that the next one there finds memory and kernels.
    fn run_first_beside(&self, rows: usize, kind: KvType) -> Result<()> {
        let tokens = vec![0; rows.min(self.model.spec().max_positions)];
        let mut sequence = Sequence::new(&self.blocks, tokens.len(), kind)?;
        // Generations that find no memory meanwhile wait for its end.
        let generating = self.runner.generates(sequence.id());
        let work = NewTokens {
            tokens: &tokens,
            sequence: &mut sequence,
            wanted: Wanted::Last,
        };
        let done = self.runner.run_first_beside(&self.model, work);
        drop(sequence);
        drop(generating);
        done
    }

    /// Runs a long prompt beside steps once, when one may come while another sequence generates: a host with a single sequence never pays for
    /// that. Without room for it now, the first such prompt tries again.
    fn expect_long_prompts(&self, kind: KvType) {
        let expects = self.runner.takes_long_beside() && self.blocks.expect_long();
        if !expects || self.expects_long.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(rows) = self.model.rows_beside() else {
            return;
        };
        if let Err(e) = self.run_first_beside(rows, kind) {
            tracing::debug!("no prompt ran beside steps in advance: {e}");
        }
    }

    /// The weights, without their text side and without the lease of a trainer.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The description of the model and of its text side.
    pub fn describe(&self) -> ServedInfo {
        ServedInfo {
            model: self.model.info().clone(),
            tokenizer: self.tokenizer.is_some(),
            chat_template: self.has_own_template(),
            embedding: self.embedding.clone(),
        }
    }

    /// Holds the weights until the result is dropped: their trainer, if there is one, takes no step meanwhile. Waits for steps that run or
    /// came before, and fails if the call is cancelled meanwhile, or on a thread in which a step runs. Each pass holds them itself: who holds
    /// them does not run tokens, since a step that waits would come between.
    pub fn hold(&self) -> Result<Option<Held>> {
        let leased = self.leased.as_ref();
        leased.map(|leased| leased.hold(call::is_over)).transpose()
    }

    /// Whether it has the weights as they are: false after a step that it could not follow.
    pub fn is_renewed(&self) -> bool {
        self.leased.as_ref().is_none_or(Leased::is_renewed)
    }

    pub(super) fn leased(&self) -> Option<&Leased> {
        self.leased.as_ref()
    }

    /// An empty sequence with room for `capacity` positions, at most those that the model was made for. Takes no memory yet. The second one,
    /// if any has more than [`LONG_PROMPT`](crate::model::LONG_PROMPT) positions, prepares a Hopper GPU for long prompts beside steps, which
    /// takes some 0.1 s once.
    pub fn sequence(&self, capacity: usize, kind: KvType) -> Result<Sequence> {
        let sequence = Sequence::new(&self.blocks, capacity, kind)?;
        self.expect_long_prompts(kind);
        Ok(sequence)
    }

    /// Loads an adapter from a directory in peft's format: `adapter_config.json` and `adapter_model.safetensors`. It takes memory of the
    /// model's device for its factors, in the types that they are stored in. Any number may be loaded, and sequences with different ones run
    /// in the same passes. Fails for an adapter of another base, and on a GPU for one of routed experts or per-layer inputs.
    pub fn load_adapter(&self, path: &Path) -> Result<Arc<LoadedAdapter>> {
        Ok(self.adapters.add(self.model.load_adapter(path)?))
    }

    /// The adapters in memory, in the order in which they were loaded.
    pub fn loaded_adapters(&self) -> Vec<Arc<LoadedAdapter>> {
        self.adapters.loaded()
    }

    pub(super) fn runner(&self) -> &Runner {
        &self.runner
    }

    /// Says that the tokens of `sequence` come one after the other until the result is dropped. Calls of [`Served::run`] by several threads
    /// run in the same passes: what arrives during a pass is in the next one, which waits for all sequences that generate, for half the time
    /// of a step at most. One that comes too late is not waited for during the next passes.
    ///
    /// On the CPU, and in a deterministic model, tokens have the same bits in any pass. On a GPU they may else differ by rounding.
    pub fn generates(&self, sequence: &Sequence) -> Generating<'_> {
        self.runner.generates(sequence.id())
    }

    /// Whether `count` tokens that are known to come next in a sequence that generates should take a step each, rather than a pass of their
    /// own. On a GPU such a pass holds up the other sequences that generate for a step, while it saves this one `count` steps; and it is not
    /// recorded, so for a single token it takes longer than two steps.
    pub fn steps_given(&self, count: usize) -> bool {
        self.model.device().is_cuda() && count < self.runner.generating().max(2)
    }

    /// After a refusal of memory that was reserved for all sequences: drops the positions of `sequence` from `kept` on, and waits until
    /// other generations have ended or made way and `positions` fit. The tokens then have to run again. Returns false, perhaps after it has
    /// dropped positions, if nothing becomes free: no other thread generates, and none has ended a generation within the last second, whose
    /// session may be about to be released. Fails if the call is cancelled.
    ///
    /// The generation that is refused makes way, so that the others come to their ends.
    pub fn make_way(&self, sequence: &mut Sequence, kept: usize, positions: usize) -> Result<bool> {
        if self.kv().reserved().is_none() || !self.runner.may_get_room(sequence.id()) {
            return Ok(false);
        }
        sequence.truncate(kept.min(sequence.len()))?;
        sequence.count_preemption();
        let needed = sequence.bytes_for(positions);
        let fits = || {
            let free = self.kv().reserved().map_or(0, |reserved| reserved.free);
            free + self.blocks.counts().cached_bytes >= needed
        };
        self.runner.wait_for_room(sequence.id(), fits)
    }

    /// Writes the blocks of the prefix index to a file, those that sequences use and those that are cached, for
    /// [`Served::restore_prefixes`] in a later process. The file appears complete or not at all. Sequences go on meanwhile; a block that gives
    /// way to them before it is read is not in the file. Reports the bytes written to the thread's [`call`](crate::base::call), and is
    /// cancelled with it. A trainer's step waits for it.
    pub fn save_prefixes(&self, path: &Path) -> Result<PrefixCounts> {
        let _held = self.hold()?;
        saved::save(&self.blocks, path)
    }

    /// Fills free blocks with those of a file of [`Served::save_prefixes`], on any device, and enters them into the prefix index. They count
    /// as used now, in the order of their last use. No other block gives way: if there is not room for all, those used last are restored,
    /// and prefixes stay without a gap. Blocks that are there already stay.
    ///
    /// Fails, and leaves the index as it was, if the file is damaged or is not of these weights, and if the model keeps no prefixes that no
    /// sequence uses. A call that is cancelled leaves what it has restored. The checksum of a file finds damage and not forgery: sequences
    /// begin with what a file holds as if this model had run it.
    pub fn restore_prefixes(&self, path: &Path) -> Result<RestoredPrefixes> {
        let _held = self.hold()?;
        saved::restore(&self.blocks, path)
    }

    /// Numbers of passes so far.
    pub fn pass_counts(&self) -> PassCounts {
        self.runner.counts()
    }

    /// Blocks of keys and values that sequences hold, in all groups of layers.
    pub fn blocks_used(&self) -> usize {
        self.blocks.counts().blocks_used
    }

    /// Counts of the work since the model was loaded, and of the blocks that it holds now. From any thread at any time; the numbers of passes and those of
    /// blocks may be of slightly different moments.
    pub fn statistics(&self) -> Statistics {
        let Work {
            counts,
            tally,
            generating,
            waiting,
            preemptions,
            recomputed,
        } = self.runner.work();
        let blocks = self.blocks.counts();
        let reserved = self.kv().reserved();
        Statistics {
            passes: counts.passes,
            requests: counts.requests,
            prompt_tokens: tally.prompt,
            prompt_tokens_found: tally.found,
            step_tokens: tally.steps,
            generating,
            waiting,
            preemptions,
            recomputed_tokens: recomputed,
            evicted_tokens: self.evicted.load(Ordering::Relaxed),
            blocks,
            reserved_bytes: reserved.map_or(0, |reserved| reserved.bytes),
            free_bytes: reserved.map_or(0, |reserved| reserved.free),
        }
    }

    /// Counts tokens that a full context has evicted.
    pub fn count_evicted(&self, count: usize) {
        self.evicted.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Refuses tokens that cannot be run, by their texts.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        self.check_ids(tokens)?;
        self.model.check_tokens(tokens)
    }

    /// Refuses ids that the embedding has no rows for, by their texts.
    pub fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        match self.model.without_a_row(tokens) {
            None => Ok(()),
            Some(index) => Err(self.no_row(tokens[index], index)),
        }
    }

    /// The error for a token without a row in the embedding, by its text.
    fn no_row(&self, id: u32, index: usize) -> Error {
        let text = self.tokenizer.as_ref().and_then(|t| t.text_of(id));
        self.model.no_row(id, index, text)
    }

    /// The tokenizer. An error if the model came without one.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let missing = || no_tokenizer(self.unread_tokenizer);
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    /// The text of `tokens`; special tokens are left out if `skip_special`. Ids with a row of the embedding and without a text give none.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        let tokenizer = self.tokenizer()?;
        let rows = self.spec().vocab_size;
        let unknown = |&id: &u32| id as usize >= rows && tokenizer.bytes_of(id).is_err();
        if let Some(index) = tokens.iter().position(unknown) {
            return Err(self.no_row(tokens[index], index));
        }
        let mut known = tokens.to_vec();
        known.retain(|&t| tokenizer.bytes_of(t).is_ok());
        tokenizer.decode(&known, skip_special)
    }

    /// One more than the largest token id: that of the embedding's last row, or of the tokenizer if that has more.
    pub fn token_ids(&self) -> Result<usize> {
        Ok(self.spec().vocab_size.max(self.tokenizer()?.vocab_size()))
    }

    /// The bytes that `token` adds to a text, which need not be whole characters; the name of a special token. None for ids with a row of the
    /// embedding and without a text.
    pub fn token_bytes(&self, token: u32) -> Result<&[u8]> {
        let tokenizer = self.tokenizer()?;
        let ids = self.token_ids()?;
        if token as usize >= ids {
            bail!(
                InvalidArgument,
                "the token is {token}; the ids of the model are 0 to {}",
                ids - 1
            );
        }
        Ok(tokenizer.bytes_of(token).unwrap_or_default())
    }

    /// The tokens that are special or have a role, in order of their ids. The first call renders test messages by the chat template.
    pub fn special_tokens(&self) -> Result<&[SpecialToken]> {
        if let Some(found) = self.special.get() {
            return Ok(found);
        }
        let stops = self.stop_tokens.iter();
        let stops = stops.map(|&token| (TokenRole::EndsGeneration, token));
        let known: Vec<_> = stops.chain(self.roles.iter().copied()).collect();
        let (template, is_own) = (self.chat.template(), self.has_own_template());
        let found = special_tokens(
            self.tokenizer()?,
            template,
            is_own,
            self.chat.form(),
            &known,
        )?;
        Ok(self.special.get_or_init(|| found))
    }

    /// Fails unless `draft` can draft tokens for this model: each id that both tokenizers have must be the same text. Numbers of ids and of
    /// rows may differ. Models of which one has no tokenizer must have equally many rows in their embeddings, and their ids are taken to mean
    /// the same.
    pub fn check_draft_model(&self, draft: &Served) -> Result<()> {
        if let (Some(own), Some(drafts)) = (&self.tokenizer, &draft.tokenizer) {
            return self.alike.check(own, drafts);
        }
        let (own, drafts) = (self.spec().vocab_size, draft.spec().vocab_size);
        if own != drafts {
            bail!(
                InvalidArgument,
                "the draft model has {drafts} tokens, and the model that it drafts for {own}; without both tokenizers the numbers must be equal"
            );
        }
        Ok(())
    }

    /// Compiles a grammar for the model's tokens, of which those without a row in the embedding never come. The first call for a model also
    /// prepares its vocabulary, which takes up to some seconds. See [`Grammar::new`] for what is refused.
    pub fn grammar(&self, source: GrammarSource<'_>) -> Result<Grammar> {
        Grammar::new(self.grammar_vocabulary()?, source)
    }

    fn grammar_vocabulary(&self) -> Result<&Arc<GrammarVocabulary>> {
        let rows = self.spec().vocab_size;
        self.grammars
            .vocabulary(self.tokenizer()?, rows, &self.stop_tokens)
    }

    /// Refuses a grammar that was compiled for another model.
    pub fn check_grammar(&self, grammar: &Grammar) -> Result<()> {
        if !Arc::ptr_eq(grammar.vocabulary().tokenizer(), self.tokenizer()?) {
            bail!(
                InvalidArgument,
                "the grammar was compiled for another model; compile it for the one that follows it"
            );
        }
        Ok(())
    }

    /// The grammar of one call of one of `tools` in an answer of this form, which is kept for when it is asked for again.
    pub fn grammar_of_calls(&self, form: &AnswerForm, tools: &[Value]) -> Result<Arc<Grammar>> {
        let vocabulary = self.grammar_vocabulary()?;
        let mark = |name: &str| vocabulary.mark(name);
        let lark = form.grammar_of_calls(tools, mark)?;
        self.grammars.of_calls(vocabulary, lark)
    }

    /// The chat template; ChatML if the model came without one. A broken template gives its error when it is rendered.
    pub fn chat_template(&self) -> &ChatTemplate {
        self.chat.template()
    }

    /// The model's own chat template with the form of its answers, or those of the Jinja template `source` of a host. The templates of hosts
    /// that were used last are kept.
    pub fn chat_text(&self, source: Option<&str>) -> Result<Arc<ChatText>> {
        match source {
            None => Ok(self.chat.clone()),
            Some(source) => self.templates.get(source, self.tokenizer.as_deref()),
        }
    }

    /// Whether the model brought its own chat template.
    pub fn has_own_template(&self) -> bool {
        !self.chat.is_stand_in()
    }

    /// Sampling defaults of the model's makers: from `generation_config.json`, or a GGUF file's `general.sampling` entries; greedy where
    /// nothing is said.
    pub fn sampling(&self) -> &SamplingOptions {
        &self.sampling
    }

    /// How the model embeds texts, as far as its files say.
    pub fn embedding(&self) -> &EmbeddingSettings {
        &self.embedding
    }

    /// The tokens that end a generation: those of the config, of `generation_config.json` or of GGUF metadata, those that the chat
    /// template writes after an answer, and those that are known by their names to end turns.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }
}

/// The locks that sequences of the child of a fork need, in the order in which code takes them.
impl fork::Held for Served {
    fn hold(&'static self) -> Box<dyn Any> {
        let mut held = vec![
            self.grammars.locked(),
            self.templates.locked(),
            self.alike.locked(),
            self.runner.locked(),
            self.blocks.locked(),
            self.adapters.locked(),
        ];
        held.extend(self.leased.as_ref().map(Leased::locked));
        held.extend(self.model.locked());
        Box::new(held)
    }
}

/// The share of prompts in passes, as a model's options want it.
fn prompt_share(options: &LoadOptions) -> PromptShare {
    PromptShare {
        is_small: options.tuning == Tuning::Latency,
        most: options.prompt_tokens,
        beside: false,
    }
}

/// The roles in the files of the tokenizer, and those of the config for the beginning and the end of a text where these name none.
fn roles(spec: &Spec, mut named: Vec<(TokenRole, u32)>) -> Vec<(TokenRole, u32)> {
    let has = |role: TokenRole| named.iter().any(|&(known, _)| known == role);
    let bos = spec.bos.filter(|_| !has(TokenRole::BeginsText));
    let eos: &[u32] = match has(TokenRole::EndsText) {
        true => &[],
        false => &spec.eos,
    };
    let ends = eos.iter().map(|&token| (TokenRole::EndsText, token));
    let begins = bos.map(|token| (TokenRole::BeginsText, token));
    let config: Vec<_> = begins.into_iter().chain(ends).collect();
    named.extend(config);
    named
}

/// A number that tells weights under training from all others.
fn new_fingerprint() -> u64 {
    RandomState::new().hash_one(0)
}

/// Warns of tokens that cannot be run: some models have names for pictures, which bring embeddings of their own.
fn warn_of_ids_without_rows(tokenizer: &Tokenizer, rows: usize) {
    let count = tokenizer.vocab_size().saturating_sub(rows);
    if count > 0 {
        tracing::warn!(
            "the embedding has {rows} rows, and the tokenizer ids up to {}: using one of {count} past the embedding is an error",
            tokenizer.vocab_size() - 1
        );
    }
}
