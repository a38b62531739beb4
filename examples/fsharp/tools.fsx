// A model that calls functions of this program, in F#.
//
//     dotnet build bindings/dotnet/LibNVFP4.FSharp -o build/dotnet
//     dotnet fsi -r:build/dotnet/LibNVFP4.dll -r:build/dotnet/LibNVFP4.FSharp.dll examples/fsharp/tools.fsx MODEL "Do I need an umbrella in Paris?"

open LibNVFP4
open LibNVFP4.FSharp

let tools = """[{"type": "function", "function": {
    "name": "weather", "description": "The weather in a city, now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]"""

// Arguments are a JSON object, which a real program parses.
let run (call: ToolCall) =
    eprintfn "[%O]" call
    match call.Name with
    | "weather" -> "Rain, 12 degrees, as asked for " + call.Arguments
    | name -> "There is no tool " + name

// As long as the answer has calls, their results are passed back. The limit is for models that never stop calling.
let rec answered turns chat (answer: string) =
    match Chat.toolCalls chat with
    | calls when calls.IsEmpty || turns = 0 -> answer
    | calls ->
        let results = [ for call in calls -> ChatMessage.ToolResult(call, run call) ]
        Chat.history chat @ results |> Chat.complete chat |> answered (turns - 1) chat

let talk path text =
    use model = Model.load path
    use chat = model |> Chat.withTurns (Turn.defaults () |> Turn.tools tools)
    text |> Chat.ask chat |> answered 5 chat |> printfn "%s"

try
    match fsi.CommandLineArgs with
    | [| _; path; text |] -> talk path text
    | _ ->
        eprintfn "usage: tools.fsx MODEL PROMPT"
        exit 2
with :? Nvfp4Exception as e ->
    eprintfn "%O: %s" e.Status e.Message
    exit 1
