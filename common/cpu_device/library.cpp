// Reads what the scheduler needs from the shared library that holds a kernel: which functions are where,
// and which thread-local variables (static __shared__ arrays) it has.
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>

#include "scheduler.h"

extern "C" void* __tls_get_addr(void*);

namespace cpu_device {
namespace {

struct Located {
  uintptr_t base;
  uintptr_t address;
  uintptr_t segment_start = 0, segment_end = 0;  // that has the address
  std::string path;
  size_t tls_module = 0;
  bool found = false;
};

int locate(dl_phdr_info* info, size_t, void* data) {
  Located& located = *static_cast<Located*>(data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type != PT_LOAD || located.address < start ||
        located.address >= start + segment.p_memsz) {
      continue;
    }
    located.found = true;
    located.base = info->dlpi_addr;
    located.segment_start = start;
    located.segment_end = start + segment.p_memsz;
    located.path = info->dlpi_name;
    located.tls_module = info->dlpi_tls_modid;
    return 1;
  }
  return 0;
}

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::vector<char>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

std::string demangled(const char* name) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                              std::free);
  return status == 0 ? text.get() : name;
}

// Whether a thread-local variable is a __shared__ array. GCC forgets the section of those in templates, so
// these are told by their name: a local variable of an instantiated function, but not of a library's.
bool is_shared_array(const std::string& mangled, const std::string& section) {
  if (section.rfind("fa2_shared", 0) == 0) return true;
  if (mangled.rfind("_ZZ", 0) != 0) return false;
  const std::string name = demangled(mangled.c_str());
  for (const char* other : {"std::", "torch::", "c10::", "at::", "__gnu_cxx::"}) {
    if (name.find(other) != std::string::npos) return false;
  }
  return name.find(">(") != std::string::npos;
}

// A local variable of function _Zxyz is called _ZZxyzE....
bool is_local_variable(const SharedArray& array, const Library::Function& function) {
  if (function.name.size() < 3) return false;
  return array.name.rfind("_ZZ" + function.name.substr(2) + "E", 0) == 0;
}

Library read_library(const Located& located) {
  Library library;
  library.path = located.path.empty() ? "/proc/self/exe" : located.path;
  library.base = located.base;
  library.code_start = located.segment_start;
  library.code_end = located.segment_end;
  library.tls_module = located.tls_module;
  const std::vector<char> image = read_file(library.path);
  if (image.size() < sizeof(ElfW(Ehdr))) return library;
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(image.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(image.data() + header->e_shoff);
  const char* section_names = image.data() + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(image.data() + sections[i].sh_offset);
    const char* names = image.data() + sections[sections[i].sh_link].sh_offset;
    for (size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); ++s) {
      const ElfW(Sym) & symbol = symbols[s];
      const std::string name = names + symbol.st_name;
      for (const char* function : {"12barrier_syncE", "14barrier_arriveE", "13mbarrier_initE"}) {
        if (name.rfind(std::string("_ZN10cpu_device") + function, 0) == 0) {
          library.calls_named_barriers = true;
        }
      }
      if (symbol.st_shndx >= header->e_shnum || symbol.st_size == 0) continue;
      const int type = symbol.st_info & 0xf;
      if (type == STT_TLS) {
        const std::string section = section_names + sections[symbol.st_shndx].sh_name;
        if (is_shared_array(name, section)) {
          library.shared_arrays.push_back(
              {size_t(symbol.st_value), size_t(symbol.st_size), name, 0});
        } else if (name.rfind("_ZGV", 0) == 0 || name == "__tls_guard") {
          library.guards.push_back(size_t(symbol.st_value));
        }
      } else if (type == STT_FUNC) {
        library.functions.push_back({uintptr_t(located.base + symbol.st_value),
                                     size_t(symbol.st_size), name,
                                     ELF64_ST_BIND(symbol.st_info) == STB_LOCAL});
      }
    }
  }
  for (SharedArray& array : library.shared_arrays) {
    for (const Library::Function& function : library.functions) {
      if (function.is_local && is_local_variable(array, function)) array.owner = function.address;
    }
  }
  return library;
}

}  // namespace

const Library::Function* Library::find(const void* address) const {
  const auto target = reinterpret_cast<uintptr_t>(address);
  for (const Function& function : functions) {
    if (target >= function.address && target < function.address + function.bytes) return &function;
  }
  return nullptr;
}

bool Library::has_instruction(const void* address) const {
  return reinterpret_cast<uintptr_t>(address) - code_start < code_end - code_start;
}

std::string Library::function_name(const void* address) const {
  const Function* function = find(address);
  if (function == nullptr) return "?";
  std::string name = demangled(function->name.c_str());
  if (const size_t start = name.find("(anonymous namespace)::"); start != std::string::npos) {
    name.erase(start, sizeof("(anonymous namespace)::") - 1);
  }
  name = name.substr(0, name.find_first_of("<("));
  return name.substr(name.rfind(' ') == std::string::npos ? 0 : name.rfind(' ') + 1);
}

size_t Library::static_shared_bytes(const void* address) const {
  const Function* function = find(address);
  if (function == nullptr) return 0;
  size_t bytes = 0;
  for (const SharedArray& array : shared_arrays) {
    if (is_local_variable(array, *function)) bytes += array.bytes;
  }
  return bytes;
}

const Library& library_of(const void* address) {
  static std::mutex mutex;
  static std::map<std::pair<uintptr_t, std::string>, std::unique_ptr<Library>> libraries;
  Located located{};
  located.address = reinterpret_cast<uintptr_t>(address);
  dl_iterate_phdr(locate, &located);
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Library>& library = libraries[{located.base, located.path}];
  if (!library) library = std::make_unique<Library>(read_library(located));
  return *library;
}

char* thread_local_block(const Library& library) {
  struct {
    size_t module, offset;
  } index{library.tls_module, 0};
  return static_cast<char*>(__tls_get_addr(&index));
}

}  // namespace cpu_device
