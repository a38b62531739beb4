// A model that thinks before it answers, in F#.
//
//     dotnet build bindings/dotnet/LibNVFP4.FSharp -o build/dotnet
//     dotnet fsi -r:build/dotnet/LibNVFP4.dll -r:build/dotnet/LibNVFP4.FSharp.dll examples/fsharp/thinking.fsx MODEL "How many primes are there below 100?"
//
// Its reasoning goes to stderr, its answer to stdout: first after as much reasoning as it likes, then without any.

open LibNVFP4
open LibNVFP4.FSharp

let think path text =
    use model = Model.load path
    use chat = Chat.create model
    let heard part (piece: string) = if part = Part.Reasoning then eprintf "%s" piece else printf "%s" piece
    // `parts` passes all parts of an answer; `ask` and `stream` give only the answer.
    let result = text |> Chat.parts heard chat
    eprintfn "\n[%d tokens, %d characters of reasoning]" result.GeneratedTokens (Chat.reasoning chat).Length
    printfn ""
    use other = model |> Chat.withTurns (Turn.defaults () |> Turn.thinking false)
    text |> Chat.ask other |> printfn "%s"

try
    match fsi.CommandLineArgs with
    | [| _; path; text |] -> think path text
    | _ ->
        eprintfn "usage: thinking.fsx MODEL PROMPT"
        exit 2
with :? Nvfp4Exception as e ->
    eprintfn "%O: %s" e.Status e.Message
    exit 1
