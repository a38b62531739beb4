//! Llama: the block that the others differ from.

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    read,
};

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    Ok(decoder.finish(|_, _| {}))
}
