// Replaces old bits by new ones in weights that are being served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deltawire {

enum class Exchanged { done, not_old, not_new, outside };

// An array `live` of `size` elements and the changes in it: from the previous stretch's `last` (0
// for the first) up to `last`.
template <typename Bits>
struct Stretch {
  Bits* live;
  std::size_t size;
  std::size_t last;
};

// Writes `fresh[i]` to `live[index[i]]` of its stretch for all changes, if `old[i]` is there, and
// verifies it by reading it back. The positions must be distinct. On any failure nothing is
// changed, and `failed` is the number of a stretch at fault. Stretches are in order, and the last
// one's end is the number of changes. `Bits` is std::uint8_t, std::uint16_t, std::uint32_t or
// std::uint64_t.
template <typename Bits>
Exchanged exchange(const std::vector<Stretch<Bits>>& stretches, const std::int64_t* index,
                   const Bits* old, const Bits* fresh, unsigned threads, std::size_t& failed);

}  // namespace deltawire
