// The program around the example of a coroutine in nvfp4.hpp.
#include <iostream>
#include <nvfp4.hpp>

struct Task {
    struct promise_type {
        Task get_return_object() { return {}; }
        std::suspend_never initial_suspend() noexcept { return {}; }
        std::suspend_never final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() { std::terminate(); }
    };
};

Task answers(nvfp4::Dispatcher &dispatcher, nvfp4::Session &session)
{
/* here */
}
