// A conversation of several turns over one cache of keys and values that lives as long as the conversation: the runner that F#
// programs on TorchSharp know, over this library. Each turn runs only what it adds, and prints how long the cache is.
//
//     dotnet build bindings/dotnet/LibNVFP4.FSharp -o build/dotnet
//     dotnet fsi -r:build/dotnet/LibNVFP4.dll -r:build/dotnet/LibNVFP4.FSharp.dll examples/fsharp/persistent.fsx --model MODEL --turns 3
//
//     --model PATH             a model's directory or file
//     --device DEVICE          auto, cpu, cuda or cuda:N            (auto)
//     --turns N                turns of the conversation            (1)
//     --prompt TEXT            what the first turn says
//     --followup-prompt TEXT   what every other turn says           (continue.)
//     --max-tokens N           tokens of an answer at most          (24)
//     --temp T                 0 takes the argmax                   (0)
//     --top-p P                                                     (1)
//     --seed N                                                      (123)
//     --timing true|false      print how long each turn takes       (true)

open System
open System.Diagnostics
open System.Globalization
open LibNVFP4
open LibNVFP4.FSharp

let known =
    Map.ofList [ "--model", ""; "--device", "auto"; "--turns", "1"; "--prompt", "Write one short sentence about UFO and you."
                 "--followup-prompt", "continue."; "--max-tokens", "24"; "--temp", "0"; "--top-p", "1"; "--seed", "123"
                 "--timing", "true" ]

let usage message =
    eprintfn "%s; see the head of persistent.fsx" message
    exit 2

/// Reads --key value and --key=value.
let rec parse options arguments =
    let set key value rest =
        if Map.containsKey key known then parse (Map.add key value options) rest else usage (key + " is no option")
    match arguments with
    | [] -> options
    | (argument: string) :: rest when argument.StartsWith "--" && argument.Contains "=" ->
        let at = argument.IndexOf '='
        set (argument.Substring(0, at)) (argument.Substring(at + 1)) rest
    | key :: value :: rest when key.StartsWith "--" -> set key value rest
    | argument :: _ -> usage (argument + " is no option with a value")

let options = parse known (List.ofArray (Array.tail fsi.CommandLineArgs))

let number key (convert: string * IFormatProvider -> 'n) : 'n =
    try
        convert (options.[key], CultureInfo.InvariantCulture)
    with :? FormatException | :? OverflowException ->
        usage (sprintf "%s is %s, which is no such number" key options.[key])

let device =
    match options.["--device"].ToLowerInvariant() with
    | "auto" -> Device.Auto
    | "cpu" -> Device.Cpu
    | "cuda" -> Device.Cuda()
    | name when name.StartsWith "cuda:" && fst (Int32.TryParse(name.Substring 5)) -> Device.Cuda(int (name.Substring 5))
    | name -> usage (name + " is no device")

let run () =
    let turns, maxTokens = number "--turns" Int32.Parse, number "--max-tokens" Int32.Parse
    let generate =
        Generate.defaults ()
        |> Generate.maxTokens maxTokens
        |> Generate.temperature (number "--temp" Single.Parse)
        |> Generate.topP (number "--top-p" Single.Parse)
        |> Generate.seed (number "--seed" UInt64.Parse)
    use model = options.["--model"] |> Model.loadOn device
    printfn "model: %s on %s" model.Info.Architecture model.Info.Device
    use chat = Chat.create model
    let mutable before = 0L
    for turn in 1 .. turns do
        let prompt = if turn = 1 then options.["--prompt"] else options.["--followup-prompt"]
        let watch = Stopwatch.StartNew()
        let answer = prompt |> Chat.askWith generate chat
        let result = chat.LastGeneration
        if options.["--timing"] = "true" then
            printfn "[time] turn-%d: %.1f ms (%d prompt tokens in %.1f ms, %d generated)" turn watch.Elapsed.TotalMilliseconds
                result.PromptTokens result.Prefill.TotalMilliseconds result.GeneratedTokens
        printfn "[turn-%d]out: %s" turn answer
        printfn "[kvc] turn-cache seqLen=%d contextTokens=%d" chat.Length chat.Tokens.Length
        if chat.Length <= before then
            failwithf "turn %d has left the cache at %d tokens, where it was %d before" turn chat.Length before
        before <- chat.Length

try
    run ()
with :? Nvfp4Exception as e ->
    eprintfn "%O: %s" e.Status e.Message
    exit 1
