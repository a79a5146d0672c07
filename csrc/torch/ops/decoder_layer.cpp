#include "specdec/decoder_layer.h"

#include <cmath>

#include "torch/arguments/linear.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_like(const char* name, const Tensor& t, const Tensor& x) {
  SPECDEC_CHECK(t.scalar_type() == x.scalar_type(), name, " must be ", dtype_name(x), ", got ",
                dtype_name(t));
  check_same_device(name, t, x, "x");
}

void check_x(const char* name, const Tensor& x, const char* shape) {
  SPECDEC_CHECK(x.dim() == 3 && x.size(2) >= 1, name, " must be ", shape, ", got ", shape_of(x));
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

void check_norm_qkv_rope(const Tensor& x, const Tensor& norm, const std::vector<Tensor>& panels,
                         const std::vector<int64_t>& out_features, const Tensor& cos,
                         const Tensor& sin, const std::vector<Tensor>& biases,
                         const std::vector<Tensor>& head_norms, double epsilon) {
  check_x("x", x, "[B, n, C]");
  check_floats("x", x);
  check_on_cpu("x", x);
  const int64_t batch = x.size(0), tokens = x.size(1), hidden = x.size(2);
  check_vector("norm", norm, hidden, x.scalar_type(), x, "x");
  SPECDEC_CHECK(cos.dim() == 3 && (cos.size(0) == batch || cos.size(0) == 1) &&
                    cos.size(1) == tokens && cos.size(2) >= 2 && cos.size(2) % 2 == 0,
                "cos must be [B, n, D] = [", batch, ", ", tokens, ", D], or [1, ", tokens,
                ", D], with an even D, got ", shape_of(cos));
  check_like("cos", cos, x);
  const int64_t size = cos.size(2);
  SPECDEC_CHECK(shape_of(sin) == shape_of(cos), "sin must have the shape of cos, ", shape_of(cos),
                ", got ", shape_of(sin));
  check_like("sin", sin, x);
  SPECDEC_CHECK(panels.size() == 3 && out_features.size() == 3,
                "qkv must be 3 packed weights, got ", panels.size());
  check_number("biases", biases, 3);
  check_number("head_norms", head_norms, 2);
  for (size_t i = 0; i < 3; ++i) {
    SPECDEC_CHECK(out_features[i] >= 1 && out_features[i] % size == 0, item("qkv", i),
                  " must have a multiple of D = ", size, " outputs, got ", out_features[i]);
    check_panels(item("qkv", i), panels[i], out_features[i], hidden, x, "x");
    if (!biases.empty()) {
      check_vector(item("biases", i).c_str(), biases[i], out_features[i], x.scalar_type(), x, "x");
    }
  }
  for (size_t i = 0; i < head_norms.size(); ++i) {
    check_vector(item("head_norms", i).c_str(), head_norms[i], size, x.scalar_type(), x, "x");
  }
  check_epsilon(epsilon);
}

std::tuple<Tensor, Tensor, Tensor> norm_qkv_rope(Tensor x, Tensor norm, std::vector<Tensor> panels,
                                                 std::vector<int64_t> out_features, Tensor cos,
                                                 Tensor sin, std::vector<Tensor> biases,
                                                 std::vector<Tensor> head_norms, double epsilon) {
  check_norm_qkv_rope(x, norm, panels, out_features, cos, sin, biases, head_norms, epsilon);
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
    p.qkv[i] = weight_of(panels[i], item_of(biases, i), out_features[i]);
    p.outputs[i] = outputs[i].mutable_data_ptr();
  }
  for (size_t i = 0; i < head_norms.size(); ++i) p.head_norms[i] = head_norms[i].const_data_ptr();
  cpu::norm_qkv_rope(p, torch_parallel());
  return {outputs[0], outputs[1], outputs[2]};
}

void check_output_norm_mlp(const Tensor& attended, const Tensor& residual, const Tensor& norm,
                           const std::vector<Tensor>& panels, int64_t intermediate_size,
                           const std::optional<Tensor>& output_bias,
                           const std::vector<Tensor>& biases, double epsilon) {
  check_x("residual", residual, "[B, n, C]");
  check_floats("residual", residual);
  check_on_cpu("residual", residual);
  check_x("attended", attended, "[B, n, A]");
  SPECDEC_CHECK(attended.size(0) == residual.size(0) && attended.size(1) == residual.size(1),
                "attended must be [B, n, A] = [", residual.size(0), ", ", residual.size(1),
                ", A], got ", shape_of(attended));
  SPECDEC_CHECK(attended.scalar_type() == residual.scalar_type(), "attended must be ",
                dtype_name(residual), ", got ", dtype_name(attended));
  check_same_device("attended", attended, residual, "residual");
  const int64_t hidden = residual.size(2), size = intermediate_size;
  check_vector("norm", norm, hidden, residual.scalar_type(), residual, "residual");
  SPECDEC_CHECK(size >= 1, "intermediate_size must be at least 1, got ", size);
  SPECDEC_CHECK(panels.size() == 4, "weights must be 4 packed weights, got ", panels.size());
  check_number("biases", biases, 3);
  const int64_t out[] = {hidden, size, size, hidden};
  const int64_t in[] = {attended.size(2), hidden, hidden, size};
  for (size_t i = 0; i < 4; ++i) {
    check_panels(item("weights", i), panels[i], out[i], in[i], residual, "residual");
    if (i > 0 && !biases.empty()) {
      check_vector(item("biases", i - 1).c_str(), biases[i - 1], out[i], residual.scalar_type(),
                   residual, "residual");
    }
  }
  if (output_bias) {
    check_vector("output_bias", *output_bias, hidden, residual.scalar_type(), residual, "residual");
  }
  check_epsilon(epsilon);
}

Tensor output_norm_mlp(Tensor attended, Tensor residual, Tensor norm, std::vector<Tensor> panels,
                       int64_t intermediate_size, std::optional<Tensor> output_bias,
                       std::vector<Tensor> biases, double epsilon) {
  check_output_norm_mlp(attended, residual, norm, panels, intermediate_size, output_bias, biases,
                        epsilon);
  const int64_t batch = residual.size(0), tokens = residual.size(1), hidden = residual.size(2);
  Tensor y = torch::stable::new_empty(residual, {batch, tokens, hidden});
  attended = dense(attended);
  residual = dense(residual);
  norm = dense(norm);
  if (output_bias) output_bias = dense(*output_bias);
  biases = all_dense(biases);
  const OutputNormMlpParams p = {
      attended.const_data_ptr(),
      residual.const_data_ptr(),
      norm.const_data_ptr(),
      weight_of(panels[0], output_bias ? &*output_bias : nullptr, hidden),
      weight_of(panels[1], item_of(biases, 0), intermediate_size),
      weight_of(panels[2], item_of(biases, 1), intermediate_size),
      weight_of(panels[3], item_of(biases, 2), hidden),
      y.mutable_data_ptr(),
      row_dtype(residual),
      batch * tokens,
      attended.size(2),
      hidden,
      static_cast<float>(epsilon)};
  cpu::output_norm_mlp(p, torch_parallel());
  return y;
}

#define SPECDEC_NORM_QKV_ROPE_ARGUMENTS                                                     \
  "Tensor x, Tensor norm, Tensor[] panels, SymInt[] out_features, Tensor cos, Tensor sin, " \
  "Tensor[] biases, Tensor[] head_norms, float epsilon"
#define SPECDEC_OUTPUT_NORM_MLP_ARGUMENTS                                                      \
  "Tensor attended, Tensor residual, Tensor norm, Tensor[] panels, SymInt intermediate_size, " \
  "Tensor? output_bias, Tensor[] biases, float epsilon"

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
