//! The projections of a mixer's input by the names of files, and the place of each role's columns in their output.

use std::ops::Range;

use crate::base::Result;
use crate::base::error::{bail, err};
use crate::model::spec::{MixerSpec, Spec};
use crate::model::tensors::{
    DELTA_A, DELTA_B, DELTA_QKV, DELTA_Z, QUERY, QUERY_GATE, StoredRows, TensorSpec, block_name,
    of_block,
};

/// Keys and values of attention.
const KEYS_AND_VALUES: [&str; 2] = ["self_attn.k_proj", "self_attn.v_proj"];

/// Runs of columns of the concatenated output of a mixer's first projections, which files may store by head and not by role.
#[derive(Clone, Debug, PartialEq)]
pub struct MixerColumns {
    /// Queries, keys and values, one after another.
    pub qkv: Vec<Range<usize>>,
    /// The gate of attention; z, b and a of a gated delta net, one after another.
    pub gate: Vec<Range<usize>>,
}

/// The projections of the input of a block's mixer, by their names without `.weight`, and the columns of their output; `None` for those of
/// queries, keys and values, in this order.
pub(super) fn mixer_inputs(
    spec: &Spec,
    index: usize,
) -> Result<(Vec<String>, Option<MixerColumns>)> {
    let [k, v] = KEYS_AND_VALUES;
    let (qkv, gate): (&[&str], &[&str]) = match &spec.blocks[index].mixer {
        MixerSpec::Attention(attention) if attention.gated => (&[QUERY, k, v], &[QUERY_GATE]),
        MixerSpec::Attention(_) => (&["self_attn.q_proj", k, v], &[]),
        MixerSpec::GatedDelta(_) => (&[DELTA_QKV], &[DELTA_Z, DELTA_B, DELTA_A]),
        MixerSpec::Mamba2(_) | MixerSpec::None => {
            bail!(Internal, "block {index} has no mixer to train")
        }
    };
    let tensors = of_block(spec, index);
    let find = |part: &&str| -> Result<&TensorSpec> {
        let name = block_name(index, &format!("{part}.weight"));
        let found = tensors.iter().find(|tensor| tensor.name == name);
        found.ok_or_else(|| err!(Internal, "{name} is no tensor of the model"))
    };
    let qkv = qkv.iter().map(find).collect::<Result<Vec<_>>>()?;
    let gate = gate.iter().map(find).collect::<Result<Vec<_>>>()?;
    let mut stored = Stored::default();
    let columns = MixerColumns {
        qkv: qkv.into_iter().flat_map(|part| stored.runs(part)).collect(),
        gate: gate
            .into_iter()
            .flat_map(|part| stored.runs(part))
            .collect(),
    };
    let names = stored.matrices.into_iter().map(|(name, _)| name).collect();
    let is_in_order = columns.gate.is_empty();
    Ok((names, (!is_in_order).then_some(columns)))
}

/// Stored matrices whose outputs are side by side, by name, each with its first column.
#[derive(Default)]
struct Stored {
    matrices: Vec<(String, usize)>,
    columns: usize,
}

impl Stored {
    /// The columns of a tensor that is some rows of a stored matrix, which is added if it is new.
    fn runs(&mut self, part: &TensorSpec) -> Vec<Range<usize>> {
        let (all, rows): (usize, StoredRows) = match part.within.first() {
            Some(within) if !part.alone => (within.shape[0], within.rows.clone()),
            _ => (part.shape[0], (0..part.shape[0]).into()),
        };
        let name = part.stored_name().trim_end_matches(".weight");
        let known = self.matrices.iter().find(|(known, _)| known == name);
        let first = known.map_or(self.columns, |(_, first)| *first);
        if first == self.columns {
            self.matrices.push((name.to_owned(), first));
            self.columns += all;
        }
        let runs = rows.parts(0..rows.count());
        runs.map(|(_, run)| first + run.start..first + run.end)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::families;

    /// The last parts of the names of a block's projections, and the columns of their output, for a model of the goldens.
    fn read(model: &str, index: usize) -> (Vec<String>, Option<MixerColumns>) {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model");
        let config = std::fs::read(place.join(model).join("config.json")).unwrap();
        let spec = families::read(&serde_json::from_slice(&config).unwrap()).unwrap();
        let (names, columns) = mixer_inputs(&spec, index).unwrap();
        let last = |name: String| name.rsplit('.').next().unwrap().to_owned();
        (names.into_iter().map(last).collect(), columns)
    }

    #[test]
    fn columns_are_those_of_stored_rows() {
        let (names, columns) = read("qwen3next_shared", 0);
        assert_eq!(names, ["in_proj_qkvz", "in_proj_ba"]);
        // A key head has 32 rows of its query and of its key, 16 of each of its two values, and as many of their gates.
        let qkv = vec![0..32, 128..160, 32..64, 160..192, 64..96, 192..224];
        let gate = vec![96..128, 224..256, 256..258, 260..262, 258..260, 262..264];
        assert_eq!(columns, Some(MixerColumns { qkv, gate }));

        let (names, columns) = read("qwen35_tied", 0);
        assert_eq!(
            names,
            ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
        );
        let (qkv, gate) = (vec![0..192; 1], vec![192..320, 320..324, 324..328]);
        assert_eq!(columns, Some(MixerColumns { qkv, gate }));

        let (names, columns) = read("qwen35_tied", 3);
        assert_eq!(names, ["q_proj", "k_proj", "v_proj"]);
        let qkv = vec![0..32, 64..96, 128..160, 192..224, 256..320, 320..384];
        let gate = vec![32..64, 96..128, 160..192, 224..256];
        assert_eq!(columns, Some(MixerColumns { qkv, gate }));

        let (names, columns) = read("qwen3_tied", 0);
        assert_eq!(names, ["q_proj", "k_proj", "v_proj"]);
        assert_eq!(columns, None);
    }
}
