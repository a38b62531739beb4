// Quantize a matrix to NVFP4 in F#, and see how far it and its product with an input stay from the exact ones; or convert a
// model on disk.
//
//     dotnet build bindings/dotnet/LibNVFP4.FSharp -o build/dotnet
//     dotnet fsi -r:build/dotnet/LibNVFP4.dll -r:build/dotnet/LibNVFP4.FSharp.dll examples/fsharp/quantize.fsx [MODEL DESTINATION]

open System
open LibNVFP4
open LibNVFP4.FSharp

// The relative L2 distance of a from b.
let distance (a: float32[]) (b: float32[]) =
    let square (x: float32) = float x * float x
    sqrt (Seq.sum (Seq.map2 (fun x y -> square (x - y)) a b) / Seq.sumBy square b)

let compare () =
    let random = Random 1
    let values count = Array.init count (fun _ -> float32 (random.NextDouble() * 2.0 - 1.0))
    let w, x = values (64 * 256), values (4 * 256)
    // Tensors over our own arrays, without a copy.
    use weight = w |> Tensor.ofArray [ 64L; 256L ]
    use input = x |> Tensor.ofArray [ 4L; 256L ]
    use dense = LinearWeight.Create weight
    use product = input |> Weight.linear dense
    for recipe in [ Recipe.Amax; Recipe.FourOverSix; Recipe.Sweep ] do
        use quantized = weight |> Quantize.tensorWith (Quantize.recipe recipe)
        use back = quantized |> Quantize.dequantize
        use prepared = quantized |> Weight.ofQuantized
        use y = input |> Weight.linear prepared
        printfn "%-12O weight off by %.4f, product by %.4f" recipe (distance (back.ToFloats()) w)
            (distance (y.ToFloats()) (product.ToFloats()))

match List.ofArray (Array.tail fsi.CommandLineArgs) with
| [ model; destination ] ->
    let progress ``done`` total = eprintf "\r%.0f %%" (100.0 * float ``done`` / float (max total 1L))
    model |> Quantize.modelWith (Quantize.recipe Recipe.Sweep) progress destination
    eprintfn ""
| _ -> compare ()
