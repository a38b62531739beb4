//! Data for training, runs over it, and `nvfp4 train` from outside: the learned parts of rows, runs that are stopped, killed or out of
//! disk, and errors for bad input.

#[path = "training_data/forms.rs"]
mod forms;
#[path = "training_data/runs.rs"]
mod runs;
#[path = "training_data/weights.rs"]
mod weights;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use NVFP4::base::call::Cancel;
use NVFP4::model::training::{Source, SourceText};
use NVFP4::ops::Device;
use NVFP4::text::{ChatTemplate, Tokenizer};
use NVFP4::train::data::{self, Data, Document, Long, Options, Window, Windows};
use NVFP4::train::run::{self, Ending, EvaluationSet, Event, Inputs, Observer, RunLock};
use NVFP4::train::{Config, Decay, MemoryReport, Row, Samples, Schedule, Trainer};
use serde_json::Value;

/// The manner of Qwen3: only answers to the last question have a part for reasoning, an empty one if there was none.
const THINKING: &str = "\
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}\
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n' ~ (m.reasoning_content or '') ~ '\\n</think>\\n\\n' }}{%- endif %}\
{{ m.content ~ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// A folder of its own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("nvfp4-data-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(template: Option<&str>) -> SourceText {
    let tokenizer = Tokenizer::from_file(&golden("text/tokenizer.json")).unwrap();
    let id = |name| tokenizer.id_of(name).unwrap();
    SourceText {
        eos: Some(id("<|endoftext|>")),
        stop_tokens: vec![id("<|endoftext|>"), id("<|im_end|>")],
        template: template.map(|t| ChatTemplate::from_jinja(t, None, None).unwrap()),
        tokenizer: Arc::new(tokenizer),
    }
}

fn read(files: &[PathBuf], text: &SourceText, options: &Options) -> Result<Data, String> {
    data::read(files, text, 620, options).map_err(|e| e.to_string())
}

/// A document as text, with the learned parts in brackets.
fn marked(text: &SourceText, document: &Document) -> String {
    let mut out = String::new();
    let mut at = 0;
    while at < document.tokens.len() {
        let learned = document.learned[at];
        let same = document.learned[at..].iter().take_while(|l| **l == learned);
        let end = at + same.count();
        let said = text
            .tokenizer
            .decode(&document.tokens[at..end], false)
            .unwrap();
        out += &if learned { format!("[{said}]") } else { said };
        at = end;
    }
    out
}

fn rows_of(folder: &Folder, name: &str, content: &str, text: &SourceText) -> Vec<String> {
    let file = folder.file(name, content);
    let data = read(&[file], text, &Options::default()).unwrap();
    data.documents().iter().map(|d| marked(text, d)).collect()
}

const CONVERSATION: &str = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}, {"role": "assistant", "content": "four", "reasoning_content": "hm"}, {"role": "user", "content": "never answered"}]}"#;

#[test]
fn only_answers_are_learned() {
    let folder = Folder::new("answers");
    let chatml = ChatTemplate::chatml();
    let text = text(Some(chatml.source()));
    assert_eq!(
        rows_of(&folder, "a.jsonl", CONVERSATION, &text),
        [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>]\n\
             <|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n"
        ]
    );
    // Names of special tokens are only names, and lines keep their spaces.
    assert_eq!(
        rows_of(&folder, "b.tsv", "# none\na\t b <|im_end|> \n", &text),
        ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[ b <|im_end|> <|im_end|>]\n"]
    );
    let file = folder.file("c.tsv", "a\tb <|im_end|>\n");
    let data = read(&[file], &text, &Options::default()).unwrap();
    let ends = data.documents()[0].tokens.iter().filter(|&&t| t == 617);
    assert_eq!(ends.count(), 2, "those of the template alone");
    assert_eq!(
        rows_of(
            &folder,
            "d.jsonl",
            "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"text\": \"all of it\"}",
            &text
        ),
        [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n",
            "[all of it<|endoftext|>]"
        ]
    );
}

#[test]
fn answers_that_a_template_rewrites_are_learned_as_they_are_given() {
    let folder = Folder::new("rewritten");
    let text = text(Some(THINKING));
    let before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(
        rows_of(&folder, "a.jsonl", CONVERSATION, &text),
        [
            format!("{before}[<think>\n\n</think>\n\ntwo<|im_end|>]\n"),
            format!(
                "{before}two<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[<think>\nhm\n</think>\n\nfour<|im_end|>]\n"
            )
        ]
    );
    // A prompt that begins with reasoning, which the history is without.
    let forced = THINKING.replace("loop.index0 > ns.last", "false").replace(
        "'<|im_start|>assistant\\n' }}{%- endif",
        "'<|im_start|>assistant\\n<think>\\n' }}{%- endif",
    );
    let file = folder.file("b.jsonl", CONVERSATION);
    let error = read(
        std::slice::from_ref(&file),
        &self::text(Some(&forced)),
        &Options::default(),
    )
    .unwrap_err();
    assert!(
        error.contains("b.jsonl line 1")
            && error.contains("in another way than its prompt for the answer begins"),
        "{error}"
    );
    // Unless the template has a switch for it.
    let optional = forced.replace(
        "'<|im_start|>assistant\\n<think>\\n' }}",
        "'<|im_start|>assistant\\n' ~ ('' if enable_thinking is false else '<think>\\n') }}",
    );
    let data = read(&[file], &self::text(Some(&optional)), &Options::default()).unwrap();
    assert_eq!(data.documents().len(), 2);
}

#[test]
fn without_a_template_a_target_follows_its_prompt() {
    let folder = Folder::new("plain");
    let text = text(None);
    assert_eq!(
        rows_of(&folder, "a.tsv", "a\tb\n", &text),
        ["a[b<|endoftext|>]"]
    );
    let all = Options {
        learn_all: true,
        ..Options::default()
    };
    let file = folder.file("b.tsv", "a\tb\n");
    let data = read(&[file], &text, &all).unwrap();
    assert_eq!(marked(&text, &data.documents()[0]), "[ab<|endoftext|>]");
    // A conversation too, whatever its template.
    let file = folder.file("b.jsonl", CONVERSATION);
    let data = read(&[file], &self::text(Some(THINKING)), &all).unwrap();
    let said = marked(&text, &data.documents()[0]);
    assert!(
        said.starts_with("[<|im_start|>system") && said.ends_with("never answered<|im_end|>\n]"),
        "{said}"
    );
    // A text is cut into windows, and no token is lost.
    let long: String = (0..100).map(|i| format!("number {i} of many. ")).collect();
    let file = folder.file("c.txt", &long);
    let options = Options {
        window: 64,
        ..Options::default()
    };
    let data = read(&[file], &text, &options).unwrap();
    let tokens: Vec<u32> = data
        .documents()
        .iter()
        .flat_map(|d| d.tokens.clone())
        .collect();
    assert_eq!(
        text.tokenizer.decode(&tokens, false).unwrap(),
        long + "<|endoftext|>"
    );
    assert!(
        data.documents()
            .iter()
            .all(|d| (32..=64).contains(&d.tokens.len()))
    );
}

#[test]
fn bad_rows_are_named_or_counted() {
    let folder = Folder::new("bad");
    let text = text(None);
    let bad: String = (0..10).map(|i| format!("no tab {i}\n")).collect();
    let file = folder.file("a.tsv", format!("a\tb\n\n{bad}c\td\n"));
    let error = read(std::slice::from_ref(&file), &text, &Options::default()).unwrap_err();
    for words in [
        "10 of 12 rows cannot be used",
        "a.tsv line 3: 0 tabs",
        "a.tsv line 8: 0 tabs",
        "and 4 more",
        "--skip-bad-rows",
    ] {
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
    let skips = Options {
        skip_bad_rows: true,
        ..Options::default()
    };
    let data = read(&[file], &text, &skips).unwrap();
    assert_eq!((data.report().rows, data.report().bad_rows), (12, 10));
    assert_eq!(data.documents().len(), 2);

    for (name, content, words) in [
        ("empty.tsv", "", "has no row: it is empty"),
        (
            "comments.tsv",
            "# nothing\n\n",
            "only blank lines and comments",
        ),
        (
            "row.jsonl",
            "{\"text\": \"\"}\n",
            "line 1: the text is empty",
        ),
        ("a.xlsx", "a,b\n", "its name does not say what it holds"),
    ] {
        let file = folder.file(name, content);
        let error = read(&[file], &text, &Options::default()).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    let file = folder.file("all.tsv", "x\n");
    let error = read(&[file], &text, &skips).unwrap_err();
    assert!(error.contains("none of 1 rows can be used"), "{error}");
    // Tokens that the model has no row for.
    let file = folder.file("chat.jsonl", CONVERSATION);
    let error = data::read(&[file], &text, 600, &Options::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("chat.jsonl line 1: it has '<|im_"),
        "{error}"
    );
    assert!(
        error.to_string().contains("and the embedding has 600 rows"),
        "{error}"
    );
    // Rows without such tokens are learned: the names of ChatML come last in the vocabulary.
    let mixed = format!("{CONVERSATION}\n{{\"text\": \"abc\"}}\n");
    let file = folder.file("mixed.jsonl", mixed);
    let data = data::read(&[file], &text, 616, &skips).unwrap();
    assert_eq!((data.report().rows, data.report().bad_rows), (2, 1));
}

#[test]
fn long_rows_are_refused_cut_or_dropped() {
    let folder = Folder::new("long");
    let text = text(None);
    let (long, asked) = ("many words ".repeat(30), "long question ".repeat(30));
    let file = folder.file("a.tsv", format!("a\tb\nc\t{long}\n{asked}\td\n"));
    let read = |long| {
        let options = Options {
            window: 32,
            long,
            ..Options::default()
        };
        read(std::slice::from_ref(&file), &text, &options)
    };
    let error = read(Long::Refuse).unwrap_err();
    assert!(
        error.contains("2 of 3 rows are too long")
            && error.contains("line 2: ")
            && error.contains("a window has 32"),
        "{error}"
    );
    let cut = read(Long::Truncate).unwrap();
    assert_eq!((cut.report().truncated, cut.report().dropped), (1, 1));
    assert_eq!(cut.documents()[1].tokens.len(), 32);
    let dropped = read(Long::Drop).unwrap();
    assert_eq!(
        (dropped.report().dropped, dropped.documents().len()),
        (2, 1)
    );
}

#[test]
fn a_share_is_set_aside_by_the_row() {
    let folder = Folder::new("share");
    let text = text(Some(THINKING));
    let file = folder.file("a.jsonl", format!("{CONVERSATION}\n").repeat(50));
    let all = read(&[file], &text, &Options::default()).unwrap();
    assert_eq!(all.documents().len(), 100);
    let (rest, taken) = all.clone().split(0.1).unwrap();
    assert_eq!((rest.documents().len(), taken.documents().len()), (90, 10));
    // Both documents of a row go together.
    let lines: Vec<usize> = taken.documents().iter().map(|d| d.origin.1).collect();
    assert!(lines.chunks_exact(2).all(|pair| pair[0] == pair[1]));
    assert!(all.split(0.999).is_err());
}

/// Sentences of a few words; a small model learns which words follow which.
fn sentences(count: usize) -> String {
    let words = [
        ["The", "A", "Every", "No"],
        ["quick", "lazy", "small", "red"],
        ["fox", "dog", "bird", "cat"],
        ["sees", "likes", "hears", "follows"],
    ];
    let draw = |i: usize| NVFP4::format::random::bits(5, i as u64) as usize % 4;
    (0..count)
        .map(|i| {
            let said: Vec<_> = words
                .iter()
                .enumerate()
                .map(|(j, w)| w[draw(4 * i + j)])
                .collect();
            format!("{}.\n", said.join(" "))
        })
        .collect()
}

fn model_text(source: &Source) -> SourceText {
    source.text().unwrap()
}

/// Windows that pack several documents have the loss of the documents alone.
#[test]
fn packed_and_unpacked_losses_agree() {
    let folder = Folder::new("packed");
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let text = model_text(&source);
    let rows: String = sentences(40)
        .lines()
        .map(|l| l.replacen(' ', "\t", 1) + "\n")
        .collect();
    let file = folder.file("a.tsv", rows);
    let mut trainer =
        Trainer::new(&Device::cpu(Some(2)).unwrap(), &source, &Config::default()).unwrap();
    let mut losses = Vec::new();
    for packed in [true, false] {
        let options = Options {
            window: 128,
            packed,
            ..Options::default()
        };
        let data = data::read(std::slice::from_ref(&file), &text, 320, &options).unwrap();
        let windows = data.windows().unwrap();
        assert_eq!(windows.len() == 40, !packed);
        let batches: Vec<_> = windows.all().iter().map(Window::batch).collect();
        losses.push(trainer.evaluate(&batches, false).unwrap());
    }
    // Sums of some hundred f64, of f32 values that differ by the order of sums.
    assert!((losses[0] / losses[1] - 1.0).abs() < 1e-6, "{losses:?}");
}

/// Stops a run after a step, and records events.
struct Listener {
    stop: Cancel,
    after: u64,
    rows: Vec<Row>,
    said: Vec<String>,
}

impl Listener {
    fn new(after: u64) -> Listener {
        Listener {
            stop: Cancel::new(),
            after,
            rows: Vec::new(),
            said: Vec::new(),
        }
    }
}

impl Observer for Listener {
    fn hear(&mut self, event: &Event<'_>) {
        match event {
            Event::Step { row, .. } => {
                self.rows.push((*row).clone());
                if row.step == self.after {
                    self.stop.cancel();
                }
            }
            Event::Warning { message, .. } => self.said.push((*message).to_owned()),
            Event::Sample { answer, .. } => self.said.push((*answer).to_owned()),
            _ => {}
        }
    }
}

struct Setting {
    source: Source,
    inputs: Inputs,
    config: Config,
}

impl Setting {
    fn new(folder: &Folder, rate: f64) -> Setting {
        let source = Source::open(&golden("model/qwen3_tied")).unwrap();
        let text = model_text(&source);
        let options = Options {
            window: 64,
            seed: 7,
            ..Options::default()
        };
        let file = folder.file("data.txt", sentences(60));
        let data = data::read(&[file], &text, 320, &options).unwrap();
        let files = data.report().files.clone();
        let (data, evaluation) = data.split(0.2).unwrap();
        let mut config = Config {
            steps: 20,
            schedule: Schedule {
                warmup: 2,
                decay: Decay::Cosine,
                floor: 0.1,
            },
            ..Config::default()
        };
        config.optimizer.rate = rate;
        Setting {
            source,
            inputs: Inputs {
                windows: data.windows().unwrap(),
                evaluation: vec![EvaluationSet {
                    name: "eval".to_owned(),
                    windows: evaluation.windows().unwrap(),
                }],
                files,
                seed: 7,
            },
            config,
        }
    }

    fn run(
        &self,
        directory: &Path,
        after: u64,
        resume: bool,
        batch: usize,
    ) -> Result<(Listener, Ending), String> {
        let device = Device::cpu(Some(2)).unwrap();
        let (mut trainer, at) = match resume {
            false => (
                Trainer::new(&device, &self.source, &self.config).unwrap(),
                None,
            ),
            true => {
                let checkpoints = directory.join(run::CHECKPOINTS);
                let (trainer, at) = Trainer::resume(&device, &self.source, &checkpoints).unwrap();
                (trainer, Some(at))
            }
        };
        let mut listener = Listener::new(after);
        let text = model_text(&self.source);
        let samples = Samples::new(&["The quick".to_owned()], 4, &text).unwrap();
        let lock = RunLock::take(directory).unwrap();
        let options = run::Options {
            directory: directory.to_owned(),
            lock: &lock,
            batch,
            accumulate: 2,
            save_every: 4,
            keep: 2,
            evaluate_every: 5,
            keep_best: false,
            patience: None,
            tensorboard: false,
            samples: Some((samples, &text)),
            stop: listener.stop.clone(),
            stop_file: None,
        };
        let mut memory = MemoryReport::new(&device);
        memory.model_loaded();
        let ended = run::run(
            &mut trainer,
            &self.inputs,
            &options,
            at.as_ref(),
            &mut memory,
            &mut listener,
        );
        ended
            .map(|ended| (listener, ended.ending))
            .map_err(|e| e.to_string())
    }
}

fn states(directory: &Path) -> Vec<u8> {
    let checkpoints = NVFP4::train::checkpoint::list(&directory.join(run::CHECKPOINTS)).unwrap();
    let (step, path) = checkpoints.last().unwrap();
    assert_eq!(*step, 20);
    fs::read(path.join("state.bin")).unwrap()
}

/// Columns that do not depend on the clock.
fn losses(directory: &Path) -> Vec<String> {
    let table = fs::read_to_string(directory.join("loss.csv")).unwrap();
    let without_times = |line: &str| line.rsplitn(3, ',').last().unwrap().to_owned();
    table.lines().map(without_times).collect()
}

/// A run that is stopped at any point and resumed has the bits of one that is not.
#[test]
fn a_run_that_resumes_is_the_run_that_never_stopped() {
    let folder = Folder::new("resumed");
    let setting = Setting::new(&folder, 3e-3);
    let whole = folder.path("whole");
    let (listener, ending) = setting.run(&whole, 99, false, 2).unwrap();
    assert_eq!(ending, Ending::Finished);
    assert_eq!(listener.rows.len(), 20);
    assert!(listener.rows[19].eval_loss_delivered.is_some());
    for stop in [7, 10] {
        let parts = folder.path(&format!("parts-{stop}"));
        let (listener, ending) = setting.run(&parts, stop, false, 2).unwrap();
        assert_eq!(
            (ending, listener.rows.len()),
            (Ending::Stopped, stop as usize)
        );
        // Steps after the checkpoint, as before a kill, are not in the table twice.
        let table = parts.join("loss.csv");
        let text = fs::read_to_string(&table).unwrap();
        let last = text.lines().last().unwrap();
        let more = last.replacen(&stop.to_string(), &(stop + 1).to_string(), 1);
        fs::write(&table, format!("{text}{more}\n")).unwrap();
        let (_, ending) = setting.run(&parts, 99, true, 2).unwrap();
        assert_eq!(ending, Ending::Finished);
        assert_eq!(states(&parts), states(&whole));
        assert_eq!(losses(&parts), losses(&whole));
    }
    // Reports. The library draws no picture: its observer does.
    assert!(!whole.join("loss.svg").exists());
    let memory: Value =
        serde_json::from_slice(&fs::read(whole.join("memory.json")).unwrap()).unwrap();
    let phases: Vec<_> = memory["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["phase"].as_str().unwrap())
        .collect();
    assert_eq!(
        phases,
        [
            "start",
            "model_loaded",
            "batch_ready",
            "zero_grad_done",
            "backward_done",
            "optimizer_step_done"
        ]
    );
    assert!(
        memory["phases"][4]["tags"]["scratch"]["current"]
            .as_u64()
            .unwrap()
            > 0
    );
}

#[test]
fn a_run_on_other_data_is_not_resumed() {
    let folder = Folder::new("other");
    let mut setting = Setting::new(&folder, 3e-3);
    let place = folder.path("run");
    setting.run(&place, 5, false, 1).unwrap();
    let error = setting.run(&place, 99, true, 2).err().unwrap();
    assert!(
        error.contains("2 windows in a batch instead of 1"),
        "{error}"
    );
    setting.inputs.files[0].checksum = "0".to_owned();
    let error = setting.run(&place, 99, true, 1).err().unwrap();
    assert!(error.contains("data.txt has another content"), "{error}");
    setting.inputs.files.clear();
    let error = setting.run(&place, 99, true, 1).err().unwrap();
    assert!(error.contains("data.txt is not among the data"), "{error}");
    let mut setting = Setting::new(&folder, 3e-3);
    let mut windows: Vec<Window> = setting.inputs.windows.all().to_vec();
    windows[0].tokens[3] ^= 1;
    setting.inputs.windows = Windows::new(windows).unwrap();
    let error = setting.run(&place, 99, true, 1).err().unwrap();
    assert!(
        error.contains("the tokens, the labels or their weights are others"),
        "{error}"
    );
}

/// A rate that is too low for the stored precision causes a warning with the measured share; a sufficient rate does not.
#[test]
fn a_rate_below_what_is_stored_is_a_warning() {
    let folder = Folder::new("rate");
    let said = |rate| {
        let setting = Setting::new(&folder, rate);
        let place = folder.path(&format!("run-{rate:e}"));
        let (listener, _) = setting.run(&place, 99, false, 1).unwrap();
        listener.said.into_iter().find(|s| s.contains("below what"))
    };
    assert_eq!(said(1e-4), None);
    let warning = said(1e-8).unwrap();
    assert!(
        warning.contains("learning rate of 1e-8")
            && warning.contains("% changed in a step, measured over 10"),
        "{warning}"
    );
}

/// `nvfp4 train` on a model of random weights.
fn command(folder: &Folder, out: &str, more: &[&str]) -> Command {
    command_from("--init", folder, out, more)
}

/// `nvfp4 train` on a present model: complete, or without its weights.
fn command_from(begin: &str, folder: &Folder, out: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    let data = folder.path("text.txt");
    if !data.exists() {
        fs::write(&data, sentences(400)).unwrap();
    }
    command
        .arg("train")
        .arg(begin)
        .arg(golden("model/qwen3_tied"))
        .arg("--data")
        .arg(data)
        .arg("--out")
        .arg(folder.path(out));
    command.args([
        "--device",
        "cpu",
        "--threads",
        "2",
        "--batch",
        "4",
        "--weight-decay",
        "0.1",
        "--seed",
        "3",
    ]);
    for (option, value) in [("--window", "64"), ("--rate", "5e-3")] {
        if !more.contains(&option) {
            command.args([option, value]);
        }
    }
    command.args(more);
    command
}

fn finish(mut command: Command) -> (Output, String) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    (output, said)
}

/// Kills a run as soon as it has written a checkpoint.
fn kill_after_a_checkpoint(mut run: Child, checkpoints: &Path) {
    wait_for("a checkpoint", || {
        match NVFP4::train::checkpoint::list(checkpoints).is_ok_and(|all| !all.is_empty()) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    run.kill().unwrap();
    assert!(!run.wait().unwrap().success());
}

fn wait_for(what: &str, mut there: impl FnMut() -> ControlFlow<()>) {
    let start = Instant::now();
    while there().is_continue() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{what} did not come"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn last_row(folder: &Folder, out: &str) -> Vec<String> {
    let table = fs::read_to_string(folder.path(out).join("loss.csv")).unwrap();
    table
        .lines()
        .last()
        .unwrap()
        .split(',')
        .map(str::to_owned)
        .collect()
}

/// From random weights on the CPU, in 200 steps, down to the entropy of the text: each of four words has four choices, and the rest is
/// certain, which is 4 ln 4 nats in a sentence of some 22 bytes. The resulting model says such sentences.
#[test]
fn two_hundred_steps_of_the_command_learn_a_text() {
    let folder = Folder::new("learn");
    let (output, said) = finish(command(
        &folder,
        "out",
        &[
            "--steps",
            "200",
            "--eval-share",
            "0.05",
            "--sample",
            "The quick",
            "--json",
        ],
    ));
    assert!(output.status.success(), "{said}");
    let row = last_row(&folder, "out");
    let delivered: f64 = row[3].parse().unwrap();
    println!("evaluation loss after 200 steps: {delivered}");
    assert_eq!(row[0], "200");
    // It came to 0.407; the sentences of chance alone leave some 0.26.
    assert!(delivered < 0.48, "{delivered}");
    let events: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(events[0]["event"], "data");
    assert_eq!(events[1]["event"], "begin");
    assert_eq!(events.iter().filter(|e| e["event"] == "step").count(), 200);
    let end = events.last().unwrap();
    assert_eq!(
        (&end["event"], &end["ending"]),
        (&"end".into(), &"finished".into())
    );
    // The exported model continues a sentence as the text would.
    let run = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args([
            "run",
            "--raw",
            "--temp",
            "0",
            "--max-tokens",
            "16",
            "--device",
            "cpu",
            "--prompt",
            "The quick",
            "--model",
        ])
        .arg(folder.path("out/model"))
        .output()
        .unwrap();
    let answer = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
    assert!(
        ["fox", "dog", "bird", "cat"]
            .iter()
            .any(|w| answer.trim_start().starts_with(w)),
        "{answer:?}"
    );
    // A repeated call is refused, with advice.
    let (output, said) = finish(command(&folder, "out", &["--steps", "200"]));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("came to step 200") && said.contains("--resume"),
        "{said}"
    );
}

/// Killed in the middle, as no program can prepare for, and resumed: the same bits as a run that was left alone.
#[test]
fn a_command_that_is_killed_resumes_to_the_same_bits() {
    let folder = Folder::new("killed");
    let options = [
        "--steps",
        "20",
        "--save-every",
        "3",
        "--eval-share",
        "0.05",
        "--eval-every",
        "5",
    ];
    let (output, said) = finish(command(&folder, "whole", &options));
    assert!(output.status.success(), "{said}");
    let child = command(&folder, "killed", &options).spawn().unwrap();
    let checkpoints = folder.path("killed").join(run::CHECKPOINTS);
    kill_after_a_checkpoint(child, &checkpoints);
    let resume: Vec<&str> = options.iter().copied().chain(["--resume"]).collect();
    // Other settings are named.
    let high = ["--keep-high", "down_proj"];
    let other: Vec<&str> = resume.iter().copied().chain(high).collect();
    let (output, said) = finish(command(&folder, "killed", &other));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("recipe.keep_high") && said.contains("down_proj"),
        "{said}"
    );
    let (output, said) = finish(command(&folder, "killed", &resume));
    assert!(output.status.success(), "{said}");
    assert_eq!(
        states(&folder.path("killed")),
        states(&folder.path("whole"))
    );
    assert_eq!(
        losses(&folder.path("killed")),
        losses(&folder.path("whole"))
    );
    let model = |out: &str| fs::read(folder.path(out).join("model/model.safetensors")).unwrap();
    assert_eq!(model("killed"), model("whole"));
}

/// Sends a signal, as Ctrl-C does, as soon as there are two steps in the table.
fn signal_after_a_step(run: &Child, table: &Path, signal: &str) {
    wait_for("a step", || {
        match fs::read_to_string(table).is_ok_and(|t| t.lines().count() > 2) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    send(run, signal);
}

fn send(run: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([&format!("-{signal}"), &run.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Ctrl-C ends a run after its step, with a checkpoint.
#[test]
fn a_command_that_is_interrupted_saves_and_says_how_to_go_on() {
    let folder = Folder::new("interrupted");
    let mut child = command(&folder, "out", &["--steps", "5000", "--save-every", "0"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    signal_after_a_step(&child, &folder.path("out/loss.csv"), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut said).unwrap();
    assert!(
        said.contains("of 5000; to go on:\n") && said.ends_with("--resume\n"),
        "{said}"
    );
    let checkpoints =
        NVFP4::train::checkpoint::list(&folder.path("out").join(run::CHECKPOINTS)).unwrap();
    let step: u64 = last_row(&folder, "out")[0].parse().unwrap();
    assert_eq!(checkpoints.iter().map(|c| c.0).collect::<Vec<_>>(), [step]);
}

/// A file of settings changes what it names; options take precedence, and everything else has its default.
#[test]
fn settings_that_a_file_leaves_out_have_their_defaults() {
    let folder = Folder::new("settings");
    let text = folder.file("text.txt", sentences(40));
    let groups = serde_json::json!([{"names": ["proj"], "rate_factor": 0.5, "decay": 0.25}]);
    let config = |name: &str, value: Value| folder.file(name, value.to_string());
    let some = config("a.json", serde_json::json!({"groups": groups}));
    let more = serde_json::json!({
        "groups": groups, "optimizer": {"rate": 3e-4}, "schedule": {"warmup": 2}, "steps": 3, "recipe": {"lora": {"rank": 2}},
    });
    let more = config("b.json", more);
    for (out, begin, file, options, wanted) in [
        (
            "some",
            "--init",
            &some,
            &["--steps", "34"][..],
            (2e-5, 0.01, 1, 34),
        ),
        ("more", "--model", &more, &[], (3e-4, 0.01, 2, 3)),
        (
            "before",
            "--model",
            &more,
            &["--rate", "1e-3", "--weight-decay", "0.5"],
            (1e-3, 0.5, 2, 3),
        ),
        (
            "adapters",
            "--model",
            &some,
            &[
                "--steps",
                "2",
                "--adapter",
                "2",
                "--adapter-targets",
                "up_proj",
            ],
            (2e-4, 0.01, 0, 2),
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command
            .arg("train")
            .arg(begin)
            .arg(golden("model/qwen3_tied"));
        command.arg("--data").arg(&text).arg("--config").arg(file);
        command.args([
            "--window",
            "32",
            "--device",
            "cpu",
            "--threads",
            "2",
            "--out",
        ]);
        command.arg(folder.path(out)).args(options);
        let (output, said) = finish(command);
        assert!(output.status.success(), "{said}");
        let step = format!("checkpoints/step-{:08}/trainer.json", wanted.3);
        let saved = fs::read(folder.path(out).join(step)).unwrap();
        let saved: Value = serde_json::from_slice(&saved).unwrap();
        let found = &saved["config"];
        assert_eq!(found["optimizer"]["rate"], wanted.0);
        assert_eq!(found["optimizer"]["decay"], wanted.1);
        assert_eq!(found["schedule"]["warmup"], wanted.2);
        assert_eq!(found["groups"], groups);
    }
}

/// Adapters of a run that was killed, or interrupted, are those of one that was let alone, byte for byte; the model with them in it is written when it is
/// asked for, also of a run that has ended.
#[test]
fn adapters_of_a_command_are_files_of_their_own() {
    let folder = Folder::new("adapters");
    let options = "--steps 40 --save-every 8 --adapter 4 --adapter-alpha 6 --adapter-targets q_proj,down_proj \
                   --activations nvfp4 --gradients nvfp4 --keep-high up_proj --eval-share 0.05";
    let options: Vec<&str> = options.split_whitespace().collect();
    let with = |out: &str, more: &[&str]| {
        let options: Vec<&str> = options.iter().chain(more).copied().collect();
        command_from("--model", &folder, out, &options)
    };
    let files = |out: &str| {
        let place = folder.path(out).join("adapter");
        let mut names: Vec<_> = fs::read_dir(place)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        names.sort();
        names
            .into_iter()
            .map(|p| fs::read(p).unwrap())
            .collect::<Vec<_>>()
    };
    let (output, said) = finish(with("whole", &[]));
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("whole/adapter: trained adapters")
            && said.contains("adapters of rank 4")
            && said.contains("the same command with --resume --merge"),
        "{said}"
    );
    let whole = files("whole");
    assert_eq!(whole.len(), 2);
    let settings: Value = serde_json::from_slice(&whole[0]).unwrap();
    let base = fs::canonicalize(golden("model/qwen3_tied")).unwrap();
    assert_eq!(settings["base_model_name_or_path"], base.to_str().unwrap());
    assert_eq!(
        (settings["r"].as_u64(), settings["lora_alpha"].as_f64()),
        (Some(4), Some(6.0))
    );
    assert!(!folder.path("whole/model").exists());
    let saved = fs::read(folder.path("whole/checkpoints/step-00000040/trainer.json")).unwrap();
    let saved: Value = serde_json::from_slice(&saved).unwrap();
    let recipe = &saved["config"]["recipe"];
    assert_eq!(
        (&recipe["activations"], &recipe["gradients"]),
        (&"nvfp4".into(), &"nvfp4".into())
    );
    assert_eq!(recipe["keep_high"], serde_json::json!(["up_proj"]));

    let (output, said) = finish(with("whole", &[]));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("came to step 40; go on with it by --resume"),
        "{said}"
    );

    let mut child = with("interrupted", &[]).spawn().unwrap();
    signal_after_a_step(&child, &folder.path("interrupted/loss.csv"), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!folder.path("interrupted/adapter").exists());
    let (output, said) = finish(with("interrupted", &["--resume"]));
    assert!(output.status.success(), "{said}");
    assert!(files("interrupted") == whole);

    let child = with("killed", &[]).spawn().unwrap();
    kill_after_a_checkpoint(child, &folder.path("killed").join(run::CHECKPOINTS));
    assert!(!folder.path("killed/adapter").exists());
    let (output, said) = finish(with("killed", &["--resume", "--last-blocks", "1"]));
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("recipe.last_blocks null, and now 1"),
        "{said}"
    );
    for more in [&["--resume"][..], &["--resume", "--merge"], &["--resume"]] {
        let (output, said) = finish(with("killed", more));
        assert!(output.status.success(), "{said}");
        // But for the place, which is not in them.
        assert!(files("killed") == whole, "{more:?}");
        let merges = more.contains(&"--merge");
        assert_eq!(said.contains("nvfp4 run --model"), merges, "{said}");
    }
    Source::open(&folder.path("killed/model")).unwrap();
}

/// Settings that cannot be trained are refused in a line that says why and what would be right.
#[test]
fn what_the_command_refuses() {
    let folder = Folder::new("refused");
    let refused = |more: &[&str], words: &[&str]| {
        let (output, said) = finish(command(&folder, "out", more));
        assert_eq!(output.status.code(), Some(1), "{more:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{more:?}: '{word}' is not in: {said}");
        }
        assert!(!folder.path("out").join(run::CHECKPOINTS).exists());
    };
    refused(
        &["--steps", "3", "--resume"],
        &["no checkpoint", "without --resume"],
    );
    refused(
        &["--steps", "3", "--window", "300"],
        &["a window of 300 tokens (--window)", "256"],
    );
    refused(
        &["--steps", "3", "--recipe", "int3"],
        &["'int3'", "nvfp4-int8"],
    );
    refused(&["--steps", "0"], &["0 steps"]);
    refused(
        &["--steps", "3", "--accumulate", "2", "--release-gradients"],
        &["--accumulate 2"],
    );
    refused(
        &["--steps", "3", "--offload", "moments"],
        &["offloaded from a cpu", "leave offload out"],
    );
    refused(
        &["--steps", "3", "--export", "x.dat"],
        &["x.dat", "nvfp4 quantize"],
    );
    refused(&["--adapter", "4"], &["--init", "--adapter"]);
    refused(&["--merge"], &["--merge", "--adapter"]);
    let over_a_model = |more: &[&str], words: &[&str]| {
        let more: Vec<&str> = more.iter().copied().chain(["--adapter", "4"]).collect();
        let (output, said) = finish(command_from("--model", &folder, "out", &more));
        assert_eq!(output.status.code(), Some(1), "{more:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{more:?}: '{word}' is not in: {said}");
        }
        assert!(!folder.path("out").exists());
    };
    over_a_model(
        &["--recipe", "nvfp4-int8"],
        &["--recipe nvfp4-int8", "--adapter 4"],
    );
    over_a_model(&["--export", "x"], &["--export x", "--adapter", "--merge"]);
    over_a_model(
        &["--adapter-targets", "query"],
        &["[\"query\"]", "gate_proj"],
    );
    over_a_model(&["--adapter-alpha", "0"], &["--adapter-alpha is 0"]);
    let budget = ["--steps", "3", "--memory-budget", "0.0022"];
    refused(
        &budget,
        &[
            "memory budget",
            "takes about",
            "for weights and moments",
            "which fits in 2.2 MB, with releasing gradients (--release-gradients)",
        ],
    );
    refused(
        &["--steps", "3", "--memory-budget", "0.0001"],
        &["leaves no way"],
    );
    // The advised settings do fit.
    let more: Vec<&str> = budget.into_iter().chain(["--release-gradients"]).collect();
    let (output, said) = finish(command(&folder, "out", &more));
    assert!(output.status.success(), "{said}");
}

/// The learned parts of a conversation under each public template in the folder `NVFP4_TEMPLATES`: every answer once, with its end, and
/// nothing of the questions; or an error if the template does not distinguish them.
#[test]
fn public_templates_are_masked() {
    let Some(folder) = std::env::var_os("NVFP4_TEMPLATES").map(PathBuf::from) else {
        println!("SKIPPED: NVFP4_TEMPLATES names no folder of templates");
        return;
    };
    let scratch = Folder::new("templates");
    let file = scratch.file(
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": "AskedFirst"}, {"role": "assistant", "content": "AnsweredFirst"}, {"role": "user", "content": "AskedLast"}, {"role": "assistant", "content": "AnsweredLast"}]}"#,
    );
    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "jinja"))
        .collect();
    names.sort();
    let (mut masked, mut refused) = (0, Vec::new());
    for path in &names {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let own = folder.join(&name).join("tokenizer.json");
        let qwen3 = folder.join("qwen3/tokenizer.json");
        let tokenizer = Tokenizer::from_file(if own.exists() { &own } else { &qwen3 }).unwrap();
        let source = fs::read_to_string(path).unwrap();
        let Ok(template) = ChatTemplate::from_jinja(&source, Some("<s>"), Some("</s>")) else {
            continue;
        };
        let vocabulary = tokenizer.vocab_size();
        let ends = ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"];
        let ends = ends.iter().filter_map(|end| tokenizer.id_of(end));
        let text = SourceText {
            stop_tokens: ends.collect(),
            tokenizer: Arc::new(tokenizer),
            template: Some(template),
            eos: None,
        };
        match data::read(
            std::slice::from_ref(&file),
            &text,
            vocabulary,
            &Options::default(),
        ) {
            Err(e) => refused.push(format!("{name}: {e}")),
            Ok(data) => {
                let all = data.documents().iter().map(|d| marked(&text, d));
                let all: Vec<String> = all.collect();
                let learned: String = all
                    .iter()
                    .flat_map(|d| {
                        d.split('[')
                            .skip(1)
                            .filter_map(|part| part.split(']').next())
                    })
                    .collect();
                println!("{name}: {} documents, {learned:?}", all.len());
                for (words, count) in [
                    ("AnsweredFirst", 1),
                    ("AnsweredLast", 1),
                    ("AskedFirst", 0),
                    ("AskedLast", 0),
                ] {
                    assert_eq!(
                        learned.matches(words).count(),
                        count,
                        "{name}: {words} in {all:?}"
                    );
                }
                assert!(!learned.contains("start_header_id"), "{name}: {learned}");
                masked += 1;
            }
        }
    }
    for refusal in &refused {
        println!("{refusal}");
    }
    println!("{masked} masked, {} refused", refused.len());
    assert!(masked > 3 * refused.len(), "{refused:?}");
}
