// Operations on single elements and on groups of 64: order, exponent class, difference.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "delta.hpp"
#include "planes.hpp"
#include "simd.hpp"

#define DELTAWIRE_INLINE inline __attribute__((always_inline))

namespace deltawire {

constexpr std::size_t kGroup = 64;       // elements per 64-bit mask
constexpr std::size_t kChunk = 64 * 64;  // elements whose contexts are held at a time

template <typename Bits>
constexpr Bits kSign = Bits(Bits{1} << (8 * sizeof(Bits) - 1));

// All ones if the highest bit is set, otherwise 0.
template <typename Bits>
DELTAWIRE_INLINE Bits all_if_negative(Bits u) {
  return Bits(Bits{0} - Bits(u >> (8 * sizeof(Bits) - 1)));
}

// Maps floats to integers of the same order, with -0 just below +0. Integers map to themselves.
template <typename Bits>
DELTAWIRE_INLINE Bits ordered(Bits u, bool floats) {
  const Bits flip = Bits(all_if_negative(u) | kSign<Bits>);
  return floats ? Bits(u ^ flip) : u;
}

template <typename Bits>
DELTAWIRE_INLINE Bits unordered(Bits o, bool floats) {
  const Bits flip = Bits(Bits(~all_if_negative(o)) | kSign<Bits>);
  return floats ? Bits(o ^ flip) : o;
}

// Class 0 holds the exponents above `top`, the largest exponent of a changed element. Each exponent
// from `top` down is one class, and the last class holds all smaller ones.
template <typename Bits>
DELTAWIRE_INLINE void classes_of(const Bits* base, std::size_t count, Layout layout, unsigned top,
                                 std::uint8_t* classes) {
  using Lane = std::conditional_t<sizeof(Bits) == 1, std::uint16_t, Bits>;
  const Lane mask = Lane((Lane{1} << layout.exponent) - 1);
  const Lane above = Lane(top + 1);
  const Lane last = Lane{kContexts - 1};
  for (std::size_t i = 0; i < count; ++i) {
    const Lane exponent = Lane(Lane(base[i] >> layout.mantissa) & mask);
    const Lane number = Lane(std::max(above, exponent) - exponent);
    classes[i] = static_cast<std::uint8_t>(std::min(number, last));
  }
}

// Returns a mask of those of up to 64 elements that differ.
template <typename Bits>
inline std::uint64_t differences(const Bits* base, const Bits* target, std::size_t count) {
  if (std::memcmp(base, target, count * sizeof(Bits)) == 0) return 0;
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < count; ++i) mask |= std::uint64_t{base[i] != target[i]} << i;
  return mask;
}

// The indices 0 to kChunk - 1, from which each path compresses the indices of set bits.
constexpr std::array<std::uint16_t, kChunk> kIndices = [] {
  std::array<std::uint16_t, kChunk> all{};
  for (std::size_t i = 0; i < kChunk; ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}();

// A vector path implements: masks of which of 64 elements differ, and of which of 64 bytes are
// greater than or equal to a value or have a bit set; setting a bit in the masked ones of 64 bytes;
// and writing the positions of a mask's set bits plus `first` to `out`, which has room for 64 more.
struct PortablePath {
  static constexpr Simd kSimd = Simd::portable;

  template <typename Bits>
  static std::uint64_t changed(const Bits* base, const Bits* target) {
    return differences(base, target, kGroup);
  }

  static std::uint64_t greater(const std::uint8_t* bytes, std::uint8_t limit) {
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < kGroup; ++i) mask |= std::uint64_t{bytes[i] > limit} << i;
    return mask;
  }

  static std::uint64_t equal(const std::uint8_t* bytes, std::uint8_t value) {
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < kGroup; ++i) mask |= std::uint64_t{bytes[i] == value} << i;
    return mask;
  }

  static std::uint64_t with_bit(const std::uint8_t* bytes, unsigned bit) {
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
      mask |= std::uint64_t{bytes[i] >> bit & 1U} << i;
    }
    return mask;
  }

  static void set_bit(std::uint8_t* bytes, unsigned bit, std::uint64_t mask) {
    for (std::size_t i = 0; i < kGroup; ++i) {
      bytes[i] |= static_cast<std::uint8_t>((mask >> i & 1) << bit);
    }
  }

  static DELTAWIRE_INLINE std::size_t indices(std::uint64_t mask, std::size_t first,
                                              std::uint16_t* out) {
    std::size_t count = 0;
    for (; mask != 0; mask &= mask - 1) {
      out[count++] =
          static_cast<std::uint16_t>(first + static_cast<std::size_t>(std::countr_zero(mask)));
    }
    return count;
  }
};

#ifdef DELTAWIRE_X86

struct Avx512Path {
  static constexpr Simd kSimd = Simd::avx512;

  template <typename Bits>
  DELTAWIRE_AVX512 static std::uint64_t changed(const Bits* base, const Bits* target) {
    constexpr std::size_t kLanes = 64 / sizeof(Bits);
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < kGroup; i += kLanes) {
      const __m512i a = _mm512_loadu_si512(base + i), b = _mm512_loadu_si512(target + i);
      std::uint64_t part;
      if constexpr (sizeof(Bits) == 1) part = _mm512_cmpneq_epi8_mask(a, b);
      if constexpr (sizeof(Bits) == 2) part = _mm512_cmpneq_epi16_mask(a, b);
      if constexpr (sizeof(Bits) == 4) part = _mm512_cmpneq_epi32_mask(a, b);
      if constexpr (sizeof(Bits) == 8) part = _mm512_cmpneq_epi64_mask(a, b);
      mask |= part << i;
    }
    return mask;
  }

  DELTAWIRE_AVX512 static std::uint64_t greater(const std::uint8_t* bytes, std::uint8_t limit) {
    return _mm512_cmpgt_epu8_mask(_mm512_loadu_si512(bytes),
                                  _mm512_set1_epi8(static_cast<char>(limit)));
  }

  DELTAWIRE_AVX512 static std::uint64_t equal(const std::uint8_t* bytes, std::uint8_t value) {
    return _mm512_cmpeq_epu8_mask(_mm512_loadu_si512(bytes),
                                  _mm512_set1_epi8(static_cast<char>(value)));
  }

  DELTAWIRE_AVX512 static std::uint64_t with_bit(const std::uint8_t* bytes, unsigned bit) {
    return _mm512_test_epi8_mask(_mm512_loadu_si512(bytes),
                                 _mm512_set1_epi8(static_cast<char>(1U << bit)));
  }

  DELTAWIRE_AVX512 static void set_bit(std::uint8_t* bytes, unsigned bit, std::uint64_t mask) {
    const __m512i bits = _mm512_maskz_set1_epi8(mask, static_cast<char>(1U << bit));
    _mm512_storeu_si512(bytes, _mm512_or_si512(_mm512_loadu_si512(bytes), bits));
  }

  DELTAWIRE_AVX512 static std::size_t indices(std::uint64_t mask, std::size_t first,
                                              std::uint16_t* out) {
    const auto low = static_cast<__mmask32>(mask), high = static_cast<__mmask32>(mask >> 32);
    const auto lows = static_cast<std::size_t>(std::popcount(low));
    const std::uint16_t* from = kIndices.data() + first;
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(low, _mm512_loadu_si512(from)));
    _mm512_storeu_si512(out + lows,
                        _mm512_maskz_compress_epi16(high, _mm512_loadu_si512(from + 32)));
    return lows + static_cast<std::size_t>(std::popcount(high));
  }
};

struct Avx2Path {
  static constexpr Simd kSimd = Simd::avx2;

  template <typename Bits>
  DELTAWIRE_AVX2 static std::uint64_t changed(const Bits* base, const Bits* target) {
    if constexpr (sizeof(Bits) != 2) {
      return differences(base, target, kGroup);
    } else {
      __m256i same[4];
      for (int i = 0; i < 4; ++i) {
        same[i] = _mm256_cmpeq_epi16(load(base + 16 * i), load(target + 16 * i));
      }
      return ~(joined(same[0], same[1]) | joined(same[2], same[3]) << 32);
    }
  }

  DELTAWIRE_AVX2 static std::uint64_t greater(const std::uint8_t* bytes, std::uint8_t limit) {
    const __m256i most = _mm256_set1_epi8(static_cast<char>(limit));
    std::uint64_t none = 0;
    for (int half = 0; half < 2; ++half) {
      const __m256i values = load(bytes + 32 * half);
      const __m256i at_most = _mm256_cmpeq_epi8(_mm256_max_epu8(values, most), most);
      none |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(at_most))}
              << (32 * half);
    }
    return ~none;
  }

  DELTAWIRE_AVX2 static std::uint64_t equal(const std::uint8_t* bytes, std::uint8_t value) {
    const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
    std::uint64_t mask = 0;
    for (int half = 0; half < 2; ++half) {
      const __m256i same = _mm256_cmpeq_epi8(load(bytes + 32 * half), wanted);
      mask |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(same))} << (32 * half);
    }
    return mask;
  }

  DELTAWIRE_AVX2 static std::uint64_t with_bit(const std::uint8_t* bytes, unsigned bit) {
    std::uint64_t mask = 0;
    for (int half = 0; half < 2; ++half) {
      const __m256i high = _mm256_sll_epi16(load(bytes + 32 * half),
                                            _mm_cvtsi32_si128(7 - static_cast<int>(bit)));
      mask |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(high))} << (32 * half);
    }
    return mask;
  }

  DELTAWIRE_AVX2 static void set_bit(std::uint8_t* bytes, unsigned bit, std::uint64_t mask) {
    PortablePath::set_bit(bytes, bit, mask);
  }

  DELTAWIRE_AVX2 static std::size_t indices(std::uint64_t mask, std::size_t first,
                                            std::uint16_t* out) {
    return PortablePath::indices(mask, first, out);
  }

 private:
  DELTAWIRE_AVX2 static __m256i load(const void* at) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(at));
  }
  DELTAWIRE_AVX2 static std::uint64_t joined(__m256i first, __m256i second) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
};

#endif  // DELTAWIRE_X86

}  // namespace deltawire
