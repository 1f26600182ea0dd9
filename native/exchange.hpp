// New bits in the place of old ones, in weights that are being served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deltawire {

enum class Exchanged { done, not_old, not_new, outside };

// Changes up to `last`, from where those of the stretch before it end, lie in `live`, which has
// `size` elements.
template <typename Bits>
struct Stretch {
  Bits* live;
  std::size_t size;
  std::size_t last;
};

// Puts `fresh[i]` where `live[index[i]]` of its stretch is, for all changes, at different places, if
// `old[i]` is what lies there, and reads back that it lies there now. On any failure nothing is
// changed, and `failed` is the number of a stretch at fault. Stretches are in order, and the last
// one's end is the number of changes. `Bits` is std::uint8_t, std::uint16_t, std::uint32_t or
// std::uint64_t.
template <typename Bits>
Exchanged exchange(const std::vector<Stretch<Bits>>& stretches, const std::int64_t* index,
                   const Bits* old, const Bits* fresh, unsigned threads, std::size_t& failed);

}  // namespace deltawire
