"""Tensors behave as tensors: indexing, views, in-place and out=, copies of any shape, and everyday Python."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch
import torch_virtual
from torch import nn


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


EXPRESSIONS = {
    "slices": lambda x: (x[2:5], x[::2, 1], x[..., -1], x[None], x[1:1]),
    "lists": lambda x: (x[[1, 3]], x[:, [0, 2]], x[[0, 1], [2, 3]]),
    "masks": lambda x: (x[x > 0], x[:, x[0] > 0], x.masked_select(x < 0)),
    "einsum": lambda x: (torch.einsum("ij,kj->ik", x, x), torch.einsum("ij->j", x)),
    "matmul": lambda x: (x @ x.t(), x.t() @ x, x[0] @ x[1], torch.addmm(x[:, :6], x, x[:6].t()), x[None] @ x.t()),
    "scans": lambda x: (x.cumsum(0), x.cumprod(1), x.logcumsumexp(1), *x.cummax(0)),
    "where": lambda x: (torch.where(x > 0, x, -x), torch.where(x > 0, x, 0.0), x.masked_fill(x > 1, 3.0)),
    "reductions": lambda x: (x.sum(), x.mean(1), x.var(0), x.norm(), x.amax(0), *x.max(1), x.prod(), x.argmin()),
    "shapes": lambda x: (x.view(2, 3, 8), x.reshape(8, 6), x.t().contiguous(), x.unflatten(1, (2, 4)), x.flip(0)),
    "lists of views": lambda x: [*x.split(2), *x.chunk(3, 1), *x.unbind(1), *x.tensor_split(4, 1)],
    "joins": lambda x: (torch.cat([x, x], 1), torch.stack([x, x]), torch.hstack([x, x]), x.repeat(2, 3)),
    "expanded": lambda x: (x.unsqueeze(0).expand(4, 6, 8) + 1, x.repeat_interleave(2, 0), x.roll(1, 0)),
    "triangles": lambda x: (x.tril(), x.triu(1), x.diagonal(), torch.diag_embed(x)),
    "arithmetic": lambda x: (x + 1, 2 - x, x / 3, x.int() // 2, x % 2, -x, abs(x), x.clamp(-1, 1), x.lerp(-x, 0.3)),
    "promotion": lambda x: (x + 1.5, x.int() + 1.5, x.half() + x, x.bool() + 1, x.to(torch.bfloat16) * 2),
    "comparisons": lambda x: (x == x.t().t(), x.isnan(), x.isfinite(), torch.equal(x, x), (x > 0).all(), (x > 9).any()),
    "linear algebra": lambda x: (torch.linalg.inv(x @ x.t() + torch.eye(6, device=x.device)), torch.linalg.svdvals(x)),
    "fft": lambda x: (torch.fft.rfft(x).abs(), torch.fft.fft(x).real, torch.fft.irfft(torch.fft.rfft(x))),
    "unfold": lambda x: (x.unfold(1, 3, 2), nn.functional.unfold(x.view(1, 1, 6, 8), 2)),
    "factories": lambda x: (
        torch.arange(5, device=x.device), torch.linspace(0, 1, 4, device=x.device), torch.full_like(x, 3),
        torch.eye(3, device=x.device), torch.tril_indices(3, 3, device=x.device), x.new_zeros(2), torch.ones_like(x),
        torch.tensor([1, 2], device=x.device), torch.randn(4, device=x.device), torch.randperm(9, device=x.device),
    ),
    "in place": lambda x: x.clone().add_(1).mul_(x).sub_(x.sum(0)).relu_(),
    "in place on views": lambda x: _in_place(x),
    "foreach": lambda x: (
        *torch._foreach_mul([x, x[0]], 2.0), *torch._foreach_norm([x, x[0]]), *torch._foreach_add([x], [x], alpha=3),
        *torch._foreach_sqrt([x.abs()]), *torch._foreach_lerp([x], [x * 2], 0.5),
    ),
    "complex": lambda x: (
        torch.view_as_real(torch.polar(x.abs(), x).conj().resolve_conj()), torch.complex(x, x).conj().imag,
        torch.view_as_complex(x.view(6, 4, 2)).mul(1j).real,
        (torch.complex(x, -x).conj() @ torch.complex(x, x).t()).abs(),
    ),
    "one of several results": lambda x: torch.split(x, 3)[0],  # the others' gradients are undefined
}  # fmt: skip


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1:3] += 2
    y[:, 0] = 5.0
    y.view(-1)[::7].mul_(3)
    y.t()[2].copy_(y[:, 3])
    y[y > 4] = -1
    y[[0, 1]] = y[[2, 3]]
    return y


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_equal_the_cpus(on_both, name):
    on_both(EXPRESSIONS[name], leaf(6, 8))


@pytest.mark.parametrize("where", ["cpu", "virtual"])
def test_indices_may_be_on_either_side(same, where):
    x = torch.randn(6, 8)
    i, mask = torch.tensor([3, 1, 1]), torch.rand(6) > 0.5
    y = x.to("virtual")
    same(y[i.to(where)], x[i])
    same(y[mask.to(where)], x[mask])
    same(y[:, i.to(where)], x[:, i])
    z = y.clone()
    z[i.to(where)] = 7.0
    z.index_put_((i.to(where), i.to(where)), torch.ones(3, device="virtual"), accumulate=True)
    x[i] = 7.0
    x.index_put_((i, i), torch.ones(3), accumulate=True)
    same(z, x)


def test_out_variants_resize_and_keep_their_identity(same):
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    out = torch.empty(0, device="virtual")
    alias = out.detach()
    got = torch.mm(a.to("virtual"), b.to("virtual"), out=out)
    assert got is out
    same(out, a @ b)
    assert alias.untyped_storage().data_ptr() == out.data_ptr()  # one storage, which grew
    out = torch.empty(7, 5, device="virtual").t()
    torch.mm(a.to("virtual"), b.to("virtual"), out=out)
    same(out, a @ b)
    values, indices = torch.empty(0, device="virtual"), torch.empty(0, dtype=torch.int64, device="virtual")
    torch.sort(a.to("virtual"), out=(values, indices))
    same([values, indices], list(a.sort()))
    kept = torch.zeros(3, device="virtual")
    kept.resize_(5, 5).zero_()
    assert kept.shape == (5, 5)
    kept.set_(out.untyped_storage(), 2, (3,), (1,))
    same(kept, out.cpu().t().reshape(-1)[2:5])


MIXED = {
    "arithmetic": lambda v, c: v + c,
    "matmul": lambda v, c: v @ c,
    "cat": lambda v, c: torch.cat([v, c]),
    "index_select": lambda v, c: v.index_select(0, torch.tensor([1])),
    "gather": lambda v, c: v.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "embedding": lambda v, c: nn.functional.embedding(torch.tensor([1]), v),
    "index_put values": lambda v, c: v.index_put_((torch.tensor([0]),), c[:1]),
    "out=": lambda v, c: torch.add(v, v, out=c),
    "out= of one element": lambda v, c: torch.sum(v, (0, 1), out=torch.tensor(0.0)),
    "in place on a number": lambda v, c: torch.tensor(1.0).add_(v.sum()),
    "copy's opposite": lambda v, c: torch.where(c > 0, v, v),
    "other device": lambda v, c: v + v.to("virtual:1"),
    "other device, matmul": lambda v, c: v @ v.to("virtual:1"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_is_refused(name):
    v, c = torch.ones(3, 3, device="virtual"), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"same device|device type|is on cpu"):
        MIXED[name](v, c)
    assert v.sum().item() == 9


def test_numbers_on_the_host_may_be_mixed_in():
    v = torch.ones(3, device="virtual")
    assert (v * torch.tensor(2.0)).sum().item() == 6
    assert (torch.tensor(2.0) * v).device == v.device
    assert torch.where(v > 0, v, torch.tensor(0.0)).sum().item() == 3
    assert v.fill_(torch.tensor(4.0)).sum().item() == 12


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _random_layout(rng: random.Random, base: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A tensor of that shape and of base's dtype and device, in some way or other not simply contiguous."""
    choice = rng.choice(["plain", "transposed", "strided", "sliced", "offset", "channels", "conj", "neg"])
    make = lambda s: torch.empty(s, dtype=base.dtype, device=base.device)  # noqa: E731
    if choice == "transposed" and len(shape) > 1:
        out = make(shape[::-1]).permute(*reversed(range(len(shape))))
    elif choice == "strided" and shape:
        out = make([*shape[:-1], 2 * shape[-1]])[..., ::2]
    elif choice == "sliced" and shape:
        out = make([shape[0] + 3, *shape[1:]])[2 : 2 + shape[0]]
    elif choice == "offset":
        out = make([1 + torch.Size(shape).numel()])[1:].view(shape)
    elif choice == "channels" and len(shape) == 4:
        out = make(shape).to(memory_format=torch.channels_last)
    elif choice == "conj" and base.dtype.is_complex:
        out = make(shape).conj()
    elif choice == "neg" and base.dtype.is_complex and shape:
        out = torch.empty(shape, dtype=torch.complex64, device=base.device).conj().imag
    else:
        out = make(shape)
    return out.copy_(base) if out.dtype == base.dtype else out.copy_(base.real)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pin", [False, True])
def test_copies_of_any_shape_stride_and_dtype(same, seed, pin):
    """Each way and within the device, from expanded, strided, conjugated... tensors into others."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 4))]
        source, target = rng.choice(DTYPES), rng.choice(DTYPES)
        values = torch.randint(0, 2, shape).to(source)
        target_values = torch.zeros(shape, dtype=target)
        if source.is_complex and not target.is_complex:
            target = source
            target_values = target_values.to(target)
        host = _random_layout(rng, values, shape)
        if pin and host.is_contiguous() and not host.is_conj() and not host.is_neg():
            host = host.pin_memory()
        non_blocking = rng.random() < 0.5
        device_source = host.to("virtual", non_blocking=non_blocking)
        same(device_source, host)
        device_target = _random_layout(rng, target_values.to("virtual"), shape)
        if device_target.dtype != target:  # a negated view is of real numbers
            host, device_source = (t.real if t.is_complex() else t for t in (host, device_source))
        expected = torch.zeros(shape, dtype=device_target.dtype).copy_(host)
        if rng.random() < 0.3 and shape and shape[0] > 0:
            host, device_source = (t[:1].expand(shape) for t in (host, device_source))
            expected = torch.zeros(shape, dtype=device_target.dtype).copy_(host)
        device_target.copy_(host, non_blocking=non_blocking)  # down
        same(device_target, expected)
        device_target.zero_().copy_(device_source)  # within
        same(device_target, expected)
        host_target = _random_layout(rng, torch.zeros(shape, dtype=device_target.dtype), shape)
        if host_target.dtype != device_target.dtype:
            host, device_source = (t.real if t.is_complex() else t for t in (host, device_source))
        host_target.copy_(device_source)  # up
        same(host_target, torch.zeros(shape, dtype=host_target.dtype).copy_(host))
        far = torch.empty(shape, dtype=device_target.dtype, device="virtual:1").copy_(device_source)  # across
        same(far, expected)


def test_moving_a_module_keeps_its_parameters_and_their_ties():
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    parameter = model["head"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for device in ("virtual", "cpu", "virtual:1", "virtual:0"):
        model.to(device)
        assert model["head"].weight is model["embedding"].weight is parameter
        assert parameter.device == torch.zeros(1, device=device).device
        model["head"](model["embedding"](torch.tensor([1, 2], device=device))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(list(model.parameters())) == 1


def test_everyday_python(same, tmp_path):
    x = torch.arange(6.0, device="virtual").view(2, 3)
    assert repr(x) == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='virtual:0')"
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert float(x[1, 2]) == 5.0
    assert bool(x[0, 1])
    assert len(x) == 2
    assert [int(row.sum()) for row in x] == [3, 12]
    assert x.is_virtual
    assert torch.ones(2).virtual().is_virtual
    assert nn.Linear(2, 2).virtual().weight.is_virtual
    assert x.device == torch.device("virtual", 0)
    assert torch.accelerator.current_accelerator().type == "virtual"
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    deep = copy.deepcopy({"a": x, "b": x.t()})
    assert deep["a"].data_ptr() == deep["b"].data_ptr() != x.data_ptr()
    same(deep["b"], x.t())
    same(pickle.loads(pickle.dumps(x)), x)
    model, other = nn.Linear(3, 3).to("virtual"), nn.Linear(3, 3).to("virtual")
    file = io.BytesIO()
    torch.save({"x": x, "state": model.state_dict()}, file)
    for location in (None, "cpu", "virtual:1"):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert str(loaded["x"].device) == (location or "virtual:0")
        same(loaded["x"], x)
        other.load_state_dict(loaded["state"])
        same(other.weight, model.weight)
    del deep, loaded


def test_sparse_tensors_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"[Ss]parse"):
        torch.eye(3, device="virtual").to_sparse() @ torch.eye(3, device="virtual")
    assert torch_virtual.race_count() == 0


def test_an_emptied_tensor_is_refused_not_followed():
    x = torch.zeros(3, device="virtual")
    x.untyped_storage().resize_(0)
    for use in (lambda: x + 1, lambda: x.cpu(), lambda: x.copy_(torch.zeros(3)), lambda: torch_virtual.label(x, "x")):
        with pytest.raises(RuntimeError, match="its storage was emptied"):
            use()
