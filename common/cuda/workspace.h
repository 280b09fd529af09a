// The scratch memory of a launch: named parts, each with a dtype and a shape.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

// Bytes left free after each part. The checker asks for some, so that what runs past the end of a part does
// not land in the next.
#ifndef FA2_WORKSPACE_GAP
#define FA2_WORKSPACE_GAP 0
#endif

struct WorkspacePart {
  std::string name;
  std::string dtype;  // PyTorch's name, e.g. "float32"
  std::vector<int64_t> shape;
  int64_t offset;  // from the start of the workspace
  int64_t bytes;
};

template <typename T>
struct DtypeName;

template <>
struct DtypeName<float> {
  static constexpr const char* value = "float32";
};
template <>
struct DtypeName<__half> {
  static constexpr const char* value = "float16";
};
template <>
struct DtypeName<__nv_bfloat16> {
  static constexpr const char* value = "bfloat16";
};

// Filled by describe_workspace(). The caller allocates total_bytes() and passes the address to the
// launcher, which describes the same layout again to find its parts.
class WorkspaceLayout {
 public:
  static constexpr int64_t kAlignment = 256;

  template <typename T>
  void add(const char* name, std::initializer_list<int64_t> shape) {
    int64_t bytes = sizeof(T);
    for (const int64_t extent : shape) bytes *= extent;
    parts_.push_back({name, DtypeName<T>::value, shape, total_bytes_, bytes});
    total_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment + FA2_WORKSPACE_GAP;
  }

  // The part called `name` within `workspace`.
  template <typename T>
  T* find(void* workspace, const std::string& name) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(workspace) + part(name).offset);
  }

  int64_t bytes(const std::string& name) const { return part(name).bytes; }

  int64_t total_bytes() const { return total_bytes_; }
  const std::vector<WorkspacePart>& parts() const { return parts_; }

 private:
  const WorkspacePart& part(const std::string& name) const {
    for (const WorkspacePart& part : parts_) {
      if (part.name == name) return part;
    }
    throw std::logic_error("describe_workspace() names no part " + name);
  }

  std::vector<WorkspacePart> parts_;
  int64_t total_bytes_ = 0;
};
