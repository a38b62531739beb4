//! Embeddings: those of sentence-transformers, the same bits however texts run, and what is refused.

use super::*;
use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::POOLING_FILE;
use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::{Container, ConvertOptions, convert};
use NVFP4::model::{Device, Pooling};
use NVFP4::session::{EmbedOptions, EmbedPrompt, Embedding};

/// Most by which an element of a normalized embedding differs: keys and values are rounded to f16, with 11 significant bits, in two layers.
const NEAR: f32 = 2e-3;
/// Least cosine of an embedding and its golden.
const COSINE: f64 = 0.999_99;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/embedding")
}

fn embedder() -> Arc<Served> {
    Served::load(&folder().join("qwen3"), &options()).unwrap()
}

/// The texts of the golden, and their tokens.
fn texts() -> (Vec<String>, Vec<Vec<u32>>) {
    let json = fs::read(folder().join("expected.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let of = |key: &str| json[key].clone();
    (
        serde_json::from_value(of("texts")).unwrap(),
        serde_json::from_value(of("tokens")).unwrap(),
    )
}

/// Rows of the golden, and their width.
fn expected(name: &str) -> (Vec<f32>, usize) {
    let bytes = fs::read(folder().join("expected.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(4);
    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (values.collect(), view.shape()[1])
}

fn run(embedding: &Embedding<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; embedding.rows() * embedding.dimensions()];
    embedding.run(&mut out).unwrap();
    out
}

fn embed(model: &Served, texts: &[impl AsRef<str>], options: &EmbedOptions<'_>) -> Vec<f32> {
    let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
    run(&Embedding::of_texts(model, &texts, options).unwrap())
}

fn embed_tokens(model: &Served, texts: &[Vec<u32>], options: &EmbedOptions<'_>) -> Vec<f32> {
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    run(&Embedding::of_tokens(model, &texts, options).unwrap())
}

fn pooled(pooling: Pooling) -> EmbedOptions<'static> {
    EmbedOptions {
        pooling: Some(pooling),
        normalize: Some(false),
        ..EmbedOptions::default()
    }
}

#[track_caller]
fn near(got: &[f32], name: &str) {
    let (want, width) = expected(name);
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum()
        };
        let length = dot(want, want).sqrt();
        let cosine = dot(got, want) / length / dot(got, got).sqrt();
        assert!(cosine > COSINE, "{name}, row {i}: {cosine}");
        for (a, b) in got.iter().zip(want) {
            let off = (a - b).abs() / length as f32;
            assert!(off <= NEAR, "{name}, row {i}: {a} in the place of {b}");
        }
    }
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let (model, (texts, tokens)) = (embedder(), texts());
    let as_model = EmbedOptions::default();
    near(&embed(&model, &texts, &as_model), "normalized");
    near(&embed_tokens(&model, &tokens, &as_model), "normalized");
    for (pooling, name) in [
        (Pooling::Last, "last"),
        (Pooling::Mean, "mean"),
        (Pooling::Cls, "cls"),
    ] {
        near(&embed(&model, &texts, &pooled(pooling)), name);
        near(&embed_tokens(&model, &tokens, &pooled(pooling)), name);
    }
    let query = EmbedOptions {
        prompt: EmbedPrompt::Named("query"),
        ..as_model
    };
    near(&embed(&model, &texts, &query), "queries");
    let spelled = model.embedding().prompt("query").unwrap();
    let spelled = EmbedOptions {
        prompt: EmbedPrompt::Text(spelled),
        ..as_model
    };
    assert_eq!(
        embed(&model, &texts, &spelled),
        embed(&model, &texts, &query)
    );
    let cut = EmbedOptions {
        dimensions: 20,
        ..as_model
    };
    near(&embed(&model, &texts, &cut), "dimensions");
    for (i, text) in texts.iter().enumerate() {
        let rows = embed(
            &model,
            &[text],
            &EmbedOptions {
                normalize: None,
                ..pooled(Pooling::None)
            },
        );
        near(&rows, &format!("tokens_{i}"));
    }
}

/// A copy of the model whose files `change` changes.
fn changed(name: &str, change: impl FnOnce(&Path)) -> Copy {
    let copy = Copy::of("qwen3_tied", name);
    for file in fs::read_dir(&copy.0).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    fs::create_dir(copy.0.join("1_Pooling")).unwrap();
    let from = folder().join("qwen3");
    for name in fs::read_dir(&from).unwrap().map(|f| f.unwrap().file_name()) {
        if from.join(&name).is_file() {
            fs::copy(from.join(&name), copy.0.join(&name)).unwrap();
        }
    }
    fs::copy(from.join(POOLING_FILE), copy.0.join(POOLING_FILE)).unwrap();
    change(&copy.0);
    copy
}

#[test]
fn the_mean_leaves_out_prompts_and_long_texts_are_cut() {
    let (texts, _) = texts();
    let copy = changed("prompts", |to| {
        fs::write(to.join("modules.json"), "[]").unwrap();
        let pooling = json!({"word_embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": false});
        fs::write(to.join(POOLING_FILE), pooling.to_string()).unwrap();
    });
    let model = Served::load(&copy.0, &options()).unwrap();
    let query = EmbedOptions {
        prompt: EmbedPrompt::Named("query"),
        ..EmbedOptions::default()
    };
    near(&embed(&model, &texts, &query), "mean_without_prompt");
    assert!(!model.embedding().normalize);

    let copy = changed("long", |to| {
        let limits = json!({"max_seq_length": 24, "do_lower_case": false});
        fs::write(to.join("sentence_bert_config.json"), limits.to_string()).unwrap();
    });
    let model = Served::load(&copy.0, &options()).unwrap();
    let cut = EmbedOptions {
        truncate: true,
        ..EmbedOptions::default()
    };
    near(&embed(&model, &texts, &cut), "truncated");
    let longest = texts.last().unwrap();
    let refused = Embedding::of_texts(&model, &["short", longest], &EmbedOptions::default());
    expect_kind(
        refused,
        ErrorKind::ContextFull,
        "text 1: 79 tokens, and the model takes 24",
    );
    let tokens = some_tokens(&model, 30);
    let first = embed_tokens(&model, &[tokens[..24].to_vec()], &cut);
    assert_eq!(embed_tokens(&model, &[tokens], &cut), first);
}

/// Lists of tokens that take several passes together.
fn lists(model: &Served) -> Vec<Vec<u32>> {
    let tokens = some_tokens(model, 700);
    [1, 17, 300, 64, 5, 500, 2, 130]
        .iter()
        .enumerate()
        .map(|(i, &count)| tokens[i * 3..i * 3 + count].to_vec())
        .collect()
}

const POOLINGS: [Pooling; 4] = [Pooling::Last, Pooling::Mean, Pooling::Cls, Pooling::None];

#[test]
fn embeddings_have_the_same_bits_however_texts_run() {
    let model = embedder();
    let lists = lists(&model);
    for pooling in POOLINGS {
        let options = EmbedOptions {
            normalize: Some(true),
            ..pooled(pooling)
        };
        let alone = |model: &Served| -> Vec<f32> {
            let each = lists.iter();
            each.flat_map(|tokens| embed_tokens(model, std::slice::from_ref(tokens), &options))
                .collect()
        };
        let want = alone(&model);
        assert!(want.iter().all(|x| x.is_finite()));
        assert_eq!(embed_tokens(&model, &lists, &options), want, "{pooling:?}");
        for threads in [1, 3] {
            let other = LoadOptions::new(Device::cpu(Some(threads)).unwrap());
            let other = Served::load(&folder().join("qwen3"), &other).unwrap();
            assert_eq!(embed_tokens(&other, &lists, &options), want, "{pooling:?}");
        }
        // A generation makes the passes shorter.
        let sequence = model.sequence(8, KvType::F16).unwrap();
        let generating = model.generates(&sequence);
        let before = model.pass_counts().passes;
        assert_eq!(embed_tokens(&model, &lists, &options), want, "{pooling:?}");
        let least = match pooling {
            Pooling::Cls => 1,
            _ => 1019 / 64,
        };
        assert!(model.pass_counts().passes - before >= least, "{pooling:?}");
        drop(generating);
        // Threads share passes.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(alone(&model), want, "{pooling:?}"));
            }
        });
    }
}

#[test]
fn texts_wait_where_memory_is_short() {
    let path = folder().join("qwen3");
    let free = embedder();
    let lists = lists(&free);
    let mut longest = free.sequence(500, KvType::F16).unwrap();
    let work = [NVFP4::engine::NewTokens {
        tokens: &lists[5],
        sequence: &mut longest,
        wanted: NVFP4::model::Wanted::Nothing,
    }];
    let mut scratch = NVFP4::model::Scratch::new();
    free.run(work.into(), false, &mut scratch, &mut Vec::new())
        .unwrap();
    let least = longest.bytes();
    let with = |bytes| LoadOptions {
        kv_bytes: Some(bytes),
        ..options()
    };
    let small = Served::load(&path, &with(least + least / 8)).unwrap();
    for pooling in POOLINGS {
        let want = embed_tokens(&free, &lists, &pooled(pooling));
        assert_eq!(embed_tokens(&small, &lists, &pooled(pooling)), want);
    }
    let smaller = Served::load(&path, &with(least / 2)).unwrap();
    let views: Vec<&[u32]> = lists.iter().map(Vec::as_slice).collect();
    let embedding = Embedding::of_tokens(&smaller, &views, &pooled(Pooling::Mean)).unwrap();
    let mut out = vec![0.0; embedding.rows() * embedding.dimensions()];
    expect_kind(embedding.run(&mut out), ErrorKind::OutOfMemory, "text 2: ");
}

#[test]
fn prefixes_are_found_for_the_last_token_alone() {
    let with_cache = LoadOptions {
        prefix_bytes: 1 << 20,
        ..options()
    };
    for (pooling, finds) in [(Pooling::Last, true), (Pooling::Mean, false)] {
        let model = Served::load(&folder().join("qwen3"), &with_cache).unwrap();
        let tokens = some_tokens(&model, 100);
        let first = embed_tokens(&model, std::slice::from_ref(&tokens), &pooled(pooling));
        let again = embed_tokens(&model, &[tokens], &pooled(pooling));
        assert_eq!(again, first);
        assert_eq!(model.statistics().prompt_tokens_found > 0, finds);
    }
}

#[test]
fn what_cannot_be_embedded_is_refused_before_it_runs() {
    let model = embedder();
    let as_model = EmbedOptions::default();
    let texts = |texts: &[&str], options: &EmbedOptions<'_>| {
        Embedding::of_texts(&model, texts, options).map(|_| ())
    };
    let invalid = ErrorKind::InvalidArgument;
    let named = |name| EmbedOptions {
        prompt: EmbedPrompt::Named(name),
        ..as_model
    };
    expect_kind(
        texts(&["a"], &named("quest")),
        invalid,
        "no prompt 'quest'; the model has query, document",
    );
    let wide = EmbedOptions {
        dimensions: 49,
        ..as_model
    };
    expect_kind(
        texts(&["a"], &wide),
        invalid,
        "49 dimensions of an embedding that has 48",
    );
    let lists = |lists: &[&[u32]], options: &EmbedOptions<'_>| {
        Embedding::of_tokens(&model, lists, options).map(|_| ())
    };
    expect_kind(lists(&[&[1], &[]], &as_model), invalid, "text 1: no tokens");
    expect_kind(
        lists(&[&[1, 300]], &as_model),
        invalid,
        "text 0: token 300 at index 1",
    );
    expect_kind(
        lists(&[&[1]], &named("query")),
        invalid,
        "a prompt for lists of tokens",
    );
    let long = vec![1; 513];
    expect_kind(
        lists(&[&long], &as_model),
        ErrorKind::ContextFull,
        "513 tokens, and the model takes 512",
    );
    let embedding = Embedding::of_texts(&model, &["a", "b"], &as_model).unwrap();
    expect_kind(
        embedding.run(&mut [0.0; 95]),
        invalid,
        "room for 95 numbers; 2 rows of 48 take 96",
    );
    assert_eq!(model.pass_counts().passes, 0);

    // No texts are no error.
    assert!(embed(&model, &[""; 0], &as_model).is_empty());
    // A model that says nothing of embeddings is asked for a pooling.
    let plain = load("qwen3_tied");
    let asked = Embedding::of_tokens(&plain, &[&[1]], &as_model).map(|_| ());
    expect_kind(
        asked,
        invalid,
        "it has no 1_Pooling/config.json; choose last, mean, cls or none",
    );
    let named = EmbedOptions {
        pooling: Some(Pooling::Mean),
        ..as_model
    };
    assert_eq!(embed_tokens(&plain, &[vec![1, 2]], &named).len(), 64);
    // Files that cannot be followed do not keep the model from generating, nor from pooling that is named.
    let copy = changed("dense", |to| {
        let dense = json!([{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]);
        fs::write(to.join("modules.json"), dense.to_string()).unwrap();
    });
    let dense = Served::load(&copy.0, &options()).unwrap();
    let asked = Embedding::of_texts(&dense, &["a"], &as_model).map(|_| ());
    expect_kind(
        asked,
        ErrorKind::Unsupported,
        "modules.json: the module 'Dense' is not supported",
    );
    assert_eq!(embed(&dense, &["a"], &pooled(Pooling::Last)).len(), 48);
}

#[test]
fn embeddings_can_be_cancelled() {
    let model = embedder();
    let embedding = Embedding::of_texts(&model, &["a"], &EmbedOptions::default()).unwrap();
    let mut out = vec![0.0; 48];
    let cancel = Cancel::new();
    cancel.cancel();
    let cancelled = cancel.watching(|| embedding.run(&mut out));
    expect_kind(cancelled, ErrorKind::Cancelled, "cancelled");
    embedding.run(&mut out).unwrap();
}

#[test]
fn a_quantized_model_embeds_as_its_files_say() {
    let (model, (texts, _)) = (embedder(), texts());
    let want = embed(&model, &texts, &EmbedOptions::default());
    let scratch = Copy::of("qwen3_tied", "quantized");
    let quantized = |container, out: &Path| {
        let options = ConvertOptions {
            replace: true,
            ..ConvertOptions::new(container, Recipe::Amax)
        };
        let source = NVFP4::model::open(&folder().join("qwen3")).unwrap();
        let pool = Pool::new(1).unwrap();
        convert(&*source, out, &options, &pool, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    };
    let directory = scratch.0.join("out");
    // The second one replaces the first, with its folder.
    quantized(Container::ModelOpt, &directory);
    quantized(Container::ModelOpt, &directory);
    let empty = scratch.0.join("empty");
    fs::create_dir(&empty).unwrap();
    quantized(Container::ModelOpt, &empty);
    let dat = scratch.0.join("dat");
    fs::create_dir(&dat).unwrap();
    quantized(Container::Dat, &dat.join("model.dat"));
    for path in [directory, empty, dat] {
        let own = Served::load(&path, &options()).unwrap();
        assert_eq!(own.embedding(), model.embedding(), "{}", path.display());
        let got = embed(&own, &texts, &EmbedOptions::default());
        assert_eq!(got.len(), want.len());
        for (got, want) in got.chunks(48).zip(want.chunks(48)) {
            let cosine: f32 = got.iter().zip(want).map(|(a, b)| a * b).sum();
            assert!(cosine > 0.8 && cosine < 0.99999, "{cosine}");
        }
    }
}
