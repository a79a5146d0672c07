#include "specdec/decoder_layer.h"

#include <cmath>

#include "torch/arguments/linear.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_like(const char* name, const Tensor& t, const Tensor& of, const char* of_name) {
  SPECDEC_CHECK(t.scalar_type() == of.scalar_type(), name, " must be ", dtype_name(of), ", got ",
                dtype_name(t));
  check_same_device(name, t, of, of_name);
}

void check_hidden(const char* name, const Tensor& t) {
  SPECDEC_CHECK(t.dim() == 3 && t.size(2) >= 1, name, " must be [B, n, C], got ", shape_of(t));
  check_floats(name, t);
  check_on_cpu(name, t);
}

// None, or one for each of several.
void check_number(const char* name, const std::vector<Tensor>& tensors, size_t number) {
  SPECDEC_CHECK(tensors.empty() || tensors.size() == number, name, " must be ", number,
                " tensors or none, got ", tensors.size());
}

void check_epsilon(double epsilon) {
  SPECDEC_CHECK(std::isfinite(static_cast<float>(epsilon)) && epsilon >= 0,
                "epsilon must be finite and at least 0, got ", epsilon);
}

std::string item(const char* name, size_t i) { return name + ("[" + std::to_string(i) + "]"); }

// The sizes of several weights; in_features are checked too, because panels do not show whether
// the last of their inputs or outputs is padding.
struct Sizes {
  const std::vector<int64_t>&in, &out;

  std::string of(size_t i) const {
    return "[" + std::to_string(out[i]) + ", " + std::to_string(in[i]) + "]";
  }
};

void check_weight(const std::string& name, const Tensor& panels, int64_t out_features,
                  int64_t in_features, const Tensor& of, const char* of_name) {
  check_entries(name.c_str(), "the weight", "[N, K]", {out_features, in_features});
  check_panels(name, panels, out_features, in_features, of, of_name);
}

PackedWeight weight_of(const Tensor& panels, const Tensor* bias, int64_t out_features) {
  return {panels.const_data_ptr(), bias != nullptr ? bias->const_data_ptr() : nullptr,
          out_features};
}

std::vector<Tensor> all_dense(std::vector<Tensor> tensors) {
  for (Tensor& t : tensors) t = dense(t);
  return tensors;
}

const Tensor* item_of(const std::vector<Tensor>& tensors, size_t i) {
  return tensors.empty() ? nullptr : &tensors[i];
}

void check_norm_qkv_rope(const Tensor& x, const Tensor& norm, const std::vector<Tensor>& qkv,
                         const std::vector<int64_t>& in_features,
                         const std::vector<int64_t>& out_features, const Tensor& cos,
                         const Tensor& sin, const std::vector<Tensor>& biases,
                         const std::vector<Tensor>& head_norms, double epsilon) {
  check_hidden("x", x);
  const int64_t batch = x.size(0), tokens = x.size(1), hidden = x.size(2);
  check_vector("norm", norm, hidden, x.scalar_type(), x, "x");
  SPECDEC_CHECK(cos.dim() == 3 && (cos.size(0) == batch || cos.size(0) == 1) &&
                    cos.size(1) == tokens && cos.size(2) >= 2 && cos.size(2) % 2 == 0,
                "cos must be [B, n, D] = [", batch, ", ", tokens, ", D], or [1, ", tokens,
                ", D], with an even D, got ", shape_of(cos));
  check_like("cos", cos, x, "x");
  const int64_t size = cos.size(2);
  SPECDEC_CHECK(
      sin.dim() == 3 && sin.size(0) == cos.size(0) && sin.size(1) == tokens && sin.size(2) == size,
      "sin must have the shape of cos, ", shape_of(cos), ", got ", shape_of(sin));
  check_like("sin", sin, x, "x");
  SPECDEC_CHECK(qkv.size() == 3 && in_features.size() == 3 && out_features.size() == 3,
                "qkv must be 3 packed weights, got ", qkv.size());
  check_number("biases", biases, 3);
  check_number("head_norms", head_norms, 2);
  const Sizes sizes = {in_features, out_features};
  for (size_t i = 0; i < 3; ++i) {
    SPECDEC_CHECK(in_features[i] == hidden && out_features[i] >= 1 && out_features[i] % size == 0,
                  item("qkv", i), " must be a weight [H * D, C] with D = ", size,
                  " and C = ", hidden, ", got ", sizes.of(i));
    check_weight(item("qkv", i), qkv[i], out_features[i], hidden, x, "x");
    check_entries("x", "an output", "[B, n, H * D]", {batch, tokens, out_features[i]});
    if (!biases.empty()) {
      check_vector(item("biases", i).c_str(), biases[i], out_features[i], x.scalar_type(), x, "x");
    }
  }
  SPECDEC_CHECK(out_features[2] == out_features[1], "qkv[2] must have as many outputs as qkv[1], ",
                out_features[1], ", got ", out_features[2]);
  for (size_t i = 0; i < head_norms.size(); ++i) {
    check_vector(item("head_norms", i).c_str(), head_norms[i], size, x.scalar_type(), x, "x");
  }
  check_epsilon(epsilon);
}

std::tuple<Tensor, Tensor, Tensor> norm_qkv_rope(Tensor x, Tensor norm, std::vector<Tensor> qkv,
                                                 std::vector<int64_t> in_features,
                                                 std::vector<int64_t> out_features, Tensor cos,
                                                 Tensor sin, std::vector<Tensor> biases,
                                                 std::vector<Tensor> head_norms, double epsilon) {
  check_norm_qkv_rope(x, norm, qkv, in_features, out_features, cos, sin, biases, head_norms,
                      epsilon);
  const int64_t batch = x.size(0), tokens = x.size(1), size = cos.size(2);
  x = dense(x);
  norm = dense(norm);
  cos = dense(cos);
  sin = dense(sin);
  biases = all_dense(biases);
  head_norms = all_dense(head_norms);
  NormQkvRopeParams p = {};
  p.x = x.const_data_ptr();
  p.norm = norm.const_data_ptr();
  p.cos = cos.const_data_ptr();
  p.sin = sin.const_data_ptr();
  p.dtype = row_dtype(x);
  p.rows = batch * tokens;
  p.hidden = x.size(2);
  p.head_size = size;
  p.row_period = cos.size(0) * tokens;
  p.epsilon = static_cast<float>(epsilon);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < 3; ++i) {
    outputs.push_back(torch::stable::new_empty(x, {batch, tokens, out_features[i] / size, size}));
    p.qkv[i] = weight_of(qkv[i], item_of(biases, i), out_features[i]);
    p.outputs[i] = outputs[i].mutable_data_ptr();
  }
  for (size_t i = 0; i < head_norms.size(); ++i) p.head_norms[i] = head_norms[i].const_data_ptr();
  cpu::norm_qkv_rope(p, torch_parallel());
  return {outputs[0], outputs[1], outputs[2]};
}

void check_output_norm_mlp(const Tensor& attended, const Tensor& residual, const Tensor& norm,
                           const Tensor& output, const std::vector<Tensor>& mlp,
                           const std::vector<int64_t>& in_features,
                           const std::vector<int64_t>& out_features,
                           const std::optional<Tensor>& output_bias,
                           const std::vector<Tensor>& biases, double epsilon) {
  check_hidden("residual", residual);
  const int64_t batch = residual.size(0), tokens = residual.size(1), hidden = residual.size(2);
  SPECDEC_CHECK(attended.dim() == 3 && attended.size(0) == batch && attended.size(1) == tokens &&
                    attended.size(2) >= 1,
                "attended must be [B, n, A] = [", batch, ", ", tokens, ", A], got ",
                shape_of(attended));
  check_like("attended", attended, residual, "residual");
  check_vector("norm", norm, hidden, residual.scalar_type(), residual, "residual");
  SPECDEC_CHECK(mlp.size() == 3 && in_features.size() == 4 && out_features.size() == 4,
                "mlp must be 3 packed weights, got ", mlp.size());
  check_number("biases", biases, 3);
  const Sizes sizes = {in_features, out_features};
  const int64_t heads = attended.size(2), size = out_features[1];
  SPECDEC_CHECK(in_features[0] == heads && out_features[0] == hidden,
                "output must be a weight [C, A] = [", hidden, ", ", heads, "], got ", sizes.of(0));
  check_weight("output", output, hidden, heads, residual, "residual");
  SPECDEC_CHECK(in_features[1] == hidden && size >= 1,
                "mlp[0] must be a weight [I, C] with C = ", hidden, ", got ", sizes.of(1));
  SPECDEC_CHECK(in_features[2] == hidden && out_features[2] == size,
                "mlp[1] must be a weight [I, C] = ", sizes.of(1), ", got ", sizes.of(2));
  SPECDEC_CHECK(in_features[3] == size && out_features[3] == hidden,
                "mlp[2] must be a weight [C, I] = [", hidden, ", ", size, "], got ", sizes.of(3));
  for (size_t i = 0; i < 3; ++i) {
    const int64_t outputs = out_features[1 + i];
    check_weight(item("mlp", i), mlp[i], outputs, in_features[1 + i], residual, "residual");
    if (!biases.empty()) {
      check_vector(item("biases", i).c_str(), biases[i], outputs, residual.scalar_type(), residual,
                   "residual");
    }
  }
  if (output_bias) {
    check_vector("output_bias", *output_bias, hidden, residual.scalar_type(), residual, "residual");
  }
  check_entries("residual", "the result", "[B, n, C]", {batch, tokens, hidden});
  check_entries("residual", "the gate", "[B, n, I]", {batch, tokens, size});
  check_epsilon(epsilon);
}

Tensor output_norm_mlp(Tensor attended, Tensor residual, Tensor norm, Tensor output,
                       std::vector<Tensor> mlp, std::vector<int64_t> in_features,
                       std::vector<int64_t> out_features, std::optional<Tensor> output_bias,
                       std::vector<Tensor> biases, double epsilon) {
  check_output_norm_mlp(attended, residual, norm, output, mlp, in_features, out_features,
                        output_bias, biases, epsilon);
  const int64_t batch = residual.size(0), tokens = residual.size(1), hidden = residual.size(2);
  Tensor y = torch::stable::new_empty(residual, {batch, tokens, hidden});
  attended = dense(attended);
  residual = dense(residual);
  norm = dense(norm);
  if (output_bias) output_bias = dense(*output_bias);
  biases = all_dense(biases);
  OutputNormMlpParams p = {};
  p.attended = attended.const_data_ptr();
  p.residual = residual.const_data_ptr();
  p.norm = norm.const_data_ptr();
  p.output = weight_of(output, output_bias ? &*output_bias : nullptr, hidden);
  p.gate = weight_of(mlp[0], item_of(biases, 0), out_features[1]);
  p.up = weight_of(mlp[1], item_of(biases, 1), out_features[2]);
  p.down = weight_of(mlp[2], item_of(biases, 2), hidden);
  p.y = y.mutable_data_ptr();
  p.dtype = row_dtype(residual);
  p.rows = batch * tokens;
  p.attended_size = attended.size(2);
  p.hidden = hidden;
  p.epsilon = static_cast<float>(epsilon);
  cpu::output_norm_mlp(p, torch_parallel());
  return y;
}

// The features of output_norm_mlp are those of `output`, then of `mlp`.
#define SPECDEC_NORM_QKV_ROPE_ARGUMENTS                                                \
  "Tensor x, Tensor norm, Tensor[] qkv, SymInt[] in_features, SymInt[] out_features, " \
  "Tensor cos, Tensor sin, Tensor[] biases, Tensor[] head_norms, float epsilon"
#define SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS                                               \
  "Tensor attended, Tensor residual, Tensor norm, Tensor output, Tensor[] mlp, "        \
  "SymInt[] in_features, SymInt[] out_features, Tensor? output_bias, Tensor[] biases, " \
  "float epsilon"

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("norm_qkv_rope(" SPECDEC_NORM_QKV_ROPE_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
  m.def("validate_norm_qkv_rope(" SPECDEC_NORM_QKV_ROPE_ARGUMENTS ") -> ()");
  m.def("output_norm_mlp(" SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS ") -> Tensor");
  m.def("validate_output_norm_mlp(" SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS ") -> ()");
}
SPECDEC_IMPLEMENT_CPU(norm_qkv_rope)
SPECDEC_VALIDATE(norm_qkv_rope, check_norm_qkv_rope)
SPECDEC_IMPLEMENT_CPU(output_norm_mlp)
SPECDEC_VALIDATE(output_norm_mlp, check_output_norm_mlp)

}  // namespace
}  // namespace specdec
