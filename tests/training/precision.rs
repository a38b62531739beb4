//! NVFP4 GEMMs: unaffected operands, mean errors, and that models learn with them.

use NVFP4::model::training::ProductPrecision;
use NVFP4::train::{HighBlocks, ProductForm, ScaleRule};

use super::*;

fn gradients_with(
    device: &Device,
    source: &Source,
    batch: &Batch,
    precision: ProductPrecision,
    key: u64,
) -> Vec<Vec<f32>> {
    let mut store = Dense::new(device, source);
    let options = Options::default();
    let mut pass = Pass::new(device, source.spec(), source.layout(), options).unwrap();
    pass.set_precision(precision);
    pass.set_key(key);
    pass.gradients(&mut store, batch, 0).unwrap();
    store.gradients
}

fn nvfp4(activations: ProductForm, gradients: ProductForm, high: Vec<bool>) -> ProductPrecision {
    ProductPrecision {
        activations,
        activation_scales: ScaleRule::Amax,
        gradients,
        high,
    }
}

/// Every step backward is linear in the gradients, so that those of all parameters are right on average, whatever is rounded on the way.
#[test]
fn stochastic_gradients_are_unbiased_through_a_whole_model() {
    const KEYS: u64 = 256;
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    let file = std::fs::read(golden("training/qwen3_untied.safetensors")).unwrap();
    let batch = golden_batch(&device, &source, &SafeTensors::deserialize(&file).unwrap());
    let with = |gradients, key| {
        let precision = nvfp4(ProductForm::Bf16, gradients, Vec::new());
        gradients_with(&device, &source, &batch, precision, key)
    };
    let exact = with(ProductForm::Bf16, 0);
    let mut sums: Vec<Vec<f64>> = exact.iter().map(|g| vec![0.0; g.len()]).collect();
    let mut single = Vec::new();
    for key in 0..KEYS {
        let drawn = with(ProductForm::Nvfp4, key);
        if key == 0 {
            assert_eq!(drawn, with(ProductForm::Nvfp4, key));
            assert!(drawn != with(ProductForm::Nvfp4, KEYS));
            let one = |g: &Vec<f32>| g.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            single = drawn.iter().map(one).collect();
        }
        for (sum, drawn) in sums.iter_mut().zip(&drawn) {
            sum.iter_mut()
                .zip(drawn)
                .for_each(|(s, &g)| *s += f64::from(g));
        }
    }
    for (id, m) in source.layout().matrices.iter().enumerate() {
        if id == source.layout().head {
            assert_eq!(
                single[id],
                exact[id].iter().map(|&v| f64::from(v)).collect::<Vec<_>>()
            );
            continue;
        }
        let mean: Vec<f64> = sums[id].iter().map(|s| s / KEYS as f64).collect();
        let (one, all) = (
            relative_error(&single[id], &exact[id]),
            relative_error(&mean, &exact[id]),
        );
        // The root of 256 is 16.
        assert!(one > 0.02, "{}: one draw is only {one:.1e} off", m.name);
        assert!(all < one / 10.0, "{}: {one:.1e} becomes {all:.1e}", m.name);
    }
}

/// Matrices that are kept high have the bits of a pass without any rounding.
#[test]
fn what_is_kept_high_is_as_it_was() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let file = std::fs::read(golden("training/qwen3_tied.safetensors")).unwrap();
    let batch = golden_batch(&device, &source, &SafeTensors::deserialize(&file).unwrap());
    let with = |form, high| gradients_with(&device, &source, &batch, nvfp4(form, form, high), 1);
    let plain = with(ProductForm::Bf16, Vec::new());
    let all = vec![true; plain.len()];
    assert_eq!(with(ProductForm::Nvfp4, all), plain);
    // For the last block's last projection, the input's gradients and everything after them differ, but nothing before them.
    let last = source.layout().blocks.last().unwrap();
    let last = last.mlp.dense().unwrap().down.matrix;
    let but_one = (0..plain.len()).map(|id| id != last).collect();
    let precision = nvfp4(ProductForm::Bf16, ProductForm::Nvfp4, but_one);
    let one = gradients_with(&device, &source, &batch, precision, 1);
    assert!(
        one[last] != plain[last]
            && one[source.layout().embedding] != plain[source.layout().embedding]
    );

    // As a recipe says it.
    let losses = |recipe: Recipe| {
        let mut trainer = trainer(&config(recipe, 10));
        let batch = Documents::new(1, &[40]);
        [(); 3].map(|()| trainer.step(&[batch.batch()]).unwrap().loss)
    };
    let plain = losses(Recipe::default());
    let high = Recipe {
        activations: ProductForm::Nvfp4,
        gradients: ProductForm::Nvfp4,
        high_blocks: HighBlocks { first: 1, last: 99 },
        ..Recipe::default()
    };
    assert_eq!(losses(high.clone()), plain);
    let low = Recipe {
        high_blocks: HighBlocks::default(),
        ..high
    };
    assert!(losses(low) != plain);
}

#[test]
fn models_learn_with_products_in_four_bits() {
    let evaluation = Documents::new(999, &[96; 4]);
    let loss = |recipe| {
        let mut trainer = trainer(&config(recipe, 100));
        for step in 0..100 {
            let batch = Documents::new(step, &[64; 4]);
            trainer.step(&[batch.batch()]).unwrap();
        }
        trainer.evaluate(&[evaluation.batch()], true).unwrap()
    };
    let plain = loss(Recipe::default());
    let four = loss(Recipe {
        activations: ProductForm::Nvfp4,
        activation_scales: ScaleRule::FourOverSix,
        gradients: ProductForm::Nvfp4,
        ..Recipe::default()
    });
    println!("after 100 steps: {plain:.4} with products as they are, {four:.4} in NVFP4");
    assert!(
        four < plain + 0.5,
        "{four}, and {plain} with products as they are"
    );
}
