"""The structs of the C interface: their fields, defaults and sizes, and what calls refuse."""

import ctypes
import re
import shutil

import pytest
import torch
from c import library as c
from project.wrong_calls import BUILD, TABLE
from torch.utils._pytree import tree_flatten

import specdec_kernels
from specdec_kernels.arguments import rules

pytestmark = c.MARKS

# Good arguments that are not those of BUILD: what a caller leaves out who knows no such field.
PLAIN = {"paged_append_": dict(counts=None), "kv_truncate_": dict(fill=False)}
# Defaults that the public functions have otherwise; of what has none, a number that is refused.
DEFAULTS = {"noise": 1, "max_depth": -1, "block_size": 0}


def named(op, **bad):
    return dict(zip(c.arguments_of(op), BUILD[op](**bad), strict=True))


def good_call(op):
    """The arguments of a valid call by name, and the outputs for it."""
    given = named(op, **PLAIN.get(op, {}))
    return given, c.poisoned(c.returned(op, BUILD[op](**PLAIN.get(op, {}))))[0]


@pytest.mark.parametrize("op", c.OPS)
def test_fields_have_the_names_of_the_schema(op):
    outputs = {one.name for one in c.torch_op(op)._schema.returns}
    fields = {n for n in c.fields_of(op) if not n.startswith("num_")} | {*outputs}
    names = {name for name in c.arguments_of(op) if not name.startswith("with_")}
    assert fields == names | outputs | {"struct_size"}


def test_the_header_has_the_numbers_of_the_python_names():
    for prefix, names in (
        ("RULE_", rules.RULES), ("TREE_", rules.TREE_RULES), ("KIND_", rules.KINDS),
        ("NOISE_", rules.NOISES), ("", rules.METHODS),
    ):  # fmt: skip
        assert [c.NUMBERS[prefix + name.upper()] for name in names] == [*range(len(names))]
    status = {one.name: one.value for one in specdec_kernels.Status}
    assert status.items() <= c.NUMBERS.items() | {(n, v) for n, v in status.items() if v > 32}


def numbers_of(args, end):
    """The numbers of a struct that lie before an offset."""
    return {
        name: getattr(args, name)
        for name, kind in c.fields_of(type(args).__name__).items()
        if kind in ("double", "int64_t") and getattr(type(args), name).offset < end
    }


@pytest.mark.parametrize("op", c.OPS)
def test_defaults_are_those_of_the_public_function(op):
    good = named(op, **PLAIN.get(op, {})) | DEFAULTS
    good |= {"rule": -1} if op == "verify_tree" else {}
    for name, value in numbers_of(c.init(op), 10**6).items():
        assert value == (0 if name.startswith("num_") else pytest.approx(+good[name])), name


def refused(op, bad, outputs):
    """The message of a wrong call; it is None where C has no such call."""
    given = named(op, **bad)
    tensors, _ = tree_flatten([*given.values()])
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    if any(t.dim() > 4 or t.device.type != "cpu" for t in tensors):
        return None
    return c.call(op, c.filled(op, given, outputs))


@pytest.mark.parametrize("op", c.OPS)
def test_the_same_calls_are_refused_with_the_same_messages(op):
    _, outputs = good_call(op)
    wrong, rows = [], [row[1:] for row in TABLE if row[0] == op]
    for bad, message in rows:
        text = refused(op, bad, outputs)
        # Every dtype of one byte, and of two that no op takes, is one to C.
        pattern = re.sub("int16|bool|u?int8|float8_e\\w+", r"\\w+", f"1: {message}")
        if text is not None and not re.fullmatch(pattern, text):
            wrong.append((text, message))
    assert wrong == []
    assert rows


BAD_FIELDS = [
    ("dtype", 99, "dtype must be of enum specdec_dtype, got 99"),
    ("ndim", 5, r"ndim must be in \[0, 4\], got 5"),
    ("sizes", (ctypes.c_int64 * 4)(-1), r"sizes\[0\] must be at least 0, got -1"),
    ("data", None, "data must not be null"),
    ("data", 4097, r"data must be aligned to its elements of \d bytes, .* ends in 1"),
]


@pytest.mark.parametrize("op", c.OPS)
def test_every_tensor_of_a_struct_is_read(op):
    good, outputs = good_call(op)
    for name, kind in c.fields_of(op).items():
        if kind not in ("specdec_tensor", "const specdec_tensor*"):
            continue
        is_list = kind.startswith("const")
        for field, value, message in BAD_FIELDS:
            args, bad = c.filled(op, good, outputs), c.c_tensor(torch.zeros(2, 2))
            setattr(bad, field, value)
            setattr(args, name, (c.CTensor * 1)(bad) if is_list else bad)
            found = rf"1: {name}\[0\]\.{message}" if is_list else rf"1: {name}\.{message}"
            assert re.fullmatch(found, c.call(op, args))
        if is_list:
            bad = c.c_tensor(good[name][0])
            bad.strides[1] = -1
            setattr(args, name, (c.CTensor * 1)(bad))
            assert c.call(op, args) == f"1: {name}[0].strides[1] must be at least 0, got -1"
            args = c.filled(op, good, outputs)
            setattr(args, f"num_{name}", -1)
            assert c.call(op, args) == f"1: num_{name} must be at least 0, got -1"
            args = c.filled(op, good, outputs)
            setattr(args, name, None)
            assert c.call(op, args) == f"1: {name} must not be null"
    for name in outputs:
        args = c.filled(op, good, outputs)
        setattr(args, name, None)
        may_be_null = f"with_{name}" in good
        assert c.call(op, args) == ("" if may_be_null else f"1: {name} must not be null")


@pytest.mark.parametrize("op", c.OPS)
def test_a_caller_who_knows_fewer_fields_gets_the_defaults_of_the_others(op):
    good, outputs = good_call(op)
    expected = c.returned(op, [*named(op, **PLAIN.get(op, {})).values()])
    struct, args = c.struct_of(op), c.filled(op, good, outputs)
    args.struct_size = 8
    found = re.match(r"1: args\.struct_size must be at least (\d+) and a mult", c.call(op, args))
    for size in [*(getattr(struct, name).offset for name in c.fields_of(op)), ctypes.sizeof(args)]:
        given = named(op, **PLAIN.get(op, {}))
        outputs, _ = c.poisoned(expected)
        args = c.filled(op, given, outputs)
        # What is not the library's to read.
        ctypes.memset(ctypes.addressof(args) + size, 0x7B, ctypes.sizeof(args) - size)
        args.struct_size = size
        if size < int(found[1]):
            assert c.call(op, args)[:20] == found[0][:20]
            continue
        assert c.call(op, args) == ""
        c.check_outputs(given, outputs, expected)
        small = c.init(op, size)
        assert small.struct_size == size
        assert numbers_of(small, size) == numbers_of(c.init(op), size)


def test_a_caller_who_knows_more_fields_may_leave_them_unset():
    args = c.filled("sample", *good_call("sample"))
    size = ctypes.sizeof(args)
    later = (ctypes.c_char * (size + 16))()
    ctypes.memmove(later, ctypes.byref(args), size)
    ctypes.c_size_t.from_buffer(later).value = size + 16
    assert c.call("sample", later) == ""
    later[size + 9] = 1
    assert c.call("sample", later).endswith(f"got {size + 16} and byte {size + 9} is set")
    assert c.call("sample", None) == "1: args must not be null"
    assert c.library().specdec_sample_init(None, ctypes.c_size_t(size)) == 1
    assert c.library().specdec_sample_init(later, ctypes.c_size_t(8)) == 1
    assert c.last_error().startswith("struct_size must be at least")


@pytest.mark.parametrize("op", c.OPS)
def test_a_library_without_cuda_says_so_of_a_valid_call(op):
    good, outputs = good_call(op)
    args, size = c.filled(op, good, outputs), ctypes.c_int64()
    without = "2: this library was built without CUDA kernels"
    more = (None, ctypes.c_int64(0), None) if op in c.WORKSPACE else (None,)
    assert c.call(op, args, "_cuda", *more) == without
    args.struct_size = 0
    assert c.call(op, args, "_cuda", *more).startswith("1: args.struct_size must be")
    if op in c.WORKSPACE:
        args = c.filled(op, good, outputs)
        assert c.call(op, args, "_cuda_workspace_bytes", ctypes.byref(size)) == without
        assert c.call(op, args, "_cuda_workspace_bytes", None) == "1: bytes must not be null"
        for name, change, message in [
            ("seeds", torch.Tensor.int, "int64 on CUDA, got int32"),
            ("positions", lambda x: x.repeat_interleave(2)[::2], "contiguous on CUDA"),
        ]:
            wrong = c.filled(op, good | {name: change(good[name])}, outputs)
            assert c.call(op, wrong, "_cuda", *more) == f"1: {name} must be {message}"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("op", c.WORKSPACE)
def test_cuda_kernels_are_linked_and_their_workspace_is_checked(op):
    """No kernel is launched: what runs on a device is that of the torch ops."""
    args, size = c.filled(op, *good_call(op)), ctypes.c_int64()
    assert c.library(cuda=True).specdec_has_cuda()
    assert c.call(op, args, "_cuda_workspace_bytes", ctypes.byref(size), cuda=True) == ""
    less = ctypes.c_int64(size.value - 1)
    text = c.call(op, args, "_cuda", None, less, None, cuda=True)
    assert text == f"1: workspace_bytes must be at least {size.value}, got {less.value}"
    text = c.call(op, args, "_cuda", None, size, None, cuda=True)
    assert text == "1: workspace must not be null"
