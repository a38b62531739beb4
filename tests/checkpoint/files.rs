//! Helpers: small files built by hand, correct or with one fault, and a scratch folder for them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that goes away with its value.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("nvfp4-checkpoint-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    /// The names of the files inside, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn leb128(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// One `.dat` entry.
pub(crate) fn dat_entry(key: &str, elem_type: u64, dims: &[u64], payload: &[u8]) -> Vec<u8> {
    let mut out = leb128(key.len() as u64);
    out.extend(key.as_bytes());
    out.extend(leb128(elem_type));
    out.extend(leb128(dims.len() as u64));
    dims.iter().for_each(|&d| out.extend(leb128(d)));
    out.extend(payload);
    out
}

pub(crate) fn dat(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut out = leb128(entries.len() as u64);
    entries.iter().for_each(|e| out.extend(e));
    out
}

pub(crate) fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// A safetensors file of tensors `(name, dtype, shape, data)` laid end to end.
pub(crate) fn tensors(items: &[(&str, &str, &str, Vec<u8>)]) -> Vec<u8> {
    let mut header = String::from("{");
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in items {
        if data.is_empty() {
            assert_eq!(header.len(), 1);
        } else {
            header.push(',');
        }
        let (start, end) = (data.len(), data.len() + bytes.len());
        header.push_str(&format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#
        ));
        data.extend(bytes);
    }
    header.push('}');
    safetensors(&header, &data)
}

fn text(value: &str) -> Vec<u8> {
    let mut out = (value.len() as u64).to_le_bytes().to_vec();
    out.extend(value.as_bytes());
    out
}

/// A GGUF file under construction, any field of which may be wrong.
#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) pair_count: Option<u64>,
    pub(crate) pairs: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) data: Vec<u8>,
}

impl Gguf {
    pub(crate) fn new(architecture: &str) -> Self {
        Gguf {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            pair_count: None,
            pairs: vec![Self::text_pair("general.architecture", architecture)],
            tensors: Vec::new(),
            data: Vec::new(),
        }
    }

    pub(crate) fn pair(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        let mut out = text(key);
        out.extend(kind.to_le_bytes());
        out.extend(value);
        out
    }

    pub(crate) fn text_pair(key: &str, value: &str) -> Vec<u8> {
        Self::pair(key, 8, &text(value))
    }

    pub(crate) fn array_pair(key: &str, kind: u32, len: u64, items: &[u8]) -> Vec<u8> {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend(len.to_le_bytes());
        value.extend(items);
        Self::pair(key, 9, &value)
    }

    /// A directory line; `dims` innermost first, as GGUF has them.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let mut out = text(name);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
        self.tensors.push(out);
        self
    }

    pub(crate) fn with_pair(mut self, pair: Vec<u8>) -> Self {
        self.pairs.push(pair);
        self
    }

    pub(crate) fn with_data(mut self, data: Vec<u8>) -> Self {
        self.data = data;
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        let count = |given: Option<u64>, real: usize| given.unwrap_or(real as u64).to_le_bytes();
        out.extend(count(self.tensor_count, self.tensors.len()));
        out.extend(count(self.pair_count, self.pairs.len()));
        self.pairs.iter().for_each(|p| out.extend(p));
        self.tensors.iter().for_each(|t| out.extend(t));
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}
