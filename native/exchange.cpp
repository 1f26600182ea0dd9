#include "exchange.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel.hpp"

namespace deltawire {
namespace {

// The number of changes checked, written and read back at a time, so that their cache lines come
// from memory once and are in the first-level cache for the second and third pass.
constexpr std::size_t kBlock = 256;
constexpr std::size_t kAhead = 64;
// With fewer changes, starting a thread costs more time than it saves.
constexpr std::size_t kShare = std::size_t{1} << 15;

struct Nothing {};

inline void prefetch(const void* place) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(place, 1);
#else
  (void)place;
#endif
}

// Changes `first` to `last` of one stretch; those before `written` may have been written.
template <typename Bits>
Exchanged exchange_range(Bits* live, std::size_t size, const std::int64_t* index, const Bits* old,
                         const Bits* fresh, std::size_t first, std::size_t last,
                         std::size_t& written) {
  for (std::size_t start = first; start < last; start += kBlock) {
    const std::size_t stop = std::min(start + kBlock, last);
    bool outside = false;
    for (std::size_t i = start; i < stop; ++i) {
      outside |= static_cast<std::uint64_t>(index[i]) >= size;
    }
    if (outside) return Exchanged::outside;
    Bits differing = 0;
    for (std::size_t i = start; i < stop; ++i) {
      if (i + kAhead < last) {
        const auto ahead = static_cast<std::uint64_t>(index[i + kAhead]);
        if (ahead < size) prefetch(live + ahead);
      }
      differing |= static_cast<Bits>(live[index[i]] ^ old[i]);
    }
    if (differing != 0) return Exchanged::not_old;
    written = stop;
    for (std::size_t i = start; i < stop; ++i) live[index[i]] = fresh[i];
    const volatile Bits* landed = live;
    for (std::size_t i = start; i < stop; ++i) {
      differing |= static_cast<Bits>(landed[index[i]] ^ fresh[i]);
    }
    if (differing != 0) return Exchanged::not_new;
  }
  return Exchanged::done;
}

// Calls work(stretch number, begin, end) in order for each stretch's part of the changes `first` to
// `last`, until one call returns false.
template <typename Bits, typename Work>
void each_part(const std::vector<Stretch<Bits>>& stretches, std::size_t first, std::size_t last,
               const Work& work) {
  const auto holds = [](std::size_t change, const Stretch<Bits>& s) { return change < s.last; };
  auto stretch = std::upper_bound(stretches.begin(), stretches.end(), first, holds);
  for (; first < last; ++stretch) {
    const std::size_t stop = std::min(stretch->last, last);
    const auto number = static_cast<std::size_t>(stretch - stretches.begin());
    if (first < stop && !work(number, first, stop)) return;
    first = stop;
  }
}

}  // namespace

template <typename Bits>
Exchanged exchange(const std::vector<Stretch<Bits>>& stretches, const std::int64_t* index,
                   const Bits* old, const Bits* fresh, unsigned threads, std::size_t& failed) {
  const std::size_t count = stretches.empty() ? 0 : stretches.back().last;
  const std::size_t shares = std::clamp<std::size_t>(count / kShare, 1, std::max(threads, 1u));
  const auto bound = [&](std::size_t share) { return count / shares * share +
                                                     std::min(share, count % shares); };
  std::vector<std::size_t> written(shares, 0);
  std::vector<std::pair<Exchanged, std::size_t>> found(shares, {Exchanged::done, 0});
  parallel<Nothing>(shares, threads, [&](std::size_t share, Nothing&) {
    each_part(stretches, bound(share), bound(share + 1),
              [&](std::size_t number, std::size_t first, std::size_t last) {
                const Stretch<Bits>& stretch = stretches[number];
                const Exchanged outcome = exchange_range(stretch.live, stretch.size, index, old,
                                                         fresh, first, last, written[share]);
                if (outcome == Exchanged::done) return true;
                found[share] = {outcome, number};
                return false;
              });
  });
  const auto fault = std::find_if(found.begin(), found.end(), [](const auto& of_share) {
    return of_share.first != Exchanged::done;
  });
  if (fault == found.end()) return Exchanged::done;
  for (std::size_t share = 0; share < shares; ++share) {
    each_part(stretches, bound(share), written[share],
              [&](std::size_t number, std::size_t first, std::size_t last) {
                for (std::size_t i = first; i < last; ++i) {
                  stretches[number].live[index[i]] = old[i];
                }
                return true;
              });
  }
  failed = fault->second;
  return fault->first;
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                            \
  template Exchanged exchange<Bits>(const std::vector<Stretch<Bits>>&, const std::int64_t*,    \
                                    const Bits*, const Bits*, unsigned, std::size_t&);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
