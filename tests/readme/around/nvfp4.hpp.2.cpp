// The program around the example of a stream in nvfp4.hpp.
#include <iostream>
#include <nvfp4.hpp>

int main()
{
    nvfp4::Session session(nvfp4::Model("Qwen3-0.6B-nvfp4"));
/* here */
}
