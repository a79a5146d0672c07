#include "arguments/draft.h"

namespace specdec {
namespace {

bool fits(const Tensor& t, const DraftSizes& sizes) {
  if (t.dim() != static_cast<int64_t>(sizes.size())) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].size != kAnySize && sizes[i].size != t.size(static_cast<int64_t>(i))) return false;
  }
  return true;
}

// [B, gamma, D] = [4, 5, D].
std::string described(const DraftSizes& sizes) {
  std::string names, numbers;
  for (const DraftSize& s : sizes) {
    names += std::string(names.empty() ? "" : ", ") + s.name;
    numbers += (numbers.empty() ? "" : ", ") +
               (s.size == kAnySize ? std::string(s.name) : std::to_string(s.size));
  }
  return "[" + names + "] = [" + numbers + "]";
}

}  // namespace

void DraftArguments::check(const Tensor& target, int64_t batch, const DraftSizes& sizes,
                           const DraftSizes& statistics) const {
  if (rows) check_draft_rows(target, sizes);
  if (ids) check_ids(target);
  if (columns) {
    check_vector("draft_map columns", *columns, target.size(target.dim() - 1), ScalarType::Int,
                 target, "target");
    SPECDEC_CHECK(rows && !ids,
                  "draft_map must be None unless draft holds rows over a vocabulary of its own");
  }
  check_statistics(target, statistics);
  if (temperatures) {
    check_vector("draft temperature", *temperatures, batch, ScalarType::Float, target, "target");
  } else {
    const float t = static_cast<float>(temperature);
    SPECDEC_CHECK(std::isfinite(t) && t >= 0,
                  "draft temperature must be finite and at least 0, got ", t);
  }
}

void DraftArguments::check_draft_rows(const Tensor& target, const DraftSizes& sizes) const {
  const char* name = ids ? "draft probabilities" : "draft";
  DraftSizes all = sizes;
  all.push_back({ids ? "K" : "D", kAnySize});
  SPECDEC_CHECK(fits(*rows, all), name, " must be ", described(all), ", got ", shape_of(*rows));
  SPECDEC_CHECK(!ids || rows->size(rows->dim() - 1) >= 1, name, " must have K >= 1 entries, got ",
                shape_of(*rows));
  check_rows(name, *rows);
  check_same_device(name, *rows, target, "target");
}

void DraftArguments::check_ids(const Tensor& target) const {
  SPECDEC_CHECK(rows && shape_of(*ids) == shape_of(*rows),
                "draft ids must have the shape of the draft probabilities, ",
                rows ? shape_of(*rows) : "None", ", got ", shape_of(*ids));
  specdec::check_ids("draft ids", *ids);
  check_same_device("draft ids", *ids, target, "target");
}

void DraftArguments::check_statistics(const Tensor& target, const DraftSizes& statistics) const {
  SPECDEC_CHECK(logsumexp.has_value() == threshold.has_value() && (!logsumexp || (rows && !ids)),
                "draft logsumexp and draft threshold must come together and with draft");
  const auto check_one = [&](const char* name, const std::optional<Tensor>& t, ScalarType dtype) {
    if (!t) return;
    SPECDEC_CHECK(fits(*t, statistics), name, " must be ", described(statistics), ", got ",
                  shape_of(*t));
    SPECDEC_CHECK(t->scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                  dtype_name(*t));
    check_same_device(name, *t, target, "target");
  };
  check_one("draft logsumexp", logsumexp, ScalarType::Double);
  check_one("draft threshold", threshold, ScalarType::Float);
  if (!bitmask) return;
  SPECDEC_CHECK(logsumexp, "draft token_bitmask must come with draft logsumexp");
  check_bitmask("draft token_bitmask", *bitmask, "draft logits", *rows);
  check_same_device("draft token_bitmask", *bitmask, target, "target");
}

DraftParams DraftArguments::params(Kind kind, bool flat) {
  DraftParams p{};
  if (rows) {
    p.form = ids ? DraftForm::kSparse : logsumexp ? DraftForm::kSampled : DraftForm::kRows;
    p.flat = flat;
    p.num_rows = rows->size(flat ? 0 : 1);
    p.vocab = rows->size(rows->dim() - 1);
    p.rows = {rows->const_data_ptr(), row_dtype(*rows), flat ? 0 : rows->stride(0),
              rows->stride(flat ? 0 : 1), bitmask_of(bitmask, flat)};
  }
  p.kind = kind;
  if (ids) {
    ids = dense(*ids);
    p.ids = ids->const_data_ptr();
    p.ids_are_int64 = ids->scalar_type() == ScalarType::Long;
  }
  p.columns = pointer<int32_t>(columns);
  p.logsumexp = pointer<double>(logsumexp);
  p.threshold = pointer<float>(threshold);
  p.temperatures = pointer<float>(temperatures);
  p.temperature = static_cast<float>(temperature);
  return p;
}

}  // namespace specdec
