// Lossless deltas, coded per class of the old weight; src/deltawire/codec/reference.py is the twin.
//
// Both sides hold the old weight. How often an optimizer step moves a float's published bits
// depends on the size of its unit in the last place, so on its exponent: elements are ranked within
// their exponent's class, and each class's gaps, signs and magnitudes have adaptive codes of their
// own. Blocks are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deltawire {

constexpr std::size_t kBlock = std::size_t{1} << 20;  // elements
constexpr unsigned kClasses = 12;

// How an element's bits divide: `exponent` bits above `mantissa` bits below a sign bit. Both are 0
// for integers, which are one class.
struct Layout {
  unsigned mantissa = 0;
  unsigned exponent = 0;
};

enum class Simd { portable, avx2, avx512 };

// The best path that this machine has, or the one that DELTAWIRE_SIMD names if it has that.
Simd simd_path();

// A block of at most kBlock elements. The number of changed elements is added to `changed`.
template <typename Bits>
std::vector<std::uint8_t> encode_block(const Bits* base, const Bits* target, std::size_t count,
                                       Layout layout, std::uint64_t& changed, Simd simd);

// The changes of a block, ascending. Writes at most `room` of them, positions from `start`, and
// returns how many, or -1 if the payload is not one for such a base or holds more than `room`.
template <typename Bits>
std::int64_t decode_block(const std::uint8_t* payload, std::size_t size, const Bits* base,
                          std::size_t count, Layout layout, std::int64_t start,
                          std::int64_t* positions, Bits* bits, std::size_t room, Simd simd);

}  // namespace deltawire
