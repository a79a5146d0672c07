#include "arguments/memory.h"

#include <algorithm>
#include <string>

namespace specdec {
namespace {

// The dimension in which the tensor is expanded, -1 if in none.
template <class Sizes>
int64_t expanded_dimension(const Sizes& sizes, const Sizes& strides) {
  int64_t found = -1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 0) return -1;
    if (strides[d] == 0 && sizes[d] > 1) found = static_cast<int64_t>(d);
  }
  return found;
}

// The extent of tensor `index` of a list. The kernels of a call may take less time than this, so
// sizes and strides are asked for once.
Extent extent_of(const Tensor& t, size_t index) {
  const auto &sizes = t.sizes(), &strides = t.strides();
  int64_t first = 0, last = 0, count = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return {0, 0, true, index, -1};
    (strides[d] < 0 ? first : last) += (sizes[d] - 1) * strides[d];
    count *= sizes[d];
  }
  const auto width = static_cast<int64_t>(t.element_size());
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.const_data_ptr()) + first * width;
  const int64_t span = last - first + 1;
  return {begin, begin + span * width, span == count, index, expanded_dimension(sizes, strides)};
}

// In the order of their addresses.
Extents extents_of(const std::vector<Tensor>& tensors) {
  Extents out;
  out.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) out.push_back(extent_of(tensors[i], i));
  std::sort(out.begin(), out.end(), [](const Extent& a, const Extent& b) {
    return a.begin < b.begin || (a.begin == b.begin && a.index < b.index);
  });
  return out;
}

void fail_expanded(const std::string& name, int64_t dimension) {
  fail(name, " must not be expanded, because it is written in place, got stride 0 in dimension ",
       dimension);
}

void fail_overlap(const char* name, size_t i, size_t j) {
  fail(name, "[", std::max(i, j), "] must not overlap ", name, "[", std::min(i, j),
       "], because both are written in place");
}

}  // namespace

void check_not_expanded(const char* name, const Tensor& t) {
  const int64_t dimension = expanded_dimension(t.sizes(), t.strides());
  if (dimension >= 0) fail_expanded(name, dimension);
}

Extents check_written(const char* name, const std::vector<Tensor>& tensors) {
  Extents extents = extents_of(tensors);
  const Extent* expanded = nullptr;  // the first in the list
  for (const Extent& e : extents) {
    if (e.expanded >= 0 && (expanded == nullptr || e.index < expanded->index)) expanded = &e;
  }
  if (expanded != nullptr) {
    fail_expanded(name + ("[" + std::to_string(expanded->index) + "]"), expanded->expanded);
  }
  const Extent *before = nullptr,
               *dense = nullptr;  // `dense` is the one without gaps that ends last
  for (const Extent& e : extents) {
    if (e.begin == e.end) continue;
    if (before == nullptr && !has_memory(tensors[e.index])) break;
    if (before != nullptr && before->begin == e.begin) fail_overlap(name, before->index, e.index);
    before = &e;
    if (dense != nullptr && e.begin < dense->end) fail_overlap(name, dense->index, e.index);
    if (e.dense) dense = &e;
  }
  return extents;
}

std::vector<Tensor> read_first(const std::vector<Tensor>& tensors, const Extents& written) {
  std::vector<uintptr_t> ends(written.size());  // the largest so far
  for (size_t i = 0; i < written.size(); ++i) {
    ends[i] = i == 0 ? written[i].end : std::max(ends[i - 1], written[i].end);
  }
  std::vector<Tensor> out;
  out.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    const Extent e = extent_of(t, 0);
    const auto after =
        std::lower_bound(written.begin(), written.end(), e.end,
                         [](const Extent& other, uintptr_t end) { return other.begin < end; });
    const bool apart = after == written.begin() || ends[after - written.begin() - 1] <= e.begin;
    out.push_back(apart ? t : clone(t));
  }
  return out;
}

Tensor read_first(const Tensor& t, const Tensor& written) {
  const Extent a = extent_of(t, 0), b = extent_of(written, 0);
  return a.begin < b.end && b.begin < a.end ? clone(t) : t;
}

void check_apart(const std::vector<NamedTensor>& written, const std::vector<NamedTensor>& read) {
  std::vector<Extent> extents;
  extents.reserve(written.size());
  const auto overlapping = [&](const Extent& e) {
    return std::find_if(extents.begin(), extents.end(), [&](const Extent& other) {
      return other.begin < e.end && e.begin < other.end;
    });
  };
  for (const NamedTensor& t : written) {
    const Extent e = extent_of(*t.tensor, extents.size());
    if (e.begin != e.end && !has_memory(*t.tensor)) return;
    const auto other = overlapping(e);
    SPECDEC_CHECK(other == extents.end(), t.name, " must not overlap ", written[other->index].name,
                  ", because both are written");
    extents.push_back(e);
  }
  for (const NamedTensor& t : read) {
    const auto other = overlapping(extent_of(*t.tensor, 0));
    SPECDEC_CHECK(other == extents.end(), written[other->index].name, " must not overlap ", t.name,
                  ", because one is written while the other is read");
  }
}

}  // namespace specdec
