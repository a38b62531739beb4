//! Comparisons of two models on a GPU, against the CPU.

use std::sync::Arc;

use NVFP4::model::Device;
use NVFP4::model::compare::{Comparison, Measures, Summary, compare};
use NVFP4::model::training::Source;

use crate::common::golden;
use crate::support::gpu;

fn compared(device: &Device, names: [&str; 2]) -> Comparison {
    let [examined, reference] = names.map(|name| Arc::new(Source::open(&golden(name)).unwrap()));
    let vocabulary = examined.spec().vocab_size as u32;
    let tokens: Vec<u32> = (0..600u32)
        .map(|i| i * i * 7919 / 13 % vocabulary)
        .collect();
    let windows: Vec<&[u32]> = tokens.chunks(90).collect();
    let measures = Measures {
        tokens: true,
        streams: true,
        blocks: true,
    };
    compare(
        device,
        &examined,
        &reference,
        &windows,
        measures,
        &mut |_| {},
    )
    .unwrap()
}

/// Activations are bfloat16 on a GPU, with 8 bits of precision, and float32 on the CPU: after two blocks streams differ by about a
/// hundredth, and so do errors and divergences that are much larger than that.
#[test]
fn comparisons_on_a_gpu_agree_with_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let names = ["llama_linear", "llama_llama3"];
    let found = compared(&Device::Cuda(gpu.clone()), names);
    let expected = compared(&Device::cpu(None).unwrap(), names);
    let close = |what: &str, found: f64, expected: f64| {
        assert!(
            (found / expected - 1.0).abs() < 0.05,
            "{what}: {found} and {expected}"
        );
    };
    let (of_found, of_expected) = (Summary::new(&found.tokens), Summary::new(&expected.tokens));
    close("mean", of_found.mean, of_expected.mean);
    close("loss", of_found.perplexity, of_expected.perplexity);
    close(
        "loss of the reference",
        of_found.reference_perplexity,
        of_expected.reference_perplexity,
    );
    let tables = [&found, &expected].map(|c| c.tables_divergence.unwrap());
    close("tables", tables[0], tables[1]);
    for (what, found, expected) in [
        ("streams", &found.stream_errors, &expected.stream_errors),
        ("blocks", &found.block_errors, &expected.block_errors),
        (
            "exchanged",
            &found.block_divergences,
            &expected.block_divergences,
        ),
    ] {
        assert_eq!(found.len(), 2);
        for (found, expected) in found.iter().zip(expected) {
            close(what, *found, *expected);
        }
    }
    let same = compared(&Device::Cuda(gpu), [names[0]; 2]);
    assert_eq!(Summary::new(&same.tokens).max, 0.0);
    assert_eq!(same.block_divergences, [0.0; 2]);
    assert_eq!(same.stream_errors, [0.0; 2]);
}
