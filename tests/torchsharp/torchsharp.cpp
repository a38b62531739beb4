// A stand-in for TorchSharp's native half: the functions of it that tests/torchsharp/host.c calls, with its names, signatures and
// rules, over a real libtorch. Errors are kept for the thread until they are asked for, as TorchSharp keeps them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/from_file.h>
#include <c10/core/DeviceType.h>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#define EXPORT extern "C" __attribute__((visibility("default")))

using Handle = at::Tensor *;

static thread_local char *last_error;

// What TorchSharp does around each call: errors of libtorch are kept, and anything else ends the process.
template <typename Call>
static auto caught(Call call) -> decltype(call())
{
    last_error = nullptr;
    try {
        return call();
    } catch (const c10::Error &e) {
        last_error = strdup(e.what());
    } catch (const std::runtime_error &e) {
        last_error = strdup(e.what());
    }
    return {};
}

template <typename Call>
static Handle made(Call call)
{
    return caught([&]() -> Handle {
        at::Tensor tensor = call();
        return tensor.defined() ? new at::Tensor(tensor) : nullptr;
    });
}

static at::TensorOptions options(int8_t dtype, int32_t device_type, int32_t device_index, bool requires_grad)
{
    return at::TensorOptions()
        .dtype(static_cast<at::ScalarType>(dtype))
        .device(c10::Device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index)))
        .requires_grad(requires_grad);
}

EXPORT const char *THSTorch_get_and_reset_last_err()
{
    char *error = last_error;
    last_error = nullptr;
    return error;
}

EXPORT Handle THSTensor_from_file(const char *name, int8_t shared, int64_t size, int8_t dtype, int32_t device_type,
                                  int32_t device_index, bool requires_grad)
{
    return made([&] {
        return at::from_file(name, shared == 1, size, options(dtype, device_type, device_index, requires_grad));
    });
}

EXPORT Handle THSTensor_new(void *data, void (*deleter)(void *), const int64_t *sizes, int32_t rank, int8_t dtype, int8_t,
                            int32_t device_type, int32_t device_index, bool requires_grad)
{
    return made([&] {
        auto host = at::from_blob(data, at::IntArrayRef(sizes, rank), deleter, at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
        auto there = host.to(options(dtype, device_type, device_index, false).device());
        return there.set_requires_grad(requires_grad);
    });
}

EXPORT Handle THSTensor_empty_strided(const int64_t *sizes, int32_t rank, const int64_t *strides, int32_t, int8_t dtype,
                                      int32_t device_type, int32_t device_index, bool requires_grad)
{
    return made([&] {
        return at::empty_strided(at::IntArrayRef(sizes, rank), at::IntArrayRef(strides, rank),
                                 options(dtype, device_type, device_index, requires_grad));
    });
}

EXPORT Handle THSTensor_as_strided(Handle t, const int64_t *sizes, int32_t rank, const int64_t *strides, int32_t, int64_t offset)
{
    return made([&] { return t->as_strided(at::IntArrayRef(sizes, rank), at::IntArrayRef(strides, rank), offset); });
}

EXPORT Handle THSTensor_alias(Handle t) { return made([&] { return t->alias(); }); }
EXPORT Handle THSTensor_to_sparse(Handle t) { return made([&] { return t->to_sparse(); }); }
EXPORT Handle THSTensor_to_type(Handle t, int8_t dtype, bool copy, bool non_blocking)
{
    return made([&] { return t->to(static_cast<at::ScalarType>(dtype), non_blocking, copy); });
}
EXPORT Handle THSTensor_to_device(Handle t, int32_t device_type, int32_t device_index, bool copy, bool non_blocking)
{
    return made([&] { return t->to(options(0, device_type, device_index, false).device(), t->scalar_type(), non_blocking, copy); });
}
EXPORT Handle THSTensor_matmul(Handle a, Handle b) { return made([&] { return a->matmul(*b); }); }

EXPORT void *THSTensor_data(Handle t) { return caught([&] { return t->data_ptr(); }); }
EXPORT int64_t THSTensor_ndimension(Handle t) { return t->dim(); }
EXPORT int64_t THSTensor_size(Handle t, int64_t dimension) { return caught([&] { return t->size(dimension); }); }
EXPORT int64_t THSTensor_stride(Handle t, int64_t dimension) { return caught([&] { return t->stride(dimension); }); }
EXPORT int8_t THSTensor_type(Handle t) { return static_cast<int8_t>(t->scalar_type()); }
EXPORT int32_t THSTensor_device_type(Handle t) { return static_cast<int32_t>(t->device().type()); }
EXPORT int32_t THSTensor_requires_grad(Handle t) { return caught([&]() -> int32_t { return t->requires_grad(); }); }
EXPORT void THSTensor_dispose(Handle t) { delete t; }

// Not part of TorchSharp: results that none of its C functions returns.
EXPORT Handle host_undefined() { return new at::Tensor(); }
EXPORT int64_t host_storage_uses(Handle t) { return static_cast<int64_t>(t->storage().use_count()); }
