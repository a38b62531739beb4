// What nvfp4.hpp's first example stands in.
#include <iostream>
#include <nvfp4.hpp>

int main()
{
/* here */
}
