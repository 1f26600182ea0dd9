// Runs a target without libFuzzer: every input of a folder, then mutated ones.
//
//   TARGET [-runs=N] [-max_total_time=SECONDS] [-seed=N] [-artifact_prefix=PATH] FOLDER|FILE …
//
// The options have libFuzzer's names. Mutation is blind, so it finds less, but it needs only a
// compiler with sanitizers. The input that ends it is left at PATH + "crash".
#include <algorithm>
#include <csignal>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size);

// A finding must reach the handler below.
extern "C" const char* __asan_default_options() { return "abort_on_error=1:handle_abort=0"; }
extern "C" const char* __ubsan_default_options() {
  return "abort_on_error=1:halt_on_error=1:print_stacktrace=1";
}

namespace {

namespace files = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

Bytes current;
std::string prefix;

void keep(int) {
  const std::string path = prefix + "crash";
  if (std::FILE* file = std::fopen(path.c_str(), "wb")) {
    if (!current.empty()) std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in %s\n", path.c_str());
  }
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

Bytes read(const files::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void run(const Bytes& input) {
  current = input;
  current.shrink_to_fit();
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

// Applies one small mutation.
void change(Bytes& input, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  static constexpr std::uint64_t kNumbers[] = {0,     1,      7,      8,          15,
                                               16,    63,     64,     0x7F,       0x80,
                                               0xFF,  0x7FFF, 0x8000, 0xFFFF,     0x7FFFFFFF,
                                               1U << 31, 0xFFFFFFFF, ~std::uint64_t{0}};
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
  if (input.empty()) input.push_back(0);
  // Mutates the front, which holds the headers, as often as the whole remainder.
  const std::size_t at = below(random() % 2 == 0 ? std::min<std::size_t>(input.size(), 400)
                                                 : input.size());
  switch (below(7)) {
    case 0:
      input[at] ^= static_cast<std::uint8_t>(1U << below(8));
      break;
    case 1:
      input[at] = static_cast<std::uint8_t>(random());
      break;
    case 2: {
      std::uint64_t number = kNumbers[below(std::size(kNumbers))];
      for (std::size_t i = at; i < std::min(at + (std::size_t{1} << below(4)), input.size()); ++i) {
        input[i] = static_cast<std::uint8_t>(number);
        number >>= 8;
      }
      break;
    }
    case 3:
      input[at] = static_cast<std::uint8_t>(input[at] + below(9) - 4);
      break;
    case 4:
      input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                  input.begin() + static_cast<std::ptrdiff_t>(
                                      std::min(input.size(), at + 1 + below(16))));
      break;
    case 5:
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + below(16),
                   static_cast<std::uint8_t>(random()));
      break;
    default: {
      const Bytes& other = corpus[below(corpus.size())];
      for (std::size_t i = at; i < std::min(input.size(), at + 64) && i < other.size(); ++i) {
        input[i] = other[i];
      }
    }
  }
}

}  // namespace

int main(int count, char** words) {
  std::uint64_t runs = ~std::uint64_t{0}, seconds = ~std::uint64_t{0} >> 32, seed = 1;
  std::vector<Bytes> corpus;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const std::string value = word.substr(word.find('=') + 1);
    if (word.starts_with("-runs=")) {
      runs = std::stoull(value);
    } else if (word.starts_with("-max_total_time=")) {
      seconds = std::stoull(value);
    } else if (word.starts_with("-seed=")) {
      seed = std::stoull(value);
    } else if (word.starts_with("-artifact_prefix=")) {
      prefix = value;
    } else if (word.starts_with("-")) {
      continue;  // libFuzzer's
    } else if (files::is_directory(word)) {
      std::vector<files::path> paths;
      for (const auto& entry : files::directory_iterator(word)) paths.push_back(entry.path());
      std::sort(paths.begin(), paths.end());
      for (const files::path& path : paths) corpus.push_back(read(path));
    } else {
      corpus.push_back(read(word));
    }
  }
  std::signal(SIGABRT, keep);
  if (corpus.empty()) corpus.emplace_back();
  std::uint64_t done = 0;
  for (; done < std::min<std::uint64_t>(runs, corpus.size()); ++done) run(corpus[done]);
  std::mt19937_64 random(seed);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (; done < runs && std::chrono::steady_clock::now() < until; ++done) {
    Bytes input = corpus[random() % corpus.size()];
    for (auto changes = 1 + random() % 4; changes > 0; --changes) change(input, corpus, random);
    run(input);
  }
  std::fprintf(stderr, "Done %llu runs\n", static_cast<unsigned long long>(done));
  return 0;
}
