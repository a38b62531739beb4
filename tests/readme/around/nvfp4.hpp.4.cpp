// The program around the example of a dispatcher in nvfp4.hpp.
#include <iostream>
#include <nvfp4.hpp>

void answer(nvfp4::Model &model, nvfp4::Session &session)
{
/* here */
}
