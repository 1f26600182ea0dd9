// Selects a kernel's vector path. All give the same bytes; the portable one runs everywhere.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define DELTAWIRE_X86 1
#include <immintrin.h>
#define DELTAWIRE_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,bmi,bmi2,popcnt,lzcnt")))
#define DELTAWIRE_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#endif

namespace deltawire {

enum class Simd { portable, avx2, avx512 };

// Returns this machine's best path, or the one that DELTAWIRE_SIMD names if the machine has it.
Simd simd_path();

}  // namespace deltawire
