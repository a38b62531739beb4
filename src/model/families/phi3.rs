//! Phi-3 and Phi-4: Llama with fused projections, of which a part of each head may rotate.

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const PHI3: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    read,
};

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = keys.size("sliding_window")?;
    Ok(decoder.finish_windowed(window, |_| true))
}
