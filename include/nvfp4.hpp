/*
 * libNVFP4 for C++17 and later: RAII over nvfp4.h, in this one header.
 *
 *     nvfp4::Model model("Qwen3-0.6B-nvfp4");
 *     nvfp4::Session session(model);
 *     session.chat("Why is the sky blue?", {}, [](std::string_view text) { std::cout << text << std::flush; });
 *
 * nvfp4.h documents what functions do and which values they take; this file documents only what C++ adds.
 *
 * ERRORS are thrown as nvfp4::Error, which has the status and the message. With NVFP4_NO_EXCEPTIONS defined, and where the
 * compiler has exceptions disabled, nothing is thrown: Result<T> is then a value or an Error, like a std::expected, and
 * objects are created by static functions (Model::load) instead of constructors. Otherwise Result<T> is just T. A program
 * may have source files of both kinds.
 *
 * HANDLES are objects that can be moved but not copied; a moved-from one is empty, and using it fails. clone() makes a
 * second owner of the same object. Each owns one reference of the C interface: get() lends the handle, release() gives it
 * away, and the constructor from a handle takes ownership. As in C, a model or a tensor may be used by several threads at
 * once, and a session by one at a time.
 *
 * TEXT is passed as std::string_view and returned as std::string, in UTF-8; a path may have any bytes. ARRAYS are passed as
 * nvfp4::Span, to which anything with data() and size() converts, and which converts to a std::span in C++20; they are
 * returned as std::vector.
 *
 * CALLBACKS may be any callable. An exception from one ends the call, which rethrows it. Returning false ends the call too;
 * a callback that returns void never does.
 *
 * STREAMS give the pieces of a generation to a loop instead:
 *
 *     for (const nvfp4::Piece &piece : session.ask("And at night?"))
 *         if (piece.part == NVFP4_PART_CONTENT)
 *             std::cout << piece.text << std::flush;
 *
 * They generate in a thread of their own, which needs -pthread with glibc before 2.34.
 *
 * MANY GENERATIONS need no thread each: a Dispatcher runs them on the thread that calls it, and gives their events to callbacks, or in C++20
 * to coroutines:
 *
 *     nvfp4::Dispatcher::Events events = dispatcher.ask(session, "And at night?");
 *     while (auto event = co_await events.next())
 *         std::cout << event->text << std::flush;
 *
 * VERSIONS. A program that may meet another library than that of this header calls check_version() before anything else: its error
 * says both versions, and what to install. A function that an older library lacks is otherwise the dynamic linker's error.
 */
#ifndef NVFP4_HPP
#define NVFP4_HPP

#include "nvfp4.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>
#ifdef __cpp_impl_coroutine
#include <coroutine>
#endif
#if __cplusplus >= 202002L && __has_include(<span>)
#include <span>
#endif

#if !defined(NVFP4_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define NVFP4_NO_EXCEPTIONS
#endif

namespace nvfp4 {
/* Functions of the same name differ between files with and without exceptions, so these are in two namespaces. */
#ifdef NVFP4_NO_EXCEPTIONS
inline namespace returning {
#else
inline namespace throwing {
#endif

/** A call that failed: its status, and as what() the library's message. */
class Error : public std::runtime_error {
public:
    Error(NVFP4_Status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    /** One of the numbers after #NVFP4_OK. */
    NVFP4_Status status() const noexcept { return status_; }
    /** The name of the status, such as "BUSY". */
    const char *name() const noexcept { return NVFP4_status_name(status_); }

private:
    NVFP4_Status status_;
};

#ifdef NVFP4_NO_EXCEPTIONS

/** The result of a call, or the error. After a failure the value is a default one. */
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) : value_(std::move(value)) {}
    Result(Error error) : error_(std::move(error)) {}

    /** Whether it succeeded. */
    explicit operator bool() const noexcept { return !error_; }
    /** #NVFP4_OK, or the status of the error. */
    NVFP4_Status status() const noexcept { return error_ ? error_->status() : NVFP4_OK; }
    /** Only after a failure. */
    const Error &error() const { return *error_; }

    T &operator*() & noexcept { return value_; }
    const T &operator*() const & noexcept { return value_; }
    T &&operator*() && noexcept { return std::move(value_); }
    T *operator->() noexcept { return &value_; }
    const T *operator->() const noexcept { return &value_; }

private:
    T value_{};
    std::optional<Error> error_;
};

/** Success of a call, or the error. */
template <>
class [[nodiscard]] Result<void> {
public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}

    /** Whether it succeeded. */
    explicit operator bool() const noexcept { return !error_; }
    /** #NVFP4_OK, or the status of the error. */
    NVFP4_Status status() const noexcept { return error_ ? error_->status() : NVFP4_OK; }
    /** Only after a failure. */
    const Error &error() const { return *error_; }

private:
    std::optional<Error> error_;
};

#else

/** The result of a call; a failure is thrown. */
template <class T>
using Result = T;

#endif

/** Not part of the interface. */
namespace detail {

/** A failure that does not come from the library. */
template <class T>
Result<T> failure(Error error)
{
#ifdef NVFP4_NO_EXCEPTIONS
    return error;
#else
    throw error;
#endif
}

/** `value`, if the call that should have set it has the status #NVFP4_OK; else the thread's last error. */
template <class T>
Result<std::decay_t<T>> result(NVFP4_Status status, T &&value)
{
    if (status != NVFP4_OK)
        return failure<std::decay_t<T>>(Error(status, NVFP4_last_error()));
    return std::forward<T>(value);
}

} // namespace detail

/** Fails with the thread's last error unless `status` is #NVFP4_OK. For calls of the C interface that have no wrapper. */
inline Result<void> check(NVFP4_Status status)
{
    if (status != NVFP4_OK)
        return detail::failure<void>(Error(status, NVFP4_last_error()));
    return Result<void>();
}

/** A pointer to elements that it does not own, with their number. */
template <class T>
class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(const T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /** Valid until the end of the full expression with the list, which is long enough for an argument. */
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

/** The elements that `call(buffer, capacity, &size)` copies out. Calls it again if their number has grown in between. */
template <class Container, class Call>
NVFP4_Status copy(Container &out, Call &&call)
{
    std::size_t size = 0;
    NVFP4_Status status = call(static_cast<typename Container::value_type *>(nullptr), std::size_t{0}, &size);
    if (status != NVFP4_OK)
        return status;
    do {
        out.resize(size);
        status = call(out.empty() ? nullptr : &out[0], out.size(), &size);
    } while (status == NVFP4_BUFFER_TOO_SMALL);
    out.resize(status == NVFP4_OK ? size : 0);
    return status;
}

/** Text that `call(buffer, capacity, &length)` copies out. */
template <class Call>
Result<std::string> text(Call &&call)
{
    std::string out;
    return result(copy(out, call), std::move(out));
}

/** Elements that `call(buffer, capacity, &count)` copies out. */
template <class T, class Call>
Result<std::vector<T>> items(Call &&call)
{
    std::vector<T> out;
    return result(copy(out, call), std::move(out));
}

/** One value that `call(&value)` writes. */
template <class T, class Call>
Result<T> value(Call &&call)
{
    T out{};
    return result(call(&out), std::move(out));
}

/** Checks that a struct of options was filled. Without exceptions, the function that takes the options fails instead. */
inline void filled(NVFP4_Status status)
{
#ifdef NVFP4_NO_EXCEPTIONS
    static_cast<void>(status);
#else
    check(status);
#endif
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
    /** Gives the handle to the caller, who must release it. */
    T *release() noexcept { return std::exchange(handle_, nullptr); }
    /** Gives up the reference; the object then holds nothing. */
    void reset() noexcept
    {
        if (handle_ != nullptr)
            give_up(std::exchange(handle_, nullptr));
    }
    /** An output pointer for a function of the C interface, whose handle this object then owns. */
    T **put() noexcept
    {
        reset();
        return &handle_;
    }
    /** Whether it holds a reference. */
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    /** A second owner. */
    template <class Owner>
    Result<Owner> again() const
    {
        const NVFP4_Status status = retain(handle_);
        return result(status, Owner(status == NVFP4_OK ? handle_ : nullptr));
    }

private:
    T *handle_ = nullptr;
};

/** Calls `f(arguments...)`, and returns whether to continue. */
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

/** A callable that is called through C, with the exception that it threw. */
template <class F>
struct Carried {
    F &f;
    std::exception_ptr thrown = nullptr;

    explicit Carried(F &callable) noexcept : f(callable) {}

    /** For a callback: catches all exceptions. */
    template <class... Arguments>
    std::int32_t call(Arguments &&...arguments) noexcept
    {
#ifdef NVFP4_NO_EXCEPTIONS
        return goes_on(f, std::forward<Arguments>(arguments)...) ? 0 : 1;
#else
        try {
            return goes_on(f, std::forward<Arguments>(arguments)...) ? 0 : 1;
        } catch (...) {
            thrown = std::current_exception();
            return 1;
        }
#endif
    }

    /** After the call: its status, or the exception that was thrown. */
    NVFP4_Status after(NVFP4_Status status)
    {
        if (thrown)
            std::rethrow_exception(thrown);
        return status;
    }
};

/** The number of dimensions. */
inline std::int32_t rank(Shape shape)
{
    // 1000 is more than any tensor has, so it is refused.
    return static_cast<std::int32_t>(shape.size() < 1000 ? shape.size() : 1000);
}

/** No callback. */
struct Nothing {};

template <class F>
std::int32_t progress(void *user, std::uint64_t done, std::uint64_t total)
{
    return static_cast<Carried<F> *>(user)->call(done, total);
}

} // namespace detail

/** The thread's last failure, for calls of the C interface without a status. */
inline Error last_error()
{
    std::string message;
    const NVFP4_Status status = NVFP4_last_status();
    detail::filled(detail::copy(message, NVFP4_last_error_copy));
    return Error(status, message);
}

/** A failure of the C interface as an object, for use on another thread. */
class TakenError : public detail::Handle<NVFP4_Error, NVFP4_error_retain, NVFP4_error_release> {
public:
    using Handle::Handle;

    /** Takes the calling thread's last failure; holds nothing if there was none. */
    static Result<TakenError> take()
    {
        TakenError taken;
        const NVFP4_Status status = NVFP4_take_error(taken.put());
        return detail::result(status, std::move(taken));
    }

    /** A second owner. */
    Result<TakenError> clone() const { return again<TakenError>(); }
    /** The status of the failure; NVFP4_OK if this holds nothing. */
    NVFP4_Status status() const noexcept { return NVFP4_error_status(get()); }
    /** The message; valid as long as there is an owner. */
    const char *what() const noexcept { return NVFP4_error_message(get()); }
};

/** Version of the loaded library, as "major.minor.patch". */
inline const char *version() noexcept { return NVFP4_version(); }

/** Version of the loaded library as a number: major * 10000 + minor * 100 + patch. */
inline std::int32_t version_number() noexcept { return NVFP4_version_number(); }

/** Version of the binary interface of the loaded library. */
inline std::int32_t abi_version() noexcept { return NVFP4_abi_version(); }

/** Fails if the loaded library has another binary interface than the header this was compiled with, or is older. */
inline Result<void> check_version() { return check(NVFP4_check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER)); }

/** Describes what the library supports on this machine, as JSON. */
inline Result<std::string> diagnose()
{
    return detail::text([](char *buffer, std::size_t capacity, std::size_t *length) {
        return NVFP4_diagnose(buffer, capacity, length);
    });
}

/** Receives the library's log messages during its lifetime; there may be several. May be destroyed or replaced in its own callback. */
class Log {
public:
    /** Receives a level, one of NVFP4_LOG_*, and a line of text, on any thread. Exceptions from it are ignored. */
    using Function = std::function<void(std::int32_t level, std::string_view message)>;

    /** Receives nothing. */
    Log() noexcept = default;
    /** Receives messages of `level` and more severe ones. */
    static Result<Log> start(std::int32_t level, Function function)
    {
        Log out;
        auto owned = std::make_unique<Function>(std::move(function));
        const NVFP4_Status status = NVFP4_log_add(take, owned.get(), level, give_back, &out.token_);
        // The library owns it until it calls give_back().
        if (status == NVFP4_OK)
            static_cast<void>(owned.release());
        return detail::result(status, std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    Log(std::int32_t level, Function function) : Log(start(level, std::move(function))) {}
#endif
    Log(Log &&other) noexcept : token_(std::exchange(other.token_, 0)) {}
    Log &operator=(Log &&other) noexcept
    {
        if (this != &other) {
            stop();
            token_ = std::exchange(other.token_, 0);
        }
        return *this;
    }
    ~Log() { stop(); }

    /** Stops receiving messages. */
    void stop() noexcept
    {
        if (token_ != 0)
            NVFP4_log_remove(std::exchange(token_, 0));
    }

private:
    static std::int32_t take(void *user, std::int32_t level, const char *message, std::size_t length) noexcept
    {
        Function &function = *static_cast<Function *>(user);
        auto call = [&] { function(level, std::string_view(message, length)); };
        return detail::Carried<decltype(call)>(call).call();
    }
    static void give_back(void *user) noexcept { delete static_cast<Function *>(user); }

    std::uint64_t token_ = 0;
};

/** Cancels the long calls that are given it, including later ones, from any thread or signal handler. */
class Cancel : public detail::Handle<NVFP4_Cancel, NVFP4_cancel_retain, NVFP4_cancel_release> {
public:
    using Handle::Handle;

    static Result<Cancel> create()
    {
        Cancel out(nullptr);
        return detail::result(NVFP4_cancel_create(out.put()), std::move(out));
    }
    /** A new handle. Without exceptions it is empty if there is no memory for it, and calls that are given it fail. */
#ifdef NVFP4_NO_EXCEPTIONS
    Cancel() noexcept : Handle(nullptr) { static_cast<void>(NVFP4_cancel_create(put())); }
#else
    Cancel() : Cancel(create()) {}
#endif

    /** A second owner of the same handle. */
    Result<Cancel> clone() const { return again<Cancel>(); }
    /** Cancels the calls. False if this holds nothing. */
    bool trigger() const noexcept { return NVFP4_cancel_trigger(get()) == NVFP4_OK; }
    /** Resets the handle, so that it is no longer triggered. False if this holds nothing. */
    bool renew() const noexcept { return NVFP4_cancel_reset(get()) == NVFP4_OK; }
    Result<bool> triggered() const
    {
        std::int32_t out = 0;
        const NVFP4_Status status = NVFP4_cancel_is_triggered(get(), &out);
        return detail::result(status, out != 0);
    }
};

/**
 * Cancellation and progress of a long call; the fields of the C struct, with their defaults. It and what it points to must
 * stay valid until the call returns.
 */
struct CallOptions : NVFP4_CallOptions {
    CallOptions() : NVFP4_CallOptions()
    {
        detail::filled(NVFP4_call_options_init(this, sizeof(NVFP4_CallOptions)));
    }
    /** Cancelled by `handle`. Fails for an empty one, which would cancel nothing; without exceptions the call fails instead. */
    explicit CallOptions(const Cancel &handle) : CallOptions()
    {
        std::int32_t triggered = 0;
        detail::filled(NVFP4_cancel_is_triggered(handle.get(), &triggered));
        // An address that is no handle, which the call refuses.
        cancel = handle ? handle.get() : reinterpret_cast<NVFP4_Cancel *>(const_cast<Cancel *>(&handle));
    }
    explicit CallOptions(const Cancel &&) = delete;
};

/** Not part of the interface. */
namespace detail {

/** `call`, or the defaults, with a callback for its progress. */
template <class F>
NVFP4_CallOptions told(const NVFP4_CallOptions *call, Carried<F> &carried)
{
    NVFP4_CallOptions out = call != nullptr ? *call : CallOptions();
    out.progress = progress<F>;
    out.user = &carried;
    return out;
}

} // namespace detail

/** Sets the CPU threads of later calls and objects; 0 leaves it to the environment and the machine. */
inline Result<void> set_threads(std::int32_t threads) { return check(NVFP4_set_threads(threads)); }

/** Waits until all work that calls have enqueued on a device has run, and fails if the device has found an error in it. */
inline Result<void> device_synchronize(std::int32_t device_type = NVFP4_DEVICE_CUDA, std::int32_t index = 0)
{
    return check(NVFP4_device_synchronize(device_type, index));
}

/** Frees memory that is kept for reuse. */
inline void empty_cache() noexcept { NVFP4_empty_cache(); }

/** Bytes in use. */
struct Memory {
    std::uint64_t current, peak;
};

/** The bytes in use under one of NVFP4_MEMORY_*. */
inline Result<Memory> memory(std::int32_t tag = NVFP4_MEMORY_TOTAL)
{
    Memory out{};
    return detail::result(NVFP4_memory_stats(tag, &out.current, &out.peak), std::move(out));
}

/** Resets all peaks to current use. */
inline Result<void> reset_memory_peak() { return check(NVFP4_memory_reset_peak()); }

/** Sets an upper limit for the bytes in use; 0 removes it. */
inline Result<void> set_memory_budget(std::uint64_t bytes) { return check(NVFP4_memory_set_budget(bytes)); }

/** The limit, or 0 if there is none. */
inline Result<std::uint64_t> memory_budget() { return detail::value<std::uint64_t>(NVFP4_memory_get_budget); }

/** Sets the process's policy on managed memory, one of NVFP4_MANAGED_*. */
inline Result<void> set_managed_policy(std::int32_t policy) { return check(NVFP4_memory_set_managed_policy(policy)); }

/** The effective policy. */
inline Result<std::int32_t> managed_policy() { return detail::value<std::int32_t>(NVFP4_memory_get_managed_policy); }

/** Whether tensors can be in managed memory of a CUDA device. */
inline Result<bool> can_be_managed(std::int32_t index)
{
    std::int32_t can = 0;
    const NVFP4_Status status = NVFP4_memory_can_be_managed(index, &can);
    return detail::result(status, can != 0);
}

/** Whether tensors can be in managed memory of CUDA device 0. */
inline bool can_use_managed() noexcept { return NVFP4_can_use_managed() != 0; }

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
    static Result<Tensor> borrow(void *data, Shape shape, std::int32_t dtype, Shape strides = {})
    {
        return host(NVFP4_tensor_from_host, data, shape, dtype, strides, nullptr, nullptr);
    }

    /** Over memory of the caller that must not be written; the tensor is read-only. */
    static Result<Tensor> borrow(const void *data, Shape shape, std::int32_t dtype, Shape strides = {})
    {
        return host(NVFP4_tensor_from_host_read_only, data, shape, dtype, strides, nullptr, nullptr);
    }

    /** Over memory of the caller, with the pointer's type as the dtype; read-only for a pointer to const. */
    template <class T>
    static Result<Tensor> borrow(T *data, Shape shape)
    {
        return borrow(data, shape, dtype_of<std::remove_const_t<T>>);
    }

    /** Over memory that the tensor owns: `done(data)` is called when nothing uses it any more, and must not throw. */
    static Result<Tensor> adopt(void *data, Shape shape, std::int32_t dtype, std::function<void(void *)> done,
                                Shape strides = {})
    {
        auto kept = std::make_unique<std::function<void(void *)>>(std::move(done));
        Result<Tensor> out = host(NVFP4_tensor_from_host, data, shape, dtype, strides, call_done, kept.get());
        return kept_by(std::move(out), kept);
    }

    /** Over the elements of a vector, which the tensor owns. */
    template <class T>
    static Result<Tensor> adopt(std::vector<T> values, Shape shape)
    {
        if (const std::optional<Error> error = filling(values.size(), shape))
            return detail::failure<Tensor>(*error);
        auto kept = std::make_unique<std::vector<T>>(std::move(values));
        Result<Tensor> out = host(NVFP4_tensor_from_host, kept->data(), shape, dtype_of<T>, {}, [](void *, void *user) {
            delete static_cast<std::vector<T> *>(user);
        }, kept.get());
        return kept_by(std::move(out), kept);
    }

#ifdef __cpp_lib_span
    /** Over the elements of a span, in one dimension. */
    template <class T, std::size_t Extent>
    static Result<Tensor> borrow(std::span<T, Extent> values)
    {
        return borrow(values.data(), {static_cast<std::int64_t>(values.size())});
    }

    /** Over the elements of a span, whose number must match the shape. */
    template <class T, std::size_t Extent>
    static Result<Tensor> borrow(std::span<T, Extent> values, Shape shape)
    {
        if (const std::optional<Error> error = filling(values.size(), shape))
            return detail::failure<Tensor>(*error);
        return borrow(values.data(), shape);
    }
#endif

    /** Zeros in the library's own memory. */
    static Result<Tensor> zeros(Shape shape, std::int32_t dtype = NVFP4_DTYPE_FLOAT32,
                                std::int32_t device_type = NVFP4_DEVICE_CPU, std::int32_t index = 0)
    {
        Tensor out;
        return detail::result(NVFP4_tensor_empty(shape.data(), detail::rank(shape), dtype, device_type, index, out.put()),
                              std::move(out));
    }

    /** Over memory of the CUDA device `index`, which must outlive every use of it. */
    static Result<Tensor> borrow_device(void *data, Shape shape, std::int32_t dtype, std::int32_t index = 0,
                                        Shape strides = {})
    {
        return on_device(data, shape, dtype, index, strides, nullptr, nullptr);
    }

    /** Over memory of the CUDA device `index`, with `done` as for adopt(). */
    static Result<Tensor> adopt_device(void *data, Shape shape, std::int32_t dtype, std::int32_t index,
                                       std::function<void(void *)> done, Shape strides = {})
    {
        auto kept = std::make_unique<std::function<void(void *)>>(std::move(done));
        Result<Tensor> out = on_device(data, shape, dtype, index, strides, call_done, kept.get());
        return kept_by(std::move(out), kept);
    }

    /** A contiguous copy in the memory of a device, or of the host. */
    Result<Tensor> to(std::int32_t device_type, std::int32_t index = 0) const
    {
        Tensor out;
        return detail::result(NVFP4_tensor_copy_to_device(get(), device_type, index, out.put()), std::move(out));
    }

    /** The place of the memory: one of NVFP4_DEVICE_*, and the index of the device of that type. */
    Result<std::pair<std::int32_t, std::int32_t>> device() const
    {
        std::pair<std::int32_t, std::int32_t> out;
        return detail::result(NVFP4_tensor_device(get(), &out.first, &out.second), std::move(out));
    }

    /** Applies the policy on managed memory for the CUDA device `index`. */
    Result<Tensor> by_managed_policy(std::int32_t index, bool read_mostly = true) const
    {
        Tensor out;
        return detail::result(NVFP4_tensor_by_managed_policy(get(), index, read_mostly, out.put()), std::move(out));
    }

    /** Whether it is in managed memory. */
    bool is_managed() const noexcept { return NVFP4_is_managed_tensor(get()) != 0; }

    /** A copy in managed memory, prefetched to the CUDA device `prefetch_device` unless that is -1. */
    Result<Tensor> to_managed(std::int32_t prefetch_device = -1, bool read_mostly = false) const
    {
        auto *made = static_cast<NVFP4_Tensor *>(NVFP4_to_managed(get(), prefetch_device, read_mostly));
        return detail::result(NVFP4_last_status(), Tensor(made));
    }

    /** Prefetches managed memory to the CUDA device `index`, or to the host with -1. */
    Result<void> managed_prefetch(std::int32_t index) const
    {
        NVFP4_managed_prefetch(get(), index);
        return check(NVFP4_last_status());
    }

    /** Takes ownership of a DLPack tensor; on failure the caller still owns it. */
    static Result<Tensor> from_dlpack(struct DLManagedTensor *managed)
    {
        Tensor out;
        return detail::result(NVFP4_tensor_from_dlpack(managed, out.put()), std::move(out));
    }

    /** Takes ownership of a versioned DLPack tensor. With the read-only flag, the tensor and its views are read-only. */
    static Result<Tensor> from_dlpack(struct DLManagedTensorVersioned *managed)
    {
        Tensor out;
        return detail::result(NVFP4_tensor_from_dlpack_versioned(managed, out.put()), std::move(out));
    }

    /** A DLPack tensor over the same memory, for its consumer to delete. Fails for a read-only tensor. */
    Result<struct DLManagedTensor *> to_dlpack() const
    {
        return detail::value<struct DLManagedTensor *>(
            [&](struct DLManagedTensor **out) { return NVFP4_tensor_to_dlpack(get(), out); });
    }

    /** A versioned DLPack tensor over the same memory, also for a read-only tensor. */
    Result<struct DLManagedTensorVersioned *> to_dlpack_versioned() const
    {
        return detail::value<struct DLManagedTensorVersioned *>(
            [&](struct DLManagedTensorVersioned **out) { return NVFP4_tensor_to_dlpack_versioned(get(), out); });
    }

    /** A second owner of the same tensor. */
    Result<Tensor> clone() const { return again<Tensor>(); }

    /** Another view of the same memory; `offset` counts elements. */
    Result<Tensor> view(Shape shape, Shape strides = {}, std::int64_t offset = 0) const
    {
        if (const std::optional<Error> error = matching(shape, strides))
            return detail::failure<Tensor>(*error);
        Tensor out;
        return detail::result(
            NVFP4_tensor_view(get(), shape.data(), detail::rank(shape), strides.data(), offset, out.put()), std::move(out));
    }

    /** One of NVFP4_DTYPE_*. */
    Result<std::int32_t> dtype() const
    {
        return detail::value<std::int32_t>([&](std::int32_t *out) { return NVFP4_tensor_dtype(get(), out); });
    }
    Result<std::vector<std::int64_t>> shape() const
    {
        return detail::items<std::int64_t>([&](std::int64_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_tensor_shape(get(), buffer, capacity, count);
        });
    }
    /** In elements. */
    Result<std::vector<std::int64_t>> strides() const
    {
        return detail::items<std::int64_t>([&](std::int64_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_tensor_strides(get(), buffer, capacity, count);
        });
    }
    Result<std::size_t> elements() const
    {
        std::size_t out = 0;
        return detail::result(count(out), std::move(out));
    }
    /** Bytes of the elements without gaps. */
    Result<std::uint64_t> bytes() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_tensor_bytes(get(), out); });
    }
    /** Whether the memory must not be written, as its lender declared. */
    Result<bool> is_read_only() const
    {
        return detail::value<bool>([&](bool *out) {
            std::int32_t read_only = 0;
            const NVFP4_Status status = NVFP4_tensor_is_read_only(get(), &read_only);
            *out = read_only != 0;
            return status;
        });
    }
    /** The first element, valid as long as the tensor. */
    Result<void *> data() const
    {
        return detail::value<void *>([&](void **out) { return NVFP4_tensor_data(get(), out); });
    }
    /** The elements in place, valid as long as the tensor; must be in host memory, contiguous and row-major. */
    template <class T>
    Result<Span<T>> values() const &
    {
        std::vector<std::int64_t> shape, strides;
        std::pair<std::int32_t, std::int32_t> device;
        void *first = nullptr;
        std::size_t elements = 0;
        NVFP4_Status status = count(elements, &shape);
        status = status == NVFP4_OK ? NVFP4_tensor_device(get(), &device.first, &device.second) : status;
        status = status == NVFP4_OK ? NVFP4_tensor_data(get(), &first) : status;
        status = status == NVFP4_OK ? detail::copy(strides, [&](std::int64_t *buffer, std::size_t capacity, std::size_t *size) {
            return NVFP4_tensor_strides(get(), buffer, capacity, size);
        }) : status;
        if (status == NVFP4_OK) {
            if (const std::optional<Error> error = holding<T>(elements))
                return detail::failure<Span<T>>(*error);
            std::int64_t expected = 1;
            bool dense = true;
            for (std::size_t i = shape.size(); i-- > 0; expected *= shape[i])
                dense = dense && (shape[i] == 1 || strides[i] == expected);
            if (elements > 0 && (!dense || device.first != NVFP4_DEVICE_CPU))
                return detail::failure<Span<T>>(Error(NVFP4_UNSUPPORTED, "the elements are not in host memory without gaps; "
                                                                         "copy them"));
        }
        return detail::result(status, elements == 0 ? Span<T>() : Span<T>(static_cast<const T *>(first), elements));
    }
    template <class T>
    Result<Span<T>> values() const && = delete;
    /** Copies the elements, row-major without gaps, into exactly bytes() bytes. */
    Result<void> copy_to(void *destination, std::size_t bytes) const
    {
        return check(NVFP4_tensor_copy_to_host(get(), destination, bytes));
    }
#ifdef __cpp_lib_span
    /** Copies the elements in their stored type, into exactly as many. */
    template <class T, std::size_t Extent>
    Result<void> copy_to(std::span<T, Extent> destination) const
    {
        if (const std::optional<Error> error = holding<T>(destination.size()))
            return detail::failure<void>(*error);
        return copy_to(destination.data(), destination.size_bytes());
    }
#endif
    /** The elements in their stored type. */
    template <class T>
    Result<std::vector<T>> to_vector() const
    {
        std::size_t elements = 0;
        NVFP4_Status status = count(elements);
        std::vector<T> out;
        if (status == NVFP4_OK) {
            if (const std::optional<Error> error = holding<T>(elements))
                return detail::failure<std::vector<T>>(*error);
            out.resize(elements);
            status = NVFP4_tensor_copy_to_host(get(), out.data(), out.size() * sizeof(T));
        }
        return detail::result(status, std::move(out));
    }
    /** The elements as float, whatever their type. */
    Result<std::vector<float>> to_floats() const
    {
        std::size_t elements = 0;
        NVFP4_Status status = count(elements);
        std::vector<float> out(elements);
        if (status == NVFP4_OK)
            status = NVFP4_tensor_copy_as_float(get(), out.data(), out.size());
        return detail::result(status, std::move(out));
    }

private:
    /** The reason why strides do not fit a shape; empty if they do. */
    static std::optional<Error> matching(Shape shape, Shape strides)
    {
        if (strides.data() == nullptr || strides.size() == shape.size())
            return std::nullopt;
        return Error(NVFP4_INVALID_ARGUMENT, std::to_string(strides.size()) + " strides for " +
                                                 std::to_string(shape.size()) + " dimensions");
    }
    /** The reason why elements do not fill a shape; empty if they do. */
    static std::optional<Error> filling(std::size_t given, Shape shape)
    {
        std::uint64_t elements = 1;
        bool fits = true;
        for (const std::int64_t size : shape) {
            fits = fits && size >= 0 && (size == 0 || elements <= UINT64_MAX / static_cast<std::uint64_t>(size));
            elements *= static_cast<std::uint64_t>(size);
        }
        if (fits && elements == given)
            return std::nullopt;
        return Error(NVFP4_INVALID_ARGUMENT, std::to_string(given) + " elements do not fill a shape of " +
                                                 (fits ? std::to_string(elements) : "other sizes"));
    }
    /** The reason why `elements` of a C++ type do not match this tensor's; empty if they do. */
    template <class T>
    std::optional<Error> holding(std::size_t elements) const
    {
        std::int32_t dtype = -1;
        std::uint64_t bytes = 0;
        NVFP4_Status status = NVFP4_tensor_dtype(get(), &dtype);
        status = status == NVFP4_OK ? NVFP4_tensor_bytes(get(), &bytes) : status;
        if (status != NVFP4_OK)
            return Error(status, NVFP4_last_error());
        /* Bytes may hold any type of one byte. */
        if (bytes == elements * sizeof(T) && (dtype == dtype_of<T> || sizeof(T) == 1))
            return std::nullopt;
        return Error(NVFP4_INVALID_ARGUMENT, "the tensor has " + std::to_string(bytes) + " bytes of dtype " +
                                                 std::to_string(dtype) + ", and asked for are " + std::to_string(elements) +
                                                 " elements of dtype " + std::to_string(dtype_of<T>));
    }
    NVFP4_Status count(std::size_t &elements, std::vector<std::int64_t> *shape = nullptr) const
    {
        std::vector<std::int64_t> sizes;
        const NVFP4_Status status = detail::copy(sizes, [&](std::int64_t *buffer, std::size_t capacity, std::size_t *size) {
            return NVFP4_tensor_shape(get(), buffer, capacity, size);
        });
        elements = status == NVFP4_OK ? 1 : 0;
        for (const std::int64_t size : sizes)
            elements *= static_cast<std::size_t>(size);
        if (shape != nullptr)
            *shape = std::move(sizes);
        return status;
    }
    static void call_done(void *data, void *user) noexcept
    {
        const std::unique_ptr<std::function<void(void *)>> kept(static_cast<std::function<void(void *)> *>(user));
        (*kept)(data);
    }
    /** Returns `made`. If it succeeded, its deleter owns `kept` from now on. */
    template <class Kept>
    static Result<Tensor> kept_by(Result<Tensor> made, std::unique_ptr<Kept> &kept)
    {
        if (made)
            static_cast<void>(kept.release());
        return made;
    }
    template <class Make, class Data>
    static Result<Tensor> host(Make make, Data *data, Shape shape, std::int32_t dtype, Shape strides, NVFP4_Deleter deleter,
                               void *user)
    {
        if (const std::optional<Error> error = matching(shape, strides))
            return detail::failure<Tensor>(*error);
        Tensor out;
        return detail::result(make(data, shape.data(), detail::rank(shape), strides.data(), dtype, deleter, user, out.put()),
                              std::move(out));
    }
    static Result<Tensor> on_device(void *data, Shape shape, std::int32_t dtype, std::int32_t index, Shape strides,
                                    NVFP4_Deleter deleter, void *user)
    {
        if (const std::optional<Error> error = matching(shape, strides))
            return detail::failure<Tensor>(*error);
        Tensor out;
        return detail::result(NVFP4_tensor_from_device(data, shape.data(), detail::rank(shape), strides.data(), dtype, index,
                                                       deleter, user, out.put()),
                              std::move(out));
    }
};

/** How to quantize; the fields of the C struct, with their defaults. */
struct QuantizeOptions : NVFP4_QuantizeOptions {
    QuantizeOptions() : NVFP4_QuantizeOptions()
    {
        detail::filled(NVFP4_quantize_options_init(this, sizeof(NVFP4_QuantizeOptions)));
    }
};

/** A tensor in NVFP4. */
struct Quantized {
    Tensor codes, scales;
    float global_scale = 1;
    std::int32_t scale_layout = NVFP4_SCALES_LINEAR;
};

/** Quantizes to NVFP4 along the last dimension. */
inline Result<Quantized> quantize(const Tensor &input, const NVFP4_QuantizeOptions &options = QuantizeOptions())
{
    Quantized out;
    out.scale_layout = options.scale_layout;
    return detail::result(NVFP4_tensor_quantize(input.get(), &options, out.codes.put(), out.scales.put(), &out.global_scale),
                          std::move(out));
}

/** Dequantizes to a floating type. */
inline Result<Tensor> dequantize(const Quantized &input, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    Tensor out;
    return detail::result(NVFP4_tensor_dequantize(input.codes.get(), input.scales.get(), input.global_scale,
                                                  input.scale_layout, dtype, out.put()),
                          std::move(out));
}

/** Multiplies a `[M, K]` by the transpose of b `[N, K]` (W4A4). Both must have the same scale layout. */
inline Result<Tensor> scaled_mm(const Quantized &a, const Quantized &b, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    if (a.scale_layout != b.scale_layout)
        return detail::failure<Tensor>(
            Error(NVFP4_INVALID_ARGUMENT, "a and b have different layouts of scales; swizzle() or unswizzle() one"));
    Tensor out;
    return detail::result(NVFP4_matmul(a.codes.get(), a.scales.get(), a.global_scale, b.codes.get(), b.scales.get(),
                                       b.global_scale, a.scale_layout, dtype, out.put()),
                          std::move(out));
}

/** Swizzles block scales into the order that tensor cores read. */
inline Result<Tensor> swizzle(const Tensor &scales)
{
    Tensor out;
    return detail::result(NVFP4_scales_swizzle(scales.get(), out.put()), std::move(out));
}

/** Converts swizzled block scales to row-major order. */
inline Result<Tensor> unswizzle(const Tensor &scales, std::int64_t rows, std::int64_t k_blocks)
{
    Tensor out;
    return detail::result(NVFP4_scales_unswizzle(scales.get(), rows, k_blocks, out.put()), std::move(out));
}

/** A tensor in NF4, in the layout of bitsandbytes. */
struct Nf4 {
    Tensor codes, absmax;
    /** The values of the 16 codes; holds nothing for the standard ones. */
    Tensor quant_map;
    std::int64_t block = 64;
};

/** Quantizes to NF4, flattened. */
inline Result<Nf4> quantize_nf4(const Tensor &input, std::int64_t block = 64)
{
    Nf4 out;
    out.block = block;
    return detail::result(NVFP4_tensor_quantize_nf4(input.get(), block, out.codes.put(), out.absmax.put()), std::move(out));
}

/** Dequantizes to a floating type, in the given shape. */
inline Result<Tensor> dequantize(const Nf4 &input, Shape shape, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    Tensor out;
    return detail::result(NVFP4_tensor_dequantize_nf4(input.codes.get(), input.absmax.get(), input.quant_map.get(),
                                                      input.block, shape.data(), detail::rank(shape), dtype, out.put()),
                          std::move(out));
}

/** Quantizes a weight by the rule of the drop-in functions, for training in 4 bits. */
inline Result<Quantized> quantize_packed(const Tensor &weight)
{
    Quantized out;
    return detail::result(NVFP4_quantize_packed(weight.get(), out.codes.put(), out.scales.put()), std::move(out));
}

/** Dequantizes the result of quantize_packed(). */
inline Result<Tensor> dequantize_packed(const Tensor &qdata, const Tensor &scale, std::int32_t dtype = NVFP4_DTYPE_FLOAT32)
{
    Tensor out;
    return detail::result(NVFP4_dequantize_packed(qdata.get(), scale.get(), dtype, out.put()), std::move(out));
}

/** Rounds a weight to 4 bits and back, for the forward pass; `keep` caches the result for a weight that does not change. */
inline Result<Tensor> ste_weight(const Tensor &weight, bool keep = false)
{
    Tensor out;
    return detail::result(NVFP4_ste_weight(weight.get(), keep ? 1 : 0, out.put()), std::move(out));
}

/** Drops the values that ste_weight() has cached: call it when weights have changed. */
inline Result<void> ste_clear() { return check(NVFP4_ste_clear()); }

/** How to prepare a weight; the fields of the C struct, with their defaults. */
struct WeightOptions : NVFP4_WeightOptions {
    WeightOptions() : NVFP4_WeightOptions()
    {
        detail::filled(NVFP4_weight_options_init(this, sizeof(NVFP4_WeightOptions)));
    }

    /** The name of the backend to insist on; empty for any. Used instead of the pointer `backend`. */
    std::string backend_name;

    /** As the C struct, valid as long as this lives. */
    NVFP4_WeightOptions plain() const
    {
        NVFP4_WeightOptions out = *this;
        out.backend = backend_name.empty() ? nullptr : backend_name.data();
        out.backend_length = backend_name.size();
        return out;
    }
};

/** The backend that a weight of one of NVFP4_FORMAT_* would get, as JSON. */
inline Result<std::string> select_backend(std::int32_t format, const WeightOptions &options = WeightOptions())
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

    static Result<Weight> prepare(const Quantized &weight)
    {
        Weight out;
        return detail::result(NVFP4_weight_create(weight.codes.get(), weight.scales.get(), weight.global_scale,
                                                  weight.scale_layout, out.put()),
                              std::move(out));
    }
    /** Prepares a weight as `options` say, except for the scale layout, which the tensor determines. */
    static Result<Weight> prepare(const Quantized &weight, const WeightOptions &options)
    {
        Weight out;
        NVFP4_WeightOptions plain = options.plain();
        plain.scale_layout = weight.scale_layout;
        return detail::result(NVFP4_weight_create_nvfp4(weight.codes.get(), weight.scales.get(), weight.global_scale, &plain,
                                                        out.put()),
                              std::move(out));
    }
    static Result<Weight> prepare(const Nf4 &weight, std::int64_t n, std::int64_t k,
                                  const WeightOptions &options = WeightOptions())
    {
        Weight out;
        const NVFP4_WeightOptions plain = options.plain();
        return detail::result(NVFP4_weight_create_nf4(weight.codes.get(), weight.absmax.get(), weight.quant_map.get(),
                                                      weight.block, n, k, &plain, out.put()),
                              std::move(out));
    }
    /** Prepares a dense weight of a floating type. */
    static Result<Weight> prepare(const Tensor &weight)
    {
        Weight out;
        return detail::result(NVFP4_weight_create_dense(weight.get(), out.put()), std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Weight(const Quantized &weight) : Weight(prepare(weight)) {}
    Weight(const Quantized &weight, const WeightOptions &options) : Weight(prepare(weight, options)) {}
    Weight(const Nf4 &weight, std::int64_t n, std::int64_t k, const WeightOptions &options = WeightOptions())
        : Weight(prepare(weight, n, k, options))
    {
    }
    explicit Weight(const Tensor &weight) : Weight(prepare(weight)) {}
#endif

    /** A second owner of the same weight. */
    Result<Weight> clone() const { return again<Weight>(); }

    /** N and K, and bytes in memory. */
    struct Size {
        std::int64_t n, k;
        std::uint64_t bytes;
    };
    Result<Size> size() const
    {
        Size out{};
        return detail::result(NVFP4_weight_size(get(), &out.n, &out.k, &out.bytes), std::move(out));
    }

    /** The backend and the reason for its choice, as JSON. */
    Result<std::string> report() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_weight_report(get(), buffer, capacity, length);
        });
    }

    /** `input` `[.., K]` times the transposed weight: `[.., N]`. */
    Result<Tensor> linear(const Tensor &input, std::int32_t activations = NVFP4_ACTIVATIONS_EXACT,
                  std::int32_t dtype = NVFP4_DTYPE_FLOAT32) const
    {
        Tensor out;
        return detail::result(NVFP4_linear(get(), input.get(), activations, dtype, out.put()), std::move(out));
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

/** A summary of the 4-bit weights among the tensors named `prefix`, or whose names begin with it and a dot. */
inline Result<NVFP4_SchemaResult> detect_schema(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    NVFP4_SchemaResult out{};
    out.struct_size = sizeof out;
    return detail::result(NVFP4_schema_detect(plain.data(), plain.size(), sizeof(NVFP4_NamedTensor), prefix.data(), prefix.size(), &out), std::move(out));
}

/** The details, as JSON. */
inline Result<std::string> schema_report(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
        return NVFP4_schema_report(plain.data(), plain.size(), sizeof(NVFP4_NamedTensor), prefix.data(), prefix.size(), buffer,
                                   capacity, length);
    });
}

/** Fails with a message that lists all their problems. */
inline Result<void> validate_schema(Span<NamedTensor> tensors, std::string_view prefix = {})
{
    const std::vector<NVFP4_NamedTensor> plain = detail::plain(tensors);
    return check(NVFP4_schema_validate(plain.data(), plain.size(), sizeof(NVFP4_NamedTensor), prefix.data(), prefix.size()));
}

/**
 * Threads of the program that work for models on the CPU, in place of threads of the library: `options.pool = pool.get()` of LoadOptions. Any
 * number of models may share it.
 */
class Pool : public detail::Handle<NVFP4_Pool, NVFP4_pool_retain, NVFP4_pool_release> {
public:
    using Handle::Handle;

    /** Work for one thread of the program; see NVFP4_PoolSubmit. One of its copies is to be called, once. */
    class Task {
    public:
        Task(NVFP4_PoolTask function, void *argument) noexcept : run(function), task(argument) {}
        void operator()() const { run(task); }

    private:
        NVFP4_PoolTask run;
        void *task;
    };

    /**
     * A pool of up to `threads` threads with the calling one; 0 for as many as the library would use. `submit(Task)` has another thread call the
     * task and returns at once; it returns false, or throws, if none will. It is called by one thread at a time, and must not call the library.
     */
    template <class Submit>
    static Result<Pool> create(Submit &&submit, std::int32_t threads = 0)
    {
        using F = std::decay_t<Submit>;
        auto given = std::make_unique<F>(std::forward<Submit>(submit));
        const NVFP4_PoolSubmit schedule = [](void *user, NVFP4_PoolTask run, void *task) -> std::int32_t {
            return detail::Carried<F>(*static_cast<F *>(user)).call(Task(run, task));
        };
        const NVFP4_PoolRelease release = [](void *user) { delete static_cast<F *>(user); };
        Pool out;
        const NVFP4_Status status = NVFP4_pool_create(threads, schedule, given.get(), release, out.put());
        if (status == NVFP4_OK)
            static_cast<void>(given.release());
        return detail::result(status, std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    template <class Submit, class = std::enable_if_t<std::is_invocable_v<std::decay_t<Submit> &, Task>>>
    explicit Pool(Submit &&submit, std::int32_t threads = 0) : Pool(create(std::forward<Submit>(submit), threads))
    {
    }
#endif

    /** A second owner of the same pool. */
    Result<Pool> clone() const { return again<Pool>(); }
};

/** How to load a model; the fields of the C struct, with their defaults. */
struct LoadOptions : NVFP4_LoadOptions {
    LoadOptions() : NVFP4_LoadOptions()
    {
        detail::filled(NVFP4_load_options_init(this, sizeof(NVFP4_LoadOptions)));
        device_type = NVFP4_DEVICE_AUTO;
    }
};

/** A file of a model, for Model::load_files(): its name in the model's directory, such as config.json, and its content. */
class ModelFile {
public:
    /**
     * Reads `size` bytes from `offset` on into `out`, and returns how many it read: fewer than `size` fail the call, and so does an
     * exception. Called by several threads at the same time.
     */
    using Read = std::function<std::size_t(std::uint64_t offset, void *out, std::size_t size)>;
    /** Called once when the library does not use the file any more, also if it was never given to it. Must not throw. */
    using Released = std::function<void()>;

    /** Bytes that stay, unchanged, until `released` is called: at the latest when the model goes. */
    static ModelFile view(std::string name, Span<std::uint8_t> bytes, Released released = nullptr)
    {
        ModelFile file(std::move(name), bytes.size(), std::move(released));
        file.content_->data = bytes.data();
        return file;
    }

    /** Bytes that the library frees when it does not use them any more. */
    static ModelFile owned(std::string name, std::vector<std::uint8_t> bytes)
    {
        ModelFile file(std::move(name), bytes.size(), nullptr);
        file.content_->bytes = std::move(bytes);
        file.content_->data = file.content_->bytes.data();
        return file;
    }

    /** `size` bytes that a function reads. */
    static ModelFile reader(std::string name, std::uint64_t size, Read read, Released released = nullptr)
    {
        ModelFile file(std::move(name), size, std::move(released));
        file.content_->read = std::move(read);
        return file;
    }

private:
    friend class Model;

    struct Content {
        const std::uint8_t *data = nullptr;
        std::vector<std::uint8_t> bytes;
        Read read;
        Released released;

        ~Content()
        {
            if (released)
                released();
        }
    };

    ModelFile(std::string name, std::uint64_t size, Released released)
        : name_(std::move(name)), size_(size), content_(std::make_unique<Content>())
    {
        content_->released = std::move(released);
    }

    static std::int64_t on_read(void *user, std::uint64_t offset, void *out, std::size_t size) noexcept
    {
        const Read &read = static_cast<Content *>(user)->read;
#ifdef NVFP4_NO_EXCEPTIONS
        return static_cast<std::int64_t>(read(offset, out, size));
#else
        try {
            return static_cast<std::int64_t>(read(offset, out, size));
        } catch (...) {
            return -1;
        }
#endif
    }

    static void on_release(void *user) noexcept { delete static_cast<Content *>(user); }

    /** The files as C structs, which own the contents. */
    static std::vector<NVFP4_ModelFile> give(std::vector<ModelFile> &files)
    {
        std::vector<NVFP4_ModelFile> given;
        given.reserve(files.size());
        for (ModelFile &file : files)
            given.push_back(file.give());
        return given;
    }

    /** The C struct, which owns the content. */
    NVFP4_ModelFile give() noexcept
    {
        NVFP4_ModelFile file = {};
        file.name = name_.data();
        file.name_length = name_.size();
        file.data = content_->data;
        file.size = size_;
        if (content_->read)
            file.read = on_read;
        file.release = on_release;
        file.user = content_.release();
        return file;
    }

    std::string name_;
    std::uint64_t size_;
    std::unique_ptr<Content> content_;
};

/** Options of Model::plan(); the fields of the C struct, with their defaults. */
struct PlanOptions : NVFP4_PlanOptions {
    PlanOptions() : NVFP4_PlanOptions()
    {
        detail::filled(NVFP4_plan_options_init(this, sizeof(NVFP4_PlanOptions)));
    }
};

/** A message of a conversation. */
struct Message {
    std::string role, content;
};

/** How a chat turn is rendered and answered; the fields of the C struct, with their defaults, except the two JSON texts. */
struct ChatOptions : NVFP4_ChatOptions {
    ChatOptions() : NVFP4_ChatOptions()
    {
        detail::filled(NVFP4_chat_options_init(this, sizeof(NVFP4_ChatOptions)));
    }

    /** Variables of the template, as a JSON object; used instead of the pointer `variables`. */
    std::string variables_json;
    /** The tools that the model may call, as a JSON array; used instead of the pointer `tools`. */
    std::string tools_json;
    /** A Jinja template in place of the model's own; used instead of the pointer `chat_template`. Empty for the model's. */
    std::string template_text;
};

/** Not part of the interface. */
namespace detail {

/** ChatOptions as the C struct, valid as long as `options` lives. */
inline NVFP4_ChatOptions plain(const ChatOptions &options)
{
    NVFP4_ChatOptions plain = options;
    plain.variables = options.variables_json.data();
    plain.variables_length = options.variables_json.size();
    plain.tools = options.tools_json.data();
    plain.tools_length = options.tools_json.size();
    plain.chat_template = options.template_text.data();
    plain.chat_template_length = options.template_text.size();
    return plain;
}

} // namespace detail

struct GenerateOptions;

/** The bytes that a token adds to a text. */
struct TokenBytes {
    /** Bytes of UTF-8, possibly a part of a character. */
    std::string bytes;
    /** Whether the token is special, so that its bytes are a name and no text. */
    bool is_special;
};

/** A special token, or another one with a role. */
struct SpecialToken {
    std::int32_t token;
    /** The sum of its NVFP4_TOKEN_ROLE_*. */
    std::int32_t roles;
    std::string name;
};

/** How to embed texts; the fields of the C struct, with their defaults, except the two texts. */
struct EmbedOptions : NVFP4_EmbedOptions {
    EmbedOptions() : NVFP4_EmbedOptions()
    {
        detail::filled(NVFP4_embed_options_init(this, sizeof(NVFP4_EmbedOptions)));
    }

    /** A text that goes before each text; used instead of the pointer `prompt`. */
    std::optional<std::string> prompt_text;
    /** The name of one of the model's prompts; used instead of the pointer `prompt_name`. */
    std::optional<std::string> prompt_called;
};

/** Embeddings of texts. */
struct Embeddings {
    /** `[rows, dimensions]`, in the order of the texts. */
    std::vector<float> values;
    /** Elements of a row; 0 without texts. */
    std::size_t dimensions = 0;
    /** Number of rows of each text: 1 with pooling, its number of tokens without. */
    std::vector<std::size_t> rows;

    /** Row `index` of all, of which each text has one unless it is not pooled. Valid as long as the embeddings. */
    Span<float> row(std::size_t index) const { return {values.data() + index * dimensions, dimensions}; }
};

/** A loaded model: weights, tokenizer and chat template. */
class Model : public detail::Handle<NVFP4_Model, NVFP4_model_retain, NVFP4_model_release> {
public:
    using Handle::Handle;

    /**
     * Loads a directory or file, by default to a GPU with room for it, or else to the CPU; info() says why. Dense weights are quantized by
     * `quantize`, or kept if it is nullptr.
     */
    static Result<Model> load(std::string_view path, const NVFP4_LoadOptions &options = LoadOptions(),
                              const NVFP4_QuantizeOptions *quantize = nullptr)
    {
        Model out;
        return detail::result(NVFP4_model_load(path.data(), path.size(), &options, quantize, out.put()),
                              std::move(out));
    }

    /** Loads a model with a progress callback `(std::uint64_t done, std::uint64_t total)` in bytes. */
    template <class Progress>
    static Result<Model> load(std::string_view path, const NVFP4_LoadOptions &options, const NVFP4_QuantizeOptions *quantize,
                              Progress &&progress)
    {
        using F = std::remove_reference_t<Progress>;
        detail::Carried<F> carried{progress};
        const NVFP4_CallOptions call = detail::told(options.call, carried);
        NVFP4_LoadOptions with = options;
        with.call = &call;
        Model out;
        return detail::result(carried.after(NVFP4_model_load(path.data(), path.size(), &with, quantize, out.put())),
                              std::move(out));
    }

    /** Loads a model from files in memory or behind functions; see NVFP4_model_load_files(). */
    static Result<Model> load_files(std::vector<ModelFile> files, const NVFP4_LoadOptions &options = LoadOptions(),
                                    const NVFP4_QuantizeOptions *quantize = nullptr)
    {
        const std::vector<NVFP4_ModelFile> given = ModelFile::give(files);
        Model out;
        return detail::result(NVFP4_model_load_files(given.data(), given.size(), sizeof(NVFP4_ModelFile), &options, quantize, out.put()),
                              std::move(out));
    }

    /** As above, with a progress callback `(std::uint64_t done, std::uint64_t total)` in bytes. */
    template <class Progress>
    static Result<Model> load_files(std::vector<ModelFile> files, const NVFP4_LoadOptions &options,
                                    const NVFP4_QuantizeOptions *quantize, Progress &&progress)
    {
        using F = std::remove_reference_t<Progress>;
        detail::Carried<F> carried{progress};
        const NVFP4_CallOptions call = detail::told(options.call, carried);
        NVFP4_LoadOptions with = options;
        with.call = &call;
        const std::vector<NVFP4_ModelFile> given = ModelFile::give(files);
        Model out;
        const NVFP4_Status status =
            NVFP4_model_load_files(given.data(), given.size(), sizeof(NVFP4_ModelFile), &with, quantize, out.put());
        return detail::result(carried.after(status), std::move(out));
    }

    /** The memory that a model and its sessions would take, from the headers of its files; see NVFP4_model_plan(). */
    static Result<NVFP4_Plan> plan(std::string_view path, const NVFP4_LoadOptions &load = LoadOptions(),
                                   const NVFP4_PlanOptions &options = PlanOptions(),
                                   const NVFP4_QuantizeOptions *quantize = nullptr)
    {
        NVFP4_Plan out = {};
        out.struct_size = sizeof out;
        const NVFP4_Status status = NVFP4_model_plan(path.data(), path.size(), &load, quantize, &options, &out);
        return detail::result(status, out);
    }

#ifndef NVFP4_NO_EXCEPTIONS
    explicit Model(std::string_view path, const NVFP4_LoadOptions &options = LoadOptions(),
                   const NVFP4_QuantizeOptions *quantize = nullptr)
        : Model(load(path, options, quantize))
    {
    }
    template <class Progress>
    Model(std::string_view path, const NVFP4_LoadOptions &options, const NVFP4_QuantizeOptions *quantize,
          Progress &&progress)
        : Model(load(path, options, quantize, std::forward<Progress>(progress)))
    {
    }
#endif

    /** A second owner of the same model. */
    Result<Model> clone() const { return again<Model>(); }

    /** A description of the model, as JSON. */
    Result<std::string> info() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_info(get(), buffer, capacity, length);
        });
    }
    Result<std::size_t> vocab_size() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_model_vocab_size(get(), out); });
    }
    /** Counts of the work since the model was loaded, and of the blocks that it holds now. From any thread at any time. */
    Result<NVFP4_ModelStatistics> statistics() const
    {
        NVFP4_ModelStatistics now{};
        now.struct_size = sizeof now;
        const NVFP4_Status status = NVFP4_model_statistics(get(), &now);
        return detail::result(status, now);
    }
    /** Writes the prefix cache to a file, for restore_prefixes() in a later process. From any thread at any time. */
    Result<void> save_prefixes(std::string_view path, const NVFP4_CallOptions *call = nullptr) const
    {
        return check(NVFP4_model_save_prefixes(get(), path.data(), path.size(), call));
    }
    /** Fills free memory of the prefix cache with a file that save_prefixes() wrote. From any thread at any time. */
    Result<void> restore_prefixes(std::string_view path, const NVFP4_CallOptions *call = nullptr) const
    {
        return check(NVFP4_model_restore_prefixes(get(), path.data(), path.size(), call));
    }
    /** Names of special tokens in the text become those tokens. `add_special` adds those that the model expects around a text. */
    Result<std::vector<std::int32_t>> tokenize(std::string_view text, bool add_special = true) const
    {
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_model_tokenize(get(), text.data(), text.size(), add_special, buffer, capacity, count);
        });
    }
    /** Tokens of plain text, such as a user's: names of special tokens in it are text. Otherwise as tokenize(). */
    Result<std::vector<std::int32_t>> tokenize_plain(std::string_view text, bool add_special = true) const
    {
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_model_tokenize_plain(get(), text.data(), text.size(), add_special, buffer, capacity, count);
        });
    }
    Result<std::string> detokenize(Span<std::int32_t> tokens, bool skip_special = true) const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_detokenize(get(), tokens.data(), tokens.size(), skip_special, buffer, capacity, length);
        });
    }
    /** The bytes that a token adds to a text, or the name of a special token. */
    Result<TokenBytes> token_bytes(std::int32_t token) const
    {
        TokenBytes out{{}, false};
        std::int32_t is_special = 0;
        const NVFP4_Status status = detail::copy(out.bytes, [&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_token_bytes(get(), token, reinterpret_cast<std::uint8_t *>(buffer), capacity, length, &is_special);
        });
        out.is_special = is_special != 0;
        return detail::result(status, std::move(out));
    }
    /** The special tokens, and others with a role, in order of their ids. */
    Result<std::vector<SpecialToken>> special_tokens() const
    {
        std::vector<NVFP4_SpecialToken> plain;
        const NVFP4_Status status = detail::copy(plain, [&](NVFP4_SpecialToken *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_model_special_tokens(get(), buffer, sizeof(NVFP4_SpecialToken), capacity, count);
        });
        std::vector<SpecialToken> out;
        out.reserve(plain.size());
        for (const NVFP4_SpecialToken &one : plain)
            out.push_back({one.token, one.roles, std::string(one.name, one.name_length)});
        return detail::result(status, std::move(out));
    }
    /** A conversation rendered by the model's chat template. */
    Result<std::string> render_chat(Span<Message> messages, bool add_generation_prompt = true) const
    {
        std::vector<NVFP4_Message> plain;
        plain.reserve(messages.size());
        for (const Message &m : messages)
            plain.push_back({m.role.data(), m.role.size(), m.content.data(), m.content.size()});
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_render_chat(get(), plain.data(), plain.size(), sizeof(NVFP4_Message), add_generation_prompt, buffer,
                                           capacity, length);
        });
    }
    /** A conversation given as JSON, which may have reasoning, tool calls and their results, rendered by the model's chat template. */
    Result<std::string> render_messages(std::string_view messages, const ChatOptions &chat = ChatOptions(),
                                        bool add_generation_prompt = true) const
    {
        const NVFP4_ChatOptions plain = detail::plain(chat);
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_model_render_messages(get(), messages.data(), messages.size(), &plain, add_generation_prompt, buffer,
                                               capacity, length);
        });
    }
    /** The tokens that a session runs for such messages, in which names of special tokens are text. */
    Result<std::vector<std::int32_t>> tokenize_messages(std::string_view messages, const ChatOptions &chat = ChatOptions(),
                                                        bool add_generation_prompt = true) const
    {
        const NVFP4_ChatOptions plain = detail::plain(chat);
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_model_tokenize_messages(get(), messages.data(), messages.size(), &plain, add_generation_prompt, buffer,
                                                 capacity, count);
        });
    }
    /** The defaults, with the sampling settings that the model recommends. */
    Result<GenerateOptions> generate_options() const;

    /** Embeds texts, which run together, as the model's files or the options say. From any thread at any time. */
    Result<Embeddings> embed(Span<std::string_view> texts, const EmbedOptions &options = EmbedOptions()) const
    {
        return embedded(texts, options, NVFP4_model_embed_texts);
    }
    /** Embeds lists of tokens as they are. Otherwise as embed(). */
    Result<Embeddings> embed_tokens(Span<std::vector<std::int32_t>> tokens, const EmbedOptions &options = EmbedOptions()) const
    {
        return embedded(tokens, options, NVFP4_model_embed);
    }

private:
    template <class Input, class Call>
    Result<Embeddings> embedded(Span<Input> inputs, const EmbedOptions &options, Call call) const
    {
        NVFP4_EmbedOptions plain = options;
        if (options.prompt_text) {
            plain.prompt = options.prompt_text->data();
            plain.prompt_length = options.prompt_text->size();
        }
        if (options.prompt_called) {
            plain.prompt_name = options.prompt_called->data();
            plain.prompt_name_length = options.prompt_called->size();
        }
        std::vector<decltype(std::declval<const Input &>().data())> pointers;
        std::vector<std::size_t> lengths;
        for (const Input &one : inputs) {
            pointers.push_back(one.data());
            lengths.push_back(one.size());
        }
        Embeddings out;
        out.rows.resize(inputs.size());
        const NVFP4_Status status = detail::copy(out.values, [&](float *buffer, std::size_t capacity, std::size_t *length) {
            return call(get(), pointers.data(), lengths.data(), lengths.size(), &plain, buffer, capacity, length, out.rows.data());
        });
        std::size_t rows = 0;
        for (const std::size_t of_text : out.rows)
            rows += of_text;
        out.dimensions = rows == 0 ? 0 : out.values.size() / rows;
        return detail::result(status, std::move(out));
    }
};

/** How to convert a model; the fields of the C struct, with their defaults. */
struct ConvertOptions : NVFP4_ConvertOptions {
    ConvertOptions() : NVFP4_ConvertOptions()
    {
        detail::filled(NVFP4_convert_options_init(this, sizeof(NVFP4_ConvertOptions)));
    }
};

/** How to calibrate a model; the fields of the C struct, with their defaults. Must outlive structs that point to it. */
struct CalibrateOptions : NVFP4_CalibrateOptions {
    CalibrateOptions() : NVFP4_CalibrateOptions()
    {
        detail::filled(NVFP4_calibrate_options_init(this, sizeof(NVFP4_CalibrateOptions)));
    }
};

/** Converts a model on disk to NVFP4 on disk. `quantize` nullptr stands for the defaults. */
inline Result<void> convert(std::string_view source, std::string_view destination,
                            const NVFP4_ConvertOptions &options = ConvertOptions(),
                            const NVFP4_QuantizeOptions *quantize = nullptr)
{
    return check(NVFP4_model_convert(source.data(), source.size(), destination.data(), destination.size(), &options,
                                     quantize));
}

/** Converts with a progress callback `(std::uint64_t done, std::uint64_t total)` in bytes. */
template <class Progress>
Result<void> convert(std::string_view source, std::string_view destination, const NVFP4_ConvertOptions &options,
                     const NVFP4_QuantizeOptions *quantize, Progress &&progress)
{
    using F = std::remove_reference_t<Progress>;
    detail::Carried<F> carried{progress};
    const NVFP4_CallOptions call = detail::told(options.call, carried);
    NVFP4_ConvertOptions with = options;
    with.call = &call;
    return check(carried.after(NVFP4_model_convert(source.data(), source.size(), destination.data(), destination.size(), &with,
                                                   quantize)));
}

/** How to create a session; the fields of the C struct, with their defaults, except the system prompt. */
struct SessionOptions : NVFP4_SessionOptions {
    SessionOptions() : NVFP4_SessionOptions()
    {
        detail::filled(NVFP4_session_options_init(this, sizeof(NVFP4_SessionOptions)));
    }
    explicit SessionOptions(std::string prompt) : SessionOptions() { system_prompt = std::move(prompt); }

    /** The system prompt of chat turns; used instead of the pointer `system`. */
    std::string system_prompt;
};

/** The logits of a choice, for a processor, which may change them; see NVFP4_LogitsEvent. Valid during the call of the processor. */
struct Logits {
    /** One for each token of the vocabulary. */
    float *data;
    std::size_t size;
    /** The tokens that the generation has so far. */
    Span<std::int32_t> tokens;
    /** The index of the session in a step. */
    std::int32_t index;

    float &operator[](std::size_t token) const noexcept { return data[token]; }
    float *begin() const noexcept { return data; }
    float *end() const noexcept { return data + size; }
};

/** Changes logits before a token is chosen. Returns false to end the generation. */
using LogitsProcessor = std::function<bool(const Logits &)>;

/** How to generate; the fields of the C struct, with their defaults, except the stops. */
struct GenerateOptions : NVFP4_GenerateOptions {
    GenerateOptions() : NVFP4_GenerateOptions()
    {
        detail::filled(NVFP4_generate_options_init(this, sizeof(NVFP4_GenerateOptions)));
    }

    /** Stop strings; used instead of the pointers `stop_strings`. */
    std::vector<std::string> stop_texts;
    /** Stop tokens; used instead of the pointer `stop_tokens`. */
    std::vector<std::int32_t> stop_ids;
    /** Tokens with the bias of their logits; used instead of the pointers `logit_bias_tokens` and `logit_biases`. */
    std::vector<std::pair<std::int32_t, float>> biases;
    /** Token sequences that are not completed; used instead of the pointers `bad_words`. */
    std::vector<std::vector<std::int32_t>> bad_sequences;
    /** Strings that no repetition of DRY contains; used instead of the pointers `dry_sequence_breakers`. Without a value the defaults. */
    std::optional<std::vector<std::string>> dry_breakers;
    /**
     * The program's own change of logits; used instead of the pointer `logits_processor`. What it throws leaves the call. In a Queue or a
     * Dispatcher it runs on another thread, these options must exist until the end of the generation, and an exception ends that like false.
     */
    LogitsProcessor processor;
};

inline Result<GenerateOptions> Model::generate_options() const
{
    GenerateOptions out;
    const NVFP4_Status status = NVFP4_model_generate_options(get(), &out, sizeof(NVFP4_GenerateOptions));
    return detail::result(status, std::move(out));
}

/** A generated token with the text that it completes, or text without a token, which was held back or is of another part. */
struct Piece {
    /** -1 for text without a token. */
    std::int32_t token;
    /** Valid during the callback, or until the next piece of a stream. */
    std::string_view text;
    /** NaN unless the options ask for it. */
    float log_probability;
    /** The kind of text: one of NVFP4_PART_*. A tool call is passed as a whole, as JSON. */
    std::int32_t part;
    /** The most probable tokens with their log-probabilities, as many as the options ask for; valid as long as the text. */
    const std::int32_t *top_tokens;
    const float *top_log_probabilities;
    std::size_t top_count;

    /** Not part of the interface. */
    static Piece of(const NVFP4_TokenEvent &event)
    {
        return {event.token,
                std::string_view(event.text, event.text_length),
                event.log_probability,
                event.part,
                event.top_tokens,
                event.top_log_probabilities,
                event.top_count};
    }
};

class Stream;

/** Not part of the interface. */
namespace detail {

/** GenerateOptions as the C struct, valid as long as both live. */
struct PlainOptions {
    explicit PlainOptions(const GenerateOptions &options) : plain(options), processor(options.processor)
    {
        if (options.processor) {
            plain.logits_processor = process;
            plain.logits_user = this;
        }
        for (const std::string &stop : options.stop_texts) {
            strings.push_back(stop.data());
            lengths.push_back(stop.size());
        }
        plain.stop_strings = strings.data();
        plain.stop_string_lengths = lengths.data();
        plain.stop_string_count = strings.size();
        plain.stop_tokens = options.stop_ids.data();
        plain.stop_token_count = options.stop_ids.size();
        for (const auto &[token, bias] : options.biases) {
            bias_tokens.push_back(token);
            bias_values.push_back(bias);
        }
        plain.logit_bias_tokens = bias_tokens.data();
        plain.logit_biases = bias_values.data();
        plain.logit_bias_count = bias_tokens.size();
        for (const std::vector<std::int32_t> &word : options.bad_sequences) {
            words.push_back(word.data());
            word_lengths.push_back(word.size());
        }
        plain.bad_words = words.data();
        plain.bad_word_lengths = word_lengths.data();
        plain.bad_word_count = words.size();
        if (options.dry_breakers) {
            for (const std::string &breaker : *options.dry_breakers) {
                breakers.push_back(breaker.data());
                breaker_lengths.push_back(breaker.size());
            }
            plain.dry_sequence_breakers = breakers.data();
            plain.dry_sequence_breaker_lengths = breaker_lengths.data();
            plain.dry_sequence_breaker_count = breakers.size();
        }
    }
    PlainOptions(const PlainOptions &) = delete;
    PlainOptions &operator=(const PlainOptions &) = delete;

    /** The struct for a queue, valid as long as the options are. */
    const NVFP4_GenerateOptions *queued()
    {
        if (processor.f) {
            plain.logits_processor = process_queued;
            plain.logits_user = const_cast<LogitsProcessor *>(&processor.f);
        }
        return &plain;
    }

    static Logits logits(const NVFP4_LogitsEvent &event)
    {
        return {event.logits, event.logit_count, Span<std::int32_t>(event.tokens, event.token_count), event.index};
    }
    static std::int32_t process(void *user, const NVFP4_LogitsEvent *event)
    {
        return static_cast<PlainOptions *>(user)->processor.call(logits(*event));
    }
    static std::int32_t process_queued(void *user, const NVFP4_LogitsEvent *event)
    {
        return Carried<const LogitsProcessor>(*static_cast<const LogitsProcessor *>(user)).call(logits(*event));
    }

    NVFP4_GenerateOptions plain;
    Carried<const LogitsProcessor> processor;
    std::vector<const char *> strings;
    std::vector<std::size_t> lengths;
    std::vector<std::int32_t> bias_tokens;
    std::vector<float> bias_values;
    std::vector<const std::int32_t *> words;
    std::vector<std::size_t> word_lengths;
    std::vector<const char *> breakers;
    std::vector<std::size_t> breaker_lengths;
};

/** NVFP4_session_chat() or NVFP4_session_chat_messages(). */
using Turn = decltype(&NVFP4_session_chat);

/** Distinguishes a callback from options. */
template <class F>
using IfTakesPieces = std::enable_if_t<std::is_invocable_v<F &, const Piece &> || std::is_invocable_v<F &, std::string_view> ||
                                       std::is_same_v<std::decay_t<F>, Nothing>>;

} // namespace detail

/** The result of a generation. */
struct Generation : NVFP4_GenerationResult {
    Generation() : NVFP4_GenerationResult() { struct_size = sizeof(NVFP4_GenerationResult); }

    /** Its text, or in a chat the content of the answer. Session::reasoning() and Session::tool_calls() have the rest. */
    std::string text;
};

/** Log-probabilities of the tokens of a continuation. */
struct Score {
    std::vector<float> log_probabilities;
    /** 1 for each token that is the argmax. */
    std::vector<std::int32_t> is_argmax;
};

/** A conversation, or another sequence of tokens, run by a model. */
class Session : public detail::Handle<NVFP4_Session, NVFP4_session_retain, NVFP4_session_release> {
public:
    using Handle::Handle;

    static Result<Session> create(const Model &model, const SessionOptions &options = SessionOptions())
    {
        NVFP4_SessionOptions plain = options;
        plain.system = options.system_prompt.empty() ? nullptr : options.system_prompt.data();
        plain.system_length = options.system_prompt.size();
        Session out;
        return detail::result(NVFP4_session_create(model.get(), &plain, out.put()), std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Session(const Model &model, const SessionOptions &options = SessionOptions()) : Session(create(model, options)) {}
#endif

    /** A session in the state that save() wrote. */
    static Result<Session> restore(const Model &model, std::string_view path, const NVFP4_CallOptions *call = nullptr)
    {
        Session out;
        return detail::result(NVFP4_session_restore(model.get(), path.data(), path.size(), call, out.put()), std::move(out));
    }
    Result<void> save(std::string_view path, const NVFP4_CallOptions *call = nullptr) const
    {
        return check(NVFP4_session_save(get(), path.data(), path.size(), call));
    }
    /** A session in the state of the bytes of save_bytes(), or of a file of save(). */
    static Result<Session> restore_bytes(const Model &model, Span<std::uint8_t> bytes, const NVFP4_CallOptions *call = nullptr)
    {
        Session out;
        return detail::result(NVFP4_session_restore_bytes(model.get(), bytes.data(), bytes.size(), call, out.put()),
                              std::move(out));
    }
    /** The bytes of a file of save(). */
    Result<std::vector<std::uint8_t>> save_bytes(const NVFP4_CallOptions *call = nullptr) const
    {
        return detail::items<std::uint8_t>([&](std::uint8_t *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_save_bytes(get(), buffer, capacity, length, call);
        });
    }

    /** A second owner of the same session; fork() makes another session. */
    Result<Session> clone() const { return again<Session>(); }
    /** A second session in the same state. One that generates goes on, and its fork has the tokens so far. */
    Result<Session> fork() const
    {
        Session out;
        return detail::result(NVFP4_session_fork(get(), out.put()), std::move(out));
    }

    Result<void> prefill(Span<std::int32_t> tokens, const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_session_prefill(get(), tokens.data(), tokens.size(), call));
    }
    /** Prefills with a callback `(std::uint64_t done, std::uint64_t total)` in tokens; returning false ends the call. */
    template <class Progress>
    Result<void> prefill(Span<std::int32_t> tokens, const NVFP4_CallOptions *call, Progress &&progress)
    {
        detail::Carried<std::remove_reference_t<Progress>> carried{progress};
        const NVFP4_CallOptions with = detail::told(call, carried);
        return check(carried.after(NVFP4_session_prefill(get(), tokens.data(), tokens.size(), &with)));
    }
    Result<void> prefill_token_by_token(Span<std::int32_t> tokens, const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_session_prefill_token_by_token(get(), tokens.data(), tokens.size(), call));
    }
    Result<void> decode(std::int32_t token, const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_session_decode(get(), token, call));
    }
    Result<std::vector<float>> logits(const NVFP4_CallOptions *call = nullptr)
    {
        return detail::items<float>([&](float *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_session_logits(get(), buffer, capacity, count, call);
        });
    }
    /** The next token, which is not appended. */
    Result<std::int32_t> sample(const GenerateOptions &options = {})
    {
        detail::PlainOptions given(options);
        std::int32_t out = 0;
        const NVFP4_Status status = given.processor.after(NVFP4_session_sample(get(), &given.plain, &out));
        return detail::result(status, out);
    }
    Result<std::int32_t> sample(const NVFP4_GenerateOptions &options)
    {
        return detail::value<std::int32_t>([&](std::int32_t *out) { return NVFP4_session_sample(get(), &options, out); });
    }

    /** The token of the last sample() or step_sample() and its log-probability, then the most probable ones, as its options asked. */
    Result<std::vector<std::pair<std::int32_t, float>>> top_log_probabilities() const
    {
        std::size_t count = 0;
        NVFP4_Status status = NVFP4_session_top_log_probabilities(get(), nullptr, nullptr, 0, &count);
        std::vector<std::int32_t> tokens(count);
        std::vector<float> values(count);
        if (status == NVFP4_OK && count > 0)
            status = NVFP4_session_top_log_probabilities(get(), tokens.data(), values.data(), count, &count);
        std::vector<std::pair<std::int32_t, float>> out;
        for (std::size_t i = 0; i < tokens.size(); i++)
            out.emplace_back(tokens[i], values[i]);
        return detail::result(status, std::move(out));
    }

    /** Scores continuations, each as if it stood alone after the session's tokens, which stay as they are. */
    Result<std::vector<Score>> score(Span<std::vector<std::int32_t>> continuations, const NVFP4_CallOptions *call = nullptr)
    {
        std::vector<const std::int32_t *> texts;
        std::vector<std::size_t> lengths;
        std::size_t total = 0;
        for (std::size_t i = 0; i < continuations.size(); i++) {
            const std::vector<std::int32_t> &tokens = continuations.data()[i];
            texts.push_back(tokens.data());
            lengths.push_back(tokens.size());
            total += tokens.size();
        }
        std::vector<float> values(total);
        std::vector<std::int32_t> argmaxes(total);
        const NVFP4_Status status = NVFP4_session_score(get(), texts.data(), lengths.data(), texts.size(), call, values.data(),
                                                        argmaxes.data());
        std::vector<Score> out(texts.size());
        auto value = values.begin();
        auto argmax = argmaxes.begin();
        for (std::size_t i = 0; i < out.size(); i++) {
            const auto length = static_cast<std::ptrdiff_t>(lengths[i]);
            out[i].log_probabilities.assign(value, value + length);
            out[i].is_argmax.assign(argmax, argmax + length);
            value += length;
            argmax += length;
        }
        return detail::result(status, std::move(out));
    }

    /** Generates tokens after those in the session. */
    Result<Generation> generate(const GenerateOptions &options = {}) { return generate(options, detail::Nothing()); }
    /** Generates with a callback: `on_piece` takes every Piece, or only the text of the content as a std::string_view. */
    template <class F>
    Result<Generation> generate(const GenerateOptions &options, F &&on_piece)
    {
        return run(options, on_piece,
                   [&](const NVFP4_GenerateOptions &plain, NVFP4_TokenCallback callback, void *user,
                       NVFP4_GenerationResult *result) {
                       return NVFP4_session_generate(get(), &plain, callback, user, result);
                   });
    }

    /** Adds a user message and generates the answer, with the chat options of the previous turn. */
    Result<Generation> chat(std::string_view text, const GenerateOptions &options = {})
    {
        return chat(text, options, detail::Nothing());
    }
    /** Chats with a callback; `on_piece` is as for generate(). */
    template <class F, class = detail::IfTakesPieces<F>>
    Result<Generation> chat(std::string_view text, const GenerateOptions &options, F &&on_piece)
    {
        return turn(NVFP4_session_chat, text, nullptr, options, on_piece);
    }
    /** Chats with chat options, which later turns keep. */
    Result<Generation> chat(std::string_view text, const ChatOptions &chat, const GenerateOptions &options = {})
    {
        return this->chat(text, chat, options, detail::Nothing());
    }
    template <class F>
    Result<Generation> chat(std::string_view text, const ChatOptions &chat, const GenerateOptions &options, F &&on_piece)
    {
        return turn(NVFP4_session_chat, text, &chat, options, on_piece);
    }

    /** Generates the answer to a whole conversation, as JSON like that of messages(); otherwise as chat(). */
    Result<Generation> chat_messages(std::string_view messages, const GenerateOptions &options = {})
    {
        return chat_messages(messages, options, detail::Nothing());
    }
    template <class F, class = detail::IfTakesPieces<F>>
    Result<Generation> chat_messages(std::string_view messages, const GenerateOptions &options, F &&on_piece)
    {
        return turn(NVFP4_session_chat_messages, messages, nullptr, options, on_piece);
    }
    Result<Generation> chat_messages(std::string_view messages, const ChatOptions &chat, const GenerateOptions &options = {})
    {
        return chat_messages(messages, chat, options, detail::Nothing());
    }
    template <class F>
    Result<Generation> chat_messages(std::string_view messages, const ChatOptions &chat, const GenerateOptions &options,
                                     F &&on_piece)
    {
        return turn(NVFP4_session_chat_messages, messages, &chat, options, on_piece);
    }

    /** generate() as a range of pieces. */
    Stream stream(const GenerateOptions &options = {}) const;
    /** chat() as a range of pieces. */
    Stream ask(std::string_view text, const GenerateOptions &options = {}) const;
    Stream ask(std::string_view text, const ChatOptions &chat, const GenerateOptions &options = {}) const;
    /** chat_messages() as a range of pieces. */
    Stream ask_messages(std::string_view messages, const GenerateOptions &options = {}) const;
    Stream ask_messages(std::string_view messages, const ChatOptions &chat, const GenerateOptions &options = {}) const;

    /** The text of the last generation, or in a chat the content of the last answer. */
    Result<std::string> text() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_text(get(), buffer, capacity, length);
        });
    }
    /** The model's reasoning before the last answer. */
    Result<std::string> reasoning() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_reasoning(get(), buffer, capacity, length);
        });
    }
    /** The tool calls in the last answer, as a JSON array. */
    Result<std::string> tool_calls() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_tool_calls(get(), buffer, capacity, length);
        });
    }
    /** The conversation of the chat turns, as JSON. */
    Result<std::string> messages() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_session_messages(get(), buffer, capacity, length);
        });
    }
    /** The result of the last generation. */
    Result<Generation> last() const
    {
        Generation out;
        NVFP4_Status status = NVFP4_session_result(get(), &out);
        if (status == NVFP4_OK)
            status = detail::copy(out.text, [&](char *buffer, std::size_t capacity, std::size_t *length) {
                return NVFP4_session_text(get(), buffer, capacity, length);
            });
        return detail::result(status, std::move(out));
    }
    /** Number of tokens in the session. */
    Result<std::size_t> length() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_session_length(get(), out); });
    }
    /** Upper limit of tokens in the session. */
    Result<std::size_t> context() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_session_context(get(), out); });
    }
    /** Tokens that eviction has dropped, because the context was full. */
    Result<std::size_t> evicted() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_session_evicted(get(), out); });
    }
    /** Bytes of the KV cache. */
    Result<std::uint64_t> memory() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_session_memory(get(), out); });
    }
    Result<std::vector<std::int32_t>> tokens() const
    {
        return detail::items<std::int32_t>([&](std::int32_t *buffer, std::size_t capacity, std::size_t *count) {
            return NVFP4_session_tokens(get(), buffer, capacity, count);
        });
    }

    Result<void> truncate(std::size_t length) { return check(NVFP4_session_truncate(get(), length)); }
    /** Drops all tokens and the conversation. */
    Result<void> clear() { return check(NVFP4_session_reset(get())); }

private:
    template <class F>
    Result<Generation> turn(detail::Turn function, std::string_view words, const ChatOptions *chat,
                            const GenerateOptions &options, F &on_piece)
    {
        const NVFP4_ChatOptions how = chat != nullptr ? detail::plain(*chat) : NVFP4_ChatOptions();
        return run(options, on_piece,
                   [&](const NVFP4_GenerateOptions &plain, NVFP4_TokenCallback callback, void *user,
                       NVFP4_GenerationResult *result) {
                       return function(get(), words.data(), words.size(), chat != nullptr ? &how : nullptr, &plain, callback,
                                       user, result);
                   });
    }

    template <class F, class Call>
    Result<Generation> run(const GenerateOptions &options, F &on_piece, Call &&call)
    {
        detail::PlainOptions given(options);
        Generation out;
        NVFP4_Status status = NVFP4_OK;
        if constexpr (std::is_same_v<std::remove_const_t<F>, detail::Nothing>) {
            status = call(given.plain, nullptr, nullptr, &out);
        } else {
            detail::Carried<F> carried{on_piece};
            status = carried.after(call(given.plain, piece<F>, &carried, &out));
        }
        status = given.processor.after(status);
        if (status == NVFP4_OK)
            status = detail::copy(out.text, [&](char *buffer, std::size_t capacity, std::size_t *length) {
                return NVFP4_session_text(get(), buffer, capacity, length);
            });
        return detail::result(status, std::move(out));
    }

    template <class F>
    static std::int32_t piece(void *user, const NVFP4_TokenEvent *event)
    {
        auto &carried = *static_cast<detail::Carried<F> *>(user);
        const Piece piece = Piece::of(*event);
        if constexpr (std::is_invocable_v<F &, const Piece &>)
            return carried.call(piece);
        else
            return piece.part == NVFP4_PART_CONTENT ? carried.call(piece.text) : 0;
    }
};

/** Limits of a queue. */
struct QueueOptions : NVFP4_QueueOptions {
    QueueOptions() : NVFP4_QueueOptions()
    {
        detail::filled(NVFP4_queue_options_init(this, sizeof(NVFP4_QueueOptions)));
    }
};

/** How to run a generation in a queue. */
struct SubmitOptions : NVFP4_SubmitOptions {
    SubmitOptions() : NVFP4_SubmitOptions()
    {
        detail::filled(NVFP4_submit_options_init(this, sizeof(NVFP4_SubmitOptions)));
    }
};

/** An event of a generation in a queue; see NVFP4_QueueEvent. */
struct QueueEvent : NVFP4_QueueEvent {
    /** The text, or the message of a generation that failed. Valid until the next wait. */
    std::string_view words() const { return {text, text_length}; }
    /** Whether it is the last event of its generation. */
    bool is_end() const { return kind == NVFP4_EVENT_END; }
};

/** Not part of the interface. */
namespace detail {

/** Submits a generation after `tokens`. */
inline NVFP4_Status submit(NVFP4_Queue *queue, const Session &session, Span<std::int32_t> tokens, const GenerateOptions &options,
                           const NVFP4_SubmitOptions &submit, std::uint64_t *generation)
{
    PlainOptions given(options);
    return NVFP4_queue_generate(queue, session.get(), tokens.data(), tokens.size(), given.queued(), &submit, generation);
}

/** Submits a chat turn by one of the functions for that; `chat` may be null. */
template <class Function>
NVFP4_Status submit(Function function, NVFP4_Queue *queue, const Session &session, std::string_view words,
                    const ChatOptions *chat, const GenerateOptions &options, const NVFP4_SubmitOptions &submit,
                    std::uint64_t *generation)
{
    PlainOptions given(options);
    const NVFP4_ChatOptions how = chat != nullptr ? plain(*chat) : NVFP4_ChatOptions();
    return function(queue, session.get(), words.data(), words.size(), chat != nullptr ? &how : nullptr, given.queued(), &submit,
                    generation);
}

} // namespace detail

/** Runs many generations for a program that has no thread for each. See the chapter on queues in nvfp4.h. */
class Queue : public detail::Handle<NVFP4_Queue, NVFP4_queue_retain, NVFP4_queue_release> {
public:
    using Handle::Handle;

    /** Numbers of submissions and events. */
    struct Counts {
        std::size_t waiting, running, events;
    };

    static Result<Queue> create(const Model &model, const NVFP4_QueueOptions &options = QueueOptions())
    {
        Queue out;
        return detail::result(NVFP4_queue_create(model.get(), &options, out.put()), std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Queue(const Model &model, const NVFP4_QueueOptions &options = QueueOptions()) : Queue(create(model, options)) {}
#endif

    /** A second owner of the same queue. */
    Result<Queue> clone() const { return again<Queue>(); }

    /** Submits a generation after `tokens`; returns its number. */
    Result<std::uint64_t> generate(const Session &session, Span<std::int32_t> tokens, const GenerateOptions &options = {},
                                   const NVFP4_SubmitOptions &submit = SubmitOptions()) const
    {
        return detail::value<std::uint64_t>(
            [&](std::uint64_t *out) { return detail::submit(get(), session, tokens, options, submit, out); });
    }
    /** Submits a chat turn, with the chat options of the previous one. */
    Result<std::uint64_t> chat(const Session &session, std::string_view text, const GenerateOptions &options = {},
                               const NVFP4_SubmitOptions &submit = SubmitOptions()) const
    {
        return turn(NVFP4_queue_chat, session, text, nullptr, options, submit);
    }
    Result<std::uint64_t> chat(const Session &session, std::string_view text, const ChatOptions &chat,
                               const GenerateOptions &options = {}, const NVFP4_SubmitOptions &submit = SubmitOptions()) const
    {
        return turn(NVFP4_queue_chat, session, text, &chat, options, submit);
    }
    /** Submits the turn of a whole conversation, as JSON. */
    Result<std::uint64_t> chat_messages(const Session &session, std::string_view messages, const GenerateOptions &options = {},
                                        const NVFP4_SubmitOptions &submit = SubmitOptions()) const
    {
        return turn(NVFP4_queue_chat_messages, session, messages, nullptr, options, submit);
    }
    Result<std::uint64_t> chat_messages(const Session &session, std::string_view messages, const ChatOptions &chat,
                                        const GenerateOptions &options = {},
                                        const NVFP4_SubmitOptions &submit = SubmitOptions()) const
    {
        return turn(NVFP4_queue_chat_messages, session, messages, &chat, options, submit);
    }

    /** Takes up to `most` events; without any, waits up to `timeout_ms` milliseconds for one, or for ever if that is -1. */
    Result<std::vector<QueueEvent>> wait(std::size_t most = 64, std::int64_t timeout_ms = -1)
    {
        std::vector<QueueEvent> out(most);
        std::size_t count = 0;
        const NVFP4_Status status = NVFP4_queue_wait(get(), out.data(), sizeof(QueueEvent), most, timeout_ms, &count);
        out.resize(status == NVFP4_OK ? count : 0);
        return detail::result(status, std::move(out));
    }
    /** Lets a wait() return without events. */
    Result<void> wake() const { return check(NVFP4_queue_wake(get())); }
    /** Ends a generation, which keeps its tokens. */
    Result<void> cancel(std::uint64_t generation) const { return check(NVFP4_queue_cancel(get(), generation)); }
    /** A file descriptor to poll, which is readable while there are events. */
    Result<int> fd() const
    {
        return detail::value<int>([&](std::int32_t *out) { return NVFP4_queue_fd(get(), out); });
    }
    Result<Counts> counts() const
    {
        return detail::value<Counts>(
            [&](Counts *out) { return NVFP4_queue_counts(get(), &out->waiting, &out->running, &out->events); });
    }

private:
    template <class Function>
    Result<std::uint64_t> turn(Function function, const Session &session, std::string_view words, const ChatOptions *chat,
                               const GenerateOptions &options, const NVFP4_SubmitOptions &submit) const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) {
            return detail::submit(function, get(), session, words, chat, options, submit, out);
        });
    }
};
static_assert(sizeof(QueueEvent) == sizeof(NVFP4_QueueEvent), "events are an array of the C interface");

/** An event of a queue whose text and tokens are its own. */
struct OwnedEvent {
    /** The number of the generation. */
    std::uint64_t generation = 0;
    /** The text, or the message of a generation that failed. */
    std::string text;
    /** One of NVFP4_EVENT_*. */
    std::int32_t kind = NVFP4_EVENT_TEXT;
    /** The token, or -1. */
    std::int32_t token = -1;
    /** One of NVFP4_PART_*. */
    std::int32_t part = NVFP4_PART_CONTENT;
    float log_probability = 0;
    /** At the end, one of NVFP4_FINISH_*. */
    std::int32_t finish = NVFP4_FINISH_NONE;
    /** At the end, #NVFP4_OK or the error of a generation that failed. */
    NVFP4_Status status = NVFP4_OK;
    std::vector<std::int32_t> top_tokens;
    std::vector<float> top_log_probabilities;

    OwnedEvent() = default;
    explicit OwnedEvent(const NVFP4_QueueEvent &event)
        : generation(event.generation), text(event.text, event.text_length), kind(event.kind), token(event.token),
          part(event.part), log_probability(event.log_probability), finish(event.finish), status(event.status),
          top_tokens(event.top_tokens, event.top_tokens + event.top_count),
          top_log_probabilities(event.top_log_probabilities, event.top_log_probabilities + event.top_count)
    {
    }

    /** Whether it is the last event of its generation. */
    bool is_end() const noexcept { return kind == NVFP4_EVENT_END; }
};

/**
 * Runs many generations on one thread. A callback gets the events of a generation, or in C++20 a coroutine awaits them.
 *
 *     nvfp4::Dispatcher dispatcher(model);
 *     dispatcher.chat(session, "Why is the sky blue?", [](const nvfp4::OwnedEvent &event) { std::cout << event.text; });
 *     dispatcher.run();
 *
 * Callbacks are called, and coroutines go on, within run() and poll(). They may submit generations, cancel them and destroy their streams,
 * but not call run() or poll(). An exception from one leaves run() or poll(); calling that again goes on with the next event. One thread at
 * a time may use a dispatcher and its streams. The dispatcher uses `user` of the submit options itself.
 */
class Dispatcher {
    /** The events of a generation that are to be given out, and their receiver. */
    struct Channel {
        std::uint64_t generation = 0;
        std::deque<OwnedEvent> events;
        std::function<void(const OwnedEvent &)> on_event;
        /** A coroutine that waits, and the function that goes on with it: this struct is the same in C++17. */
        void *waiting = nullptr;
        void (*resume)(void *) = nullptr;
        /** Whether the coroutine waits for the end, rather than for any event. */
        bool wants_end = false;
        /** Whether the last event is among `events`, or has been seen. */
        bool has_ended = false;
        /** Whether its stream is gone, so that events are discarded. */
        bool is_dropped = false;

        void add(const NVFP4_QueueEvent &event)
        {
            if (!is_dropped)
                events.emplace_back(event);
            has_ended = event.kind == NVFP4_EVENT_END;
        }

        /** Calls the callback with each event, or goes on with the coroutine. */
        void give()
        {
            while (on_event && !events.empty()) {
                const OwnedEvent event = std::move(events.front());
                events.pop_front();
                on_event(event);
            }
            if (waiting != nullptr && (has_ended || (!wants_end && !events.empty())))
                resume(std::exchange(waiting, nullptr));
        }

        std::optional<OwnedEvent> take()
        {
            if (events.empty())
                return std::nullopt;
            std::optional<OwnedEvent> event(std::move(events.front()));
            events.pop_front();
            return event;
        }
    };

    struct State {
        Queue queue;
        /** Channels of generations that have not ended. */
        std::unordered_map<Channel *, std::shared_ptr<Channel>> open;
        /** Channels with new events. */
        std::deque<std::shared_ptr<Channel>> ready;

        /** Calls `submit` with the channel as `user`, and keeps the channel if that succeeds. */
        template <class Submit>
        NVFP4_Status start(std::shared_ptr<Channel> channel, const NVFP4_SubmitOptions &options, Submit &&submit)
        {
            NVFP4_SubmitOptions own = options;
            own.user = channel.get();
            const auto kept = open.emplace(channel.get(), channel).first;
            const NVFP4_Status status = submit(own, &channel->generation);
            if (status != NVFP4_OK)
                open.erase(kept);
            return status;
        }
    };

    NVFP4_Queue *queue() const noexcept { return state_ == nullptr ? nullptr : state_->queue.get(); }

    auto after(const Session &session, Span<std::int32_t> tokens, const GenerateOptions &options) const
    {
        return [this, &session, tokens, &options](const NVFP4_SubmitOptions &submit, std::uint64_t *out) {
            return detail::submit(queue(), session, tokens, options, submit, out);
        };
    }
    template <class Function>
    auto turn(Function function, const Session &session, std::string_view words, const GenerateOptions &options,
              const ChatOptions *chat) const
    {
        return [this, function, &session, words, &options, chat](const NVFP4_SubmitOptions &submit, std::uint64_t *out) {
            return detail::submit(function, queue(), session, words, chat, options, submit, out);
        };
    }

public:
    /** Holds nothing: a dispatcher to assign to. */
    Dispatcher() noexcept = default;
    Dispatcher(Dispatcher &&) noexcept = default;
    Dispatcher &operator=(Dispatcher &&) noexcept = default;
    /** Takes the events of this queue, which nothing else may wait for. */
    explicit Dispatcher(Queue queue) : state_(std::make_shared<State>()) { state_->queue = std::move(queue); }
    static Result<Dispatcher> create(const Model &model, const NVFP4_QueueOptions &options = QueueOptions())
    {
        Queue queue;
        const NVFP4_Status status = NVFP4_queue_create(model.get(), &options, queue.put());
        return detail::result(status, Dispatcher(std::move(queue)));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Dispatcher(const Model &model, const NVFP4_QueueOptions &options = QueueOptions())
        : Dispatcher(create(model, options))
    {
    }
#endif

    /** A callback for the events of a generation. */
    using OnEvent = std::function<void(const OwnedEvent &)>;

    /** Submits a generation after `tokens`; returns its number. */
    Result<std::uint64_t> generate(const Session &session, Span<std::int32_t> tokens, OnEvent on_event,
                                   const GenerateOptions &options = {}, const NVFP4_SubmitOptions &submit = SubmitOptions())
    {
        return called(std::move(on_event), submit, after(session, tokens, options));
    }
    /** Submits a chat turn; without `chat`, with the chat options of the previous one. */
    Result<std::uint64_t> chat(const Session &session, std::string_view text, OnEvent on_event,
                               const GenerateOptions &options = {}, const NVFP4_SubmitOptions &submit = SubmitOptions(),
                               const ChatOptions *chat = nullptr)
    {
        return called(std::move(on_event), submit, turn(NVFP4_queue_chat, session, text, options, chat));
    }
    /** Submits the turn of a whole conversation, as JSON. */
    Result<std::uint64_t> chat_messages(const Session &session, std::string_view messages, OnEvent on_event,
                                        const GenerateOptions &options = {},
                                        const NVFP4_SubmitOptions &submit = SubmitOptions(),
                                        const ChatOptions *chat = nullptr)
    {
        return called(std::move(on_event), submit, turn(NVFP4_queue_chat_messages, session, messages, options, chat));
    }
    /** Ends a generation, which keeps its tokens. */
    Result<void> cancel(std::uint64_t generation) const { return check(NVFP4_queue_cancel(queue(), generation)); }

    /** Gives out the events that there are. Without any it waits for one up to `timeout_ms` milliseconds, or for ever if that is -1. */
    Result<void> poll(std::int64_t timeout_ms = -1)
    {
        const std::shared_ptr<State> state = state_;
        if (state == nullptr)
            return wake();
        if (state->ready.empty()) {
            NVFP4_QueueEvent events[64];
            std::size_t count = 0;
            const NVFP4_Status status = NVFP4_queue_wait(queue(), events, sizeof *events, 64, timeout_ms, &count);
            if (status != NVFP4_OK)
                return check(status);
            for (std::size_t i = 0; i < count; i++) {
                const auto found = state->open.find(static_cast<Channel *>(events[i].user));
                if (found == state->open.end())
                    continue;
                const bool was_told = !found->second->events.empty();
                found->second->add(events[i]);
                if (!was_told || found->second->has_ended)
                    state->ready.push_back(found->second);
                if (found->second->has_ended)
                    state->open.erase(found);
            }
        }
        while (!state->ready.empty()) {
            // An exception leaves the channel in its place, with its other events.
            state->ready.front()->give();
            state->ready.pop_front();
        }
        return Result<void>();
    }
    /** Gives out events until no generation is left. */
    Result<void> run()
    {
        while (state_ != nullptr && (!state_->open.empty() || !state_->ready.empty())) {
#ifdef NVFP4_NO_EXCEPTIONS
            if (const Result<void> done = poll(); !done)
                return done;
#else
            poll();
#endif
        }
        return Result<void>();
    }
    /** Lets a poll() return that waits, from any thread. */
    Result<void> wake() const { return check(NVFP4_queue_wake(queue())); }
    /** A file descriptor to poll, which is readable while there are events. */
    Result<int> fd() const
    {
        return detail::value<int>([&](std::int32_t *out) { return NVFP4_queue_fd(queue(), out); });
    }
    /** Generations that have not ended. */
    std::size_t open() const noexcept { return state_ == nullptr ? 0 : state_->open.size(); }

#ifdef __cpp_impl_coroutine
    /**
     * The events of a generation for one coroutine. A stream that is destroyed before the end, also by its coroutine's end, cancels its
     * generation.
     */
    class Events {
    public:
        /** Waits for events, or for the end. */
        template <class Value, Value (Events::*taken)(), bool wants_end>
        struct Wait {
            Events &events;

            bool await_ready() const noexcept
            {
                const Channel *channel = events.channel_.get();
                return channel == nullptr || channel->has_ended || (!wants_end && !channel->events.empty());
            }
            void await_suspend(std::coroutine_handle<> coroutine) const noexcept
            {
                Channel &channel = *events.channel_;
                channel.wants_end = wants_end;
                channel.resume = [](void *address) { std::coroutine_handle<>::from_address(address).resume(); };
                channel.waiting = coroutine.address();
            }
            Value await_resume() const { return (events.*taken)(); }
        };

        /** Has no events. */
        Events() noexcept = default;
        Events(Events &&) noexcept = default;
        Events &operator=(Events &&other) noexcept
        {
            if (this != &other) {
                drop();
                state_ = std::move(other.state_);
                channel_ = std::move(other.channel_);
            }
            return *this;
        }
        ~Events() { drop(); }

        /** The number of the generation. */
        std::uint64_t generation() const noexcept { return channel_ == nullptr ? 0 : channel_->generation; }
        /** The next event; nothing after the last. */
        auto next() noexcept { return Wait<std::optional<OwnedEvent>, &Events::take, false>{*this}; }
        /** All of the content that no event has given yet, once the generation has ended. Its error, if it failed. */
        auto text() noexcept { return Wait<Result<std::string>, &Events::take_text, true>{*this}; }
        /** Ends the generation, which keeps its tokens. */
        Result<void> cancel() const { return check(NVFP4_queue_cancel(queue(), generation())); }

    private:
        friend Dispatcher;
        Events(std::shared_ptr<State> state, std::shared_ptr<Channel> channel)
            : state_(std::move(state)), channel_(std::move(channel))
        {
        }
        NVFP4_Queue *queue() const noexcept { return state_ == nullptr ? nullptr : state_->queue.get(); }
        void drop() noexcept
        {
            if (channel_ == nullptr)
                return;
            channel_->waiting = nullptr;
            channel_->is_dropped = true;
            channel_->events.clear();
            if (!channel_->has_ended)
                static_cast<void>(NVFP4_queue_cancel(queue(), generation()));
        }
        std::optional<OwnedEvent> take() { return channel_ == nullptr ? std::nullopt : channel_->take(); }
        Result<std::string> take_text()
        {
            std::string all;
            while (const std::optional<OwnedEvent> event = take()) {
                if (event->status != NVFP4_OK)
                    return detail::failure<std::string>(Error(event->status, event->text));
                if (event->part == NVFP4_PART_CONTENT)
                    all += event->text;
            }
            return all;
        }

        std::shared_ptr<State> state_;
        std::shared_ptr<Channel> channel_;
    };

    /** Submits a generation after `tokens`, whose events a coroutine awaits. */
    Result<Events> stream(const Session &session, Span<std::int32_t> tokens, const GenerateOptions &options = {},
                          const NVFP4_SubmitOptions &submit = SubmitOptions())
    {
        return awaited(submit, after(session, tokens, options));
    }
    /** Submits a chat turn likewise; without `chat`, with the chat options of the previous one. */
    Result<Events> ask(const Session &session, std::string_view text, const GenerateOptions &options = {},
                       const NVFP4_SubmitOptions &submit = SubmitOptions(), const ChatOptions *chat = nullptr)
    {
        return awaited(submit, turn(NVFP4_queue_chat, session, text, options, chat));
    }
    /** Submits the turn of a whole conversation, as JSON, likewise. */
    Result<Events> ask_messages(const Session &session, std::string_view messages, const GenerateOptions &options = {},
                                const NVFP4_SubmitOptions &submit = SubmitOptions(), const ChatOptions *chat = nullptr)
    {
        return awaited(submit, turn(NVFP4_queue_chat_messages, session, messages, options, chat));
    }
#endif

private:
    template <class Submit>
    NVFP4_Status start(const std::shared_ptr<Channel> &channel, const NVFP4_SubmitOptions &options, Submit &&submit)
    {
        if (state_ == nullptr)
            return submit(options, &channel->generation);
        return state_->start(channel, options, submit);
    }
    template <class Submit>
    Result<std::uint64_t> called(OnEvent on_event, const NVFP4_SubmitOptions &options, Submit &&submit)
    {
        const auto channel = std::make_shared<Channel>();
        channel->on_event = std::move(on_event);
        const NVFP4_Status status = start(channel, options, submit);
        return detail::result(status, channel->generation);
    }
#ifdef __cpp_impl_coroutine
    template <class Submit>
    Result<Events> awaited(const NVFP4_SubmitOptions &options, Submit &&submit)
    {
        auto channel = std::make_shared<Channel>();
        const NVFP4_Status status = start(channel, options, submit);
        if (status != NVFP4_OK)
            return detail::failure<Events>(Error(status, NVFP4_last_error()));
        return Events(state_, std::move(channel));
    }
#endif

    std::shared_ptr<State> state_;
};

/**
 * The pieces of a generation while it runs: a single-pass range. Its thread waits while a piece is used, so no token is
 * generated ahead, and a loop that is left early leaves the session with the tokens that the loop has seen. The session is
 * in use until the stream has ended or is destroyed. The stream replaces the cancel flag of its options' call by its own.
 */
class Stream {
    enum class Phase { asked, given, taken, done };

    /** The state that the two threads share. */
    struct Relay {
        std::mutex mutex;
        std::condition_variable changed;
        Phase phase = Phase::asked;
        bool stopped = false;
        /** Ends the call, even before its first token. */
        std::int32_t flag = 0;
        Piece piece{};
        Session session;
        /** The input of a chat turn, and the function for it; without one NVFP4_session_generate() runs. */
        detail::Turn turn = nullptr;
        std::string said;
        std::optional<ChatOptions> chat;
        GenerateOptions options;
        Generation generation;
        std::optional<Error> error;
        /** The exception that a processor threw. */
        std::exception_ptr thrown;
        std::thread thread;

        void fail(NVFP4_Status status) { error.emplace(status, NVFP4_last_error()); }

        /** Runs in the thread that generates. */
        void run()
        {
            detail::PlainOptions given(options);
            NVFP4_CallOptions call = options.call != nullptr ? *options.call : CallOptions();
            call.cancel_flag = &flag;
            given.plain.call = &call;
            NVFP4_Session *handle = session.get();
            const NVFP4_ChatOptions how = chat ? detail::plain(*chat) : NVFP4_ChatOptions();
            NVFP4_Status status = turn != nullptr ? turn(handle, said.data(), said.size(), chat ? &how : nullptr, &given.plain,
                                                         give, this, &generation)
                                                  : NVFP4_session_generate(handle, &given.plain, give, this, &generation);
            if (status == NVFP4_OK)
                status = detail::copy(generation.text, [&](char *buffer, std::size_t capacity, std::size_t *length) {
                    return NVFP4_session_text(handle, buffer, capacity, length);
                });
            if (status != NVFP4_OK)
                fail(status);
            thrown = given.processor.thrown;
            const std::lock_guard<std::mutex> lock(mutex);
            session.reset();
            phase = Phase::done;
            changed.notify_all();
        }

        static std::int32_t give(void *user, const NVFP4_TokenEvent *event)
        {
            auto &relay = *static_cast<Relay *>(user);
            std::unique_lock<std::mutex> lock(relay.mutex);
            if (!relay.stopped) {
                relay.piece = Piece::of(*event);
                relay.phase = Phase::given;
                relay.changed.notify_all();
                relay.changed.wait(lock, [&] { return relay.phase == Phase::asked; });
            }
            return relay.stopped;
        }

        /** Waits for the next piece; false after the last. */
        bool take()
        {
            std::unique_lock<std::mutex> lock(mutex);
            if (phase == Phase::taken) {
                phase = Phase::asked;
                changed.notify_all();
            }
            changed.wait(lock, [&] { return phase != Phase::asked; });
            if (phase == Phase::given)
                phase = Phase::taken;
            return phase == Phase::taken;
        }

        /** Whether an error at the end has not been reported yet. */
        bool failed()
        {
            const std::lock_guard<std::mutex> lock(mutex);
            return error.has_value();
        }

        void stop()
        {
            const std::lock_guard<std::mutex> lock(mutex);
            stopped = true;
            *const_cast<volatile std::int32_t *>(&flag) = 1;
            if (phase == Phase::given || phase == Phase::taken) {
                phase = Phase::asked;
                changed.notify_all();
            }
        }

        ~Relay()
        {
            if (thread.joinable()) {
                stop();
                thread.join();
            }
        }
    };

public:
    /** The end of every stream. */
    struct Sentinel {};

    class Iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = Piece;
        using difference_type = std::ptrdiff_t;
        using pointer = const Piece *;
        using reference = const Piece &;

        Iterator() noexcept = default;
        const Piece &operator*() const noexcept { return relay_->piece; }
        const Piece *operator->() const noexcept { return &relay_->piece; }
        /** Waits for the next piece; throws if the generation has failed. */
        Iterator &operator++()
        {
            if (!relay_->take()) {
#ifndef NVFP4_NO_EXCEPTIONS
                if (relay_->thrown)
                    std::rethrow_exception(relay_->thrown);
                if (relay_->failed())
                    throw *relay_->error;
#endif
                relay_ = nullptr;
            }
            return *this;
        }
        void operator++(int) { ++*this; }
        friend bool operator==(const Iterator &a, Sentinel) noexcept { return a.relay_ == nullptr; }
        friend bool operator!=(const Iterator &a, Sentinel) noexcept { return a.relay_ != nullptr; }

    private:
        friend Stream;
        explicit Iterator(Relay *relay) : relay_(relay) {}
        Relay *relay_ = nullptr;
    };

    /** A stream without pieces. */
    Stream() noexcept = default;

    /** Waits for the first piece, or the next if some were taken. */
    Iterator begin()
    {
        Iterator out(relay_.get());
        return relay_ ? ++out : out;
    }
    Sentinel end() const noexcept { return {}; }

    /** Ends the generation, from any thread. There are no further pieces. */
    void stop()
    {
        if (relay_)
            relay_->stop();
    }

    /** The result of the generation; waits for its end. A stopped one ends as #NVFP4_FINISH_CANCELLED. */
    Result<Generation> result()
    {
        if (!relay_)
            return detail::failure<Generation>(Error(NVFP4_INVALID_HANDLE, "the stream is empty"));
        while (relay_->take()) {
        }
#ifndef NVFP4_NO_EXCEPTIONS
        if (relay_->thrown)
            std::rethrow_exception(relay_->thrown);
#endif
        if (relay_->error)
            return detail::failure<Generation>(*relay_->error);
        return relay_->generation;
    }

private:
    friend Session;
    Stream(NVFP4_Session *session, const GenerateOptions &options, detail::Turn turn = nullptr, std::string_view said = {},
           const ChatOptions *chat = nullptr)
        : relay_(std::make_unique<Relay>())
    {
        relay_->options = options;
        relay_->turn = turn;
        relay_->said = said;
        if (chat != nullptr)
            relay_->chat = *chat;
        const NVFP4_Status status = NVFP4_session_retain(session);
        if (status != NVFP4_OK) {
            relay_->fail(status);
            relay_->phase = Phase::done;
            return;
        }
        relay_->session = Session(session);
        relay_->thread = std::thread([relay = relay_.get()] { relay->run(); });
    }

    std::unique_ptr<Relay> relay_;
};

inline Stream Session::stream(const GenerateOptions &options) const { return Stream(get(), options); }
inline Stream Session::ask(std::string_view text, const GenerateOptions &options) const
{
    return Stream(get(), options, NVFP4_session_chat, text);
}
inline Stream Session::ask(std::string_view text, const ChatOptions &chat, const GenerateOptions &options) const
{
    return Stream(get(), options, NVFP4_session_chat, text, &chat);
}
inline Stream Session::ask_messages(std::string_view messages, const GenerateOptions &options) const
{
    return Stream(get(), options, NVFP4_session_chat_messages, messages);
}
inline Stream Session::ask_messages(std::string_view messages, const ChatOptions &chat, const GenerateOptions &options) const
{
    return Stream(get(), options, NVFP4_session_chat_messages, messages, &chat);
}

/** Not part of the interface. */
namespace detail {

inline std::vector<NVFP4_Session *> handles(Span<Session *> sessions)
{
    std::vector<NVFP4_Session *> handles;
    handles.reserve(sessions.size());
    for (const Session *session : sessions)
        handles.push_back(session == nullptr ? nullptr : session->get());
    return handles;
}

inline Error not_one_each(std::size_t count, const char *what, std::size_t sessions)
{
    return Error(NVFP4_INVALID_ARGUMENT, std::to_string(count) + what + std::to_string(sessions) + " sessions");
}

} // namespace detail

/**
 * Appends `tokens[i]` to `*sessions[i]` and runs all of them in one pass over the weights. With `statuses`, which gets one
 * element for each, sessions that cannot be run are left out.
 */
inline Result<void> step(Span<Session *> sessions, Span<std::int32_t> tokens, const NVFP4_CallOptions *call = nullptr,
                         std::vector<NVFP4_Status> *statuses = nullptr)
{
    if (sessions.size() != tokens.size())
        return detail::failure<void>(detail::not_one_each(tokens.size(), " tokens for ", sessions.size()));
    if (statuses != nullptr)
        statuses->assign(sessions.size(), NVFP4_OK);
    return check(NVFP4_session_step(detail::handles(sessions).data(), tokens.data(), tokens.size(), call,
                                    statuses != nullptr ? statuses->data() : nullptr));
}

/**
 * As step(), and returns the next token of each session, which is not appended, or -1 for a session that was left out.
 * `options` say how tokens are chosen: one for each session, one for all, or none for the argmax. On a GPU no logits are
 * copied to the host.
 */
inline Result<std::vector<std::int32_t>> step_sample(Span<Session *> sessions, Span<std::int32_t> tokens,
                                                     Span<GenerateOptions> options = {},
                                                     const NVFP4_CallOptions *call = nullptr,
                                                     std::vector<NVFP4_Status> *statuses = nullptr)
{
    using Tokens = std::vector<std::int32_t>;
    const std::size_t count = sessions.size();
    if (count != tokens.size())
        return detail::failure<Tokens>(detail::not_one_each(tokens.size(), " tokens for ", count));
    if (options.size() > 1 && options.size() != count)
        return detail::failure<Tokens>(detail::not_one_each(options.size(), " options for ", count));
    std::vector<std::unique_ptr<detail::PlainOptions>> given;
    for (std::size_t i = 0; i < options.size(); i++)
        given.push_back(std::make_unique<detail::PlainOptions>(options.data()[i]));
    std::vector<const NVFP4_GenerateOptions *> each(count);
    for (std::size_t i = 0; i < count && options.size() > 0; i++)
        each[i] = &given[options.size() > 1 ? i : 0]->plain;
    Tokens next(count, -1);
    if (statuses != nullptr)
        statuses->assign(count, NVFP4_OK);
    NVFP4_Status status = NVFP4_session_step_sample(detail::handles(sessions).data(), tokens.data(), count, each.data(), call, next.data(),
                                                    statuses != nullptr ? statuses->data() : nullptr);
    for (const auto &one : given)
        status = one->processor.after(status);
    return detail::result(status, std::move(next));
}

/**
 * Texts that generations are held to: those whose options have it as `grammar`, `options.grammar = grammar.get()`, give a text that fits.
 * Never changes; any number of generations may follow it at the same time.
 */
class Grammar : public detail::Handle<NVFP4_Grammar, NVFP4_grammar_retain, NVFP4_grammar_release> {
public:
    using Handle::Handle;

    /** Compiles `source` for a model. `kind` is one of NVFP4_GRAMMAR_*. */
    static Result<Grammar> create(const Model &model, std::string_view source, std::int32_t kind = NVFP4_GRAMMAR_JSON_SCHEMA)
    {
        NVFP4_GrammarOptions options;
        detail::filled(NVFP4_grammar_options_init(&options, sizeof(NVFP4_GrammarOptions)));
        options.kind = kind;
        Grammar out;
        return detail::result(NVFP4_grammar_create(model.get(), &options, source.data(), source.size(), out.put()), std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Grammar(const Model &model, std::string_view source, std::int32_t kind = NVFP4_GRAMMAR_JSON_SCHEMA)
        : Grammar(create(model, source, kind))
    {
    }
#endif

    /** A second owner of the same grammar. */
    Result<Grammar> clone() const { return again<Grammar>(); }
};

/**
 * A LoRA adapter of a model. Sessions whose options have it, `options.adapter = adapter.get()`, run with it; any number of
 * them, beside others with other adapters and without one.
 */
class Adapter : public detail::Handle<NVFP4_Adapter, NVFP4_adapter_retain, NVFP4_adapter_release> {
public:
    using Handle::Handle;

    /** Loads the adapter in a directory that `nvfp4 train --adapter` or peft wrote. */
    static Result<Adapter> load(const Model &model, std::string_view path, const NVFP4_CallOptions *call = nullptr)
    {
        Adapter out;
        return detail::result(NVFP4_adapter_load(model.get(), path.data(), path.size(), call, out.put()), std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Adapter(const Model &model, std::string_view path) : Adapter(load(model, path)) {}
#endif

    /** Its name, rank, projections, bytes, identity and sessions, as JSON. */
    Result<std::string> info() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_adapter_info(get(), buffer, capacity, length);
        });
    }
    /** Waits until no session uses it, so that reset() frees its memory at once. */
    Result<void> wait(const NVFP4_CallOptions *call = nullptr) const { return check(NVFP4_adapter_wait(get(), call)); }
    /** A second owner of the same adapter. */
    Result<Adapter> clone() const { return again<Adapter>(); }
};

/** Follows one sequence of tokens: returns the text that each completes, and says when the sequence ends. */
class Detokenizer : public detail::Handle<NVFP4_Detokenizer, NVFP4_detokenizer_retain, NVFP4_detokenizer_release> {
public:
    using Handle::Handle;

    /** The result of a token. */
    struct Text {
        /** Valid until the detokenizer is used again. */
        std::string_view text;
        /** One of NVFP4_FINISH_*; NVFP4_FINISH_NONE while the sequence goes on. */
        std::int32_t finish;
    };

    /** Continues after `tokens`, and ends where generating with `options` would. */
    static Result<Detokenizer> create(const Model &model, Span<std::int32_t> tokens = {}, const GenerateOptions &options = {})
    {
        const detail::PlainOptions given(options);
        Detokenizer out;
        return detail::result(NVFP4_detokenizer_create(model.get(), tokens.data(), tokens.size(), &given.plain, out.put()),
                              std::move(out));
    }
#ifndef NVFP4_NO_EXCEPTIONS
    explicit Detokenizer(const Model &model, Span<std::int32_t> tokens = {}, const GenerateOptions &options = {})
        : Detokenizer(create(model, tokens, options))
    {
    }
#endif

    /** A second owner of the same detokenizer. */
    Result<Detokenizer> clone() const { return again<Detokenizer>(); }
    /** Adds the next token. */
    Result<Text> push(std::int32_t token)
    {
        const char *text = nullptr;
        std::size_t length = 0;
        Text out{{}, NVFP4_FINISH_NONE};
        const NVFP4_Status status = NVFP4_detokenizer_push(get(), token, &text, &length, &out.finish);
        out.text = std::string_view(text, length);
        return detail::result(status, std::move(out));
    }
    /** Adds a token to each of several detokenizers, which are distinct, in one call; none has changed if it fails. */
    static Result<std::vector<Text>> push(Span<Detokenizer *> detokenizers, Span<std::int32_t> tokens)
    {
        const std::size_t count = detokenizers.size();
        if (count != tokens.size())
            return detail::failure<std::vector<Text>>(
                Error(NVFP4_INVALID_ARGUMENT, std::to_string(tokens.size()) + " tokens for " + std::to_string(count) + " detokenizers"));
        std::vector<NVFP4_Detokenizer *> plain;
        plain.reserve(count);
        for (Detokenizer *one : detokenizers)
            plain.push_back(one->get());
        std::vector<const char *> texts(count);
        std::vector<std::size_t> lengths(count);
        std::vector<std::int32_t> finishes(count);
        const NVFP4_Status status =
            NVFP4_detokenizers_push(plain.data(), tokens.data(), count, texts.data(), lengths.data(), finishes.data());
        std::vector<Text> out;
        out.reserve(count);
        for (std::size_t i = 0; i < count; i++)
            out.push_back({std::string_view(texts[i], lengths[i]), finishes[i]});
        return detail::result(status, std::move(out));
    }
    /** Ends the sequence, and returns the text that was held back. */
    Result<std::string_view> finish()
    {
        const char *text = nullptr;
        std::size_t length = 0;
        const NVFP4_Status status = NVFP4_detokenizer_finish(get(), &text, &length);
        return detail::result(status, std::string_view(text, length));
    }
};

/** How to train; the fields of the C struct, with their defaults, except the texts. */
struct TrainerOptions : NVFP4_TrainerOptions {
    TrainerOptions() : NVFP4_TrainerOptions()
    {
        detail::filled(NVFP4_trainer_options_init(this, sizeof(NVFP4_TrainerOptions)));
    }

    /** All settings as a JSON object; used instead of the pointer `config`. */
    std::string config_json;
    /** The path of a teacher; used instead of the pointer `teacher`. */
    std::string teacher_path;
};

/**
 * Documents that go through a model together. The label of a token is the one that should follow; negative for none. The arrays must
 * outlive the call.
 */
struct MicroBatch {
    Span<std::int32_t> tokens, labels;
    /** Number of tokens of each document; empty if all tokens are one document. */
    Span<std::size_t> document_lengths;
    /** Weight of each label in the loss; empty if all are 1. */
    Span<float> weights = {};
};

/** Not part of the interface. */
namespace detail {

/** TrainerOptions as the C struct, valid as long as `options` lives. */
inline NVFP4_TrainerOptions plain(const TrainerOptions &options)
{
    NVFP4_TrainerOptions plain = options;
    plain.config = options.config_json.empty() ? nullptr : options.config_json.data();
    plain.config_length = options.config_json.size();
    plain.teacher = options.teacher_path.empty() ? nullptr : options.teacher_path.data();
    plain.teacher_length = options.teacher_path.size();
    return plain;
}

/** Whether every token has a label, and a weight if any has. */
inline bool paired(Span<MicroBatch> batches)
{
    for (const MicroBatch &batch : batches)
        if (batch.tokens.size() != batch.labels.size() || (batch.weights.size() != 0 && batch.weights.size() != batch.labels.size()))
            return false;
    return true;
}

inline Error unpaired()
{
    return Error(NVFP4_INVALID_ARGUMENT, "a batch has another number of labels, or of weights, than of tokens; each token takes one");
}

inline std::vector<NVFP4_MicroBatch> plain(Span<MicroBatch> batches)
{
    std::vector<NVFP4_MicroBatch> plain;
    plain.reserve(batches.size());
    for (const MicroBatch &b : batches)
        plain.push_back({b.tokens.data(), b.labels.data(), b.tokens.size(), b.document_lengths.data(), b.document_lengths.size(),
                         b.weights.size() == 0 ? nullptr : b.weights.data()});
    return plain;
}

} // namespace detail

/** A model's predictions against labels and against its teacher's, in nats. */
struct Comparison {
    double loss = 0;
    double divergence = 0;
};

/** Trains a dense model, with weights and both moments of AdamW in 4 bits by default. One call at a time may use it. */
class Trainer : public detail::Handle<NVFP4_Trainer, NVFP4_trainer_retain, NVFP4_trainer_release> {
public:
    using Handle::Handle;

    /** A trainer of the model in a directory or file. */
    static Result<Trainer> create(std::string_view path, const TrainerOptions &options = TrainerOptions(),
                                  const NVFP4_CallOptions *call = nullptr)
    {
        const NVFP4_TrainerOptions plain = detail::plain(options);
        Trainer out;
        return detail::result(NVFP4_trainer_create(path.data(), path.size(), &plain, call, out.put()), std::move(out));
    }

    /**
     * Resumes from the last checkpoint in `directory`, with its settings; `path` is the model that training began with. The options may
     * name a device.
     */
    static Result<Trainer> resume(std::string_view path, std::string_view directory, const TrainerOptions &options = TrainerOptions(),
                                  const NVFP4_CallOptions *call = nullptr)
    {
        const NVFP4_TrainerOptions plain = detail::plain(options);
        Trainer out;
        return detail::result(NVFP4_trainer_resume(path.data(), path.size(), directory.data(), directory.size(), &plain, call, out.put()),
                              std::move(out));
    }

#ifndef NVFP4_NO_EXCEPTIONS
    explicit Trainer(std::string_view path, const TrainerOptions &options = TrainerOptions(), const NVFP4_CallOptions *call = nullptr)
        : Trainer(create(path, options, call))
    {
    }
#endif

    /** A second owner of the same trainer. */
    Result<Trainer> clone() const { return again<Trainer>(); }

    /** Takes one step by all micro-batches together. */
    Result<NVFP4_StepReport> step(Span<MicroBatch> batches, const NVFP4_CallOptions *call = nullptr)
    {
        if (!detail::paired(batches))
            return detail::failure<NVFP4_StepReport>(detail::unpaired());
        const std::vector<NVFP4_MicroBatch> plain = detail::plain(batches);
        NVFP4_StepReport report{};
        report.struct_size = sizeof report;
        const NVFP4_Status status = NVFP4_trainer_step(get(), plain.data(), plain.size(), sizeof(NVFP4_MicroBatch), call, &report);
        return detail::result(status, report);
    }
    /** Mean cross-entropy of the labels that count, by the delivered weights or by the full stored precision. */
    Result<double> evaluate(Span<MicroBatch> batches, bool delivered = true, const NVFP4_CallOptions *call = nullptr)
    {
        if (!detail::paired(batches))
            return detail::failure<double>(detail::unpaired());
        const std::vector<NVFP4_MicroBatch> plain = detail::plain(batches);
        return detail::value<double>([&](double *out) {
            return NVFP4_trainer_evaluate(get(), plain.data(), plain.size(), sizeof(NVFP4_MicroBatch), delivered, call, out);
        });
    }
    /** Mean cross-entropy, and mean divergence from the predictions of the trainer's teacher. */
    Result<Comparison> compare(Span<MicroBatch> batches, bool delivered = true, const NVFP4_CallOptions *call = nullptr)
    {
        if (!detail::paired(batches))
            return detail::failure<Comparison>(detail::unpaired());
        const std::vector<NVFP4_MicroBatch> plain = detail::plain(batches);
        Comparison out;
        const NVFP4_Status status = NVFP4_trainer_compare(get(), plain.data(), plain.size(), sizeof(NVFP4_MicroBatch), delivered, call, &out.loss,
                                                          &out.divergence);
        return detail::result(status, out);
    }
    /** A description of the trainer, as JSON. */
    Result<std::string> info() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_trainer_info(get(), buffer, capacity, length);
        });
    }
    /** Writes a checkpoint with `data`, which is JSON or empty, and removes all but the last `keep` checkpoints there. */
    Result<void> save(std::string_view directory, std::string_view data = {}, std::size_t keep = 2,
                      const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_trainer_save(get(), directory.data(), directory.size(), data.data(), data.size(), keep, call));
    }
    /** The JSON that was saved last, or with the checkpoint that this was resumed from. */
    Result<std::string> data() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_trainer_data(get(), buffer, capacity, length);
        });
    }
    /** Writes the delivered model to a directory in ModelOpt's layout. */
    Result<void> export_directory(std::string_view path, std::int32_t tables = NVFP4_TABLES_AUTO, bool replace = false,
                                  const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_trainer_export_directory(get(), path.data(), path.size(), tables, replace, call));
    }
    /** Writes the delivered model to a `.dat` file, every tensor in its type in the `.dat` file that training began with. */
    Result<void> export_dat(std::string_view path, const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_trainer_export_dat(get(), path.data(), path.size(), call));
    }
    /** Writes the adapters to a directory in peft's format; `base` is the name of the base model there. */
    Result<void> export_adapter(std::string_view path, std::string_view base, bool replace = false,
                                const NVFP4_CallOptions *call = nullptr)
    {
        return check(NVFP4_trainer_export_adapter(get(), path.data(), path.size(), base.data(), base.size(), replace, call));
    }
    /** The model under training, in the trainer's memory. It follows each step, and its sessions go on with the new weights. */
    Result<Model> model(const NVFP4_CallOptions *call = nullptr)
    {
        Model out;
        return detail::result(NVFP4_trainer_model(get(), call, out.put()), std::move(out));
    }
};

/** How to read data; the fields of the C struct, with their defaults, except the separator. */
struct DataOptions : NVFP4_DataOptions {
    DataOptions() : NVFP4_DataOptions()
    {
        detail::filled(NVFP4_data_options_init(this, sizeof(NVFP4_DataOptions)));
    }
    /** Separator of the documents of a text; empty for none. */
    std::string separates;
};

/** A document of training data, with a label for each token: the next token, or -1, and its weight in the loss. */
struct Document {
    std::vector<std::int32_t> tokens, labels;
    std::vector<float> weights;
};

/** The documents of files, as `nvfp4 train` reads them. Any number of threads may use it. */
class Data : public detail::Handle<NVFP4_Data, NVFP4_data_retain, NVFP4_data_release> {
public:
    using Handle::Handle;

    /** Reads files for the model in a directory or file, whose weights are not read. */
    static Result<Data> read(std::string_view model, Span<std::string_view> files, const DataOptions &options = DataOptions(),
                             const NVFP4_CallOptions *call = nullptr)
    {
        NVFP4_DataOptions plain = options;
        plain.separator = options.separates.empty() ? nullptr : options.separates.data();
        plain.separator_length = options.separates.size();
        std::vector<const char *> paths;
        std::vector<std::size_t> lengths;
        for (const std::string_view file : files) {
            paths.push_back(file.data());
            lengths.push_back(file.size());
        }
        Data out;
        return detail::result(NVFP4_data_read(model.data(), model.size(), paths.data(), lengths.data(), paths.size(), &plain, call, out.put()),
                              std::move(out));
    }

    /** A second owner of the same data. */
    Result<Data> clone() const { return again<Data>(); }

    /** The number of documents. */
    Result<std::size_t> count() const
    {
        return detail::value<std::size_t>([&](std::size_t *out) { return NVFP4_data_count(get(), out); });
    }
    /** A document. */
    Result<Document> document(std::size_t index) const
    {
        std::size_t length = 0;
        NVFP4_Status status = NVFP4_data_document(get(), index, nullptr, nullptr, nullptr, 0, &length);
        Document out;
        if (status == NVFP4_OK) {
            out.tokens.resize(length);
            out.labels.resize(length);
            out.weights.resize(length);
            status = NVFP4_data_document(get(), index, out.tokens.data(), out.labels.data(), out.weights.data(), length, &length);
        }
        return detail::result(status, std::move(out));
    }
    /** A document as JSON: its tokens with their texts, and which are learned. */
    Result<std::string> mask(std::size_t index) const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_data_mask(get(), index, buffer, capacity, length);
        });
    }
    /** A summary of the files and rows, as JSON. */
    Result<std::string> report() const
    {
        return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_data_report(get(), buffer, capacity, length);
        });
    }
};

/** How to store a weight and its moments; the fields of the C struct, with their defaults. */
struct OptimizerOptions : NVFP4_OptimizerOptions {
    OptimizerOptions() : NVFP4_OptimizerOptions()
    {
        detail::filled(NVFP4_optimizer_options_init(this, sizeof(NVFP4_OptimizerOptions)));
    }
};

/** The settings of a step of AdamW; the fields of the C struct, with their defaults. */
struct StepOptions : NVFP4_StepOptions {
    StepOptions() : NVFP4_StepOptions()
    {
        detail::filled(NVFP4_step_options_init(this, sizeof(NVFP4_StepOptions)));
    }
};

/** A weight as NVFP4: codes, block scales and the global scale. */
struct Delivered {
    Tensor codes, scales;
    float global_scale = 1;
};

/** A weight `[.., K]` with the moments of its AdamW, for passes computed elsewhere. */
class Optimizer : public detail::Handle<NVFP4_OptimizerState, NVFP4_optimizer_retain, NVFP4_optimizer_release> {
public:
    using Handle::Handle;

    static Result<Optimizer> create(const Tensor &weight, const NVFP4_OptimizerOptions &options = OptimizerOptions())
    {
        Optimizer out;
        return detail::result(NVFP4_optimizer_create(weight.get(), &options, out.put()), std::move(out));
    }

    /** Restores the result of save(), on any device. */
    static Result<Optimizer> restore(Span<std::uint8_t> state, std::int32_t device_type = NVFP4_DEVICE_CPU, std::int32_t device_index = 0)
    {
        Optimizer out;
        return detail::result(NVFP4_optimizer_restore(state.data(), state.size(), device_type, device_index, 0, out.put()),
                              std::move(out));
    }

#ifndef NVFP4_NO_EXCEPTIONS
    explicit Optimizer(const Tensor &weight, const NVFP4_OptimizerOptions &options = OptimizerOptions())
        : Optimizer(create(weight, options))
    {
    }
#endif

    /** A second owner of the same optimizer. */
    Result<Optimizer> clone() const { return again<Optimizer>(); }

    /**
     * Takes a step by a gradient of the weight's shape. Returns the number of weights whose stored code changed, and whose delivered code
     * changed.
     */
    Result<std::pair<std::uint64_t, std::uint64_t>> step(const Tensor &gradient, const NVFP4_StepOptions &options = StepOptions())
    {
        std::pair<std::uint64_t, std::uint64_t> changed;
        const NVFP4_Status status = NVFP4_optimizer_step(get(), gradient.get(), &options, &changed.first, &changed.second);
        return detail::result(status, changed);
    }
    /** Number of steps taken. */
    Result<std::uint64_t> steps() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_optimizer_size(get(), out, nullptr); });
    }
    /** Bytes held. */
    Result<std::uint64_t> bytes() const
    {
        return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_optimizer_size(get(), nullptr, out); });
    }
    /** The weight in full stored precision, or by the NVFP4 codes alone. */
    Result<Tensor> weight(bool delivered = false, std::int32_t dtype = NVFP4_DTYPE_FLOAT32) const
    {
        void *out = nullptr;
        const NVFP4_Status status = NVFP4_optimizer_weight(get(), delivered, dtype, &out);
        return detail::result(status, Tensor(static_cast<NVFP4_Tensor *>(out)));
    }
    /** The weight as NVFP4, in host memory. */
    Result<Delivered> delivered() const
    {
        Delivered out;
        const NVFP4_Status status = NVFP4_optimizer_delivered(get(), out.codes.put(), out.scales.put(), &out.global_scale);
        return detail::result(status, std::move(out));
    }
    /** The complete state, for restore(). */
    Result<std::vector<std::uint8_t>> save() const
    {
        return detail::items<std::uint8_t>([&](std::uint8_t *buffer, std::size_t capacity, std::size_t *length) {
            return NVFP4_optimizer_save(get(), buffer, capacity, length);
        });
    }
};

/** A seed of stochastic rounding, which gives every tensor and step its own random bits. */
inline Result<std::uint64_t> rounding_seed(std::uint64_t seed, std::uint64_t tensor, std::uint64_t step)
{
    return detail::value<std::uint64_t>([&](std::uint64_t *out) { return NVFP4_rounding_seed(seed, tensor, step, out); });
}

/** `x` `[.., K]` times the transpose of a weight `[N, K]`, whose values are rounded to 4 bits. */
inline Result<Tensor> ste_linear(const Tensor &x, const Tensor &weight)
{
    void *out = nullptr;
    const NVFP4_Status status = NVFP4_ste_linear(x.get(), weight.get(), &out);
    return detail::result(status, Tensor(static_cast<NVFP4_Tensor *>(out)));
}

/** The gradients of x and of weight, from the gradient of the product. */
inline Result<std::pair<Tensor, Tensor>> ste_linear_backward(const Tensor &x, const Tensor &weight, const Tensor &gradient)
{
    void *dx = nullptr, *dweight = nullptr;
    const NVFP4_Status status = NVFP4_ste_linear_backward(x.get(), weight.get(), gradient.get(), &dx, &dweight);
    return detail::result(status,
                          std::make_pair(Tensor(static_cast<NVFP4_Tensor *>(dx)), Tensor(static_cast<NVFP4_Tensor *>(dweight))));
}

/** The drop-in functions for TorchSharp hosts, whose results are tensors of the same kind as their arguments. */
namespace drop_in {

/** Quantizes to single-level codes and scales. */
inline Result<std::pair<Tensor, Tensor>> quantize(const Tensor &input)
{
    void *codes = nullptr, *scales = nullptr;
    NVFP4_quantize(input.get(), &codes, &scales);
    return detail::result(NVFP4_last_status(), std::pair<Tensor, Tensor>(static_cast<NVFP4_Tensor *>(codes),
                                                                         static_cast<NVFP4_Tensor *>(scales)));
}

/** Multiplies `mat1` uint8 `[M, K / 2]` by `mat2` uint8 `[K / 2, N]`, with swizzled scales. */
inline Result<Tensor> scaled_mm(const Tensor &mat1, const Tensor &mat2, const Tensor &scale_a, const Tensor &scale_b,
                                std::int8_t dtype = NVFP4_DTYPE_FLOAT32)
{
    void *product = NVFP4_scaled_mm(mat1.get(), mat2.get(), scale_a.get(), scale_b.get(), dtype);
    return detail::result(NVFP4_last_status(), Tensor(static_cast<NVFP4_Tensor *>(product)));
}

} // namespace drop_in
} // namespace returning or throwing
} // namespace nvfp4

#endif /* NVFP4_HPP */
