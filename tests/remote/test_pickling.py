"""What goes to ranks and comes back is what was given: tensors, arrays, modules, functions."""

import functools
import re
import subprocess
import sys
import warnings
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.remote import pickling

DTYPES = sorted(
    # Quantized tensors have their own test; torch itself cannot copy those of 1 to 7 bits.
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and not re.match(r"torch\.(qu?int|u?int[1-7]$)", str(each))
    },
    key=str,
)


def carry(value: Any) -> Any:
    """As over a connection: the contents beside the pickle come back in other memory."""
    body, buffers = pickling.dump(value)
    return pickling.load(body, tuple(memoryview(bytearray(each)) for each in buffers))


def test_small_contents_are_in_the_pickle() -> None:
    for size in (0, 1, pickling.SMALL_BYTES, pickling.SMALL_BYTES + 1, 10**6):
        _, buffers = pickling.dump(content := np.ones(size, np.uint8))
        assert [each.nbytes for each in buffers] == ([size] if size > 4096 else [])
        assert np.array_equal(carry(content), content)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view, of any stride and offset, of a tensor of any shape."""
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    if shape and draw(st.booleans()):
        whole = whole.transpose(0, -1)
    for axis, size in enumerate(whole.shape):
        begin = draw(st.integers(0, size))
        step = draw(st.integers(1, 3))
        whole = whole[(slice(None),) * axis + (slice(begin, None, step),)]
    return whole.expand(2, *whole.shape) if draw(st.booleans()) else whole


@settings(max_examples=100)
@given(tensors(), st.booleans(), st.booleans())
def test_a_tensor_comes_as_it_was(tensor, needs_grad, is_parameter):
    tensor.requires_grad_(needs_grad)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, needs_grad)
    found = carry({"nested": [tensor]})["nested"][0]
    assert torch.equal(found, tensor)
    assert (found.shape, found.dtype, type(found)) == (tensor.shape, tensor.dtype, type(tensor))
    assert found.requires_grad is needs_grad
    # No more than twice what it shows is sent.
    assert found.untyped_storage().nbytes() <= 2 * tensor.nbytes


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 30), max_size=3),
    st.sampled_from(["f4", "i8", "c16", "?", "U3", "S5", "O", "M8[s]", "i4,f8"]),
    st.sampled_from(["C", "F", "strided"]),
    st.booleans(),
)
def test_an_array_comes_as_it_was(shape, kind, order, is_read_only):
    array = np.zeros(shape, dtype=kind, order="C" if order == "strided" else order)
    if kind in ("f4", "i8"):
        array[...] = np.arange(array.size).reshape(shape)
    if order == "strided" and array.ndim:
        array = array[::-2]
    array.flags.writeable = not is_read_only
    found = carry(array)
    assert found.dtype == array.dtype and np.array_equal(found, array)
    # numpy itself copies what is in no order, into memory that can be written.
    if kind in ("f4", "i8") and order != "strided":
        assert found.flags.writeable is not is_read_only


def test_every_dtype_that_torch_has():
    with warnings.catch_warnings(action="ignore"):  # torch's, of dtypes on trial.
        for dtype in DTYPES:
            tensor = torch.arange(16, dtype=torch.uint8).view(dtype)
            found = carry(tensor)
            # Not all of them can be compared.
            assert found.dtype == dtype
            assert bytes(found.untyped_storage()) == bytes(tensor.untyped_storage())
    assert {torch.float8_e4m3fn, torch.uint16, torch.complex32, torch.bool} < set(DTYPES)


def test_tensors_that_share_a_storage_share_it_again():
    base = torch.arange(2000.0)
    whole, part, small = carry((base, base[500:], base[:10]))
    whole.fill_(7)
    assert part.tolist() == [7.0] * 1500
    assert small.tolist() == base[:10].tolist()
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    model, optimizer = carry((tied, torch.optim.SGD(tied.parameters())))
    assert model[0].weight is model[1].weight
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert torch.equal(model[0].weight, tied[0].weight)


def test_attributes_of_a_small_view_and_of_itself():
    parameter = torch.nn.Parameter(torch.arange(100.0)[:10])
    parameter.group, parameter.me = "head", parameter
    found = carry(parameter)
    assert (found.group, found.me is found) == ("head", True)
    assert found.untyped_storage().nbytes() == 40


@pytest.mark.filterwarnings("ignore")
def test_other_layouts():
    dense = torch.eye(3)
    for tensor in (dense.to_sparse(), dense.to_sparse_csr()):
        found = carry(tensor)
        assert found.layout is tensor.layout and torch.equal(found.to_dense(), dense)
    quantized = torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8)
    assert torch.equal(carry(quantized).dequantize(), dense)
    assert carry(torch.empty(3, device="meta")).is_meta
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert [each.tolist() for each in carry(nested).unbind()] == [[1.0] * 2, [1.0] * 3]
    with torch.device("meta"):
        found = carry(torch.arange(5000, device="cpu"))
    assert found.device.type == "cpu" and torch.equal(found, torch.arange(5000))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert carry(conjugate).tolist() == [1 - 2j] and carry(conjugate.imag).tolist() == [-2]


def test_large_contents_are_not_copied_and_small_ones_have_no_price():
    large, array = torch.zeros(5000), np.zeros(5000)
    body, buffers = pickling.dump((large, array))
    assert len(body) < 2000
    assert [each.nbytes for each in buffers] == [20_000, 40_000]
    array[7] = 1
    assert any(buffers[1])
    # 8 bytes each would be a header of megabytes.
    assert pickling.dump([torch.zeros(2) for _ in range(1000)])[1] == ()


FOREIGN_CLASS = """
import cloudpickle, sys
class Foreign:
    def find(self): return 0
sys.stdout.buffer.write(cloudpickle.dumps(Foreign()))
"""


def test_a_result_leaves_the_classes_of_this_process_as_they_are():
    class Local:
        count = 0

        def find(self) -> int:
            return self.count

    find = Local.find
    body = cloudpickle.dumps(Local())
    Local.count = 5
    found = pickling.ResultUnpickler(body, ()).load()
    assert type(found) is Local and found.find() == 5 and Local.find is find
    # One that is not here comes whole.
    done = subprocess.run([sys.executable, "-c", FOREIGN_CLASS], stdout=subprocess.PIPE, check=True)
    assert pickling.ResultUnpickler(done.stdout, ()).load().find() == 0


class PrefixedError(KeyError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")
        self.prefix = "no"


@pytest.mark.parametrize(
    "error",
    [
        PrefixedError("such"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        FileNotFoundError(2, "none", "a.txt"),
        SyntaxError("bad", ("a.py", 1, 2, "x = ", 1, 3)),
        ExceptionGroup("two", [PrefixedError("a"), ValueError(1)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_as_it_was(error):
    found = carry(error)
    assert type(found) is type(error)
    assert (repr(found), str(found)) == (repr(error), str(error))
    for name in ("args", "reason", "filename", "lineno", "exceptions", "prefix"):
        assert repr(getattr(found, name, None)) == repr(getattr(error, name, None))


def test_messages_name_a_function_that_has_some_of_its_arguments():
    assert pickling.describe_function(functools.partial(functools.partial(carry, 1))) == "carry"
