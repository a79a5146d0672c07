// The Python module specdec_host._host. Arrays and numbers are checked here or in the Python
// package; the GIL is not held while the automaton and the suffix array work.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "host/draft_chains.h"
#include "host/ops.h"
#include "host/sort_suffixes.h"
#include "host/suffix_array.h"
#include "host/suffix_automaton.h"

namespace py = pybind11;

namespace specdec::host {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;

template <class Integer>
void copy_ids(const py::array& given, const std::string& name, int32_t* out) {
  const char* data = static_cast<const char*>(given.data());
  for (py::ssize_t i = 0; i < given.shape(0); ++i) {
    Integer id;
    std::memcpy(&id, data + i * given.strides(0), sizeof(id));
    if (id < 0 || static_cast<int64_t>(id) > INT32_MAX) {
      throw py::value_error(name + " must hold ids in [0, 2^31), got " + std::to_string(id) +
                            " at " + std::to_string(i));
    }
    out[i] = static_cast<int32_t>(id);
  }
}

std::vector<int32_t> read_ids(const py::array& given, const std::string& name) {
  if (given.ndim() != 1) {
    throw py::value_error(name + " must be 1-D, got " + std::to_string(given.ndim()) +
                          " dimensions");
  }
  std::vector<int32_t> ids(static_cast<size_t>(given.shape(0)));
  const py::dtype type = given.dtype();
  const bool integers = type.kind() == 'i' && type.byteorder() == '=';
  if (integers && type.itemsize() == sizeof(int64_t)) {
    copy_ids<int64_t>(given, name, ids.data());
  } else if (integers && type.itemsize() == sizeof(int32_t)) {
    copy_ids<int32_t>(given, name, ids.data());
  } else {
    throw py::type_error(name + " must be int32 or int64, got " +
                         py::str(type).cast<std::string>());
  }
  return ids;
}

// What a proposal returns: tokens [count, gamma], their confidence, and the length of the match.
struct Chains {
  std::vector<int64_t> tokens;
  std::vector<float> confidence;
  const Wanted wanted;
  int64_t match_length = 0;

  explicit Chains(const Wanted& wanted)
      : tokens(static_cast<size_t>(wanted.gamma * wanted.count)),
        confidence(tokens.size()),
        wanted(wanted) {}

  void draft(std::vector<Start> starts) {
    std::stable_sort(starts.begin(), starts.end(), [](const Start& a, const Start& b) {
      return a.cursor.length > b.cursor.length;
    });
    match_length = starts[0].cursor.length;
    draft_chains(starts, wanted, tokens.data(), confidence.data());
  }

  py::tuple to_python() const {
    const std::vector<py::ssize_t> shape{wanted.count, wanted.gamma};
    return py::make_tuple(py::array_t<int64_t>(shape, tokens.data()),
                          py::array_t<float>(shape, confidence.data()), match_length);
  }
};

// A corpus that many automata and threads read.
class Corpus {
 public:
  Corpus(Ids tokens, Ids suffixes)
      : tokens_(std::move(tokens)),
        suffixes_(std::move(suffixes)),
        array_(tokens_.data(), suffixes_.data(), tokens_.size()) {}

  py::tuple propose(const py::array& context, int64_t gamma, int64_t count, int64_t min_match,
                    int64_t max_match, double min_confidence) const {
    const std::vector<int32_t> ids = read_ids(context, "context");
    Chains chains({gamma, count, min_match, min_confidence});
    {
      py::gil_scoped_release unlocked;
      const int64_t size = std::min(static_cast<int64_t>(ids.size()), max_match);
      chains.draft({{&array_, array_.match(ids.data() + ids.size() - size, size, min_match)}});
    }
    return chains.to_python();
  }

  int64_t count(const py::array& ngram) const {
    const std::vector<int32_t> ids = read_ids(ngram, "ngram");
    py::gil_scoped_release unlocked;
    return array_.count(ids.data(), static_cast<int64_t>(ids.size()));
  }

  const SuffixArray& array() const { return array_; }

 private:
  const Ids tokens_, suffixes_;
  const SuffixArray array_;
};

// An automaton that threads take turns to use.
class RunningText {
 public:
  RunningText(int64_t max_match, const Corpus* corpus) : automaton_(max_match), corpus_(corpus) {}

  void append(const py::array& tokens) {
    const std::vector<int32_t> ids = read_ids(tokens, "tokens");
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> turn(mutex_);
    automaton_.append(ids.data(), static_cast<int64_t>(ids.size()));
  }

  void reserve(int64_t n) {
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> turn(mutex_);
    automaton_.reserve(n);
  }

  py::tuple propose(int64_t gamma, int64_t count, int64_t min_match, double min_confidence) {
    Chains chains({gamma, count, min_match, min_confidence});
    {
      py::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> turn(mutex_);
      std::vector<Start> starts{{&automaton_, automaton_.match()}};
      if (corpus_ != nullptr) {
        const std::vector<int32_t>& tail = automaton_.tail();
        const int64_t size = static_cast<int64_t>(tail.size());
        starts.push_back({&corpus_->array(), corpus_->array().match(tail.data(), size, min_match)});
      }
      chains.draft(std::move(starts));
    }
    return chains.to_python();
  }

  int64_t count(const py::array& ngram) {
    const std::vector<int32_t> ids = read_ids(ngram, "ngram");
    const int64_t n = static_cast<int64_t>(ids.size());
    if (n > automaton_.max_match() + 1) {
      throw py::value_error(
          "ngram must hold at most max_match + 1 = " + std::to_string(automaton_.max_match() + 1) +
          " tokens, got " + std::to_string(n));
    }
    return locked([&] { return automaton_.count(ids.data(), n); });
  }

  int64_t size() {
    return locked([&] { return automaton_.size(); });
  }
  int64_t num_states() {
    return locked([&] { return automaton_.num_states(); });
  }
  int64_t bytes() {
    return locked([&] { return automaton_.bytes(); });
  }

 private:
  template <class F>
  int64_t locked(const F& read) {
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> turn(mutex_);
    return read();
  }

  std::mutex mutex_;
  SuffixAutomaton automaton_;
  const Corpus* corpus_;
};

Ids sorted_suffixes(const Ids& tokens, const py::object& progress) {
  Ids suffixes(tokens.size());
  int32_t* out = suffixes.mutable_data();
  const int32_t* in = tokens.data();
  const int64_t n = tokens.size();
  {
    py::gil_scoped_release unlocked;
    sort_suffixes(in, n, out, [&](double part) {
      py::gil_scoped_acquire locked;  // also lets Ctrl-C end the work
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!progress.is_none()) progress(part);
    });
  }
  return suffixes;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  define_ops(m);
  m.def("sort_suffixes", &sorted_suffixes, py::arg("tokens").noconvert(), py::arg("progress"));
  py::class_<Corpus>(m, "Corpus")
      .def(py::init<Ids, Ids>(), py::arg("tokens").noconvert(), py::arg("suffixes").noconvert())
      .def("propose", &Corpus::propose, py::arg("context"), py::arg("gamma"), py::arg("count"),
           py::arg("min_match"), py::arg("max_match"), py::arg("min_confidence") = 0.0)
      .def("count", &Corpus::count);
  py::class_<RunningText>(m, "SuffixAutomaton")
      .def(py::init<int64_t, const Corpus*>(), py::keep_alive<1, 3>())
      .def("append", &RunningText::append)
      .def("reserve", &RunningText::reserve)
      .def("propose", &RunningText::propose, py::arg("gamma"), py::arg("count"),
           py::arg("min_match"), py::arg("min_confidence") = 0.0)
      .def("count", &RunningText::count)
      .def("__len__", &RunningText::size)
      .def_property_readonly("num_states", &RunningText::num_states)
      .def_property_readonly("nbytes", &RunningText::bytes);
}

}  // namespace specdec::host
