//! The tensors of an exported model directory.

use std::ops::Range;

use super::item::{Content, Item};
use super::matrix::Exporter;
use crate::base::Result;
use crate::checkpoint::Encoding;
use crate::model::convert::Tables;
use crate::model::training::MatrixId;
use crate::tensor::DType;

/// The tensors of a directory: those of the untrained model, in its order. An entry that holds several matrices stays one if all are
/// delivered in one encoding.
pub(super) fn directory(exporter: &Exporter<'_>, tables: Tables) -> Result<Vec<Item>> {
    let Some(delivered) = exporter.beginning.delivered() else {
        return of_random_weights(exporter, tables);
    };
    let mut items = Vec::new();
    for entry in delivered.checkpoint().entries() {
        let parts = delivered.parameters_of(&entry.name);
        let mut encodings = Vec::new();
        for (id, _) in &parts.matrices {
            encodings.push(exporter.encoding(*id, tables)?);
        }
        let of = |content, encoding| Item {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            encoding,
            content,
        };
        match &encodings[..] {
            [] if any(&parts.vectors, |id| exporter.vector_has_changed(id))? => {
                items.push(of(
                    Content::Vectors(parts.vectors),
                    Encoding::Dense(DType::F32),
                ));
            }
            [] => items.push(of(Content::Copy(entry.clone()), entry.encoding)),
            [first, rest @ ..] if rest.iter().all(|e| e == first) => {
                let is_same = *first == entry.encoding
                    && !any(&parts.matrices, |id| exporter.has_changed(id))?;
                items.push(match is_same {
                    true => of(Content::Copy(entry.clone()), entry.encoding),
                    false => of(Content::Matrices(parts.matrices), *first),
                });
            }
            _ => {
                for ((id, _), encoding) in parts.matrices.iter().zip(encodings) {
                    items.push(alone(exporter, *id, encoding));
                }
            }
        }
    }
    Ok(items)
}

/// Whether `has_changed` holds for any of these parameters.
fn any(
    parts: &[(usize, Range<usize>)],
    has_changed: impl Fn(usize) -> Result<bool>,
) -> Result<bool> {
    for (id, _) in parts {
        if has_changed(*id)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn alone(exporter: &Exporter<'_>, id: MatrixId, encoding: Encoding) -> Item {
    let m = &exporter.source.layout().matrices[id];
    Item {
        name: m.name.clone(),
        shape: vec![m.rows, m.cols],
        encoding,
        content: Content::Matrices(vec![(id, 0..m.rows)]),
    }
}

fn of_random_weights(exporter: &Exporter<'_>, tables: Tables) -> Result<Vec<Item>> {
    let layout = exporter.source.layout();
    let matrices = 0..layout.matrices.len();
    let matrices = matrices.map(|id| Ok(alone(exporter, id, exporter.encoding(id, tables)?)));
    let vectors = layout.vectors.iter().enumerate().map(|(id, v)| {
        Ok(Item {
            name: v.name.clone(),
            shape: v.shape.clone(),
            encoding: Encoding::Dense(DType::F32),
            content: Content::Vectors(vec![(id, 0..v.len)]),
        })
    });
    matrices.chain(vectors).collect()
}
