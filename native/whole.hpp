// Lossless coding of whole tensors; src/deltawire/codec/reference.py is the twin.
//
// An element's exponent bits are far from uniform, the others nearly uniform. The exponent is coded
// as its rank among the block's most frequent ones, in four decisions with the planes of a delta;
// the other bits are packed without coding. src/deltawire/codec/anchors.py describes the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "body.hpp"
#include "simd.hpp"
#include "sizes.hpp"

namespace deltawire {

// The ranked bits of an element: `width` bits, at most 8, above the `low` lowest.
struct Field {
  unsigned low = 0;
  unsigned width = 0;

  // Returns whether an element of `element` bits has these bits.
  bool fits(unsigned element) const {
    return width > 0 && width <= 8 && low < element && low + width <= element;
  }
};

template <typename Bits>
std::vector<std::vector<std::uint8_t>> encode_whole(const Bits* bits, std::size_t count,
                                                    Field field, unsigned threads);

// Decodes `count` elements into `bits`. Throws std::invalid_argument for a body of another count;
// the contents of `bits` are then undefined.
template <typename Bits>
void decode_whole(const Body& body, std::size_t count, Field field, unsigned threads, Bits* bits);

}  // namespace deltawire
