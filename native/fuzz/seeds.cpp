// Makes the same seeds each time: seeds DELTA_FOLDER WHOLE_FOLDER ROUND_TRIP_FOLDER.
#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "input.hpp"

namespace deltawire::fuzz {
namespace {

namespace files = std::filesystem;

void save(const files::path& folder, int number, const Output& output) {
  files::create_directories(folder);
  std::ofstream file(folder / ("seed-" + std::to_string(number)), std::ios::binary);
  file.write(reinterpret_cast<const char*>(output.bytes().data()),
             static_cast<std::streamsize>(output.bytes().size()));
  require(file.good(), "a seed is written");
}

// Returns bytes of values around zero whose high bytes often repeat, as in a model.
std::vector<std::uint8_t> weights(std::mt19937_64& random, std::size_t width, std::size_t count) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t noise = random();
    const auto exponent = static_cast<std::uint8_t>(0x3C - std::min(std::countr_zero(noise), 8));
    for (std::size_t byte = 0; byte + 1 < width; ++byte) {
      bytes.push_back(static_cast<std::uint8_t>(noise >> (8 + 8 * byte)));
    }
    bytes.push_back(static_cast<std::uint8_t>(exponent | (noise >> 56 & 0x80)));
  }
  return bytes;
}

struct Recipe {
  std::uint16_t count;
  std::uint32_t columns;
  unsigned rarity;  // one element in so many changes; 0: none
  unsigned bits;    // the most bits of a change
};

// One block of each number of lanes; several blocks; rows of every kind; few changes and all.
constexpr Recipe kRecipes[] = {
    {0, 0, 1, 1},      {1, 2, 1, 3},        {70, 7, 5, 2},       {200, 0, 0, 0},
    {255, 64, 2, 8},   {300, 16, 9, 4},     {1000, 100, 30, 2},  {1023, 0, 1, 1},
    {1500, 64, 40, 2}, {4097, 33, 90, 3},   {8192, 8192, 200, 2}, {9000, 4100, 150, 5},
    {17000, 500, 400, 2}, {24576, 3000, 900, 9},
};

template <typename Bits>
void make(const files::path (&folders)[3], std::uint8_t width, std::mt19937_64& random,
          int& number) {
  for (const Recipe& recipe : kRecipes) {
    DeltaCase its{width, static_cast<std::uint8_t>(random() % 6), recipe.columns, recipe.count,
                  random() % 3, weights(random, sizeof(Bits), 120)};
    const std::vector<Bits> base = its.base<Bits>();
    std::vector<Bits> target = base;
    for (Bits& element : target) {
      if (recipe.rarity == 0 || random() % recipe.rarity != 0) continue;
      const auto change = Bits(1 + (random() & ((1U << recipe.bits) - 1)));
      element = Bits(random() % 4 == 0 ? element - change : element + change);
    }
    const Shape shape{base.size(), its.columns};
    const Layout layout = its.its_layout(8 * sizeof(Bits));
    Output delta;
    its.put(delta);
    delta.put(std::uint8_t{0}).put(static_cast<std::uint8_t>(shape.blocks()));
    delta.put(encode(base.data(), target.data(), shape, layout, nullptr, 1).blocks);
    save(folders[0], number, delta);

    const Field field = layout.exponent == 0
                            ? Field{8 * sizeof(Bits) - 8, 8}
                            : Field{layout.mantissa, std::min(layout.exponent, 8U)};
    Output whole;
    const auto fewer = std::min<std::uint16_t>(recipe.count, number % 3 == 0 ? 9000 : 1500);
    WholeCase{width, static_cast<std::uint8_t>(field.low), static_cast<std::uint8_t>(field.width),
              fewer}
        .put(whole);
    whole.put(encode_whole(target.data(), fewer, field, 1));
    save(folders[1], number, whole);

    Output round_trip;
    its.put(round_trip);
    round_trip.put(static_cast<std::uint8_t>(field.low));
    round_trip.put(static_cast<std::uint8_t>(field.width)).put(std::uint64_t{0});
    std::vector<std::uint8_t> changes(sizeof(Bits) * std::min<std::size_t>(base.size(), 300));
    for (std::size_t i = 0; i < changes.size() / sizeof(Bits); ++i) {
      const auto change = Bits(base[i] ^ target[i]);
      std::memcpy(changes.data() + i * sizeof(Bits), &change, sizeof(Bits));
    }
    round_trip.put(changes);
    save(folders[2], number, round_trip);
    ++number;
  }
}

}  // namespace
}  // namespace deltawire::fuzz

int main(int count, char** words) {
  using namespace deltawire::fuzz;
  require(count == 4, "three folders are named");
  const files::path folders[3]{words[1], words[2], words[3]};
  std::mt19937_64 random(1);
  int number = 0;
  for (std::uint8_t width = 0; width < 4; ++width) {
    with_width(width, [&](auto zero) { make<decltype(zero)>(folders, width, random, number); });
  }
  return 0;
}
