/// Element type of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE half precision, rounded to nearest even.
    #[default]
    F16,
    /// IEEE single precision, unrounded.
    F32,
    /// e4m3 codes, with an f32 scale for each key and each value of a head: see [`f8`](crate::format::f8).
    F8,
}

impl KvType {
    /// All types; each stands at the index `self as usize`.
    pub const ALL: [KvType; 3] = [KvType::F16, KvType::F32, KvType::F8];

    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
            KvType::F8 => 1,
        }
    }

    /// Bytes of the scale of one head's key or value; 0 without scales.
    pub const fn scale_bytes(self) -> usize {
        match self {
            KvType::F16 | KvType::F32 => 0,
            KvType::F8 => size_of::<f32>(),
        }
    }

    /// Bytes of the key or the value of a head of `dim` elements at one position, its scale included.
    pub const fn vector_bytes(self, dim: usize) -> usize {
        dim * self.element_bytes() + self.scale_bytes()
    }

    /// Lower-case name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::F8 => "f8",
        }
    }
}
