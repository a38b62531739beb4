//! Declares kernels: an enum whose variants are the kernels of one parameter type, with their names in the machine code and their units.

/// Declares enums of kernels, each with its parameter type and, by unit, its variants and their names; and `ARGUMENTS`, the names of all of
/// them with the bytes of their parameters.
macro_rules! kernels {
    ($(
        $(#[$doc:meta])*
        $vis:vis enum $name:ident($arguments:ty) {
            $($unit:ident { $($variant:ident = $symbol:literal),+ $(,)? })+
        }
    )+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            $vis enum $name {
                $($(#[doc = concat!("`", $symbol, "`")] $variant,)+)+
            }

            impl $crate::cuda::driver::Kernel for $name {
                type Arguments = $arguments;
                type Unit = $crate::cuda::units::Unit;

                fn unit(self) -> Self::Unit {
                    match self {
                        $($($name::$variant)|+ => $crate::cuda::units::Unit::$unit,)+
                    }
                }

                fn name(self) -> &'static str {
                    match self {
                        $($($name::$variant => $symbol,)+)+
                    }
                }
            }
        )+

        /// Argument sizes of this file's kernels, by name.
        pub(super) const ARGUMENTS: &[(&str, usize)] = &[
            $($($(($symbol, size_of::<$arguments>()),)+)+)+
        ];
    };
}

pub(super) use kernels;
