#include "simd.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace deltawire {
namespace {

Simd best_path() {
#ifdef DELTAWIRE_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi2")) {
    return Simd::avx512;
  }
  if (avx2) return Simd::avx2;
#endif
  return Simd::portable;
}

}  // namespace

Simd simd_path() {
  const char* wish = std::getenv("DELTAWIRE_SIMD");
  const Simd best = best_path();
  if (wish == nullptr) return best;
  const std::string_view name(wish);
  if (name == "portable") return Simd::portable;
  if (name == "avx2") return std::min(best, Simd::avx2);
  return best;
}

}  // namespace deltawire
