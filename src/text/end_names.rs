//! Names of tokens that end an assistant's turn in the templates of known model families.

/// Names that do not occur in text by chance: such a token ends a turn whatever type its vocabulary gives it.
pub(super) const TURN_ENDS: [&str; 20] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    // Ends a message in which Llama calls a tool.
    "<|eom_id|>",
    "<|eot|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    // Follows a call of Gemma 4: its result comes next.
    "<|tool_response>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "[|endofturn|]",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|role_end|>",
];

/// Names that are words of HTML or of programs in some vocabularies. They end a turn only as special tokens.
pub(super) const SPECIAL_ENDS: [&str; 3] = ["</s>", "<eos>", "[EOS]"];

/// `<|end|>` closes each part of an answer, rather than the turn, if a vocabulary has both tokens of a pair: those of gpt-oss, or of Solar.
pub(super) const PART_END: &str = "<|end|>";
pub(super) const ENDS_BY_PART: [[&str; 2]; 2] =
    [["<|return|>", "<|call|>"], ["<|flush|>", "<|calls|>"]];

/// Whether a token of this name ends a turn, regardless of its type.
pub(super) fn ends_turn(name: &str) -> bool {
    name.starts_with(['<', '[']) && TURN_ENDS.contains(&name)
}
