// The F# package on the real fsi: tests.fsx RECITER THINKER SCRATCH, where the first answers everything with one sentence
// (reciter.py), and the second thinks and calls a tool (thinker.py).

open System
open System.IO
open System.Threading
open System.Threading.Tasks
open LibNVFP4
open LibNVFP4.FSharp
open LibNVFP4.Q4

let sentence = "好語😀é"
let reciter, thinker, scratch =
    match fsi.CommandLineArgs with
    | [| _; reciter; thinker; scratch |] -> reciter, thinker, scratch
    | _ -> failwith "usage: tests.fsx RECITER THINKER SCRATCH"

let mutable failures = 0

let test name body =
    try
        body ()
        printfn "ok      F#: %s" name
    with e ->
        failures <- failures + 1
        printfn "FAILED  F#: %s: %O" name e

let same expected actual = if expected <> actual then failwithf "expected %A, got %A" expected actual

let raises<'e, 'a when 'e :> exn> (says: string) (body: unit -> 'a) =
    try
        body () |> ignore
        failwithf "no %s" typeof<'e>.Name
    with :? 'e as e -> if not (e.Message.Contains says) then failwithf "the message is %s, without %s" e.Message says

let waitFor (task: Task<'a>) = task.GetAwaiter().GetResult()

/// The pieces of a stream, without a library for such streams.
let pieces (stream: Collections.Generic.IAsyncEnumerable<'a>) =
    let reader = stream.GetAsyncEnumerator()
    let read = [ while reader.MoveNextAsync().AsTask() |> waitFor do reader.Current ]
    reader.DisposeAsync().AsTask().Wait()
    read

let distance (a: float32[]) (b: float32[]) =
    sqrt (Seq.sum (Seq.map2 (fun x y -> float (x - y) ** 2.0) a b) / Seq.sumBy (fun x -> float x ** 2.0) b)

let random = Random 1
let values count = Array.init count (fun _ -> float32 (random.NextDouble() * 2.0 - 1.0))
let x, w = values (4 * 256), values (64 * 256)

test "threads of the program" (fun () ->
    use pool = Model.pool 2 (fun work -> ThreadPool.QueueUserWorkItem(fun _ -> work ()) |> ignore)
    use model = reciter |> Model.loadWith (LoadOptions(Device = Device.Cpu, Pool = pool))
    use chat = model |> Chat.withSystem "你是诗人。"
    same sentence ("你好" |> Chat.ask chat))

test "pipes of models and conversations" (fun () ->
    use model = Model.load reciter
    same true (model.Info.DeviceChoice.StartsWith "running on cpu: ")
    use named = reciter |> Model.loadOn Device.Cpu
    same null named.Info.DeviceChoice
    same "qwen3" (Model.info model).Architecture
    same "héllo 😀" ("héllo 😀" |> Model.encode model |> Model.decode model)
    same true (Model.specialTokens model |> List.exists (fun token -> token.Roles.HasFlag TokenRoles.EndsGeneration))
    same [ 0xe8uy; 0xaauy; 0x9euy ] ("語" |> Model.encode model |> Seq.collect (Model.tokenBytes model) |> List.ofSeq)
    use chat = model |> Chat.withSystem "你是诗人。"
    same [ "好"; "語"; "😀"; "é" ] ("你好" |> Chat.stream chat |> List.ofSeq)
    same sentence ("再来" |> Chat.ask chat)
    same [ "system", "你是诗人。"; "user", "你好"; "assistant", sentence; "user", "再来"; "assistant", sentence ] (Chat.messages chat)
    let few = Generate.defaults () |> Generate.maxTokens 6 |> Generate.temperature 0.5f |> Generate.topK 1 |> Generate.seed 3UL
    same 6L few.MaxTokens
    same "好語" ("" |> Chat.askWith few chat)
    same "好語" ("" |> Chat.askWith (few |> Generate.promptLookup 4) chat)
    same "好語" ("" |> Chat.askWith (few |> Generate.draftModel model) chat)
    same [ "好" ] ("" |> Chat.streamWith (few |> Generate.stopStrings [ "語" ]) chat |> List.ofSeq)
    same Int64.MaxValue (Generate.defaults ()).MaxTokens
    // Texts of a form.
    use form = model |> Grammar.choices [ "語😀"; "好語" ]
    same "好語" ("" |> Chat.askWith (Generate.defaults () |> Generate.grammar form) chat)
    // Adjusted logits: a byte that is favoured, but not twice in a row, and the byte that follows it.
    let bytes = Model.encode model "語"
    let lead = bytes.[0]
    let adjusted = few |> Generate.logitBias [ lead, 1e6f ] |> Generate.badWords [ [ lead; lead ] ] |> Generate.presencePenalty 0.5f
    let sampled =
        few |> Generate.minTokens 6 |> Generate.noRepeatNgramSize 3 |> Generate.dryMultiplier 0.8f |> Generate.dryBase 2.0f
        |> Generate.dryAllowedLength 3 |> Generate.dryWindow 64 |> Generate.drySequenceBreakers [ "\n" ] |> Generate.topNSigma 3.0f
        |> Generate.typicalP 0.9f |> Generate.xtc 0.5f 0.2f
    same (6L, 3L, 3L, 64L) (sampled.MinTokens, sampled.NoRepeatNgramSize, sampled.DryAllowedLength, sampled.DryWindow)
    same (0.8f, 2.0f, 3.0f) (sampled.DryMultiplier, sampled.DryBase, sampled.TopNSigma)
    same (0.9f, 0.5f, 0.2f) (sampled.TypicalP, sampled.XtcProbability, sampled.XtcThreshold)
    same [ "\n" ] (List.ofSeq sampled.DrySequenceBreakers)
    let tokens = ResizeArray()
    let note (piece: TokenEvent) =
        if piece.Kind = TokenEventKind.Token then tokens.Add piece.Token
        true
    chat.Chat("", TokenHandler note, adjusted |> Generate.frequencyPenalty 0.5f) |> ignore
    same [ for _ in 1..3 do yield! [ lead; bytes.[1] ] ] (List.ofSeq tokens)
    // Processed logits: no token but the two of a character.
    let only (logits: Logits) =
        let wanted = bytes.[logits.Tokens.Length % 2]
        for token in 0 .. logits.Count - 1 do
            if token <> wanted then logits.[token] <- -infinityf
        true
    tokens.Clear()
    chat.Chat("", TokenHandler note, few |> Generate.logitsProcessor only) |> ignore
    same [ for _ in 1..3 do yield! [ bytes.[0]; bytes.[1] ] ] (List.ofSeq tokens)
    use once = new Detokenizer(model)
    same ([| "", FinishReason.None |] = Detokenizer.pushEach [ once ] [ lead ]) true
    // The text again, of the tokens alone.
    use detokenizer = new Detokenizer(model, few)
    let mutable text = ""
    let mutable told = 0L, 0L
    let watched = few |> Generate.logProbabilities |> Generate.topLogProbabilities 2 |> Generate.progress (fun d total -> told <- d, total)
    let handler (piece: TokenEvent) =
        if piece.Kind = TokenEventKind.Token then
            if not (piece.LogProbability <= 0.0f) then failwithf "a log-probability of %f" piece.LogProbability
            if piece.Top.Count <> 2 then failwithf "%d most probable tokens" piece.Top.Count
            text <- text + fst (detokenizer.Push piece.Token)
        true
    let result = chat.Chat("!", TokenHandler handler, watched)
    same ("好語", FinishReason.Length) (text, result.Finish)
    same (fst told) (snd told)
    // Lazy: a prefix is all that is made.
    same [ "好" ] ("!" |> Chat.stream chat |> Seq.take 1 |> List.ofSeq)
    same "好" chat.Text
    // Earlier messages can be read during a generation.
    let before = Chat.messages chat
    for _ in "!" |> Chat.stream chat do
        same before (Chat.messages chat)
    same (before.Length + 2) (Chat.messages chat).Length)

test "a model that thinks and calls a tool" (fun () ->
    let answer, thought = "Blue 漢字 light 🦀.", "Let me see what is asked."
    use model = Model.load thinker
    same (0.6f, 0.95f, 20) (let maker = Generate.ofModel model in maker.Temperature, maker.TopP, maker.TopK)
    use chat = Chat.create model
    for turn in 1..5 do
        same answer (sprintf "Question %d" turn |> Chat.ask chat)
        same thought ((Chat.reasoning chat).Trim())
        let held = model.Tokenizer.Decode(chat.Tokens, false)
        if not (model.RenderChat(Chat.history chat, false).StartsWith held) then failwith held
    let heard = Collections.Generic.List()
    let result = "Again" |> Chat.parts (fun part text -> heard.Add(part, text)) chat
    let told part = heard |> Seq.filter (fun (p, _) -> p = part) |> Seq.map snd |> String.concat ""
    same (Chat.reasoning chat, answer) (told Part.Reasoning, told Part.Content)
    if result.Seed = chat.Fork().Chat("Again", null).Seed then failwith "the same seed"
    same answer ("Hi" |> Chat.askTurn (Turn.defaults () |> Turn.thinking false) chat)
    same "" (Chat.reasoning chat)
    same answer ("Hi" |> Chat.askTurn (Turn.defaults () |> Turn.reasoningBudget 2) chat)
    if (Chat.reasoning chat).Trim() = thought then failwith "the whole thought"
    same "Hi" (model.RenderChat([ ChatMessage("user", "Hi") ], true, Turn.defaults () |> Turn.chatTemplate "{{ messages[0].content }}"))
    let keeping = Turn.defaults () |> Turn.variables "{}" |> Turn.keepReasoning
    let before = chat.Length
    same answer ("Hi" |> Chat.askTurn keeping chat)
    same (chat.Length - before) (chat.LastGeneration.PromptTokens + chat.LastGeneration.GeneratedTokens)
    let tools = """[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]"""
    use caller = model |> Chat.withTurns (Turn.defaults () |> Turn.tools tools)
    same "" ("Weather?" |> Chat.ask caller)
    let calls = Chat.toolCalls caller
    same [ "weather", """{"city":"Paris"}""" ] [ for call in calls -> call.Name, call.Arguments ]
    let results = [ for call in calls -> ChatMessage.ToolResult(call, "Rain") ]
    same "It rains in Paris." (Chat.history caller @ results |> Chat.complete caller)
    same "It rains" (Chat.history caller |> List.take 3 |> Chat.completeWith (Generate.defaults () |> Generate.stopStrings [ " in" ]) caller)
    raises<Nvfp4ArgumentException, _> "robot" (fun () -> [ ChatMessage("robot", "?") ] |> Chat.complete caller))

test "queues" (fun () ->
    use model = Model.load reciter
    use queue = Queue.createWith (QueueOptions(Running = 4)) model
    let chats = [ for _ in 1..20 -> Chat.create model ]
    same (List.replicate 20 sentence) (chats |> List.map (fun chat -> Queue.ask queue chat "Hi") |> Task.WhenAll |> waitFor |> List.ofArray)
    same (List.replicate 20 sentence) (chats |> List.map (fun chat -> Queue.answer queue chat "again") |> Async.Parallel |> Async.RunSynchronously |> List.ofArray)
    let chat = chats.Head
    let heard = Collections.Generic.List()
    same sentence ("Hi" |> Queue.tell heard.Add queue chat |> waitFor)
    same [ "好"; "語"; "😀"; "é" ] (List.ofSeq heard)
    let generation = "Hi" |> Queue.parts (fun part text -> heard.Add(sprintf "%O %s" part text)) queue chat |> waitFor
    same (12L, "Content é") (generation.GeneratedTokens, Seq.last heard)
    same sentence ([ ChatMessage.User "Hi" ] |> Queue.complete queue chat |> waitFor)
    same 2 (Chat.history chat).Length
    let few = Generate.defaults () |> Generate.maxTokens 3
    let submit = Submit.defaults () |> Submit.priority 2 |> Submit.deadline (TimeSpan.FromMinutes 1.0)
    same (2, Nullable(TimeSpan.FromMinutes 1.0)) (submit.Priority, submit.Deadline)
    same "好" ("Hi" |> Queue.askWith few submit CancellationToken.None queue chat |> waitFor)
    same [ "好" ] ("Hi" |> Queue.streamWith few submit queue chat |> pieces)
    same [ "好"; "語"; "😀"; "é" ] ("Hi" |> Queue.stream queue chat |> pieces)
    use session = new Session(model)
    same 3L (model.EncodeChat([ ChatMessage.User "Hi" ]) |> Queue.generate few queue session |> waitFor).GeneratedTokens
    // A session in use says so, and a token ends the answer of a task and of a workflow.
    use source = new CancellationTokenSource()
    source.Cancel()
    raises<OperationCanceledException, _> "" (fun () -> "Hi" |> Queue.askWith few submit source.Token queue chat |> waitFor)
    raises<OperationCanceledException, _> "" (fun () -> Async.RunSynchronously(Queue.answer queue chat "Hi", cancellationToken = source.Token))
    raises<Nvfp4ArgumentException, _> "robot" (fun () -> [ ChatMessage("robot", "?") ] |> Queue.complete queue chat |> waitFor)
    (queue :> IDisposable).Dispose()
    raises<ObjectDisposedException, _> "" (fun () -> Queue.ask queue chat "Hi" |> waitFor)
    for chat in chats do
        chat.Dispose())

test "statistics and plans" (fun () ->
    use model = Model.load reciter
    use chat = Chat.create model
    same 0L (Model.statistics model).Passes
    same sentence ("Hi" |> Chat.ask chat)
    let now = Model.statistics model
    if now.Passes < 12L || now.StepTokens < 11L then failwithf "%d passes, %d tokens" now.Passes now.StepTokens
    let cpu = LoadOptions(Device = Device.Cpu)
    let plan = reciter |> Model.planWith cpu (PlanOptions(Sequences = 2L, Context = 64L))
    same (64L, 2UL * plan.KvBytesPerSequence, Device.Cpu) (plan.Context, plan.KvBytes, plan.Device)
    same plan.WeightBytes (Model.plan reciter).WeightBytes)

test "results and exceptions" (fun () ->
    match Model.tryLoad "/nowhere" with
    | Ok _ -> failwith "a model in /nowhere"
    | Error e -> same Status.NotFound e.Status
    raises<Nvfp4NotFoundException, _> "/nowhere" (fun () -> Model.load "/nowhere"))

test "tensors and quantizing" (fun () ->
    use matrix = Tensor.ofArray2D (Array2D.init 2 16 (fun i j -> float32 (i + j)))
    same [| 2L; 16L |] matrix.Shape
    use quantized = matrix |> Quantize.tensor
    use back = quantized |> Quantize.dequantize
    if distance (Tensor.toArray back) (Tensor.toArray matrix) > 0.12 then failwith "too far off"
    let mutable last = 0L, 1L
    let place = Path.Combine(scratch, "f#-量化")
    reciter |> Quantize.modelWith (Quantize.recipe Recipe.Amax) (fun d total -> last <- d, total) place
    same (fst last) (snd last)
    use model = Model.load place
    use chat = Chat.create model
    same sentence ("Hi" |> Chat.ask chat))

let config =
    { BackendOverride = None
      ComputePath = Q4ComputePath.Auto
      RuntimeTarget = Cpu
      UnifiedMemoryPolicy = Disabled
      EnableDiagnostics = false }

let schema =
    { Format = NVFP4
      WeightKey = "q.qdata"
      ScaleKey = Some "q.scale"
      AbsmaxKey = None
      QuantMapKey = None
      ExtraKeys = [ "q.bias" ] }

test "Q4: schemas" (fun () ->
    use weight = w |> Tensor.ofArray [ 64L; 256L ]
    let qdata, scale = Nvfp4Training.quantizePacked weight
    use bias = Tensor.ofArray [ 64L ] (values 64)
    let tensors = Map.ofList [ "q.qdata", qdata; "q.scale", scale; "q.bias", bias ]
    same (Some schema) (Schema.detect tensors)
    same schema (Schema.detectOrFail tensors)
    same (Ok()) (Schema.validate schema tensors)
    same None (Schema.detect (Map.remove "q.scale" tensors))
    same (Error [ "q.scale is missing" ]) (Schema.validate schema (Map.remove "q.scale" tensors))
    match Schema.validate schema (Map.add "q.scale" bias tensors) with
    | Error faults when faults.Length = 2 && faults |> List.forall (fun fault -> fault.Contains "q.scale") -> ()
    | other -> failwithf "%A" other
    raises<InvalidOperationException, _> ".qdata" (fun () -> Schema.detectOrFail Map.empty)
    use nf4 = Quantizer.QuantizeNf4 weight
    use codes = nf4.Codes.View [| 64L; 128L |]
    use map = Tensor.ofArray [ 16L ] (Array.init 16 float32)
    let found = Schema.detectOrFail (Map.ofList [ "k.weight", codes; "k.absmax", nf4.Absmax; "k.quant_map", map ])
    same (NF4, Some "k.absmax", Some "k.quant_map") (found.Format, found.AbsmaxKey, found.QuantMapKey))

test "Q4: backends, sessions and layers" (fun () ->
    same [ "nvfp4-kernel"; "dequant-matmul" ] (Backend.listAvailable ())
    use weight = w |> Tensor.ofArray [ 64L; 256L ]
    use input = x |> Tensor.ofArray [ 4L; 256L ]
    use dense = LinearWeight.Create weight
    use product = dense.Linear input
    let qdata, scale = NativeInterop.fp4Quantize weight
    let bundle = { Weight = qdata; Scale = Some scale; Absmax = None; QuantMap = None }
    let results =
        [ for path, name in [ Q4ComputePath.Auto, "nvfp4-kernel"; KernelOnly, "nvfp4-kernel"; DequantMatmulOnly, "dequant-matmul" ] do
            let session = Session.create { config with ComputePath = path } schema
            same name session.Backend.Name
            use layer = session.CreateLinear bundle
            same name layer.BackendName
            use output = layer.Forward input
            if distance (output.ToFloats()) (product.ToFloats()) > 0.2 then failwithf "%s is too far off" name
            use half = layer.Forward(input, DType.Float16)
            same DType.Float16 half.DType
            output.ToFloats() ]
    if distance results.[0] results.[2] > 1e-6 then failwith "two backends differ"
    use plain = new Q4Linear({ config with BackendOverride = Some " NVFP4-Kernel " }, schema, bundle)
    same "nvfp4-kernel" plain.BackendName
    raises<ArgumentException, _> "scale" (fun () -> new Q4Linear(config, schema, { bundle with Scale = None }))
    let diagnosis = Backend.diagnose schema config
    same ("nvfp4-kernel", None) (diagnosis.Backend, diagnosis.FallbackReason)
    if not (diagnosis.NativeLoadState.StartsWith("nvfp4=ok(" + Library.Path)) then failwith diagnosis.NativeLoadState
    match Backend.tryCreate { schema with Format = NF4 } { config with ComputePath = KernelOnly } with
    | Error message when message.Contains "NF4" || message.Contains "nf4" -> ()
    | other -> failwithf "%A" other
    match Backend.tryCreate schema { config with BackendOverride = Some "made-up" } with
    | Error message when message.Contains "made-up" -> ()
    | other -> failwithf "%A" other
    // NF4 is decoded.
    use nf4 = Quantizer.QuantizeNf4 weight
    use codes = nf4.Codes.View [| 64L; 128L |]
    let nf4Schema = { schema with Format = NF4; WeightKey = "q.weight"; ScaleKey = None; AbsmaxKey = Some "q.absmax" }
    use layer = new Q4Linear(config, nf4Schema, { Weight = codes; Scale = None; Absmax = Some nf4.Absmax; QuantMap = None })
    same "dequant-matmul" layer.BackendName
    use output = layer.Forward input
    if distance (output.ToFloats()) (product.ToFloats()) > 0.2 then failwith "NF4 is too far off"
    let backend = Backend.create schema config
    same (true, false) (backend.Supports(schema, config), backend.Supports(nf4Schema, config)))

test "Q4: the native library" (fun () ->
    let loaded = NativeInterop.loadNvfp4 ()
    same (true, Library.Path, None) (loaded.Loaded, loaded.LibraryPath, loaded.Error)
    same [ true; true; true; true; true ]
        [ NativeInterop.isNvfp4Available (); NativeInterop.hasLibTorchFp4Quantize (); NativeInterop.hasLibTorchScaledMm ()
          NativeInterop.isNf4Available (); NativeInterop.tryEmptyNvfp4Cache () ]
    NativeInterop.configure (Some "/nowhere/a.so", Some "/nowhere/b.so")
    let missing = NativeInterop.loadNvfp4 ()
    same (false, "/nowhere/a.so") (missing.Loaded, missing.LibraryPath)
    if not (missing.Error.Value.Contains "No such file") then failwith missing.Error.Value
    same (false, Some "/nowhere/b.so: not there") ((NativeInterop.loadNf4 ()).Loaded, (NativeInterop.loadNf4 ()).Error)
    NativeInterop.configure (None, None)
    same true (NativeInterop.isNf4Available ())
    use a = x |> Tensor.ofArray [ 4L; 256L ]
    use b = w |> Tensor.ofArray [ 64L; 256L ]
    let qa, sa = NativeInterop.fp4Quantize a
    let qb, sb = NativeInterop.fp4Quantize b
    use product =
        NativeInterop.scaledMmFp4 qa (qb.Transpose()) (Quantizer.Swizzle sa) (Quantizer.Swizzle sb) DType.Float32
    use exact = (LinearWeight.Create b).Linear a
    if distance (product.ToFloats()) (exact.ToFloats()) > 0.3 then failwith "the product is too far off"
    use back = Nvfp4Training.dequantizePacked qb sb DType.Float16
    same DType.Float16 back.DType
    if distance (back.ToFloats()) w > 0.15 then failwith "too far off")

test "Q4: training" (fun () ->
    use input = x |> Tensor.ofArray [ 4L; 256L ]
    use weight = w |> Tensor.ofArray [ 64L; 256L ]
    let qdata, scale = Nvfp4Training.quantizePacked weight
    use values = Nvfp4Training.dequantizePacked qdata scale DType.Float32
    use ste = Nvfp4Training.steWeight weight
    same (values.ToFloats()) (ste.ToFloats())
    use expected = (LinearWeight.Create values).Linear input
    use product = Nvfp4Training.linearSte input weight
    same (expected.ToFloats()) (product.ToFloats())
    use other = Nvfp4Training.steWeight weight
    same false (other.Data = ste.Data)
    Environment.SetEnvironmentVariable("TS_Q4_STE_CACHE_EVAL_WEIGHT", "1")
    use kept = Nvfp4Training.steWeight weight
    use again = Nvfp4Training.steWeight weight
    same true (again.Data = kept.Data)
    Nvfp4Training.clearEvalWeightCache ()
    use anew = Nvfp4Training.steWeight weight
    same false (anew.Data = kept.Data)
    Environment.SetEnvironmentVariable("TS_Q4_STE_CACHE_EVAL_WEIGHT", null))

test "training in a pipe" (fun () ->
    let options = TrainerOptions(Device = Device.Cpu, Threads = 1, Steps = 6L, Rate = 5e-3)
    let batches = [ Train.batch [ [| 1; 2; 3; 4; 5 |]; [| 6; 7; 8 |] ] ]
    use trainer = reciter |> Train.start options
    let before = trainer |> Train.evaluate batches
    for number in 1L .. 6L do
        same number (trainer |> Train.step batches).Step
    if not (Train.evaluate batches trainer < before) then failwith "nothing was learned"
    let run = Path.Combine(scratch, "fsharp-run")
    trainer |> Train.save run
    use again = reciter |> Train.resume run
    same 6L again.Info.Steps
    same (Train.evaluate batches trainer) (Train.evaluate batches again)
    use live = trainer |> Train.model
    use session = new Session(live)
    session.Prefill [| 1; 2; 3 |]
    trainer |> Train.step batches |> ignore
    // The session goes on with the weights after the step.
    session.Prefill [| 4 |]
    use fresh = new Session(live)
    fresh.Prefill [| 1; 2; 3; 4 |]
    same true (Seq.forall2 (=) session.Logits fresh.Logits)
    trainer |> Train.export (Path.Combine(scratch, "fsharp-model")))

test "Q4: managed memory" (fun () ->
    use tensor = x |> Tensor.ofArray [ 4L; 256L ]
    same false (NativeInterop.isManagedTensor tensor)
    // Activations stay where they are.
    same true (Object.ReferenceEquals(tensor, UnifiedMemory.applyPolicy PreferUnified tensor))
    same true (Object.ReferenceEquals(tensor, UnifiedMemory.applyMutablePolicy Disabled tensor))
    use own = UnifiedMemory.applyMutablePolicy PreferUnified tensor
    same [| 4L; 256L |] own.Shape
    if not (UnifiedMemory.isSupported ()) then
        same tensor.Data own.Data
        raises<InvalidOperationException, _> "managed" (fun () -> UnifiedMemory.applyPolicy RequireUnified tensor)
        same true (Object.ReferenceEquals(tensor, UnifiedMemory.tryPromoteToManaged tensor true (Some 0)))
    Environment.SetEnvironmentVariable("TS_Q4_DISABLE_UM", "yes")
    same false (UnifiedMemory.isPolicyEnabledByEnv ())
    Environment.SetEnvironmentVariable("TS_Q4_DISABLE_UM", "0")
    same true (UnifiedMemory.isPolicyEnabledByEnv ()))

exit (if failures = 0 then 0 else 1)
