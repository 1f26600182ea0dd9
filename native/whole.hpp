// Lossless coding of whole tensors; src/deltawire/codec/reference.py is the twin.
//
// Of an element's bits, those of the exponent are far from even, and the others nearly so. The
// exponent becomes its rank among the block's most frequent ones, four decisions by the same
// planes as a delta's; the other bits are packed as they are. src/deltawire/codec/anchors.py has
// the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd.hpp"

namespace deltawire {

constexpr std::size_t kWholeBlock = std::size_t{1} << 20;  // elements

// The bits of an element that are ranked: `width` of them, at most 8, above the `low` lowest.
struct Field {
  unsigned low = 0;
  unsigned width = 0;
};

template <typename Bits>
std::vector<std::vector<std::uint8_t>> encode_whole(const Bits* bits, std::size_t count,
                                                    Field field, unsigned threads);

// Block b lies at `blocks[b]`, of `sizes[b]` bytes. False if one is not a block of so many elements.
template <typename Bits>
bool decode_whole(const std::vector<const std::uint8_t*>& blocks,
                  const std::vector<std::size_t>& sizes, std::size_t count, Field field,
                  unsigned threads, Bits* bits);

}  // namespace deltawire
