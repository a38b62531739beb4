// Talk with a language model, in F#.
//
//     dotnet build bindings/dotnet/LibNVFP4.FSharp -o build/dotnet
//     dotnet fsi -r:build/dotnet/LibNVFP4.dll -r:build/dotnet/LibNVFP4.FSharp.dll examples/fsharp/chat.fsx MODEL ["Why is the sky blue?"]
//
// With a prompt it answers and ends; without one it holds a conversation, one turn per line.

open System
open LibNVFP4
open LibNVFP4.FSharp

let answer chat text =
    // Each piece is made when it is asked for, and is whole characters. Tokens are sampled as the model recommends; streamWith takes
    // options that say otherwise.
    text |> Chat.stream chat |> Seq.iter (printf "%s")
    printfn ""

let talk path (prompt: string option) =
    use model = Model.load path
    // The GPU with room for the model, or else the CPU.
    eprintfn "[%s]" model.Info.DeviceChoice
    use chat = model |> Chat.withSystem "You are a helpful assistant."
    match prompt with
    | Some text -> answer chat text
    | None ->
        Seq.initInfinite (fun _ ->
            eprintf "> "
            Console.ReadLine())
        |> Seq.takeWhile (isNull >> not)
        |> Seq.filter (fun line -> line <> "")
        |> Seq.iter (answer chat)

try
    match List.ofArray (Array.tail fsi.CommandLineArgs) with
    | [ path ] -> talk path None
    | [ path; prompt ] -> talk path (Some prompt)
    | _ ->
        eprintfn "usage: chat.fsx MODEL [PROMPT]"
        exit 2
with :? Nvfp4Exception as e ->
    eprintfn "%O: %s" e.Status e.Message
    exit 1
