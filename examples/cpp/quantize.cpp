/* Quantize a weight to NVFP4 in C++, and compare how far the recipes stay from it and from its product with activations.
 * With spans, as C++20 has them; nvfp4.hpp itself takes C++17.
 *
 *     c++ -std=c++20 quantize.cpp $(pkg-config --cflags --libs nvfp4) -o quantize && ./quantize
 */
#include <nvfp4.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

/* The relative L2 distance of a from b. */
static double distance(std::span<const float> a, std::span<const float> b)
{
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); i++) {
        const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
        error += (x - y) * (x - y);
        norm += y * y;
    }
    return std::sqrt(error / norm);
}

int main()
try {
    const std::int64_t m = 4, n = 64, k = 256;
    std::vector<float> w(static_cast<std::size_t>(n * k)), x(static_cast<std::size_t>(m * k));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float &value : w)
        value = 0.02f * normal(random);
    for (float &value : x)
        value = normal(random);

    /* Tensors over our own memory, without a copy. */
    const nvfp4::Tensor weight = nvfp4::Tensor::borrow(std::span(w), {n, k});
    const nvfp4::Tensor input = nvfp4::Tensor::borrow(std::span(x), {m, k});
    const std::vector<float> product = nvfp4::Weight(weight).linear(input).to_floats();

    bool good = true;
    double simplest = 1;
    const char *const names[] = {"amax", "four-over-six", "sweep"};
    for (std::int32_t recipe : {NVFP4_RECIPE_AMAX, NVFP4_RECIPE_FOUR_OVER_SIX, NVFP4_RECIPE_SWEEP}) {
        nvfp4::QuantizeOptions options;
        options.recipe = recipe;
        const nvfp4::Quantized q = nvfp4::quantize(weight, options);
        /* And a span over the library's, as long as its tensor is there. */
        const nvfp4::Tensor back = nvfp4::dequantize(q);
        const double of_weight = distance(back.values<float>(), w);
        const double of_product = distance(nvfp4::Weight(q).linear(input).to_floats(), product);
        std::printf("%-14s weight off by %.4f, product by %.4f\n", names[recipe], of_weight, of_product);
        if (recipe == NVFP4_RECIPE_AMAX)
            simplest = of_weight;
        good = good && of_weight < 0.12 && of_weight <= simplest && of_product < 0.2;
    }
    nvfp4::empty_cache();
    return good ? 0 : 1;
} catch (const nvfp4::Error &error) {
    std::fprintf(stderr, "%s: %s\n", error.name(), error.what());
    return 1;
}
