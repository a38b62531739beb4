//! Embeddings of texts and lists of tokens: pooled hidden rows, whole rows, and their normalization. Runs sequences of a model by themselves;
//! knows no conversation.

use std::ops::Range;

use crate::base::error::{Error, bail, err};
use crate::base::{ErrorKind, Result, call, memory};
use crate::checkpoint::POOLING_FILE;
use crate::engine::{NewTokens, Sequence, Served};
use crate::model::{KvType, Output, Pooling, Scratch, Wanted};

/// Most tokens of a call in a pass while sequences generate, which wait for it.
const SHARED_ROWS: usize = 64;
/// The least length that an embedding is divided by, as in sentence-transformers.
const LEAST_LENGTH: f64 = 1e-12;

/// The prompt that goes before each text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbedPrompt<'a> {
    /// The model's default prompt; none if it has none.
    #[default]
    AsModel,
    /// The model's prompt of this name.
    Named(&'a str),
    /// This text.
    Text(&'a str),
}

/// Options of embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbedOptions<'a> {
    /// The rows that make an embedding; `None` for those that the model asks for.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are divided by their length; `None` for what the model asks for. Rows without pooling are normalized only if this
    /// says so.
    pub normalize: Option<bool>,
    /// Number of first elements that are kept, before the normalization; 0 for all.
    pub dimensions: usize,
    /// The prompt of texts.
    pub prompt: EmbedPrompt<'a>,
    /// Cuts texts with more tokens than the model takes, rather than refusing them.
    pub truncate: bool,
    /// Element type of keys and values, which live while a text runs.
    pub kv: KvType,
    /// Keeps the texts from sharing the beginning of their tokens with others, as for
    /// [`SessionOptions::private`](super::SessionOptions::private).
    pub private: bool,
}

/// Texts that are checked and ready to be embedded.
pub struct Embedding<'m> {
    model: &'m Served,
    pooling: Pooling,
    normalize: bool,
    dimensions: usize,
    /// Tokens of each text.
    texts: Vec<Vec<u32>>,
    /// First tokens of each text that the mean leaves out.
    skipped: usize,
    kv: KvType,
    /// Whether texts begin with blocks of others.
    shares: bool,
}

impl<'m> Embedding<'m> {
    /// Prepares to embed `texts`. Each is put after its prompt, and encoded with the tokens that the model expects around every text, as
    /// sentence-transformers does. The names of special tokens in it become those tokens.
    pub fn of_texts(
        model: &'m Served,
        texts: &[&str],
        options: &EmbedOptions<'_>,
    ) -> Result<Embedding<'m>> {
        let mut embedding = Self::new(model, options)?;
        let tokenizer = model.tokenizer()?;
        let prompt = embedding.prompt(options.prompt)?;
        let most = embedding.most();
        if embedding.pooling == Pooling::Mean && !model.embedding().include_prompt {
            let mut tokens = tokenizer.encode(prompt, true)?;
            // A token that ends every text is not of the prompt.
            tokens.pop_if(|last| tokenizer.is_special(*last));
            embedding.skipped = match prompt {
                "" => 0,
                _ => tokens.len(),
            };
        }
        let around = match options.truncate {
            true => tokenizer.around()?,
            false => Default::default(),
        };
        for (i, text) in texts.iter().enumerate() {
            let tokens = tokenizer.encode(&[prompt, text].concat(), true);
            let mut tokens = tokens.map_err(|e| numbered(i, e))?;
            if options.truncate && tokens.len() > most {
                tokens.truncate(most.saturating_sub(around.1.len()));
                tokens.extend_from_slice(&around.1);
            }
            embedding.add(i, tokens)?;
        }
        Ok(embedding)
    }

    /// Prepares to embed lists of tokens as they are.
    pub fn of_tokens(
        model: &'m Served,
        texts: &[&[u32]],
        options: &EmbedOptions<'_>,
    ) -> Result<Embedding<'m>> {
        let mut embedding = Self::new(model, options)?;
        if options.prompt != EmbedPrompt::AsModel {
            bail!(
                InvalidArgument,
                "a prompt for lists of tokens; it goes before texts: put its tokens into the lists"
            );
        }
        let most = embedding.most();
        for (i, &tokens) in texts.iter().enumerate() {
            let count = match options.truncate {
                true => tokens.len().min(most),
                false => tokens.len(),
            };
            let mut own = memory::with_room(count)?;
            own.extend_from_slice(&tokens[..count]);
            embedding.add(i, own)?;
        }
        Ok(embedding)
    }

    fn new(model: &'m Served, options: &EmbedOptions<'_>) -> Result<Embedding<'m>> {
        let settings = model.embedding();
        let check_own = |what: &str| match &settings.fault {
            None => Ok(()),
            Some(e) => Err(e.clone().within(format_args!(
                "the model's own {what} cannot be done; name another"
            ))),
        };
        if options.pooling.is_none() {
            check_own("pooling")?;
        }
        let Some(pooling) = options.pooling.or(settings.pooling) else {
            bail!(
                InvalidArgument,
                "the model names no pooling: it has no {POOLING_FILE}; choose last, mean, cls or none"
            );
        };
        let normalize = match (options.normalize, pooling) {
            (Some(normalize), _) => normalize,
            (None, Pooling::None) => false,
            (None, _) => {
                check_own("normalization")?;
                settings.normalize
            }
        };
        let width = model.spec().hidden_size;
        if options.dimensions > width {
            bail!(
                InvalidArgument,
                "{} dimensions of an embedding that has {width}; choose up to {width}, or 0 for all",
                options.dimensions
            );
        }
        Ok(Embedding {
            model,
            pooling,
            normalize,
            dimensions: match options.dimensions {
                0 => width,
                some => some,
            },
            texts: Vec::new(),
            skipped: 0,
            kv: options.kv,
            shares: pooling == Pooling::Last && !options.private,
        })
    }

    /// The text of a prompt.
    fn prompt<'a>(&self, prompt: EmbedPrompt<'a>) -> Result<&'a str>
    where
        'm: 'a,
    {
        let settings = self.model.embedding();
        match (prompt, &settings.default_prompt) {
            (EmbedPrompt::Text(text), _) => Ok(text),
            (EmbedPrompt::Named(name), _) => settings.prompt(name),
            (EmbedPrompt::AsModel, Some(name)) => settings.prompt(name),
            (EmbedPrompt::AsModel, None) => Ok(""),
        }
    }

    /// Most tokens of a text.
    fn most(&self) -> usize {
        let context = self.model.spec().max_positions;
        let own = self.model.embedding().max_tokens;
        own.map_or(context, |own| own.min(context))
    }

    fn add(&mut self, index: usize, tokens: Vec<u32>) -> Result<()> {
        let (most, count) = (self.most(), tokens.len());
        let refused = match count {
            0 => err!(
                InvalidArgument,
                "no tokens; an embedding takes at least one"
            ),
            _ if count > most => err!(
                ContextFull,
                "{count} tokens, and the model takes {most}; shorten it, or set truncate, which cuts it"
            ),
            _ if count <= self.skipped => err!(
                InvalidArgument,
                "no token after the {} of the prompt, which the mean leaves out",
                self.skipped
            ),
            _ => {
                let checked = self.model.check_tokens(&tokens);
                checked.map_err(|e| numbered(index, e))?;
                self.texts.push(tokens);
                return Ok(());
            }
        };
        Err(numbered(index, refused))
    }

    /// Elements of a row of the result.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// Number of texts.
    pub fn texts(&self) -> usize {
        self.texts.len()
    }

    /// Tokens of a text, in their order.
    pub fn tokens(&self, text: usize) -> &[u32] {
        &self.texts[text]
    }

    /// Rows of the result that a text has: one, or one for each of its tokens without pooling.
    pub fn rows_of(&self, text: usize) -> usize {
        match self.pooling {
            Pooling::None => self.texts[text].len(),
            Pooling::Last | Pooling::Mean | Pooling::Cls => 1,
        }
    }

    /// Rows of the result.
    pub fn rows(&self) -> usize {
        (0..self.texts()).map(|text| self.rows_of(text)).sum()
    }

    /// Writes the embeddings, `[rows, dimensions]`, in the order of the texts.
    ///
    /// Passes run several texts together, beside those of other threads, and a long text in parts. Keys and values take memory while their
    /// text runs; where memory is short, fewer texts run together. On the CPU an embedding has the same bits however many texts there are.
    /// Embeddings by the last token begin with blocks that other texts and sessions have left, and leave theirs. An embedding is that of one
    /// state of weights under training; two embeddings may be of different ones. If the call fails, `out` may hold some of the embeddings.
    pub fn run(&self, out: &mut [f32]) -> Result<()> {
        let elements = self.rows() * self.dimensions;
        if out.len() != elements {
            bail!(
                InvalidArgument,
                "room for {} numbers; {} rows of {} take {elements}",
                out.len(),
                self.rows(),
                self.dimensions
            );
        }
        let (mut waiting, mut row) = (Vec::with_capacity(self.texts()), 0);
        for index in 0..self.texts() {
            let rows = self.rows_of(index);
            waiting.push((index, row..row + rows));
            row += rows;
        }
        let counts = self.texts.iter().map(|tokens| self.run_of(tokens).len());
        call::expect(counts.map(|count| count as u64).sum());
        waiting.reverse();
        let (mut reading, mut scratch) = (Vec::<Reading<'_>>::new(), Scratch::new());
        // Texts that run at a time, which a refusal of memory makes fewer.
        let mut most_texts = usize::MAX;
        loop {
            let most = match self.model.statistics().generating {
                0 => self.model.pass_rows(),
                _ => SHARED_ROWS,
            };
            let mut rows: usize = reading.iter().map(Reading::left).sum();
            while rows < most
                && reading.len() < most_texts
                && let Some((index, to)) = waiting.pop()
            {
                reading.push(self.start(index, to)?);
                rows += reading[reading.len() - 1].left();
            }
            if reading.is_empty() {
                return Ok(());
            }
            if let Err(e) = self.read(&mut reading, most, &mut scratch, out) {
                self.make_room(e, &mut reading, &mut waiting)?;
                most_texts = reading.len();
            }
            call::check()?;
            reading.retain(|one| one.left() > 0);
        }
    }

    /// The tokens of a text that run.
    fn run_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        match self.pooling {
            // No token sees those after it.
            Pooling::Cls => &tokens[..1],
            Pooling::Last | Pooling::Mean | Pooling::None => tokens,
        }
    }

    fn start(&self, index: usize, to: Range<usize>) -> Result<Reading<'_>> {
        let tokens = self.run_of(&self.texts[index]);
        // The length of the whole text decides between short and long RoPE tables.
        let mut sequence = self.model.sequence(self.texts[index].len(), self.kv)?;
        sequence.set_sharing(self.shares);
        Ok(Reading {
            index,
            to,
            tokens,
            run: 0,
            weights: sequence.weights(),
            sequence,
            sums: Vec::new(),
        })
    }

    /// After a refusal of memory: lets the later half of the texts wait, or, if there is only one, lets it wait for generations.
    fn make_room(
        &self,
        error: Error,
        reading: &mut Vec<Reading<'_>>,
        waiting: &mut Vec<(usize, Range<usize>)>,
    ) -> Result<()> {
        if !matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::OverBudget) {
            return Err(error);
        }
        if reading.len() > 1 {
            let later = reading.drain(reading.len().div_ceil(2)..).rev();
            waiting.extend(later.map(|one| (one.index, one.to)));
            return Ok(());
        }
        let Some(alone) = reading.first_mut() else {
            return Err(error);
        };
        let count = alone.tokens.len();
        match self.model.make_way(&mut alone.sequence, 0, count)? {
            true => alone.restart(),
            false => Err(numbered(alone.index, error)),
        }
    }

    /// Runs up to `most` tokens of these texts, in their order, and stores the rows of those that end.
    fn read(
        &self,
        reading: &mut [Reading<'_>],
        most: usize,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) -> Result<()> {
        let mut room = most;
        let (mut work, mut counts) = (Vec::new(), Vec::new());
        for one in reading.iter_mut() {
            let count = one.left().min(room);
            room -= count;
            if count == 0 {
                break;
            }
            let ends = count == one.left();
            counts.push(count);
            work.push(NewTokens {
                tokens: &one.tokens[one.run..one.run + count],
                sequence: &mut one.sequence,
                wanted: match self.pooling {
                    Pooling::Mean | Pooling::None => Wanted::AllHidden,
                    Pooling::Last | Pooling::Cls if ends => Wanted::LastHidden,
                    Pooling::Last | Pooling::Cls => Wanted::Nothing,
                },
            });
        }
        let outputs = self.model.run(work, false, scratch, &mut Vec::new())?;
        for ((one, count), output) in reading.iter_mut().zip(counts).zip(outputs) {
            let output = output.map_err(|e| numbered(one.index, e))?;
            let keeps_rows = matches!(self.pooling, Pooling::Mean | Pooling::None);
            if keeps_rows && one.run > 0 && one.sequence.weights() != one.weights {
                // Rows of the weights before are not of this embedding.
                one.restart()?;
                continue;
            }
            one.weights = one.sequence.weights();
            let rows = match output {
                Output::Hidden(rows) => rows,
                _ => Vec::new(),
            };
            self.store(one, &rows, out)?;
            one.run += count;
        }
        Ok(())
    }

    /// Takes the hidden rows of the next tokens of a text. The mean adds them in their order, however they are divided.
    fn store(&self, one: &mut Reading<'_>, rows: &[f32], out: &mut [f32]) -> Result<()> {
        let (width, dimensions) = (self.model.spec().hidden_size, self.dimensions);
        let rows = rows.chunks_exact(width);
        let row_of = |row: usize| row * dimensions..(row + 1) * dimensions;
        if self.pooling != Pooling::Mean {
            let first = match self.pooling {
                Pooling::None => one.to.start + one.run,
                _ => one.to.start,
            };
            for (i, row) in rows.enumerate() {
                let row = row[..dimensions].iter().map(|&x| f64::from(x));
                self.finish(row, &mut out[row_of(first + i)]);
            }
            return Ok(());
        }
        if one.sums.is_empty() {
            memory::make_room(&mut one.sums, dimensions)?;
            one.sums.resize(dimensions, 0.0);
        }
        let ends = rows.len() == one.left();
        for (i, row) in rows.enumerate() {
            if one.run + i >= self.skipped {
                let sums = one.sums.iter_mut().zip(row);
                sums.for_each(|(sum, &x)| *sum += f64::from(x));
            }
        }
        if ends {
            let count = (one.tokens.len() - self.skipped) as f64;
            let mean = one.sums.iter().map(|sum| sum / count);
            self.finish(mean, &mut out[row_of(one.to.start)]);
        }
        Ok(())
    }

    /// Writes a row, normalized if that is asked for.
    fn finish(&self, row: impl Iterator<Item = f64> + Clone, out: &mut [f32]) {
        let length = match self.normalize {
            true => row.clone().map(|x| x * x).sum::<f64>().sqrt(),
            false => 1.0,
        };
        let length = length.max(LEAST_LENGTH);
        for (to, x) in out.iter_mut().zip(row) {
            *to = (x / length) as f32;
        }
    }
}

/// A text that is read.
struct Reading<'a> {
    index: usize,
    /// Its rows of the result.
    to: Range<usize>,
    tokens: &'a [u32],
    /// Tokens that have run.
    run: usize,
    sequence: Sequence,
    /// The weights that have run them.
    weights: u64,
    /// Sums of the hidden rows, for the mean.
    sums: Vec<f64>,
}

impl Reading<'_> {
    fn left(&self) -> usize {
        self.tokens.len() - self.run
    }

    fn restart(&mut self) -> Result<()> {
        self.run = 0;
        self.sums.clear();
        self.sequence.truncate(0)
    }
}

fn numbered(text: usize, error: Error) -> Error {
    error.within(format_args!("text {text}"))
}
