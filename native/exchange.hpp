// New bits in the place of old ones, in weights that are being served.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltawire {

enum class Exchanged { done, not_old, not_new, outside };

// Puts `fresh[i]` where `live[index[i]]` is, for `count` changes at different places, if `old[i]`
// is what lies there, and reads back that it lies there now. On any failure nothing is changed.
// `Bits` is std::uint8_t, std::uint16_t, std::uint32_t or std::uint64_t.
template <typename Bits>
Exchanged exchange(Bits* live, std::size_t size, const std::int64_t* index, const Bits* old,
                   const Bits* fresh, std::size_t count, unsigned threads);

}  // namespace deltawire
