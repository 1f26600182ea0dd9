// The body of a payload, after its header: the lengths of its blocks, then the blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace deltawire {

struct Body {
  const std::uint8_t* bytes;  // of the blocks
  std::size_t size;
  const std::uint32_t* lengths;
  std::size_t blocks;

  // Calls use(block, bytes, size) for each block. Throws std::invalid_argument, possibly after some
  // calls, unless the lengths of the blocks add up to that of the bytes.
  template <typename Use>
  void each(const Use& use) const {
    std::size_t at = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t length = lengths[b];
      if (length > size - at) throw std::invalid_argument("the payload ends within a block");
      use(b, bytes + at, length);
      at += length;
    }
    if (at != size) throw std::invalid_argument("the payload has bytes after its last block");
  }
};

}  // namespace deltawire
