// Quantize a weight to NVFP4 in C#, and compare how far the recipes stay from it and from its product with activations; or
// convert a model on disk.
//
//     dotnet run --project examples/csharp/quantize
//     dotnet run --project examples/csharp/quantize -- MODEL DESTINATION

using System;
using LibNVFP4;

static class Program
{
    static int Main(string[] args)
    {
        try
        {
            if (args.Length == 2)
                Convert(args[0], args[1]);
            else
                Compare();
            return 0;
        }
        catch (Nvfp4Exception e)
        {
            Console.Error.WriteLine(e.Status + ": " + e.Message);
            return 1;
        }
    }

    static void Convert(string model, string destination)
    {
        var options = new QuantizeOptions { Recipe = Recipe.Sweep };
        Quantizer.ConvertModel(model, destination, Container.ModelOpt, options,
            (done, total) => Console.Error.Write("\r{0:F0} %", 100.0 * done / Math.Max(total, 1)));
        Console.Error.WriteLine();
    }

    static void Compare()
    {
        const int m = 4, n = 64, k = 256;
        var random = new Random(1);
        float[] w = Values(random, n * k), x = Values(random, m * k);
        // Tensors over our own arrays, without a copy.
        using (Tensor weight = Tensor.FromArray(w, n, k), input = Tensor.FromArray(x, m, k))
        using (LinearWeight dense = LinearWeight.Create(weight))
        using (Tensor product = dense.Linear(input))
            foreach (Recipe recipe in new[] { Recipe.Amax, Recipe.FourOverSix, Recipe.Sweep })
                using (QuantizedTensor quantized = Quantizer.Quantize(weight, new QuantizeOptions { Recipe = recipe }))
                using (Tensor back = quantized.Dequantize())
                using (LinearWeight prepared = LinearWeight.Create(quantized))
                using (Tensor y = prepared.Linear(input))
                    Console.WriteLine("{0,-12} weight off by {1:F4}, product by {2:F4}, by {3}", recipe, Distance(back.ToFloats(), w),
                        Distance(y.ToFloats(), product.ToFloats()), prepared.Backend.Name);
    }

    static float[] Values(Random random, int count)
    {
        var values = new float[count];
        for (int i = 0; i < count; i++)
            values[i] = (float)(random.NextDouble() * 2 - 1);
        return values;
    }

    // The relative L2 distance of a from b.
    static double Distance(float[] a, float[] b)
    {
        double error = 0, norm = 0;
        for (int i = 0; i < a.Length; i++)
        {
            error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
            norm += (double)b[i] * b[i];
        }
        return Math.Sqrt(error / norm);
    }
}
