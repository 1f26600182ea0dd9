// Which vector path a kernel takes. Each gives the same bytes; the portable one runs everywhere.
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

// The best path that this machine has, or the one that DELTAWIRE_SIMD names if it has that.
Simd simd_path();

}  // namespace deltawire
