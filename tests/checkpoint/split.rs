//! Models in several GGUF files, split here as llama-gguf-split does it, against the original file.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::files::{FileContent, GivenFiles};
use NVFP4::checkpoint::{Checkpoint, Encoding};
use NVFP4::model;

use super::files::{Gguf, Scratch};

/// Reads a GGUF file as far as splitting requires.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        self.at += len;
        &self.bytes[self.at - len..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).unwrap()
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            10..=12 => self.at += 8,
            8 => drop(self.text()),
            9 => {
                let (kind, len) = (self.u32(), self.u64());
                (0..len).for_each(|_| self.skip_value(kind));
            }
            _ => panic!("value type {kind}"),
        }
    }
}

/// A tensor with its data, the padding behind it included.
struct Tensor {
    name: String,
    dims: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
}

/// The metadata pairs and the tensors of a file whose data is aligned to 32 bytes.
fn parse(bytes: &[u8]) -> (Vec<Vec<u8>>, Vec<Tensor>) {
    let mut reader = Reader { bytes, at: 8 };
    let (tensor_count, pair_count) = (reader.u64(), reader.u64());
    let pairs = (0..pair_count)
        .map(|_| {
            let start = reader.at;
            reader.text();
            let kind = reader.u32();
            reader.skip_value(kind);
            bytes[start..reader.at].to_vec()
        })
        .collect();
    let lines: Vec<_> = (0..tensor_count)
        .map(|_| {
            let name = reader.text();
            let dims: Vec<u64> = (0..reader.u32()).map(|_| reader.u64()).collect();
            (name, dims, reader.u32(), reader.u64() as usize)
        })
        .collect();
    let data = &bytes[reader.at.next_multiple_of(32)..];
    let ends = lines.iter().map(|l| l.3).skip(1).chain([data.len()]);
    let tensors = lines
        .iter()
        .zip(ends)
        .map(|((name, dims, kind, start), end)| Tensor {
            name: name.clone(),
            dims: dims.clone(),
            kind: *kind,
            data: data[*start..end].to_vec(),
        });
    (pairs, tensors.collect())
}

/// Writes the file in three parts, with each tensor in the one that `part_of` its number and name gives. Returns their paths.
pub(crate) fn write_split(
    bytes: &[u8],
    directory: &Path,
    part_of: impl Fn(usize, &str) -> usize,
) -> Vec<PathBuf> {
    let (pairs, tensors) = parse(bytes);
    let mut paths = Vec::new();
    for no in 0..3 {
        let mut part = Gguf::new("");
        part.pairs = if no == 0 { pairs.clone() } else { Vec::new() };
        let total = tensors.len() as u32;
        part = part
            .with_pair(Gguf::pair("split.no", 2, &(no as u16).to_le_bytes()))
            .with_pair(Gguf::pair("split.count", 2, &3u16.to_le_bytes()))
            .with_pair(Gguf::pair("split.tensors.count", 5, &total.to_le_bytes()));
        let own = tensors.iter().enumerate();
        for (_, tensor) in own.filter(|(i, t)| part_of(*i, &t.name) == no) {
            let at = part.data.len() as u64;
            part = part.tensor(&tensor.name, &tensor.dims, tensor.kind, at);
            part.data.extend(&tensor.data);
            part.data.resize(part.data.len().next_multiple_of(32), 0);
        }
        let path = directory.join(format!("m-{:05}-of-00003.gguf", no + 1));
        std::fs::write(&path, part.build()).unwrap();
        paths.push(path);
    }
    paths
}

/// Checks that both hold the same entries with the same values, and say the same of the model.
fn same(split: &dyn Checkpoint, whole: &dyn Checkpoint) {
    assert_eq!(split.format(), "gguf");
    assert_eq!(split.entries().len(), whole.entries().len());
    for entry in whole.entries() {
        let found = split.find(&entry.name);
        assert_eq!(found, Some(entry));
        let values = |checkpoint: &dyn Checkpoint| -> Vec<u32> {
            let mut out = vec![f32::NAN; entry.rows() * entry.cols()];
            checkpoint
                .rows_f32(entry, 0..entry.rows(), &mut out)
                .unwrap();
            out.into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(values(split), values(whole), "{}", entry.name);
        let stored = |checkpoint: &dyn Checkpoint| -> Vec<Vec<u8>> {
            let parts = checkpoint.parts(entry).unwrap();
            let bytes = parts.iter().map(|part| {
                let mut out = vec![0; part.bytes];
                checkpoint.read_part(part, 0, &mut out).unwrap();
                out
            });
            bytes.collect()
        };
        assert_eq!(stored(split), stored(whole), "{}", entry.name);
        if entry.encoding == Encoding::Nvfp4 {
            let packed = |checkpoint: &dyn Checkpoint| {
                let mut codes = vec![0; entry.rows() * entry.cols() / 2];
                let mut scales = vec![0; entry.rows() * entry.cols() / 16];
                checkpoint
                    .rows_nvfp4(entry, 0..entry.rows(), &mut codes, &mut scales)
                    .unwrap();
                (codes, scales, checkpoint.global_scale(entry).unwrap())
            };
            assert_eq!(packed(split), packed(whole), "{}", entry.name);
        }
    }
    assert_eq!(split.metadata().config, whole.metadata().config);
    let tokenizer = |c: &dyn Checkpoint| format!("{:?}", c.metadata().tokenizer);
    assert_eq!(tokenizer(split), tokenizer(whole));
}

#[test]
fn any_part_and_the_directory_open_the_whole_model() {
    for file in ["llama.gguf", "blocks.gguf"] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden/checkpoint")
            .join(file);
        let whole = model::open(&golden).unwrap();
        let bytes = std::fs::read(&golden).unwrap();
        let count = parse(&bytes).1.len();
        let in_order = |i: usize, _: &str| i * 3 / count;
        let in_turn = |i: usize, _: &str| i % 3;
        let without_first = |i: usize, _: &str| 1 + i % 2;
        // The global scales of NVFP4 weights and the RoPE factors apart from all else.
        let by_name = |_: usize, name: &str| match name {
            "rope_freqs.weight" => 2,
            _ if name.ends_with(".scale") => 0,
            _ => 1,
        };
        let compare = |part_of: &dyn Fn(usize, &str) -> usize| {
            let scratch = Scratch::new();
            let paths = write_split(&bytes, &scratch.0, part_of);
            for path in paths.iter().chain([&scratch.0]) {
                let split = model::open(path).unwrap_or_else(|e| panic!("{e}"));
                same(&*split, &*whole);
            }
            same(&*given(&paths).unwrap(), &*whole);
            std::fs::write(scratch.0.join("mmproj-F16.gguf"), "no model").unwrap();
            same(&*model::open(&scratch.0).unwrap(), &*whole);
        };
        compare(&in_order);
        compare(&in_turn);
        compare(&without_first);
        compare(&by_name);
    }
}

/// The files at `paths`, given by their names alone.
fn given(paths: &[PathBuf]) -> Result<Box<dyn Checkpoint>> {
    let files = paths.iter().map(|path| {
        let content: Arc<dyn FileContent> = Arc::new(std::fs::read(path).unwrap());
        let name = path.file_name().unwrap().to_str().unwrap();
        (name.to_owned(), content)
    });
    model::open_given(&GivenFiles::new(files)?)
}

#[test]
fn a_part_that_is_not_given_is_missing() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint/llama.gguf");
    let scratch = Scratch::new();
    let bytes = std::fs::read(&golden).unwrap();
    let mut paths = write_split(&bytes, &scratch.0, |i, _| i % 3);
    // On disk it is still there.
    let name = paths.remove(1);
    let name = name.file_name().unwrap().to_str().unwrap();
    let e = given(&paths).err().unwrap();
    let said = format!("the model of the given files: {name} is missing");
    assert!(e.message().starts_with(&said), "{e}");
}

/// Names are bytes: the part before the numbers need not be UTF-8.
#[test]
fn parts_are_found_by_names_that_are_not_utf8() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint/llama.gguf");
    let whole = model::open(&golden).unwrap();
    let scratch = Scratch::new();
    let mut paths = Vec::new();
    for (i, path) in write_split(&std::fs::read(&golden).unwrap(), &scratch.0, |i, _| i % 3)
        .iter()
        .enumerate()
    {
        let name = [
            &b"a-\xff\xc3("[..],
            format!("-{:05}-of-00003.gguf", i + 1).as_bytes(),
        ]
        .concat();
        let renamed = path.with_file_name(OsStr::from_bytes(&name));
        std::fs::rename(path, &renamed).unwrap();
        paths.push(renamed);
    }
    for path in paths.iter().chain([&scratch.0]) {
        let split = model::open(path).unwrap_or_else(|e| panic!("{e}"));
        same(&*split, &*whole);
    }
}

/// `split.count` is 1 where a model fitted into one file after all.
#[test]
fn a_set_of_one_is_a_file() {
    let whole = Gguf::new("mamba")
        .with_pair(Gguf::pair("split.count", 2, &1u16.to_le_bytes()))
        .with_pair(Gguf::pair("split.no", 2, &0u16.to_le_bytes()))
        .tensor("a", &[8], 0, 0)
        .with_data(vec![0; 32])
        .build();
    let scratch = Scratch::new();
    for name in ["m-00001-of-00001.gguf", "m.gguf"] {
        let path = scratch.0.join(name);
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(model::open(&path).unwrap().entries().len(), 1);
    }
    assert!(model::open_bytes("m.gguf", whole).is_ok());
}
