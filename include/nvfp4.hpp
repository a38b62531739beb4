/*
 * libNVFP4 for C++17: RAII over nvfp4.h, in this one header.
 *
 *     nvfp4::Model model("Qwen3-0.6B-nvfp4");
 *     nvfp4::Session session(model);
 *     session.chat("Why is the sky blue?", {}, [](std::string_view text) { std::cout << text << std::flush; });
 *
 * What a function does and which values it takes stands in nvfp4.h; here stands only what C++ adds.
 *
 * ERRORS are thrown as nvfp4::Error, which has the status and the message.
 *
 * HANDLES are objects that move and do not copy; a moved-from one holds nothing, and using it throws. clone() makes a second
 * owner of the same object. Each owns one reference of the C interface: get() lends the handle, release() gives it away, and
 * the constructor from a handle takes one over. As in C, a model or a tensor may be used by several threads at once, and a
 * session by one at a time.
 *
 * TEXT goes in as std::string_view and comes out as std::string, in UTF-8. ARRAYS go in as nvfp4::Span, which anything with
 * data() and size() becomes by itself, and come out as std::vector.
 *
 * CALLBACKS are any callable. An exception that one throws ends the call and leaves it, unchanged. One that returns false
 * ends the call too; one that returns nothing never does.
 */
#ifndef NVFP4_HPP
#define NVFP4_HPP

#include "nvfp4.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace nvfp4 {

/** A call that failed: its status, and as what() the library's message. */
class Error : public std::runtime_error {
public:
    Error(NVFP4_Status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    /** One of the numbers after #NVFP4_OK. */
    NVFP4_Status status() const noexcept { return status_; }
    /** Its name, such as "BUSY". */
    const char *name() const noexcept { return NVFP4_status_name(status_); }

private:
    NVFP4_Status status_;
};

/** Throws the thread's last error unless `status` is #NVFP4_OK. For calls of the C interface that have no wrapper. */
inline void check(NVFP4_Status status)
{
    if (status != NVFP4_OK)
        throw Error(status, NVFP4_last_error());
}

/** A pointer to elements of someone else and their number. */
template <class T>
class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(const T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /** Holds during the full expression that the list is in, which is long enough for an argument. */
    constexpr Span(std::initializer_list<T> list) noexcept : Span(list.begin(), list.size()) {}
    template <class Container,
              class = std::enable_if_t<std::is_convertible_v<decltype(std::declval<const Container &>().data()), const T *>>,
              class = decltype(std::declval<const Container &>().size())>
    constexpr Span(const Container &container) noexcept : data_(container.data()), size_(container.size())
    {
    }

    constexpr const T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr const T *begin() const noexcept { return data_; }
    constexpr const T *end() const noexcept { return data_ + size_; }

private:
    const T *data_ = nullptr;
    std::size_t size_ = 0;
};

/** Sizes of a tensor's dimensions, outermost first. */
using Shape = Span<std::int64_t>;

/** Not part of the interface. */
namespace detail {

/** Text that `call(buffer, capacity, &length)` copies out. It is asked again if it grew in between. */
template <class Call>
std::string text(Call &&call)
{
    std::string out;
    std::size_t length = 0;
    check(call(nullptr, 0, &length));
    for (;;) {
        out.resize(length);
        const NVFP4_Status status = call(out.empty() ? nullptr : &out[0], out.size(), &length);
        if (status != NVFP4_BUFFER_TOO_SMALL) {
            check(status);
            out.resize(length);
            return out;
        }
    }
}

/** Elements that `call(buffer, capacity, &count)` copies out. */
template <class T, class Call>
std::vector<T> items(Call &&call)
{
    std::vector<T> out;
    std::size_t count = 0;
    check(call(static_cast<T *>(nullptr), 0, &count));
    for (;;) {
        out.resize(count);
        const NVFP4_Status status = call(out.empty() ? nullptr : out.data(), out.size(), &count);
        if (status != NVFP4_BUFFER_TOO_SMALL) {
            check(status);
            out.resize(count);
            return out;
        }
    }
}

/** One value that `call(&value)` writes. */
template <class T, class Call>
T value(Call &&call)
{
    T out{};
    check(call(&out));
    return out;
}

/** One reference to an object of the C interface. */
template <class T, NVFP4_Status (*retain)(T *), NVFP4_Status (*give_up)(T *)>
class Handle {
public:
    /** Holds nothing. */
    Handle() noexcept = default;
    /** Takes over one reference. */
    explicit Handle(T *handle) noexcept : handle_(handle) {}
    Handle(Handle &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Handle &operator=(Handle &&other) noexcept
    {
        std::swap(handle_, other.handle_);
        return *this;
    }
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;
    ~Handle() { reset(); }

    /** The handle, still owned by this object; nullptr if it holds nothing. */
    T *get() const noexcept { return handle_; }
    /** Gives the handle to the caller, who is to release it. */
    T *release() noexcept { return std::exchange(handle_, nullptr); }
    /** Gives up the reference; the object holds nothing then. */
    void reset() noexcept
    {
        if (handle_ != nullptr)
            give_up(std::exchange(handle_, nullptr));
    }
    /** Where a function of the C interface puts a handle for this object to own. */
    T **put() noexcept
    {
        reset();
        return &handle_;
    }
    /** Whether it holds something. */
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    T *retained() const
    {
        check(retain(handle_));
        return handle_;
    }

private:
    T *handle_ = nullptr;
};

/** Calls `f(arguments...)`; says whether to go on. */
template <class F, class... Arguments>
bool goes_on(F &f, Arguments &&...arguments)
{
    if constexpr (std::is_void_v<std::invoke_result_t<F &, Arguments...>>) {
        f(std::forward<Arguments>(arguments)...);
        return true;
    } else {
        return static_cast<bool>(f(std::forward<Arguments>(arguments)...));
    }
}

/** A callable on its way through C, and the exception that it threw. */
template <class F>
struct Carried {
    F &f;
    std::exception_ptr thrown = nullptr;

    /** For a callback: no exception gets past it. */
    template <class... Arguments>
    std::int32_t call(Arguments &&...arguments) noexcept
    {
        try {
            return goes_on(f, std::forward<Arguments>(arguments)...) ? 0 : 1;
        } catch (...) {
            thrown = std::current_exception();
            return 1;
        }
    }

    /** After the call that was to run it. */
    void check(NVFP4_Status status)
    {
        if (thrown)
            std::rethrow_exception(thrown);
        nvfp4::check(status);
    }
};

/** The number of dimensions. */
inline std::int32_t rank(Shape shape)
{
    // 1000 is more than any tensor has, and refused.
    return static_cast<std::int32_t>(shape.size() < 1000 ? shape.size() : 1000);
}

/** Stands for a callback that is not wanted. */
struct Nothing {};

template <class F>
std::int32_t progress(void *user, std::uint64_t done, std::uint64_t total)
{
    return static_cast<Carried<F> *>(user)->call(done, total);
}

} // namespace detail

/** Version of the library that runs, as "major.minor.patch". */
inline const char *version() noexcept { return NVFP4_version(); }

/** Throws if the library that runs has another binary interface than the header this was compiled with. */
inline void check_abi()
{
    if (NVFP4_abi_version() != NVFP4_ABI_VERSION)
        throw Error(NVFP4_ABI_MISMATCH, "compiled for version " + std::to_string(NVFP4_ABI_VERSION) +
                                            " of the binary interface, running with " +
                                            std::to_string(NVFP4_abi_version()));
}

/** What the library can do on this machine, as JSON. */
inline std::string diagnose()
{
    return detail::text([](char *buffer, std::size_t capacity, std::size_t *length) {
        return NVFP4_diagnose(buffer, capacity, length);
    });
}

/**
 * Takes the library's log messages as long as it lives. There is one for the whole process: a second one takes the place of the
 * first, and whichever ends first ends the logging.
 */
class Log {
public:
    /** Takes one of NVFP4_LOG_* and a line of text, on whichever thread has something to say. May throw, for nothing. */
    using Function = std::function<void(std::int32_t level, std::string_view message)>;

    /** Takes messages of `level` and more severe ones. */
    Log(std::int32_t level, Function function) : function_(std::move(function))
    {
        check(NVFP4_set_log_callback(take, this, level));
    }
    Log(const Log &) = delete;
    Log &operator=(const Log &) = delete;
    ~Log() { NVFP4_set_log_callback(nullptr, nullptr, NVFP4_LOG_OFF); }

private:
    static std::int32_t take(void *user, std::int32_t level, const char *message, std::size_t length) noexcept
    {
        try {
            static_cast<Log *>(user)->function_(level, std::string_view(message, length));
        } catch (...) {
            return 1;
        }
        return 0;
    }

    Function function_;
};

/** CPU threads of what is made from now on; 0 leaves it to the environment and the machine. */
inline void set_threads(std::int32_t threads) { check(NVFP4_set_threads(threads)); }

/** Frees what is kept for reuse. */
inline void empty_cache() noexcept { NVFP4_empty_cache(); }

/** Bytes in use. */
struct Memory {
    std::uint64_t current, peak;
};

/** What is in use under one of NVFP4_MEMORY_*. */
inline Memory memory(std::int32_t tag = NVFP4_MEMORY_TOTAL)
{
    Memory out{};
    check(NVFP4_memory_stats(tag, &out.current, &out.peak));
    return out;
}

/** Starts the peaks again from what is in use now. */
inline void reset_memory_peak() { check(NVFP4_memory_reset_peak()); }

/** The most bytes that may be in use; 0 removes the limit. */
inline void set_memory_budget(std::uint64_t bytes) { check(NVFP4_memory_set_budget(bytes)); }

/** The limit, or 0 if there is none. */
inline std::uint64_t memory_budget() { return detail::value<std::uint64_t>(NVFP4_memory_get_budget); }

/** The NVFP4_DTYPE_* of a C++ type. */
template <class T>
inline constexpr std::int32_t dtype_of = [] {
    static_assert(!std::is_same_v<T, T>, "this type has no NVFP4_DTYPE_*; name one");
    return -1;
}();
template <> inline constexpr std::int32_t dtype_of<std::uint8_t> = NVFP4_DTYPE_UINT8;
template <> inline constexpr std::int32_t dtype_of<std::int8_t> = NVFP4_DTYPE_INT8;
template <> inline constexpr std::int32_t dtype_of<std::int16_t> = NVFP4_DTYPE_INT16;
template <> inline constexpr std::int32_t dtype_of<std::int32_t> = NVFP4_DTYPE_INT32;
template <> inline constexpr std::int32_t dtype_of<std::int64_t> = NVFP4_DTYPE_INT64;
template <> inline constexpr std::int32_t dtype_of<float> = NVFP4_DTYPE_FLOAT32;
template <> inline constexpr std::int32_t dtype_of<double> = NVFP4_DTYPE_FLOAT64;

/** A typed, shaped view of memory. */
class Tensor : public detail::Handle<NVFP4_Tensor, NVFP4_tensor_retain, NVFP4_tensor_release> {
public:
    using Handle::Handle;

    /** Over memory of the caller, which must outlive every use of it. */
    static Tensor borrow(void *data, Shape shape, std::int32_t dtype, Shape strides = {})
    {
        return make(data, shape, dtype, strides, nullptr, nullptr);
    }

    /** The same, of the type that the pointer says. */
    template <class T>
    static Tensor borrow(T *data, Shape shape)
    {
        return borrow(data, shape, dtype_of<T>);
    }

    /** Over the elements of a vector, which the tensor keeps. */
    template <class T>
    static Tensor adopt(std::vector<T> values, Shape shape)
    {
        std::int64_t elements = 1;
        for (const std::int64_t size : shape)
            elements *= size;
        if (elements < 0 || static_cast<std::uint64_t>(elements) != values.size())
            throw Error(NVFP4_INVALID_ARGUMENT, "a vector of " + std::to_string(values.size()) +
                                                    " elements does not fill a shape of " + std::to_string(elements));
        auto kept = std::make_unique<std::vector<T>>(std::move(values));
        Tensor out = make(kept->data(), shape, dtype_of<T>, {}, [](void *, void *user) {
            delete static_cast<std::vector<T> *>(user);
        }, kept.get());
        kept.release();
        return out;
    }

    /** Zeros in memory of the library. */
    static Tensor zeros(Shape shape, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
    {
        Tensor out;
        check(NVFP4_tensor_empty(shape.data(), detail::rank(shape), dtype, NVFP4_DEVICE_CPU, 0, out.put()));
        return out;
    }

    /** Over memory of the CUDA device `index`, which must outlive every use of it. */
    static Tensor borrow_device(void *data, Shape shape, std::int32_t dtype, std::int32_t index = 0, Shape strides = {})
    {
        Tensor out;
        check_strides(shape, strides);
        check(NVFP4_tensor_from_device(data, shape.data(), detail::rank(shape), strides.data(), dtype, index, nullptr,
                                       nullptr, out.put()));
        return out;
    }

    /** A copy without gaps in the memory of a device, or of the host. */
    Tensor to(std::int32_t device_type, std::int32_t index = 0) const
    {
        Tensor out;
        check(NVFP4_tensor_copy_to_device(get(), device_type, index, out.put()));
        return out;
    }

    /** Where the memory is: one of NVFP4_DEVICE_*, and which device of that type. */
    std::pair<std::int32_t, std::int32_t> device() const
    {
        std::pair<std::int32_t, std::int32_t> out;
        check(NVFP4_tensor_device(get(), &out.first, &out.second));
        return out;
    }

    /** Takes over a DLPack tensor; if it throws, the caller still has it. */
    static Tensor from_dlpack(struct DLManagedTensor *managed)
    {
        Tensor out;
        check(NVFP4_tensor_from_dlpack(managed, out.put()));
        return out;
    }

    /** A DLPack tensor over the same memory, for its consumer to delete. */
    struct DLManagedTensor *to_dlpack() const
    {
        return detail::value<struct DLManagedTensor *>(
            [&](struct DLManagedTensor **out) { return NVFP4_tensor_to_dlpack(get(), out); });
    }

    /** A second owner of the same tensor. */
    Tensor clone() const { return Tensor(retained()); }

    /** Another view of the same memory; `offset` counts elements. */
    Tensor view(Shape shape, Shape strides = {}, std::int64_t offset = 0) const
    {
        Tensor out;
        check_strides(shape, strides);
        check(NVFP4_tensor_view(get(), shape.data(), detail::rank(shape), strides.data(), offset, out.put()));
        return out;
    }

    /** One of NVFP4_DTYPE_*. */
    std::int32_t dtype() const
    {
        return detail::value<std::int32_t>([&](std::int32_t *out) { return NVFP4_tensor_dtype(get(), out); });
    }
    std::vector<std::int64_t> shape() const
    {
        return detail::items<std::int64_t>([&](std::int64_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_tensor_shape(get(), buffer, capacity, count);
        });
    }
    /** In elements. */
    std::vector<std::int64_t> strides() const
    {
        return detail::items<std::int64_t>([&](std::int64_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_tensor_strides(get(), buffer, capacity, count);
        });
    }
    std::size_t elements() const
    {
        std::size_t out = 1;
        for (const std::int64_t size : shape())
            out *= static_cast<std::size_t>(size);
        return out;
    }
    /** Bytes of the elements without gaps. */
    std::uint64_t bytes() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_tensor_bytes(get(), out); });
    }
    /** The first element, valid as long as the tensor. */
    void *data() const
    {
        return detail::value<void *>([&](void **out) { return NVFP4_tensor_data(get(), out); });
    }
    /** Copies the elements, row-major without gaps, into exactly bytes() bytes. */
    void copy_to(void *destination, std::size_t bytes) const
    {
        check(NVFP4_tensor_copy_to_host(get(), destination, bytes));
    }
    /** The elements as they are stored. */
    template <class T>
    std::vector<T> to_vector() const
    {
        if (dtype() != dtype_of<T> && !(sizeof(T) == 1 && bytes() == elements()))
            throw Error(NVFP4_INVALID_ARGUMENT, "the tensor's dtype is " + std::to_string(dtype()) +
                                                    ", and the elements asked for are of dtype " +
                                                    std::to_string(dtype_of<T>));
        std::vector<T> out(elements());
        copy_to(out.data(), out.size() * sizeof(T));
        return out;
    }
    /** The elements as float, whatever their type. */
    std::vector<float> to_floats() const
    {
        std::vector<float> out(elements());
        check(NVFP4_tensor_copy_as_float(get(), out.data(), out.size()));
        return out;
    }

private:
    static void check_strides(Shape shape, Shape strides)
    {
        if (strides.data() != nullptr && strides.size() != shape.size())
            throw Error(NVFP4_INVALID_ARGUMENT, std::to_string(strides.size()) + " strides for " +
                                                    std::to_string(shape.size()) + " dimensions");
    }
    static Tensor make(void *data, Shape shape, std::int32_t dtype, Shape strides, NVFP4_Deleter deleter, void *user)
    {
        Tensor out;
        check_strides(shape, strides);
        check(NVFP4_tensor_from_host(data, shape.data(), detail::rank(shape), strides.data(), dtype, deleter, user, out.put()));
        return out;
    }
};

/** How to quantize; the fields of the C struct, with their defaults. */
struct QuantizeOptions : NVFP4_QuantizeOptions {
    QuantizeOptions() { check(NVFP4_quantize_options_init(this, sizeof(NVFP4_QuantizeOptions))); }
};

/** A tensor in NVFP4. */
struct Quantized {
    Tensor codes, scales;
    float global_scale = 1;
    std::int32_t scale_layout = NVFP4_SCALES_LINEAR;
};

/** To NVFP4 along the last dimension. */
inline Quantized quantize(const Tensor &input, const NVFP4_QuantizeOptions &options = QuantizeOptions())
{
    Quantized out;
    out.scale_layout = options.scale_layout;
    check(NVFP4_tensor_quantize(input.get(), &options, out.codes.put(), out.scales.put(), &out.global_scale));
    return out;
}

/** Back to a floating type. */
inline Tensor dequantize(const Quantized &input, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    Tensor out;
    check(NVFP4_tensor_dequantize(input.codes.get(), input.scales.get(), input.global_scale, input.scale_layout, dtype,
                                  out.put()));
    return out;
}

/** a `[M, K]` times b `[N, K]` transposed (W4A4). Both must have the same layout of scales. */
inline Tensor scaled_mm(const Quantized &a, const Quantized &b, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    if (a.scale_layout != b.scale_layout)
        throw Error(NVFP4_INVALID_ARGUMENT, "a and b have different layouts of scales; swizzle() or unswizzle() one");
    Tensor out;
    check(NVFP4_matmul(a.codes.get(), a.scales.get(), a.global_scale, b.codes.get(), b.scales.get(), b.global_scale,
                       a.scale_layout, dtype, out.put()));
    return out;
}

/** Block scales in the order of tensor cores. */
inline Tensor swizzle(const Tensor &scales)
{
    Tensor out;
    check(NVFP4_scales_swizzle(scales.get(), out.put()));
    return out;
}

/** Block scales in row-major order again. */
inline Tensor unswizzle(const Tensor &scales, std::int64_t rows, std::int64_t k_blocks)
{
    Tensor out;
    check(NVFP4_scales_unswizzle(scales.get(), rows, k_blocks, out.put()));
    return out;
}

/** A tensor in NF4, as bitsandbytes lays it out. */
struct Nf4 {
    Tensor codes, absmax;
    /** The values of the 16 codes; holds nothing for the usual ones. */
    Tensor quant_map;
    std::int64_t block = 64;
};

/** To NF4, flattened. */
inline Nf4 quantize_nf4(const Tensor &input, std::int64_t block = 64)
{
    Nf4 out;
    out.block = block;
    check(NVFP4_tensor_quantize_nf4(input.get(), block, out.codes.put(), out.absmax.put()));
    return out;
}

/** Back to a floating type, in the given shape. */
inline Tensor dequantize(const Nf4 &input, Shape shape, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    Tensor out;
    check(NVFP4_tensor_dequantize_nf4(input.codes.get(), input.absmax.get(), input.quant_map.get(), input.block,
                                      shape.data(), detail::rank(shape), dtype, out.put()));
    return out;
}

/** How to prepare a weight; the fields of the C struct, with their defaults. */
struct WeightOptions : NVFP4_WeightOptions {
    WeightOptions() { check(NVFP4_weight_options_init(this, sizeof(NVFP4_WeightOptions))); }

    /** The only backend that will do; empty for any. Stands for `backend`. */
    std::string backend_name;

    /** As C takes it, as long as this lives. */
    NVFP4_WeightOptions plain() const
    {
        NVFP4_WeightOptions out = *this;
        out.backend = backend_name.empty() ? nullptr : backend_name.data();
        out.backend_length = backend_name.size();
        return out;
    }
};

/** Which backend a weight of one of NVFP4_FORMAT_* would have, as JSON. */
inline std::string select_backend(std::int32_t format, const WeightOptions &options = WeightOptions())
{
    const NVFP4_WeightOptions plain = options.plain();
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
        return NVFP4_backend_select(format, &plain, buffer, capacity, length);
    });
}

/** A weight `[N, K]` prepared for products. */
class Weight : public detail::Handle<NVFP4_Weight, NVFP4_weight_retain, NVFP4_weight_release> {
public:
    using Handle::Handle;

    explicit Weight(const Quantized &weight)
    {
        check(NVFP4_weight_create(weight.codes.get(), weight.scales.get(), weight.global_scale, weight.scale_layout,
                                  put()));
    }
    /** As `options` say, but for the layout of the scales, which the weight has with it. */
    Weight(const Quantized &weight, const WeightOptions &options)
    {
        NVFP4_WeightOptions plain = options.plain();
        plain.scale_layout = weight.scale_layout;
        check(NVFP4_weight_create_nvfp4(weight.codes.get(), weight.scales.get(), weight.global_scale, &plain, put()));
    }
    Weight(const Nf4 &weight, std::int64_t n, std::int64_t k, const WeightOptions &options = WeightOptions())
    {
        const NVFP4_WeightOptions plain = options.plain();
        check(NVFP4_weight_create_nf4(weight.codes.get(), weight.absmax.get(), weight.quant_map.get(), weight.block, n, k,
                                      &plain, put()));
    }
    /** Of a floating type. */
    explicit Weight(const Tensor &weight) { check(NVFP4_weight_create_dense(weight.get(), put())); }

    /** A second owner of the same weight. */
    Weight clone() const { return Weight(retained()); }

    /** N and K, and bytes in memory. */
    struct Size {
        std::int64_t n, k;
        std::uint64_t bytes;
    };
    Size size() const
    {
        Size out{};
        check(NVFP4_weight_size(get(), &out.n, &out.k, &out.bytes));
        return out;
    }

    /** What multiplies with it and why, as JSON. */
    std::string report() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_weight_report(get(), buffer, capacity, length);
        });
    }

    /** `input` `[.., K]` times the weight, transposed: `[.., N]`. */
    Tensor linear(const Tensor &input, std::int32_t activations = NVFP4_ACTIVATIONS_EXACT,
                  std::int32_t dtype = NVFP4_DTYPE_FLOAT32) const
    {
        Tensor out;
        check(NVFP4_linear(get(), input.get(), activations, dtype, out.put()));
        return out;
    }
};

/** A name, one of NVFP4_DTYPE_*, and sizes. */
struct NamedTensor {
    std::string name;
    std::int32_t dtype;
    std::vector<std::int64_t> shape;
};

namespace detail {

inline std::vector<NVFP4_NamedTensor> plain(Span<NamedTensor> tensors)
{
    std::vector<NVFP4_NamedTensor> out;
    out.reserve(tensors.size());
    for (const NamedTensor &t : tensors)
        out.push_back({t.name.data(), t.name.size(), t.dtype, rank(t.shape), t.shape.data()});
    return out;
}

} // namespace detail

/** The 4-bit weights among the tensors that are called `prefix` or whose names begin with it and a dot, in short. */
inline NVFP4_SchemaResult detect_schema(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    NVFP4_SchemaResult out{};
    out.struct_size = sizeof out;
    check(NVFP4_schema_detect(plain.data(), plain.size(), prefix.data(), prefix.size(), &out));
    return out;
}

/** All about them, as JSON. */
inline std::string schema_report(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
        return NVFP4_schema_report(plain.data(), plain.size(), prefix.data(), prefix.size(), buffer, capacity, length);
    });
}

/** Throws what is wrong with them, all at once. */
inline void validate_schema(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    check(NVFP4_schema_validate(plain.data(), plain.size(), prefix.data(), prefix.size()));
}

/** How to load a model; the fields of the C struct, with their defaults. */
struct LoadOptions : NVFP4_LoadOptions {
    LoadOptions() { check(NVFP4_load_options_init(this, sizeof(NVFP4_LoadOptions))); }
};

/** A message of a conversation. */
struct Message {
    std::string role, content;
};

/** A loaded model: weights, tokenizer and chat template. */
class Model : public detail::Handle<NVFP4_Model, NVFP4_model_retain, NVFP4_model_release> {
public:
    using Handle::Handle;

    /** Loads a directory or file. Dense weights are quantized as `quantize` says, or stay as they are if it is nullptr. */
    explicit Model(std::string_view path, const NVFP4_LoadOptions &options = LoadOptions(),
                   const NVFP4_QuantizeOptions *quantize = nullptr)
    {
        check(NVFP4_model_load(path.data(), path.size(), &options, quantize, nullptr, nullptr, put()));
    }

    /** The same, with a callback `(std::uint64_t done, std::uint64_t total)` in bytes. */
    template <class Progress>
    Model(std::string_view path, const NVFP4_LoadOptions &options, const NVFP4_QuantizeOptions *quantize,
          Progress &&progress)
    {
        using F = std::remove_reference_t<Progress>;
        detail::Carried<F> carried{progress};
        carried.check(NVFP4_model_load(path.data(), path.size(), &options, quantize, detail::progress<F>, &carried,
                                       put()));
    }

    /** A second owner of the same model. */
    Model clone() const { return Model(retained()); }

    /** What was loaded, as JSON. */
    std::string info() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_info(get(), buffer, capacity, length);
        });
    }
    std::size_t vocab_size() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_model_vocab_size(get(), out); });
    }
    /** `add_special` adds what the model wants around a text. */
    std::vector<std::int32_t> tokenize(std::string_view text, bool add_special = true) const
    {
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_model_tokenize(get(), text.data(), text.size(), add_special, buffer, capacity, count);
        });
    }
    std::string detokenize(Span<std::int32_t> tokens, bool skip_special = true) const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_detokenize(get(), tokens.data(), tokens.size(), skip_special, buffer, capacity, length);
        });
    }
    /** A conversation spelled by the model's chat template. */
    std::string render_chat(Span<Message> messages, bool add_generation_prompt = true) const
    {
        std::vector<NVFP4_Message> plain;
        plain.reserve(messages.size());
        for (const Message &m : messages)
            plain.push_back({m.role.data(), m.role.size(), m.content.data(), m.content.size()});
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_render_chat(get(), plain.data(), plain.size(), add_generation_prompt, buffer, capacity,
                                           length);
        });
    }
};

/** Converts a model on disk to NVFP4 on disk. `container` is one of NVFP4_CONTAINER_*; `options` nullptr has the defaults. */
inline void convert(std::string_view source, std::string_view destination,
                    std::int32_t container = NVFP4_CONTAINER_MODELOPT, const NVFP4_QuantizeOptions *options = nullptr)
{
    check(NVFP4_model_convert(source.data(), source.size(), destination.data(), destination.size(), container, options,
                              nullptr, nullptr));
}

/** The same, with a callback `(std::uint64_t done, std::uint64_t total)` in bytes. */
template <class Progress>
void convert(std::string_view source, std::string_view destination, std::int32_t container,
             const NVFP4_QuantizeOptions *options, Progress &&progress)
{
    using F = std::remove_reference_t<Progress>;
    detail::Carried<F> carried{progress};
    carried.check(NVFP4_model_convert(source.data(), source.size(), destination.data(), destination.size(), container,
                                      options, detail::progress<F>, &carried));
}

/** How to make a session; the fields of the C struct, with their defaults, but for the system prompt. */
struct SessionOptions : NVFP4_SessionOptions {
    SessionOptions() { check(NVFP4_session_options_init(this, sizeof(NVFP4_SessionOptions))); }
    explicit SessionOptions(std::string prompt) : SessionOptions() { system_prompt = std::move(prompt); }

    /** What chat turns tell the model first about its role; used instead of the pointer `system`. */
    std::string system_prompt;
};

/** How to generate; the fields of the C struct, with their defaults, but for the stops. */
struct GenerateOptions : NVFP4_GenerateOptions {
    GenerateOptions() { check(NVFP4_generate_options_init(this, sizeof(NVFP4_GenerateOptions))); }

    /** Texts that end the text; used instead of the pointers `stop_strings`. */
    std::vector<std::string> stop_texts;
    /** Tokens that end the text; used instead of the pointer `stop_tokens`. */
    std::vector<std::int32_t> stop_ids;
};

/** A token as it comes, and the text that it completes. */
struct Piece {
    std::int32_t token;
    /** Valid during the callback. */
    std::string_view text;
};

/** What a generation came to. */
struct Generation : NVFP4_GenerationResult {
    Generation() : NVFP4_GenerationResult() { struct_size = sizeof(NVFP4_GenerationResult); }

    /** All of its text. */
    std::string text;
};

/** A conversation, or another sequence of tokens, run by a model. */
class Session : public detail::Handle<NVFP4_Session, NVFP4_session_retain, NVFP4_session_release> {
public:
    using Handle::Handle;

    explicit Session(const Model &model, const SessionOptions &options = SessionOptions())
    {
        NVFP4_SessionOptions plain = options;
        plain.system = options.system_prompt.empty() ? nullptr : options.system_prompt.data();
        plain.system_length = options.system_prompt.size();
        check(NVFP4_session_create(model.get(), &plain, put()));
    }

    /** A session as it was when save() wrote it. */
    static Session restore(const Model &model, std::string_view path)
    {
        Session out;
        check(NVFP4_session_restore(model.get(), path.data(), path.size(), out.put()));
        return out;
    }
    void save(std::string_view path) const { check(NVFP4_session_save(get(), path.data(), path.size())); }

    /** A second owner of the same session; fork() makes another session. */
    Session clone() const { return Session(retained()); }
    /** A second session in the same state. */
    Session fork() const
    {
        Session out;
        check(NVFP4_session_fork(get(), out.put()));
        return out;
    }

    void prefill(Span<std::int32_t> tokens) { check(NVFP4_session_prefill(get(), tokens.data(), tokens.size())); }
    void prefill_token_by_token(Span<std::int32_t> tokens)
    {
        check(NVFP4_session_prefill_token_by_token(get(), tokens.data(), tokens.size()));
    }
    void decode(std::int32_t token) { check(NVFP4_session_decode(get(), token)); }
    std::vector<float> logits()
    {
        return detail::items<float>([&](float *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_session_logits(get(), buffer, capacity, count);
        });
    }
    /** The token to come, which is not appended. */
    std::int32_t sample(const NVFP4_GenerateOptions &options = GenerateOptions())
    {
        return detail::value<std::int32_t>([&](std::int32_t *out) { return NVFP4_session_sample(get(), &options, out); });
    }

    /** Generates from where the session stands. */
    Generation generate(const GenerateOptions &options = {}) { return generate(options, detail::Nothing()); }
    /** The same; `on_piece` takes a Piece, or its text as a std::string_view. */
    template <class F>
    Generation generate(const GenerateOptions &options, F &&on_piece)
    {
        return run(options, on_piece,
                   [&](const NVFP4_GenerateOptions &plain, NVFP4_TokenCallback callback, void *user,
                       NVFP4_GenerationResult *result) {
                       return NVFP4_session_generate(get(), &plain, callback, user, result);
                   });
    }

    /** Says something to the model and generates its answer. */
    Generation chat(std::string_view text, const GenerateOptions &options = {})
    {
        return chat(text, options, detail::Nothing());
    }
    /** The same; `on_piece` takes a Piece, or its text as a std::string_view. */
    template <class F>
    Generation chat(std::string_view text, const GenerateOptions &options, F &&on_piece)
    {
        return run(options, on_piece,
                   [&](const NVFP4_GenerateOptions &plain, NVFP4_TokenCallback callback, void *user,
                       NVFP4_GenerationResult *result) {
                       return NVFP4_session_chat(get(), text.data(), text.size(), &plain, callback, user, result);
                   });
    }

    /** The conversation of the chat turns, as JSON. */
    std::string messages() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_messages(get(), buffer, capacity, length);
        });
    }
    /** Tokens held. */
    std::size_t length() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_session_length(get(), out); });
    }
    /** Tokens that can be held. */
    std::size_t context() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_session_context(get(), out); });
    }
    /** Bytes of the cached keys and values. */
    std::uint64_t memory() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_session_memory(get(), out); });
    }
    std::vector<std::int32_t> tokens() const
    {
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_session_tokens(get(), buffer, capacity, count);
        });
    }

    void truncate(std::size_t length) { check(NVFP4_session_truncate(get(), length)); }
    /** Forgets all tokens and the conversation. */
    void clear() { check(NVFP4_session_reset(get())); }
    /** Ends the running call, from any thread. */
    void cancel() const { check(NVFP4_session_cancel(get())); }

private:
    template <class F, class Call>
    Generation run(const GenerateOptions &options, F &on_piece, Call &&call)
    {
        NVFP4_GenerateOptions plain = options;
        std::vector<const char *> strings;
        std::vector<std::size_t> lengths;
        for (const std::string &stop : options.stop_texts) {
            strings.push_back(stop.data());
            lengths.push_back(stop.size());
        }
        plain.stop_strings = strings.data();
        plain.stop_string_lengths = lengths.data();
        plain.stop_string_count = strings.size();
        plain.stop_tokens = options.stop_ids.data();
        plain.stop_token_count = options.stop_ids.size();

        Generation out;
        if constexpr (std::is_same_v<std::remove_const_t<F>, detail::Nothing>) {
            check(call(plain, nullptr, nullptr, &out));
        } else {
            detail::Carried<F> carried{on_piece};
            carried.check(call(plain, piece<F>, &carried, &out));
        }
        out.text = detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_text(get(), buffer, capacity, length);
        });
        return out;
    }

    template <class F>
    static std::int32_t piece(void *user, std::int32_t token, const char *text, std::size_t length)
    {
        auto &carried = *static_cast<detail::Carried<F> *>(user);
        const std::string_view view(text, length);
        if constexpr (std::is_invocable_v<F &, const Piece &>)
            return carried.call(Piece{token, view});
        else
            return carried.call(view);
    }
};

/** Appends `tokens[i]` to `*sessions[i]` and runs all of them in one pass over the weights. */
inline void step(Span<Session *> sessions, Span<std::int32_t> tokens)
{
    if (sessions.size() != tokens.size())
        throw Error(NVFP4_INVALID_ARGUMENT, std::to_string(tokens.size()) + " tokens for " +
                                                std::to_string(sessions.size()) + " sessions");
    std::vector<NVFP4_Session *> handles;
    handles.reserve(sessions.size());
    for (const Session *session : sessions)
        handles.push_back(session == nullptr ? nullptr : session->get());
    check(NVFP4_session_step(handles.data(), tokens.data(), handles.size()));
}

} // namespace nvfp4

#endif /* NVFP4_HPP */
