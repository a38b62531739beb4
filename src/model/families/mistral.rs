//! Mistral: Llama, every layer of which may see only a window.

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    read,
};

/// The window of a config that does not say null: that of the first Mistral.
const WINDOW: usize = 4096;

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = match keys.0.contains_key("sliding_window") {
        true => keys.size("sliding_window")?,
        false => Some(WINDOW),
    };
    Ok(decoder.finish_windowed(window, |_| true))
}
