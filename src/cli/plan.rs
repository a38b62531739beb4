//! The memory that a model and its conversations would take on a device: `nvfp4 inspect --device`.

use std::path::Path;

use NVFP4::base::Result;
use NVFP4::base::memory::Bytes;
use NVFP4::base::size::readable;
use NVFP4::engine::capacity::{self, Plan, PlanOptions};
use NVFP4::format::nvfp4::{QuantizeOptions, Recipe};
use NVFP4::model::LoadOptions;

use super::model::{KvName, device, gigabytes};
use super::output;
use super::recipe::RecipeName;

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    /// Print what the model takes of memory instead, on this device: cpu, cuda:N, or auto for the first GPU, else the CPU
    #[arg(long)]
    pub(super) device: Option<String>,
    /// Tokens of a conversation; default: as many as the model was made for
    #[arg(long, requires = "device")]
    context: Option<usize>,
    /// Conversations that take steps together
    #[arg(long, requires = "device", default_value_t = 1)]
    conversations: usize,
    /// Memory in which they are to fit, in GB; default: what is free on the device
    #[arg(long, requires = "device", value_name = "GB", value_parser = gigabytes)]
    memory: Option<usize>,
    /// As if dense linear weights were quantized to NVFP4 while loading
    #[arg(long, requires = "device", value_enum)]
    quantize: Option<RecipeName>,
    /// The type of the KV cache
    #[arg(long, requires = "device", value_enum, default_value_t = KvName::F16)]
    kv: KvName,
    /// CPU threads; default: one for each core
    #[arg(long, requires = "device")]
    threads: Option<usize>,
}

/// Prints the plan of the model at `path` on a device.
pub(super) fn run(path: &Path, name: &str, args: &PlanArgs, json: bool) -> Result<()> {
    let load = LoadOptions {
        quantize: args.quantize.map(|recipe| QuantizeOptions {
            recipe: Recipe::from(recipe),
            ..QuantizeOptions::default()
        }),
        ..LoadOptions::new(device(name, args.threads)?)
    };
    let options = PlanOptions {
        sequences: args.conversations,
        context: args.context,
        kv: args.kv.into(),
        budget: args.memory.map(|bytes| bytes as u64),
    };
    let plan = capacity::plan(path, &load, &options)?;
    match json {
        true => output::json(&plan),
        false => print(&plan),
    }
}

fn print(plan: &Plan) -> Result<()> {
    output::line(format_args!(
        "{}, {} of {} tokens",
        plan.device,
        conversations(plan.sequences as u64),
        plan.context
    ))?;
    let line = |what: &str, amount: &str| output::line(format_args!("  {what:24}{amount}"));
    line("weights", &places(plan.weights))?;
    if plan.mapped_bytes > 0 {
        let mapped = readable(plan.mapped_bytes);
        line(
            "mapped weights",
            &format!("{mapped}, which processes share"),
        )?;
    }
    line(
        "while loading",
        &format!("at most {}", places(plan.load_peak)),
    )?;
    line("working memory", &places(plan.workspace))?;
    if plan.graph_bytes_bound > 0 {
        let bound = readable(plan.graph_bytes_bound);
        line("recorded steps", &format!("at most {bound}"))?;
    }
    let of_token = readable(plan.kv_bytes_per_token);
    let own = readable(plan.sequence_bytes);
    let blocks = readable(plan.kv_bytes);
    let kv = format!("{blocks}: {own} a conversation, {of_token} a token");
    line("keys and values", &kv)?;
    if plan.blocks.state_bytes > 0 {
        let states = readable(plan.sequence_state_bytes);
        let state = readable(plan.blocks.state_bytes);
        let text = format!("{states} of a conversation, {state} each");
        line("  recurrent states", &text)?;
    }
    line("in all", &readable(plan.total()))?;
    match (plan.sequences_that_fit, plan.free_bytes) {
        (Some(fit), Some(free)) => line(
            "room",
            &format!("for {} in {}", conversations(fit), readable(free)),
        ),
        (Some(fit), None) => line("room", &format!("for {}", conversations(fit))),
        (None, _) => Ok(()),
    }
}

fn conversations(count: u64) -> String {
    match count {
        1 => "1 conversation".to_owned(),
        count => format!("{count} conversations"),
    }
}

/// Human-readable bytes of the GPU and of the host; one that is 0 is left out.
fn places(bytes: Bytes) -> String {
    match (bytes.device, bytes.host) {
        (0, host) => readable(host),
        (device, 0) => readable(device),
        (device, host) => format!(
            "{}, and {} of host memory",
            readable(device),
            readable(host)
        ),
    }
}
