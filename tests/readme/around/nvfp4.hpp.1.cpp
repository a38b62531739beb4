// The program around the first example of nvfp4.hpp.
#include <iostream>
#include <nvfp4.hpp>

int main()
{
/* here */
}
