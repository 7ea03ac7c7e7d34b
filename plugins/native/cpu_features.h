// Which instruction set kernels use, chosen at run time.
#pragma once

#include <string>

namespace specexport {

// Later is better. Each kernel has the first three; kAvx2 needs FMA and F16C too, kAvx512Vnni needs F, BW, DQ, VL and
// VNNI. kAmx is kAvx512Vnni and int8 tiles, which the system must grant; a kernel without tiles takes kAvx512Vnni's.
enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512Vnni = 2, kAmx = 3 };

// The one in use: the machine's best unless set_isa chose another.
Isa isa();

// "auto", "amx", "avx512_vnni", "avx2" or "portable"; false, and no change, for another name or one this machine lacks.
bool set_isa(const char* name);

const char* isa_name(Isa isa);

}  // namespace specexport
