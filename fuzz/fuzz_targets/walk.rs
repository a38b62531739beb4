//! What every target does with a file: open it and, if it opens, read both ends of every entry in every way.

use NVFP4::model;

pub fn walk(name: &str, bytes: &[u8]) {
    let Ok(opened) = model::open_bytes(name, bytes.to_vec()) else {
        return;
    };
    for entry in opened.entries() {
        let (rows, cols) = (entry.rows(), entry.cols());
        assert!(rows > 0 && cols > 0, "'{}' is empty", entry.name);
        assert_eq!(opened.find(&entry.name), Some(entry));
        let mut values = vec![0.0; cols];
        let (mut codes, mut scales) = (vec![0; cols / 2], vec![0; cols / 16]);
        for row in [0, rows / 2, rows - 1] {
            let _ = opened.rows_f32(entry, row..row + 1, &mut values);
            let _ = opened.rows_nvfp4(entry, row..row + 1, &mut codes, &mut scales);
        }
        let _ = opened.global_scale(entry);
        let stored: u64 = opened
            .parts(entry)
            .expect("an entry has parts")
            .iter()
            .map(|p| p.bytes as u64)
            .sum();
        assert_eq!(stored, entry.bytes, "'{}'", entry.name);
        if let Some(part) = opened.plain(entry) {
            assert_eq!(part.bytes as u64, entry.bytes);
            let _ = opened.read_part(&part, part.bytes - 1, &mut [0]);
        }
    }
}
