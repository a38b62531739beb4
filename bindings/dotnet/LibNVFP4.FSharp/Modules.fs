/// The objects of LibNVFP4 as functions whose last argument is what comes down a pipe. Everything that owns native memory is
/// IDisposable: bind it with `use`.
namespace LibNVFP4.FSharp

open System
open System.Collections.Generic
open System.Threading
open System.Threading.Tasks
open LibNVFP4

/// Tensors over arrays.
[<RequireQualifiedAccess>]
module Tensor =
    /// A tensor over an array, without a copy, of a shape.
    let ofArray (shape: int64 list) (data: float32[]) = Tensor.FromArray(data, List.toArray shape)

    /// A tensor with the values of a matrix.
    let ofArray2D (data: float32[,]) =
        Tensor.FromArray(data |> Seq.cast<float32> |> Seq.toArray, int64 (Array2D.length1 data), int64 (Array2D.length2 data))

    /// The values, row-major.
    let toArray (tensor: Tensor) = tensor.ToFloats()

/// NVFP4 and back.
[<RequireQualifiedAccess>]
module Quantize =
    /// The default options.
    let defaults () = QuantizeOptions()

    /// Default options with a recipe.
    let recipe recipe = QuantizeOptions(Recipe = recipe)

    /// A tensor in NVFP4.
    let tensorWith (options: QuantizeOptions) (tensor: Tensor) = Quantizer.Quantize(tensor, options)

    /// A tensor in NVFP4, with the default options.
    let tensor (tensor: Tensor) = Quantizer.Quantize(tensor)

    /// The values of an NVFP4 tensor.
    let dequantize (quantized: QuantizedTensor) = quantized.Dequantize()

    /// Converts a model on disk to NVFP4, and tells a function the bytes done and their total.
    let modelWith (options: QuantizeOptions) (progress: int64 -> int64 -> unit) (destination: string) (source: string) =
        Quantizer.ConvertModel(source, destination, Container.ModelOpt, options, ProgressHandler(fun ``done`` total -> progress ``done`` total))

    /// Converts a model on disk to NVFP4, with the default options.
    let model (destination: string) (source: string) = Quantizer.ConvertModel(source, destination)

/// Weights prepared for products.
[<RequireQualifiedAccess>]
module Weight =
    /// Prepares an NVFP4 weight.
    let ofQuantized (quantized: QuantizedTensor) = LinearWeight.Create(quantized)

    /// Multiplies an input with a weight.
    let linear (weight: LinearWeight) (input: Tensor) = weight.Linear(input)

/// Models.
[<RequireQualifiedAccess>]
module Model =
    /// Threads that `schedule` gives work for models that have them in their `LoadOptions`, in place of the library's: at most so many at a time, or
    /// with 0 as many as the library would use.
    let pool (threads: int) (schedule: (unit -> unit) -> unit) = new Pool((fun (work: Action) -> schedule work.Invoke), threads)

    /// Loads a model, to the GPU with room for it or else to the processor; its `Info.DeviceChoice` says why.
    let load (path: string) = Model.Load(path)

    /// Loads a model.
    let loadWith (options: LoadOptions) (path: string) = Model.Load(path, options)

    /// Loads a model to a device.
    let loadOn (device: Device) (path: string) = Model.Load(path, LoadOptions(Device = device))

    /// Loads a model from files in memory, by their names in its directory.
    let loadFiles (files: (string * byte[]) seq) =
        Model.LoadFiles(files |> Seq.map (fun (name, content) -> ModelFile(name, content)))

    /// Loads a model from streams, by the names of files in its directory. They are closed when the library needs them no more.
    let loadStreams (streams: (string * System.IO.Stream) seq) =
        Model.LoadFiles(streams |> Seq.map (fun (name, content) -> ModelFile(name, content)))

    /// Loads a model, or says why not.
    let tryLoad (path: string) =
        try
            Ok(Model.Load(path))
        with :? Nvfp4Exception as e ->
            Error e

    /// The memory that a model and its sessions will take, by the headers of its files.
    let plan (path: string) = Model.Plan(path)

    /// The memory that a model and its sessions will take, loaded and used as the options say.
    let planWith (options: LoadOptions) (sessions: PlanOptions) (path: string) = Model.Plan(path, options, null, sessions)

    /// The description of a model.
    let info (model: Model) = model.Info

    /// The work of a model since it was loaded, and what it holds now.
    let statistics (model: Model) = model.Statistics()

    /// The tokens of a text. Names of special tokens in it become those tokens.
    let encode (model: Model) (text: string) = model.Tokenizer.Encode(text)

    /// The tokens of plain text, such as a user's: names of special tokens in it are text.
    let encodePlain (model: Model) (text: string) = model.Tokenizer.EncodePlain(text)

    /// The text of tokens.
    let decode (model: Model) (tokens: int[]) = model.Tokenizer.Decode(tokens)

    /// The bytes that a token adds to a text, which may be a part of a character; the name of a special token.
    let tokenBytes (model: Model) (token: int) = model.Tokenizer.TokenBytes(token)

    /// The special tokens, and others with a role, in order of their ids.
    let specialTokens (model: Model) = model.Tokenizer.SpecialTokens() |> List.ofSeq

    /// The embeddings of texts, as the model asks for them.
    let embed (model: Model) (texts: string seq) = model.Embed(texts)

    /// The embeddings of texts.
    let embedWith (options: EmbedOptions) (model: Model) (texts: string seq) = model.Embed(texts, options)

    /// The hidden states of texts: a row for each token of each.
    let hiddenStates (model: Model) (texts: string seq) = model.HiddenStates(texts)

/// Text of tokens as they come, for those who step many sequences.
[<RequireQualifiedAccess>]
module Detokenizer =
    /// Adds a token to each of several detokenizers, in one call: the text that each completes, and what ends its sequence.
    let pushEach (detokenizers: Detokenizer seq) (tokens: int seq) =
        let texts, finishes = Detokenizer.Push(Seq.toArray detokenizers, Seq.toArray tokens)
        Array.zip texts finishes

/// Training of models.
[<RequireQualifiedAccess>]
module Train =
    /// A trainer of the model at a path.
    let start (options: TrainerOptions) (path: string) = Trainer.Create(path, options)

    /// A trainer from the last checkpoint in a directory, of the model at a path that training began with.
    let resume (directory: string) (path: string) = Trainer.Resume(path, directory)

    /// A batch of documents in which each token is to give the next one.
    let batch (documents: int[] seq) = MicroBatch.Of(Seq.toArray documents)

    /// A step by all batches together.
    let step (batches: MicroBatch seq) (trainer: Trainer) = trainer.Step(Seq.toArray batches)

    /// The mean cross-entropy in nats of what is delivered.
    let evaluate (batches: MicroBatch seq) (trainer: Trainer) = trainer.Evaluate(Seq.toArray batches)

    /// The mean cross-entropy and the mean divergence from the teacher's predictions, in nats.
    let compare (batches: MicroBatch seq) (trainer: Trainer) = trainer.Compare(Seq.toArray batches)

    /// Writes a checkpoint into a directory.
    let save (directory: string) (trainer: Trainer) = trainer.Save(directory)

    /// Writes the model to a directory.
    let export (path: string) (trainer: Trainer) = trainer.ExportDirectory(path)

    /// Writes the adapters to a directory as peft reads them, with what the model below them is called there.
    let exportAdapter (path: string) (baseModel: string) (trainer: Trainer) = trainer.ExportAdapter(path, baseModel)

    /// The model that is trained, until the next step.
    let model (trainer: Trainer) = trainer.Model()

/// How to generate: `Generate.defaults () |> Generate.temperature 0.7f |> Generate.maxTokens 100`. Each function gives a copy.
[<RequireQualifiedAccess>]
module Generate =
    let private changed change (options: GenerateOptions) =
        let copy = options.Clone()
        change copy
        copy

    /// The default options. In a chat, how tokens are drawn is as the model recommends where it is not said.
    let defaults () = GenerateOptions()

    /// The sampling settings that a model recommends.
    let ofModel (model: Model) = GenerateOptions.From model

    /// Tokens to generate at most.
    let maxTokens count = changed (fun o -> o.MaxTokens <- int64 (count: int))

    /// Divides the logits before the softmax; 0 takes the argmax.
    let temperature value = changed (fun o -> o.Temperature <- value)

    /// Draws from the fewest of the most probable tokens whose probabilities reach this sum; 0 takes the argmax.
    let topP value = changed (fun o -> o.TopP <- value)

    /// Draws from this many of the most probable tokens.
    let topK count = changed (fun o -> o.TopK <- count)

    /// Leaves out tokens less probable than this fraction of the most probable one.
    let minP value = changed (fun o -> o.MinP <- value)

    /// Makes tokens that have occurred less likely.
    let repetitionPenalty value = changed (fun o -> o.RepetitionPenalty <- value)

    /// Tokens at the end of the session that the repetition penalty counts; 0 for all.
    let repetitionWindow value = changed (fun o -> o.RepetitionWindow <- value)

    /// Subtracted from the logits of tokens that the generation has at least once.
    let presencePenalty value = changed (fun o -> o.PresencePenalty <- value)

    /// Subtracted from the logit of a token once for each time that the generation has it.
    let frequencyPenalty value = changed (fun o -> o.FrequencyPenalty <- value)

    /// Numbers that are added to the logits of tokens; negative infinity excludes a token.
    let logitBias (biases: (int * float32) seq) =
        changed (fun o -> o.LogitBias <- biases |> Seq.map (fun (token, bias) -> KeyValuePair(token, bias)) |> Seq.toArray)

    /// Token sequences that are not completed.
    let badWords (words: int seq seq) = changed (fun o -> o.BadWords <- words)

    /// New tokens before which none ends the text.
    let minTokens count = changed (fun o -> o.MinTokens <- int64 (count: int))

    /// Excludes tokens that would complete a sequence of this many tokens that the session has already; 0 for none.
    let noRepeatNgramSize size = changed (fun o -> o.NoRepeatNgramSize <- int64 (size: int))

    /// Strength of the DRY penalty of tokens that would extend a repetition.
    let dryMultiplier value = changed (fun o -> o.DryMultiplier <- value)

    /// Growth of the DRY penalty with each token of the repetition.
    let dryBase value = changed (fun o -> o.DryBase <- value)

    /// Length of the shortest repetition with a DRY penalty.
    let dryAllowedLength length = changed (fun o -> o.DryAllowedLength <- int64 (length: int))

    /// Tokens at the end of the session in which DRY finds repetitions; 0 for all.
    let dryWindow size = changed (fun o -> o.DryWindow <- int64 (size: int))

    /// Strings that no repetition of DRY contains.
    let drySequenceBreakers (texts: string seq) = changed (fun o -> o.DrySequenceBreakers <- texts)

    /// Excludes tokens whose logit is more than this many standard deviations below the largest.
    let topNSigma value = changed (fun o -> o.TopNSigma <- value)

    /// Keeps the most typical tokens that together reach this probability.
    let typicalP value = changed (fun o -> o.TypicalP <- value)

    /// Excludes, with this probability, the tokens that have at least the threshold's, but for the least probable of them (XTC).
    let xtc probability threshold =
        changed (fun o ->
            o.XtcProbability <- probability
            o.XtcThreshold <- threshold)

    /// Drafts up to so many tokens a step, where the last tokens have occurred before: those that followed there.
    let promptLookup value = changed (fun o -> o.PromptLookup <- value)

    /// Drafts by a smaller model with the same tokenizer.
    let draftModel (model: Model) = changed (fun o -> o.DraftModel <- model)

    /// The program's own change of the logits before each choice. It returns false to end the generation.
    let logitsProcessor (processor: Logits -> bool) = changed (fun o -> o.LogitsProcessor <- LogitsHandler processor)

    /// Fixes the draws.
    let seed (value: uint64) = changed (fun o -> o.Seed <- Nullable value)

    /// Tokens that end the text, besides the model's own.
    let stopTokens (tokens: int seq) = changed (fun o -> o.StopTokens <- tokens)

    /// Texts that end the text.
    let stopStrings (texts: string seq) = changed (fun o -> o.StopStrings <- texts)

    /// The form that the text has, in a chat the content of the answer.
    let grammar (form: Grammar) = changed (fun o -> o.Grammar <- form)

    /// Whether tool calls are held to the schemas of their tools.
    let toolCalls (how: ToolCalls) = changed (fun o -> o.ToolCalls <- how)

    /// Has handlers told each token's log-probability.
    let logProbabilities (options: GenerateOptions) = changed (fun o -> o.LogProbabilities <- true) options

    /// Has handlers told the most probable tokens with each token.
    let topLogProbabilities count = changed (fun o -> o.TopLogProbabilities <- count)

    /// Tells a function how many tokens are run, and their total: those of the prompt, and then those that are generated.
    let progress (report: int64 -> int64 -> unit) = changed (fun o -> o.Progress <- ProgressHandler(fun ``done`` total -> report ``done`` total))

    /// Takes the model's own stop tokens like any other.
    let ignoreModelStops (options: GenerateOptions) = changed (fun o -> o.IgnoreModelStops <- true) options

/// The form of a text, compiled once for a model: `Generate.grammar` takes it.
[<RequireQualifiedAccess>]
module Grammar =
    /// JSON that fits a schema.
    let jsonSchema (schema: string) (model: Model) = Grammar.JsonSchema(model, schema)

    /// Texts that a regular expression fits as a whole.
    let regex (pattern: string) (model: Model) = Grammar.Regex(model, pattern)

    /// Texts of a Lark grammar.
    let lark (grammar: string) (model: Model) = Grammar.Lark(model, grammar)

    /// Texts of a GBNF grammar.
    let gbnf (grammar: string) (model: Model) = Grammar.Gbnf(model, grammar)

    /// One of several texts.
    let choices (texts: string seq) (model: Model) = Grammar.Choices(model, texts)

/// LoRA adapters of a model: `use adapter = model |> Adapter.load "adapter"`, then `SessionOptions(Adapter = adapter)`.
[<RequireQualifiedAccess>]
module Adapter =
    /// Loads the adapter in a directory.
    let load (path: string) (model: Model) = Adapter.Load(model, path)

    /// The description of an adapter, with the number of sessions that use it now.
    let info (adapter: Adapter) = adapter.Info

    /// Waits until no session uses an adapter.
    let wait (adapter: Adapter) = adapter.Wait()

/// How turns are written and answered: `Turn.defaults () |> Turn.thinking false |> Turn.tools json`. Each function gives a copy.
[<RequireQualifiedAccess>]
module Turn =
    let private changed change (options: ChatOptions) =
        let copy = options.Clone()
        change copy
        copy

    /// The default options.
    let defaults () = ChatOptions()

    /// Whether the model thinks before it answers, where it can do both.
    let thinking (on: bool) = changed (fun o -> o.Thinking <- Nullable on)

    /// Other variables of the model's template, as a JSON object.
    let variables (json: string) = changed (fun o -> o.Variables <- json)

    /// The tools that the model may call, as a JSON array.
    let tools (json: string) = changed (fun o -> o.Tools <- json)

    /// A Jinja template in place of the model's own.
    let chatTemplate (source: string) = changed (fun o -> o.ChatTemplate <- source)

    /// The most tokens of reasoning.
    let reasoningBudget (tokens: int) = changed (fun o -> o.ReasoningBudget <- Nullable tokens)

    /// Keeps earlier reasoning in the session, so that a turn runs only what it adds.
    let keepReasoning (options: ChatOptions) = changed (fun o -> o.KeepReasoning <- true) options

/// Conversations.
[<RequireQualifiedAccess>]
module Chat =
    /// An empty conversation with a model.
    let create (model: Model) = new ChatSession(model)

    /// An empty conversation with a model that is told something first about its role.
    let withSystem (system: string) (model: Model) = new ChatSession(model, system)

    /// An empty conversation with a model.
    let createWith (options: SessionOptions) (model: Model) = new ChatSession(model, null, options)

    /// An empty conversation with a model, whose turns are written and answered in a way of their own.
    let withTurns (turns: ChatOptions) (model: Model) = new ChatSession(model, null, null, turns)

    /// Says something and waits for the answer.
    let ask (chat: ChatSession) (text: string) = chat.Ask(text)

    /// Says something and waits for the answer.
    let askWith (options: GenerateOptions) (chat: ChatSession) (text: string) = chat.Ask(text, options)

    /// Says something and gives the answer as pieces of text, each made when it is asked for. Enumerating it twice says it twice.
    let stream (chat: ChatSession) (text: string) : string seq = chat.Stream(text)

    /// Says something and gives the answer as pieces of text.
    let streamWith (options: GenerateOptions) (chat: ChatSession) (text: string) : string seq = chat.Stream(text, options)

    /// Says something and waits for the answer; the turn is written and answered in a way of its own.
    let askTurn (turn: ChatOptions) (chat: ChatSession) (text: string) = chat.Ask(text, turn = turn)

    /// Answers a whole conversation.
    let complete (chat: ChatSession) (messages: ChatMessage seq) = chat.Complete(messages)

    /// Answers a whole conversation.
    let completeWith (options: GenerateOptions) (chat: ChatSession) (messages: ChatMessage seq) = chat.Complete(messages, options)

    /// Says something and tells a function each part of the answer as it comes.
    let parts (heard: Part -> string -> unit) (chat: ChatSession) (text: string) =
        let handler (piece: TokenEvent) =
            if piece.Text <> "" then heard piece.Part piece.Text
            true
        chat.Chat(text, TokenHandler handler)

    /// The model's reasoning before the last answer.
    let reasoning (chat: ChatSession) = chat.Reasoning

    /// The tool calls in the last answer.
    let toolCalls (chat: ChatSession) = List.ofSeq chat.ToolCalls

    /// The conversation so far, with reasoning and tool calls; `complete` takes it.
    let history (chat: ChatSession) = List.ofSeq chat.Messages

    /// The conversation so far, as role and content; during a turn, the conversation before it.
    let messages (chat: ChatSession) = chat.Messages |> Seq.map (fun m -> m.Role, m.Content) |> Seq.toList

/// How a queue runs a generation: `Submit.defaults () |> Submit.priority 1 |> Submit.deadline (TimeSpan.FromSeconds 10.)`. Each function gives a
/// copy.
[<RequireQualifiedAccess>]
module Submit =
    let private changed change (options: SubmitOptions) =
        let copy = options.Clone()
        change copy
        copy

    /// The default options.
    let defaults () = SubmitOptions()

    /// A waiting generation of a higher priority starts first.
    let priority value = changed (fun o -> o.Priority <- value)

    /// The time after which the generation ends, with the tokens that it has.
    let deadline (time: TimeSpan) = changed (fun o -> o.Deadline <- Nullable time)

/// Many generations of a model without a thread for each. Tasks are begun when they are made; bind them in `task { }`, or by Async.AwaitTask.
[<RequireQualifiedAccess>]
module Queue =
    /// A queue of a model.
    let create (model: Model) = new Queue(model)

    /// A queue of a model with limits.
    let createWith (options: QueueOptions) (model: Model) = new Queue(model, options)

    /// Says something in a conversation; the task has the answer.
    let ask (queue: Queue) (chat: ChatSession) (text: string) : Task<string> = queue.AskAsync(chat, text)

    /// Says something in a conversation; the token ends the answer.
    let askWith (options: GenerateOptions) (submit: SubmitOptions) (token: CancellationToken) (queue: Queue) (chat: ChatSession) (text: string) : Task<string> =
        queue.AskAsync(chat, text, options, cancellation = token, submit = submit)

    /// Says something in a conversation, as a part of an async workflow, whose token ends the answer.
    let answer (queue: Queue) (chat: ChatSession) (text: string) : Async<string> =
        async {
            let! token = Async.CancellationToken
            return! queue.AskAsync(chat, text, cancellation = token) |> Async.AwaitTask
        }

    /// Answers a whole conversation.
    let complete (queue: Queue) (chat: ChatSession) (messages: ChatMessage seq) : Task<string> = queue.CompleteAsync(chat, messages)

    /// Says something in a conversation and tells a function each piece of the answer as it comes.
    let tell (heard: string -> unit) (queue: Queue) (chat: ChatSession) (text: string) : Task<string> =
        queue.AskAsync(chat, text, onText = Action<string> heard)

    /// Says something in a conversation and tells a function each part of the answer as it comes.
    let parts (heard: Part -> string -> unit) (queue: Queue) (chat: ChatSession) (text: string) : Task<Generation> =
        let handler (piece: TokenEvent) =
            if piece.Text <> "" then heard piece.Part piece.Text
            true
        queue.ChatAsync(chat, text, TokenHandler handler)

    /// Generates after tokens that are appended to a session.
    let generate (options: GenerateOptions) (queue: Queue) (session: Session) (tokens: int[]) : Task<Generation> =
        queue.GenerateAsync(session, tokens, options)

#if NETCOREAPP
    /// Says something in a conversation and gives the answer as pieces of text to be awaited.
    let stream (queue: Queue) (chat: ChatSession) (text: string) : Collections.Generic.IAsyncEnumerable<string> = queue.StreamAsync(chat, text)

    /// Says something in a conversation and gives the answer as pieces of text to be awaited.
    let streamWith (options: GenerateOptions) (submit: SubmitOptions) (queue: Queue) (chat: ChatSession) (text: string)
        : Collections.Generic.IAsyncEnumerable<string> =
        queue.StreamAsync(chat, text, options, submit = submit)
#endif
