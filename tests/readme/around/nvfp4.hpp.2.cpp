// What nvfp4.hpp's example of a stream stands in.
#include <iostream>
#include <nvfp4.hpp>

int main()
{
    nvfp4::Session session(nvfp4::Model("Qwen3-0.6B-nvfp4"));
/* here */
}
