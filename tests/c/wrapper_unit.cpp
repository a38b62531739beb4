/* A second translation unit with nvfp4.hpp: see wrapper.cpp. */
#include <nvfp4.hpp>

extern "C" std::size_t other_unit_cpp(const nvfp4::Tensor &tensor);

extern "C" std::size_t other_unit_cpp(const nvfp4::Tensor &tensor)
{
    return nvfp4::dequantize(nvfp4::quantize(nvfp4::Tensor::zeros({1, 16}))).elements() == 16 ? tensor.elements() : 0;
}
