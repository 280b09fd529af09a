// Where the loops of a library's machine code are, from objdump, which comes along with every compiler.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "../checker.h"

namespace cpu_device {
namespace checker {
namespace {

std::string quoted(const std::string& path) {
  std::string text = "'";
  for (const char c : path) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// "    57e1:\tjle    5483 <kernel+0x8e4>" jumps back in `function`.
bool read_backward_jump(const std::string& line, const std::string& function, Loop& loop) {
  const size_t colon = line.find(":\t"), label = line.rfind(" <");
  if (colon == std::string::npos || label == std::string::npos || label < colon) return false;
  const std::string target_name =
      line.substr(label + 2, line.find_first_of("+>", label) - label - 2);
  if (target_name != function) return false;
  const std::string instruction = line.substr(colon + 2, label - colon - 2);
  const bool is_jump = instruction.rfind("j", 0) == 0 ||                                      // x86
                       instruction.rfind("b ", 0) == 0 || instruction.rfind("b.", 0) == 0 ||  // Arm
                       instruction.rfind("cb", 0) == 0 || instruction.rfind("tb", 0) == 0;
  if (!is_jump) return false;
  const size_t operand = instruction.find_last_of(" \t,");
  loop.last = uint32_t(std::strtoull(line.c_str(), nullptr, 16));
  loop.first = uint32_t(std::strtoull(instruction.c_str() + operand + 1, nullptr, 16));
  return loop.first <= loop.last;
}

std::vector<Loop> read_loops(const std::string& path) {
  std::vector<Loop> loops;
  FILE* output =
      popen(("objdump -d --no-show-raw-insn " + quoted(path) + " 2>/dev/null").c_str(), "r");
  if (output == nullptr) return loops;
  std::string function;
  char* text = nullptr;
  size_t capacity = 0;
  for (ssize_t n; (n = getline(&text, &capacity, output)) > 0;) {
    const std::string line(text, size_t(n) - (text[n - 1] == '\n'));
    const size_t name = line.find(" <");
    Loop loop{};
    if (line.size() > 2 && line.compare(line.size() - 2, 2, ">:") == 0 &&
        name != std::string::npos) {
      function = line.substr(name + 2, line.size() - name - 4);
    } else if (read_backward_jump(line, function, loop)) {
      loops.push_back(loop);
    }
  }
  std::free(text);
  pclose(output);
  std::sort(loops.begin(), loops.end(), [](Loop a, Loop b) { return a.last < b.last; });
  return loops;
}

}  // namespace

const std::vector<Loop>& loops_of(const Library& library) {
  static std::map<const Library*, std::vector<Loop>> loops;
  const auto [place, is_new] = loops.try_emplace(&library);
  if (is_new) place->second = read_loops(library.path);
  return place->second;
}

}  // namespace checker
}  // namespace cpu_device
