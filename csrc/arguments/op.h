#pragma once
// Ops whose arguments are a struct. Its function `arguments` lists the members by name in the order
// of the schema; the schema and the functions that are registered are made from this list.
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "arguments/tensor.h"

namespace specdec {

template <class T>
constexpr const char* kSchemaType = nullptr;
template <>
inline constexpr const char* kSchemaType<Tensor> = "Tensor";
template <>
inline constexpr const char* kSchemaType<std::optional<Tensor>> = "Tensor?";
template <>
inline constexpr const char* kSchemaType<double> = "float";
template <>
inline constexpr const char* kSchemaType<float> = "float";
template <>
inline constexpr const char* kSchemaType<int64_t> = "int";
template <>
inline constexpr const char* kSchemaType<bool> = "bool";

// What a function that is registered takes for a member: a schema's float is a double.
template <class T>
using Passed = std::conditional_t<std::is_same_v<T, float>, double, T>;

// A member, and its name and type in the schema.
template <class T>
struct Argument {
  T& value;
  const char *name, *type;
};

template <class T>
Argument<T> argument(const char* name, T& value, const char* type = kSchemaType<T>) {
  return {value, name, type};
}

// An op, and its validation alone, as functions of what the schema lists.
template <class Arguments, class List = decltype(std::declval<Arguments&>().arguments())>
struct Op;
template <class Arguments, class... T>
struct Op<Arguments, std::tuple<Argument<T>...>> {
  static decltype(std::declval<Arguments>().run()) run(Passed<T>... values) {
    return named(values...).run();
  }
  static void validate(Passed<T>... values) { named(values...).check(); }

  // The arguments of the schema, such as "(Tensor target, float lenience)".
  static std::string schema() {
    Arguments none{};
    std::string list;
    const auto add = [&](const auto& one) {
      list += std::string(list.empty() ? "(" : ", ") + one.type + " " + one.name;
    };
    std::apply([&](const auto&... each) { (add(each), ...); }, none.arguments());
    return list + ")";
  }

 private:
  static Arguments named(Passed<T>&... values) {
    Arguments given{};
    std::apply(
        [&](const Argument<T>&... each) {
          ((each.value = static_cast<T>(std::move(values))), ...);
        },
        given.arguments());
    return given;
  }
};

}  // namespace specdec
