//! The conventions that make one weight of several tensors (NF4 among them), inside a container that is always correct: the
//! input chooses names, types, shapes and contents, so that the fuzzer spends its time on how tensors fit together.
#![no_main]

mod walk;

const NAMES: [&str; 20] = [
    "a.weight",
    "a.weight.absmax",
    "a.weight.quant_map",
    "a.weight.nested_absmax",
    "a.weight.nested_quant_map",
    "a.weight.quant_state.bitsandbytes__nf4",
    "a.weight.quant_state.bitsandbytes__fp4",
    "a.weight_scale",
    "a.weight_scale_2",
    "a.input_scale",
    "a.pre_quant_scale",
    "a.weight_packed",
    "a.weight_global_scale",
    "a._weight_qdata",
    "a._weight_scale",
    "a._weight_per_tensor_scale",
    "a.qdata",
    "a.scale",
    "a.weight.qdata",
    "a.weight.scale",
];
const TYPES: [(&str, usize); 6] = [
    ("U8", 1),
    ("F8_E4M3", 1),
    ("F32", 4),
    ("BF16", 2),
    ("F16", 2),
    ("I8", 1),
];

/// Takes numbers from the front of the input; zero when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> usize {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                usize::from(first)
            }
            None => 0,
        }
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        let mut out = now.to_vec();
        out.resize(len, 0x38);
        out
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let mut header = String::from("{");
    let mut data = Vec::new();
    for i in 0..1 + input.byte() % 8 {
        let name = NAMES[input.byte() % NAMES.len()];
        let (dtype, width) = TYPES[input.byte() % TYPES.len()];
        let shape: Vec<usize> = (0..input.byte() % 4)
            .map(|_| 1 + input.byte() % 64)
            .collect();
        let len = shape.iter().product::<usize>() * width;
        let (start, end) = (data.len(), data.len() + len);
        data.extend(input.bytes(len));
        let comma = if i == 0 { "" } else { "," };
        header.push_str(&format!(
            r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        ));
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    walk::walk("x.safetensors", &file);
});
