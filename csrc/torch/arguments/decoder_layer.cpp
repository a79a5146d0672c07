#include "torch/arguments/decoder_layer.h"

namespace specdec {
namespace {

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

template <class T>
std::vector<T> slice(const std::vector<T>& list, size_t begin, size_t end) {
  return {list.begin() + begin, list.begin() + end};
}

// The i-th of equal parts of a list, which may be empty.
template <class T>
std::vector<T> part(const std::vector<T>& list, size_t i, size_t size) {
  return list.empty() ? list : slice(list, i * size, (i + 1) * size);
}

// The weights of one of several layers; those of qkv, of the output projection and of the MLP.
struct Layer {
  std::vector<Tensor> norms, weights;
  std::vector<int64_t> in_features, out_features;
  std::vector<Tensor> qkv_biases, mlp_biases, head_norms;
  std::optional<Tensor> output_bias;
};

struct Layers {
  const std::vector<Tensor>&norms, &weights;
  const std::vector<int64_t>&in_features, &out_features;
  const std::vector<Tensor>&qkv_biases, &output_biases, &mlp_biases, &head_norms;

  size_t count() const { return norms.size() / 2; }

  Layer at(size_t i) const {
    Layer layer = {part(norms, i, 2),       part(weights, i, 7),
                   part(in_features, i, 7), part(out_features, i, 7),
                   part(qkv_biases, i, 3),  part(mlp_biases, i, 3),
                   part(head_norms, i, 2),  std::nullopt};
    if (!output_biases.empty()) layer.output_bias = output_biases[i];
    return layer;
  }

  void check_numbers() const {
    const size_t n = count();
    SPECDEC_CHECK(n >= 1 && norms.size() == 2 * n, "norms must be 2 tensors a layer, got ",
                  norms.size());
    SPECDEC_CHECK(
        weights.size() == 7 * n && in_features.size() == 7 * n && out_features.size() == 7 * n,
        "qkv, output and mlp must be ", 7 * n, " packed weights, 7 a layer, got ", weights.size());
    check_number("qkv_biases", qkv_biases, 3 * n);
    check_number("output_biases", output_biases, n);
    check_number("mlp_biases", mlp_biases, 3 * n);
    check_number("head_norms", head_norms, 2 * n);
  }
};

// Adds to the message of an error which layer its argument belongs to, and which half of it.
template <class F>
void in_part(size_t layer, const char* part, F&& check) {
  try {
    check();
  } catch (const std::runtime_error& error) {
    fail("layer ", layer, ", ", part, " attention: ", error.what());
  }
}

}  // namespace

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

void check_weight(const std::string& name, const Tensor& panels, int64_t out_features,
                  int64_t in_features, const Tensor& of, const char* of_name) {
  check_entries(name.c_str(), "the weight", "[N, K]", {out_features, in_features});
  check_panels(name, panels, out_features, in_features, of, of_name);
}

void check_norm_qkv_rope(const Tensor& x, int64_t hidden, const Tensor& norm,
                         const std::vector<Tensor>& qkv, const std::vector<int64_t>& in_features,
                         const std::vector<int64_t>& out_features, const Tensor& cos,
                         const Tensor& sin, const std::vector<Tensor>& biases,
                         const std::vector<Tensor>& head_norms, double epsilon) {
  const int64_t batch = x.size(0), tokens = x.size(1);
  SPECDEC_CHECK(norm.numel() == hidden && (norm.dim() == 1 || norm.dim() == 2),
                "norm must be [C], or [G, C] for G parts of x, with ", hidden, " numbers, got ",
                shape_of(norm));
  check_like("norm", norm, x, "x");
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

void check_mlp(const Tensor& residual, int64_t hidden, int64_t heads, const Tensor& norm,
               const Tensor& output, const std::vector<Tensor>& mlp,
               const std::vector<int64_t>& in_features, const std::vector<int64_t>& out_features,
               const std::optional<Tensor>& output_bias, const std::vector<Tensor>& biases,
               double epsilon) {
  const int64_t batch = residual.size(0), tokens = residual.size(1);
  check_vector("norm", norm, hidden, residual.scalar_type(), residual, "residual");
  SPECDEC_CHECK(mlp.size() == 3 && in_features.size() == 4 && out_features.size() == 4,
                "mlp must be 3 packed weights, got ", mlp.size());
  check_number("biases", biases, 3);
  const Sizes sizes = {in_features, out_features};
  const int64_t size = out_features[1];
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

// All is checked before a cache is written.
Extents check_decoder_layers(
    const Tensor& x, const std::vector<Tensor>& norms, const std::vector<Tensor>& weights,
    const std::vector<int64_t>& in_features, const std::vector<int64_t>& out_features,
    const std::vector<Tensor>& qkv_biases, const std::vector<Tensor>& output_biases,
    const std::vector<Tensor>& mlp_biases, const std::vector<Tensor>& head_norms, const Tensor& cos,
    const Tensor& sin, const std::vector<Tensor>& caches, const Tensor& positions,
    const Tensor& mask, double scale, double epsilon, bool) {
  const Layers layers = {norms,      weights,       in_features, out_features,
                         qkv_biases, output_biases, mlp_biases,  head_norms};
  layers.check_numbers();
  const size_t count = layers.count();
  SPECDEC_CHECK(caches.size() == 2 * count, "caches must be ", 2 * count,
                " tensors, the keys and the values of each layer, got ", caches.size());
  std::vector<int64_t> kv_heads;
  int64_t input = 0;  // numbers of a token before a layer
  in_part(0, "before", [&] {
    check_hidden("x", x);
    input = x.size(2);
  });
  for (size_t i = 0; i < count; ++i) {
    const Layer layer = layers.at(i);
    in_part(i, "before", [&] {
      SPECDEC_CHECK(i == 0 || layer.norms[0].dim() == 1,
                    "norm must be [C], because only the first layer reads several parts, got ",
                    shape_of(layer.norms[0]));
      check_norm_qkv_rope(x, input, layer.norms[0], slice(layer.weights, 0, 3),
                          slice(layer.in_features, 0, 3), slice(layer.out_features, 0, 3), cos, sin,
                          layer.qkv_biases, layer.head_norms, epsilon);
    });
    const int64_t heads = layer.out_features[0] / cos.size(2);
    kv_heads.push_back(layer.out_features[1] / cos.size(2));
    in_part(i, "before", [&] {
      SPECDEC_CHECK(heads % kv_heads[i] == 0, "qkv[1] must have a number of heads that divides ",
                    heads, ", that of qkv[0], got ", kv_heads[i]);
    });
    // Of several parts of x the last is the residual.
    const Tensor& norm = layer.norms[0];
    const int64_t hidden = norm.size(norm.dim() - 1);
    in_part(i, "after", [&] {
      check_mlp(x, hidden, layer.out_features[0], layer.norms[1], layer.weights[3],
                slice(layer.weights, 4, 7), slice(layer.in_features, 3, 7),
                slice(layer.out_features, 3, 7), layer.output_bias, layer.mlp_biases, epsilon);
    });
    input = hidden;
  }
  const int64_t batch = x.size(0), tokens = x.size(1), size = cos.size(2);
  check_integers("positions", positions, batch, x, "x");
  check_caches("caches", caches, positions, "x");
  const int64_t slots = caches[0].size(2);
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches[i];
    SPECDEC_CHECK(
        cache.size(1) == kv_heads[i / 2] && cache.size(2) == slots && cache.size(3) == size,
        item("caches", i), " must be [B, H_kv, S, D] = [", batch, ", ", kv_heads[i / 2], ", ",
        slots, ", ", size, "], got ", shape_of(cache));
    check_like(item("caches", i).c_str(), cache, x, "x");
  }
  SPECDEC_CHECK(slots < int64_t{1} << 31, "caches[0] must have less than 2147483648 slots, got ",
                slots);
  SPECDEC_CHECK(mask.dim() == 4 && mask.size(0) == batch && mask.size(1) == 1 &&
                    mask.size(2) == tokens && mask.size(3) <= slots,
                "mask must be [B, 1, n, S] = [", batch, ", 1, ", tokens, ", S] with S at most ",
                slots, ", the slots of caches, got ", shape_of(mask));
  SPECDEC_CHECK(mask.scalar_type() == ScalarType::Bool, "mask must be bool, got ",
                dtype_name(mask));
  check_same_device("mask", mask, x, "x");
  SPECDEC_CHECK(std::isfinite(static_cast<float>(scale)), "scale must be finite, got ", scale);
  return check_written("caches", caches);
}

PackedWeight weight_of(const Tensor& panels, const Tensor* bias, int64_t out_features) {
  return {panels.const_data_ptr(), format_of(panels),
          bias != nullptr ? bias->const_data_ptr() : nullptr, out_features};
}

DecoderLayers::DecoderLayers(const Extents& written, std::vector<Tensor> norms,
                             std::vector<Tensor> weights, const std::vector<int64_t>& out_features,
                             std::vector<Tensor> qkv_biases, std::vector<Tensor> output_biases,
                             std::vector<Tensor> mlp_biases, std::vector<Tensor> head_norms,
                             const std::vector<Tensor>& caches) {
  for (std::vector<Tensor>* const read :
       {&norms, &weights, &qkv_biases, &output_biases, &mlp_biases, &head_norms}) {
    *read = read_first(*read, written);
    for (Tensor& t : *read) held_.push_back(t = dense(t));
  }
  const size_t count = norms.size() / 2;
  for (size_t i = 0; i < count; ++i) {
    const auto weight = [&](size_t j, const std::vector<Tensor>& biases, size_t bias) {
      return weight_of(weights[7 * i + j], biases.empty() ? nullptr : &biases[bias],
                       out_features[7 * i + j]);
    };
    DecoderLayerWeights layer = {};
    for (size_t j = 0; j < 2; ++j) {
      layer.norms[j] = norms[2 * i + j].const_data_ptr();
      if (!head_norms.empty()) layer.head_norms[j] = head_norms[2 * i + j].const_data_ptr();
    }
    for (size_t j = 0; j < 3; ++j) layer.qkv[j] = weight(j, qkv_biases, 3 * i + j);
    layer.output = weight(3, output_biases, i);
    layer.gate = weight(4, mlp_biases, 3 * i);
    layer.up = weight(5, mlp_biases, 3 * i + 1);
    layer.down = weight(6, mlp_biases, 3 * i + 2);
    layers_.push_back(layer);
  }
  for (const Tensor& cache : caches) caches_.push_back(kv_tensor(cache));
}

void DecoderLayers::set(DecoderLayersParams& p) const {
  p.layers = layers_.data();
  p.caches = caches_.data();
  p.num_layers = static_cast<int64_t>(layers_.size());
}

}  // namespace specdec
