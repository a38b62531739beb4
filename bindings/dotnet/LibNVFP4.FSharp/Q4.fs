/// Names and shapes of TorchSharp.Q4.Extension over tensors of this library, for programs that leave TorchSharp.
///
/// Two things differ. The library has kernels for the CPU, so a CPU target can have "nvfp4-kernel"; and a weight in NVFP4 is
/// multiplied with exact activations (W4A16), where the other quantizes them. steWeight and linearSte are forward alone: there
/// is no automatic differentiation here, and the straight-through gradient of a weight is that of its quantized values.
namespace LibNVFP4.Q4

open System
open LibNVFP4

/// The 4-bit format of a weight.
type QuantFormat =
    | NF4
    | NVFP4

/// Whether a weight is multiplied in 4 bits or decoded.
type Q4ComputePath =
    | Auto
    | KernelOnly
    | KernelOrFallback
    | DequantMatmulOnly

/// Where products run.
type Q4RuntimeTarget =
    | Auto
    | Cpu
    | Cuda of deviceIndex: int

/// Whether weights go to managed (unified) memory.
type UnifiedMemoryPolicy =
    | Disabled
    | PreferUnified
    | RequireUnified

/// The tensors of a 4-bit weight, by name.
type Q4Schema =
    { Format: QuantFormat
      WeightKey: string
      ScaleKey: string option
      AbsmaxKey: string option
      QuantMapKey: string option
      ExtraKeys: string list }

/// The options of a session.
type Q4SessionConfig =
    { BackendOverride: string option
      ComputePath: Q4ComputePath
      RuntimeTarget: Q4RuntimeTarget
      UnifiedMemoryPolicy: UnifiedMemoryPolicy
      EnableDiagnostics: bool }

/// The tensors of a 4-bit weight.
type Q4TensorBundle =
    { Weight: Tensor
      Scale: Tensor option
      Absmax: Tensor option
      QuantMap: Tensor option }

/// The chosen backend, and the reason.
type Q4Diagnostics =
    { Format: QuantFormat
      Backend: string
      ComputePath: Q4ComputePath
      NativeLoadState: string
      FallbackReason: string option }

/// A weight that a backend has prepared.
type IQ4PreparedWeight =
    inherit IDisposable
    /// Its format.
    abstract Format: QuantFormat
    /// Where it is: "cpu" or "cuda:0".
    abstract Device: string
    /// A name for messages.
    abstract DebugName: string

/// A backend of products with weights.
type IQ4Backend =
    /// "nvfp4-kernel", "nf4-kernel" or "dequant-matmul".
    abstract Name: string
    /// Whether it can multiply with such a weight.
    abstract Supports: schema: Q4Schema * config: Q4SessionConfig -> bool
    /// Prepares a weight. The tensors may be disposed of afterwards.
    abstract PrepareWeight: schema: Q4Schema * tensors: Q4TensorBundle * device: string -> IQ4PreparedWeight
    /// Multiplies an input with a weight that this backend has prepared.
    abstract Linear: input: Tensor * prepared: IQ4PreparedWeight * outDtype: DType -> Tensor

/// The native library as hosts of TorchSharp probe it.
module NativeInterop =
    /// The result of loading a library.
    type NativeLoadResult =
        { LibraryPath: string
          Loaded: bool
          Error: string option }

    let mutable private nf4Path: string option = None

    /// Sets the path of the library: None for NVFP4_LIB_PATH and the usual places. This library has NF4 too, so the path for
    /// NF4 is only the file whose presence loadNf4 checks. A library that is in use stays.
    let configure (nvfp4Path: string option, nf4: string option) : unit =
        Library.Use(Option.toObj nvfp4Path)
        nf4Path <- nf4

    /// Loads the library, or says why it cannot be.
    let loadNvfp4 () : NativeLoadResult =
        match Library.Probe() with
        | true, file, _ -> { LibraryPath = file; Loaded = true; Error = None }
        | false, file, error -> { LibraryPath = Option.ofObj file |> Option.defaultValue ""; Loaded = false; Error = Some error }

    /// Loads the library for NF4.
    let loadNf4 () : NativeLoadResult =
        match nf4Path with
        | Some path when not (IO.File.Exists path) -> { LibraryPath = path; Loaded = false; Error = Some(path + ": not there") }
        | _ -> loadNvfp4 ()

    /// Whether the library can be loaded.
    let isNvfp4Available () : bool = (loadNvfp4 ()).Loaded

    /// Whether NF4 can be decoded.
    let isNf4Available () : bool = (loadNf4 ()).Loaded

    /// Whether fp4Quantize can be called.
    let hasLibTorchFp4Quantize () : bool = isNvfp4Available ()

    /// Whether scaledMmFp4 can be called.
    let hasLibTorchScaledMm () : bool = isNvfp4Available ()

    /// Whether tryEmptyNvfp4Cache does something.
    let hasNvfp4EmptyCache () : bool = isNvfp4Available ()

    /// Whether the functions on managed memory can be called.
    let hasManagedSupport () : bool = isNvfp4Available ()

    /// Quantizes [.., K] with block scales alone: codes [.., K / 2] and scales [.., K / 16].
    let fp4Quantize (input: Tensor) : Tensor * Tensor =
        let quantized = Quantizer.QuantizeLegacy(input)
        quantized.Codes, quantized.Scales

    /// Multiplies codes [M, K / 2] with the transposed view [K / 2, N] of others, both with swizzled scales.
    let scaledMmFp4 (mat1: Tensor) (mat2: Tensor) (scaleA: Tensor) (scaleB: Tensor) (outDtype: DType) : Tensor =
        Quantizer.ScaledMultiply(mat1, mat2, scaleA, scaleB, outDtype)

    /// Frees what the library keeps for reuse, if it can be loaded.
    let tryEmptyNvfp4Cache () : bool =
        if isNvfp4Available () then
            Library.EmptyCache()
            true
        else
            false

    /// Whether tensors can be in managed memory.
    let canUseManaged () : bool = hasManagedSupport () && Memory.CanBeManaged()

    /// Whether a tensor is in managed memory.
    let isManagedTensor (tensor: Tensor) : bool = tensor.IsManaged

    /// A tensor with the same values in managed memory.
    let toManagedTensor (tensor: Tensor) (prefetchDevice: int option) (readMostly: bool) : Tensor =
        tensor.ToManaged(Option.toNullable prefetchDevice, readMostly)

    /// Brings a tensor in managed memory to a CUDA device, or with -1 to the host.
    let prefetchManagedTensor (tensor: Tensor) (deviceIndex: int) : unit = tensor.PrefetchManaged(deviceIndex)

/// Managed memory by policy. Nothing goes there that was not asked for.
module UnifiedMemory =
    /// Whether TS_Q4_DISABLE_UM leaves managed memory on.
    let isPolicyEnabledByEnv () : bool =
        match Environment.GetEnvironmentVariable "TS_Q4_DISABLE_UM" with
        | null -> true
        | value ->
            match value.Trim().ToLowerInvariant() with
            | "1"
            | "true"
            | "yes" -> false
            | _ -> true

    /// Whether tensors can be in managed memory.
    let isSupported () : bool = isPolicyEnabledByEnv () && NativeInterop.canUseManaged ()

    /// Whether a tensor is in managed memory.
    let isManagedTensor (tensor: Tensor) : bool = tensor.IsManaged

    /// A copy in managed memory, or the tensor itself where that cannot be.
    let tryPromoteToManaged (tensor: Tensor) (readMostly: bool) (prefetchDevice: int option) : Tensor =
        if isSupported () then NativeInterop.toManagedTensor tensor prefetchDevice readMostly else tensor

    /// Gives the tensor as it is; fails where the policy requires managed memory and there is none.
    let applyPolicy (policy: UnifiedMemoryPolicy) (tensor: Tensor) : Tensor =
        if policy = RequireUnified && not (isSupported ()) then
            invalidOp "the policy requires managed memory, and this machine or TS_Q4_DISABLE_UM does not allow it; Library.Diagnose() says why"
        tensor

    /// A weight under the policy: a copy in managed memory, or another handle of the same tensor.
    let applyMutablePolicy (policy: UnifiedMemoryPolicy) (tensor: Tensor) : Tensor =
        let tensor = applyPolicy policy tensor
        match policy with
        | Disabled -> tensor
        | _ when isSupported () -> tensor.ToManaged()
        | _ -> tensor.View(tensor.Shape, tensor.Strides)

/// Which 4-bit weights a set of tensors holds.
module Schema =
    let private described (tensors: Map<string, Tensor>) =
        tensors |> Seq.map (fun t -> NamedTensor(t.Key, t.Value.DType, t.Value.Shape)) |> WeightSchema.Describe

    let private key name (weight: WeightDescription) =
        match weight.Keys.TryGetValue name with
        | true, key -> Some key
        | _ -> None

    /// The first weight that has all its parts, an NVFP4 one if there is one.
    let detect (tensors: Map<string, Tensor>) : Q4Schema option =
        described tensors
        |> Seq.filter (fun weight -> weight.Missing.Count = 0)
        |> Seq.sortBy (fun weight -> (if weight.Format = Format.Nvfp4 then 0 else 1), weight.Name)
        |> Seq.tryHead
        |> Option.map (fun weight ->
            { Format = (if weight.Format = Format.Nvfp4 then NVFP4 else NF4)
              WeightKey = weight.Keys.["codes"]
              ScaleKey = key "scales" weight
              AbsmaxKey = key "absmax" weight
              QuantMapKey = key "quant_map" weight
              ExtraKeys = List.ofSeq weight.Extra })

    /// Whether a set of tensors has what a schema names, in types and shapes that fit together.
    let validate (schema: Q4Schema) (tensors: Map<string, Tensor>) : Result<unit, string list> =
        let keys = schema.WeightKey :: List.choose id [ schema.ScaleKey; schema.AbsmaxKey; schema.QuantMapKey ]
        match keys |> List.filter (fun key -> not (tensors.ContainsKey key)) with
        | [] ->
            let weights = tensors |> Map.filter (fun key _ -> List.contains key keys) |> described
            let faults = weights |> Seq.collect (fun weight -> Seq.append weight.Missing weight.Faults) |> List.ofSeq
            if weights.Count = 0 then Error [ schema.WeightKey + " is no 4-bit weight" ]
            elif faults.IsEmpty then Ok()
            else Error faults
        | missing -> missing |> List.map (sprintf "%s is missing") |> Error

    /// The first weight, which must be right.
    let detectOrFail (tensors: Map<string, Tensor>) : Q4Schema =
        match detect tensors with
        | None -> invalidOp "no NVFP4 weight (.qdata and .scale) and no NF4 weight (.weight, .absmax and .quant_map) is among the tensors"
        | Some schema ->
            match validate schema tensors with
            | Ok() -> schema
            | Error faults -> invalidOp (String.concat "; " faults)

/// The backends of the library.
module Backend =
    type private Prepared(format: QuantFormat, device: string, name: string, weight: LinearWeight) =
        member _.Weight = weight
        interface IQ4PreparedWeight with
            member _.Format = format
            member _.Device = device
            member _.DebugName = name
            member _.Dispose() = weight.Dispose()

    let private formatOf (schema: Q4Schema) =
        match schema.Format with
        | NVFP4 -> Format.Nvfp4
        | NF4 -> Format.Nf4

    let private deviceOf (name: string) =
        match name.Trim().ToLowerInvariant() with
        | "cpu" -> Device.Cpu
        | "auto" -> Device.Auto
        | "cuda" -> Device.Cuda()
        | name when name.StartsWith("cuda:", StringComparison.Ordinal) ->
            match Int32.TryParse(name.Substring 5) with
            | true, index -> Device.Cuda(index)
            | _ -> invalidArg "device" (sprintf "\"%s\" is no device; cpu, cuda and cuda:N are" name)
        | _ -> invalidArg "device" (sprintf "\"%s\" is no device; cpu, cuda and cuda:N are" name)

    /// The device that a configuration means, by name.
    let internal deviceName (config: Q4SessionConfig) =
        match config.RuntimeTarget with
        | Q4RuntimeTarget.Auto -> "auto"
        | Cpu -> "cpu"
        | Cuda index -> sprintf "cuda:%d" index

    let private optionsOf (config: Q4SessionConfig) =
        let path =
            match config.ComputePath with
            | Q4ComputePath.Auto -> ComputePath.Auto
            | KernelOnly -> ComputePath.KernelOnly
            | KernelOrFallback -> ComputePath.KernelOrFallback
            | DequantMatmulOnly -> ComputePath.DequantMatmulOnly
        let name = config.BackendOverride |> Option.map (fun name -> name.Trim().ToLowerInvariant()) |> Option.toObj
        WeightOptions(ComputePath = path, Device = deviceOf (deviceName config), Backend = name)

    let private select (schema: Q4Schema) (config: Q4SessionConfig) = LinearWeight.SelectBackend(formatOf schema, optionsOf config)

    let private prepare (name: string) (schema: Q4Schema) (tensors: Q4TensorBundle) (device: string) =
        let options = WeightOptions(Backend = name, Device = deviceOf device)
        let missing part = invalidArg "tensors" (sprintf "%s has no %s tensor" schema.WeightKey part)
        let weight =
            match schema.Format with
            | NVFP4 ->
                let scale = tensors.Scale |> Option.defaultWith (fun () -> missing "scale")
                LinearWeight.Create(new QuantizedTensor(tensors.Weight, scale), options)
            | NF4 ->
                let absmax = tensors.Absmax |> Option.defaultWith (fun () -> missing "absmax")
                let shape = tensors.Weight.Shape
                if shape.Length <> 2 then
                    invalidArg "tensors" (sprintf "%s has %d dimensions; an NF4 weight has two, [N, K / 2]" schema.WeightKey shape.Length)
                let n, k = shape.[0], 2L * shape.[1]
                let block = if absmax.Length = 0L then 0L else n * k / absmax.Length
                LinearWeight.Create(new Nf4Tensor(tensors.Weight, absmax, block, n, k), n, k, Option.toObj tensors.QuantMap, options)
        new Prepared(schema.Format, device, name + ":" + schema.WeightKey, weight) :> IQ4PreparedWeight

    let private named (name: string) =
        { new IQ4Backend with
            member _.Name = name
            member _.Supports(schema, config) =
                try
                    (select schema { config with BackendOverride = Some name }).Name = name
                with :? Nvfp4Exception ->
                    false
            member _.PrepareWeight(schema, tensors, device) = prepare name schema tensors device
            member _.Linear(input, prepared, outDtype) =
                match prepared with
                | :? Prepared as prepared -> prepared.Weight.Linear(input, outDtype)
                | _ -> invalidArg "prepared" (sprintf "%s was prepared by another implementation of backends" prepared.DebugName) }

    /// The backend for a weight, or an exception that says why there is none.
    let create (schema: Q4Schema) (config: Q4SessionConfig) : IQ4Backend = named (select schema config).Name

    /// The backend for a weight, or why there is none.
    let tryCreate (schema: Q4Schema) (config: Q4SessionConfig) : Result<IQ4Backend, string> =
        try
            Ok(create schema config)
        with :? Nvfp4Exception as e ->
            Error e.Message

    /// The backend that would be chosen for a weight, and the reason.
    let diagnose (schema: Q4Schema) (config: Q4SessionConfig) : Q4Diagnostics =
        let load = NativeInterop.loadNvfp4 ()
        let state =
            match load.Error with
            | None -> sprintf "nvfp4=ok(%s)" load.LibraryPath
            | Some error -> sprintf "nvfp4=fail(%s)" error
        let chosen = select schema config
        { Format = schema.Format
          Backend = chosen.Name
          ComputePath = config.ComputePath
          NativeLoadState = sprintf "%s; managed_capable=%b" state (NativeInterop.canUseManaged ())
          FallbackReason = Option.ofObj chosen.FallbackReason }

    /// The names of the backends that this machine has.
    let listAvailable () : string list =
        [ "nvfp4-kernel", Format.Nvfp4; "nf4-kernel", Format.Nf4; "dequant-matmul", Format.Nvfp4 ]
        |> List.filter (fun (name, format) ->
            try
                (LinearWeight.SelectBackend(format, WeightOptions(Backend = name, Device = Device.Auto))).Name = name
            with :? Nvfp4Exception ->
                false)
        |> List.map fst

/// A linear layer whose weight is in 4 bits.
type Q4Linear(config: Q4SessionConfig, schema: Q4Schema, tensors: Q4TensorBundle, ?backend: IQ4Backend) =
    let backend = defaultArg backend (Backend.create schema config)
    do UnifiedMemory.applyPolicy config.UnifiedMemoryPolicy tensors.Weight |> ignore
    let prepared = backend.PrepareWeight(schema, tensors, Backend.deviceName config)

    /// The name of the backend that multiplies.
    member _.BackendName = backend.Name

    /// Multiplies an input with the weight. The result has the type `outDtype`, or else the input's.
    member _.Forward(input: Tensor, ?outDtype: DType) : Tensor = backend.Linear(input, prepared, defaultArg outDtype input.DType)

    interface IDisposable with
        member _.Dispose() = prepared.Dispose()

/// Makes linear layers of one kind.
[<Interface>]
type Q4Session =
    /// The options.
    abstract Config: Q4SessionConfig
    /// The names of a weight's tensors.
    abstract Schema: Q4Schema
    /// The backend that multiplies.
    abstract Backend: IQ4Backend
    /// Makes a layer.
    abstract CreateLinear: tensors: Q4TensorBundle -> Q4Linear

/// Sessions of linear layers.
module Session =
    /// A session, or an exception that says why no backend can serve it.
    let create (config: Q4SessionConfig) (schema: Q4Schema) : Q4Session =
        let backend = Backend.create schema config
        { new Q4Session with
            member _.Config = config
            member _.Schema = schema
            member _.Backend = backend
            member _.CreateLinear tensors = new Q4Linear(config, schema, tensors, backend) }

/// The packed form of weights in training.
module Nvfp4Training =
    /// Quantizes [.., K] with block scales alone: codes and scales.
    let quantizePacked (input: Tensor) : Tensor * Tensor =
        let packed = Quantizer.QuantizePacked input
        packed.Codes, packed.Scales

    /// The values of codes and block scales.
    let dequantizePacked (qdata: Tensor) (scale: Tensor) (outDtype: DType) : Tensor =
        Quantizer.DequantizePacked(qdata, scale, outDtype)

    /// Whether TS_Q4_STE_CACHE_EVAL_WEIGHT says that weights do not change.
    let private keepsEvalWeights () =
        match Environment.GetEnvironmentVariable "TS_Q4_STE_CACHE_EVAL_WEIGHT" with
        | null -> false
        | value -> List.contains (value.Trim().ToLowerInvariant()) [ "1"; "true"; "yes" ]

    /// What NVFP4 leaves of a weight, in its own type. Kept, if TS_Q4_STE_CACHE_EVAL_WEIGHT is 1, until clearEvalWeightCache or as
    /// long as the weight lives.
    let steWeight (masterWeight: Tensor) : Tensor = Quantizer.SteWeight(masterWeight, keepsEvalWeights ())

    /// An input [.., K] times what NVFP4 leaves of a weight [N, K], transposed, in the input's type.
    let linearSte (input: Tensor) (masterWeight: Tensor) : Tensor =
        use values = steWeight masterWeight
        use weight = LinearWeight.Create values
        weight.Linear(input, input.DType)

    /// Gives up what steWeight has kept: call it when weights have changed.
    let clearEvalWeightCache () : unit = Quantizer.ClearSteWeights()
