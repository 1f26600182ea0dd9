// Encodes any two tensors as a delta and whole: every path makes the same bytes and decodes them to
// the same tensor, and encoder and decoder compute the same change of the digest.
#include <algorithm>

#include "input.hpp"

namespace deltawire::fuzz {
namespace {

constexpr DigestOf kDigestOf{0x0123456789ABCDEF, 77};

// The blocks as a reader gets them.
struct Joined {
  std::vector<std::uint32_t> lengths;
  std::vector<std::uint8_t> bytes;

  explicit Joined(const std::vector<std::vector<std::uint8_t>>& blocks) {
    for (const auto& block : blocks) {
      lengths.push_back(static_cast<std::uint32_t>(block.size()));
      bytes.insert(bytes.end(), block.begin(), block.end());
    }
    bytes.shrink_to_fit();
  }
  Body body() const { return {bytes.data(), bytes.size(), lengths.data(), lengths.size()}; }
};

template <typename Bits>
void check_delta(const std::vector<Bits>& base, const std::vector<Bits>& target, Shape shape,
                 Layout layout) {
  std::vector<Encoded> all;
  for (const char* path : kPaths) {
    take_path(path);
    all.push_back(encode(base.data(), target.data(), shape, layout, &kDigestOf, 1));
    require(all.back().blocks == all.front().blocks, "every path makes the same delta");
    const Lanes before = digest(base.data(), base.size(), kDigestOf.key, kDigestOf.start);
    const Lanes after = digest(target.data(), base.size(), kDigestOf.key, kDigestOf.start);
    require(after.lane0 - before.lane0 == all.back().moved.lane0 &&
                after.lane1 - before.lane1 == all.back().moved.lane1,
            "the digest gains what it is said to gain");
  }
  const Joined joined(all.front().blocks);
  const Sections sections = sections_of(joined.body(), shape, 0, shape.blocks());
  require(sections.changed == all.front().changed, "the blocks say how many change");
  for (const char* path : kPaths) {
    take_path(path);
    std::vector<Bits> advanced = base;
    require(advance(sections.all, advanced.data(), shape.columns, layout, 1), "a delta is one");
    require(advanced == target, "a delta leads to its target");
  }
}

template <typename Bits>
void check_whole(const std::vector<Bits>& bits, Field field) {
  if (!field.fits(8 * sizeof(Bits))) return;
  std::vector<std::vector<std::uint8_t>> first;
  for (const char* path : kPaths) {
    take_path(path);
    const auto blocks = encode_whole(bits.data(), bits.size(), field, 1);
    if (path == kPaths[0]) first = blocks;
    require(blocks == first, "every path makes the same anchor");
    const Joined joined(blocks);
    std::vector<Bits> back(bits.size());
    decode_whole(joined.body(), back.size(), field, 1, back.data());
    require(back == bits, "an anchor is its tensor");
  }
}

template <typename Bits>
void run(const DeltaCase& its, Input& input) {
  const auto field = Field{input.take<std::uint8_t>(), input.take<std::uint8_t>()};
  const auto drift = static_cast<Bits>(input.take<std::uint64_t>());
  const std::vector<Bits> base = its.base<Bits>();
  std::vector<Bits> target = tiled(input.bytes(input.left()), base.size(), drift);
  for (std::size_t i = 0; i < base.size(); ++i) target[i] ^= base[i];
  const Shape shape{base.size(), its.columns};
  if (shape.columns <= kBlock) check_delta(base, target, shape, its.its_layout(8 * sizeof(Bits)));
  check_whole(target, field);
}

}  // namespace
}  // namespace deltawire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace deltawire::fuzz;
  Input input(bytes, size);
  const DeltaCase its = DeltaCase::take(input);
  with_width(its.width, [&](auto zero) { run<decltype(zero)>(its, input); });
  return 0;
}
