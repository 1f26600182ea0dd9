// The additive digest of a model's bits; src/deltawire/codec/reference.py defines the mix.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltawire {

struct Lanes {
  std::uint64_t lane0 = 0;
  std::uint64_t lane1 = 0;
};

// Returns the sum over `count` consecutive elements, the first of which has flat index `start`.
// `Bits` is std::uint8_t, std::uint16_t, std::uint32_t or std::uint64_t.
template <typename Bits>
Lanes digest(const Bits* bits, std::size_t count, std::uint64_t key, std::uint64_t start);

struct RoundedLanes {
  Lanes sum;
  bool numbers = true;  // false if an element is no number, whose rounding is not one of IEEE 754
};

// As digest, for the bf16 bits of `values` rounded to nearest, ties to even.
RoundedLanes digest_rounded(const float* values, std::size_t count, std::uint64_t key,
                            std::uint64_t start);

// Returns the sum over `count` elements at the given flat indices.
template <typename Bits>
Lanes digest_at(const std::int64_t* positions, const Bits* bits, std::size_t count,
                std::uint64_t key);

// Returns the change of the digest when the elements at `positions`, counted from `start`, change
// from `before` to `after`.
template <typename Bits>
Lanes digest_moves(const std::uint32_t* positions, const Bits* before, const Bits* after,
                   std::size_t count, std::uint64_t key, std::uint64_t start);

}  // namespace deltawire
