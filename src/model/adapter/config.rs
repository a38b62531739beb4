//! The `adapter_config.json` of peft: what decides the scale of factors, and what an adapter must not have.

use serde_json::Value;

use crate::base::Result;
use crate::base::error::{bail, err};
use crate::model::keys::Keys;

/// The largest rank that is loaded.
const MOST_RANK: usize = 1024;
/// peft's own defaults.
const RANK: usize = 8;
const ALPHA: f64 = 8.0;

/// Ways to initialize factors that also change the base model's weights.
const CHANGED_BASES: [&str; 4] = ["pissa", "olora", "corda", "lora_ga"];

/// Settings of an adapter.
pub(super) struct AdapterConfig<'a> {
    rank: usize,
    alpha: f64,
    /// Ranks and alphas of modules by patterns of their names; the first that fits applies.
    ranks: Vec<(&'a str, usize)>,
    alphas: Vec<(&'a str, f64)>,
    /// Whether the scale is `alpha / sqrt(rank)` rather than `alpha / rank`.
    by_root: bool,
}

impl<'a> AdapterConfig<'a> {
    /// Reads a config, and refuses what is not only a low-rank product beside linear maps.
    pub(super) fn read(config: &'a Value) -> Result<AdapterConfig<'a>> {
        let Value::Object(map) = config else {
            bail!(CorruptFile, "expected a JSON object");
        };
        let keys = Keys(map);
        match keys.text("peft_type")? {
            Some("LORA") => {}
            Some(other) => bail!(
                Unsupported,
                "peft_type is '{other}'; adapters of type 'LORA' are read"
            ),
            None => bail!(
                CorruptFile,
                "peft_type is missing, so this is no config of peft; expected 'LORA'"
            ),
        }
        refuse(&keys)?;
        let rank = keys.size("r")?.unwrap_or(RANK);
        check_rank(rank)?;
        Ok(AdapterConfig {
            rank,
            alpha: finite("lora_alpha", keys.number("lora_alpha")?.unwrap_or(ALPHA))?,
            ranks: patterns(&keys, "rank_pattern", |v| {
                v.as_u64().map(|rank| rank as usize)
            })?,
            alphas: patterns(&keys, "alpha_pattern", Value::as_f64)?,
            by_root: keys.flag("use_rslora")?.unwrap_or(false),
        })
    }

    /// The rank and the scale of a module's factors.
    pub(super) fn of_module(&self, module: &str) -> Result<(usize, f32)> {
        let rank = first_of(&self.ranks, module).unwrap_or(self.rank);
        check_rank(rank)?;
        let alpha = first_of(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = match self.by_root {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        Ok((rank, finite("lora_alpha", alpha / divisor)? as f32))
    }
}

fn finite(name: &str, value: f64) -> Result<f64> {
    match (value as f32).is_finite() {
        true => Ok(value),
        false => bail!(
            CorruptFile,
            "{name} gives a scale of {value}, which is not finite in float32"
        ),
    }
}

fn check_rank(rank: usize) -> Result<()> {
    match (1..=MOST_RANK).contains(&rank) {
        true => Ok(()),
        false => bail!(
            Unsupported,
            "rank {rank}; an adapter has a rank from 1 to {MOST_RANK}"
        ),
    }
}

/// Refuses settings of another kind of adapter.
fn refuse(keys: &Keys<'_>) -> Result<()> {
    for (name, what) in [
        ("use_dora", "DoRA scales whole weights"),
        ("use_qalora", "QALoRA pools its inputs"),
        ("lora_bias", "the factors have biases"),
        ("fan_in_fan_out", "the weights are stored transposed"),
    ] {
        if keys.flag(name)? == Some(true) {
            bail!(
                Unsupported,
                "{name} is true: {what}; plain LoRA is read, or merge the adapter with peft"
            );
        }
    }
    if let Some(bias) = keys.text("bias")?.filter(|bias| *bias != "none") {
        bail!(
            Unsupported,
            "bias is '{bias}': the adapter replaces biases of the base; 'none' is read"
        );
    }
    for name in [
        "modules_to_save",
        "target_parameters",
        "layer_replication",
        "trainable_token_indices",
        "alora_invocation_tokens",
    ] {
        let is_set = |value: &&Value| match value {
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            Value::Bool(set) => *set,
            _ => true,
        };
        if let Some(value) = keys.get(name).filter(is_set) {
            bail!(
                Unsupported,
                "{name} is {value}; factors beside linear maps are read, and nothing else of an adapter"
            );
        }
    }
    let initial = keys.get("init_lora_weights").and_then(Value::as_str);
    let changes = |initial: &&str| CHANGED_BASES.iter().any(|b| initial.starts_with(b));
    if let Some(initial) = initial.filter(changes) {
        bail!(
            Unsupported,
            "init_lora_weights is '{initial}', which also changed the weights of the base; convert the adapter with peft \
             (path_initial_model_for_weight_conversion), or merge it"
        );
    }
    Ok(())
}

/// The values of a pattern object, in its order.
fn patterns<'a, T>(
    keys: &Keys<'a>,
    name: &str,
    of: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(&'a str, T)>> {
    let Some(patterns) = keys.object(name)? else {
        return Ok(Vec::new());
    };
    let each = patterns.0.iter().map(|(pattern, value)| {
        // peft matches them as regular expressions; a dot in a name is one that fits itself.
        if pattern.contains(|c: char| !c.is_alphanumeric() && !"._-".contains(c)) {
            bail!(
                Unsupported,
                "{name} has the regular expression '{pattern}'; names of modules, or their last parts, are read"
            );
        }
        let value = of(value).ok_or_else(|| {
            err!(
                CorruptFile,
                "{name} is {value} for '{pattern}'; expected a number"
            )
        })?;
        Ok((pattern.as_str(), value))
    });
    each.collect()
}

/// The value of the first pattern that a module's name is, or ends with after a dot.
fn first_of<T: Copy>(patterns: &[(&str, T)], module: &str) -> Option<T> {
    let fits = |pattern: &str| {
        let before = module.strip_suffix(pattern);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let first = patterns.iter().find(|(pattern, _)| fits(pattern))?;
    Some(first.1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn scales_follow_ranks_alphas_and_their_patterns() {
        let of = |config: &Value, module: &str| {
            let config = AdapterConfig::read(config).unwrap();
            config.of_module(module).unwrap()
        };
        let plain = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 12});
        assert_eq!(of(&plain, "model.layers.0.mlp.down_proj"), (4, 3.0));
        let root = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 12, "use_rslora": true});
        assert_eq!(of(&root, "x"), (4, 6.0));
        // peft's defaults.
        assert_eq!(of(&json!({"peft_type": "LORA"}), "x"), (8, 1.0));
        let patterns = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 12,
            "rank_pattern": {"layers.1.mlp.down_proj": 2, "down_proj": 6, "proj": 1},
            "alpha_pattern": {"q_proj": 16.0},
        });
        assert_eq!(of(&patterns, "model.layers.1.mlp.down_proj"), (2, 6.0));
        assert_eq!(of(&patterns, "model.layers.11.mlp.down_proj"), (6, 2.0));
        assert_eq!(of(&patterns, "model.layers.0.self_attn.q_proj"), (4, 4.0));
    }

    #[test]
    fn other_kinds_of_adapters_are_refused_by_name() {
        let unsupported = ErrorKind::Unsupported;
        let refused = |name: &str, value: Value, kind, part| {
            let mut config = json!({"peft_type": "LORA", "r": 4});
            config[name] = value;
            let read = AdapterConfig::read(&config).map(|_| ());
            expect_kind(read, kind, part);
        };
        refused("peft_type", json!("IA3"), unsupported, "'IA3'");
        refused("peft_type", Value::Null, ErrorKind::CorruptFile, "missing");
        refused("use_dora", json!(true), unsupported, "use_dora is true");
        refused("bias", json!("all"), unsupported, "bias is 'all'");
        refused(
            "modules_to_save",
            json!(["lm_head"]),
            unsupported,
            "modules_to_save is [\"lm_head\"]",
        );
        refused("r", json!(4096), unsupported, "rank 4096");
        refused("r", json!(0), ErrorKind::CorruptFile, "'r' is 0");
        refused(
            "init_lora_weights",
            json!("pissa_niter_4"),
            unsupported,
            "pissa_niter_4",
        );
        refused("rank_pattern", json!({"^q": 2}), unsupported, "'^q'");
        refused(
            "lora_alpha",
            json!(1e300),
            ErrorKind::CorruptFile,
            "not finite",
        );
        let accepted = json!({
            "peft_type": "LORA", "bias": "none", "use_dora": false, "modules_to_save": null, "target_parameters": [],
            "init_lora_weights": true,
        });
        AdapterConfig::read(&accepted).unwrap();
    }
}
