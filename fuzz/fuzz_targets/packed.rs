//! The header and the checksums of a file of packed weights, from JSON that a file of the right size is sealed around.
#![no_main]

use std::hash::Hasher;

use NVFP4::checkpoint::PackedContents;
use serde_json::Value;
use twox_hash::XxHash3_64;

/// Most bytes of matrices in a file.
const MATRICES: u64 = 1 << 16;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = PackedContents::parse(bytes, 1);
    let Ok(header) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let count = |name: &str| header[name].as_array().map_or(0, Vec::len);
    let sizes = header["matrices"].as_array().into_iter().flatten();
    let end = sizes.fold(0u64, |end, matrix| {
        let size = matrix["matrix"]["bytes"].as_u64().unwrap_or(0);
        end.next_multiple_of(64).saturating_add(size).min(MATRICES)
    });
    let file = sealed(bytes, end as usize, count("matrices") + count("tables"));
    let Ok(contents) = PackedContents::parse(&file, 1) else {
        return;
    };
    for matrix in contents.matrices.values() {
        assert!(file.get(matrix.range.clone()).is_some());
        assert!(matrix.range.start.is_multiple_of(64));
    }
});

/// A file with this header, so many zeros for matrices, and zeros for the checksums of source weights.
fn sealed(header: &[u8], matrices: usize, sums: usize) -> Vec<u8> {
    let mut front = XxHash3_64::new();
    let (magic, version) = (b"NVFP4PAK", 1u32.to_le_bytes());
    let mut file = [&magic[..], &version, &(header.len() as u32).to_le_bytes(), header].concat();
    let sums = vec![0; sums * 8];
    for part in [&magic[..], &version, header] {
        front.write(part);
    }
    sums.chunks(8).for_each(|sum| front.write(sum));
    file.resize(file.len().next_multiple_of(64) + matrices, 0);
    file.extend_from_slice(&sums);
    file.extend_from_slice(&front.finish().to_le_bytes());
    let all = XxHash3_64::oneshot(&file);
    file.extend_from_slice(&all.to_le_bytes());
    file
}
