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

#include "body.hpp"
#include "simd.hpp"
#include "sizes.hpp"

namespace deltawire {

// The bits of an element that are ranked: `width` of them, at most 8, above the `low` lowest.
struct Field {
  unsigned low = 0;
  unsigned width = 0;

  // Whether an element of so many bits has such bits.
  bool fits(unsigned element) const {
    return width > 0 && width <= 8 && low < element && low + width <= element;
  }
};

template <typename Bits>
std::vector<std::vector<std::uint8_t>> encode_whole(const Bits* bits, std::size_t count,
                                                    Field field, unsigned threads);

// Into `bits`, all of them. Throws std::invalid_argument for a body that is not one of `count`
// elements; what was written by then means nothing.
template <typename Bits>
void decode_whole(const Body& body, std::size_t count, Field field, unsigned threads, Bits* bits);

}  // namespace deltawire
