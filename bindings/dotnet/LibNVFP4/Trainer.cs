// Training of whole models: options, batches, and the trainer.

using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using System.Threading;
using System.Threading.Tasks;

namespace LibNVFP4
{
    /// <summary>How to train.</summary>
    public sealed unsafe class TrainerOptions
    {
        internal NativeTrainerOptions Raw;

        /// <summary>The defaults.</summary>
        public TrainerOptions()
        {
            Library.Call(() =>
            {
                fixed (NativeTrainerOptions* raw = &Raw)
                    return Native.NVFP4_trainer_options_init(raw, (uint)sizeof(NativeTrainerOptions));
            });
            Device = Device.Auto;
        }

        /// <summary>Where it runs. Default: the first GPU, or else the CPU.</summary>
        public Device Device
        {
            get => new Device((DeviceType)Raw.DeviceType, Raw.DeviceIndex);
            set
            {
                Raw.DeviceType = (int)value.Type;
                Raw.DeviceIndex = value.Index;
            }
        }

        /// <summary>CPU threads of this trainer, or 0 for those that are shared. Default: 0.</summary>
        public int Threads { get => Raw.Threads; set => Raw.Threads = value; }

        /// <summary>The rate after the warm-up. Default: cosine.</summary>
        public Schedule Schedule { get => (Schedule)Raw.Schedule; set => Raw.Schedule = (int)value; }

        /// <summary>How gradients are clipped. Default: all together.</summary>
        public Clip Clip { get => (Clip)Raw.Clip; set => Raw.Clip = (int)value; }

        /// <summary>What gradients are clipped to. Default: 1.</summary>
        public double ClipNorm { get => Raw.ClipNorm; set => Raw.ClipNorm = value; }

        /// <summary>How weights are held. Default: in 4 bits with a residual of 4 bits.</summary>
        public WeightForm Weights { get => (WeightForm)Raw.Weights; set => Raw.Weights = (int)value; }

        /// <summary>How first moments are held. Default: in 4 bits.</summary>
        public FirstMoment FirstMoments { get => (FirstMoment)Raw.FirstMoments; set => Raw.FirstMoments = (int)value; }

        /// <summary>How second moments are held. Default: in 4 bits.</summary>
        public SecondMoment SecondMoments { get => (SecondMoment)Raw.SecondMoments; set => Raw.SecondMoments = (int)value; }

        /// <summary>Whether each gradient is used as soon as it is complete, and none is kept: one micro-batch in a step. Default: no.</summary>
        public bool Release { get => Raw.Release != 0; set => Raw.Release = Interop.Flag(value); }

        /// <summary>Whether the backward pass computes activations again rather than that they are kept. Default: yes.</summary>
        public bool Recompute { get => Raw.Recompute != 0; set => Raw.Recompute = Interop.Flag(value); }

        /// <summary>Trains only the last so many blocks, the final norm and an untied head. Default: null, everything.</summary>
        public int? LastBlocks { get => Raw.LastBlocks < 0 ? (int?)null : Raw.LastBlocks; set => Raw.LastBlocks = value ?? -1; }

        /// <summary>Steps in all. Default: 1000.</summary>
        public long Steps { get => (long)Math.Min(Raw.Steps, long.MaxValue); set => Raw.Steps = Interop.Size(value).ToUInt64(); }

        /// <summary>Steps over which the rate rises. Default: 0.</summary>
        public long Warmup { get => (long)Math.Min(Raw.Warmup, long.MaxValue); set => Raw.Warmup = Interop.Size(value).ToUInt64(); }

        /// <summary>Chooses the random bits of rounding. Default: 0.</summary>
        public ulong Seed { get => Raw.Seed; set => Raw.Seed = value; }

        /// <summary>The highest learning rate. Default: 0.001.</summary>
        public double Rate { get => Raw.Rate; set => Raw.Rate = value; }

        /// <summary>What the rate falls to, as a share of the highest. Default: 0.1.</summary>
        public double Floor { get => Raw.Floor; set => Raw.Floor = value; }

        /// <summary>The share of the steps in which a stable rate falls. Default: 0.2.</summary>
        public double DecayShare { get => Raw.DecayShare; set => Raw.DecayShare = value; }

        /// <summary>Decoupled weight decay of matrices. Default: 0.1.</summary>
        public double WeightDecay { get => Raw.WeightDecay; set => Raw.WeightDecay = value; }

        /// <summary>The decay of first moments. Default: 0.9.</summary>
        public double Beta1 { get => Raw.Beta1; set => Raw.Beta1 = value; }

        /// <summary>The decay of second moments. Default: 0.95.</summary>
        public double Beta2 { get => Raw.Beta2; set => Raw.Beta2 = value; }

        /// <summary>Added to the root of second moments. Default: 1e-8.</summary>
        public double Eps { get => Raw.Eps; set => Raw.Eps = value; }

        /// <summary>The share of the steps at the end in which passes use what is delivered; -1 is 0.3, or 0.15 of random weights. Default: -1.</summary>
        public double DeliveredShare { get => Raw.DeliveredShare; set => Raw.DeliveredShare = value; }

        /// <summary>
        /// The form in which embedding and head are delivered: in bfloat16, and where int8 is delivered, they are held in bfloat16. Default:
        /// that of the model at hand.
        /// </summary>
        public Tables Tables { get => (Tables)Raw.Tables; set => Raw.Tables = (int)value; }

        /// <summary>
        /// How block scales are chosen where linear weights that the model does not hold in NVFP4 are quantized. Default: sweep.
        /// </summary>
        public Recipe WeightScales { get => (Recipe)Raw.WeightScales; set => Raw.WeightScales = (int)value; }

        /// <summary>All settings as JSON, instead of all properties but the device and threads. Default: null.</summary>
        public string ConfigJson { get; set; }

        /// <summary>
        /// The path of a model of the same vocabulary, whose predictions are learned. Set <see cref="DeliveredShare"/> to 1 to bring an NVFP4
        /// model nearer to the one that it was quantized from. Default: null, none.
        /// </summary>
        public string TeacherPath { get; set; }

        /// <summary>Divides the logits of both models. Default: 1.</summary>
        public double TeacherTemperature { get => Raw.TeacherTemperature; set => Raw.TeacherTemperature = value; }

        /// <summary>The share of the labels' cross-entropy in the loss beside a teacher. Default: 0.</summary>
        public double LabelShare { get => Raw.LabelShare; set => Raw.LabelShare = value; }

        /// <summary>Where the teacher's weights are. Default: on the device if both models fit.</summary>
        public Teacher TeacherMemory { get => (Teacher)Raw.TeacherMemory; set => Raw.TeacherMemory = (int)value; }

        internal int Use(Func<IntPtr, int> call)
        {
            byte[] config = ConfigJson == null ? null : Interop.Utf8(ConfigJson, nameof(ConfigJson));
            byte[] teacher = TeacherPath == null ? null : Interop.Utf8(TeacherPath, nameof(TeacherPath));
            NativeTrainerOptions raw = Raw;
            fixed (byte* at = config)
            fixed (byte* path = teacher)
            {
                raw.Config = at;
                raw.ConfigLength = Interop.Size(config == null ? 0 : config.Length);
                raw.Teacher = path;
                raw.TeacherLength = Interop.Size(teacher == null ? 0 : teacher.Length);
                return call((IntPtr)(&raw));
            }
        }
    }

    /// <summary>A model's predictions against labels and against its teacher's: means in nats.</summary>
    public sealed class Comparison
    {
        internal Comparison(double loss, double divergence)
        {
            Loss = loss;
            Divergence = divergence;
        }

        /// <summary>The cross-entropy of the labels that count.</summary>
        public double Loss { get; }

        /// <summary>The divergence from the teacher's predictions.</summary>
        public double Divergence { get; }
    }

    /// <summary>Documents that go through a model together; no token sees another document.</summary>
    public sealed class MicroBatch
    {
        /// <summary>The label of a token that none counts for.</summary>
        public const int NoLabel = -100;

        /// <summary>A batch.</summary>
        /// <param name="tokens">The tokens of all documents.</param>
        /// <param name="labels">For each token, the one that should come after it; negative where none counts.</param>
        /// <param name="documentLengths">The number of tokens of each document; null if all is one.</param>
        /// <param name="weights">What the loss of each label is multiplied by; null if all count the same.</param>
        public MicroBatch(int[] tokens, int[] labels, int[] documentLengths = null, float[] weights = null)
        {
            Tokens = tokens ?? throw new ArgumentNullException(nameof(tokens));
            Labels = labels ?? throw new ArgumentNullException(nameof(labels));
            if (tokens.Length != labels.Length)
                throw new ArgumentException(tokens.Length + " tokens and " + labels.Length + " labels; each token takes one");
            if (weights != null && weights.Length != labels.Length)
                throw new ArgumentException(labels.Length + " labels and " + weights.Length + " weights; each label takes one, or none does");
            DocumentLengths = documentLengths ?? new int[0];
            Weights = weights;
        }

        /// <summary>A batch of documents in which each token is to give the next one, and the last one of each nothing.</summary>
        public static MicroBatch Of(params int[][] documents)
        {
            var tokens = new List<int>();
            var labels = new List<int>();
            var lengths = new List<int>();
            foreach (int[] document in documents ?? throw new ArgumentNullException(nameof(documents)))
            {
                for (int i = 0; i < document.Length; i++)
                {
                    tokens.Add(document[i]);
                    labels.Add(i + 1 < document.Length ? document[i + 1] : NoLabel);
                }
                lengths.Add(document.Length);
            }
            return new MicroBatch(tokens.ToArray(), labels.ToArray(), lengths.ToArray());
        }

        /// <summary>The tokens of all documents.</summary>
        public int[] Tokens { get; }

        /// <summary>The token that should come after each.</summary>
        public int[] Labels { get; }

        /// <summary>The number of tokens of each document; empty if all is one.</summary>
        public int[] DocumentLengths { get; }

        /// <summary>What the loss of each label is multiplied by; null if all count the same.</summary>
        public float[] Weights { get; }
    }

    /// Batches held in place for a call.
    internal sealed unsafe class PinnedBatches : Pinned
    {
        internal readonly NativeMicroBatch[] Raw;

        internal PinnedBatches(MicroBatch[] batches)
        {
            Raw = new NativeMicroBatch[(batches ?? throw new ArgumentNullException(nameof(batches))).Length];
            try
            {
                for (int i = 0; i < batches.Length; i++)
                {
                    MicroBatch batch = batches[i] ?? throw new ArgumentNullException(nameof(batches));
                    var lengths = new UIntPtr[batch.DocumentLengths.Length];
                    for (int d = 0; d < lengths.Length; d++)
                        lengths[d] = Interop.Size(batch.DocumentLengths[d]);
                    Raw[i].Tokens = (int*)Pin(batch.Tokens);
                    Raw[i].Labels = (int*)Pin(batch.Labels);
                    Raw[i].TokenCount = Interop.Size(batch.Tokens.Length);
                    Raw[i].DocumentLengths = (UIntPtr*)Pin(lengths);
                    Raw[i].DocumentCount = Interop.Size(lengths.Length);
                    Raw[i].Weights = batch.Weights == null ? null : (float*)Pin(batch.Weights);
                }
            }
            catch
            {
                Dispose();
                throw;
            }
        }
    }

    /// <summary>What a step came to.</summary>
    public sealed class StepReport
    {
        internal StepReport(NativeStepReport raw)
        {
            Outcome = (StepOutcome)raw.Outcome;
            Step = (long)raw.Step;
            Targets = (long)raw.Targets;
            Loss = raw.Loss;
            Rate = raw.Rate;
            GradientNorm = raw.GradientNorm;
            Changed = raw.Changed;
            ChangedDelivered = raw.ChangedDelivered;
        }

        /// <summary>Whether parameters were updated.</summary>
        public StepOutcome Outcome { get; }

        /// <summary>The number of the step, from 1.</summary>
        public long Step { get; }

        /// <summary>Labels that counted.</summary>
        public long Targets { get; }

        /// <summary>Their mean cross-entropy in nats, before the step.</summary>
        public double Loss { get; }

        /// <summary>The learning rate.</summary>
        public double Rate { get; }

        /// <summary>The norm of all gradients before clipping.</summary>
        public double GradientNorm { get; }

        /// <summary>The share of trained weights that changed as they are held.</summary>
        public double Changed { get; }

        /// <summary>The share that changed as they are delivered.</summary>
        public double ChangedDelivered { get; }
    }

    /// <summary>What a trainer is and how far it has come.</summary>
    public sealed class TrainerInfo
    {
        internal TrainerInfo(string json)
        {
            Json = json;
            Dictionary<string, object> members = LibNVFP4.Json.Object(json);
            Architecture = (string)members["architecture"];
            Device = (string)members["device"];
            Steps = (long)members["steps"];
            Skipped = (long)members["skipped"];
            Parameters = (long)members["parameters"];
            Bytes = (long)members["bytes"];
        }

        /// <summary>The model's architecture, such as "qwen3".</summary>
        public string Architecture { get; }

        /// <summary>What it runs on.</summary>
        public string Device { get; }

        /// <summary>Steps taken.</summary>
        public long Steps { get; }

        /// <summary>Those that changed nothing.</summary>
        public long Skipped { get; }

        /// <summary>The number of parameters.</summary>
        public long Parameters { get; }

        /// <summary>The bytes of parameters and moments.</summary>
        public long Bytes { get; }

        /// <summary>All that the library says, as JSON.</summary>
        public string Json { get; }

        /// <summary>The JSON.</summary>
        public override string ToString() => Json;
    }

    /// <summary>Trains a dense model, with weights and both moments of AdamW in 4 bits by default. One call at a time may use it; another one is an <see cref="Nvfp4BusyException"/>.</summary>
    public sealed unsafe class Trainer : IDisposable
    {
        internal readonly TrainerHandle Handle;

        Trainer(TrainerHandle handle)
        {
            Handle = handle;
            handle.Press((ulong)Info.Bytes);
        }

        /// <summary>A trainer of a model: a directory, or a .safetensors, .dat or .gguf file.</summary>
        /// <param name="path">Where the model is.</param>
        /// <param name="options">Null for the defaults.</param>
        /// <param name="cancellation">Stops it before weights are read, with an OperationCanceledException.</param>
        public static Trainer Create(string path, TrainerOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            byte[] bytes = Interop.Utf8(path, nameof(path));
            TrainerHandle handle = null;
            using (var call = new Call(cancellation))
            {
                call.Finish(Library.Try(() => (options ?? new TrainerOptions()).Use(raw =>
                {
                    fixed (byte* at = bytes)
                        return Native.NVFP4_trainer_create(at, Interop.Size(bytes.Length), (NativeTrainerOptions*)raw, call.Options, out handle);
                })));
            }
            return new Trainer(handle);
        }

        /// <summary>A trainer from the last checkpoint in a directory, or the checkpoint that it is, with its settings. It goes on to the same bits.</summary>
        /// <param name="path">The model that training began with.</param>
        /// <param name="directory">Where <see cref="Save"/> has put checkpoints.</param>
        /// <param name="options">Names the device and threads, and nothing else; null for the defaults.</param>
        /// <param name="cancellation">Stops it before the checkpoint is read.</param>
        public static Trainer Resume(string path, string directory, TrainerOptions options = null,
            CancellationToken cancellation = default(CancellationToken))
        {
            byte[] bytes = Interop.Utf8(path, nameof(path)), place = Interop.Utf8(directory, nameof(directory));
            TrainerHandle handle = null;
            using (var call = new Call(cancellation))
            {
                call.Finish(Library.Try(() => (options ?? new TrainerOptions()).Use(raw =>
                {
                    fixed (byte* at = bytes)
                    fixed (byte* from = place)
                        return Native.NVFP4_trainer_resume(at, Interop.Size(bytes.Length), from, Interop.Size(place.Length),
                            (NativeTrainerOptions*)raw, call.Options, out handle);
                })));
            }
            return new Trainer(handle);
        }

        /// <summary>How far it has come; during a call, before that call.</summary>
        public TrainerInfo Info =>
            new TrainerInfo(Interop.Text((buffer, capacity, length) => Native.NVFP4_trainer_info(Handle, buffer, capacity, length)));

        /// <summary>The JSON that was saved last, or with the checkpoint that this was resumed from; "null" where there is none.</summary>
        public string Data => Interop.Text((buffer, capacity, length) => Native.NVFP4_trainer_data(Handle, buffer, capacity, length));

        /// <summary>A step by all micro-batches together, each label counting the same.</summary>
        public StepReport Step(params MicroBatch[] batches) => Step(batches, null, default(CancellationToken));

        /// <summary>The same, with progress in tokens. A step that is cancelled has changed nothing.</summary>
        public StepReport Step(MicroBatch[] batches, ProgressHandler progress, CancellationToken cancellation)
        {
            var report = new NativeStepReport { StructSize = (uint)sizeof(NativeStepReport) };
            using (var pinned = new PinnedBatches(batches))
            using (var call = new Call(cancellation, progress))
            {
                fixed (NativeMicroBatch* at = pinned.Raw)
                    call.Finish(Native.NVFP4_trainer_step(Handle, at, Interop.Size(pinned.Raw.Length),
                        Interop.Size(sizeof(NativeMicroBatch)), call.Options, &report));
            }
            return new StepReport(report);
        }

        /// <summary>The same, on a thread of its own.</summary>
        public Task<StepReport> StepAsync(MicroBatch[] batches, ProgressHandler progress = null,
            CancellationToken cancellation = default(CancellationToken)) =>
            Interop.OnThread(() => Step(batches, progress, cancellation), cancellation);

        /// <summary>The mean cross-entropy of the labels that count, in nats.</summary>
        /// <param name="batches">What to evaluate with.</param>
        /// <param name="delivered">Whether the NVFP4 codes alone are used, which are what is exported; else all that is held.</param>
        /// <param name="cancellation">Stops it.</param>
        public double Evaluate(MicroBatch[] batches, bool delivered = true, CancellationToken cancellation = default(CancellationToken))
        {
            double loss = 0;
            using (var pinned = new PinnedBatches(batches))
            using (var call = new Call(cancellation))
            {
                fixed (NativeMicroBatch* at = pinned.Raw)
                    call.Finish(Native.NVFP4_trainer_evaluate(Handle, at, Interop.Size(pinned.Raw.Length),
                        Interop.Size(sizeof(NativeMicroBatch)), Interop.Flag(delivered), call.Options, &loss));
            }
            return loss;
        }

        /// <summary>The mean cross-entropy and the mean divergence from the teacher's predictions, in nats.</summary>
        /// <param name="batches">What to evaluate with.</param>
        /// <param name="delivered">Whether the NVFP4 codes alone are used, which are what is exported; else all that is held.</param>
        /// <param name="cancellation">Stops it.</param>
        public Comparison Compare(MicroBatch[] batches, bool delivered = true, CancellationToken cancellation = default(CancellationToken))
        {
            double loss = 0, divergence = 0;
            using (var pinned = new PinnedBatches(batches))
            using (var call = new Call(cancellation))
            {
                fixed (NativeMicroBatch* at = pinned.Raw)
                    call.Finish(Native.NVFP4_trainer_compare(Handle, at, Interop.Size(pinned.Raw.Length),
                        Interop.Size(sizeof(NativeMicroBatch)), Interop.Flag(delivered), call.Options, &loss, &divergence));
            }
            return new Comparison(loss, divergence);
        }

        /// <summary>Writes a checkpoint into a directory, and removes all there but the last.</summary>
        /// <param name="directory">Where; made if it is not there.</param>
        /// <param name="data">JSON that <see cref="Data"/> gives back after <see cref="Resume"/>; null for none.</param>
        /// <param name="keep">How many checkpoints stay.</param>
        public void Save(string directory, string data = null, int keep = 2)
        {
            byte[] place = Interop.Utf8(directory, nameof(directory)), json = Interop.Utf8(data ?? "", nameof(data));
            fixed (byte* at = place)
            fixed (byte* text = json)
                Interop.Check(Native.NVFP4_trainer_save(Handle, at, Interop.Size(place.Length), text, Interop.Size(json.Length),
                    Interop.Size(keep), null));
        }

        /// <summary>Writes the model, as it is delivered, to a directory in ModelOpt's layout.</summary>
        /// <param name="path">The directory.</param>
        /// <param name="tables">What embeddings and head are written as; auto is what they are trained for.</param>
        /// <param name="replace">Whether a directory that holds a model is replaced.</param>
        public void ExportDirectory(string path, Tables tables = Tables.Auto, bool replace = false)
        {
            byte[] place = Interop.Utf8(path, nameof(path));
            fixed (byte* at = place)
                Interop.Check(Native.NVFP4_trainer_export_directory(Handle, at, Interop.Size(place.Length), (int)tables,
                    Interop.Flag(replace), null));
        }

        /// <summary>Writes the model to a .dat file, every tensor in the type that it has in the .dat file that training began with.</summary>
        public void ExportDat(string path)
        {
            byte[] place = Interop.Utf8(path, nameof(path));
            fixed (byte* at = place)
                Interop.Check(Native.NVFP4_trainer_export_dat(Handle, at, Interop.Size(place.Length), null));
        }

        /// <summary>Writes the adapters to a directory as peft reads them, where the trainer has adapters.</summary>
        /// <param name="path">The directory.</param>
        /// <param name="baseModel">What the model below them is called there: a directory, or a name of the Hugging Face hub.</param>
        /// <param name="replace">Whether a directory that holds an adapter is replaced.</param>
        public void ExportAdapter(string path, string baseModel, bool replace = false)
        {
            byte[] place = Interop.Utf8(path, nameof(path)), name = Interop.Utf8(baseModel, nameof(baseModel));
            fixed (byte* at = place)
            fixed (byte* text = name)
                Interop.Check(Native.NVFP4_trainer_export_adapter(Handle, at, Interop.Size(place.Length), text, Interop.Size(name.Length),
                    Interop.Flag(replace), null));
        }

        /// <summary>The model that is trained, for sessions beside the steps, on the memory that is trained. It follows each step: its sessions keep their tokens, and go on with the new weights. Other threads may run them during a step, and wait for it.</summary>
        public Model Model()
        {
            ModelHandle handle = null;
            Interop.Call(() => Native.NVFP4_trainer_model(Handle, null, out handle));
            return new Model(handle);
        }

        /// <summary>Gives up the trainer. A model that it has given keeps the weights.</summary>
        public void Dispose() => Handle.Dispose();
    }
}
